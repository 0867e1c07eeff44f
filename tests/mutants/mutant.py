"""A bug as a change of one function of the source, and the test that has to go red."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"

Body = list[ast.stmt]


@dataclass(frozen=True)
class Mutant:
    """One bug: ``find`` is replaced by ``replace`` in one function.

    Both are an expression or statements. They are compared as syntax trees, so that neither the
    layout of the code nor its comments matter; ``find`` has to occur once in the function.
    """

    bug: int
    """Its number in the project's list of silent bugs; 0 for one that the list does not know."""
    what: str
    """What is wrong, in words."""
    file: str
    """Below ``src/gruppo``."""
    function: str
    """Qualified name of the function or class; "" for the whole module."""
    find: str
    replace: str
    test: str
    """Id of a test below ``tests``, with parameters or without."""

    def inject(self, source: Path) -> str:
        """Return the file's code with the bug in it. ``source`` is the folder of the package."""
        module = ast.parse((source / "gruppo" / self.file).read_text(encoding="utf-8"))
        change = _Replacement(ast.parse(self.find).body, ast.parse(self.replace).body)
        scope = function_of(module, self.function)
        changed = change.generic_visit(scope)
        if change.found != 1:
            raise ValueError(
                f"{self.file}, {self.function or 'module'}: this occurs {change.found} times, "
                f"and not once, for {self.what!r}:\n{self.find}"
            )
        assert changed is scope
        return ast.unparse(ast.fix_missing_locations(module))

    def complaints(self) -> list[str]:
        """Return why this mutant would prove nothing, without running it."""
        try:
            ast.parse(self.inject(SOURCE))
        except (OSError, ValueError, SyntaxError) as error:
            return [str(error)]
        return [] if has_test(self.test) else [f"there is no test {self.test}, for {self.what!r}"]


class _Replacement(ast.NodeTransformer):
    """Replaces an expression, or consecutive statements, and counts how often."""

    def __init__(self, find: Body, replace: Body) -> None:
        self.find = [ast.dump(node) for node in find]
        self.replace = replace
        self.expression = ast.dump(find[0].value) if _is_expression(find) else None
        self.found = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if self.expression is not None and ast.dump(node) == self.expression:
            self.found += 1
            replacement = self.replace[0]
            if not isinstance(replacement, ast.Expr):
                raise ValueError("an expression can be replaced by an expression only")
            return replacement.value
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if self.expression is None:
            for name in ("body", "orelse", "finalbody"):
                body = getattr(node, name, None)
                if isinstance(body, list):
                    setattr(node, name, self._replaced(body))
        return node

    def _replaced(self, body: Body) -> Body:
        dumps = [ast.dump(statement) for statement in body]
        size = len(self.find)
        for at in range(len(body) - size + 1):
            if dumps[at : at + size] == self.find:
                self.found += 1
                body = [*body[:at], *self.replace, *body[at + size :]] or [ast.Pass()]
        return body


def _is_expression(body: Body) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def function_of(module: ast.Module, name: str) -> ast.AST:
    """Return the function or class with a qualified name, such as ``Policy.sample``."""
    scope: ast.AST = module
    for part in name.split(".") if name else []:
        named = [node for node in ast.walk(scope) if getattr(node, "name", None) == part]
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in named if isinstance(node, definitions) and node is not scope]
        if not found:
            raise ValueError(f"there is no function {name}")
        scope = found[0]
    return scope


def has_test(test: str) -> bool:
    """Whether the file of a test's id defines a function of its name."""
    file, _, name = test.partition("::")
    return name.partition("[")[0] in _functions_of(file)


@cache
def _functions_of(file: str) -> frozenset[str]:
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
