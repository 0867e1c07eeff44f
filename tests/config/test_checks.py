"""Configs that cannot run are refused before anything is loaded: ranges of fields, and rules across
fields."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from gruppo.api import change
from gruppo.cli.options import parse_config
from gruppo.config import serialization
from gruppo.config.options import check_ranges, options
from gruppo.config.schema import (
    Config,
    CriticConfig,
    EngineConfig,
    OptimConfig,
    RolloutConfig,
    Stage,
)
from gruppo.core.objective import PRESETS, Objective
from gruppo.trainer import checks
from gruppo.types import GruppoError

GIVEN = Config(model="m", data="d", reward=("r",))
PPO = PRESETS["ppo"]
ONE_ROW = RolloutConfig(prompts=1, group_size=1)
ONE_SUM = Objective(baseline="running", scale="none", combine="normalize_then_sum")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": ""}, "model"),
        ({"data": ""}, "data"),
        ({"reward": ()}, "reward"),
        ({"steps": 0}, "steps=0"),
        ({"rollout": RolloutConfig(prompts=0)}, "rollout.prompts"),
        ({"rollout": RolloutConfig(group_size=1)}, "group_size=1 gives no baseline"),
        ({"rollout": RolloutConfig(group_size=0)}, "rollout.group_size"),
        ({"rollout": RolloutConfig(temperature=0)}, "temperature=0"),
        ({"rollout": RolloutConfig(temperature=-1.5)}, "temperature=-1.5"),
        ({"rollout": RolloutConfig(top_p=0)}, "rollout.top_p=0"),
        ({"rollout": RolloutConfig(max_new_tokens=0)}, "rollout.max_new_tokens=0"),
        ({"optim": OptimConfig(lr=math.nan)}, "optim.lr=nan"),
        ({"optim": OptimConfig(lr=math.inf)}, "optim.lr=inf"),
        ({"optim": OptimConfig(betas=(0.9, 1.0))}, "optim.betas"),
        ({"optim": OptimConfig(eps=0.0)}, "optim.eps"),
        ({"optim": OptimConfig(eps=math.nan)}, "optim.eps"),
        ({"optim": OptimConfig(final_lr_frac=-0.1)}, "optim.final_lr_frac"),
        ({"optim": OptimConfig(final_lr_frac=1.5)}, "optim.final_lr_frac"),
        ({"optim": OptimConfig(betas=(math.nan, 0.9))}, "optim.betas"),
        ({"stage": Stage(entropy_coef=-1)}, "stage.entropy_coef"),
        ({"stage": Stage(entropy_coef=math.nan)}, "stage.entropy_coef"),
        ({"optim": OptimConfig(token_budget=-1)}, "optim.token_budget"),
        (
            {"optim": OptimConfig(minibatches=65)},
            "more than the 64 rows of a step. Set optim.minibatches 64 or less",
        ),
        ({"stage": Stage(kl_coef=-1)}, "stage.kl_coef"),
        (
            {"objective": PRESETS["reinforce"], "engine": EngineConfig("file.py:engine", lag=1)},
            "objective.correction truncate",
        ),
        ({"stage": Stage(value_coef=-1)}, "stage.value_coef"),
        ({"stage": Stage(value_coef=math.inf)}, "stage.value_coef"),
        ({"optim": OptimConfig(stop_kl=-0.1)}, "optim.stop_kl"),
        ({"optim": OptimConfig(stop_kl=math.nan)}, "optim.stop_kl"),
        ({"rollout": RolloutConfig(refill_rounds=-1)}, "rollout.refill_rounds"),
        (
            {
                "rollout": RolloutConfig(refill_rounds=1, group_size=1),
                "objective": PRESETS["reinforce"],
            },
            "which a group of one always has",
        ),
        ({"critic": CriticConfig(lr=-1.0), "objective": PPO}, "critic.lr"),
        ({"critic": CriticConfig(lr=math.nan), "objective": PPO}, "critic.lr"),
        ({"critic": CriticConfig(warmup_steps=-1), "objective": PPO}, "critic.warmup_steps"),
        ({"critic": CriticConfig(warmup_steps=200), "objective": PPO}, "none of the 200 steps"),
        ({"critic": CriticConfig(model="m"), "objective": PPO}, "critic.kind separate"),
        (
            {"critic": CriticConfig(lr=1e-5), "objective": PPO, "optim": OptimConfig(lr=0.0)},
            "optim.lr above 0",
        ),
        ({"stage": Stage(value_coef=0.0), "objective": PPO}, "never trains the critic"),
        ({"critic": CriticConfig(kind="separate")}, "objective.baseline='mean' uses none"),
        (
            {"critic": CriticConfig(lr=1e-5)},
            "Set objective ppo, or leave the critic options out",
        ),
        (
            {"critic": CriticConfig(warmup_steps=1)},
            "Set objective ppo, or leave the critic options out",
        ),
        ({"critic": CriticConfig(lr=0.0), "objective": PPO}, "critic.lr=0 never trains the critic"),
        ({"optim": OptimConfig(stop_kl=0.1)}, "stop_kl=0.1 has no effect: a batch has one update"),
        (
            {"rollout": ONE_ROW, "objective": PRESETS["reinforce"]},
            "baseline='batch_mean' compares the rows of a step",
        ),
        ({"rollout": ONE_ROW, "objective": PRESETS["reinforce_pp"]}, "rollout.prompts 2 or more"),
        (
            {"rollout": ONE_ROW, "objective": Objective(baseline="none", scale="batch")},
            "scale='batch' compares",
        ),
        ({"rollout": ONE_ROW, "objective": ONE_SUM}, "combine='normalize_then_sum' compares"),
        ({"objective": PRESETS["rloo"], "optim": OptimConfig(epochs=2)}, "optim.epochs 1"),
        (
            {
                "objective": Objective(baseline="leave_one_out"),
                "rollout": RolloutConfig(group_size=1),
            },
            "at least 2",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_loaded(changes, says):
    checks.check(GIVEN)
    with pytest.raises(GruppoError) as error:
        checks.check(dataclasses.replace(GIVEN, **changes))
    assert says in str(error.value) and error.value.exit_code == 2


def test_a_group_of_one_is_fine_for_reinforce():
    checks.check(
        dataclasses.replace(
            GIVEN, objective=PRESETS["reinforce"], rollout=RolloutConfig(group_size=1)
        )
    )


@pytest.mark.parametrize(
    "critic", [CriticConfig(), CriticConfig("separate", "m", lr=1e-5, warmup_steps=199)]
)
def test_a_critic_is_fine_where_the_objective_asks_for_one(critic):
    stage = Stage(value_coef=1.0)
    checks.check(dataclasses.replace(GIVEN, objective=PPO, critic=critic, stage=stage))


@pytest.mark.parametrize(
    "optim", [OptimConfig(stop_kl=0.1, epochs=2), OptimConfig(stop_kl=0.1, minibatches=2)]
)
def test_stopping_early_is_fine_where_a_batch_has_several_updates(optim):
    checks.check(dataclasses.replace(GIVEN, optim=optim))


@pytest.mark.parametrize(
    "rollout", [RolloutConfig(prompts=2, group_size=1), RolloutConfig(prompts=1, group_size=2)]
)
def test_two_rows_are_enough_to_compare_over_a_batch(rollout):
    for objective in (PRESETS["reinforce"], Objective(baseline="running", scale="batch"), ONE_SUM):
        checks.check(dataclasses.replace(GIVEN, rollout=rollout, objective=objective))
    checks.check(dataclasses.replace(GIVEN, rollout=ONE_ROW, objective=PPO))


RANGED = {name: option for name, option in options(Config()).items() if option.range is not None}


@pytest.mark.parametrize("name", RANGED)
def test_a_number_outside_its_range_is_refused_with_its_option_and_a_value_to_set(name):
    """Just outside each finite bound, and infinity and nan."""
    bounds = RANGED[name].range
    below = [bounds.ge - 1] * math.isfinite(bounds.ge) + [bounds.gt] * math.isfinite(bounds.gt)
    above = [bounds.le + 1] * math.isfinite(bounds.le) + [bounds.lt] * math.isfinite(bounds.lt)
    section, _, leaf = name.rpartition(".")
    for number in (*below, *above, math.inf, math.nan):
        value = (0.5, number) if isinstance(RANGED[name].default, tuple) else number
        changed = dataclasses.replace(
            getattr(GIVEN, section) if section else GIVEN, **{leaf: value}
        )
        with pytest.raises(
            GruppoError, match=rf"^{name}=.* is out of range.* needs to be .*Set {name}\b"
        ):
            check_ranges(dataclasses.replace(GIVEN, **{section: changed}) if section else changed)


def test_every_value_that_a_schedule_reaches_is_in_the_range_of_its_field():
    stage = Stage(difficulty="linear:0.5,1.5")
    with pytest.raises(
        GruppoError, match=r"^stage.difficulty=linear:0.5,1.5 reaches 1.5, which is out of range;"
    ):
        check_ranges(dataclasses.replace(GIVEN, stage=stage))


# --- an objective without the critic of the config ------------------------------------------------

WITH_CRITIC = dataclasses.replace(
    GIVEN, objective=PPO, critic=CriticConfig("separate", lr=1e-4, warmup_steps=2)
)


@pytest.mark.parametrize(
    "objective", ["grpo", PRESETS["grpo"], {"average": "token"}, {"baseline": "running"}]
)
def test_an_objective_without_a_critic_leaves_the_configs_critic_behind(objective):
    config = change(WITH_CRITIC, {"objective": objective})
    assert config.critic == CriticConfig() and not config.objective.has_critic
    checks.check(config)


@pytest.mark.parametrize("objective", ["ppo", dataclasses.replace(PPO, lam=0.9)])
def test_another_objective_with_a_critic_keeps_the_configs(objective):
    assert change(WITH_CRITIC, {"objective": objective}).critic == WITH_CRITIC.critic


@pytest.mark.parametrize("given", [{"critic__lr": 1e-4}, {"critic": CriticConfig(lr=1e-4)}])
def test_a_critic_that_is_given_with_such_an_objective_is_refused(given):
    for changes in (given | {"objective": "grpo"}, {"objective": "grpo"} | given):
        config = change(WITH_CRITIC, changes)
        assert config.critic == CriticConfig(lr=1e-4)
        with pytest.raises(GruppoError, match="a critic was set, but"):
            checks.check(config)


def test_so_it_is_in_the_shell_with_a_recipe_and_with_a_saved_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(serialization.to_dict(WITH_CRITIC)))
    for recipe in ("arithmetic-ppo", str(path)):
        config = parse_config("train", [recipe, "--objective", "grpo", "--optim.epochs", "1"])
        assert config.critic == CriticConfig() and config.objective == PRESETS["grpo"]
        checks.check(config)
        assert parse_config("train", [recipe, "--objective", "ppo"]).critic != CriticConfig()
        config = parse_config("train", [recipe, "--objective=grpo", "--critic.lr", "1e-4"])
        with pytest.raises(GruppoError, match="a critic was set, but"):
            checks.check(config)
