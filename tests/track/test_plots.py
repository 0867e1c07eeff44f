"""Every run that logged something leaves pictures, and a missing matplotlib is a note."""

from __future__ import annotations

import math
import sys

import pytest

from gruppo.track.files import MetricsFile
from gruppo.track.plots import _series, plot_run, smooth


@pytest.fixture
def run_dir(tmp_path):
    file = MetricsFile(tmp_path)
    file.log(0, {"eval/reward_mean": 0.1})
    for step in range(1, 6):
        file.log(step, {"reward/mean": step / 5, "len/mean_actions": 3.0, "kl/ref_nats": math.nan, "loss/policy": 0.0})
    file.log(5, {"eval/reward_mean": 0.9})
    return tmp_path


def test_each_logged_curve_is_a_png_and_all_are_on_the_overview(run_dir):
    paths = plot_run(run_dir)
    assert [path.name for path in paths] == ["overview.png", "reward.png", "loss.png", "length.png"]  # KL was all NaN
    for path in paths:
        assert path.parent == run_dir / "plots"
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000


def test_a_run_with_a_critic_shows_its_values_beside_the_returns_and_what_it_explains(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(1, 4):
        file.log(step, {"value/mean": 0.1, "return/mean": 0.2, "value/explained_variance_frac": step / 10})
    assert [path.name for path in plot_run(tmp_path)] == ["overview.png", "value.png", "critic.png"]


def test_a_run_without_metrics_has_no_pictures(tmp_path):
    assert plot_run(tmp_path) == []
    assert not (tmp_path / "plots").exists()


def test_a_missing_matplotlib_is_one_note_that_names_the_extra(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    notes = []
    assert plot_run(run_dir, note=notes.append) == []
    assert len(notes) == 1 and 'pip install "gruppo[report]"' in notes[0]


def test_points_are_the_values_that_were_logged():
    metrics = [
        {"step": 1, "a": 0.5},
        {"step": 2},
        {"step": 3, "a": math.nan},
        {"step": 4, "a": math.inf},
        {"step": 5, "a": 2.0},
    ]
    assert _series(metrics, "a") == ([1, 5], [0.5, 2.0])


def test_smoothing_neither_lags_nor_changes_a_constant():
    assert smooth([3.0] * 7, 2.0) == pytest.approx([3.0] * 7, rel=1e-12)
    line = [float(step) for step in range(41)]
    assert smooth(line, 2.0)[6:35] == pytest.approx(line[6:35], rel=1e-12)  # symmetric: a straight line stays
    assert smooth([5.0], 1.0) == [5.0]


def test_smoothing_weighs_neighbours_by_a_bell():
    near, far = math.exp(-0.5), math.exp(-2.0)  # one and two values away at width 1
    assert smooth([0.0, 0.0, 1.0], 1.0)[1] == pytest.approx(near / (1 + 2 * near), rel=1e-12)
    assert smooth([0.0, 0.0, 1.0], 1.0)[0] == pytest.approx(far / (1 + near + far), rel=1e-12)
