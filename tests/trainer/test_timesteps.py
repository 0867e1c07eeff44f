"""Evaluations of denoisers by the ODE; two ranks equal one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import processes
from tests.trainer import diffusion_runs
from tests.trainer.diffusion_runs import built
from tests.trainer.runs import metrics, weights

from gruppo import api
from gruppo.config import serialization
from gruppo.trainer.evaluate import evaluate, held_out
from gruppo.types import Request


@pytest.mark.silent_bug(36)
def test_an_evaluation_follows_the_ode(tmp_path):
    """In steps of its own, from latents that no seed has a part in: the reward of those
    pictures."""
    run = built(tmp_path, diffusion__eval_steps=5)
    requested = held_out(run, 3)
    mode = replace(run.sampling, temperature=0.0, ode_steps=5)
    pictured = run.policy.sample([Request(prompt, 1) for prompt in requested], mode, seed=99)
    assert pictured.actions.shape[1] == 5 and not pictured.mask.any()
    mean = sum(float(picture.mean()) for picture in pictured.completions) / 3
    assert evaluate(run, requested)[0].mean == pytest.approx(mean, rel=1e-6)


# --- ranks ----------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> None:
    api.start(serialization.from_dict(config))


@pytest.mark.silent_bug(12)
@pytest.mark.silent_bug(24)
def test_two_ranks_give_the_weights_and_metrics_of_one(tmp_path):
    """Branched groups, several updates, one of them without a row on some rank, an exact KL,
    evaluations."""
    pytest.importorskip("PIL")
    changes = {
        "data": f"images:{diffusion_runs.write_images(tmp_path / 'images')}",
        "diffusion__noise": "branched",
        "optim__eps": 0.1,
        "optim__lr": 0.01,
        "optim__epochs": 2,
        "optim__minibatches": 3,
        "stage__kl_coef": 0.1,
        "objective__kl_mask": 1e-5,
        "prompts__held_out_fraction": 0.3,
        "steps": 2,
    }
    for name, count in (("one", 1), ("two", 2)):
        config = serialization.to_dict(diffusion_runs.config(tmp_path, name=name, **changes))
        processes.run_ranks(count, train, config, folder=tmp_path / name)
    one, two = tmp_path / "runs/one", tmp_path / "runs/two"
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-5)
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"update/micro_batches_count", "update/changed_frac"}:
            expected = None if mine[name] is None else pytest.approx(mine[name], rel=1e-3, abs=1e-5)
            assert theirs[name] == expected, name
    assert any(row.get("clip/kl_mask_frac", 0) > 0 for row in metrics(one))
