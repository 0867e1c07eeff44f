"""Two ranks of which one fails, is killed or is stopped where a phase or a collective begins, and
the continued run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from tests import processes, tiny
from tests.trainer.runs import weights

from gruppo import distributed as dist
from gruppo.config import serialization
from gruppo.distributed import collectives
from gruppo.types import DataError

Action = Literal["fail", "kill", "stop"]
Shard = Literal["none", "fsdp"]
EXIT_CODES: dict[Action, int] = {"fail": 3, "kill": 75, "stop": 75}
"""Of the rank that goes on."""


@dataclass(frozen=True)
class Fault:
    action: Action
    phase: str
    shard: Shard = "none"
    victim: int = 1

    @property
    def name(self) -> str:
        return "-".join(map(str, asdict(self).values())).replace(" ", "_")


def recipe(folder: Path, shard: Shard, timeout_s: float) -> str:
    """A run that has every phase."""
    changes = {
        "rollout__refill_rounds": 1,
        "optim__epochs": 2,
        "optim__stop_kl": 100.0,
        "saving__every": 1,
    }
    changes |= {"distributed__shard": shard, "distributed__timeout_s": timeout_s, "steps": 2}
    file = folder / f"{shard}.json"
    file.write_text(json.dumps(serialization.to_dict(tiny.config(folder, **changes))))
    return str(file)


PHASE, WAITING = collectives.phase, collectives.waiting


def call_in_phases(act: Callable[[str], None] | None) -> None:
    """Call a function with the phase where one begins, and before each collective; None: none any
    more."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with PHASE(name):
            if dist.world_size() > 1:
                act(name)
            yield

    @contextmanager
    def waiting() -> Iterator[None]:
        if collectives._left is None and collectives._heartbeat is not None:
            act(collectives._heartbeat.phase)
        with WAITING():
            yield

    dist.phase = PHASE if act is None else phase
    collectives.waiting = dist.waiting = WAITING if act is None else waiting


def train(file: str, name: str, fault: dict[str, object] | None, restarts: int) -> None:
    """One rank of the command, as torchrun starts it; write how often each phase came."""
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_MAX_RESTARTS": "1"}
    seen: Counter[str] = Counter()

    def act(phase: str) -> None:
        seen[phase] += 1
        if (
            fault is None
            or dist.rank() != fault["victim"]
            or (phase, seen[phase]) != (fault["phase"], fault["at"])
        ):
            return
        (Path(file).parent / f"{name}-at").write_text(str(time.time()))
        if fault["action"] == "fail":
            raise DataError("the disk broke.")
        os.kill(os.getpid(), signal.SIGKILL if fault["action"] == "kill" else signal.SIGSTOP)

    call_in_phases(act)
    code = processes.exit_code(["train", file, "--name", name])
    (Path(file).parent / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    os._exit(code)


class Faults:
    """Runs in one folder; the undisturbed ones, which the others must equal, are run once."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        self.whole = cache(self._whole)

    def _whole(self, shard: Shard) -> tuple[str, torch.Tensor, Counter[str]]:
        """The recipe, and the weights and the phases of the run that nothing disturbs."""
        file, name = recipe(self.folder, shard, self.timeout_s), f"whole-{shard}"
        ranks = processes.ranks(2, train, file, name, None, 0, folder=self.folder / name)
        assert [rank.wait(300) for rank in ranks] == [0, 0], ranks[0].err
        seen = json.loads((self.folder / f"{name}-1.json").read_text())
        return file, weights(self.folder / "runs" / name), Counter(seen)

    def start(self, fault: Fault) -> list[processes.Child]:
        """Start a run with a fault in the middle of its phase."""
        file, _, seen = self.whole(fault.shard)
        at = {"at": seen[fault.phase] // 2 + 1}
        return processes.ranks(
            2, train, file, fault.name, asdict(fault) | at, 0, folder=self.folder / fault.name
        )

    def disturb(self, fault: Fault) -> str:
        """Run with a fault in the middle of its phase, and once more; return what happened.
        AssertionError if wrong."""
        return self.finish(fault, self.start(fault))

    def finish(self, fault: Fault, ranks: list[processes.Child]) -> str:
        """Wait for what ``start`` began, and run once more."""
        file, expected, seen = self.whole(fault.shard)
        name, number = fault.name, seen[fault.phase] // 2 + 1
        other, victim = ranks[1 - fault.victim], ranks[fault.victim]
        code = other.wait(300)
        took_s = time.time() - float((self.folder / f"{name}-at").read_text())
        victim_code = victim.kill() if fault.action == "stop" else victim.wait(60)
        said = [line for line in other.err.splitlines() if line.startswith("gruppo: ")]
        assert code == EXIT_CODES[fault.action], f"exit code {code}: {other.err[-2000:]}"
        assert victim_code == (3 if fault.action == "fail" else -signal.SIGKILL), (
            f"{victim_code}: {victim.err[-2000:]}"
        )
        # the rank that failed reports it itself where it is rank 0
        named = (
            "the disk broke."
            if fault.action == "fail"
            else f"rank {fault.victim} (process {victim.process.pid} "
        )
        speaker = victim if fault.action == "fail" and fault.victim == 0 else other
        said = (
            said
            if speaker is other
            else [line for line in victim.err.splitlines() if line.startswith("gruppo: ")]
        )
        assert len(said) == 1 and named in said[0], f"{said}: {speaker.err[-2000:]}"
        again = processes.ranks(
            2, train, file, name, None, 1, folder=self.folder / f"{name}-second"
        )
        assert [rank.wait(300) for rank in again] == [0, 0], again[0].err[-2000:]
        assert torch.equal(weights(self.folder / "runs" / name), expected), (
            "other weights after the restart"
        )
        return (
            f"collective {number} of {seen[fault.phase]}, the other rank ended within "
            f"{took_s:.1f} s"
        )
