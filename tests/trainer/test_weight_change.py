"""Whether an update changes the weights at all."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
from tests import tiny
from tests.trainer.test_step import run_in, step
from torch import nn

from gruppo import api
from gruppo.build import Parts
from gruppo.modalities.text import from_pretrained
from gruppo.trainer.weight_change import WeightChange, warn_if_idle


def moved(*values: list[float], gradients: list[list[float] | None], lr: float = 0.5) -> Any:
    """What a step of plain gradient descent changes."""
    parameters = [nn.Parameter(torch.tensor(v)) for v in values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    optimizer = torch.optim.SGD(parameters, lr=lr)
    before = WeightChange(optimizer)
    optimizer.step()
    return before.stat()


@pytest.mark.silent_bug(28)
@pytest.mark.silent_bug(41)
def test_the_share_of_changed_weights_by_hand():
    """1e9 + 1 is 1e9 in float32; a weight without a gradient is not asked."""
    stat = moved([1.0, 2.0, 1e9], [5.0, 1e9], [7.0], gradients=[[1.0, 0.0, 1.0], [2.0, 2.0], None])
    assert (stat.count, stat.sum) == (4, 2)
    assert moved([1.0], gradients=[None]).count == 0
    assert moved([1.0], gradients=[[1.0]], lr=0.0).count == 0  # it was not to change


@pytest.mark.silent_bug(28)
@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_master_weights_in_bfloat16_that_stand_still_are_warned_of(tmp_path, caplog, objective):
    changes = {"optim__lr": 1e-6, "optim__eps": 1e-8, "objective": objective}
    with caplog.at_level(logging.WARNING, "gruppo"):
        _, logged = step(run_in(tmp_path, **changes))
    assert logged["update/changed_frac"] > 0.9 and "changed" not in caplog.text
    policy = from_pretrained(tiny.model(), compute="float32")
    policy.module.bfloat16()
    with caplog.at_level(logging.WARNING, "gruppo"):
        _, logged = step(run_in(tmp_path, Parts(model=policy), **changes))
    assert logged["update/changed_frac"] < 0.05
    assert "step 0: an update changed" in caplog.text and "rounding to bfloat16" in caplog.text
    assert "hold the weights in float32" in caplog.text


def never(completions: Any, **_: Any) -> list[float | None]:
    """Scores the first step, and nothing after it."""
    never.calls += 1  # type: ignore[attr-defined]
    return tiny.digits(completions) if never.calls == 1 else [None] * len(completions)  # type: ignore[attr-defined]


never.calls = 0  # type: ignore[attr-defined]


def test_three_steps_without_a_gradient_are_reported(tmp_path, caplog):
    config = tiny.config(tmp_path, steps=5, evaluation__prompts=0, saving__every=0)
    with caplog.at_level(logging.WARNING, "gruppo"):
        api.start(config, Parts(rewards=[never]))
    (message,) = (text for text in caplog.messages if "nothing was learned" in text)
    assert re.search(
        r"nothing was learned in the last 3 steps.*doctor .*runs/run says why", message
    )


def test_a_step_with_a_gradient_begins_the_count_again(tmp_path, caplog):
    run = run_in(tmp_path, objective__mask_truncated=True)
    masked = {
        "grad/norm": 0.0,
        "advantage/mean_abs": math.nan,
        "reward/mean": 0.5,
        "finish/truncated_frac": 1.0,
    }
    with caplog.at_level(logging.WARNING, "gruppo"):
        for norm in (0.0, 0.0, 1.0, 0.0, 0.0, math.nan, 0.0, 0.0):
            warn_if_idle(
                run,
                masked | {"grad/norm": norm} | ({"advantage/mean_abs": 0.5} if norm else {}),
                tmp_path,
            )
        for _ in range(3):
            warn_if_idle(
                run, masked | {"grad/critic_norm": 0.5}, tmp_path
            )  # a critic that learns alone
        assert not caplog.messages
        for _ in range(2):
            warn_if_idle(run, masked, tmp_path)
        warn_if_idle(run, masked, tmp_path)
    assert "nothing was learned" in caplog.text
