"""What a config asks for and cannot have: refused before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter

from gruppo.training.config import Config, Critic, Rollout
from gruppo.types import GruppoError

AT_LEAST: Mapping[str, float] = {
    "steps": 1,
    "show_samples_every": 0,
    "rollout.prompts": 1,
    "rollout.group_size": 1,
    "rollout.refill_rounds": 0,
    "optim.lr": 0,
    "optim.warmup_steps": 0,
    "optim.final_lr_frac": 0,
    "optim.weight_decay": 0,
    "optim.max_grad_norm": 0,
    "optim.epochs": 1,
    "optim.minibatches": 1,
    "optim.token_budget": 0,
    "optim.stop_kl": 0,
    "stage.kl_coef": 0,
    "stage.entropy_coef": 0,
    "stage.value_coef": 0,
    "critic.lr": 0,
    "critic.warmup_steps": 0,
    "evaluation.prompts": 0,
    "evaluation.every": 0,
    "saving.every": 0,
    "saving.keep": 1,
}
"""Lowest values; each needs to be finite. None, for what another field stands in, is none of them."""


def check(config: Config) -> None:
    """Refuse what cannot run, before anything is loaded."""
    check_ranges(config)
    check_given(config)
    _ = config.rollout.sampling
    config.objective.check(
        group_size=config.rollout.group_size,
        updates_per_row=config.updates_per_batch,
        kl_coef=config.stage.kl_coef,
        max_length=config.rollout.max_new_tokens,
    )
    check_updates(config)
    check_single_row(config)
    check_refill(config.rollout)
    if config.objective.has_critic:
        check_critic(config)
    elif config.critic != Critic():
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


def check_given(config: Config) -> None:
    """What has no default."""
    if not config.model:
        raise GruppoError("no model was given; a hub id, a local folder or a bundled model is needed. Set --model.")
    if not config.data:
        raise GruppoError("no data was given; a .jsonl file, a data set, arithmetic or a task is needed. Set --data.")
    if not config.reward:
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


def check_refill(rollout: Rollout) -> None:
    if rollout.refill_by and not rollout.refill_rounds:
        raise GruppoError(
            f"rollout.refill_by={rollout.refill_by!r} decides nothing while rollout.refill_rounds=0. Set "
            "--rollout.refill-rounds 1 or more, or leave --rollout.refill-by out."
        )
    if rollout.refill_rounds and rollout.group_size < 2:
        raise GruppoError(
            f"rollout.refill_rounds={rollout.refill_rounds} replaces groups without spread, and a group of one never "
            "has any. Set --rollout.group-size 2 or more, or --rollout.refill-rounds 0."
        )


def check_critic(config: Config) -> None:
    critic, optim = config.critic, config.optim
    if critic.kind == "shared" and critic.model:
        raise GruppoError(
            f"critic.model={critic.model!r} is a network of its own, but critic.kind='shared' reads the policy's. Set "
            "--critic.kind separate, or leave --critic.model out."
        )
    if critic.lr and not optim.lr:
        raise GruppoError(
            f"critic.lr={critic.lr:g} is relative to optim.lr=0 and would be 0 too. Set --optim.lr above 0; "
            "--critic.warmup-steps lets the critic learn alone."
        )
    if critic.lr == 0 and optim.lr:
        raise GruppoError(
            "critic.lr=0 never trains the critic, whose values stay 0. Set --critic.lr above 0, or leave it out for "
            f"the policy's {optim.lr:g}."
        )
    if config.stage.value_coef == 0:
        raise GruppoError(
            "stage.value_coef=0 never trains the critic, whose values stay 0. Set --stage.value-coef above 0, or a "
            "baseline without a critic."
        )
    if critic.warmup_steps >= config.steps:
        raise GruppoError(
            f"critic.warmup_steps={critic.warmup_steps} leaves the policy none of the {config.steps} steps to learn "
            "in. Lower --critic.warmup-steps or raise --steps."
        )


def rows_of_step(config: Config) -> int:
    """Over all ranks."""
    return config.rollout.prompts * config.rollout.group_size


def option(name: str) -> str:
    """A field as it is typed in the shell."""
    return "--" + name.replace("_", "-")
