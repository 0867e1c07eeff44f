"""Rules across the fields of a config, before anything is loaded. Ranges are declared on the fields
themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gruppo.config.options import options
from gruppo.config.schema import Config
from gruppo.config.stages import highest, learns_from_samples, peak_lr, stage_path, values_of
from gruppo.tasksets import is_taskset
from gruppo.types import GruppoError

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
ONE_OF_TWO = "Leave one of the two out"
Rule = tuple[object, str, str, str]
"""Whether it is broken, the problem, the option to set (or none), and its value or the advice."""


def check_config(config: Config) -> None:
    """Refuse what cannot run whatever the model is."""
    check_folder_name(config)
    for rules in (_rules, _stage_rules, _batch_rules, _section_rules, _engine_rules, _critic_rules):
        for is_broken, problem, option, advice in rules(config):
            if is_broken:
                raise GruppoError(problem, option=option, advice=advice)


def check_folder_name(config: Config) -> None:
    """Refuse control characters in the run's folder: each line of it would be one of a Slurm
    script."""
    for name in ("name", "runs_dir"):
        value = getattr(config, name)
        if CONTROLS.search(value):
            problem = f"{name}={value!r} has a control character; it needs to be one line of text"
            raise GruppoError(problem, option=name, advice="again")


def group_sizes(config: Config) -> list[int]:
    """All group sizes that the stages reach."""
    # A schedule may pass through fractions of a sample.
    sizes = [round(size) for size in values_of(config, "group_size")]
    if any(stage.group_size is None for stage in config.plan):
        sizes.append(config.rollout.group_size)
    return sizes


def smallest_group(config: Config) -> int:
    return config.rollout.first_samples or min(group_sizes(config))


def unread(config: Config) -> list[str]:
    """Options that were set although nothing reads them."""
    reference, has_lora = config.reference, config.lora.rank > 0 or bool(config.lora.adapter)
    has_reader = {
        "back_off.": config.back_off.metric,
        "critic.": config.objective.has_critic,
        "critic.model": config.critic.kind == "separate",
        "distributed.offload_params": config.distributed.shard != "none",
        "engine.colocated engine.max_mismatch engine.publish_dir engine.timeout_s engine.urls": (
            config.engine.kind == "vllm"
        ),
        "environment.": config.environment.names,
        "lora.": has_lora,
        "lora.alpha lora.rank lora.targets": not config.lora.adapter,
        "objective.kl_mask optim.stop_kl": config.updates_per_batch > 1,
        "reference.": max(highest(config, "kl_coef"), highest(config, "cons_coef")) > 0,
        "reference.kind": reference.update_every <= config.steps,
        "reference.place": not has_lora,
        "reference.update_every reference.update_rate reference.watch_prompts": reference.is_mixed,
        "restoration.consistency": highest(config, "cons_coef") > 0,
        "rollout.refill_rounds": smallest_group(config) > 1,
        "stage.": not config.stages,
        "supervised.": highest(config, "sup_coef") > 0,
        "supervised.column": not config.supervised.template,
    }
    without = [
        name for names, is_read in has_reader.items() if not is_read for name in names.split()
    ]
    return [
        name
        for name, option in options(config).items()
        if option.value != option.default and name.startswith(tuple(without))
    ]


# The most basic first: the later ones may follow from them.


def _rules(config: Config) -> Iterator[Rule]:
    problem = "no model was given; it needs a hub id, a folder, a bundled model, or unet for images"
    yield not config.model, problem, "", "Set $model"
    problem = (
        "no data was given; it needs a .jsonl file, a data set, arithmetic, a task, digits or "
        "images:FOLDER"
    )
    yield not config.data, problem, "", "Set $data"
    has_reward = config.reward or config.environment.kind or is_taskset(config.data)
    problem = "no reward was given; it needs a built-in name or file.py:function"
    yield not has_reward and learns_from_samples(config), problem, "", "Set $reward"


def _stage_rules(config: Config) -> Iterator[Rule]:
    """How long stages last, what ends them, and that each learns something."""
    plan = config.plan
    for index, stage in enumerate(plan):
        where = stage_path(config, index)
        is_last = index + 1 == len(plan)
        problem = f"{where}.steps=0 lasts to the end, but another stage follows"
        yield not is_last and not stage.steps, problem, f"{where}.steps", "to its maximum length"
        yield _needs_evaluations(config, f"{where}.until", stage.until)
        # Not value_coef, which trains the critic alone, nor cons_coef, which needs what the others
        # sample.
        names = ("rl_coef", "sup_coef", "kl_coef", "entropy_coef")
        learns = any(max(stage.schedules[name].values) > 0 for name in names)
        problem = f"{where} learns nothing: {', '.join(names)} are all 0"
        yield not learns, problem, f"{where}.rl_coef", "1"
    steps = sum(stage.steps for stage in plan)
    is_wrong, advice = steps >= config.steps, f"above {steps}, of which the last stage needs some"
    if plan[-1].steps:
        is_wrong = steps != config.steps
        advice = f"{steps}, or ${where}.steps 0 for a last stage that lasts to the end"
    yield is_wrong, f"the stages have {steps} steps and the run {config.steps}", "steps", advice


def _needs_evaluations(config: Config, name: str, metric: str) -> Rule:
    evaluation = config.evaluation
    is_evaluated = evaluation.every and evaluation.prompts
    problem = f"{name}={metric!r} is only measured before and after training"
    is_broken = metric.strip().startswith("eval/") and not is_evaluated
    return is_broken, problem, "evaluation.every", "to the steps between evaluations"


def _batch_rules(config: Config) -> Iterator[Rule]:
    """Group sizes, steps of a single row, and how a batch is split into updates."""
    rollout, minibatches = config.rollout, config.optim.minibatches
    smallest, first = smallest_group(config), rollout.first_samples
    largest = min(group_sizes(config))
    rows = rollout.prompts * smallest
    problem = "rollout.stop has an empty string, which ends every completion at once"
    yield "" in rollout.stop, problem, "", "Leave it out"
    problem = (
        f"rollout.first_samples={first} is out of range; it needs at least 2, for a spread, and "
        f"fewer than the {largest} samples of rollout.group_size, to leave some to grow by"
    )
    yield first and not 2 <= first < largest, problem, "rollout.first_samples", "2"
    # Statistics over a batch compare its rows with each other, so there have to be two.
    over_batch = {"baseline": "batch_mean", "scale": "batch", "combine": "normalize_then_sum"}
    for name, value in over_batch.items():
        problem = (
            f"{name}={value!r} compares the rows of a step, but rollout.prompts=1 with "
            f"rollout.group_size=1 has one, whose advantage is always 0"
        )
        is_broken = rows == 1 and getattr(config.objective, name) == value
        yield is_broken, problem, "rollout.prompts", "2 or more"
    problem = f"optim.minibatches={minibatches} is more than the {rows} rows of a step"
    yield minibatches > rows, problem, "optim.minibatches", f"{rows} or less"
    batch = config.supervised.batch
    problem = f"optim.minibatches={minibatches} is more than supervised.batch={batch}"
    has_too_few = highest(config, "sup_coef") > 0 and minibatches > batch
    yield has_too_few, problem, "supervised.batch", "to that or more"


def _section_rules(config: Config) -> Iterator[Rule]:
    """Sections that contradict themselves or each other."""
    lora, environment = config.lora, config.environment
    is_sharded = config.distributed.shard != "none"
    yield (
        lora.load_in_4bit and not lora.rank and not lora.adapter,
        "lora.load_in_4bit quantizes the base of an adapter, and lora.rank=0 trains all weights",
        "lora.rank",
        "16, or leave $lora.load_in_4bit out",
    )
    problem = "lora.load_in_4bit would train another model than engine.kind='vllm' samples from"
    yield lora.load_in_4bit and config.engine.kind == "vllm", problem, "", ONE_OF_TWO
    problem = (
        f"reference.place={config.reference.place!r} keeps all of the reference's weights in one "
        f"place, and distributed.shard={config.distributed.shard!r} shards them over ranks"
    )
    yield is_sharded and config.reference.place != "device", problem, "", ONE_OF_TWO
    yield _needs_evaluations(config, "back_off.metric", config.back_off.metric)
    problem = f"environment.kind={environment.kind!r} replies to the policy, and so does reply"
    yield environment.kind and environment.reply, problem, "", ONE_OF_TWO


def _engine_rules(config: Config) -> Iterator[Rule]:
    engine = config.engine
    problem = "engine.kind='vllm' was given no server"
    advice = "Start one with gruppo serve MODEL, and set $engine.urls http://127.0.0.1:8000"
    yield engine.kind == "vllm" and not any(engine.urls), problem, "", advice
    problem = (
        f"engine.lag={engine.lag} samples while the trainer updates, and servers with "
        f"engine.colocated sleep then"
    )
    yield engine.colocated and engine.lag, problem, "", ONE_OF_TWO
    problem = f"engine.lag={engine.lag} needs an engine that samples while the trainer learns"
    has_none = engine.lag and not engine.kind and not engine.replay
    yield has_none, problem, "engine", "vllm, or $engine.lag 0"
    problem = f"engine.replay={engine.replay!r} trains without engine.kind={engine.kind!r}"
    yield engine.replay and engine.kind, problem, "", ONE_OF_TWO
    objective = config.objective
    is_uncorrected = objective.surrogate == "reinforce" and objective.correction == "none"
    problem = (
        f"objective.surrogate='reinforce' has no correction for data of older weights, which come "
        f"with engine.lag={engine.lag}"
    )
    advice = "truncate, or $objective.surrogate clip"
    yield engine.lag and is_uncorrected, problem, "objective.correction", advice


def _critic_rules(config: Config) -> Iterator[Rule]:
    if not config.objective.has_critic:
        return
    critic = config.critic
    peaks = [peak_lr(config, index) for index in range(len(config.plan))]
    # critic.lr is relative to the policy's learning rate.
    problem = "the critic is never trained: its lr, the policy's or stage.value_coef is 0"
    rates = [] if critic.lr is None else [critic.lr, *peaks]
    is_idle = 0 in rates and any(rates)
    advice = "Set them above 0; $critic.warmup_steps trains the critic alone"
    yield is_idle or not highest(config, "value_coef"), problem, "", advice
    problem = f"critic.warmup_steps={critic.warmup_steps} leaves the policy none of the steps"
    yield critic.warmup_steps >= config.steps, problem, "", "Set fewer $critic.warmup_steps"
