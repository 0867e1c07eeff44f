"""The closing report says what was measured, with honest intervals."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
import torch
from rich.console import Console

from gruppo.tracking.files import MetricsFile
from gruppo.tracking.report import closing_lines, wilson_interval, write_page
from gruppo.tracking.samples import SamplesFile


def text(renderable, *, is_terminal=False, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def evaluation(step, mean, low, high, **parts):
    return {"step": step, "prompts": 256, "scored": 256, "mean": mean, "low": low, "high": high, "parts": parts}


def test_wilson_interval_of_none_is_z2_over_n_plus_z2():
    low, high = wilson_interval(0, 10)  # z^2 = 3.841459: 3.841459 / 13.841459
    assert low == 0.0 and high == pytest.approx(0.2775328, rel=1e-6)
    assert wilson_interval(10, 10) == (pytest.approx(1 - 0.2775328, rel=1e-6), 1.0)


def test_wilson_interval_of_a_half_is_half_of_sqrt_z2_over_n_plus_z2():
    # p = 1/2: centre 1/2, half width z / 2 / sqrt(n + z^2) = 1.959964 / 2 / sqrt(13.841459) = 0.2634069
    assert wilson_interval(5, 10) == (pytest.approx(0.2365931, rel=1e-6), pytest.approx(0.7634069, rel=1e-6))


def test_wilson_interval_of_nothing_is_unknown():
    assert all(math.isnan(end) for end in wilson_interval(0, 0))


def test_wilson_interval_holds_the_truth_about_95_times_in_100():
    n, truths = 60, [k / 40 for k in range(4, 37)]
    ends = [wilson_interval(k, n) for k in range(n + 1)]
    chance = {p: [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)] for p in truths}
    held = [sum(q for q, (low, high) in zip(chance[p], ends, strict=True) if low <= p <= high) for p in truths]
    assert sum(held) / len(held) == pytest.approx(0.95, abs=0.005)


@pytest.mark.silent_bug(41)
def test_the_report_holds_reward_time_evaluations_files_and_commands(tmp_path):
    run_dir = tmp_path / "run"
    file = MetricsFile(run_dir)
    file.log(0, {"eval/reward_mean": 0.113})
    for step in range(1, 13):  # the last ten rewards are 0.3, 0.4, ... 1.2: mean 0.75; time 12 x 6.5 s
        file.log(step, {"reward/mean": step / 10, "time/step_s": 6.5})
    before, after = evaluation(0, 0.113, 0.08, 0.158), evaluation(12, 0.82, 0.768, 0.863)
    commands = [(f"gruppo sample {run_dir} 'What is 3 + 4?'", "sample from the model"), ("gruppo doctor", "check")]
    output = text(closing_lines(run_dir, before, after, commands), width=400)
    assert f"{run_dir}: 12 steps in 1:18; reward 0.750 over the last 10 steps" in output
    assert "held-out, 256 prompts" in output and "0.113 [0.080, 0.158]  0.820 [0.768, 0.863]  +0.707" in output
    assert "metrics.csv" in output and "overview.png" not in output and "final" not in output  # only what is there
    assert f"  gruppo sample {run_dir} 'What is 3 + 4?'  # sample from the model" in output


def test_pictures_and_the_page_are_named_where_they_are(tmp_path):
    for name in ("images/before_after.png", "report.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    lines = [line.split("  ") for line in text(closing_lines(tmp_path), width=400).splitlines()]
    assert ["", f"{tmp_path}/images/before_after.png", "the same prompts before and after"] in lines
    assert any(line[1:2] == [f"{tmp_path}/report.html"] for line in lines)


def test_steps_that_sampled_nothing_are_steps_too(tmp_path):
    file = MetricsFile(tmp_path)
    file.log(0, {"eval/reward_mean": 0.1})
    for step in range(1, 13):  # 5 of demonstrations alone; the last is evaluated, in a row that it has already
        file.log(step, {"time/step_s": 5.0} | ({"reward/mean": 0.5} if step > 5 else {"sup/loss_nats": 1.0}))
    file.log(12, {"eval/reward_mean": 0.2})
    output = text(closing_lines(tmp_path), width=400)
    assert f"{tmp_path}: 12 steps in 1:00; reward 0.500 over the last 7 steps" in output


def test_several_rewards_have_a_row_each_and_names_are_no_markup(tmp_path):
    before, after = evaluation(0, 0.1, 0.0, 0.2, exact=0.5, **{"[red]": 0.25}), evaluation(9, 0.1, 0.0, 0.2, exact=0.25)
    lines = text(closing_lines(tmp_path, before, after | {"parts": {"exact": 0.25, "[red]": 0.5}})).splitlines()
    rows = [line.split() for line in lines]
    assert ["exact", "0.500", "0.250", "-0.250"] in rows and ["[red]", "0.250", "0.500", "+0.250"] in rows


@pytest.mark.parametrize("scale", [1, 10, 100])
def test_the_table_of_negative_rewards_fits_in_80_columns(tmp_path, scale):
    before, after = (evaluation(n, -1.123 * scale, -2.456 * scale, -1.001 * scale) for n in (0, 9))
    lines = text(closing_lines(tmp_path, before, after), width=80).splitlines()
    assert any("reward [95% interval]" in line and line.rstrip().endswith("+0.000") for line in lines)


def test_time_since_the_start_and_rows_without_a_reward_are_named(tmp_path):
    file = MetricsFile(tmp_path)
    file.log(1, {"time/step_s": 35.0, "reward/mean": 0.5, "reward/unscored_count": 3.0, "progress/rollouts": 8.0})
    output = text(closing_lines(tmp_path, seconds=115.0), width=400)
    assert "1 step in 0:35, 1:55 with loading, evaluation and saving; reward 0.500 over the last step" in output
    assert "3 of 8 sampled rows had no reward" in output
    assert "with loading" not in text(closing_lines(tmp_path, seconds=20.0), width=400)  # resumed


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("before", [None, evaluation(0, math.nan, math.nan, math.nan)])
def test_a_run_with_nothing_measured_still_ends_politely(tmp_path, before, is_terminal):
    output = text(closing_lines(tmp_path / "my run", before, None), is_terminal=is_terminal, width=300)
    assert "0 steps in 0:00" in output and str(tmp_path / "my run") in output


# --- the page ---------------------------------------------------------------------------------------------------------


def shown(path):
    return re.findall(r'<img src="([^"]+)"', path.read_text(encoding="utf-8"))


def page_evaluation(step, mean, **parts):
    return {
        "step": step,
        "prompts": 8,
        "scored": 8,
        "mean": mean,
        "low": mean - 0.1,
        "high": mean + 0.1,
        "parts": parts,
    }


def test_the_page_has_before_and_after_then_the_first_the_middle_and_the_last_samples_then_curves(tmp_path):
    file, rows = SamplesFile(tmp_path), [{"prompt": 3, "completion": torch.rand(1, 8, 8), "reward": 0.5}]
    for step in (0, 12):
        file.log_samples(step, [rows[0] | {"held_out": True}])
    for step in (1, 5, 9, 11, 12):
        file.log_samples(step, rows)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "overview.png").write_bytes(b"")
    path = write_page(tmp_path)
    steps = [f"images/step_{step:06d}.png" for step in (1, 9, 12)]
    assert path == tmp_path / "report.html" and shown(path) == ["images/before_after.png", *steps, "plots/overview.png"]
    assert all((tmp_path / name).exists() for name in shown(path)) and "3 of 5 sheets" in path.read_text()


def test_the_sheets_of_a_page_are_in_the_order_of_their_steps_and_none_is_shown_twice(tmp_path):
    (tmp_path / "images").mkdir()
    for count, step in enumerate((1000000, 7, 999999), start=1):
        (tmp_path / "images" / f"step_{step:06d}.png").write_bytes(b"")
        assert len(shown(write_page(tmp_path))) == count
    names = ["step_000007", "step_999999", "step_1000000"]
    assert shown(write_page(tmp_path)) == [f"images/{name}.png" for name in names]


def test_evaluations_and_the_last_texts_are_tables_and_texts_are_no_markup(tmp_path):
    done = [page_evaluation(0, 0.25, exact=0.5), page_evaluation(9, 0.75, exact=1.0, **{"<b>": None})]
    (tmp_path / "evaluations.json").write_text(json.dumps(done))
    file = SamplesFile(tmp_path)
    file.log_samples(1, [{"prompt": "old", "completion": "c", "reward": 1.0}])
    nasty = [{"prompt": "<script>", "completion": "a & b\n中", "reward": reward} for reward in (0.125, float("inf"))]
    file.log_samples(9, [*nasty, {"prompt": "failed", "completion": "c", "failures": []}])
    page = write_page(tmp_path).read_text(encoding="utf-8")
    assert "<td class=number>0.75</td><td class=number>0.65 to 0.85</td>" in page and "<th>&lt;b&gt;</th>" in page
    assert "<td class=number>0.125</td><td>&lt;script&gt;</td><td>a &amp; b\\n中</td>" in page
    assert "<td class=number>inf</td>" in page
    assert "<script" not in page and "<b>" not in page and "old" not in page and "failed" not in page


def test_a_folder_with_nothing_to_show_or_with_foreign_files_stops_nothing(tmp_path):
    assert write_page(tmp_path) is None and list(tmp_path.iterdir()) == []
    for text in ("", "{}", '[{"step": 1}]', "[1]", '{"a": 1}'):
        (tmp_path / "evaluations.json").write_text(text)
        assert write_page(tmp_path) is None
