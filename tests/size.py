"""Size of the package, printed by ``make size``: tokens, their density and functions that are
large.

Tokens are those of Python's ``tokenize`` without comments, docstrings, newlines and indentation. A
string of more than 200 characters that is not a message, and a TOML, JSON or Jinja file, count one
token per 4 characters besides, so that code does not become smaller by moving into data.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "gruppo"
LONG_TEXT = 200
"""Characters of a string from which on it counts as data."""
MOST_NODES, MOST_NAMES = 400, 18
"""A function with more syntax nodes, or more parameters and assigned names, is large."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
DATA = (".toml", ".json", ".jinja")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Size:
    """Counts of one file or folder."""

    code: int = 0
    """Tokens of Python."""
    data: int = 0
    """Long strings and data files, a token per 4 characters."""
    lines: int = 0
    """Lines with code."""
    functions: int = 0
    large: list[str] = field(default_factory=list)
    """Large functions, as ``file.py function``."""
    splats: list[str] = field(default_factory=list)
    """Dicts of keywords that are built and splatted in the next statement."""
    classes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.code + self.data

    @property
    def density(self) -> float:
        """Tokens a code line."""
        return self.code / max(self.lines, 1)

    def add(self, other: Size) -> None:
        self.code += other.code
        self.data += other.data
        self.lines += other.lines
        self.functions += other.functions
        self.large += other.large
        self.splats += other.splats
        self.classes += other.classes


def measure(path: Path, name: str = "") -> Size:
    """Measure a Python or data file; ``name`` is what large functions are listed under."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return Size(data=len(text) // 4)
    tree = ast.parse(text)
    documented = set[int]()
    for node in docstrings(tree):
        documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = 0
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in documented:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    size = Size(tokens, data_tokens(tree), len(lines))
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            size.functions += 1
            if is_large(node):
                size.large.append(f"{name or path.name} {node.name}")
            size.splats += [f"{name or path.name}:{line}" for line in splats(node)]
        if isinstance(node, ast.ClassDef):
            size.classes.append(node.name)
    return size


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yield the strings that stand alone as statements."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node


def data_tokens(tree: ast.AST) -> int:
    """Count long strings that are no messages, one token per 4 characters."""
    exempt = {id(node.value) for node in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_message(node)):
            exempt.update(id(inside) for inside in ast.walk(node))
    strings = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in exempt
    )
    return sum(len(value) // 4 for value in strings if len(value) > LONG_TEXT)


def _is_message(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name.endswith("Error") or name in {"info", "warning", "error", "print", "NumericalStop"}


def is_large(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is more than a reader holds at once."""
    nodes = sum(1 for _ in ast.walk(function))
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return nodes > MOST_NODES or len(names) > MOST_NAMES


def splats(function: ast.AST) -> Iterator[int]:
    """Yield the lines of dicts that the next statement splats as keywords."""
    for node in ast.walk(function):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for first, second in pairwise(body):
            if not isinstance(first, ast.Assign) or not _builds_dict(first.value):
                continue
            names = {target.id for target in first.targets if isinstance(target, ast.Name)}
            splatted = {
                keyword.value.id
                for call in ast.walk(second)
                if isinstance(call, ast.Call)
                for keyword in call.keywords
                if keyword.arg is None and isinstance(keyword.value, ast.Name)
            }
            if names & splatted:
                yield first.lineno


def _builds_dict(value: ast.expr) -> bool:
    return isinstance(value, ast.Dict) or (
        isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict"
    )


def by_part(root: Path = SOURCE) -> dict[str, Size]:
    """Measure each subpackage, by its path below the package; "." are the modules of the package
    itself."""
    parts: dict[str, Size] = {}
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".py", *DATA) or "__pycache__" in path.parts:
            continue
        inside = path.relative_to(root)
        part = "/".join(inside.parts[: min(len(inside.parts) - 1, 2)]) or "."
        parts.setdefault(part, Size()).add(measure(path, str(inside)))
    return parts


def total(parts: dict[str, Size]) -> Size:
    everything = Size()
    for size in parts.values():
        everything.add(size)
    return everything


def main(root: Path) -> None:
    parts = by_part(root)
    everything = total(parts)
    width = max(map(len, parts)) + 2
    print(f"{'':{width}}    tokens  code lines  tokens/line  functions  large")
    for part, size in [*sorted(parts.items()), ("total", everything)]:
        print(
            f"{part:{width}}{size.tokens:>10}{size.lines:>12}{size.density:>13.1f}"
            f"{size.functions:>11}{len(size.large):>7}"
        )
    print(
        f"large: above {MOST_NODES} syntax nodes, or above {MOST_NAMES} parameters and assigned "
        f"names"
    )
    for suffix in (".html", ".js", ".toml"):
        files = list(root.rglob(f"*{suffix}"))
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        print(
            f"{suffix}: {lines} lines, {sum(path.stat().st_size for path in files) / 1000:.0f} kB"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
