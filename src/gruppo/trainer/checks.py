"""What a config asks for and cannot have: refused before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter

from gruppo.config.schema import (
    BackOffConfig,
    Config,
    CriticConfig,
    EnvironmentConfig,
    LoraConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.config.stages import SCHEDULED, highest, learns_from_samples, peak_lr, values_of, where_of
from gruppo.core.schedules import parse
from gruppo.protocols import Modality
from gruppo.tracking import integrations
from gruppo.trainer.demonstrations import Answers
from gruppo.trainer.references import check_reference
from gruppo.trainer.stages import StageSchedule, gate_of
from gruppo.types import GruppoError

NEUTRAL = Modality()
AT_LEAST: Mapping[str, float] = {
    "steps": 1,
    "show_samples_every": 0,
    "rollout.prompts": 1,
    "rollout.group_size": 1,
    "rollout.refill_rounds": 0,
    "rollout.first_samples": 0,
    "rollout.max_group_size": 0,
    "diffusion.steps": 2,
    "diffusion.width": 8,
    "optim.lr": 0,
    "optim.warmup_steps": 0,
    "optim.final_lr_frac": 0,
    "optim.weight_decay": 0,
    "optim.max_grad_norm": 0,
    "optim.epochs": 1,
    "optim.minibatches": 1,
    "optim.token_budget": 0,
    "optim.stop_kl": 0,
    "supervised.batch": 1,
    "critic.lr": 0,
    "critic.warmup_steps": 0,
    "evaluation.prompts": 0,
    "evaluation.every": 0,
    "evaluation.along_steps": 0,
    "saving.every": 0,
    "saving.keep": 1,
    "environment.turns": 1,
    "environment.max_reply_tokens": 1,
}
"""Lowest values; each needs to be finite. None, for what another field stands in, is none of them."""

SCHEDULE_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(SCHEDULED, (0.0, math.inf)),
    "group_size": (1.0, math.inf),
    "difficulty": (0.0, 1.0),
}
"""Lowest and highest values of what a stage may change."""


def check(config: Config, modality: Modality = NEUTRAL) -> None:
    """Refuse what cannot run, before anything is loaded."""
    check_ranges(config)
    check_given(config)
    integrations.check(config.track)
    _ = config.rollout.sampling
    check_stages(config)
    modality.validate(config)
    check_growth(config)
    config.objective.check(
        group_size=smallest_group(config),
        updates_per_row=config.updates_per_batch,
        kl_coef=highest(config, "kl_coef"),
        max_length=config.rollout.max_new_tokens if modality.has_lengths else None,
        is_gaussian=modality.is_gaussian,
        has_positions=config.objective.credit == "position",  # known once the rewards are opened
    )
    check_lora(config.lora)
    check_back_off(config)
    check_supervised(config)
    check_reference(config, modality)
    check_updates(config)
    check_kl_mask(config)
    check_single_row(config)
    check_refill(config)
    check_difficulty(config)
    check_environment(config)
    if config.objective.has_critic:
        check_critic(config)
    elif config.critic != CriticConfig():
        raise GruppoError(
            f"a critic was set, but objective.baseline={config.objective.baseline!r} asks none for values. Set "
            "--objective ppo, or leave the --critic options out."
        )


def check_ranges(config: Config) -> None:
    """Each number by itself."""
    for name, lowest in AT_LEAST.items():
        value = attrgetter(name)(config)
        if value is not None and not lowest <= value < math.inf:
            raise GruppoError(f"{name}={value} is out of range; it needs at least {lowest}. Set {option(name)}.")
    optim, temperature = config.optim, config.rollout.temperature
    if not 0 < optim.eps < math.inf:
        raise GruppoError(f"optim.eps={optim.eps} is out of range; it needs to be above 0. Set --optim.eps 1e-8.")
    if optim.final_lr_frac > 1:
        raise GruppoError(
            f"optim.final_lr_frac={optim.final_lr_frac} lets the decay raise lr; it needs 0 to 1. Set "
            "--optim.final-lr-frac 0."
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise GruppoError(f"optim.betas={optim.betas}: each needs to be in [0, 1). Set --optim.betas 0.9 0.999.")
    if temperature <= 0:
        raise GruppoError(
            f"rollout.temperature={temperature:g} gives nothing to learn from (0 is greedy). Set "
            "--rollout.temperature 1.0."
        )


def check_stages(config: Config) -> None:
    """The plan of the run: what each stage sets, and how long it lasts."""
    StageSchedule(config)  # refuses a schedule, a controller or a gate that is not understood
    if config.stages and config.stage != Stage():
        raise GruppoError(
            "both stage and stages were set; where a run has several stages, each says for itself what it sets. Set "
            f"--stages.{len(config.stages) - 1}.kl-coef and the like in place of --stage.kl-coef."
        )
    for name in SCHEDULED:
        check_scheduled(config, name)
    for index, stage in enumerate(config.plan):
        check_stage(config, stage, index)
    planned, is_open = sum(stage.steps for stage in config.plan), not config.plan[-1].steps
    if is_open and planned >= config.steps:
        raise GruppoError(
            f"the stages before the last have {planned} steps and the run {config.steps}, which leaves the last none. "
            f"Set --steps above {planned}, or fewer in {option(where_of(config, 0))}.steps."
        )
    if not is_open and planned != config.steps:
        raise GruppoError(
            f"the stages have {planned} steps and the run {config.steps}. Set --steps {planned}, or "
            f"--{where_of(config, len(config.plan) - 1)}.steps 0 for a last stage that lasts to the end."
        )


def check_scheduled(config: Config, name: str) -> None:
    """Every value of a field's schedules, as far as they are known before."""
    lowest, highest_allowed = SCHEDULE_RANGES[name]
    for index, stage in enumerate(config.plan):
        given, where = getattr(stage, name), f"{where_of(config, index)}.{name}"
        for value in () if given is None else parse(given, where).values:
            if not lowest <= value <= highest_allowed or not math.isfinite(value):
                needs = f"at least {lowest:g}" if highest_allowed == math.inf else f"{lowest:g} to {highest_allowed:g}"
                said = f" reaches {value:g}, which" if isinstance(given, str) else ""
                raise GruppoError(f"{where}={given}{said} is out of range; it needs {needs}. Set {option(where)}.")
            if name == "temperature" and value == 0:
                raise GruppoError(
                    f"{where}={given} gives nothing to learn from at 0 (greedy). Set {option(where)} above 0."
                )


def check_stage(config: Config, stage: Stage, index: int) -> None:
    where, is_last = where_of(config, index), index + 1 == len(config.plan)
    for name in ("steps", "warmup_steps"):
        if getattr(stage, name) < 0:
            raise GruppoError(f"{where}.{name}={getattr(stage, name)} is out of range; it needs at least 0.")
    if not is_last and not stage.steps:
        raise GruppoError(
            f"{where}.steps=0 lasts to the end, and another stage follows. Set {option(where)}.steps to how long it "
            "may last at most."
        )
    if is_last and stage.until:
        raise GruppoError(
            f"{where}.until={stage.until!r} ends the last stage, and nothing follows. Leave it out, or add a stage."
        )
    gate = gate_of(stage, where)
    if gate and gate.metric.startswith("eval/") and not (config.evaluation.every and config.evaluation.prompts):
        raise GruppoError(
            f"{where}.until={stage.until!r} waits for an evaluation, and there is one before and one after training "
            "alone. Set --evaluation.every to the steps between evaluations."
        )
    coefs = [parse(getattr(stage, f"{name}_coef"), where).values for name in ("rl", "sup", "kl", "entropy")]
    held = ". Its cons_coef is of what is sampled or demonstrated" if stage.cons_coef else ""
    if not any(value > 0 for values in coefs for value in values):
        raise GruppoError(
            f"{where} learns nothing: its rl_coef, sup_coef, kl_coef and entropy_coef are all 0{held}. Set "
            f"{option(where)}.rl-coef 1."
        )


def check_given(config: Config) -> None:
    """What has no default."""
    if not config.model:
        raise GruppoError(
            "no model was given; it needs a hub id, a folder, a bundled model, or unet for pictures. Set --model."
        )
    if not config.data:
        raise GruppoError(
            "no data was given; it needs a .jsonl file, a data set, arithmetic, a task, digits or images:FOLDER. Set "
            "--data."
        )
    if not config.reward and learns_from_samples(config):
        raise GruppoError("no reward was given; a built-in name or file.py:function is needed. Set --reward.")


def check_updates(config: Config) -> None:
    """How a batch is cut, and when its updates end."""
    optim, rows = config.optim, rows_of_step(config)
    if optim.minibatches > rows:
        raise GruppoError(
            f"optim.minibatches={optim.minibatches} is more than the {rows} rows of a step. Set --optim.minibatches "
            f"{rows} or less."
        )
    if optim.stop_kl and config.updates_per_batch == 1:
        raise GruppoError(
            f"optim.stop_kl={optim.stop_kl:g} ends nothing: a batch has one update, and before it the KL to the old "
            "policy is 0. Set --optim.epochs 2 or more, or --optim.stop-kl 0."
        )


def check_kl_mask(config: Config) -> None:
    if config.objective.kl_mask and config.updates_per_batch == 1:
        raise GruppoError(
            f"objective.kl_mask={config.objective.kl_mask:g} leaves nothing out: a batch has one update, and before it "
            "the KL to the old policy is 0. Set --optim.epochs 2 or more, or --objective.kl-mask 0."
        )


def check_lora(lora: LoraConfig) -> None:
    if lora.rank < 0:
        raise GruppoError(
            f"lora.rank={lora.rank} is out of range; it needs at least 0, which trains all weights. Set --lora.rank 16."
        )
    if not 0 < lora.alpha < math.inf:
        raise GruppoError(
            f"lora.alpha={lora.alpha} is out of range; it needs to be above 0, for the adapter's output is scaled by "
            "alpha / rank. Set --lora.alpha 32."
        )
    if lora.adapter and lora != LoraConfig(adapter=lora.adapter):
        raise GruppoError(
            f"lora.adapter={lora.adapter!r} has a rank, an alpha and targets of its own. Leave the other --lora "
            "options out, or leave --lora.adapter out for a new adapter."
        )
    if not lora.rank and not lora.adapter and lora != LoraConfig():
        raise GruppoError(
            "lora.alpha or lora.targets was set, but lora.rank=0 trains all weights without an adapter. Set "
            "--lora.rank 16, or leave the --lora options out."
        )


def check_back_off(config: Config) -> None:
    back_off = config.back_off
    if not back_off.metric:
        if back_off != BackOffConfig():
            raise GruppoError(
                "back_off was set, but no metric says when. Set --back-off.metric eval/reward_mean, or leave the "
                "--back-off options out."
            )
        return
    if not 0 <= back_off.drop < math.inf:
        raise GruppoError(f"back_off.drop={back_off.drop} is out of range; it needs at least 0. Set --back-off.drop.")
    if not 0 < back_off.lr_factor <= 1:
        raise GruppoError(
            f"back_off.lr_factor={back_off.lr_factor} is out of range; it needs to be in (0, 1]. Set "
            "--back-off.lr-factor 0.5."
        )
    if back_off.metric.startswith("eval/") and not (config.evaluation.every and config.evaluation.prompts):
        raise GruppoError(
            f"back_off.metric={back_off.metric!r} is measured before and after training alone. Set --evaluation.every "
            "to the steps between evaluations."
        )


def check_supervised(config: Config) -> None:
    """Demonstrations that no stage learns from, or that are cut into too many updates."""
    supervised = config.supervised
    if not highest(config, "sup_coef"):
        if supervised != SupervisedConfig():
            raise GruppoError(
                "demonstrations were set, but no stage's sup_coef is above 0. Set --stages supervised:50,full or "
                "--stage.sup-coef 1, or leave the --supervised options out."
            )
        return
    Answers(supervised)  # refuses a template that is not understood
    if supervised.template and supervised.column:
        raise GruppoError(
            f"supervised.template={supervised.template!r} names its columns itself, so supervised.column="
            f"{supervised.column!r} says nothing. Leave one of them out."
        )
    if config.optim.minibatches > supervised.batch:
        raise GruppoError(
            f"optim.minibatches={config.optim.minibatches} is more than supervised.batch={supervised.batch}, which "
            "leaves some updates without a demonstration. Set --supervised.batch to that or more."
        )


def check_single_row(config: Config) -> None:
    """Refuse to compare the only row of a step with itself: its advantage would be 0 for ever."""
    objective = config.objective
    against = {
        "baseline='batch_mean'": objective.baseline == "batch_mean",
        "scale='batch'": objective.scale == "batch",
        "combine='normalize_then_sum'": objective.combine == "normalize_then_sum",
    }
    if rows_of_step(config) == 1 and any(against.values()):
        raise GruppoError(
            f"{next(name for name, holds in against.items() if holds)} compares the rows of a step, and rollout.prompts"
            "=1 with rollout.group_size=1 gives one, whose advantage is always 0. Set --rollout.prompts 2 or more."
        )


def check_refill(config: Config) -> None:
    rollout = config.rollout
    if rollout.refill_by and not rollout.refill_rounds and not rollout.first_samples:
        raise GruppoError(
            f"rollout.refill_by={rollout.refill_by!r} decides nothing while rollout.refill_rounds=0. Set "
            "--rollout.refill-rounds 1 or more, or leave --rollout.refill-by out."
        )
    if rollout.refill_rounds and smallest_group(config) < 2:
        raise GruppoError(
            f"rollout.refill_rounds={rollout.refill_rounds} replaces groups without spread, and a group of one never "
            "has any. Set --rollout.group-size 2 or more, or --rollout.refill-rounds 0."
        )


def check_growth(config: Config) -> None:
    """A first round of a few samples, and what groups may grow to."""
    rollout, sizes = config.rollout, group_sizes(config)
    first, largest = rollout.first_samples, rollout.max_group_size
    if largest and not first:
        raise GruppoError(
            f"rollout.max_group_size={largest} bounds nothing: groups grow where --rollout.first-samples is set. Set "
            "it, or leave --rollout.max-group-size out."
        )
    if first and not 2 <= first < min(sizes):
        raise GruppoError(
            f"rollout.first_samples={first} is out of range; it needs at least 2, for a spread, and fewer than the "
            f"{min(sizes)} samples of rollout.group_size, or nothing is left to grow by. Set --rollout.first-samples."
        )
    if largest and largest < max(sizes):
        raise GruppoError(
            f"rollout.max_group_size={largest} is below rollout.group_size={max(sizes)}: the budget of prompts x "
            f"group_size could never be spent. Set --rollout.max-group-size {max(sizes)} or more, or 0 for twice that."
        )


def check_difficulty(config: Config) -> None:
    column, is_used = config.prompts.difficulty_column, any(v < 1 for v in values_of(config, "difficulty"))
    if is_used and not column:
        raise GruppoError(
            "a stage draws from the easiest prompts (its difficulty is below 1), and no column says which they are. "
            "Set --prompts.difficulty-column to a column of numbers, higher is harder."
        )
    if column and not is_used:
        raise GruppoError(
            f"prompts.difficulty_column={column!r} decides nothing while every stage's difficulty is 1. Set "
            "--stage.difficulty, such as linear:0.2,1, or leave --prompts.difficulty-column out."
        )


def check_environment(config: Config) -> None:
    environment = config.environment
    if not environment.reply:
        if environment != EnvironmentConfig():
            raise GruppoError(
                "environment settings were given, but nothing says who replies. Set --environment.reply "
                "file.py:function, or leave the --environment options out."
            )
        return
    if environment.timeout_s is not None and not environment.timeout_s > 0:
        raise GruppoError(
            f"environment.timeout_s={environment.timeout_s} leaves a reply no time; it needs to be above 0, or None "
            "for no deadline. Set --environment.timeout-s 60."
        )


def check_critic(config: Config) -> None:
    critic = config.critic
    if critic.kind == "shared" and critic.model:
        raise GruppoError(
            f"critic.model={critic.model!r} is a network of its own, but critic.kind='shared' reads the policy's. Set "
            "--critic.kind separate, or leave --critic.model out."
        )
    peaks = [peak_lr(config, index) for index in range(len(config.plan))]
    if critic.lr and 0 in peaks:
        where = "optim" if config.plan[peaks.index(0)].lr is None else where_of(config, peaks.index(0))
        raise GruppoError(
            f"critic.lr={critic.lr:g} is relative to {where}.lr=0 and would be 0 too. Set {option(where)}.lr above 0; "
            "--critic.warmup-steps lets the critic learn alone."
        )
    if critic.lr == 0 and any(peaks):
        raise GruppoError(
            "critic.lr=0 never trains the critic, whose values stay 0. Set --critic.lr above 0, or leave it out for "
            f"the policy's {max(peaks):g}."
        )
    if not highest(config, "value_coef"):
        raise GruppoError(
            "stage.value_coef=0 never trains the critic, whose values stay 0. Set --stage.value-coef above 0, or a "
            "baseline without a critic."
        )
    if critic.warmup_steps >= config.steps:
        raise GruppoError(
            f"critic.warmup_steps={critic.warmup_steps} leaves the policy none of the {config.steps} steps to learn "
            "in. Lower --critic.warmup-steps or raise --steps."
        )


def group_sizes(config: Config) -> list[int]:
    """All sizes that a schedule of group_size names, and rollout.group_size where a stage has none."""
    is_left_out = any(stage.group_size is None for stage in config.plan)
    scheduled = [round(size) for size in values_of(config, "group_size")]
    return scheduled + ([config.rollout.group_size] if is_left_out else [])


def smallest_group(config: Config) -> int:
    return config.rollout.first_samples or min(group_sizes(config))


def rows_of_step(config: Config) -> int:
    """Over all ranks, at the least."""
    return config.rollout.prompts * smallest_group(config)


def option(name: str) -> str:
    """A field as it is typed in the shell."""
    return "--" + name.replace("_", "-")
