"""Kill runs at random operations and resume them until they are complete: ``python -m
benchmarks.kills --kills 60``.

An operation is a file of the run that is opened, renamed, deleted or synced, a folder that is made,
a backward pass, or an optimizer step. Each run must equal one that nothing stopped, to the bit:
weights, optimizer state, critic, random state, metrics, samples and evaluations. Of two sharded
ranks, one is killed, and both are resumed. A run that samples ahead depends on timings: it must
have learned from each draw once, in order, and its replay must equal it to the bit. Exit code 1 if
a run differs, or cannot be resumed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import processes, tiny
from tests.trainer import restoration_runs
from tests.trainer.runs import FULL, LAGGED, assert_nothing_lost, assert_same, begin_or_go_on

from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.errors import GruppoError

KINDS: dict[str, Callable[[Path], Config]] = {
    "text, KL reference, random reward": lambda folder: tiny.config(
        folder, **FULL | {"saving__keep": 2}
    ),
    "restoration": lambda folder: restoration_runs.config(
        folder, saving__every=1, evaluation__prompts=2
    ),
    "text, PPO with a critic": lambda folder: tiny.config(
        folder, objective="ppo", critic__kind="separate"
    ),
    "text, lag": lambda folder: tiny.config(
        folder, **LAGGED | {"saving__every": 2, "saving__keep": 1}
    ),
    "text, two sharded ranks": lambda folder: tiny.config(
        folder,
        **FULL
        | {
            "distributed__shard": "fsdp",
            "distributed__timeout_s": 20,
            "saving__every": 1,
            "steps": 4,
        },
    ),
}
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def count_operations(config: dict[str, Any], kill_at: int, victim: int, result: str) -> None:
    """Begin or resume the run; rank ``victim`` dies before operation ``kill_at``. Write how many
    there were."""
    import torch

    count, runs_dir, rank = 0, str(config["runs_dir"]), int(os.environ.get("RANK", "0"))
    kill_at = kill_at if rank == victim else 0

    def operation() -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        # rmtree deletes names relative to an open folder
        if event in FILE_EVENTS and (
            event in ("os.remove", "os.rmdir") or str(arguments[0]).startswith(runs_dir)
        ):
            operation()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            operation()
            return function(*arguments, **options)

        return call

    sys.addaudithook(on_event)
    os.fsync = counted(os.fsync)
    torch.Tensor.backward = counted(torch.Tensor.backward)  # type: ignore[method-assign]
    torch.optim.AdamW.step = counted(torch.optim.AdamW.step)  # type: ignore[method-assign]
    try:
        begin_or_go_on(config)
    except GruppoError as error:  # the other rank is lost
        sys.exit(error.exit_code)
    Path(f"{result}-{rank}").write_text(str(count))


def kill_and_resume(
    make: Callable[[Path], Config], kills: int, folder: Path, chance: random.Random
) -> str:
    """Kill runs of one kind ``kills`` times; return what happened. AssertionError if a run
    differs."""
    result, killed, runs = folder / "operations", 0, 0
    ranks = 1 if make(folder).distributed.shard == "none" else 2

    def config_of(name: str) -> dict[str, Any]:
        return serialization.to_dict(make(folder)) | {"name": name}

    def child(name: str, kill_at: int, victim: int = 0) -> bool:
        """Whether the run was killed."""
        target = (count_operations, config_of(name), kill_at, victim, str(result))
        if ranks == 1:
            children = [processes.start(*target, folder=folder / "child")]
        else:
            children = processes.ranks(ranks, *target, folder=folder / "child")
        codes = [one.wait() for one in children]
        errors = "\n".join(one.err for one in children)
        is_lost = -signal.SIGKILL in codes
        assert {*codes} <= ({0, 75, -signal.SIGKILL} if is_lost else {0}), (
            f"{name}: exit codes {codes}: {errors}"
        )
        return is_lost

    child("whole", 0)
    operations = [int(Path(f"{result}-{rank}").read_text()) for rank in range(ranks)]
    while killed < kills:
        runs += 1
        # a run that resumes has fewer operations to come, and may be complete before it is killed
        victim = chance.randrange(ranks)
        while child(
            f"run{runs}", chance.randint(1, operations[victim]) if killed < kills else 0, victim
        ):
            killed += 1
            victim = chance.randrange(ranks)
        if make(folder).engine.lag:
            assert_nothing_lost(folder / f"runs/run{runs}")
        else:
            assert_same(folder / f"runs/run{runs}", folder / "runs/whole")
    how = "with no draw lost or repeated" if make(folder).engine.lag else "to the bit"
    return f"{killed} kills in {runs} runs of {sum(operations)} operations: all resumed {how}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=60, help="in all, divided among the kinds of runs"
    )
    parser.add_argument("--kind", default="", help="only kinds whose name has this text")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kinds = {name: make for name, make in KINDS.items() if arguments.kind in name}
    for number, (name, make) in enumerate(kinds.items()):
        share = len(range(number, arguments.kills, len(kinds)))
        with tempfile.TemporaryDirectory() as folder:
            chance = random.Random(f"{arguments.seed} {name}")
            print(f"{name}: {kill_and_resume(make, share, Path(folder), chance)}", flush=True)


if __name__ == "__main__":
    main()
