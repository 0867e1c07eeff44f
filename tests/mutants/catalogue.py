"""The mutants of ``bugs.txt``: bugs that people really make. A blank line between two of them.

[silent bug's number, or 0] what is wrong, in words
the file, below src/gruppo, and the function: core/loss.py policy_loss
the test that has to go red, below tests
- the expression or statements as they are
+ those with the bug; none where statements are taken out
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.mutants.mutant import Mutant

LIMIT = 200
"""Each one quotes code, and so makes a change of that code dearer."""
_HEAD = re.compile(r"\[(\d+)\] (.+)")


def read(text: str) -> list[Mutant]:
    """Read the mutants of one file."""
    return [_mutant(block.strip("\n").split("\n")) for block in text.split("\n\n") if block.strip()]


def _mutant(lines: list[str]) -> Mutant:
    head = _HEAD.fullmatch(lines[0])
    place, test, *change = lines[1:]
    if head is None or not change or any(line[:2].rstrip() not in ("-", "+") for line in change):
        message = "a mutant needs [number] words, file and function, test, - and + lines:\n"
        raise ValueError(message + "\n".join(lines))
    file, _, function = place.partition(" ")
    find = "\n".join(line[2:] for line in change if line[0] == "-")
    replace = "\n".join(line[2:] for line in change if line[0] == "+")
    return Mutant(int(head[1]), head[2], file, function, find, replace, test)


MUTANTS = read((Path(__file__).parent / "bugs.txt").read_text(encoding="utf-8"))
