"""The report for people and for programs, and the command."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests import processes
from tests.doctor.planted import STEPS, write
from tests.doctor.test_rules import FAULTS, STOPS

from gruppo.cli.help import all_options
from gruppo.config.options import flag
from gruppo.config.schema import Config
from gruppo.doctor import report
from gruppo.doctor.record import read
from gruppo.doctor.remedies import Change
from gruppo.doctor.report import RULES, Finding
from gruppo.loading import command_name

COLLAPSE = FAULTS["a collapse of the entropy"].columns
MIXED = {
    **COLLAPSE,
    "loss/cons": FAULTS["a consistency loss that goes on rising"].columns["loss/cons"],
}


def text(run, width=120):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(report.render(report.diagnose(read(run))))
    return console.file.getvalue()


def test_the_terminal_shows_what_was_measured_what_it_means_and_what_to_change(tmp_path):
    run = write(tmp_path / "run", MIXED)
    output = text(run)
    assert " ".join(output.split()).startswith(
        f"{run}: 30 steps, 2 problems found by 22 of 28 rules 1. "
    )
    assert "1. The entropy has collapsed  entropy-collapse" in output
    assert "2. The consistency loss keeps rising  consistency-loss" in output
    for line in (
        "   measured  entropy/mean_nats       1 (step 1)",
        "             entropy/mean_nats       1 (steps 1 to 10), then 0.02 (steps 21 to 30)",
        "   meaning   98% of the entropy is lost and the reward no longer rises",
        "   try       --stage.entropy-coef adaptive:0,target=0.5,delta=0.005  keeps half of the initial entropy",
    ):
        assert line in output
    assert "Not checked, because the metrics were not logged: " in output and "critic" in output


def test_the_page_shows_what_is_printed_and_lists_every_rule(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/guides/troubleshooting.md").read_text(
        encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "command_name", lambda: "gruppo")
    console = Console(file=io.StringIO(), width=116, color_system=None)
    made = report.diagnose(read(write(Path("runs/run"), COLLAPSE)))
    console.print(report.render(made))
    console.print(report.suggestion(made), soft_wrap=True)
    printed = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
    assert f"```\n{printed}\n```" in page
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE) == [rule.name for rule in RULES]
    options = set(
        re.findall(r"--[a-z][a-z-]*(?:\.[a-z-]+)*", page.replace("--stages.0", "--stage"))
    )
    known = {
        *map(flag, all_options()),
        *(f"--{field.name}" for field in dataclasses.fields(Config)),
        "--json",
    }
    assert options <= known


def test_a_healthy_run_has_no_problems(tmp_path):
    run = write(tmp_path / "run", {})
    output = text(run)
    assert " ".join(output.split()).startswith(
        f"{run}: 30 steps, no problems found by 21 of 28 rules Not "
    )
    assert "incomplete" not in output
    (run / "final").rmdir()
    (advice,) = re.findall("The run is incomplete: .*", " ".join(text(run, width=1000).split()))
    assert "30 of 30 steps are logged" in advice and advice.endswith(
        f"{command_name()} resume {run}"
    )
    assert " try " not in output and str(report.suggestion(report.diagnose(read(run)))) == ""


def test_what_is_too_early_to_tell_is_said_apart(tmp_path):
    run = write(tmp_path / "run", {})
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:12]))
    output = " ".join(text(run).split())
    assert (
        "Too early to tell: flat-reward (reward/mean was logged in 12 steps; 18 are needed)."
        in output
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path, width):
    run = write(tmp_path / "r", MIXED)
    assert max(map(len, text(run, width).splitlines())) <= max(width, len(str(run)))


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
    assert finding["measured"][0] == {"metric": "entropy/mean_nats", "mean": 1.0, "steps": [1, 1]}
    assert finding["measured"][2] == {
        "metric": "entropy/mean_nats",
        "mean": pytest.approx(0.02),
        "steps": [21, 30],
    }
    assert finding["changes"][0]["options"] == {
        "--stage.entropy-coef": "adaptive:0,target=0.5,delta=0.005"
    }
    assert {*output["checked"], *output["skipped"]} == {rule.name for rule in RULES}


def test_a_run_from_python_gets_python_arguments(tmp_path, capsys):
    columns = {
        "kl/ref_nats": FAULTS["a KL that runs away"].columns["kl/ref_nats"],
        "reward/mean": STOPS,
    }
    run = write(tmp_path / "run", columns, {"data": "<in memory>"})
    assert processes.exit_code(["doctor", str(run)]) == 0
    assert capsys.readouterr().out.endswith(
        "started from Python: gruppo.train(..., stage__kl_coef=0.1)\n"
    )


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        ("6e-06", "6e-06"),
        ("1 0.5", "(1, 0.5)"),
        ("True", "True"),
        ("adaptive:0,target=0.5,delta=0.005", "'adaptive:0,target=0.5,delta=0.005'"),
    ],
)
def test_a_value_of_the_shell_is_written_as_python(tmp_path, value, literal):
    run = read(write(tmp_path / "run", {}, {"data": "<in memory>"}))
    finding = Finding("", "", (), "", [Change({"--scoring.weights": value}, "")])
    assert f"scoring__weights={literal})" in str(
        report.suggestion(report.Report(run, [finding], {}))
    )


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


def test_what_a_terminal_cannot_write_is_escaped(tmp_path, monkeypatch):
    failures = [{"reward": "f", "kind": "exception", "message": "数"}]
    files = {"samples.jsonl": json.dumps({"step": 1, "failures": failures}) + "\n"}
    run = write(tmp_path / "run", {"reward/exception_count": 50.0}, files=files)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert processes.exit_code(["doctor", str(run)]) == 0
    stdout.flush()
    assert b"\\u6570" in stdout.buffer.getvalue()


def test_what_blocks_learning_comes_first(tmp_path):
    """A constant reward is listed after truncation in the table of rules."""
    constant = {
        "group/zero_spread_frac": 1.0,
        "reward/mean": 0.0,
        "reward/max": 0.0,
        "reward/std_within_group": 0.0,
    }
    for truncated, first in (
        (0.5, "zero-spread"),
        (1.0, "truncation"),
    ):  # nothing but beginnings is rewarded
        run = write(
            tmp_path / first,
            constant | {"finish/truncated_frac": truncated, "eval/reward_mean": None},
        )
        assert report.diagnose(read(run)).findings[0].rule == first
