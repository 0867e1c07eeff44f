"""Every run that logged something leaves pictures, and a missing matplotlib is a note."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from gruppo.loading import install_command
from gruppo.tracking.files import MetricsFile, read_metrics
from gruppo.tracking.plots import (
    Panel,
    color_scale,
    draw_panel,
    heatmap_cells,
    panels_of,
    plot_run,
    smooth,
    stage_starts,
)


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
        "groups.png",
        "loss.png",
        "length.png",
    ]  # KL was all NaN
    for path in paths:
        assert path.parent == run_dir / "plots"
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000


def test_a_run_with_a_critic_shows_its_values_beside_the_returns_and_what_it_explains(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(1, 4):
        file.log(
            step,
            {"value/mean": 0.1, "return/mean": 0.2, "value/explained_variance_frac": step / 10},
        )
    assert [path.name for path in plot_run(tmp_path)] == ["overview.png", "value.png", "critic.png"]


def test_a_run_without_metrics_has_no_pictures(tmp_path):
    assert plot_run(tmp_path) == []
    assert not (tmp_path / "plots").exists()


def test_a_missing_matplotlib_is_one_note_that_names_the_extra(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    notes = []
    assert plot_run(run_dir, note=notes.append) == []
    assert len(notes) == 1 and install_command("report") in notes[0]


def test_smoothing_neither_lags_nor_changes_a_constant():
    assert smooth([3.0] * 7, 2.0) == pytest.approx([3.0] * 7, rel=1e-12)
    line = [float(step) for step in range(41)]
    assert smooth(line, 2.0)[6:35] == pytest.approx(
        line[6:35], rel=1e-12
    )  # symmetric: a straight line stays
    assert smooth([5.0], 1.0) == [5.0]


def test_smoothing_weighs_neighbours_by_a_bell():
    near, far = math.exp(-0.5), math.exp(-2.0)  # one and two values away at width 1
    assert smooth([0.0, 0.0, 1.0], 1.0)[1] == pytest.approx(near / (1 + 2 * near), rel=1e-12)
    assert smooth([0.0, 0.0, 1.0], 1.0)[0] == pytest.approx(far / (1 + near + far), rel=1e-12)


# --- what is in a panel -----------------------------------------------------------------------------------------------


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
    axes = drawn(Panel("p", "P", "u", {"a": "first", "b": "second"}, band="std"), metrics)
    thin = [line for line in axes.lines if line.get_linewidth() < 1]
    assert [list(line.get_ydata()) for line in thin] == [[1.0] * 8, [5.0 * n for n in range(1, 9)]]
    [band] = axes.collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert (ends.min(), ends.max()) == (pytest.approx(0.75), pytest.approx(1.25))
    assert (
        legend(axes) == ["first", "second"] and axes.get_ylim()[1] > 40
    )  # the legend has room of its own


def test_a_value_that_is_set_is_drawn_as_it_is_and_not_smoothed():
    metrics = [{"step": n, "lr": float(n > 3)} for n in range(1, 7)]
    [line] = drawn(Panel("lr", "", "", {"lr": "lr"}, style="steps"), metrics).lines
    assert list(line.get_ydata()) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


def test_more_lines_than_colors_are_all_drawn():
    names = [f"m{n}" for n in range(11)]
    axes = drawn(
        Panel("p", "", "", {n: n for n in names}), [{"step": 1} | dict.fromkeys(names, 1.0)]
    )
    assert legend(axes) == names


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
    axes = drawn(Panel("p", "", "", {"reward/mean": "mean"}), metrics, starts)
    vertical = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert vertical == [2.5, 4.5]
    assert [text.get_text() for text in axes.texts] == ["ramp", "3"]
    assert stage_starts(tmp_path, [{"step": 1, "reward/mean": 0.5}]) == {}


def test_a_histogram_shows_each_steps_share_of_each_size(tmp_path):
    rows = [
        {"step": 1, "group/size_2_count": 1.0, "group/size_4_count": 3.0},
        {"step": 2, "group/size_4_count": 4.0},
    ]
    [curve] = [curve for curve in panels_of(rows) if curve.name == "group_sizes"]
    [mesh, *_] = drawn(curve, rows).collections
    assert mesh.get_array().filled(0).tolist() == [[0.25, 0.0], [0.0, 0.0], [0.75, 1.0]]


def heat(rows: list[dict[str, float]], name: str = "timestep_kl_ref_nats") -> Panel:
    [curve] = [curve for curve in panels_of(rows) if curve.name == name]
    return curve


def timesteps(step: int, *values: float, name: str = "kl_ref_nats") -> dict[str, float]:
    return {"step": step, **{f"timestep/{name}/{k}": value for k, value in enumerate(values)}}


def test_heat_shows_each_denoising_steps_value_at_each_step_and_grey_where_there_is_none():
    rows = [
        timesteps(1, 1.0, 2.0),
        timesteps(2, 3.0, math.nan),
        timesteps(5, 5.0, 6.0),
        {"step": 7, "reward/mean": 1.0},
    ]
    ends, values = heatmap_cells(heat(rows), rows)
    assert ends.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]  # the run went on without steps 3 and 4
    nan = math.nan
    assert np.array_equal(values, [[1, 3, nan, nan, 5], [2, nan, nan, nan, 6]], equal_nan=True)
    axes = drawn(heat(rows), rows)
    [mesh, *_] = axes.collections
    assert np.array_equal(mesh.get_array().filled(nan), values, equal_nan=True)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"] and list(
        axes.get_yticks()
    ) == [0, 1]
    assert axes.get_xlim()[1] > 7


def test_denoising_steps_are_in_the_order_of_their_numbers():
    curve = heat([timesteps(1, *range(1, 12))])
    assert list(curve.metrics.values()) == [str(k) for k in range(11)]
    assert curve.metrics["timestep/kl_ref_nats/10"] == "10"


def test_of_many_steps_neighbours_are_one_column_with_their_mean_or_largest():
    rows = [
        timesteps(10 * n, float(n), 0.0) | timesteps(10 * n, float(n), name="ratio_max")
        for n in range(1, 8)
    ]
    ends, values = heatmap_cells(heat(rows), rows, max_columns=3)
    assert ends.tolist() == [5.0, 35.0, 65.0, 95.0]
    assert values.tolist() == [[2.0, 5.0, 7.0], [0.0, 0.0, 0.0]]
    of_max = Panel("", "", "", {"timestep/ratio_max/0": "0"}, style="heatmap")
    assert heatmap_cells(of_max, rows, max_columns=3)[1].tolist() == [[3.0, 6.0, 7.0]]


def test_a_cell_of_rare_steps_is_seen_whole_also_at_the_end_of_the_run():
    rows = [timesteps(step, step, step + 1.0) for step in (0, 25, 50)]
    assert heatmap_cells(heat(rows), rows)[0].tolist() == [-12.5, 12.5, 37.5, 62.5]
    assert drawn(heat(rows), rows).get_xlim() == (-12.5, 62.5)


def test_rewards_along_the_denoising_are_a_line_for_the_first_and_the_last_evaluation_and_some_between():
    rows = [
        timesteps(5 * n, n, math.nan, 2.0 * n, name="reward") | {"reward/mean": 0.5}
        for n in range(9)
    ]
    rows += [{"step": 41, "reward/mean": 0.5}]
    [curve] = [curve for curve in panels_of(rows) if curve.name.startswith("timestep")]
    axes = drawn(curve, rows, {3: "a stage"})
    assert curve.name == "timestep_reward" and [line.get_label() for line in axes.lines] == [
        f"step {step}" for step in (0, 10, 15, 25, 30, 40)
    ]
    assert list(axes.lines[-1].get_xdata()) == [0, 1, 2]
    assert np.array_equal(axes.lines[-1].get_ydata(), [8.0, math.nan, 16.0], equal_nan=True)
    assert names_of(timesteps(1, 0.5, name="reward")) == []


def test_colors_are_of_both_signs_of_decades_or_plain():
    def scale(*values: float) -> tuple[Any, ...]:
        norm, colors = color_scale(np.array([values]))
        return type(norm).__name__, norm.vmin, norm.vmax, colors

    assert scale(-1.0, 3.0, math.nan) == ("Normalize", -3.0, 3.0, "RdBu_r")
    assert scale(-0.1, 3.0) == ("Normalize", -0.1, 3.0, "viridis")
    assert scale(0.0, 0.5, 3.0) == ("Normalize", 0.0, 3.0, "viridis")
    assert scale(0.0, 0.01, 3.0)[:1] == ("LogNorm",)
    assert scale(0.0, 0.0) == ("Normalize", 0.0, 0.0, "viridis")
    assert scale(-3.0, -0.1) == ("Normalize", -3.0, -0.1, "viridis")
    assert scale(-1.5) == ("Normalize", -1.5, -1.5, "viridis")  # rewards that are costs
    shown = drawn(heat(rows := [timesteps(1, 0.0, 0.01, 3.0)]), rows).collections[0].get_array()
    assert shown.filled(math.nan).min() > 0  # none is left out of the decades


# --- which panels there are -------------------------------------------------------------------------------------------


def names_of(*rows: dict[str, float]) -> list[str]:
    return [
        curve.name
        for curve in panels_of([{"step": n, **row} for n, row in enumerate(rows, start=1)])
    ]


def test_a_metric_with_nothing_to_show_has_no_panel():
    assert names_of({"clip/high_frac": 0.0, "clip/low_frac": 0.0}) == []
    assert names_of({"clip/high_frac": 0.0, "clip/low_frac": 0.1}) == ["clip"]
    assert names_of({"optim/lr": 0.1}, {"optim/lr": 0.1}) == []
    assert names_of({"optim/lr": 0.1}, {"optim/lr": 0.2}) == ["lr"]
    assert names_of({"group/size_8_count": 4.0}, {"group/size_8_count": 2.0}) == []
    assert names_of({"group/size_8_count": 4.0}, {"group/size_9_count": 2.0}) == ["group_sizes"]
    assert names_of({"update/epochs_count": 3.0}, {"update/epochs_count": 1.5}) == ["epochs"]
    assert names_of({"kl/ref_nats": math.nan, "reward_corr_within_group/a/b": math.inf}) == []


def test_a_reference_is_drawn_beside_the_policy_only_if_it_was_evaluated():
    assert names_of({"eval/reward_mean": 0.5}) == ["reward"]
    assert names_of({"eval/reward_mean": 0.5, "reference/eval_reward_mean": 0.4}) == [
        "reward",
        "reference",
    ]


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
    scheduled = ("kl_coef", "entropy_coef", "rl_coef", "sup_coef", "temperature", "difficulty")
    rows = [row | {f"stage/{name}": value for name in scheduled} for value in (0.5, 1.0)]
    of_epochs = ["epoch_ratio", "epoch_clip", "epoch_kl"]
    of_course = ["distance", "coefficients", "terms", "temperature", "difficulty"]
    of_groups = ["spread", "zero_spread", "normalised_reward", "advantage"]
    assert names_of(*rows) == [*of_groups, "supervised", *of_epochs, *of_course]


def test_several_reward_functions_have_a_panel_together_and_a_picture_each():
    one = {
        f"reward/{name}": 1.0
        for name in ("f/mean", "f/best_of_group_mean", "f/worst_of_group_mean")
    }
    other = {name.replace("/f/", "/a b:c/"): 2.0 for name in one}
    assert names_of(one) == []  # the panels of the sum show it
    curves = {curve.name: curve for curve in panels_of([{"step": 1, **one, **other}])}
    assert list(curves) == ["rewards", "reward_f", "reward_a_b_c"]
    assert curves["rewards"].metrics == {"reward/f/mean": "f", "reward/a b:c/mean": "a b:c"}
    assert list(curves["reward_f"].metrics) == list(one)
    assert [curve.in_overview for curve in curves.values()] == [True, False, False]


def test_any_metric_by_denoising_step_has_a_panel_where_it_differs():
    assert names_of(timesteps(1, 0.1, 0.2)) == ["timestep_kl_ref_nats"]
    assert names_of(timesteps(1, 0.1, 0.1), timesteps(2, 0.1, 0.1)) == []
    assert (
        names_of(timesteps(1, 0.1), timesteps(2, 0.2)) == []
    )  # one denoising step is a curve, and has one
    assert names_of(timesteps(1, math.nan, math.nan)) == []
    rows = [{"step": 1, "timestep/a b/c/0": 1.0, "timestep/a b/c/1": 2.0} | timesteps(1, 1.0, 2.0)]
    titles = {curve.name: (curve.title, curve.value) for curve in panels_of(rows)}
    assert titles == {
        "timestep_a_b_c": ("a b/c by denoising step", "a b/c"),
        "timestep_kl_ref_nats": ("KL divergence by denoising step", "KL to the reference, nats"),
    }


def test_the_rewards_of_prompts_are_a_line_of_colour_each_classes_by_number():
    metrics = {
        f"prompt/reward_mean/{name}": n for n, name in enumerate(["10", "cat", "9", "an owl"])
    }
    [curve] = panels_of([{"step": 1, **metrics}])
    assert list(curve.metrics.values()) == ["9", "10", "cat", "an owl"] and curve.style == "heatmap"


def test_of_many_pairs_of_rewards_the_strongest_are_drawn():
    pairs = {f"reward_corr_within_group/a{n}/b": (-1) ** n * n / 20 for n in range(12)}
    [curve] = panels_of([{"step": 1, **pairs}])
    assert list(curve.metrics.values()) == [f"a{n}, b" for n in range(11, 3, -1)]
