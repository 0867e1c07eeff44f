"""Mutants made by rule: one operator, number or condition of the numerical code is changed.

The tests that may catch one are those that were seen to run its function (``covering.py``); of a
function that no recording knows, those that import its module, and those of its part that name
what it defines. A sample is seeded by the commit, so that each run of CI tries others; survivors
that cannot be caught are listed in ``survivors.txt`` with the reason.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutants.covering import tests_of
from tests.mutants.mutant import SOURCE, TESTS

PLACES = ("core", "trainer", "modalities/*/policy.py", "modalities/*/sampling.py", "losses.py")
"""Where the numbers are made, below ``src/gruppo``."""
NOT_NUMBERS = (
    "callbacks",
    "checkpoint",
    "checks",
    "dry_run",
    "ledger",
    "memory",
    "prefetch",
    "run_dir",
    "shards",
    "signals",
    "watch",
)
"""Modules of the trainer that write files, refuse, print or wait: their tests are whole runs and
processes."""
MOST_FILES = 12
"""Test files that one mutant runs at most: those that import its module, then those that name what
it defines most often."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
METHODS = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "sum": "mean", "any": "all"}
DROPPED = {"detach", "exp", "clamp", "abs", "square"}
"""Methods whose call is left out."""
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.arguments, ast.Import)
"""Statements and expressions whose change is a message or a type, not a number."""
UNSEEN_CALLS = {"info", "warning", "debug", "GruppoError", "log", "isinstance"}
UNSEEN_NAMES = (
    "perf_counter",
    "monotonic",
    "seconds",
    "tile",
    "budget",
    "is_main",
    "device",
    "cuda",
)
"""Parts of names by which an expression is about time, memory or printing: no number of a run
depends on it."""


@dataclass(frozen=True)
class Generated:
    """One generated mutant: the ``number``-th change of a file."""

    file: str
    function: str
    line: int
    change: str
    number: int

    @property
    def name(self) -> str:
        """How ``survivors.txt`` names it: without the line, which moves."""
        return f"{self.file} {self.function}: {self.change}"

    def inject(self, source: Path) -> str:
        """Return the file's code with the change in it."""
        module = ast.parse((source / "gruppo" / self.file).read_text(encoding="utf-8"))
        for number, (node, _, apply, _) in enumerate(_changes(module)):
            if number == self.number:
                apply(node)
        return ast.unparse(ast.fix_missing_locations(module))

    @property
    def tests(self) -> tuple[str, ...]:
        """Tests or test files, below ``tests``, the ones about this function first."""
        return (*tests_of(self.file, self.function), *_tests_of(self.file))


def sample(count: int, seed: str) -> list[Generated]:
    """Choose ``count`` mutants of all files, each as likely as another."""
    everything = [mutant for file in _files() for mutant in mutants_of(file)]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def mutants_of(file: str) -> list[Generated]:
    """List the mutants of a file below ``src/gruppo``."""
    module = ast.parse((SOURCE / "gruppo" / file).read_text(encoding="utf-8"))
    return [
        Generated(file, function, getattr(node, "lineno", 0), change, number)
        for number, (node, function, _, change) in enumerate(_changes(module))
    ]


def functions() -> list[str]:
    """Name all functions that have a mutant: the file, a space and the qualified name."""
    everything = [mutant for file in _files() for mutant in mutants_of(file)]
    return sorted({f"{mutant.file} {mutant.function}" for mutant in everything})


def _files() -> Iterator[str]:
    root = SOURCE / "gruppo"
    for place in PLACES:
        for path in sorted(root.glob(place)):
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            for file in files:
                is_numeric = path.name != "trainer" or file.stem not in NOT_NUMBERS
                if is_numeric and _tests_of(str(file.relative_to(root))):
                    yield str(file.relative_to(root))


@cache
def _tests_of(file: str) -> tuple[str, ...]:
    module = "gruppo." + file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    imports = (f"from {module} import", f"import {module}", f"from {package} import {name}")
    mirrored = TESTS / Path(file).parent
    counts = {}
    for path in TESTS.rglob("test_*.py"):
        if "gpu" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        is_importer = any(line in text for line in imports)
        if is_importer or path.parent == mirrored:
            mentions = text.count(name) + sum(text.count(word) for word in _defined(file))
            counts[str(path.relative_to(TESTS))] = mentions + 100 * is_importer
    likely = [test for test, count in counts.items() if count]
    return tuple(sorted(likely, key=lambda test: (-counts[test], test))[:MOST_FILES])


@cache
def _defined(file: str) -> tuple[str, ...]:
    """Names of the functions and classes that a module defines for others."""
    module = ast.parse((SOURCE / "gruppo" / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in module.body if isinstance(node, kinds)]
    return tuple(name for name in names if not name.startswith("_"))


def _changes(module: ast.Module) -> Iterator[tuple]:
    """Yield (node, function, how to change the node in place, words) for each possible change."""
    yield from _changes_below(module, "")


def _changes_below(scope: ast.AST, function: str) -> Iterator[tuple]:
    for node in ast.iter_child_nodes(scope):
        inside = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{function}.{node.name}".lstrip(".")
        elif isinstance(node, SKIPPED) or _is_unseen(node):
            continue
        if function:
            for apply, change in _changes_of(node):
                yield node, function, apply, change
        yield from _changes_below(node, inside)


def _is_unseen(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.expr) and any(name in ast.unparse(node) for name in UNSEEN_NAMES):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in UNSEEN_CALLS


def _changes_of(node: ast.AST) -> Iterator[tuple]:
    text = " ".join(ast.unparse(node).split())[:60] if isinstance(node, ast.expr) else ""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not _is_text(node):
        yield _set("op", SWAPS[type(node.op)]()), f"{text} -> {_name(SWAPS[type(node.op)])}"
    if isinstance(node, ast.BoolOp):
        yield _set("op", SWAPS[type(node.op)]()), f"{text} -> {_name(SWAPS[type(node.op)])}"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        swapped = SWAPS[type(node.ops[0])]
        yield _set("ops", [swapped()]), f"{text} -> {_name(swapped)}"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        if text == "-1":  # the last axis or element: 1 is often the same, 0 is not
            yield _become_zero, "-1 -> 0"
        else:
            yield _become_operand, f"{text} -> without the sign"
    if isinstance(node, ast.IfExp) and not (_is_string(node.body) or _is_string(node.orelse)):
        yield _set("test", ast.Constant(value=True)), f"{text} -> always the first"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        if method in METHODS:
            renamed = copy.deepcopy(node.func)
            renamed.attr = METHODS[method]
            yield _set("func", renamed), f"{text} -> {METHODS[method]}"
        if method in DROPPED:
            yield _become_receiver, f"{text} -> without {method}"


def _set(field: str, value: object):
    return lambda node: setattr(node, field, value)


def _become_operand(node: ast.AST) -> None:
    _become(node, node.operand)  # type: ignore[attr-defined]


def _become_zero(node: ast.AST) -> None:
    _become(node, ast.Constant(value=0))


def _become_receiver(node: ast.AST) -> None:
    _become(node, node.func.value)  # type: ignore[attr-defined]


def _become(node: ast.AST, other: ast.AST) -> None:
    """Turn a node into another in place: its parent need not be known."""
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update(copy.deepcopy(other).__dict__)


def _is_text(node: ast.BinOp) -> bool:
    """Whether strings or tuples are added."""
    sides = (node.left, node.right)
    return any(isinstance(side, ast.Tuple | ast.List) or _is_string(side) for side in sides)


def _is_string(node: ast.expr) -> bool:
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def _name(operator: type[ast.AST]) -> str:
    return operator.__name__.lower()
