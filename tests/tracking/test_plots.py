"""Every run that logged something leaves pictures, and a missing matplotlib is a note."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from matplotlib.figure import Figure

from gruppo.loading import install_command
from gruppo.tracking.files import MetricsFile, read_metrics
from gruppo.tracking.panels import Panel, panels_of, stage_starts
from gruppo.tracking.plots import draw_panel, plot_run, smooth


@pytest.fixture
def run_dir(tmp_path):
    file = MetricsFile(tmp_path)
    file.log(0, {"eval/reward_mean": 0.1})
    for step in range(1, 6):
        file.log(
            step,
            {
                "reward/mean": step / 5,
                "len/mean_actions": 3.0,
                "kl/ref_nats": math.nan,
                "loss/policy": 0.0,
            },
        )
    file.log(5, {"eval/reward_mean": 0.9})
    return tmp_path


def test_each_logged_curve_is_a_png_and_all_are_on_the_overview(run_dir):
    paths = plot_run(run_dir)
    assert [path.name for path in paths] == [
        "overview.png",
        "reward.png",
        "loss.png",
        "length.png",
    ]  # KL was all NaN
    for path in paths:
        assert path.parent == run_dir / "plots"
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000


def test_a_run_without_metrics_has_no_pictures(tmp_path):
    assert plot_run(tmp_path) == []
    assert not (tmp_path / "plots").exists()


def test_a_missing_matplotlib_is_one_note_that_names_the_extra(run_dir, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    notes = []
    assert plot_run(run_dir, note=notes.append) == []
    assert len(notes) == 1 and install_command("report") in notes[0]


def test_smoothing_neither_lags_nor_changes_a_constant():
    assert smooth([3.0] * 7) == pytest.approx([3.0] * 7, rel=1e-12)
    line = [float(step) for step in range(101)]
    assert smooth(line)[10:90] == pytest.approx(line[10:90], rel=1e-12)  # a straight line stays
    assert smooth([5.0]) == [5.0] and smooth([1.0, 2.0]) == pytest.approx([1.0, 2.0])


# --- what is in a panel ---------------------------------------------------------------------------


def drawn(
    curve: Panel, metrics: list[dict[str, float]], starts: dict[int, str] | None = None
) -> Any:
    """The axes of one panel."""
    axes = Figure().subplots()
    draw_panel(axes, curve, metrics, starts or {})
    return axes


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_every_line_of_a_panel_is_what_was_logged_and_a_band_is_around_the_first():
    metrics = [{"step": n, "a": 1.0, "b": 5.0 * n, "std": 0.25} for n in range(1, 9)]
    axes = drawn(Panel("p", "P", "u", ("a", "b"), band="std"), metrics)
    thin = [line for line in axes.lines if line.get_alpha()]
    assert [list(line.get_ydata()) for line in thin] == [[1.0] * 8, [5.0 * n for n in range(1, 9)]]
    [band] = axes.collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert (ends.min(), ends.max()) == (pytest.approx(0.75), pytest.approx(1.25))
    assert legend(axes) == ["a", "b"]


def test_a_value_that_is_set_is_drawn_as_it_is_and_not_smoothed():
    metrics = [{"step": n, "lr": float(n > 3)} for n in range(1, 7)]
    [line] = drawn(Panel("lr", "", "", ("lr",), is_setting=True), metrics).lines
    assert list(line.get_ydata()) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_each_stage_begins_at_a_line_with_its_name_on_every_panel(tmp_path):
    file = MetricsFile(tmp_path)
    for step, number in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3)):
        file.log(step, {"stage/number": float(number), "reward/mean": 0.5})
    metrics = read_metrics(tmp_path)
    assert stage_starts(tmp_path, metrics) == {3: "2", 5: "3"}
    (tmp_path / "config.json").write_text(
        json.dumps({"stages": [{"name": "sup"}, {"name": "ramp"}, {"name": ""}]})
    )
    starts = stage_starts(tmp_path, metrics)
    assert starts == {3: "ramp", 5: "3"}
    axes = drawn(Panel("p", "", "", ("reward/mean",)), metrics, starts)
    vertical = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert vertical == [2.5, 4.5]
    assert [text.get_text() for text in axes.texts] == ["ramp", "3"]
    assert stage_starts(tmp_path, [{"step": 1, "reward/mean": 0.5}]) == {}


# --- which panels there are -----------------------------------------------------------------------


def names_of(*rows: dict[str, float]) -> list[str]:
    return [
        curve.name
        for curve in panels_of([{"step": n, **row} for n, row in enumerate(rows, start=1)])
    ]


def test_a_metric_with_nothing_to_show_has_no_panel():
    assert names_of({"optim/lr": 0.1}, {"optim/lr": 0.1}) == []
    assert names_of({"optim/lr": 0.1}, {"optim/lr": 0.2}) == ["lr"]
    assert names_of({"group/size_8_count": 4.0}, {"group/size_8_count": 2.0}) == []
    assert names_of({"group/size_8_count": 4.0}, {"group/size_9_count": 2.0}) == ["group_sizes"]
    assert names_of({"update/epochs_count": 3.0}, {"update/epochs_count": 1.5}) == ["epochs"]
    assert names_of({"kl/ref_nats": math.nan, "reward_corr_within_group/a/b": math.inf}) == []


def test_every_statistic_of_groups_stages_and_epochs_has_a_panel():
    row = {
        "reward/std_within_group": 1.0,
        "group/zero_spread_frac": 0.0,
        "reward/normalised_mean_abs": 0.5,
        "advantage/std": 1.0,
        "advantage/min": -1.0,
        "sup/loss_nats": 2.0,
        "reference/distance_frac": 0.1,
        **{
            f"epoch/{n}/{metric}": float(n)
            for n in (1, 2)
            for metric in ("ratio_max", "clip_frac", "kl_old_k3_nats")
        },
        **{f"epoch/{n}/updates_count": 1.0 for n in (1, 2)},
    }
    scheduled = ("kl_coef", "entropy_coef", "rl_coef", "sup_coef", "temperature")
    rows = [row | {f"stage/{name}": value for name in scheduled} for value in (0.5, 1.0)]
    of_epochs = ["epoch_ratio", "epoch_clip", "epoch_kl"]
    of_course = ["distance", "coefficients", "temperature"]
    of_groups = ["spread", "zero_spread", "normalised_reward", "advantage"]
    assert names_of(*rows) == [*of_groups, "supervised", *of_epochs, *of_course]


def test_several_reward_functions_have_a_panel_together():
    assert names_of({"reward/f/mean": 1.0}) == []  # the panel of the sum shows it
    [panel] = panels_of([{"step": 1, "reward/f/mean": 1.0, "reward/a b:c/mean": 2.0}])
    assert panel.metrics == ("reward/f/mean", "reward/a b:c/mean")
