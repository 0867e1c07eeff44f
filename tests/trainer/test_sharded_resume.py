"""A sharded run that is stopped and resumed is the run that was never stopped, on any number of
ranks."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.trainer.runs import assert_same, begin_or_go_on, metrics, newest, weights

from gruppo.config import serialization
from gruppo.inference import load_policy

FULL: dict[str, Any] = {
    "reward": [f"{Path(__file__).resolve()}:noisy_and_stopping"],
    "distributed__shard": "fsdp",
    "objective": "ppo",
    "critic__kind": "separate",
    "stage__kl_coef": 0.1,
    "reference": {"kind": "mixed", "update_every": 1, "update_rate": 0.5},
    "optim__minibatches": 2,
    "optim__eps": 0.1,  # else AdamW amplifies the rounding of gradients near zero
    "optim__lr": 0.05,
    "evaluation__every": 3,
    "saving__every": 0,
    "steps": 4,
}


def noisy_and_stopping(completions: Sequence[Any], trainer_state: Any, **_: Any) -> list[float]:
    """At one step, a signal comes to each rank. Where noise is wanted, each rank draws its own."""
    if os.environ.get("STOP_AT") == str(trainer_state.global_step):
        os.kill(os.getpid(), signal.SIGTERM)
    return (tiny.noisy if os.environ.get("NOISY") else tiny.digits)(completions)


def train(config: dict[str, Any], stop_at: str, noisy: str) -> None:
    os.environ |= {"STOP_AT": stop_at, "NOISY": noisy}
    begin_or_go_on(config)


def ranks(
    count: int, folder: Path, config: dict[str, Any], stop_at: str = "", noisy: str = ""
) -> list[int]:
    children = processes.ranks(
        count, train, config, stop_at, noisy, folder=folder / f"{config['name']}-{count}"
    )
    codes = [child.wait() for child in children]
    assert {*codes} <= {0, 75}, "\n".join(child.err for child in children)
    return codes


@pytest.mark.slow
@pytest.mark.silent_bug(33)
def test_two_ranks_that_were_stopped_resume_to_the_bit(tmp_path):
    configs = [
        serialization.to_dict(tiny.config(tmp_path, name=name, **FULL))
        for name in ("whole", "parts")
    ]
    assert ranks(2, tmp_path, configs[0], noisy="1") == [0, 0]
    assert ranks(2, tmp_path, configs[1], "2", noisy="1") == [75, 75]
    assert newest(tmp_path / "runs/parts").name in (
        "step_000002",
        "step_000003",
    )  # before or after the step
    assert ranks(2, tmp_path, configs[1], noisy="1") == [0, 0]
    names = {path.name for path in newest(tmp_path / "runs/parts").glob("*.safetensors")}
    assert {
        f"{file}-shard-00002-of-00002.safetensors"
        for file in ("model", "optimizer", "critic", "reference")
    } <= names
    assert_same(tmp_path / "runs/parts", tmp_path / "runs/whole")


@pytest.mark.slow
@pytest.mark.silent_bug(33)
def test_what_two_ranks_have_begun_is_gone_on_with_by_four_and_by_one(tmp_path):
    config = serialization.to_dict(tiny.config(tmp_path, name="one", **FULL))
    processes.run_ranks(1, train, config, "", "", folder=tmp_path)
    assert ranks(2, tmp_path, config | {"name": "two"}, stop_at="2") == [75, 75]
    for count, name in ((4, "four"), (1, "again-one")):
        run = shutil.copytree(tmp_path / "runs/two", tmp_path / "runs" / name)
        processes.run_ranks(count, train, config | {"name": name}, "", "", folder=tmp_path / name)
        assert f"there were 2 ranks and are {count}" in (run / "log.txt").read_text()
        torch.testing.assert_close(weights(run), weights(tmp_path / "runs/one"), rtol=0, atol=1e-6)
        for mine, theirs in zip(metrics(tmp_path / "runs/one"), metrics(run), strict=True):
            assert mine.keys() == theirs.keys()
            for metric in mine.keys() - {"update/micro_batches_count"}:
                expected = (
                    None
                    if mine[metric] is None
                    else pytest.approx(mine[metric], rel=1e-4, abs=1e-5)
                )
                assert theirs[metric] == expected, metric
        # final/ is what one process writes: whole tensors that transformers opens
        assert {path.name for path in (run / "final").iterdir()} == {
            path.name for path in (tmp_path / "runs/one/final").iterdir()
        }
    opened = torch.cat(
        [p.detach().flatten() for p in load_policy(tmp_path / "runs/four").module.parameters()]
    )
    assert opened.numel() == weights(tmp_path / "runs/four").numel()
