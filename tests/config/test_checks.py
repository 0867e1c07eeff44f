"""Configs that cannot run are refused before anything is loaded: ranges of fields, and rules across
fields. Options that nothing reads are a warning."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest

from gruppo.config import serialization
from gruppo.config.checks import check_config, unread
from gruppo.config.options import Range
from gruppo.config.schema import (
    Config,
    CriticConfig,
    EngineConfig,
    LoraConfig,
    OptimConfig,
    RolloutConfig,
    Stage,
)
from gruppo.core.objective import PRESETS, Objective
from gruppo.recipes import RECIPES
from gruppo.trainer import checks
from gruppo.types import GruppoError

GIVEN = Config(model="m", data="d", reward=("r",))
PPO = PRESETS["ppo"]
ONE_ROW = RolloutConfig(prompts=1, group_size=1)
ONE_SUM = Objective(baseline="running", scale="none", combine="normalize_then_sum")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model"),
        ({"data": ""}, "data"),
        ({"reward": ()}, "reward"),
        ({"steps": "3 or so"}, "steps='3 or so' needs to be a valid integer"),
        ({"rollout": RolloutConfig(group_size=1)}, "group_size=1 gives no baseline"),
        ({"rollout": RolloutConfig(temperature=0)}, "temperature=0"),
        ({"optim": OptimConfig(minibatches=65)}, "Set optim.minibatches 64 or less"),
        (
            {"objective": PRESETS["reinforce"], "engine": EngineConfig("file.py:engine", lag=1)},
            "objective.correction truncate",
        ),
        ({"critic": CriticConfig(warmup_steps=200), "objective": PPO}, "none of the steps"),
        (
            {"critic": CriticConfig(lr=1e-5), "objective": PPO, "optim": OptimConfig(lr=0.0)},
            "the critic is never trained",
        ),
        ({"stage": Stage(value_coef=0.0), "objective": PPO}, "the critic is never trained"),
        ({"critic": CriticConfig(lr=0.0), "objective": PPO}, "the critic is never trained"),
        ({"rollout": ONE_ROW, "objective": PRESETS["reinforce"]}, "baseline='batch_mean' compares"),
        (
            {"rollout": ONE_ROW, "objective": Objective(baseline="none", scale="batch")},
            "scale='batch' compares",
        ),
        ({"rollout": ONE_ROW, "objective": ONE_SUM}, "combine='normalize_then_sum' compares"),
        ({"objective": PRESETS["rloo"], "optim": OptimConfig(epochs=2)}, "optim.epochs 1"),
        ({"lora": LoraConfig(load_in_4bit=True)}, "lora.rank 16"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_loaded(changes, message):
    checks.check(GIVEN)
    with pytest.raises(GruppoError) as error:
        checks.check(dataclasses.replace(GIVEN, **changes))
    assert message in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": PRESETS["reinforce"], "rollout": RolloutConfig(group_size=1)},
        {"objective": PPO, "critic": CriticConfig("separate", "m", lr=1e-5, warmup_steps=199)},
        {"objective": PRESETS["reinforce"], "rollout": RolloutConfig(prompts=1, group_size=2)},
        {"objective": ONE_SUM, "rollout": RolloutConfig(prompts=2, group_size=1)},
        {"objective": PPO, "rollout": ONE_ROW},
    ],
)
def test_what_is_just_enough_is_not_refused(changes):
    checks.check(dataclasses.replace(GIVEN, **changes))


def ranges(section: object = GIVEN, prefix: str = "") -> dict[str, Range]:
    """The range of each number of a config, by its dotted name."""
    found = {}
    for name, hint in typing.get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            found |= ranges(value, f"{name}.")
        for one in getattr(hint, "__metadata__", ()):
            if isinstance(one, Range):
                found[prefix + name] = one
    return found


@pytest.mark.parametrize("name", ranges())
def test_a_number_outside_its_range_is_refused_with_its_option(name):
    """Just outside each finite bound, and infinity and nan."""
    bounds = ranges()[name]
    below = [bounds.ge - 1] * math.isfinite(bounds.ge) + [bounds.gt] * math.isfinite(bounds.gt)
    above = [bounds.le + 1] * math.isfinite(bounds.le) + [bounds.lt] * math.isfinite(bounds.lt)
    for number in (*below, *above, math.inf, math.nan):
        value = (0.5, number) if name in ("optim.betas", "scoring.weights") else number
        with pytest.raises(GruppoError, match=rf"^{name}=.* (is out of range|needs) "):
            serialization.change(GIVEN, {name: value})


def test_every_value_that_a_schedule_reaches_is_in_the_range_of_its_field():
    with pytest.raises(GruppoError, match=r"kl_coef='linear:0.5,-1.5' is out of range"):
        serialization.change(GIVEN, {"stage.kl_coef": "linear:0.5,-1.5"})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"critic": CriticConfig(lr=1e-5)}, ["critic.lr"]),
        ({"critic": CriticConfig(model="m"), "objective": PPO}, ["critic.model"]),
        (
            {"rollout": RolloutConfig(refill_rounds=1, group_size=1), "objective": PPO},
            ["rollout.refill_rounds"],
        ),
        ({"optim": OptimConfig(stop_kl=0.1)}, ["optim.stop_kl"]),
        ({"optim": OptimConfig(stop_kl=0.1, epochs=2)}, []),
        ({"lora": LoraConfig(targets=("q",))}, ["lora.targets"]),
        ({"lora": LoraConfig(rank=4, adapter="a")}, ["lora.rank"]),
        ({"engine": EngineConfig(urls=("http://a",))}, ["engine.urls"]),
        ({"stage": Stage(lr=1.0), "stages": (Stage(),)}, ["stage.lr"]),
    ],
)
def test_options_that_nothing_reads_are_one_warning(changes, names, caplog):
    config = dataclasses.replace(GIVEN, **changes)
    assert unread(config) == names
    caplog.set_level("WARNING", "gruppo")
    checks.check(config)
    assert [record.args for record in caplog.records] == [(", ".join(names),)] * bool(names)


def test_recipes_set_no_option_that_nothing_reads():
    for name, recipe in RECIPES.items():
        config = dataclasses.replace(recipe(), model="m", data="d", reward=("r",))
        check_config(config)
        assert unread(config) == [], name
