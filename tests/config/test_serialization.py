"""A config goes to JSON and TOML and back unchanged; what does not fit is refused by name and
line."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from gruppo.api import change
from gruppo.config import serialization
from gruppo.config.schema import Config, OptimConfig, RolloutConfig, ScoringConfig, Stage
from gruppo.core.objective import PRESETS, Objective
from gruppo.modalities.diffusion.config import DiffusionConfig
from gruppo.recipes import RECIPES
from gruppo.types import GruppoError

GIVEN = Config(model="m", data="d", reward=("r",))


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
    return {
        bool: lambda: not value,
        int: lambda: value + 3,
        float: lambda: 0.5,
        str: lambda: "other é",
    }[hint]()


def changed_everywhere(kind: Any) -> Any:
    if kind is Objective:  # its fields refuse each other
        return PRESETS["ppo"]
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        hint = DiffusionConfig if field.name == "modality" else hints[field.name]
        default = getattr(kind(), field.name)
        values[field.name] = (
            changed_everywhere(hint)
            if dataclasses.is_dataclass(hint)
            else other_value(hint, default)
        )
    return kind(**values)


def test_every_field_survives_json():
    config = changed_everywhere(Config)
    for field in dataclasses.fields(Config):
        assert getattr(config, field.name) != getattr(Config(), field.name), field.name
    assert serialization.from_dict(json.loads(json.dumps(serialization.to_dict(config)))) == config


def test_every_field_of_the_objective_survives_json():
    for preset in PRESETS.values():
        config = dataclasses.replace(GIVEN, objective=preset)
        data = json.loads(json.dumps(serialization.to_dict(config)))
        assert serialization.from_dict(data) == config
    changed = {"objective.dual_clip": 3.0, "objective.adv_clip": 2.0, "objective.overlong": 3}
    config = serialization.change(GIVEN, changed)
    assert serialization.from_dict(serialization.to_dict(config)) == config != GIVEN


def test_whole_numbers_become_the_floats_that_fields_are():
    config = serialization.from_dict(
        {"optim": {"lr": 1, "betas": [0, 0.5]}, "scoring": {"weights": [1, 2]}}
    )
    values = [config.optim.lr, *config.optim.betas, *config.scoring.weights]
    assert values == [1.0, 0.0, 0.5, 1.0, 2.0] and all(type(value) is float for value in values)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"stepz": 3}, "unknown entry stepz. Did you mean steps?"),
        (
            {"diffusion": {"stepz": 3}},
            "unknown entry diffusion.stepz. Did you mean diffusion.steps?",
        ),
        ({"difusion": {}}, "unknown entry difusion. Did you mean diffusion?"),
        ({"diffusion": {}, "restoration": {}}, "sections of two modalities"),
        ({"optim": {"terms_every": 1}}, "unknown entry optim.terms_every"),
        ({"steps": 3.5}, "steps=3.5 needs to be a valid integer"),
        ({"optim": {"lr": "fast"}}, "optim.lr='fast' needs to be a valid number"),
        ({"optim": {"betas": [0.9]}}, "optim.betas=(0.9,) needs more values"),
        ({"stage": {"lr": "adaptive:1,target=2"}}, "cannot be adaptive; kl_coef"),
        ({"stage": {"kl_coef": "adaptive:1"}}, "needs adaptive:FROM,target=X,horizon=Y"),
        ({"reward": "exact_match"}, "reward='exact_match' needs to be a valid array"),
        ({"compute": "float8"}, "needs to be 'auto', 'float32' or 'bfloat16'"),
        ({"trust_remote_code": "yes"}, "trust_remote_code='yes' needs to be a valid boolean"),
        ({"objective": {"average": "tokens"}}, "objective.average='tokens' needs to be 'sequence'"),
        ({"objective": "grp"}, "objective 'grp' is not a preset. Did you mean grpo?"),
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
    with pytest.raises(GruppoError, match=r"config\.json.*a config file is needed"):
        serialization.load(path)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(GruppoError, match="does not exist"):
        serialization.load(tmp_path / "config.json")


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_config_written_as_toml_is_read_back_unchanged(tmp_path, name):
    path = tmp_path / "my.toml"
    path.write_text(serialization.to_toml(RECIPES[name]()), encoding="utf-8")
    assert serialization.load(path) == RECIPES[name]()


def test_every_field_survives_toml(tmp_path):
    config = dataclasses.replace(changed_everywhere(Config), stage=Stage())
    (tmp_path / "my.toml").write_text(serialization.to_toml(config), encoding="utf-8")
    assert serialization.load(tmp_path / "my.toml") == config


def test_toml_has_a_comment_for_each_option_and_none_is_a_word():
    lines = serialization.to_toml(GIVEN).splitlines()
    at = lines.index('target_column = "none"')
    assert lines[at - 1] == "# Column with the target; default: answer, target, solution or label."
    assert all(
        lines[n - 1].startswith("#")
        for n, line in enumerate(lines)
        if " = " in line and line[0] != "#"
    )


TOML = """
model = "m"
[optim]
lr = 1e-6
[[stages]]
name = "supervised"
[[stages]]
lr = 1
"""


def test_stages_of_a_file_are_read(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    stages = serialization.load(tmp_path / "a.toml").stages
    assert [stage.name for stage in stages] == ["supervised", ""] and stages[1].lr == 1.0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.toml",
            TOML.replace("lr = 1e-6", "lrr = 1"),
            r"a\.toml: .*entry optim\.lrr\. Did you mean optim\.lr",
        ),
        ("a.toml", TOML.replace("lr = 1\n", "lr = [1]\n"), r"a\.toml: stages\.1\.lr=\(1,\) needs"),
        ("a.toml", "steps = \n", r"a\.toml cannot be read as TOML \(.*line 1"),
        ("a.json", '{\n"steps": "x"}', r"a\.json: steps='x' needs to be a valid integer"),
    ],
)
def test_a_wrong_entry_of_a_file_is_one_line_with_its_file_and_its_key(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(GruppoError, match=says) as error:
        serialization.load(tmp_path / name)
    assert "\n" not in str(error.value)


# --- changes --------------------------------------------------------------------------------------


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
        ({"optim__lrr": 1}, "unknown option optim__lrr. Did you mean optim__lr?"),
        ({"lr": 1}, "Did you mean optim__lr?"),
        ({"num_generations": 4}, "num_generations of trl is rollout__group_size."),
        ({"diffusion__stepz": 1}, "Did you mean diffusion__steps?"),
        ({"steps__x": 1}, "unknown option steps__x. Did you mean steps?"),
        ({"nowhere__x__y": 1}, "unknown option nowhere"),
    ],
)
def test_keywords_that_name_nothing_are_refused(changes, says):
    with pytest.raises(GruppoError) as error:
        change(GIVEN, changes)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("changes", "correction"),
    [
        ({"engine": "vllm"}, "truncate"),
        ({"engine.kind": "vllm", "engine.urls": ["http://a"]}, "truncate"),
        ({"engine": "vllm", "objective": "dapo"}, "truncate"),
        ({"engine": "vllm", "objective.correction": "none"}, "none"),
        ({"engine": "vllm", "objective.correction": "mask"}, "mask"),
        ({"engine": "mine.py:engine"}, "none"),
    ],
)
def test_servers_turn_on_the_correction_of_their_arithmetic_unless_told_otherwise(
    changes, correction
):
    changed = serialization.change(Config(), changes)
    assert changed.objective.correction == correction
    assert serialization.from_dict(serialization.to_dict(changed)) == changed
    assert serialization.change(changed, {"steps": 3}).objective.correction == correction


@pytest.mark.parametrize(
    ("data", "correction"),
    [
        ({"engine": "vllm"}, "truncate"),
        ({"engine": {"kind": "vllm"}, "objective": "dapo"}, "truncate"),
        ({"engine": {"kind": "vllm"}, "objective": {"clip_high": 0.3}}, "truncate"),
        ({"engine": {"kind": "vllm"}, "objective": {"correction": "none"}}, "none"),
    ],
)
def test_a_file_with_servers_too(data, correction):
    assert serialization.from_dict(data).objective.correction == correction
