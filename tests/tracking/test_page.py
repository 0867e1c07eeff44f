"""The page of a run shows what its folder holds, and no text of it is markup."""

from __future__ import annotations

import json
import re

import torch

from gruppo.tracking.files import SamplesFile
from gruppo.tracking.html import sheets_of, write_page


def shown(path):
    return re.findall(r'<img src="([^"]+)"', path.read_text(encoding="utf-8"))


def evaluation(step, mean, **parts):
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


def test_sheets_are_in_the_order_of_their_steps_and_none_is_shown_twice(tmp_path):
    (tmp_path / "images").mkdir()
    assert sheets_of(tmp_path) == []
    for count, step in enumerate((1000000, 7, 999999), start=1):
        (tmp_path / "images" / f"step_{step:06d}.png").write_bytes(b"")
        assert len(sheets_of(tmp_path)) == count
    assert [path.stem for path in sheets_of(tmp_path)] == ["step_000007", "step_999999", "step_1000000"]


def test_evaluations_and_the_last_texts_are_tables_and_texts_are_no_markup(tmp_path):
    done = [evaluation(0, 0.25, exact=0.5), evaluation(9, 0.75, exact=1.0, **{"<b>": None})]
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
