"""Rules across the fields of a config, before anything is loaded. Ranges are declared on the fields
themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from gruppo.config.schema import Config, EngineConfig, LoraConfig, Stage
from gruppo.config.stages import highest, learns_from_samples, peak_lr, stage_path, values_of
from gruppo.tasksets import is_taskset
from gruppo.types import GruppoError

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def check_config(config: Config) -> None:
    """Refuse what cannot run whatever the model is. ``options.check_ranges`` comes first."""
    check_folder_name(config)
    if problem := next(_refusals(config), None):
        raise problem


def check_folder_name(config: Config) -> None:
    """Refuse control characters in the run's folder: each line of it would be one of a Slurm
    script."""
    for name, value in (("name", config.name), ("runs_dir", config.runs_dir)):
        if CONTROLS.search(value):
            raise GruppoError(
                f"{name}={value!r} has a control character; it needs to be one line of text",
                option=name,
                advice="again",
            )


def group_sizes(config: Config) -> list[int]:
    """All group sizes that the stages reach."""
    default = (
        [config.rollout.group_size]
        if any(stage.group_size is None for stage in config.plan)
        else []
    )
    # A schedule may pass through fractions of a sample.
    return [round(size) for size in values_of(config, "group_size")] + default


def smallest_group(config: Config) -> int:
    return config.rollout.first_samples or min(group_sizes(config))


def _refusals(config: Config) -> Iterator[GruppoError]:
    """Messages of the rules that a config breaks, the most basic first: the later ones may follow
    from them."""
    if not config.model:
        yield GruppoError(
            "no model was given; it needs a hub id, a folder, a bundled model, or unet for images",
            advice="Set $model",
        )
    if not config.data:
        yield GruppoError(
            """no data was given; it needs a .jsonl file, a data set, arithmetic, a task, digits or
                    images:FOLDER""",
            advice="Set $data",
        )
    if not (
        config.reward
        or config.environment.kind
        or is_taskset(config.data)
        or not learns_from_samples(config)
    ):
        yield GruppoError(
            "no reward was given; it needs a built-in name or file.py:function",
            advice="Set $reward",
        )
    # Stages do not inherit: a value of ``stage`` would be in none of them.
    if config.stages and config.stage != Stage():
        yield GruppoError(
            "both stage and stages were set; with several stages, each has its own settings",
            advice=f"Set $stages.{len(config.stages) - 1}.kl_coef and the like instead of "
            f"$stage.kl_coef",
        )
    yield from _stage_rules(config)
    yield from _batch_rules(config)
    yield from _section_rules(config)
    if not config.objective.has_critic:
        return
    critic, peaks = config.critic, [peak_lr(config, index) for index in range(len(config.plan))]
    lowest = peaks.index(
        min(peaks)
    )  # learning rates are not negative: the stage of 0, if there is one
    where = "optim" if config.plan[lowest].lr is None else stage_path(config, lowest)
    if critic.kind == "shared" and critic.model:
        yield GruppoError(
            f"""critic.model={critic.model!r} is a separate network, but critic.kind='shared' uses
                    the policy's""",
            option="critic.kind",
            advice="separate, or leave $critic.model out",
        )
    if critic.lr and 0 in peaks:
        yield GruppoError(
            f"critic.lr={critic.lr:g} is relative to {where}.lr=0 and would be 0 too",
            option=f"{where}.lr",
            advice="above 0; $critic.warmup_steps trains the critic alone",
        )
    if critic.lr == 0 and any(peaks):
        yield GruppoError(
            "critic.lr=0 never trains the critic, whose values stay 0",
            option="critic.lr",
            advice=f"above 0, or leave it out for the policy's {max(peaks):g}",
        )
    if not highest(config, "value_coef"):
        yield GruppoError(
            "stage.value_coef=0 never trains the critic, whose values stay 0",
            option="stage.value_coef",
            advice="above 0, or a baseline without a critic",
        )
    if critic.warmup_steps >= config.steps:
        yield GruppoError(
            f"""critic.warmup_steps={critic.warmup_steps} leaves the policy none of the
                    {config.steps} steps to learn in""",
            advice="Lower $critic.warmup_steps or raise $steps",
        )


def _stage_rules(config: Config) -> Iterator[GruppoError]:
    """How long stages last, what ends them, that each learns something, and the difficulty of their
    prompts."""
    plan, evaluation = config.plan, config.evaluation
    for index, stage in enumerate(plan):
        where, names = stage_path(config, index), ("rl_coef", "sup_coef", "kl_coef", "entropy_coef")
        # Not value_coef, which trains the critic alone, nor cons_coef, which needs what the others
        # sample.
        coefs = [value for name in names for value in stage.schedules[name].values]
        cons = (
            "; cons_coef applies only to what is sampled or demonstrated" if stage.cons_coef else ""
        )
        if index + 1 < len(plan) and not stage.steps:
            yield GruppoError(
                f"{where}.steps=0 lasts to the end, but another stage follows",
                option=f"{where}.steps",
                advice="to its maximum length",
            )
        if stage.until.strip().startswith("eval/") and not (
            evaluation.every and evaluation.prompts
        ):
            yield GruppoError(
                f"""{where}.until={stage.until!r} waits for an evaluation, but evaluations only run
                    before and after training""",
                option="evaluation.every",
                advice="to the steps between evaluations",
            )
        if not any(value > 0 for value in coefs):
            yield GruppoError(
                f"""{where} learns nothing: its rl_coef, sup_coef, kl_coef and entropy_coef are all
                    0{cons}""",
                option=f"{where}.rl_coef",
                advice="1",
            )
    # Of the last stage, as is ``where`` after the loop: without steps of its own it lasts to the
    # end.
    steps, is_open = sum(stage.steps for stage in plan), not plan[-1].steps
    column, is_used = (
        config.prompts.difficulty_column,
        any(v < 1 for v in values_of(config, "difficulty")),
    )
    if is_open and steps >= config.steps:
        yield GruppoError(
            f"""the stages before the last have {steps} steps and the run {config.steps}, which
                    leaves the last none""",
            option="steps",
            advice=f"above {steps}, or fewer in ${stage_path(config, 0)}.steps",
        )
    if not is_open and steps != config.steps:
        yield GruppoError(
            f"the stages have {steps} steps and the run {config.steps}",
            option="steps",
            advice=f"{steps}, or ${where}.steps 0 for a last stage that lasts to the end",
        )
    if is_used and not column:
        yield GruppoError(
            """a stage samples the easiest prompts (its difficulty is below 1), but no column says
                    which they are""",
            option="prompts.difficulty_column",
            advice="to a column of numbers, higher is harder",
        )
    if column and not is_used:
        yield GruppoError(
            f"""prompts.difficulty_column={column!r} has no effect while every stage's difficulty is
                    1""",
            advice="Set $stage.difficulty, such as linear:0.2,1, or leave "
            "$prompts.difficulty_column out",
        )


def _batch_rules(config: Config) -> Iterator[GruppoError]:
    """Group sizes, steps of a single row, and how a batch is split into updates."""
    rollout, optim, sizes = config.rollout, config.optim, group_sizes(config)
    first, rows = rollout.first_samples, rollout.prompts * smallest_group(config)
    if "" in rollout.stop:
        yield GruppoError(
            "rollout.stop has an empty string, which ends every completion at once. Leave it out."
        )
    if first and not 2 <= first < min(sizes):
        yield GruppoError(
            f"""rollout.first_samples={first} is out of range; it needs at least 2, for a spread,
                and fewer than the {min(sizes)} samples of rollout.group_size, to leave some to grow
                by""",
            option="rollout.first_samples",
            advice="2",
        )
    if rollout.refill_rounds and smallest_group(config) < 2:
        yield GruppoError(
            f"""rollout.refill_rounds={rollout.refill_rounds} replaces groups of equal rewards,
                which a group of one always has""",
            option="rollout.group_size",
            advice="2 or more, or $rollout.refill_rounds 0",
        )
    # Statistics over a batch compare its rows with each other, so there have to be two.
    for name, over_batch in (
        ("baseline", "batch_mean"),
        ("scale", "batch"),
        ("combine", "normalize_then_sum"),
    ):
        if rows == 1 and getattr(config.objective, name) == over_batch:
            yield GruppoError(
                f"""{name}={over_batch!r} compares the rows of a step, but rollout.prompts=1 with
                    rollout.group_size=1 has one, whose advantage is always 0""",
                option="rollout.prompts",
                advice="2 or more",
            )
    if optim.minibatches > rows:
        yield GruppoError(
            f"optim.minibatches={optim.minibatches} is more than the {rows} rows of a step",
            option="optim.minibatches",
            advice=f"{rows} or less",
        )
    for name, value in (
        ("optim.stop_kl", optim.stop_kl),
        ("objective.kl_mask", config.objective.kl_mask),
    ):
        if value and config.updates_per_batch == 1:
            yield GruppoError(
                f"""{name}={value:g} has no effect: a batch has one update, before which the KL to
                    the old policy is 0""",
                option="optim.epochs",
                advice=f"2 or more, or ${name} 0",
            )


def _section_rules(config: Config) -> Iterator[GruppoError]:
    """Sections that contradict themselves, or that were set although nothing reads them."""
    lora, back_off, supervised, optim = (
        config.lora,
        config.back_off,
        config.supervised,
        config.optim,
    )
    default = Config()  # a section that equals its default was not set, or to no effect
    is_set = {
        field.name
        for field in fields(Config)
        if getattr(config, field.name) != getattr(default, field.name)
    }
    demonstrates = highest(config, "sup_coef") > 0
    engine = config.engine
    of_any_engine = EngineConfig(engine.kind, lag=engine.lag, replay=engine.replay)
    if lora.adapter and lora != LoraConfig(adapter=lora.adapter, load_in_4bit=lora.load_in_4bit):
        yield GruppoError(
            f"lora.adapter={lora.adapter!r} has its own rank, alpha and targets",
            advice="Leave the other $lora options out, or leave $lora.adapter out for a new adapter",
        )
    if lora.load_in_4bit and not lora.rank and not lora.adapter:
        yield GruppoError(
            """lora.load_in_4bit quantizes the base of an adapter, and lora.rank=0 trains all
                    weights, which 4 bits do not allow""",
            option="lora.rank",
            advice="16, or leave $lora.load_in_4bit out",
        )
    if lora.load_in_4bit and config.engine.kind == "vllm":
        yield GruppoError("""lora.load_in_4bit: the servers of engine.kind='vllm' compute with the
            base as it is in its files, and would sample from another model. Leave one of the two
            out.""")
    if "lora" in is_set and not lora.rank and not lora.adapter:
        yield GruppoError(
            """lora.alpha or lora.targets was set, but lora.rank=0 trains all weights without an
                    adapter""",
            option="lora.rank",
            advice="16, or leave the $lora options out",
        )
    if config.distributed.shard != "none" and config.reference.place != "device":
        yield GruppoError(f"""reference.place={config.reference.place!r} keeps all of the
            reference's weights in one place, and distributed.shard={config.distributed.shard!r}
            shards them over ranks. Leave one of the two out.""")
    if config.distributed.offload_params and config.distributed.shard == "none":
        yield GruppoError(
            """distributed.offload_params keeps shards on the CPU, and distributed.shard='none'
                    makes none""",
            option="distributed.shard",
            advice="fsdp on two or more ranks",
        )
    if back_off.metric.startswith("eval/") and not (
        config.evaluation.every and config.evaluation.prompts
    ):
        yield GruppoError(
            f"back_off.metric={back_off.metric!r} is only measured before and after training",
            option="evaluation.every",
            advice="to the steps between evaluations",
        )
    if supervised.template and supervised.column:
        yield GruppoError(f"""supervised.template={supervised.template!r} names its columns itself,
            so supervised.column={supervised.column!r} has no effect. Leave one of them out.""")
    if demonstrates and optim.minibatches > supervised.batch:
        yield GruppoError(
            f"""optim.minibatches={optim.minibatches} is more than
                    supervised.batch={supervised.batch}, which leaves some updates without a
                    demonstration""",
            option="supervised.batch",
            advice="to that or more",
        )
    if "supervised" in is_set and not demonstrates:
        yield GruppoError(
            "demonstrations were set, but no stage's sup_coef is above 0",
            option="stages",
            advice="supervised:50,full or $stage.sup_coef 1, or leave the $supervised options out",
        )
    if "back_off" in is_set and not back_off.metric:
        yield GruppoError(
            "back_off was set without a metric",
            option="back_off.metric",
            advice="eval/reward_mean, or leave the $back_off options out",
        )
    if "environment" in is_set and not config.environment.names:
        yield GruppoError(
            "environment options were set without an environment",
            option="environment",
            advice="""file.py:Class, $environment.tools or $environment.reply file.py:function, or
                leave the $environment options out""",
        )
    if config.environment.kind and config.environment.reply:
        yield GruppoError(f"""environment.reply={config.environment.reply!r} replies to the policy,
            and so does step of environment.kind={config.environment.kind!r}. Leave one of the two
            out.""")
    if config.engine.kind == "vllm" and not any(config.engine.urls):
        yield GruppoError(
            "engine.kind='vllm' was given no server",
            advice="Start one with gruppo serve MODEL, and set $engine.urls http://127.0.0.1:8000",
        )
    if engine.colocated and engine.lag:
        yield GruppoError(f"""engine.lag={engine.lag} samples while the trainer updates, and servers
            with engine.colocated sleep then. Leave one of the two out.""")
    if engine.lag and not engine.kind and not engine.replay:
        yield GruppoError(
            f"""engine.lag={engine.lag} needs an engine that samples while the trainer learns, and
                    without one the policy itself samples""",
            option="engine",
            advice="vllm, or $engine.lag 0",
        )
    if engine.replay and engine.kind:
        yield GruppoError(f"""engine.replay={engine.replay!r} trains without an engine, and
            engine.kind={engine.kind!r} is one. Leave one of the two out.""")
    if (
        engine.lag
        and config.objective.surrogate == "reinforce"
        and config.objective.correction == "none"
    ):
        yield GruppoError(
            f"""objective.surrogate='reinforce' has no correction for data of older weights, which
                    come with engine.lag={engine.lag}""",
            option="objective.correction",
            advice="truncate, or $objective.surrogate clip",
        )
    # With lag, prompts are drawn steps ahead, before the difficulty of their step is known.
    if (engine.lag or engine.replay) and config.prompts.difficulty_column:
        yield GruppoError("""prompts.difficulty_column chooses the prompts of each step, and with
            engine.lag they are drawn before. Leave one of the two out.""")
    if "engine" in is_set and engine.kind != "vllm" and engine != of_any_engine:
        yield GruppoError(
            "engine.urls and the like are for vLLM servers",
            option="engine",
            advice="vllm, or leave the $engine options out",
        )
    if "critic" in is_set and not config.objective.has_critic:
        yield GruppoError(
            f"a critic was set, but objective.baseline={config.objective.baseline!r} uses none",
            option="objective",
            advice="ppo, or leave the $critic options out",
        )
