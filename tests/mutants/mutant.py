"""A bug as a change of one snippet of the source, and the test that has to go red."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"


@dataclass(frozen=True)
class Mutant:
    """One bug. ``file`` is below ``src/gruppo``; ``by`` is a test's id below ``tests``, with parameters or without."""

    bug: int
    """Its number in the project's list of silent bugs; 0 for one that the list does not know."""
    what: str
    """What is wrong, in words."""
    file: str
    old: str
    new: str
    by: str

    def inject(self, source: Path) -> str:
        """The file's text with the bug in it. ``source`` is the folder that holds the package."""
        text = (source / "gruppo" / self.file).read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} holds this {found} times and not once, for {self.what!r}:\n{self.old}")
        return text.replace(self.old, self.new)

    def complaints(self) -> list[str]:
        """Why this mutant would prove nothing, without running it."""
        try:
            (tomllib.loads if self.file.endswith(".toml") else ast.parse)(self.inject(SOURCE))
        except (OSError, ValueError, SyntaxError) as error:
            return [str(error)]
        return [] if has_test(self.by) else [f"there is no test {self.by}, for {self.what!r}"]


def has_test(test: str) -> bool:
    """Whether the file of a test's id defines a function of its name."""
    file, _, name = test.partition("::")
    return name.partition("[")[0] in _functions_of(file)


@cache
def _functions_of(file: str) -> set[str]:
    path = TESTS / file
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
