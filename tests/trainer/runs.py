"""Running, stopping and comparing whole runs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests import tiny
from tests.collecting import collect

from gruppo import api
from gruppo.build import Parts
from gruppo.config import serialization
from gruppo.config.schema import EngineConfig
from gruppo.tracking.files import read_completions
from gruppo.trainer import checkpoint
from gruppo.trainer.ledger import Ledger
from gruppo.trainer.loop import Stopped
from gruppo.trainer.run import Run
from gruppo.trainer.update import learn
from gruppo.types import MicroBatch, Rollouts, TrainBatch

CLOCKED = ("time/", "mem/", "rate/")
"""Metrics that no two runs share."""
SIMPLE: dict[str, Any] = {}
FULL: dict[str, Any] = {
    "reward": [tiny.reward("noisy")],
    "optim__epochs": 2,
    "optim__minibatches": 2,
    "optim__warmup_steps": 3,
    "optim__decay": "cosine",
    "stage__kl_coef": 0.1,
    "stage__entropy_coef": 0.01,
}
"""Several updates a batch, a reference, a schedule, and a reward that draws from the process's
generator."""


LAGGED: dict[str, Any] = {
    "engine__kind": "tests.trainer.beside:engine",
    "engine__lag": 2,
    "objective__correction": "truncate",
    "reward": [tiny.reward("noisy")],
    "evaluation__every": 0,
    "evaluation__prompts": 0,
}
"""Samples ahead of the trainer."""


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not name.startswith(CLOCKED)} for row in rows
    ]


def completions(run: Path) -> list[bytes]:
    return [
        line for path in sorted((run / "completions").glob("*")) for line in read_completions(path)
    ]


def steps_logged(run: Path) -> int:
    """How many steps a run that is under way has logged."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b'"reward/mean"')
    except FileNotFoundError:
        return 0


def assert_same(run: Path, other: Path) -> None:
    """Weights, optimiser, random state, cursor, counters, metrics, samples, evaluations: equal to
    the bit."""
    assert tensors(run / "final/model.safetensors") == tensors(other / "final/model.safetensors")
    assert completions(run) == completions(other)
    last, other_last = newest(run), newest(other)
    assert last.name == other_last.name
    names = sorted(path.name for path in last.glob("*.safetensors"))
    assert names == sorted(path.name for path in other_last.glob("*.safetensors"))
    assert any(name.startswith("model") for name in names)
    for name in names:
        assert tensors(last / name) == tensors(other_last / name)
    assert json.loads((last / "state.json").read_text()) == json.loads(
        (other_last / "state.json").read_text()
    )
    assert metrics(run) == metrics(other)
    for name in ("samples.jsonl", "evaluations.json"):
        assert (run / name).read_text() == (other / name).read_text()


def learned_from(run: Path) -> list[int]:
    """Positions of the draws that the steps of a run with lag learned from, in order, as its ledger
    has them."""
    steps = Ledger(run, is_replayed=True).steps
    return [position for step in sorted(steps) for position in steps[step]]


def assert_nothing_lost(run: Path) -> None:
    """A complete run with lag has learned from each draw once, in order, and from what its ledger
    has."""
    config = serialization.load(run / "config.json")
    assert learned_from(run) == list(range(config.steps * config.rollout.prompts))
    assert [row["step"] for row in metrics(run) if "lag/max" in row] == [
        *range(1, config.steps + 1)
    ]
    again = replace(
        config,
        name=f"{run.name}-replay",
        engine=EngineConfig(lag=config.engine.lag, replay=str(run)),
    )
    repeated = api.start(again).folder
    assert tensors(repeated / "final/model.safetensors") == tensors(run / "final/model.safetensors")
    assert completions(repeated) == completions(run)


def newest(run: Path) -> Path:
    return run / "checkpoints" / f"step_{checkpoint.steps(run / 'checkpoints')[-1]:06d}"


def tensors(path: Path) -> dict[str, str]:
    """A digest of each tensor's bits: pytest takes minutes to show where two bodies of bytes
    differ."""
    bits = {
        name: tensor.reshape(-1).view(torch.uint8).numpy()
        for name, tensor in load_file(path).items()
    }
    return {name: hashlib.sha256(one.tobytes()).hexdigest() for name, one in bits.items()}


def weights(run: Path) -> torch.Tensor:
    """The trained weights in one vector."""
    found = load_file(run / "final/model.safetensors")
    return torch.cat([found[name].flatten().double() for name in sorted(found)])


def begin_or_go_on(config: dict[str, Any], parts: Parts | None = None) -> None:
    """What a supervisor does: start the run, or resume it. Exit code 75 where a signal stopped
    it."""
    run = Path(config["runs_dir"]) / config["name"]
    try:
        if (run / "config.json").is_file():
            api.start(run, parts)
        else:
            api.start(serialization.from_dict(config), parts)
    except Stopped:
        sys.exit(75)


class Signalling:
    """A reward that sends this process signals while it is asked for the n-th time."""

    def __init__(
        self, at: int, numbers: Sequence[int] = (signal.SIGTERM,), swallows: bool = False
    ) -> None:
        self.at, self.numbers, self.swallows, self.calls = at, numbers, swallows, 0

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        self.calls += 1
        try:
            if self.calls == self.at:
                for number in self.numbers:
                    os.kill(os.getpid(), number)
        except BaseException:
            if not self.swallows:
                raise
        return tiny.digits(completions)


def stepped(run: Run) -> tuple[TrainBatch, dict[str, float]]:
    """One step: its batch, and the metrics of its updates."""
    step_params = run.stage_schedule.step_params(run.state.step)
    batch = collect(run, step_params).batch
    logged = learn(run, batch, step_params)
    run.state.step += 1
    if run.reference is not None:
        run.reference.update(run.policy, run.state.step)
    return batch, logged


def whole(rollouts: Rollouts) -> MicroBatch:
    """One micro-batch of all rows and columns."""
    return MicroBatch(torch.arange(len(rollouts)), slice(0, rollouts.mask.shape[1]))
