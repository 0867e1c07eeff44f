"""Two processes are one run, whatever the objective compares over a batch or carries from step to
step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.trainer.runs import metrics, newest, tensors, weights
from tests.trainer.test_ranks import OWN, both, first_weights

from gruppo.rewards import step_reward

HERE = Path(__file__).resolve()
SEVERAL = {"optim__epochs": 2, "optim__minibatches": 3, "stage__kl_coef": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "ppo, shared": {"objective": "ppo", "stage__entropy_coef": 0.01, **SEVERAL},
    "ppo, separate": {
        "objective": "ppo",
        "critic__kind": "separate",
        "critic__warmup_steps": 1,
        **SEVERAL,
    },
    "reinforce_pp": {"objective": "reinforce_pp", **SEVERAL},
    "kl in the reward of a row": {"objective": {"kl": "k1", "kl_in": "reward"}, **SEVERAL},
    "running baseline, batch scale": {
        "objective": {"baseline": "running", "scale": "batch", "average": "token"}
    },
    "scale of the prompt": {"objective": {"scale": "prompt"}, "rollout__prompts": 8},
    "rows and steps": {
        "objective": {
            "combine": "normalize_then_sum",
            "credit": "return_to_go",
            "scale": "running",
        },
        "vowels": True,
    },
    "refilled": {
        "objective": "dapo",
        "rollout__refill_rounds": 2,
        "objective__overlong": 4,
        "dull": True,
        **SEVERAL,
    },
    "grown": {
        "objective": "dr_grpo",
        "rollout__first_samples": 2,
        "rollout__group_size": 4,
        "dull": True,
        **SEVERAL,
        "steps": 3,  # no group has spread in the first two
    },
    "stopped early": {
        "objective": "ppo",
        "optim__stop_kl": 1e-3,
        "optim__lr": 0.5,
        **SEVERAL,
        "optim__epochs": 4,
    },
}


@step_reward("1")
def vowels(steps: Sequence[Sequence[str]], **_: Any) -> list[list[float]]:
    """Of each step its own, and now and then none."""
    count = [[float(sum(c in "aeiou" for c in part)) for part in own] for own in steps]
    return [
        [n if len(part) % 3 else None for n, part in zip(*both, strict=True)]
        for both in zip(count, steps, strict=True)
    ]


def dull_odd(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
    """The same for every completion to an odd number's prompt."""
    values = tiny.digits(completions)
    return [
        1.0 if int(p[0]["content"].split()[0]) % 2 else v
        for p, v in zip(prompts, values, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.silent_bug(12)
@pytest.mark.silent_bug(31)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_under_the_objective(tmp_path, case):
    changes = {
        "rollout__prompts": 3,
        "rollout__group_size": 3,
        "saving__every": 1,
        "saving__keep": 9,
    } | CASES[case]
    rewards = [f"{HERE.with_name('test_ranks.py')}:spying"]
    rewards += [f"{HERE}:vowels"] * changes.pop("vowels", False)
    rewards += [f"{HERE}:dull_odd"] * changes.pop("dull", False)
    if len(rewards) > 1 and "rollout__refill_rounds" in changes:
        changes |= {"scoring__weights": (0.0, 1.0)}
    one, two, _, _ = both(tmp_path, 2, reward=rewards, **changes)
    start = torch.cat([t.flatten().double() for t in first_weights()])
    assert (weights(one) - start).abs().max() > 1e-2
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=3e-6)
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - set(OWN):
            expected = None if mine[name] is None else pytest.approx(mine[name], rel=1e-4, abs=3e-6)
            assert theirs[name] == expected, name
    logged, state = (
        metrics(one),
        [json.loads((newest(run) / "state.json").read_text()) for run in (one, two)],
    )
    assert flat(state[1]["running"]) == pytest.approx(flat(state[0]["running"]), rel=1e-5)
    assert state[0]["source"] == state[1]["source"]
    check = {"refilled": "refill/thrown_groups_count", "stopped": "update/early_stop_frac"}
    check |= {"grown": "growth/grown_rows_count"}
    for name in (metric for word, metric in check.items() if case.startswith(word)):
        assert sum(row.get(name) or 0 for row in logged) > 0
    assert (newest(one) / "critic.safetensors").exists() == ("ppo" in str(changes["objective"]))
    assert (
        tensors(newest(one) / "optimizer.safetensors").keys()
        == tensors(newest(two) / "optimizer.safetensors").keys()
    )


def flat(state: Any, path: str = "") -> dict[str, float]:
    """Numbers by their place."""
    if not isinstance(state, dict | list):
        return {path: state}
    entries = state.items() if isinstance(state, dict) else enumerate(state)
    return {name: x for key, value in entries for name, x in flat(value, f"{path}/{key}").items()}
