"""The report for people and for programs, and the command."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
from tests import processes
from tests.doctor.planted import STEPS, write
from tests.doctor.test_rules import FAULTS

from gruppo.cli.help import all_options
from gruppo.config.schema import Config
from gruppo.doctor import report
from gruppo.doctor.record import read
from gruppo.doctor.report import RULES
from gruppo.errors import as_flag
from gruppo.loading import command_name

COLLAPSE = FAULTS["a collapse of the entropy"].columns
MIXED = {
    **COLLAPSE,
    "loss/cons": FAULTS["a consistency loss that goes on rising"].columns["loss/cons"],
}


def text(run):
    return report.render(report.diagnose(read(run)))


def test_the_terminal_shows_what_was_measured_what_it_means_and_what_to_change(tmp_path):
    run = write(tmp_path / "run", MIXED)
    output = text(run)
    assert output.startswith(f"{run}: 30 steps, 2 problems found by 14 of 17 rules\n\n1. ")
    for line in (
        "1. The entropy has collapsed (entropy-collapse)",
        "   98% of the entropy is lost and the reward no longer rises: the policy repeats the same "
        "answers",
        "   entropy/mean_nats: 1 (steps 1 to 10), then 0.02 (steps 21 to 30)",
        "   Try --stage.entropy-coef adaptive:0,target=0.5,delta=0.005  # keeps half of the "
        "initial entropy",
        "2. The consistency loss keeps rising (consistency-loss)",
    ):
        assert line in output.splitlines() or line in output
    assert "Not checked: " in output and "no loss/sup was logged" in output


def test_the_page_shows_what_is_printed_and_lists_every_rule(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/guides/troubleshooting.md").read_text(
        encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "command_name", lambda: "gruppo")
    printed = text(write(Path("runs/run"), COLLAPSE))
    assert f"```\n{printed}\n```" in page
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE) == [rule.name for rule in RULES]
    options = set(
        re.findall(r"--[a-z][a-z-]*(?:\.[a-z-]+)*", page.replace("--stages.0", "--stage"))
    )
    known = {
        *map(as_flag, all_options()),
        *(f"--{field.name}" for field in dataclasses.fields(Config)),
        "--json",
    }
    assert options <= known


def test_a_healthy_run_has_no_problems(tmp_path):
    run = write(tmp_path / "run", {})
    output = text(run)
    assert output.startswith(f"{run}: 30 steps, no problems found by 13 of 17 rules\n")
    assert "Try" not in output


def test_control_characters_of_a_reward_reach_no_terminal(tmp_path):
    failures = [{"reward": "f", "kind": "exception", "message": "\x1b[31mred\nline"}]
    files = {"samples.jsonl": json.dumps({"step": 1, "failures": failures}) + "\n"}
    output = " ".join(
        text(write(tmp_path / "run", {"reward/exception_count": 50.0}, files=files)).split()
    )
    assert "\x1b" not in output and "\\x1b[31mred line" in output


def test_the_command_prints_and_exits_with_0(tmp_path, capsys):
    run = write(tmp_path / "run", COLLAPSE)
    assert processes.exit_code(["doctor", str(run)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "The entropy has collapsed" in out
    change = "--stage.entropy-coef adaptive:0,target=0.5,delta=0.005"
    assert out.endswith(
        f"\nTry one change at a time: {command_name()} train {run / 'config.json'} {change}\n"
    )


def test_json_holds_the_same(tmp_path, capsys):
    run = write(tmp_path / "run", COLLAPSE)
    assert processes.exit_code(["doctor", str(run), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["run"], output["steps"]) == (str(run), STEPS)
    (finding,) = output["findings"]
    assert finding["rule"] == "entropy-collapse"
    assert finding["measured"][0] == {
        "metric": "entropy/mean_nats",
        "means": [1.0, pytest.approx(0.02)],
        "steps": [[1, 10], [21, 30]],
    }
    assert finding["changes"] == {
        "--stage.entropy-coef adaptive:0,target=0.5,delta=0.005": "keeps half of the initial "
        "entropy"
    }
    assert {*output["checked"], *output["skipped"]} == {rule.name for rule in RULES}


@pytest.mark.parametrize("arguments", [["no/run"], ["no/run", "--json"]])
def test_a_mistake_is_one_line_and_exits_with_2(capsys, arguments):
    assert processes.exit_code(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("gruppo: the run folder no/run does not exist. Give the folder of a run")


def test_a_reader_that_leaves_early_is_no_error(tmp_path, monkeypatch):
    run = write(tmp_path / "run", COLLAPSE)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert processes.exit_code(["doctor", str(run)]) == 0
