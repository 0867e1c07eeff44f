"""Runs with a judge: it fails and the run continues, its cost is reported, its budget survives a
kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests import processes, tiny
from tests.rewards.judge_server import write_judge
from tests.trainer.runs import completions, metrics

import gruppo
from gruppo import api, inference, trust
from gruppo.config import serialization
from gruppo.types import DataError, GruppoError

DOCS = Path(__file__).parents[2] / "docs"
BARE = {"evaluation__prompts": 0, "saving__every": 1}


pytestmark = pytest.mark.usefixtures("short_waits")


def start(folder: Path, file: str, **changes: Any) -> Any:
    return api.start(tiny.config(folder, **{**BARE, "reward": [f"judge:{file}"], **changes}))


def test_a_judge_that_goes_down_and_comes_back_costs_its_rows_and_no_run(server, tmp_path):
    """Beside a second reward, too: rows without a verdict are unscored, not scored by the other
    reward alone."""
    file = write_judge(tmp_path / "mine.toml", server, "retries = 0\nconcurrency = 4")
    answer, calls = server.answer, []

    def answers_at_first_and_last(body):
        calls.append(body)
        if 8 < len(calls) <= 20:
            raise ConnectionError
        return answer(body)

    server.answer = answers_at_first_and_last
    result = start(tmp_path, file, reward=[f"judge:{file}", tiny.reward("digits")], steps=6)
    rows = metrics(result.folder)
    failed = [row["judge/mine/failed_count"] for row in rows]
    assert len(rows) == 6 and failed[-1] > 0 and failed == sorted(failed)
    assert (
        sum(row["reward/unscored_count"] for row in rows) >= failed[-1]
    )  # a question may be that of several rows
    assert rows[0]["judge/mine/input_tokens_count"] > 0
    failures = [row for row in map(json.loads, completions(result.folder)) if row["failures"]]
    assert "Server disconnected" in failures[0]["failures"] and all(
        row["reward"] is None for row in failures
    )
    page = (DOCS / "reference/metrics.md").read_text()
    used = {name for row in rows for name in row if name.startswith("judge/")}
    assert used and all(f"`{name.replace('mine', 'NAME')}`" in page for name in used)


def test_the_cost_is_in_the_metrics_the_result_and_on_the_screen(server, tmp_path, capsys):
    file = write_judge(tmp_path / "mine.toml", server)
    result = start(tmp_path, file, steps=2, evaluation__prompts=2)
    last = [row for row in metrics(result.folder) if "judge/mine/calls_count" in row][-1]
    assert f"{len(server.bodies):,} calls" in result.costs[0]
    # the metrics count the evaluation after the last step too
    assert last["judge/mine/calls_count"] == len(server.bodies)
    assert f" {last['judge/mine/cache_hits_count']:,.0f} cache hits" in result.costs[0]
    api.finish(result, show=True)
    assert result.costs[0] in capsys.readouterr().out
    asked = len(server.bodies)
    inference.evaluate_run(result.folder, prompts=2)
    assert len(server.bodies) == asked  # the same answers, from the cache


def test_a_resumed_run_counts_on_and_asks_nothing_twice(server, tmp_path, monkeypatch):
    """Killed before the first checkpoint: what was paid is counted, and its verdicts come from the
    cache."""
    whole = start(
        tmp_path / "whole", write_judge(tmp_path / "whole.toml", server, "seed = 1"), steps=3
    )
    asked = len(server.bodies)
    file = write_judge(tmp_path / "mine.toml", server, "seed = 2\nmax_calls = 1000\n")
    options = {"steps": 3, "saving__every": 2, "scoring__isolate": False}

    class Killed(BaseException):
        """As SIGKILL: nothing is saved."""

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("gruppo.trainer.loop.learn", kill)
        with pytest.raises(Killed):
            start(tmp_path / "cut", file, **options)
    paid = len(server.bodies) - asked
    counts = json.loads((tmp_path / "cut/runs/run/judges/mine/0.json").read_text())
    assert counts["calls"] == paid > 0
    result = api.start(tmp_path / "cut/runs/run")
    rows, expected = metrics(result.folder), metrics(whole.folder)
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in expected]
    assert (
        rows[-1]["judge/mine/calls_count"]
        == len(server.bodies) - asked
        == expected[-1]["judge/whole/calls_count"]
    )
    assert rows[-1]["judge/mine/cache_hits_count"] >= paid


@pytest.mark.slow
def test_no_calls_left_end_a_run_that_has_no_other_reward_and_more_continue_it(server, tmp_path):
    file = write_judge(tmp_path / "mine.toml", server, "max_calls = 15\n")
    with pytest.raises(DataError, match=r"10 steps in a row: .*the judge's 15 calls are used up"):
        start(tmp_path, file, steps=20)
    assert len(server.bodies) == 15
    write_judge(tmp_path / "mine.toml", server, "max_calls = 5000\n")
    result = api.start(tmp_path / "runs/run")
    assert metrics(result.folder)[-1]["judge/mine/calls_count"] == len(server.bodies) > 15


def test_another_rubric_is_another_run(server, tmp_path):
    file = write_judge(tmp_path / "mine.toml", server)
    result = start(tmp_path, file, steps=1)
    write_judge(tmp_path / "mine.toml", server, 'instructions = "Be kind."')
    with pytest.raises(GruppoError, match="the file of the judge mine has changed"):
        api.start(result.folder)


def test_a_foreign_run_with_a_judge_asks_nobody_without_the_flag(server, tmp_path, monkeypatch):
    """Its file would choose who gets which of this user's keys."""
    monkeypatch.delenv(trust.TRUSTED, raising=False)
    result = start(tmp_path, write_judge(tmp_path / "mine.toml", server), steps=1)
    foreign, asked = tmp_path / "foreign", len(server.bodies)
    shutil.copytree(result.folder, foreign)
    for act in (
        lambda: api.start(foreign),
        lambda: inference.evaluate_run(foreign, prompts=1),
        lambda: gruppo.train(foreign, steps=1, show=False, name="again", runs_dir=str(tmp_path)),
    ):
        with pytest.raises(
            GruppoError, match=rf"servers: judge:{tmp_path}/mine.toml.*trust_run|trust_run"
        ):
            act()
    assert len(server.bodies) == asked
    inference.evaluate_run(foreign, prompts=1, trust_run=True)
    assert len(server.bodies) > asked


def train(config: dict[str, Any]) -> None:
    api.start(serialization.from_dict(config))


@pytest.mark.slow
def test_two_ranks_count_together_and_share_the_limit_of_calls(server, tmp_path):
    file = write_judge(tmp_path / "mine.toml", server, "max_calls = 9\n")
    config = tiny.config(tmp_path, **BARE, reward=[f"judge:{file}"], steps=2)
    processes.run_ranks(2, train, serialization.to_dict(config), folder=tmp_path / "children")
    last, run = metrics(tmp_path / "runs/run")[-1], tmp_path / "runs/run"
    assert last["judge/mine/calls_count"] == len(server.bodies) <= 9
    counts = [
        json.loads((run / f"judges/mine/{rank}.json").read_text())["calls"] for rank in range(2)
    ]
    assert sum(counts) == len(server.bodies) and counts[0] <= 5 and counts[1] <= 4
