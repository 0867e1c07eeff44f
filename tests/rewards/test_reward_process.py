"""Reward functions in a process of their own: what they see, and what they cannot do to the run."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import pytest
import torch
from tests.rewards.fakes import rollouts_of

from gruppo.packing import decode, encode
from gruppo.recipes.arithmetic import in_tags
from gruppo.rewards import RewardSet, resolve_reward
from gruppo.rewards.answers import TrainerState
from gruppo.rewards.remote import RewardWorkers
from gruppo.types import DataError, GruppoError

FILE = Path(__file__).with_name("isolated.py")


@pytest.fixture(scope="module")
def processes():
    return RewardWorkers(seed=1)


@pytest.fixture
def isolated(processes):
    return lambda name: resolve_reward(f"{FILE}:{name}", processes)


@pytest.mark.slow
@pytest.mark.silent_bug(23)
@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("holds_the_lock", "timeout", "no answer within"),
        ("sleeps", "timeout", "no answer within"),
        ("leaves", "exception", "exited with status 0"),
        ("crashes", "exception", "killed by SIGSEGV"),
    ],
)
def test_a_row_that_hangs_exits_or_crashes_costs_itself_and_its_process(isolated, name, kind, says):
    scores = RewardSet(isolated(name), timeout_s=1.0).score(rollouts_of(["a", "bad", "bbb"]))
    assert [(failure.row, failure.kind) for failure in scores.failures] == [(1, kind)]
    assert says in scores.failures[0].message
    assert scores.rewards.isnan().tolist() == [False, True, False] and scores.rewards[
        [0, 2]
    ].tolist() == [1.0, 3.0]


def test_it_sees_and_returns_what_it_would_in_this_process(isolated, capsys):
    cells = {
        "cell": {1: ("a", 2), "deep": [None, 1.5, True, b"\x00"]},
        "image": torch.rand(3, 2, 2),
    }
    rollouts = rollouts_of(
        ["a", "none", "ccc"], group_ids=[0, 1, 0], targets=["T", 7], metas=[cells, cells]
    )
    state = TrainerState(4, 9, 0.5)
    here = RewardSet(resolve_reward(f"{FILE}:reads_everything")).score(rollouts, state)
    there = RewardSet(isolated("reads_everything")).score(rollouts, state)
    assert (
        torch.equal(here.rewards.nan_to_num(-1), there.rewards.nan_to_num(-1))
        and there.rewards[1].isnan()
    )
    assert (
        (here.metrics, here.extras, here.failures)
        == (there.metrics, there.extras, there.failures)
        != ({}, {}, ())
    )
    time.sleep(0.1)  # its output arrives on another pipe than its answer
    assert capsys.readouterr().out == "seen\n" * 2


def test_an_exception_names_its_file_and_line_and_a_refusal_passes(isolated):
    scores = RewardSet(isolated("refuses")).score(rollouts_of(["a", ""]))
    assert scores.failures[0].row == 1
    assert scores.failures[0].message.startswith(
        "ZeroDivisionError: float division by zero (isolated.py:"
    )
    rewards = RewardSet(isolated("checked"))
    rewards.check(["answer"])
    with pytest.raises(DataError, match="needs answers"):
        rewards.check(["x"])


def test_a_function_that_sets_signals_runs_in_the_main_thread_of_its_process(isolated):
    assert RewardSet(isolated("sets_a_signal")).score(rollouts_of("ab")).rewards.tolist() == [
        1.0,
        1.0,
    ]


def test_its_random_numbers_depend_on_the_seed_and_the_arguments_alone(isolated):
    first, again = (
        RewardSet(isolated("draws")).score(rollouts_of("ab")).rewards.tolist() for _ in range(2)
    )
    other_seed = resolve_reward(f"{FILE}:draws", RewardWorkers(seed=2))
    assert first == again != RewardSet(other_seed).score(rollouts_of("ab")).rewards.tolist()
    assert first != RewardSet(isolated("draws")).score(rollouts_of("ac")).rewards.tolist()


def test_functions_of_a_file_share_a_process_that_is_not_this_one_and_objects_are_called_here(
    isolated,
):
    rollouts = rollouts_of("abc")
    pids = {RewardSet(isolated("process")).score(rollouts).rewards[0].item() for _ in range(2)}
    assert len(pids) == 1 and os.getpid() not in pids
    assert RewardSet(isolated("an_object")).score(rollouts).rewards.tolist() == [1.0, 2.0, 3.0]


def test_rewards_of_our_recipes_are_called_here():
    """They cannot hang, and a process for them would import torch."""
    processes = RewardWorkers()
    assert resolve_reward("gruppo.recipes.arithmetic:in_tags", processes) is in_tags
    assert not processes._workers


def test_arguments_that_only_python_can_hold_are_refused_with_the_way_out(isolated):
    rollouts = rollouts_of("ab", metas=[{"day": datetime.date(2026, 1, 1)}])
    with pytest.raises(DataError, match=r"datetime\.date, which only Python.*isolate"):
        RewardSet(isolated("awaits")).score(rollouts)


def test_a_file_that_ends_the_process_on_import_is_one_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os\nos._exit(0)\n")
    with pytest.raises(GruppoError, match="cannot be imported: its process exited with status 0"):
        resolve_reward(f"{file}:f", RewardWorkers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_cross_the_pipe_bit_for_bit(dtype, shape):
    buffers: list[bytes] = []
    sent = torch.arange(6)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    received = decode(encode([{"$": sent}], buffers), iter(buffers))[0]["$"]
    assert received.dtype == dtype and received.shape == sent.shape and torch.equal(received, sent)
