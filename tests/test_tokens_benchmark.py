"""Tokens to a reward, from the metrics of runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from benchmarks.tokens import Curve, by_variant, rewards_at, table


def run(folder: Path, name: str, points: list[tuple[float, float]]) -> Path:
    """A run folder with the metrics of steps and of evaluations after them."""
    (folder / name).mkdir()
    rows: list[dict[str, float | None]] = []
    for tokens, reward in points:
        rows += [{"progress/tokens": tokens, "reward/mean": 0.9}] if tokens else []
        rows += [{"eval/reward_mean": reward}]
    rows.append({"progress/tokens": 10 * tokens, "eval/reward_mean": None})
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def test_a_crossing_lies_on_the_line_between_two_smoothed_evaluations(tmp_path):
    curve = Curve.read(run(tmp_path, "a-s0", [(0, 0.0), (100, 0.6), (200, 0.6), (300, 0.9)]))
    assert curve.tokens == (0, 100, 200, 300)
    assert curve.smooth().reward == pytest.approx((0.0, 0.3, 0.4, 0.7))
    assert curve.smooth().until(0.55) == pytest.approx(250)
    assert curve.smooth().until(0.0) == 0 and curve.smooth().until(0.71) == math.inf
    assert curve.at(150) == pytest.approx(0.6) and curve.at(250) == pytest.approx(0.75)
    assert math.isnan(curve.at(301))


def test_variants_are_compared_with_the_first_under_the_same_seed(tmp_path):
    runs = [
        run(tmp_path, "plain-s0", [(0, 0.0), (100, 0.3), (200, 0.6), (300, 0.9)]),
        run(tmp_path, "plain-s1", [(0, 0.0), (100, 0.6), (200, 0.6), (300, 0.6)]),
        run(tmp_path, "grown-s0", [(0, 0.0), (50, 0.3), (100, 0.6), (150, 0.9)]),
        run(tmp_path, "grown-s1", [(0, 0.0), (50, 0.0), (100, 0.0), (150, 0.3)]),
    ]
    curves = by_variant(runs)
    assert {variant: list(seeds) for variant, seeds in curves.items()} == {
        "plain": ["0", "1"],
        "grown": ["0", "1"],
    }
    lines = table(curves, 1.0).splitlines()[2:]
    assert lines[0] == "| plain | 0 | 300 | 0.600 | 0.600 | 300 | 100% |"
    assert lines[2] == "| grown | 0 | 150 | 0.600 | 0.600 | 150 | 50% |"
    assert lines[3] == "| grown | 1 | 150 | 0.100 | 0.600 | not reached |  |"
    assert rewards_at(curves, [150, 250]).splitlines()[2:] == [
        "| plain | 2 | 0.525 | 0.675 |",
        "| grown | 2 | 0.600 |  |",
    ]
