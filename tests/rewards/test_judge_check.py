"""examples/judge_check.py: agreement with labels, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from examples.judge_check import agreement, check_judge, read_labels
from tests.rewards.judge_server import write_judge

from gruppo.types import DataError


def write(folder: Path, *rows: object) -> Path:
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "labels.jsonl"


def test_the_agreement_is_that_of_scipy():
    kendalltau = pytest.importorskip("scipy.stats").kendalltau
    generator = np.random.default_rng(0)
    rewards, labels = generator.integers(0, 4, 40) / 4, generator.integers(0, 3, 40)
    found = agreement(rewards, labels.astype(float), np.zeros(40))
    assert found["tau"] == pytest.approx(kendalltau(rewards, labels).statistic)


def test_unscored_rows_are_left_out_and_nothing_to_compare_is_nan():
    found = agreement(np.array([0.5, math.nan, 0.1]), np.array([2.0, 1.0, 0.0]), np.zeros(3))
    assert found == {"accuracy": 1.0, "tau": 1.0, "pairs": 1}
    nothing = agreement(np.array([0.5]), np.array([1.0]), np.zeros(1))
    assert nothing["pairs"] == 0 and math.isnan(nothing["accuracy"]) and math.isnan(nothing["tau"])


def test_a_check_grades_labelled_completions_counts_failures_and_names_the_cost(server, tmp_path):
    rows = [
        {"prompt": "p", "completion": "x" * n, "label": label}
        for n, label in enumerate((0, 2, 1, 3))
    ]
    server.content = lambda text: "prose" if '"length": 0' in text else text
    labels = write(tmp_path, *rows)
    output = "\n".join(check_judge(write_judge(tmp_path / "j.toml", server), labels))
    assert (
        "4 labelled completions, 3 scored, 1 failed" in output
        and "1 x the judge's answer is not" in output
    )
    assert "accuracy       0.667  of 3 pairs" in output and "Kendall tau-b  0.333" in output
    assert "{'calls_count': 4.0, 'retries_count': 0.0" in output


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p", "completion": "c"}] * 2, "row 1: it needs a prompt with either"),
        (
            [{"prompt": "p", "chosen": "c", "rejected": "d"}, {"prompt": "p", "chosen": "c"}],
            "row 2: it needs",
        ),
        ([{"prompt": 3, "completion": "c", "label": 1}] * 2, "row 1: it needs"),
        ([{"prompt": "p", "completion": "c", "label": math.nan}] * 2, "row 1: it needs"),
        (["text"], "row 1: it needs"),
        (
            [{"prompt": "p", "completion": "c", "label": 1}],
            "has 1 labelled completions; it needs 2",
        ),
        ([], "has 0 labelled"),
    ],
)
def test_labels_that_cannot_be_read_are_one_line_with_their_number(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        read_labels(write(tmp_path, *rows))
    with pytest.raises(FileNotFoundError):
        read_labels(tmp_path / "none.jsonl")


def test_a_judge_without_any_verdict_is_an_error_with_its_reason(server, tmp_path):
    server.content = lambda text: "prose"
    labels = write(
        tmp_path, *({"prompt": "p", "completion": x, "label": len(x)} for x in ("a", "bb"))
    )
    with pytest.raises(
        DataError, match="scored none of 2 completions: the judge's answer is not the JSON"
    ):
        check_judge(write_judge(tmp_path / "j.toml", server), labels)
