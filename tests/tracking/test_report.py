"""The closing report says what was measured, with honest intervals."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from gruppo.tracking.files import MetricsFile
from gruppo.tracking.report import closing_lines, wilson_interval


def text(renderable, *, is_terminal=False, width=80):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None
    )
    console.print(renderable)
    return console.file.getvalue()


def evaluation(step, mean, low, high, **parts):
    return {
        "step": step,
        "prompts": 256,
        "scored": 256,
        "mean": mean,
        "low": low,
        "high": high,
        "parts": parts,
    }


def test_wilson_interval_of_none_is_z2_over_n_plus_z2():
    low, high = wilson_interval(0, 10)  # z^2 = 3.841459: 3.841459 / 13.841459
    assert low == 0.0 and high == pytest.approx(0.2775328, rel=1e-6)
    assert wilson_interval(10, 10) == (pytest.approx(1 - 0.2775328, rel=1e-6), 1.0)


def test_wilson_interval_holds_the_truth_about_95_times_in_100():
    n, truths = 60, [k / 40 for k in range(4, 37)]
    ends = [wilson_interval(k, n) for k in range(n + 1)]
    chance = {
        p: [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)] for p in truths
    }
    held = [
        sum(q for q, (low, high) in zip(chance[p], ends, strict=True) if low <= p <= high)
        for p in truths
    ]
    assert sum(held) / len(held) == pytest.approx(0.95, abs=0.005)


@pytest.mark.silent_bug(41)
def test_the_report_holds_reward_time_evaluations_files_and_commands(tmp_path):
    run_dir = tmp_path / "run"
    file = MetricsFile(run_dir)
    file.log(0, {"eval/reward_mean": 0.113})
    for step in range(
        1, 13
    ):  # the last ten rewards are 0.3, 0.4, ... 1.2: mean 0.75; time 12 x 6.5 s
        file.log(step, {"reward/mean": step / 10, "time/step_s": 6.5})
    file.close()
    before, after = evaluation(0, 0.113, 0.08, 0.158), evaluation(12, 0.82, 0.768, 0.863)
    commands = [
        (f"gruppo sample {run_dir} 'What is 3 + 4?'", "sample from the model"),
        ("gruppo doctor", "check"),
    ]
    output = text(closing_lines(run_dir, before, after, commands), width=400)
    assert f"{run_dir}: 12 steps in 1:18; reward 0.750 over the last 10 steps" in output
    assert "held-out reward, 256 prompts:" in output
    assert "0.113 [0.080, 0.158] before, 0.820 [0.768, 0.863] after, change +0.707" in output
    assert (
        "metrics.csv" in output and "overview.png" not in output and "final" not in output
    )  # only what is there
    assert f"  gruppo sample {run_dir} 'What is 3 + 4?'  # sample from the model" in output


def test_several_rewards_have_a_row_each_and_names_are_no_markup(tmp_path):
    before, after = (
        evaluation(0, 0.1, 0.0, 0.2, exact=0.5, **{"[red]": 0.25}),
        evaluation(9, 0.1, 0.0, 0.2, exact=0.25),
    )
    lines = text(
        closing_lines(tmp_path, before, after | {"parts": {"exact": 0.25, "[red]": 0.5}})
    ).splitlines()
    assert "  exact: 0.500 before, 0.250 after" in lines
    assert "  [red]: 0.250 before, 0.500 after" in lines


def test_time_since_the_start_and_rows_without_a_reward_are_named(tmp_path):
    file = MetricsFile(tmp_path)
    file.log(
        1,
        {
            "time/step_s": 35.0,
            "reward/mean": 0.5,
            "reward/unscored_count": 3.0,
            "progress/rollouts": 8.0,
        },
    )
    output = text(closing_lines(tmp_path, seconds=115.0), width=400)
    assert (
        "1 step in 0:35, 1:55 with loading, evaluation and saving; reward 0.500 over the last step"
        in output
    )
    assert "3 sampled rows had no reward" in output
    assert "with loading" not in text(closing_lines(tmp_path, seconds=20.0), width=400)  # resumed


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("before", [None, evaluation(0, math.nan, math.nan, math.nan)])
def test_a_run_with_nothing_measured_still_ends_politely(tmp_path, before, is_terminal):
    output = text(
        closing_lines(tmp_path / "my run", before, None), is_terminal=is_terminal, width=300
    )
    assert "0 steps in 0:00" in output and str(tmp_path / "my run") in output
