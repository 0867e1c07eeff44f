"""Named mutants fit the code, and the runner tells a caught bug from anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutants import covering, generated
from tests.mutants.catalogue import LIMIT, MUTANTS, read
from tests.mutants.mutant import SOURCE, TESTS, Mutant, has_test
from tests.mutants.runner import Outcome, Report
from tests.test_silent_bugs import NEEDED


def test_each_mutant_changes_one_place_and_names_a_test_that_exists():
    assert [complaint for mutant in MUTANTS for complaint in mutant.complaints()] == []


def test_each_silent_bug_that_can_be_a_fault_of_the_code_has_a_mutant():
    assert {mutant.bug for mutant in MUTANTS} >= NEEDED


def test_no_two_mutants_are_one_and_they_are_few():
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS) <= LIMIT
    places = {(m.file, m.function, m.find, m.replace) for m in MUTANTS}
    assert len(places) == len(MUTANTS)


def test_a_mutant_is_read_or_refused():
    text = "[7] what is wrong\na.py f\nb.py::c\n- x\n- y\n+ z\n\n[0] out\na.py\nb.py::c\n- x\n"
    assert read(text) == [
        Mutant(7, "what is wrong", "a.py", "f", "x\ny", "z", "b.py::c"),
        Mutant(0, "out", "a.py", "", "x", "", "b.py::c"),
    ]
    for broken in ("no number\na.py\nb.py::c\n- x", "[1] no lines\na.py\nb.py::c"):
        with pytest.raises(ValueError, match="a mutant needs"):
            read(broken)


CODE = """
def f(x):
    y = (
        x + 1  # why
    )
    print(y)
    return y


class A:
    def f(self):
        return 1 + 1
"""


@pytest.mark.parametrize(
    ("function", "find", "replace", "changed"),
    [
        ("f", "x + 1", "x - 1", "y = x - 1"),
        ("f", "print(y)", "print(x)", "print(x)"),
        ("f", "y = x + 1\nprint(y)", "y = 2", "y = 2\n    return y"),
        ("f", "return y", "", "print(y)\n\nclass A"),
        ("A.f", "1 + 1", "2", "return 2"),
    ],
)
def test_a_change_is_found_whatever_the_layout_of_the_code(
    tmp_path, function, find, replace, changed
):
    write(tmp_path, CODE)
    mutant = Mutant(0, "", "a.py", function, find, replace, "")
    assert changed in mutant.inject(tmp_path)


@pytest.mark.parametrize(
    ("function", "find", "why"),
    [("f", "x + 2", "occurs 0 times"), ("A", "1", "occurs 2 times"), ("g", "x", "no function g")],
)
def test_a_change_of_no_place_or_of_several_is_refused(tmp_path, function, find, why):
    write(tmp_path, CODE)
    with pytest.raises(ValueError, match=why):
        Mutant(0, "", "a.py", function, find, "0", "").inject(tmp_path)


def write(folder: Path, code: str) -> None:
    (folder / "gruppo").mkdir()
    (folder / "gruppo" / "a.py").write_text(code)


def test_a_test_that_does_not_exist_is_seen():
    assert has_test("test_mutants.py::test_a_mutant_is_read_or_refused[any parameters]")
    assert not has_test("test_mutants.py::test_a_mutant") and not has_test("no_file.py::test_x")


def test_generated_mutants_change_numbers_and_no_messages():
    mutants = generated.mutants_of("core/loss.py")
    original = (SOURCE / "gruppo" / "core/loss.py").read_text()
    assert len(mutants) > 20 and len({mutant.number for mutant in mutants}) == len(mutants)
    for mutant in mutants[::10]:
        changed = mutant.inject(SOURCE)
        compile(changed, "loss.py", "exec")
        assert changed != original
    assert generated.sample(5, "a") == generated.sample(5, "a") != generated.sample(5, "b")


TEST = "core/test_x.py::test_one"


@pytest.mark.parametrize(
    ("reports", "problem", "is_caught"),
    [
        ([Report(TEST, "call", "failed")], "", True),
        (
            [Report(f"{TEST}[a]", "call", "passed"), Report(f"{TEST}[b]", "call", "failed")],
            "",
            True,
        ),
        ([Report(TEST, "call", "passed")], "", False),
        ([Report(TEST, "setup", "failed")], "", False),  # a fixture, not the test
        ([Report(f"{TEST}_too", "call", "failed")], "", False),  # another test
        ([Report(TEST, "call", "skipped")], "", False),
        ([Report(TEST, "call", "failed", "NameError: x")], "", False),  # code that cannot run
        ([], "", False),
        ([Report(TEST, "call", "failed")], "another package was tested", False),
    ],
)
def test_a_bug_is_caught_by_a_failure_inside_the_named_test_only(reports, problem, is_caught):
    assert Outcome(tuple(reports), problem).is_caught_by(TEST) == is_caught


def test_a_test_passed_if_it_ran_and_passed_in_each_of_its_forms():
    passed, failed = Report(f"{TEST}[a]", "call", "passed"), Report(f"{TEST}[b]", "call", "failed")
    assert Outcome((passed,)).passed(TEST) and Outcome((passed, failed)).passed(f"{TEST}[a]")
    assert not Outcome((passed, failed)).passed(TEST) and not Outcome(()).passed(TEST)
    assert not Outcome((passed,), "pytest ended with 4").passed(TEST)


def test_a_function_meets_the_tests_that_run_it_those_that_run_little_else_first():
    lines = [
        ("b.py::whole", 3.0, ["f.py f", "f.py g", "f.py h"]),
        ("a.py::unit[1]", 0.1, ["f.py f"]),
        ("a.py::unit[2]", 0.1, ["f.py f", "f.py g"]),
        ("c.py::long", 100.0, ["f.py f"]),
    ]
    found = covering.merge(lines, {"f.py f", "f.py h"})
    named = {
        name: [found["tests"][number] for number in numbers]
        for name, numbers in found["functions"].items()
    }
    assert named == {"f.py f": ["a.py::unit", "b.py::whole"], "f.py h": ["b.py::whole"]}


PROBE = """
from tests.mutants import __main__ as command
from tests.mutants import runner
from tests.mutants.mutant import Mutant

runner.PRELOADED = ("hypothesis", "torch")  # all that these tests import of it
test = "core/test_schedules.py::test_warmup_and_decay_by_hand"
find = "peak * (step + 1) / warmup"
at = ("core/schedules.py", "warmup_decay")
command.MUTANTS = [
    Mutant(0, "a fault", *at, find, "peak * (step + 2) / warmup", test),
    Mutant(0, "no fault", *at, find, "peak * (1 + step) / warmup", test),
    Mutant(0, "no import", "core/schedules.py", "", "import math", "import no_such_module", test),
]
raise SystemExit(command.main(["--cores", "1", "--generated", "0"]))
"""


@pytest.mark.slow
def test_the_command_reports_a_fault_as_caught_and_what_is_none_or_cannot_run_as_survived():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=TESTS.parent, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if "core/schedules.py " in line]
    assert [line.split()[0] for line in lines] == ["caught", "SURVIVED", "SURVIVED"], done.stdout
    assert done.returncode == 1 and "1 of 3 named mutants caught" in done.stdout
    assert "no import (core/schedules.py): pytest ended with" in done.stdout
    assert "NOT GREEN" not in done.stdout
