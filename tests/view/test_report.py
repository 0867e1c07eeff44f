"""``gruppo report`` writes everything into one file that runs nothing but its own script."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests import processes, tiny
from tests.view.folders import write_run

import gruppo
from gruppo.view import report
from gruppo.view import run as view
from gruppo.view.report import write_report

pytestmark = pytest.mark.usefixtures("plots")


def data_of(path: Path) -> dict[str, Any]:
    found = re.findall(
        r'<script type="application/octet-stream" id="data">([A-Za-z0-9+/=]+)</script>',
        path.read_text(),
    )
    assert len(found) == 1
    return json.loads(gzip.decompress(base64.b64decode(found[0])))


def steps_of(run: dict[str, Any]) -> list[int]:
    rows = [
        json.loads(line) for _, text in run["rows"]["completions"] for line in text.splitlines()
    ]
    return sorted({row["step"] for row in rows})


def test_a_report_holds_metrics_every_completion_findings_and_config(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=60)
    assert processes.exit_code(["report", str(path)]) == 0
    (run,) = data_of(path / "report.html")["runs"]
    assert run["metrics"] == (path / "metrics.jsonl").read_text() and steps_of(run) == list(
        range(1, 61)
    )
    assert run["state"]["doctor"]["checked"] and run["state"]["config"]["model"] == "smollm2-135m"


def test_a_report_of_many_completions_keeps_the_newest_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run", steps=110)
    monkeypatch.setattr(view, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(report, "MAX_BYTES", 20000)
    (run,) = data_of(write_report([path]))["runs"]
    kept = steps_of(run)
    assert kept == list(range(kept[0], 111)) and 2 < len(kept) < 50
    assert f"the completions from step {kept[0]} on:" in run["state"]["notices"][-1]


def test_a_report_of_a_run_that_ended_before_its_first_completion_was_written(
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path / "run", steps=1)
    for file in path.glob("completions/*"):
        file.write_bytes(b"")
    (run,) = data_of(write_report([path]))["runs"]
    assert run["rows"]["completions"] == [] and run["metrics"]


def test_several_runs_are_one_report_in_the_file_that_is_named(tmp_path: Path) -> None:
    paths = [str(write_run(tmp_path / name, steps=2)) for name in ("a", "b")]
    assert processes.exit_code(["report", *paths, "--output", str(tmp_path / "both.html")]) == 0
    assert [run["state"]["name"] for run in data_of(tmp_path / "both.html")["runs"]] == ["a", "b"]


HOSTILE = (
    "</script><script>alert(1)</script><img src=x "
    "onerror=alert(1)>\u202e\u200f\x1b[2J\x00]]><!--\ud800\"'"
)


def test_hostile_names_and_texts_add_no_element_to_the_file(tmp_path: Path) -> None:
    path = write_run(tmp_path / "<b>&run", steps=2)
    plain = write_report([write_run(tmp_path / "plain", steps=2)]).read_text()
    config = json.loads((path / "config.json").read_text()) | {"model": HOSTILE}
    (path / "config.json").write_text(json.dumps(config))
    with (path / "samples.jsonl").open("w") as file:
        file.write(
            json.dumps({"step": 1, "prompt": HOSTILE, "completion": HOSTILE, "reward": 1.0}) + "\n"
        )
    page = write_report([path]).read_text()
    assert re.findall(r"<[a-z!/][^>]*>", page.partition("<style>")[0]) == re.findall(
        r"<[a-z!/][^>]*>", plain.partition("<style>")[0]
    )
    assert page.count("<script") == plain.count("<script") and "alert(1)" not in page
    assert (
        "Content-Security-Policy" in page.partition("<title>")[0] and "connect-src 'none'" in page
    )


def test_a_finished_run_has_its_report_and_completions_have_the_advantage_that_was_learned_from(
    tmp_path: Path,
) -> None:
    result = gruppo.train(
        model=tiny.model(),
        data=tiny.rows(),
        reward=lambda completions, **_: [float(n % 4 == 1) for n in range(len(completions))],
        runs_dir=tmp_path,
        steps=2,
        show=False,
        name="run",
        compute="float32",
        rollout__group_size=4,
        rollout__prompts=2,
        rollout__max_new_tokens=6,
        evaluation__prompts=0,
    )
    (run,) = data_of(result.folder / "report.html")["runs"]
    rows = [
        json.loads(line) for _, text in run["rows"]["completions"] for line in text.splitlines()
    ]
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["group"]), []).append(row)
    assert len(groups) == 4 and any(row["advantage"] for row in rows)
    for group in groups.values():  # GRPO: (r - mean) / std
        rewards = [row["reward"] for row in group]
        mean = sum(rewards) / 4
        std = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5
        expected = [(r - mean) / (std + 1e-4) if std else 0.0 for r in rewards]
        assert [row["advantage"] for row in group] == pytest.approx(expected, abs=0.02)


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", steps=1)
    (path / "report.html").mkdir()
    assert processes.exit_code(["report", str(path)]) == 2
    assert "could not be written" in capsys.readouterr().err
