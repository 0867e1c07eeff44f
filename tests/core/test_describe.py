"""An objective in words: what it says, and that it leaves nothing out."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest

from gruppo.core.describe import describe_objective, objective_warnings
from gruppo.core.objective import GRPO, PRESETS, Objective
from gruppo.core.surrogates import SURROGATES


def described(objective: Objective, kl_coef: float = 0.04) -> str:
    return "\n".join(describe_objective(objective, kl_coef=kl_coef, group_size=8, max_length=64))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "grpo",
            [
                "(reward - mean of the group) / (std of the group + 0.0001)",
                "clip(r, 0.8, 1.2) A",
                "8 rows per group",
                "mean over the tokens of a row, then over the rows",
            ],
        ),
        (
            "dr_grpo",
            [
                "A = (reward - mean of the group);",
                "sum over tokens / (rows x 64)",
            ],
        ),
        ("dapo", ["clip(r, 0.8, 1.28) A", "mean over all kept tokens of the update"]),
        (
            "rloo",
            [
                "mean of the group's other rows",
                "A logprob",
                "sum over the tokens of a row, then mean over the rows",
            ],
        ),
        ("reinforce", ["A = (reward - mean of the batch)", "A logprob"]),
        ("gspo", ["clip(r, 0.9997, 1.0004) A", "ratio       sequence"]),
        ("cispo", ["stopgrad(clip(r, 0, 5)) A logprob"]),
        ("sapo", ["sigmoid(tau (r - 1)) 4/tau A", "tau 1 for A > 0, else 1.05"]),
        (
            "nanochat",
            [
                "A = (reward - mean of the group);",
                "A logprob",
                "tokens of a prompt's rows, then over the prompts",
            ],
        ),
    ],
)
def test_describe_says_what_the_objective_is(name, says):
    text = described(PRESETS[name])
    assert [phrase for phrase in says if phrase not in text] == []
    assert "0.04 x KL(policy || reference) by k3" in text
    assert "no reference is loaded" in described(PRESETS[name], kl_coef=0.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "ppo",
            [
                "GAE(rewards, critic), lambda 0.95",
                "credit      return_to_go",
                "whiten      True",
            ],
        ),
        (
            "reinforce_pp",
            ["A = (reward - mean of the batch)", "whiten      True"],
        ),
    ],
)
def test_describe_says_where_the_kl_is_in_the_reward(name, says):
    text = described(PRESETS[name])
    assert [phrase for phrase in says if phrase not in text] == []
    assert "0.04 x (logprob - ref_logprob) in the reward of each token" in text


BESIDE: dict[tuple[str, Any] | str, dict[str, Any]] = {
    "gamma": {"credit": "return_to_go"},
    "lam": {"credit": "return_to_go", "baseline": "critic", "scale": "none"},
    "value_clip": {"credit": "return_to_go", "baseline": "critic", "scale": "none"},
    ("baseline", "critic"): {"credit": "return_to_go", "scale": "none"},
    "scale_eps": {},
    "correction_level": {"correction": "mask"},
    "correction_low": {"correction": "truncate"},
    "correction_high": {"correction": "mask"},
    "kl_in": {"kl": "k1"},
}
"""What a choice needs beside it to have a meaning."""
OTHER_NUMBER = {"gamma": 0.9, "dual_clip": 3.0, "overlong": 5}


def other_choices() -> list[Any]:
    """Every choice that is not the default, one at a time."""
    hints, changed = get_type_hints(Objective), []
    for field in fields(Objective):
        choices = SURROGATES if field.name == "surrogate" else get_args(hints[field.name])
        if choices:
            values = [value for value in choices if value != field.default]
        elif field.default is False:
            values = [True]
        else:
            values = [OTHER_NUMBER.get(field.name, field.default + 0.05)]
        changed += [(field.name, value) for value in values]
    return [pytest.param(name, value, id=f"{name}-{value}") for name, value in changed]


@pytest.mark.parametrize(("name", "value"), other_choices())
def test_no_choice_goes_unmentioned(name, value):
    base = Objective(**BESIDE.get((name, value), BESIDE.get(name, {})))
    assert described(replace(base, **{name: value})) != described(base)


@pytest.mark.parametrize(
    ("objective", "run", "says"),
    [
        (Objective(baseline="running"), {}, "measure prompt difficulty"),
        (Objective(), {"updates_per_batch": 1}, "the ratio is 1, so the clip has no effect"),
        (Objective(whiten=True), {}, "no longer get exactly 0"),
        (Objective(kl_gradient="naive"), {"kl_coef": 0.1}, "wrong gradient in expectation"),
    ],
)
def test_warnings_name_valid_choices_that_are_likely_mistakes(objective, run, says):
    warnings = objective_warnings(objective, **{"kl_coef": 0.0, "updates_per_batch": 2} | run)
    assert len(warnings) == 1 and says in warnings[0]


def test_a_plain_objective_has_no_warnings():
    assert objective_warnings(Objective(), kl_coef=0.1, updates_per_batch=2) == []


def test_a_kl_of_cut_distributions_is_called_an_estimate():
    for truncates in (True, False):
        warnings = objective_warnings(GRPO, kl_coef=0.1, updates_per_batch=2, truncates=truncates)
        assert any("top-k" in line for line in warnings) == truncates
