"""An assert in two parts: the calls of the program, which go into the jail, and the rest, which is judged outside.

``assert abs(f(2) - 1.41) < 0.01``: the jail is asked for ``f(2)``; 1.41, the difference and ``<`` stay here.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

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
_PREDICATES = {
    *("startswith", "endswith", "issubset", "issuperset", "isdisjoint", "isalnum", "isalpha", "isascii", "isdecimal"),
    *("isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
}
"""Methods of plain values that answer yes or no: asked outside, of the value that the program gave."""
_METHODS = _PREDICATES | {
    *("split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize"),
    *("swapcase", "join", "encode", "decode", "count", "find", "index"),
}
"""Asked outside of literals."""
_REFUSED = {"eval", "exec", "compile", "__import__", "getattr", "globals", "locals", "vars"}
_MOST_ITEMS = 10_000_000
_OWN = "both sides are the program's own, and it could make any two agree"
_TYPES = {t.__name__: t for t in (int, float, bool, complex, str, bytes, list, tuple, dict, set, frozenset)}
_CONSTANTS = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: lambda a, b: _sum(a, b), ast.Sub: lambda a, b: _difference(a, b)},
    **{ast.Mult: lambda a, b: _product(a, b), ast.Pow: lambda a, b: _power(a, b)},
    **{ast.Div: lambda a, b: operator.truediv(*_numbers(a, b))},
    **{ast.FloorDiv: lambda a, b: operator.floordiv(*_numbers(a, b))},
    **{ast.Mod: lambda a, b: operator.mod(*_numbers(a, b))},  # of text it is a format, of any width
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
        _refuse_verdict_of_an_object(node)
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
        a, b = self.value(node.left), self.value(node.right)
        if not _mentions(node):
            return _at_once(lambda values: apply(a(values), b(values)), node)
        for side, part in ((node.left, a), (node.right, b)):
            if not _mentions(side) and not _may_be_in(node.op, part(())):
                raise BadTest(f"{_short(ast.unparse(node))} is arithmetic of other things than numbers")
        return lambda values: apply(a(values), b(values))

    def _compare(self, node: ast.Compare) -> Verdict:
        sides = [node.left, *node.comparators]
        for a, b, op in zip(sides, sides[1:], node.ops, strict=False):
            if _mentions(a) and _mentions(b):
                raise BadTest(_OWN)
            if isinstance(op, (ast.Is, ast.IsNot)) and not any(_is_singleton(side) for side in (a, b)):
                raise BadTest("is, of anything but None, True or False, has no meaning outside of the program")
            for side, other in ((a, b), (b, a)):
                if _is_bool(other) and not isinstance(side, ast.Subscript):
                    _refuse_verdict_of_an_object(side)
        parts, orders = [self.value(side) for side in sides], [_ORDER[type(op)] for op in node.ops]

        def verdict(values: Sequence[Any]) -> bool:
            found = [part(values) for part in parts]
            return all(order(a, b) for a, b, order in zip(found, found[1:], orders, strict=False))

        return verdict

    def _call(self, node: ast.Call) -> Verdict:
        name = _name(node.func)
        if isinstance(node.func, ast.Attribute) and name not in _KNOWN:
            if node.func.attr in _METHODS and not _mentions(node):
                return _at_once(self._method(node, node.func), node)
            if node.func.attr in _PREDICATES and not _is_of_the_program(node.func.value):
                return self._method(node, node.func)
        if name not in _KNOWN and not _mentions(node):
            raise BadTest(f"{_short(ast.unparse(node))} is not understood, and calls nothing of the program")
        is_one = len(node.args) == 1 and name in _CONSUMES
        if name not in _KNOWN or (is_one and _mentions(node.args[0]) and not _is_display(node.args[0])):
            return self._inside(node)
        if name == "isinstance":
            return self._isinstance(node)
        if name == "math.isclose" and all(_mentions(argument) for argument in node.args):
            raise BadTest(_OWN)
        if name in ("bool", "any", "all"):
            for part in (part for each in node.args for part in (each.elts if _is_sequence(each) else [each])):
                if not isinstance(part, ast.Subscript):
                    _refuse_verdict_of_an_object(part)
        function, arguments = _KNOWN[name], [self.value(argument) for argument in node.args]
        named = [(keyword.arg, self.value(keyword.value)) for keyword in node.keywords]
        if any(key is None for key, _ in named):
            raise BadTest("** in a call is not understood")
        return lambda values: function(*(a(values) for a in arguments), **{str(k): v(values) for k, v in named})

    def _method(self, node: ast.Call, func: ast.Attribute) -> Verdict:
        """A method of a plain value, asked outside."""
        if node.keywords:
            raise BadTest(f"{_short(ast.unparse(node))}: keywords of {func.attr} are not understood")
        if _mentions(func.value) and any(_mentions(argument) for argument in node.args):
            raise BadTest(_OWN)
        owner, arguments = self.value(func.value), [self.value(argument) for argument in node.args]
        return lambda values: getattr(owner(values), func.attr)(*(a(values) for a in arguments))

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
            if isinstance(part, ast.Attribute) and part.attr.startswith("__"):
                raise BadTest(f"{part.attr} would be asked of the program itself; compare with ==")
            if isinstance(part, ast.Name) and part.id in _REFUSED:
                raise BadTest(f"{part.id} is not understood; call the function itself")
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


def _at_once(verdict: Verdict, node: ast.expr) -> Verdict:
    """Of literals alone: computed when it is read, so that what cannot be is the test's fault and no program's."""
    try:
        return _always(verdict(()))
    except Exception as error:
        raise BadTest(f"{_short(ast.unparse(node))} has no value ({type(error).__name__}: {error})") from None


def _refuse_verdict_of_an_object(node: ast.expr) -> None:
    """BadTest where yes or no would come from what the program gave: ``f(1).equals(2)``, ``f(1)["ok"]``."""
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute):
            if _is_of_the_program(func.value) or not _mentions(func.value) or func.attr in _PREDICATES:
                return
        elif isinstance(func, ast.Name):
            return
    elif not isinstance(node, (ast.Subscript, ast.Attribute, ast.IfExp, ast.NamedExpr)) or not any(_called(node)):
        return
    raise BadTest(f"{_short(ast.unparse(node))} would be judged by what the program gave; compare with ==")


def _is_of_the_program(node: ast.expr) -> bool:
    """A module, a class, or ``Solution()``: what its methods give is the program's answer, as what a function gives."""
    while isinstance(node, ast.Attribute):
        node = node.value
    if isinstance(node, ast.Call):
        return _name(node.func).rpartition(".")[2][:1].isupper()
    return isinstance(node, ast.Name) and node.id not in {*_KNOWN, *_TYPES}


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


def _is_sequence(node: ast.expr) -> TypeGuard[ast.List | ast.Tuple | ast.Set]:
    return isinstance(node, (ast.List, ast.Tuple, ast.Set))


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_bool(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _is_in(item: Any, container: Any) -> bool:
    return item in container if isinstance(container, (str, bytes)) else any(same(item, each) for each in container)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


def _may_be_in(op: ast.operator, value: Any) -> bool:
    """Whether something may be added to a literal, or whatever it is that ``op`` does."""
    others = {ast.Add: (str, bytes, list, tuple), ast.Sub: (set,), ast.Mult: (str, bytes, list, tuple)}
    return _is_number(value) or isinstance(value, others.get(type(op), ()))


def _numbers(a: Any, b: Any) -> tuple[Any, Any]:
    if not (_is_number(a) and _is_number(b)):
        raise TypeError("arithmetic is for numbers")
    return a, b


def _sum(a: Any, b: Any) -> Any:
    is_joined = type(a) is type(b) and isinstance(a, (str, bytes, list, tuple))
    return a + b if is_joined else operator.add(*_numbers(a, b))


def _difference(a: Any, b: Any) -> Any:
    are_sets = isinstance(a, (set, frozenset)) and isinstance(b, (set, frozenset))
    return a - b if are_sets else operator.sub(*_numbers(a, b))


def _product(a: Any, b: Any) -> Any:
    a, b = (b, a) if isinstance(a, int) else (a, b)
    if isinstance(a, (str, bytes, list, tuple)) and isinstance(b, int):
        if len(a) * b > _MOST_ITEMS:
            raise ValueError(f"more than {_MOST_ITEMS} items")
        return a * b
    return operator.mul(*_numbers(a, b))


def _power(a: Any, b: Any) -> Any:
    a, b = _numbers(a, b)
    if not (abs(a) <= 1e6 and abs(b) <= 1000):
        raise ValueError("too large a power")
    return a**b


def _short(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
