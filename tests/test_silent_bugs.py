"""Every silent bug that what exists here could have is caught by a test that names it."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
NEEDED = {*range(1, 43)}
"""By their numbers in the project's list of silent bugs: all of them."""


def test_each_silent_bug_has_a_test_that_names_it() -> None:
    marks = re.compile(r"silent_bug\((\d+)\)")
    named = {
        int(n)
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__)
        for n in marks.findall(path.read_text())
    }
    assert not NEEDED - named
