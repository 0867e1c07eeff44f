"""A rank that fails, and ranks that were started with different commands: one line from rank 0, and
all ranks end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import processes, tiny
from tests.distributed.faults import call_in_phases

from gruppo import api
from gruppo import distributed as dist
from gruppo.config import serialization
from gruppo.data.source import IndexedSource
from gruppo.distributed import heartbeat
from gruppo.types import DataError, GruppoError

DECISIONS = (
    "micro-batches",
    "memory back-off",
    "early stop",
    "dynamic sampling",
    "non-finite gradients",
    "signals",
)
WORK = ("sample", "reward", "publish", "save", "evaluate", "final save")


def commands(
    cases: Sequence[Any], ports: Sequence[int], out: str, prepare: Callable[[Any], list[str]]
) -> None:
    """One rank's part of several commands, each in a process group of its own; their exit codes and
    errors."""
    ended = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        error = io.StringIO()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = processes.exit_code(prepare(case))
        ended.append([code, error.getvalue()])
        call_in_phases(None)
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(ended))


def of_ranks(
    cases: Sequence[Any], prepare: Callable[[Any], list[str]], folder: Path
) -> list[list[list[Any]]]:
    """Of each case, the exit code and the standard error of each of two ranks."""
    folder.mkdir(exist_ok=True)
    arguments = (cases, processes.free_ports(len(cases)), str(folder), prepare)
    children = processes.ranks(2, commands, *arguments, folder=folder)
    codes = [child.wait(300) for child in children]  # a dozen runs
    assert codes == [0, 0], "\n".join(child.err for child in children)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return [list(case) for case in zip(*ranks, strict=True)]


def recipe(folder: Path, **changes: Any) -> str:
    config = tiny.config(folder, steps=2, distributed__timeout_s=30, **changes)
    file = folder / "recipe.json"
    file.write_text(json.dumps(serialization.to_dict(config)))
    return str(file)


# --- one rank fails -------------------------------------------------------------------------------


def failing(case: tuple[str, str]) -> list[str]:
    """The command, which fails on rank 1 when it first reaches the phase."""
    file, phase = case

    def fail(present: str) -> None:
        if present == phase and dist.rank() == 1:
            raise DataError(f"the disk broke in {phase}.")

    call_in_phases(fail)
    return ["train", file, "--name", phase.replace(" ", "-")]


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> dict[str, list[list[Any]]]:
    folder = tmp_path_factory.mktemp("failing")
    file = recipe(
        folder, rollout__refill_rounds=1, optim__epochs=2, optim__stop_kl=100.0, saving__every=1
    )
    phases = (*DECISIONS, *WORK)
    return dict(
        zip(
            phases,
            of_ranks([(file, phase) for phase in phases], failing, folder / "ranks"),
            strict=True,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("phase", (*DECISIONS, *WORK))
def test_where_one_rank_fails_in_a_collective_both_end_and_rank_0_names_it_and_the_phase(
    failed, phase
):
    (code, line), (other_code, other_line) = failed[phase]
    assert (code, other_code) == (3, 3)
    # the first command says before where its reward runs
    (said,) = [each for each in line.splitlines() if each.startswith("gruppo:")]
    assert said.startswith("gruppo: rank 1 (process ")
    assert said.endswith(f" failed in phase {phase!r}: the disk broke in {phase}.")
    assert "gruppo:" not in other_line


# --- one rank fails within a step of sharded weights ----------------------------------------------


def in_a_forward(args: list[str], problem: str) -> None:
    """The command, of which rank 1 fails within the forward of its second step: the other is in
    another collective."""
    from gruppo.modalities.text.policy import TextPolicy

    heartbeat.LEAVE_S = 1.0  # nothing ends the wait of rank 0 before
    likelihood, calls = TextPolicy.likelihood, []

    def fails(self: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(True)
        if os.environ["RANK"] == "1" and len(calls) == 2:
            raise MemoryError if problem == "memory" else DataError("the forward broke.")
        return likelihood(self, *arguments, **keywords)

    TextPolicy.likelihood = fails
    processes.command_line(args)


def ended(folder: Path, target: Callable[..., None], *arguments: Any) -> tuple[list[int], str]:
    """Exit codes of two ranks, and the line that rank 0 printed."""
    ranks = processes.ranks(2, target, *arguments, folder=folder)
    codes = [rank.wait() for rank in ranks]
    assert not [line for line in ranks[1].err.splitlines() if line.startswith("gruppo: ")]
    return codes, "".join(line for line in ranks[0].err.splitlines() if line.startswith("gruppo: "))


def test_a_rank_that_fails_in_a_step_of_sharded_weights_ends_both(tmp_path):
    file = recipe(tmp_path, evaluation__prompts=0, distributed__shard="fsdp")
    codes, line = ended(
        tmp_path / "error", in_a_forward, ["train", file, "--name", "error"], "error"
    )
    assert (
        codes == [3, 3]
        and line.startswith("gruppo: rank 1 (process ")
        and line.endswith(": the forward broke.")
    )


def test_a_rank_whose_memory_runs_out_with_sharded_weights_ends_both_with_a_smaller_budget(
    tmp_path,
):
    file = recipe(tmp_path, saving__every=1, evaluation__prompts=0, distributed__shard="fsdp")
    codes, line = ended(
        tmp_path / "short", in_a_forward, ["train", file, "--name", "memory"], "memory"
    )
    assert codes == [2, 2] and "memory ran out on rank 1 in micro-batches of 640 tokens" in line
    assert "Set --optim.token-budget 320" in line


# --- restarts -------------------------------------------------------------------------------------


def test_restarts_need_the_name_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(GruppoError, match="Add name NAME"):
        api.new_name("run", tmp_path)


# --- ranks that were started differently ----------------------------------------------------------

MISTAKES = {
    "more ranks than prompts": (
        ["--rollout.prompts", "1"],
        [],
        "rollout.prompts=1 leaves some of the 2 ranks without",
    ),
    "other settings": (
        [],
        ["--optim.lr", "0.5"],
        "rank 1 differs from rank 0 in --optim.lr: 0.5, not 0.01. Give all",
    ),
    "an unknown option": (["--optim.rate", "1"], [], "unknown option --optim.rate"),
    "an option that one rank lacks": ([], ["--optim.rate", "1"], "unknown option --optim.rate"),
    "cuda": (
        ["--device", "cuda"],
        [],
        "device cuda: torch finds no CUDA device. Set --device cpu",
    ),
    "4 bits without an adapter": (
        ["--lora.load-in-4bit", "True"],
        [],
        "lora.rank=0 trains all weights. Set --lora.rank 16",
    ),
    "a quantized model": (["--model", "quantized"], [], "and quantized weights cannot be trained"),
    "hybrid on one machine": (["--distributed.shard", "hybrid"], [], "leave nothing to"),
    "another gruppo": ([], ["CODE"], "rank 1 differs from rank 0 in gruppo's code: "),
    "other data": ([], ["DATA"], "rank 1 differs from rank 0 in the data: "),
    "no data": (
        [],
        ["--data", "/none.jsonl"],
        "rank 1 differs from rank 0 in --data: /none.jsonl, not /",
    ),
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
    options = [
        str(Path(file).parent / option) if option == "quantized" else option for option in options
    ]
    return [
        "train",
        file,
        "--name",
        name.replace(" ", "-"),
        *(o for o in options if not o.isupper()),
    ]


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, list[list[Any]]]:
    folder = tmp_path_factory.mktemp("mistakes")
    file = recipe(folder)
    config = Path(shutil.copytree(tiny.model(), folder / "quantized")) / "config.json"
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": settings})
    )
    return dict(
        zip(
            MISTAKES,
            of_ranks([(file, name) for name in MISTAKES], mistaken, folder / "ranks"),
            strict=True,
        )
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_from_rank_0_and_ends_all_ranks(refused, mistake):
    (code, line), (other_code, other_line) = refused[mistake]
    assert (code, other_code) == (2, 2)
    assert MISTAKES[mistake][2] in line and line.startswith("gruppo: ") and line.count("\n") == 1
    assert other_line == ""
