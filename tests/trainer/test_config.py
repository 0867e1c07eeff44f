"""A config goes to JSON and back unchanged; what does not fit is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from gruppo.api import change
from gruppo.cli.options import config_from
from gruppo.config import serialization
from gruppo.config.schema import Config, CriticConfig, OptimConfig, RolloutConfig, ScoringConfig, Stage
from gruppo.core.objective import PRESETS, Objective
from gruppo.trainer import checks
from gruppo.types import GruppoError

GIVEN = Config(model="m", data="d", reward=("r",))
PPO = PRESETS["ppo"]
ONE_ROW = RolloutConfig(prompts=1, group_size=1)
ONE_SUM = Objective(baseline="running", scale="none", combine="normalize_then_sum")


def other_value(hint: Any, value: Any) -> Any:
    """A value of the same type that is not the default."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return next(choice for choice in inner if choice != value)
    if dataclasses.is_dataclass(hint):
        return changed_everywhere(hint)
    if origin is types.UnionType and type(None) not in inner:
        return "linear:0.5,1"
    if origin is tuple:
        if inner[-1] is ...:
            return tuple(other_value(inner[0], "x") for _ in range(2))
        return (3, 5) if inner[0] is int else (0.25, 0.75)
    if type(None) in inner:
        return other_value(inner[0], 0 if value is None and inner[0] is int else value)
    return {bool: lambda: not value, int: lambda: value + 3, float: lambda: 0.5, str: lambda: "other é"}[hint]()


def changed_everywhere(kind: Any) -> Any:
    if kind is Objective:  # its fields refuse each other
        return PRESETS["ppo"]
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        default = getattr(kind(), field.name)
        values[field.name] = changed_everywhere(hint) if dataclasses.is_dataclass(hint) else other_value(hint, default)
    return kind(**values)


def test_every_field_survives_json():
    config = changed_everywhere(Config)
    for field in dataclasses.fields(Config):
        assert getattr(config, field.name) != getattr(Config(), field.name), field.name
    assert serialization.from_dict(json.loads(json.dumps(serialization.to_dict(config)))) == config


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Objective)])
def test_every_field_of_the_objective_survives_json(name):
    """Changed in the first preset that takes it."""
    hint = typing.get_type_hints(Objective)[name]
    objective = next(o for o in (with_other(preset, name, hint) for preset in PRESETS.values()) if o is not None)
    config = dataclasses.replace(GIVEN, objective=objective)
    assert serialization.from_dict(json.loads(json.dumps(serialization.to_dict(config)))) == config


def with_other(preset: Objective, name: str, hint: Any) -> Objective | None:
    """The preset with another value there, or None where that is refused."""
    for value in (other_value(hint, getattr(preset, name)), 3.0):
        with contextlib.suppress(GruppoError):
            return dataclasses.replace(preset, **{name: value})
    return None


def test_whole_numbers_become_the_floats_that_fields_are():
    config = serialization.from_dict({"optim": {"lr": 1, "betas": [0, 0.5]}, "scoring": {"weights": [1, 2]}})
    values = [config.optim.lr, *config.optim.betas, *config.scoring.weights]
    assert values == [1.0, 0.0, 0.5, 1.0, 2.0] and all(type(value) is float for value in values)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"stepz": 3}, "unknown entry stepz. Did you mean steps?"),
        ({"optim": {"learning_rate": 1}}, "unknown entry optim.learning_rate. Known: betas"),
        ({"rollout": {"groupsize": 1}}, "unknown entry rollout.groupsize. Did you mean rollout.group_size?"),
        ({"steps": "3"}, "steps is '3'; it needs a whole number"),
        ({"steps": 3.5}, "steps is 3.5; it needs a whole number"),
        ({"steps": True}, "steps is True; it needs a whole number"),
        ({"optim": {"lr": "fast"}}, "optim.lr is 'fast'; it needs a number"),
        ({"optim": {"betas": [0.9]}}, "optim.betas is [0.9]; it needs a list of 2 numbers"),
        ({"optim": 3}, "optim is 3; it needs an object of settings"),
        ({"reward": "exact_match"}, "reward is 'exact_match'; it needs a list of texts"),
        ({"reward": [1]}, "reward is [1]; it needs a list of texts"),
        ({"compute": "float8"}, "compute is 'float8'; it needs one of 'auto', 'float32', 'bfloat16'"),
        ({"prompts": {"target_column": 3}}, "prompts.target_column is 3; it needs a text or nothing"),
        ({"trust_remote_code": "yes"}, "trust_remote_code is 'yes'; it needs true or false"),
        ({"objective": {"average": "tokens"}}, "objective.average is 'tokens'; it needs one of"),
        ({"objective": "grp"}, "objective grp is no preset. Did you mean grpo?"),
        ({"rollout": {"top_p": None}}, "rollout.top_p is None; it needs a number"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(data, says):
    with pytest.raises(GruppoError) as error:
        serialization.from_dict(data)
    assert says in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', b"\xff\xfe"])
def test_a_file_that_is_no_config_is_one_clear_error(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(GruppoError, match=r"config\.json.*config\.json is needed"):
        serialization.load(path)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(GruppoError, match="does not exist"):
        serialization.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": ""}, "--model"),
        ({"data": ""}, "--data"),
        ({"reward": ()}, "--reward"),
        ({"steps": 0}, "steps=0"),
        ({"rollout": RolloutConfig(prompts=0)}, "--rollout.prompts"),
        ({"rollout": RolloutConfig(group_size=1)}, "group_size=1 gives no baseline"),
        ({"rollout": RolloutConfig(group_size=0)}, "--rollout.group-size"),
        ({"rollout": RolloutConfig(temperature=0)}, "temperature=0"),
        ({"rollout": RolloutConfig(temperature=-1.5)}, "temperature=-1.5"),
        ({"rollout": RolloutConfig(top_p=0)}, "top_p=0"),
        ({"rollout": RolloutConfig(max_new_tokens=0)}, "max_actions=0"),
        ({"optim": OptimConfig(lr=math.nan)}, "optim.lr=nan"),
        ({"optim": OptimConfig(lr=math.inf)}, "optim.lr=inf"),
        ({"optim": OptimConfig(betas=(0.9, 1.0))}, "--optim.betas"),
        ({"optim": OptimConfig(eps=0.0)}, "--optim.eps"),
        ({"optim": OptimConfig(eps=math.nan)}, "--optim.eps"),
        ({"optim": OptimConfig(final_lr_frac=-0.1)}, "--optim.final-lr-frac"),
        ({"optim": OptimConfig(final_lr_frac=1.5)}, "--optim.final-lr-frac"),
        ({"optim": OptimConfig(betas=(math.nan, 0.9))}, "--optim.betas"),
        ({"stage": Stage(entropy_coef=-1)}, "--stage.entropy-coef"),
        ({"stage": Stage(entropy_coef=math.nan)}, "--stage.entropy-coef"),
        ({"optim": OptimConfig(token_budget=-1)}, "--optim.token-budget"),
        ({"optim": OptimConfig(minibatches=65)}, "more than the 64 rows of a step. Set --optim.minibatches 64 or less"),
        ({"stage": Stage(kl_coef=-1)}, "--stage.kl-coef"),
        ({"stage": Stage(value_coef=-1)}, "--stage.value-coef"),
        ({"stage": Stage(value_coef=math.inf)}, "--stage.value-coef"),
        ({"optim": OptimConfig(stop_kl=-0.1)}, "--optim.stop-kl"),
        ({"optim": OptimConfig(stop_kl=math.nan)}, "--optim.stop-kl"),
        ({"rollout": RolloutConfig(refill_rounds=-1)}, "--rollout.refill-rounds"),
        ({"rollout": RolloutConfig(refill_by="r")}, "refill_by='r' decides nothing"),
        (
            {"rollout": RolloutConfig(refill_rounds=1, group_size=1), "objective": PRESETS["reinforce"]},
            "a group of one never has any",
        ),
        ({"critic": CriticConfig(lr=-1.0), "objective": PPO}, "--critic.lr"),
        ({"critic": CriticConfig(lr=math.nan), "objective": PPO}, "--critic.lr"),
        ({"critic": CriticConfig(warmup_steps=-1), "objective": PPO}, "--critic.warmup-steps"),
        ({"critic": CriticConfig(warmup_steps=200), "objective": PPO}, "none of the 200 steps"),
        ({"critic": CriticConfig(model="m"), "objective": PPO}, "--critic.kind separate"),
        ({"critic": CriticConfig(lr=1e-5), "objective": PPO, "optim": OptimConfig(lr=0.0)}, "--optim.lr above 0"),
        ({"stage": Stage(value_coef=0.0), "objective": PPO}, "never trains the critic"),
        ({"critic": CriticConfig(kind="separate")}, "objective.baseline='mean' asks none"),
        ({"critic": CriticConfig(lr=1e-5)}, "Set --objective ppo, or leave the --critic options out"),
        ({"critic": CriticConfig(warmup_steps=1)}, "Set --objective ppo, or leave the --critic options out"),
        ({"critic": CriticConfig(lr=0.0), "objective": PPO}, "critic.lr=0 never trains the critic"),
        ({"optim": OptimConfig(stop_kl=0.1)}, "stop_kl=0.1 ends nothing: a batch has one update"),
        ({"rollout": ONE_ROW, "objective": PRESETS["reinforce"]}, "baseline='batch_mean' compares the rows of a step"),
        ({"rollout": ONE_ROW, "objective": PRESETS["reinforce_pp"]}, "--rollout.prompts 2 or more"),
        ({"rollout": ONE_ROW, "objective": Objective(baseline="none", scale="batch")}, "scale='batch' compares"),
        ({"rollout": ONE_ROW, "objective": ONE_SUM}, "combine='normalize_then_sum' compares"),
        ({"objective": PRESETS["rloo"], "optim": OptimConfig(epochs=2)}, "--optim.epochs 1"),
        ({"objective": Objective(baseline="leave_one_out"), "rollout": RolloutConfig(group_size=1)}, "at least 2"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_loaded(changes, says):
    checks.check(GIVEN)
    with pytest.raises(GruppoError) as error:
        checks.check(dataclasses.replace(GIVEN, **changes))
    assert says in str(error.value) and error.value.exit_code == 2


def test_no_deadline_is_none_and_survives_json():
    config = dataclasses.replace(GIVEN, scoring=ScoringConfig(timeout_s=None))
    assert serialization.from_dict(json.loads(json.dumps(serialization.to_dict(config)))) == config


def test_a_group_of_one_is_fine_for_reinforce():
    checks.check(dataclasses.replace(GIVEN, objective=PRESETS["reinforce"], rollout=RolloutConfig(group_size=1)))


@pytest.mark.parametrize("critic", [CriticConfig(), CriticConfig("separate", "m", lr=1e-5, warmup_steps=199)])
def test_a_critic_is_fine_where_the_objective_asks_for_one(critic):
    stage = Stage(value_coef=1.0)
    checks.check(dataclasses.replace(GIVEN, objective=PPO, critic=critic, stage=stage))


def test_refilling_by_one_reward_is_fine():
    rollout = RolloutConfig(refill_rounds=2, refill_by="r")
    checks.check(dataclasses.replace(GIVEN, rollout=rollout))


@pytest.mark.parametrize("optim", [OptimConfig(stop_kl=0.1, epochs=2), OptimConfig(stop_kl=0.1, minibatches=2)])
def test_stopping_early_is_fine_where_a_batch_has_several_updates(optim):
    checks.check(dataclasses.replace(GIVEN, optim=optim))


@pytest.mark.parametrize("rollout", [RolloutConfig(prompts=2, group_size=1), RolloutConfig(prompts=1, group_size=2)])
def test_two_rows_are_enough_to_compare_over_a_batch(rollout):
    for objective in (PRESETS["reinforce"], Objective(baseline="running", scale="batch"), ONE_SUM):
        checks.check(dataclasses.replace(GIVEN, rollout=rollout, objective=objective))
    checks.check(dataclasses.replace(GIVEN, rollout=ONE_ROW, objective=PPO))


@pytest.mark.parametrize("name", checks.AT_LEAST)
def test_a_number_below_its_bound_or_without_an_end_is_refused_with_its_option(name):
    branch, _, leaf = name.rpartition(".")
    for value in (checks.AT_LEAST[name] - 1, math.inf, math.nan):
        part = dataclasses.replace(getattr(GIVEN, branch) if branch else GIVEN, **{leaf: value})
        with pytest.raises(GruppoError, match=rf"^{name}=.* is out of range.*Set {checks.option(name)}\."):
            checks.check(dataclasses.replace(GIVEN, **{branch: part}) if branch else part)


# --- an objective without the critic of the config --------------------------------------------------------------------

WITH_CRITIC = dataclasses.replace(GIVEN, objective=PPO, critic=CriticConfig("separate", lr=1e-4, warmup_steps=2))


@pytest.mark.parametrize("objective", ["grpo", PRESETS["grpo"], {"average": "token"}, {"baseline": "running"}])
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
        config = config_from("train", [recipe, "--objective", "grpo", "--optim.epochs", "1"])
        assert config.critic == CriticConfig() and config.objective == PRESETS["grpo"]
        checks.check(config)
        assert config_from("train", [recipe, "--objective", "ppo"]).critic != CriticConfig()
        config = config_from("train", [recipe, "--objective=grpo", "--critic.lr", "1e-4"])
        with pytest.raises(GruppoError, match="a critic was set, but"):
            checks.check(config)


def test_keywords_with_two_underscores_change_leaves_and_whole_branches():
    config = change(
        GIVEN,
        {
            "steps": 7,
            "optim__lr": 1,
            "rollout": RolloutConfig(group_size=3),
            "objective": "dr-grpo",
            "runs_dir": Path("a/b"),
            "scoring__weights": (1, 2),
        },
    )
    expected = dataclasses.replace(
        GIVEN,
        steps=7,
        optim=OptimConfig(lr=1.0),
        rollout=RolloutConfig(group_size=3),
        objective=PRESETS["dr_grpo"],
        runs_dir="a/b",
        scoring=ScoringConfig(weights=(1.0, 2.0)),
    )
    assert config == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim__lrr": 1}, "unknown entry optim.lrr. Did you mean optim.lr?"),
        ({"stepz": 1}, "Did you mean steps?"),
        ({"steps__x": 1}, "steps is a value"),
        ({"nowhere__x__y": 1}, "unknown entry nowhere"),
    ],
)
def test_keywords_that_name_nothing_are_refused(changes, says):
    with pytest.raises(GruppoError) as error:
        change(GIVEN, changes)
    assert says in str(error.value)
