"""Refusals of configs that cannot run: ranges of single fields, and rules across fields, before anything is loaded."""

from __future__ import annotations

from gruppo.config.options import flag
from gruppo.config.schema import (
    BackOffConfig,
    Config,
    CriticConfig,
    EnvironmentConfig,
    LoraConfig,
    Stage,
    SupervisedConfig,
)
from gruppo.config.stages import highest, learns_from_samples, peak_lr, stage_path, values_of
from gruppo.core.schedules import parse_schedule
from gruppo.types import GruppoError


def check_config(config: Config) -> None:
    """Refuse what cannot run whatever the model is. ``options.check_ranges`` comes first."""
    if not config.model:
        raise GruppoError(
            "no model was given; it needs a hub id, a folder, a bundled model, or unet for images. Set --model."
        )
    if not config.data:
        raise GruppoError(
            "no data was given; it needs a .jsonl file, a data set, arithmetic, a task, digits or images:FOLDER. Set "
            "--data."
        )
    if not config.reward and learns_from_samples(config):
        raise GruppoError("no reward was given; it needs a built-in name or file.py:function. Set --reward.")
    _check_stages(config)
    _check_sampling(config)
    _check_updates(config)
    _check_lora(config.lora)
    _check_back_off(config)
    _check_supervised(config)
    _check_unused(config)
    if config.objective.has_critic:
        _check_critic(config)


def group_sizes(config: Config) -> list[int]:
    """All group sizes that the stages reach."""
    is_left_out = any(stage.group_size is None for stage in config.plan)
    scheduled = [round(size) for size in values_of(config, "group_size")]
    return scheduled + ([config.rollout.group_size] if is_left_out else [])


def smallest_group(config: Config) -> int:
    return config.rollout.first_samples or min(group_sizes(config))


def _check_stages(config: Config) -> None:
    """The stages: how long each lasts, what ends it, and that it learns something."""
    plan, evaluates = config.plan, config.evaluation.every and config.evaluation.prompts
    if config.stages and config.stage != Stage():
        raise GruppoError(
            "both stage and stages were set; with several stages, each has its own settings. Set "
            f"--stages.{len(config.stages) - 1}.kl-coef and the like instead of --stage.kl-coef."
        )
    for index, stage in enumerate(plan):
        where, is_last = stage_path(config, index), index + 1 == len(plan)
        if not is_last and not stage.steps:
            raise GruppoError(
                f"{where}.steps=0 lasts to the end, but another stage follows. Set {flag(where)}.steps to its maximum "
                "length."
            )
        if is_last and stage.until:
            raise GruppoError(
                f"{where}.until={stage.until!r} ends the last stage, and nothing follows. Leave it out, or add a stage."
            )
        if stage.until.strip().startswith("eval/") and not evaluates:
            raise GruppoError(
                f"{where}.until={stage.until!r} waits for an evaluation, but evaluations only run before and after "
                "training. Set --evaluation.every to the steps between evaluations."
            )
        coefs = [
            parse_schedule(getattr(stage, f"{name}_coef"), where).values for name in ("rl", "sup", "kl", "entropy")
        ]
        if not any(value > 0 for values in coefs for value in values):
            cons = "; cons_coef applies only to what is sampled or demonstrated" if stage.cons_coef else ""
            raise GruppoError(
                f"{where} learns nothing: its rl_coef, sup_coef, kl_coef and entropy_coef are all 0{cons}. Set "
                f"{flag(where)}.rl-coef 1."
            )
    planned, is_open = sum(stage.steps for stage in plan), not plan[-1].steps
    if is_open and planned >= config.steps:
        raise GruppoError(
            f"the stages before the last have {planned} steps and the run {config.steps}, which leaves the last none. "
            f"Set --steps above {planned}, or fewer in {flag(stage_path(config, 0))}.steps."
        )
    if not is_open and planned != config.steps:
        raise GruppoError(
            f"the stages have {planned} steps and the run {config.steps}. Set --steps {planned}, or "
            f"--{stage_path(config, len(plan) - 1)}.steps 0 for a last stage that lasts to the end."
        )
    column, is_used = config.prompts.difficulty_column, any(v < 1 for v in values_of(config, "difficulty"))
    if is_used and not column:
        raise GruppoError(
            "a stage samples the easiest prompts (its difficulty is below 1), but no column says which they are. "
            "Set --prompts.difficulty-column to a column of numbers, higher is harder."
        )
    if column and not is_used:
        raise GruppoError(
            f"prompts.difficulty_column={column!r} has no effect while every stage's difficulty is 1. Set "
            "--stage.difficulty, such as linear:0.2,1, or leave --prompts.difficulty-column out."
        )


def _check_sampling(config: Config) -> None:
    """Group sizes: growing groups, resampling, and steps of a single row."""
    rollout, sizes, objective = config.rollout, group_sizes(config), config.objective
    first, largest = rollout.first_samples, rollout.max_group_size
    if "" in rollout.stop:
        raise GruppoError("rollout.stop has an empty string, which ends every completion at once. Leave it out.")
    if largest and not first:
        raise GruppoError(
            f"rollout.max_group_size={largest} has no effect: groups grow only with --rollout.first-samples. Set it, "
            "or leave --rollout.max-group-size out."
        )
    if first and not 2 <= first < min(sizes):
        raise GruppoError(
            f"rollout.first_samples={first} is out of range; it needs at least 2, for a spread, and fewer than the "
            f"{min(sizes)} samples of rollout.group_size, to leave some to grow by. Set --rollout.first-samples 2."
        )
    if largest and largest < max(sizes):
        raise GruppoError(
            f"rollout.max_group_size={largest} is below rollout.group_size={max(sizes)}: the budget of prompts x "
            f"group_size could never be spent. Set --rollout.max-group-size {max(sizes)} or more, or 0 for twice that."
        )
    if rollout.refill_by and not rollout.refill_rounds and not first:
        raise GruppoError(
            f"rollout.refill_by={rollout.refill_by!r} has no effect while rollout.refill_rounds=0. Set "
            "--rollout.refill-rounds 1 or more, or leave --rollout.refill-by out."
        )
    if rollout.refill_rounds and smallest_group(config) < 2:
        raise GruppoError(
            f"rollout.refill_rounds={rollout.refill_rounds} replaces groups of equal rewards, which a group of one "
            "always has. Set --rollout.group-size 2 or more, or --rollout.refill-rounds 0."
        )
    over_batch = {
        "baseline='batch_mean'": objective.baseline == "batch_mean",
        "scale='batch'": objective.scale == "batch",
        "combine='normalize_then_sum'": objective.combine == "normalize_then_sum",
    }
    if rollout.prompts * smallest_group(config) == 1 and any(over_batch.values()):
        raise GruppoError(
            f"{next(name for name, holds in over_batch.items() if holds)} compares the rows of a step, but rollout."
            "prompts=1 with rollout.group_size=1 has one, whose advantage is always 0. Set --rollout.prompts 2 or more."
        )


def _check_updates(config: Config) -> None:
    """How a batch is split, and when its updates end."""
    optim, rows = config.optim, config.rollout.prompts * smallest_group(config)
    if optim.minibatches > rows:
        raise GruppoError(
            f"optim.minibatches={optim.minibatches} is more than the {rows} rows of a step. Set --optim.minibatches "
            f"{rows} or less."
        )
    for name, value in (("optim.stop_kl", optim.stop_kl), ("objective.kl_mask", config.objective.kl_mask)):
        if value and config.updates_per_batch == 1:
            raise GruppoError(
                f"{name}={value:g} has no effect: a batch has one update, before which the KL to the old policy is 0. "
                f"Set --optim.epochs 2 or more, or {flag(name)} 0."
            )


def _check_lora(lora: LoraConfig) -> None:
    if lora.adapter and lora != LoraConfig(adapter=lora.adapter):
        raise GruppoError(
            f"lora.adapter={lora.adapter!r} has its own rank, alpha and targets. Leave the other --lora options out, "
            "or leave --lora.adapter out for a new adapter."
        )
    if not lora.rank and not lora.adapter and lora != LoraConfig():
        raise GruppoError(
            "lora.alpha or lora.targets was set, but lora.rank=0 trains all weights without an adapter. Set "
            "--lora.rank 16, or leave the --lora options out."
        )


def _check_back_off(config: Config) -> None:
    metric = config.back_off.metric
    if metric.startswith("eval/") and not (config.evaluation.every and config.evaluation.prompts):
        raise GruppoError(
            f"back_off.metric={metric!r} is only measured before and after training. Set --evaluation.every to the "
            "steps between evaluations."
        )


def _check_supervised(config: Config) -> None:
    """Demonstrations that are named twice, or too few for the updates."""
    supervised = config.supervised
    if supervised.template and supervised.column:
        raise GruppoError(
            f"supervised.template={supervised.template!r} names its columns itself, so supervised.column="
            f"{supervised.column!r} has no effect. Leave one of them out."
        )
    if highest(config, "sup_coef") and config.optim.minibatches > supervised.batch:
        raise GruppoError(
            f"optim.minibatches={config.optim.minibatches} is more than supervised.batch={supervised.batch}, which "
            "leaves some updates without a demonstration. Set --supervised.batch to that or more."
        )


def _check_unused(config: Config) -> None:
    """Refuse sections that were set but that nothing reads."""
    if config.supervised != SupervisedConfig() and not highest(config, "sup_coef"):
        raise GruppoError(
            "demonstrations were set, but no stage's sup_coef is above 0. Set --stages supervised:50,full or "
            "--stage.sup-coef 1, or leave the --supervised options out."
        )
    if config.back_off != BackOffConfig() and not config.back_off.metric:
        raise GruppoError(
            "back_off was set without a metric. Set --back-off.metric eval/reward_mean, or leave the --back-off "
            "options out."
        )
    if config.environment != EnvironmentConfig() and not config.environment.reply:
        raise GruppoError(
            "environment options were set without a function that replies. Set --environment.reply file.py:function, "
            "or leave the --environment options out."
        )
    if config.critic != CriticConfig() and not config.objective.has_critic:
        raise GruppoError(
            f"a critic was set, but objective.baseline={config.objective.baseline!r} uses none. Set "
            "--objective ppo, or leave the --critic options out."
        )


def _check_critic(config: Config) -> None:
    critic = config.critic
    if critic.kind == "shared" and critic.model:
        raise GruppoError(
            f"critic.model={critic.model!r} is a separate network, but critic.kind='shared' uses the policy's. Set "
            "--critic.kind separate, or leave --critic.model out."
        )
    peaks = [peak_lr(config, index) for index in range(len(config.plan))]
    if critic.lr and 0 in peaks:
        where = "optim" if config.plan[peaks.index(0)].lr is None else stage_path(config, peaks.index(0))
        raise GruppoError(
            f"critic.lr={critic.lr:g} is relative to {where}.lr=0 and would be 0 too. Set {flag(where)}.lr above 0; "
            "--critic.warmup-steps trains the critic alone."
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
