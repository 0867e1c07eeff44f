"""An assert in two parts: the calls of the program, which go into the jail, and the rest, which is judged outside.

``assert abs(f(2) - 1.41) < 0.01``: the jail is asked for ``f(2)``; 1.41, the difference and ``<`` stay here.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gruppo.rewards.code_same import same

Verdict = Callable[[Sequence[Any]], Any]
"""From the values of the expressions that the jail was asked for."""


class BadTest(Exception):
    """A test that cannot be judged from outside, and why."""


@dataclass(frozen=True)
class Assert:
    """What the jail is asked for, and what to make of its answers."""

    sources: tuple[str, ...]
    verdict: Verdict

    def passes(self, values: Sequence[Any]) -> bool:
        """Whether it holds; one that raises does not."""
        try:
            return bool(self.verdict(values))
        except Exception:
            return False


_CONSUMES = {"set", "frozenset", "list", "tuple", "dict", "sorted", "len", "sum", "min", "max", "str"}
"""Of one value of the program's they may be asked inside: what they give is compared outside all the same."""
_KNOWN: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (set, frozenset, list, tuple, dict, sorted, len, sum, min, max, str, abs, round)},
    **{f.__name__: f for f in (int, float, bool, complex, bytes, any, all, isinstance, range)},
    **{f"math.{f.__name__}": f for f in (math.isclose, math.isnan, math.isinf, math.sqrt, math.floor, math.ceil)},
}
_OWN = "both sides are the program's own, and it could make any two agree"
_TYPES = {t.__name__: t for t in (int, float, bool, complex, str, bytes, list, tuple, dict, set, frozenset)}
_CONSTANTS = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow},
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
_ORDER: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: same, ast.NotEq: lambda a, b: not same(a, b)},
    **{ast.In: lambda a, b: _is_in(a, b), ast.NotIn: lambda a, b: not _is_in(a, b)},
}


def read_asserts(text: str) -> tuple[list[Assert], str]:
    """The asserts of a test's text, and its imports, for the program's namespace. BadTest for any other line."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise BadTest(f"{_short(text)} is no Python ({error})") from None
    asserts, imports = [], []
    for line in tree.body:
        if isinstance(line, ast.Assert):
            asserts.append(_read_assert(line))
        elif isinstance(line, (ast.Import, ast.ImportFrom)):
            imports.append(ast.unparse(line))
        else:
            raise BadTest(f"{_short(ast.unparse(line))} is no assert")
    return asserts, "\n".join(imports)


def _read_assert(line: ast.Assert) -> Assert:
    reader = _Reader()
    try:
        verdict = reader.truth(line.test)
    except BadTest as error:
        raise BadTest(f"assert {_short(ast.unparse(line.test))}: {error}") from None
    if not reader.sources:
        raise BadTest(f"assert {_short(ast.unparse(line.test))}: it calls nothing of the program")
    return Assert(tuple(reader.sources), verdict)


class _Reader:
    """Reads one assert; collects what the jail is asked for."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def truth(self, node: ast.expr) -> Verdict:
        """Where the value is taken as true or false."""
        if isinstance(node, ast.BoolOp):
            parts, join = [self.truth(part) for part in node.values], all if isinstance(node.op, ast.And) else any
            return lambda values: join(part(values) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = self.truth(node.operand)
            return lambda values: not part(values)
        if len(functions := sorted(set(_called(node)))) > 1 and not isinstance(node, (ast.Compare, ast.Call)):
            raise BadTest(f"{' and '.join(functions)} would be judged by the program itself; compare with ==")
        if isinstance(node, ast.Call) and _name(node.func) not in _KNOWN and len(functions) > 1:
            raise BadTest(f"{' and '.join(functions)} would be judged by the program itself; compare with ==")
        return self.value(node)

    def value(self, node: ast.expr) -> Verdict:
        if _name(node) in _CONSTANTS:
            return _always(_CONSTANTS[_name(node)])
        read = _READERS.get(type(node))
        if read is not None:
            return read(self, node)
        if _mentions(node):
            return self._inside(node)
        raise BadTest(f"{_short(ast.unparse(node))} is not understood")

    def _constant(self, node: ast.Constant) -> Verdict:
        return _always(node.value)

    def _items(self, node: ast.List | ast.Tuple | ast.Set) -> Verdict:
        parts = [self.value(part) for part in node.elts]
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return lambda values: kind(part(values) for part in parts)

    def _dict(self, node: ast.Dict) -> Verdict:
        if None in node.keys:
            raise BadTest("** in a dict is not understood")
        pairs = [(self.value(key), self.value(item)) for key, item in zip(node.keys, node.values, strict=True) if key]
        return lambda values: {key(values): item(values) for key, item in pairs}

    def _unary(self, node: ast.UnaryOp) -> Verdict:
        if type(node.op) not in _UNARY:
            raise BadTest("~ is not understood")
        part, apply = self.value(node.operand), _UNARY[type(node.op)]
        return lambda values: apply(part(values))

    def _binary(self, node: ast.BinOp) -> Verdict:
        apply = _ARITHMETIC.get(type(node.op))
        if apply is None:
            raise BadTest(f"{_short(ast.unparse(node))} is not understood")
        a, b, is_ours = self.value(node.left), self.value(node.right), not _mentions(node)

        def verdict(values: Sequence[Any]) -> Any:
            x, y = a(values), b(values)
            if not is_ours and not (_is_number(x) and _is_number(y)):
                raise TypeError("arithmetic with what the program said is for numbers")
            if isinstance(node.op, ast.Pow) and not (abs(x) <= 1e6 and abs(y) <= 1000):
                raise ValueError("too large a power")
            return apply(x, y)

        return verdict

    def _compare(self, node: ast.Compare) -> Verdict:
        sides = [node.left, *node.comparators]
        for a, b, op in zip(sides, sides[1:], node.ops, strict=False):
            if _mentions(a) and _mentions(b):
                raise BadTest(_OWN)
            if isinstance(op, (ast.Is, ast.IsNot)) and not any(_is_singleton(side) for side in (a, b)):
                raise BadTest("is, of anything but None, True or False, has no meaning outside of the program")
        parts, orders = [self.value(side) for side in sides], [_ORDER[type(op)] for op in node.ops]

        def verdict(values: Sequence[Any]) -> bool:
            found = [part(values) for part in parts]
            return all(order(a, b) for a, b, order in zip(found, found[1:], orders, strict=False))

        return verdict

    def _call(self, node: ast.Call) -> Verdict:
        name = _name(node.func)
        is_one = len(node.args) == 1 and name in _CONSUMES
        if name not in _KNOWN or (is_one and _mentions(node.args[0]) and not _is_display(node.args[0])):
            return self._inside(node)
        if name == "isinstance":
            return self._isinstance(node)
        if name == "math.isclose" and all(_mentions(argument) for argument in node.args):
            raise BadTest(_OWN)
        function, arguments = _KNOWN[name], [self.value(argument) for argument in node.args]
        named = [(keyword.arg, self.value(keyword.value)) for keyword in node.keywords]
        if any(key is None for key, _ in named):
            raise BadTest("** in a call is not understood")
        return lambda values: function(*(a(values) for a in arguments), **{str(k): v(values) for k, v in named})

    def _isinstance(self, node: ast.Call) -> Verdict:
        value, *kinds = node.args
        names = [part for kind in kinds for part in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]
        types = tuple(_TYPES[_name(name)] for name in names if _name(name) in _TYPES)
        if len(types) != len(names) or not types:
            raise BadTest("isinstance is understood of the types of plain data")
        part = self.value(value)
        return lambda values: isinstance(part(values), types)

    def _inside(self, node: ast.expr) -> Verdict:
        for part in ast.walk(node):
            if isinstance(part, ast.Compare) and _mentions(part):
                raise BadTest(f"{_short(ast.unparse(part))} would be judged by the program itself")
        self.sources.append(ast.unparse(node))
        place = len(self.sources) - 1
        return lambda values: values[place]


_READERS: dict[type, Callable[[_Reader, Any], Verdict]] = {
    ast.Constant: _Reader._constant,
    ast.List: _Reader._items,
    ast.Tuple: _Reader._items,
    ast.Set: _Reader._items,
    ast.Dict: _Reader._dict,
    ast.UnaryOp: _Reader._unary,
    ast.BinOp: _Reader._binary,
    ast.Compare: _Reader._compare,
    ast.Call: _Reader._call,
}


def _always(value: Any) -> Verdict:
    return lambda _: value


def _name(node: ast.expr) -> str:
    """``f`` or ``math.f``; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _mentions(node: ast.AST) -> bool:
    """Whether it names anything of the program's."""
    return any(isinstance(part, ast.Name) and part.id not in {*_KNOWN, *_TYPES, "math"} for part in ast.walk(node))


def _called(node: ast.AST) -> Iterator[str]:
    """Functions of the program's that it calls; of ``a.b.c()`` a."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call):
            root: ast.expr = part.func
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and _name(part.func) not in _KNOWN:
                yield root.id


def _is_display(node: ast.expr) -> bool:
    return isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp))


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_in(item: Any, container: Any) -> bool:
    return item in container if isinstance(container, (str, bytes)) else any(same(item, each) for each in container)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


def _short(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
