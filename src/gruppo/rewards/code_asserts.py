"""Assert statements in two parts: calls of the program, which go into the jail, and what is expected, which does not.

``assert abs(f(2) - 1.41) < 0.01``: the jail evaluates ``f(2)``; 1.41, the difference and ``<`` stay outside.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gruppo.rewards.code_compare import Approx, equal
from gruppo.rewards.sandbox.jail import CaseResult

Judge = Callable[[Sequence[Any]], Any]
"""Function of the values of the expressions that the jail evaluated."""
_MOST_ITEMS = 10_000_000


class BadTest(Exception):
    """A test that cannot be judged from outside, and why."""


@dataclass(frozen=True)
class ProgramCase:
    """A request to the jail, and how its result is judged. Only ``request`` ever enters the jail."""

    request: Any
    """Expressions, a tuple; or the text of standard input."""
    judge: Callable[[Any], Any]
    """Whether the expressions' values, or the text that was printed, are what is expected."""
    length: int
    """Characters of what is expected, or some more."""
    exceptions: tuple[str, ...] = ()
    """Types of which the request has to raise one; then no value is right."""

    def passes(self, result: CaseResult) -> bool:
        """Whether the result is what is expected. A value that cannot be compared is not.

        An exception counts by its type, or by the built-in type that this derives from. NameError counts by name
        alone: without the function that is tested, each call raises one.
        """
        try:
            if not self.exceptions:
                return result.status == "value" and bool(self.judge(result.value))
            if not result.exception:  # it was raised while the program was loaded, or the process ended
                return False
            types = (result.exception, result.message.partition(":")[0])
            base = object if "NameError" in types else _EXCEPTIONS.get(result.exception, object)
            return any(name in types or issubclass(base, _EXCEPTIONS.get(name, ())) for name in self.exceptions)
        except Exception:
            return False


_TYPES = {t.__name__: t for t in (int, float, bool, complex, str, bytes, list, tuple, dict, set, frozenset)}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_TYPES,
    **{f.__name__: f for f in (sorted, len, sum, min, max, abs, round, any, all, isinstance, range)},
    **{f.__name__: f for f in (map, filter, zip, enumerate, reversed)},
    **{f"math.{f.__name__}": f for f in (math.isclose, math.isnan, math.isinf, math.floor, math.ceil, math.sqrt)},
    **{"pytest.approx": Approx, "approx": Approx},
}
"""Functions that are not the program's. What is expected may call those that build plain data."""
_EXCEPTIONS = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}
_CONSTANTS = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")}
_DISPLAYS: dict[type, Callable[..., Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: set}
_KNOWN = {*(name.partition(".")[0] for name in (*_FUNCTIONS, *_CONSTANTS))}
_REFUSED = {"eval", "exec", "compile", "__import__", "getattr", "globals", "locals", "vars"}
_OUTER = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.keyword, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.comprehension),
)
"""What may stand around the program's calls in the jail: nothing with a place for what is expected."""
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Eq: equal, ast.NotEq: lambda a, b: not equal(a, b)},
    **{ast.In: lambda a, b: _contains(b, a), ast.NotIn: lambda a, b: not _contains(b, a)},
}


def read_asserts(text: str) -> tuple[list[ProgramCase], str]:
    """Cases of a test's text, and its imports, for the program's namespace. Raises BadTest for any other statement."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTest(f"{_short(text)} is no Python ({error})") from None
    cases, imports = [], []
    for line in tree.body:
        if isinstance(line, (ast.Import, ast.ImportFrom)):
            if isinstance(line, ast.Import):  # pytest is judged outside, and is not installed in the jail
                line.names = [alias for alias in line.names if alias.name != "pytest"]
            if line.names and getattr(line, "module", "") != "pytest":
                imports.append(ast.unparse(line))
            continue
        reader, exceptions = _Reader(), tuple[str, ...]()
        try:
            match line:
                case ast.Assert(test=test):
                    judge = reader.truth(test)
                case ast.With(
                    items=[ast.withitem(ast.Call(func=func, args=[kinds], keywords=[]))],
                    body=[ast.Expr(value=call) | ast.Assign(value=call)],
                ) if _name(func) in ("pytest.raises", "raises"):
                    judge = reader.inside(call)
                    exceptions = tuple(name.rpartition(".")[2] for name in _names(kinds))
                case _:
                    raise BadTest("it is no assert, and no pytest.raises(TYPE) around one call")
            if not reader.sources:
                raise BadTest("it calls nothing of the program")
        except BadTest as error:
            raise BadTest(f"{_short(ast.unparse(line))}: {error}") from None
        cases.append(ProgramCase(tuple(reader.sources), judge, len(text), exceptions))
    return cases, "\n".join(imports)


class _Reader:
    """Reads one assert; collects the expressions that the jail evaluates."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def truth(self, node: ast.expr) -> Judge:
        """A node whose value is taken as true or false."""
        match node:
            case ast.BoolOp(op=op, values=nodes):
                parts, join = [self.truth(part) for part in nodes], all if isinstance(op, ast.And) else any
                return lambda values: join(part(values) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                part = self.truth(operand)
                return lambda values: not part(values)
            case ast.Compare():
                return self._compare(node)
            case ast.Call(func=func, args=[a, b], keywords=keywords) if _name(func) in ("math.isclose", "isclose"):
                first, second = self._sides([a, b])
                options = {str(keyword.arg): _value(keyword.value) for keyword in keywords}
                return lambda values: math.isclose(first(values), second(values), **options)
            case ast.Call(func=ast.Name(id="isinstance"), args=[a, kinds]):
                names = _names(kinds)
                if not {*names} <= {*_TYPES}:
                    raise BadTest("isinstance is understood of the types of plain data")
                part, types = self.inside(a), tuple(_TYPES[name] for name in names)
                return lambda values: isinstance(part(values), types)
            case ast.Call(func=ast.Attribute() as func, args=[_]) if _name(func) in ("math.isnan", "math.isinf"):
                return self._side(node)
        if _mentions(node) and not _is_plain_call(node):
            raise BadTest(_judges_itself(node))
        return self._side(node)

    def _compare(self, node: ast.Compare) -> Judge:
        nodes = [node.left, *node.comparators]
        for a, b, op in zip(nodes, nodes[1:], node.ops, strict=False):
            constants = [side.value for side in (a, b) if isinstance(side, ast.Constant)]
            if isinstance(op, (ast.Is, ast.IsNot)) and not any(c is None or isinstance(c, bool) for c in constants):
                raise BadTest("is, of anything but None, True or False, has no meaning outside of the program")
            if any(isinstance(c, bool) for c in constants):  # f(1).equals(2) == True: the program would say yes
                for side in (a, b):
                    while isinstance(side, ast.Subscript):
                        side = side.value
                    if _mentions(side) and not _is_plain_call(side):
                        raise BadTest(_judges_itself(side))
        sides, orders = self._sides(nodes), [_OPERATORS[type(op)] for op in node.ops]

        def judge(values: Sequence[Any]) -> bool:
            found = [side(values) for side in sides]
            return all(order(a, b) for a, b, order in zip(found, found[1:], orders, strict=False))

        return judge

    def _sides(self, nodes: Sequence[ast.expr]) -> list[Judge]:
        for a, b in pairwise(nodes):
            if _mentions(a) and _mentions(b):
                raise BadTest("both sides are the program's own, and it could make any two agree")
        return [self._side(node) for node in nodes]

    def _side(self, node: ast.expr) -> Judge:
        """What is expected, a difference to it, or an expression of the program's."""
        match node:
            case ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]):
                a, b = self._sides([left, right])
                return lambda values: abs(a(values) - b(values))
            case ast.Call(func=ast.Attribute() as func, args=[arg]) if _name(func) in _FUNCTIONS and _mentions(arg):
                part, function = self._side(arg), _FUNCTIONS[_name(func)]  # of math, which a program may not import
                return lambda values: function(part(values))
            case ast.List(elts=items) | ast.Tuple(elts=items) if _mentions(node):
                parts = list(map(self._side, items))
                return lambda values: _DISPLAYS[type(node)](part(values) for part in parts)
        if not _mentions(node):
            value = _value(node)
            return lambda _: value
        return self.inside(node)

    def inside(self, node: ast.expr) -> Judge:
        """An expression that the jail evaluates. What is expected must not be in it."""
        if not _mentions(node):
            raise BadTest("it calls nothing of the program")
        for part in ast.walk(node):
            if isinstance(part, (ast.Compare, ast.BoolOp, ast.IfExp, ast.NamedExpr)) and _mentions(part):
                raise BadTest(_judges_itself(part))
            if isinstance(part, ast.Attribute) and part.attr.startswith("__"):
                raise BadTest(f"{part.attr} would be answered by the program itself; compare with ==")
            if isinstance(part, ast.Name) and part.id in _REFUSED:
                raise BadTest(f"{part.id} is not understood; call the function itself")
        outer: list[ast.AST] = [node]
        while outer:  # down to the program's functions: what stands in their arguments is their input
            part = outer.pop()
            if not isinstance(part, _OUTER):
                raise BadTest(f"{_short(ast.unparse(part))} is made of what the program gave; compare f(...) with ==")
            if not isinstance(part, (ast.Call, ast.Lambda)) or _name(getattr(part, "func", part)) in _FUNCTIONS:
                outer += filter(_mentions, ast.iter_child_nodes(part))
        self.sources.append(ast.unparse(node))
        place = len(self.sources) - 1
        return lambda values: values[place]


def _is_plain_call(node: ast.expr) -> bool:
    """``f(x)``, ``module.f(x)`` or ``Class().f(x)``: the function itself answers, without the expected value.

    Not ``f(x).equals(y)``, where what the program gave would answer, nor ``is_close(f(x), y)``.
    """

    def root(function: ast.expr) -> ast.expr:
        while isinstance(function, ast.Attribute):
            function = function.value
        return function

    if not isinstance(node, ast.Call):
        return False
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call) and _name(part.func) not in _FUNCTIONS]
    functions = {name for call in calls if (name := _name(root(call.func)))}
    owner = root(node.func)
    is_method = isinstance(owner, ast.Call) and _name(owner.func).rpartition(".")[2][:1].isupper()
    return len(functions) == 1 and node in calls and (isinstance(owner, ast.Name) or is_method)


def _value(node: ast.expr) -> Any:
    """The value of an expression that names nothing of the program's; BadTest where it has none."""
    try:
        return _evaluate(node)
    except BadTest:
        raise
    except Exception as error:
        raise BadTest(f"{_short(ast.unparse(node))} has no value ({type(error).__name__}: {error})") from None


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return _DISPLAYS[type(node)](map(_evaluate, items))
        case ast.Dict(keys=keys, values=items) if None not in keys:
            return {_evaluate(key): _evaluate(item) for key, item in zip(keys, items, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
            return -_evaluate(operand) if isinstance(op, ast.USub) else +_evaluate(operand)
        case ast.Attribute() if _name(node) in _CONSTANTS:
            return _CONSTANTS[_name(node)]
        case ast.Call(func=func, args=args, keywords=keywords) if _name(func) in _FUNCTIONS:
            options = {str(keyword.arg): _evaluate(keyword.value) for keyword in keywords}
            value = _FUNCTIONS[_name(func)](*map(_evaluate, args), **options)
            if isinstance(value, range) and len(value) > _MOST_ITEMS:
                raise ValueError(f"more than {_MOST_ITEMS} items")
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _evaluate(left), _evaluate(right)
            # Bounded, for the trainer computes it: 10**10**10, [0] * 10**10 and "%99999999d" % 1 have no end.
            if isinstance(op, ast.Mod | ast.Div | ast.FloorDiv | ast.Pow) and not isinstance(a, (int, float, complex)):
                raise TypeError("arithmetic is for numbers")
            if isinstance(op, ast.Pow) and not (abs(a) <= 1e6 and abs(b) <= 1000):
                raise ValueError("too large a power")
            sizes = [len(each) for each in (a, b) if hasattr(each, "__len__")]
            if sizes and isinstance(op, ast.Mult) and sizes[0] * (b if isinstance(b, int) else a) > _MOST_ITEMS:
                raise ValueError(f"more than {_MOST_ITEMS} items")
            return _OPERATORS[type(op)](a, b)
    raise BadTest(f"{_short(ast.unparse(node))} is not understood, and calls nothing of the program")


def _contains(container: Any, item: Any) -> bool:
    return item in container if isinstance(container, (str, bytes)) else any(equal(item, each) for each in container)


def _name(node: ast.expr) -> str:
    """``f`` or ``math.f``; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.expr) -> list[str]:
    """Names of a type, or of a tuple of types."""
    return list(map(_name, node.elts if isinstance(node, ast.Tuple) else [node]))


def _judges_itself(node: ast.AST) -> str:
    return f"{_short(ast.unparse(node))} would be judged by the program itself; compare with =="


def _mentions(node: ast.AST) -> bool:
    """Whether it names anything of the program's."""
    return any(isinstance(part, ast.Name) and part.id not in _KNOWN for part in ast.walk(node))


def _short(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
