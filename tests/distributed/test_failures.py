"""A rank that fails, and ranks that were started with different commands: one line from rank 0, and all ranks end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import processes, tiny

from gruppo import api
from gruppo import distributed as dist
from gruppo.config import serialization
from gruppo.data.source import IndexedSource
from gruppo.distributed import collectives
from gruppo.trainer import checkpoint
from gruppo.types import DataError

DECISIONS = ("micro-batches", "memory back-off", "early stop", "dynamic sampling", "non-finite gradients", "signals")
WORK = ("sample", "reward", "publish", "save", "evaluate", "final save")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def commands(cases: Sequence[Any], ports: Sequence[int], out: str, prepare: Callable[[Any], list[str]]) -> None:
    """One rank's part of several commands, each in a process group of its own; their exit codes and errors."""
    ended = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        error = io.StringIO()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = processes.exit_code(prepare(case))
        ended.append([code, error.getvalue()])
        collectives.test_hook = None
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(ended))


def of_ranks(cases: Sequence[Any], prepare: Callable[[Any], list[str]], folder: Path) -> list[list[list[Any]]]:
    """Of each case, the exit code and the standard error of each of two ranks."""
    folder.mkdir(exist_ok=True)
    arguments = (cases, free_ports(len(cases)), str(folder), prepare)
    processes.run_ranks(2, commands, *arguments, folder=folder)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return [list(case) for case in zip(*ranks, strict=True)]


def recipe(folder: Path, **changes: Any) -> str:
    config = tiny.config(folder, steps=2, distributed__timeout_s=20, **changes)
    file = folder / "recipe.json"
    file.write_text(json.dumps(serialization.to_dict(config)))
    return str(file)


# --- one rank fails ---------------------------------------------------------------------------------------------------


def failing(case: tuple[str, str]) -> list[str]:
    """The command, which fails on rank 1 when it first reaches the phase."""
    file, phase = case

    def fail(present: str) -> None:
        if present == phase and dist.rank() == 1:
            raise DataError(f"the disk broke in {phase}.")

    collectives.test_hook = fail
    return ["train", file, "--name", phase.replace(" ", "-")]


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> dict[str, list[list[Any]]]:
    folder = tmp_path_factory.mktemp("failing")
    file = recipe(folder, rollout__refill_rounds=1, optim__epochs=2, optim__stop_kl=100.0, saving__every=1)
    phases = (*DECISIONS, *WORK)
    return dict(zip(phases, of_ranks([(file, phase) for phase in phases], failing, folder / "ranks"), strict=True))


@pytest.mark.parametrize("phase", (*DECISIONS, *WORK))
def test_where_one_rank_fails_in_a_collective_both_end_and_rank_0_names_it_and_the_phase(failed, phase):
    (code, line), (other_code, other_line) = failed[phase]
    assert (code, other_code) == (3, 3)
    assert line.startswith("gruppo: rank 1 (process ")
    assert line.endswith(f" failed in phase {phase!r}: the disk broke in {phase}.\n") and line.count("\n") == 1
    assert other_line == ""


# --- memory -----------------------------------------------------------------------------------------------------------


def running_out(case: str) -> list[str]:
    """The command, in which memory runs out once on rank 1."""
    from gruppo.modalities.text.policy import TextPolicy

    likelihood, ran_out = TextPolicy.likelihood, []

    def once(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if dist.rank() == 1 and not ran_out:
            ran_out.append(True)
            raise MemoryError
        return likelihood(self, *arguments, **keywords)

    TextPolicy.likelihood = once
    return ["train", case, "--name", "memory"]


def test_memory_that_runs_out_on_one_rank_makes_smaller_micro_batches_on_all(tmp_path):
    ranks = of_ranks([recipe(tmp_path)], running_out, tmp_path / "ranks")[0]
    assert [code for code, _ in ranks] == [0, 0]
    warned = [line for line in ranks[1][1].splitlines() if "memory ran out" in line]
    assert len(warned) == 1 and "640 tokens; going on with 40." in warned[0]
    # the state of rank 0, whose memory did not run out
    saved = checkpoint.load_latest(tmp_path / "runs/memory/checkpoints")
    assert saved is not None and saved.state["token_budget"] == 40 and saved.state["has_run_out"]


# --- ranks that were started differently ------------------------------------------------------------------------------

MISTAKES = {
    "more ranks than prompts": (["--rollout.prompts", "1"], [], "rollout.prompts=1 leaves some of the 2 ranks without"),
    "other settings": ([], ["--optim.lr", "0.5"], "rank 1 differs from rank 0 in --optim.lr: 0.5, not 0.01. Give all"),
    "an unknown option": (["--optim.rate", "1"], [], "unknown option --optim.rate"),
    "an option that one rank lacks": ([], ["--optim.rate", "1"], "unknown option --optim.rate"),
    "nccl": (["--distributed.backend", "nccl"], [], "distributed.backend=nccl needs CUDA, and torch finds no"),
    "cuda": (["--device", "cuda"], [], "--device cuda: torch finds no CUDA device. Set --device cpu"),
    "another gruppo": ([], ["CODE"], "rank 1 differs from rank 0 in gruppo's code: "),
    "other data": ([], ["DATA"], "rank 1 differs from rank 0 in the data: "),
    "no data": ([], ["--data", "/none.jsonl"], "rank 1 differs from rank 0 in --data: /none.jsonl, not /"),
}
"""Options of both ranks, further ones of rank 1, and the line."""
CHECK_EQUAL, FINGERPRINT = api.check_equal, IndexedSource.fingerprint


def mistaken(case: tuple[str, str]) -> list[str]:
    file, name = case
    api.check_equal, IndexedSource.fingerprint = CHECK_EQUAL, FINGERPRINT
    options, further, _ = MISTAKES[name]
    if int(os.environ["RANK"]) == 1:
        options = options + further
        if "CODE" in further:
            api.check_equal = lambda own: CHECK_EQUAL(own | {"gruppo's code": "0"})
        if "DATA" in further:
            IndexedSource.fingerprint = lambda self: "other"
    return ["train", file, "--name", name.replace(" ", "-"), *(o for o in options if not o.isupper())]


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, list[list[Any]]]:
    folder = tmp_path_factory.mktemp("mistakes")
    file = recipe(folder)
    return dict(zip(MISTAKES, of_ranks([(file, name) for name in MISTAKES], mistaken, folder / "ranks"), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_from_rank_0_and_ends_all_ranks(refused, mistake):
    (code, line), (other_code, other_line) = refused[mistake]
    assert (code, other_code) == (2, 2)
    assert MISTAKES[mistake][2] in line and line.startswith("gruppo: ") and line.count("\n") == 1
    assert other_line == ""
