"""The catalogue of mutants fits the code, and the runner tells a caught bug from anything else. No mutant runs here."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.mutants import __main__ as command
from tests.mutants.catalogue import MUTANTS, read
from tests.mutants.mutant import TESTS, Mutant, has_test
from tests.mutants.runner import Report, Told
from tests.test_silent_bugs import NEEDED


def test_each_mutant_changes_one_place_into_code_that_can_be_read_and_names_a_test_that_exists():
    assert [complaint for mutant in MUTANTS for complaint in mutant.complaints()] == []
    assert [mutant.what for mutant in MUTANTS if mutant.old == mutant.new] == []


def test_each_silent_bug_that_can_be_a_fault_of_the_code_has_a_mutant():
    assert {mutant.bug for mutant in MUTANTS} >= NEEDED


def test_no_two_mutants_are_one():
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutant_is_read_with_its_indentation_and_empty_lines_or_refused():
    [one, two] = read(
        "[7] what is wrong\na.py\nb.py::c\n-     x\n-\n- y\n+   z\n\n[0] taken out\na.py\nb.py::c\n- x\n"
    )
    assert one == Mutant(7, "what is wrong", "a.py", "    x\n\ny", "  z", "b.py::c")
    assert two == Mutant(0, "taken out", "a.py", "x", "", "b.py::c")
    for broken in (
        "no number\na.py\nb.py::c\n- x",
        "[1] no lines\na.py\nb.py::c",
        "[1] no sign\na.py\nb.py::c\nx",
    ):
        with pytest.raises(ValueError, match="a mutant needs"):
            read(broken)


def test_a_test_that_does_not_exist_is_seen():
    assert has_test("test_mutants.py::test_no_two_mutants_are_one")
    assert has_test("test_mutants.py::test_no_two_mutants_are_one[any parameters]")
    assert not has_test("test_mutants.py::test_no_two") and not has_test("no_such_file.py::test_x")
    broken = Mutant(
        0,
        "nothing",
        "types.py",
        "no such snippet",
        "",
        "test_mutants.py::test_no_two_mutants_are_one",
    )
    assert "holds this 0 times" in broken.complaints()[0]


FILE = "core/test_x.py"
MINE = f"{FILE}::test_mine"


@pytest.mark.parametrize(
    ("reports", "problem", "is_caught"),
    [
        ([Report(MINE, "call", "failed")], "", True),
        (
            [Report(f"{MINE}[a]", "call", "passed"), Report(f"{MINE}[b]", "call", "failed")],
            "",
            True,
        ),
        ([Report(MINE, "call", "passed")], "", False),
        ([Report(MINE, "setup", "failed")], "", False),  # a fixture, not the test
        ([Report(f"{MINE}_too", "call", "failed")], "", False),  # another test
        ([Report(MINE, "call", "skipped")], "", False),
        (
            [Report(MINE, "call", "failed", "NameError: name 'x' is not defined")],
            "",
            False,
        ),  # no bug that runs
        ([], "", False),
        ([Report(MINE, "call", "failed")], "the package that was tested is another", False),
    ],
)
def test_a_bug_is_caught_by_a_failure_inside_the_named_test_and_by_nothing_else(
    reports, problem, is_caught
):
    reported = Told(tuple(reports), problem)
    assert (reported.failed_in(MINE) is not None) == is_caught


def test_a_test_is_green_where_it_ran_and_passed_in_each_of_its_forms():
    passed, failed = Report(f"{MINE}[a]", "call", "passed"), Report(f"{MINE}[b]", "call", "failed")
    assert Told((passed,)).is_green(MINE) and Told((passed, failed)).is_green(f"{MINE}[a]")
    assert not Told((passed, failed)).is_green(MINE) and not Told(()).is_green(MINE)
    assert not Told((passed,), "pytest ended with 4").is_green(MINE)
    assert not Told((Report(MINE, "setup", "skipped"),)).is_green(MINE)


PROBE = """
from tests.mutants import __main__ as command
from tests.mutants import runner
from tests.mutants.mutant import Mutant

runner.PRELOADED = ("hypothesis", "torch")  # all that these tests import of it
by = "core/test_schedules.py::test_warmup_and_decay_by_hand"
old = "return peak * (step + 1) / warmup"
command.MUTANTS = [
    Mutant(0, "a fault", "core/schedules.py", old, "return peak * (step + 2) / warmup", by),
    Mutant(0, "no fault", "core/schedules.py", old, "return peak * (1 + step) / warmup", by),
    Mutant(0, "no import", "core/schedules.py", "import math", "import no_such_module", by),
]
raise SystemExit(command.main(["--cores", "1"]))
"""


@pytest.mark.slow
def test_the_command_says_caught_of_a_fault_and_survived_of_what_is_none_or_breaks_the_import():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=TESTS.parent, capture_output=True, text=True
    )
    verdicts = [
        line.split()[0] for line in done.stdout.splitlines() if "core/schedules.py " in line
    ]
    assert verdicts == ["caught", "SURVIVED", "SURVIVED"], done.stdout + done.stderr
    assert done.returncode == 1
    assert "no import (core/schedules.py): pytest ended with" in done.stdout
    assert "1 of 3 mutants caught" in done.stdout and "NOT GREEN" not in done.stdout


def test_a_change_of_the_source_or_the_test_of_a_mutant_makes_it_run_again(monkeypatch, tmp_path):
    mutant = MUTANTS[0]
    monkeypatch.setattr(command, "RECORD", tmp_path / "caught.json")
    monkeypatch.setattr(command, "SAMPLE", 0)
    assert command.changed_and_sample([mutant]) == [mutant]
    command.record({mutant.what: command.fingerprint(mutant), "a mutant that is gone": "0"})
    assert command.changed_and_sample([mutant]) == [] and list(command.recorded()) == [mutant.what]
    for folder, name in (
        ("SOURCE", f"gruppo/{mutant.file}"),
        ("TESTS", mutant.by.partition("::")[0]),
    ):
        with monkeypatch.context() as patch:
            original, copy = getattr(command, folder) / name, tmp_path / folder / name
            copy.parent.mkdir(parents=True)
            copy.write_text(original.read_text() + "# changed")
            patch.setattr(command, folder, tmp_path / folder)
            other = getattr(command, "TESTS" if folder == "SOURCE" else "SOURCE")
            assert other.exists() and command.fingerprint(mutant) != command.recorded()[mutant.what]
