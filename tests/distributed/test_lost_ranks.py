"""A rank that ends or is stopped ends the others, which name it."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from tests import processes, tiny

from gruppo import distributed as dist
from gruppo.config import serialization
from gruppo.loading import command_name
from gruppo.trainer import checkpoint


def meet(lost: int, number: int, timeout_s: float) -> None:
    """Join a collective, which one rank does not."""
    dist.init(timeout_s)
    dist.set_advice("Resume.")
    dist.all_max(1)
    if dist.rank() == lost:
        signal.pause() if number == 0 else os.kill(os.getpid(), number)
    try:
        with dist.phase("wait"), dist.fail_together():
            try:
                dist.all_max(1)
            finally:  # a collective of a handler on the way must not wait for the timeout again
                dist.all_max(1)
    except dist.RankLost as error:
        print(error, flush=True)
        os._exit(error.exit_code)


LOST = {
    "dead": (2, signal.SIGKILL),
    "dead, hosts the store": (0, signal.SIGKILL),
    "stopped": (2, signal.SIGSTOP),
    "stopped, hosts the store": (0, signal.SIGSTOP),
}


def test_ranks_name_the_one_that_is_dead_or_stopped(tmp_path):
    """Of three ranks, since of two, none can name the wrong one. All cases at once: two wait for
    their timeout."""
    groups = {
        case: processes.ranks(3, meet, lost, int(number), 6.0, folder=tmp_path / case)
        for case, (lost, number) in LOST.items()
    }
    try:
        for case, (lost, _) in LOST.items():
            ranks = groups[case]
            others = {index: rank for index, rank in enumerate(ranks) if index != lost}
            codes = [rank.wait() for rank in others.values()]
            assert codes == [75, 75], "\n".join([case, *(rank.err for rank in others.values())])
            for index, rank in others.items():
                other = f"rank {lost} (process {ranks[lost].process.pid} on "
                assert rank.out.startswith(
                    f"rank {index} cannot continue in phase 'wait': {other}"
                ), case
                assert rank.out.endswith(") in phase 'start' has ended or stopped. Resume.\n"), case
    finally:
        for rank in (
            rank for ranks in groups.values() for rank in ranks if rank.process.is_alive()
        ):
            rank.kill()


def test_a_rank_that_is_alive_and_late_is_not_called_lost(tmp_path):
    ranks = processes.ranks(2, meet, 1, 0, 2.0, folder=tmp_path)
    assert ranks[0].wait() == 75
    late = f"rank 1 (process {ranks[1].process.pid} on "
    assert ranks[0].out.startswith(f"rank 0 waited 2 s in phase 'wait' for {late}")
    assert ") in phase 'start', which is alive. Set distributed.timeout_s higher" in ranks[0].out
    ranks[1].kill()


# --- whole runs -----------------------------------------------------------------------------------


def test_a_run_with_a_stopped_rank_saves_and_says_how_to_resume(tmp_path):
    config = tiny.config(tmp_path, distributed__timeout_s=12, steps=3, evaluation__prompts=0)
    recipe, run = tmp_path / "recipe.json", tmp_path / "runs/run"
    recipe.write_text(json.dumps(serialization.to_dict(config)))
    ranks = processes.ranks(
        2, stopping, ["train", str(recipe), "--name", "run"], folder=tmp_path / "stopped"
    )
    assert ranks[0].wait() == 75
    ranks[1].kill()
    advice = f"has ended or stopped. Continue on as many ranks with: {command_name()} resume {run}"
    line = ranks[0].err.splitlines()[-1]
    assert line.startswith(
        "gruppo: rank 0 cannot continue in phase 'collect': rank 1 "
    ) and line.endswith(advice)
    assert "bug" not in ranks[0].err and "Traceback" not in ranks[0].err
    assert checkpoint.steps(run / "checkpoints") == [
        1
    ]  # what was complete before the step that failed
    ranks = processes.ranks(
        2, processes.command_line, ["resume", str(run)], folder=tmp_path / "resumed"
    )
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err


def stopping(args: list[str]) -> None:
    """The command, of which rank 1 is stopped in its second step."""
    from gruppo.trainer import loop

    collect = loop.collect

    def stopped(run: Any, *arguments: Any) -> Any:
        if dist.rank() == 1 and run.state.step == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return collect(run, *arguments)

    loop.collect = stopped
    processes.command_line(args)
