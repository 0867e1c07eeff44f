"""A bug as a change of one snippet of the source, and the test that has to go red."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
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
            raise ValueError(
                f"{self.file} holds this {found} times and not once, for {self.what!r}:\n{self.old}"
            )
        return text.replace(self.old, self.new)

    def complaints(self) -> list[str]:
        """Why this mutant would prove nothing, without running it."""
        try:
            if self.file.endswith(".toml"):
                tomllib.loads(self.inject(SOURCE))
            else:
                self._parse_changed(SOURCE / "gruppo" / self.file, self.inject(SOURCE))
        except (OSError, ValueError, SyntaxError) as error:
            return [str(error)]
        return [] if has_test(self.by) else [f"there is no test {self.by}, for {self.what!r}"]

    def _parse_changed(self, file: Path, changed: str) -> None:
        """Parse the statements of the module that the change touches: whole files would take 7 ms each."""
        text = file.read_text(encoding="utf-8")
        first = text.index(self.old)
        last = first + len(self.old)
        for begin, end in _statements_of(file):
            if begin <= last and first <= end:
                first, last = min(first, begin), max(last, end)
        ast.parse(changed[first : last + len(changed) - len(text)])


def has_test(test: str) -> bool:
    """Whether the file of a test's id defines a function of its name."""
    file, _, name = test.partition("::")
    return name.partition("[")[0] in _functions_of(file)


@cache
def _statements_of(file: Path) -> list[tuple[int, int]]:
    """Where each statement of a module begins and ends, in characters, its decorators and line end included."""
    text = file.read_text(encoding="utf-8")
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
    statements = ast.parse(text).body
    begins = [
        min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
        for node in statements
    ]
    return [
        (starts[line - 1], starts[node.end_lineno or line])
        for line, node in zip(begins, statements, strict=True)
    ]


@cache
def _functions_of(file: str) -> set[str]:
    path = TESTS / file
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
