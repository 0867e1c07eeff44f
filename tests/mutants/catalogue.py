"""All mutants, read from ``bugs/``: one file for each part of the library, a blank line between bugs.

[silent bug's number, or 0] what is wrong, in words
the file, below src/gruppo
the test that has to go red, below tests
- the lines as they are: they occur once in the file, and may begin or end within a line
+ the lines with the bug; none where the lines are taken out
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.mutants.mutant import Mutant

_HEAD = re.compile(r"\[(\d+)\] (.+)")


def read(text: str) -> list[Mutant]:
    """The mutants of one file."""
    return [_mutant(block.strip("\n").split("\n")) for block in text.split("\n\n") if block.strip()]


def _mutant(lines: list[str]) -> Mutant:
    head, (file, test, *change) = _HEAD.fullmatch(lines[0]), lines[1:]
    if head is None or not change or any(line[:2].rstrip() not in ("-", "+") for line in change):
        raise ValueError(
            "a mutant needs [number] words, file, test, - and + lines:\n" + "\n".join(lines)
        )
    old, new = ("\n".join(line[2:] for line in change if line[0] == sign) for sign in "-+")
    return Mutant(int(head[1]), head[2], file, old, new, test)


MUTANTS = [
    mutant
    for path in sorted((Path(__file__).parent / "bugs").glob("*.txt"))
    for mutant in read(path.read_text(encoding="utf-8"))
]
