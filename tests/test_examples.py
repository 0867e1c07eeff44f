"""The examples run, and learn what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.rewards.kernels import jailed
from tests.trainer.runs import metrics

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plain_module_learns_vowels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = example("plain_module").main(show=False, runs_dir=str(tmp_path))
    assert result.after["mean"] > result.before["mean"] + 0.3


def test_ones_own_reward_trains_a_chat_model(tmp_path: Path) -> None:
    own_reward = example("own_reward")
    words = [[{"content": "it is 7"}], [{"content": "7"}], [{"content": "8"}]]
    assert own_reward.short_and_right(words, ["7", "7", "7"]) == [1 - 0.15, 1 - 0.05, -0.05]
    options = {
        "show": False,
        "runs_dir": str(tmp_path),
        "rollout__prompts": 2,
        "rollout__group_size": 2,
    }
    result = own_reward.main(tiny.model(), steps=2, **options)
    assert (result.model / "model.safetensors").is_file() and result.after["scored"] == 8


@pytest.mark.slow
def test_a_policy_learns_to_listen_to_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever does not listen finds 3 of 7."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    _, found = example("guess_the_number").main(
        steps=100, optim__lr=4e-3, show=False, runs_dir=str(tmp_path)
    )
    assert found >= 6


def test_ones_own_loop_learns_with_the_loss_alone() -> None:
    shares = example("own_loop").main()
    assert shares[0] < 0.2 and shares[-1] > 0.9


@jailed
@pytest.mark.slow
def test_programs_are_learned_from_their_tests_alone(tmp_path: Path) -> None:
    result = example("programs").main(steps=24, optim__lr=3e-2, show=False, runs_dir=str(tmp_path))
    rewards = [row["reward/mean"] for row in metrics(result.folder)]
    assert rewards[0] < 0.05 and rewards[-1] > 0.9
