"""Splits assert statements into calls of the program, which run in the jail, and expected values, which stay outside.

``assert abs(f(2) - 1.41) < 0.01``: the jail evaluates ``f(2)``; 1.41, the difference and ``<`` stay outside.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from gruppo.rewards.code_compare import Approx, equal
from gruppo.rewards.sandbox.plain_data import NotPlain, encode
from gruppo.rewards.sandbox.protocol import CaseResult

_MOST_ITEMS = 10_000_000
_LONGEST_SOURCE = 1_000_000  # 9 million characters take 2 s and 800 MB to compile


class BadTest(Exception):
    """A test that cannot be judged outside the jail; the message says why."""


@dataclass(frozen=True)
class ProgramCase:
    """A request to the jail, and how its result is judged. Only ``request`` ever enters the jail."""

    request: Any  # expressions, a tuple; or the text of standard input
    judge: Callable[
        [Any], Any
    ]  # whether the expressions' values, or the printed text, are as expected
    length: int  # upper bound of the characters of the expected output
    exceptions: tuple[
        str, ...
    ] = ()  # types of which the request has to raise one; then no value is right

    def passes(self, result: CaseResult) -> bool:
        """Whether the result is as expected. A value that cannot be compared is not.

        An exception counts by its type, or by the built-in type that this derives from. NameError counts by name
        alone: without the function under test, each call raises one.
        """
        try:
            if not self.exceptions:
                return result.status == "value" and bool(self.judge(result.value))
            if (
                not result.exception
            ):  # it was raised while the program was loaded, or the process ended
                return False
            types = (result.exception, result.message.partition(":")[0])
            base = object if "NameError" in types else _EXCEPTIONS.get(result.exception, object)
            return any(
                name in types or issubclass(base, _EXCEPTIONS.get(name, ()))
                for name in self.exceptions
            )
        except Exception:
            return False


_TYPES = {
    t.__name__: t
    for t in (int, float, bool, complex, str, bytes, list, tuple, dict, set, frozenset)
}
_LAZY = {f.__name__: f for f in (range, map, filter, zip, enumerate, reversed)}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_TYPES,
    **_LAZY,
    **{f.__name__: f for f in (sorted, len, sum, min, max, abs, round, any, all, isinstance)},
    **{
        f"math.{f.__name__}": f
        for f in (math.isclose, math.isnan, math.isinf, math.floor, math.ceil, math.sqrt)
    },
    **{"pytest.approx": Approx, "approx": Approx},
}
"""Functions that are not the program's. Expected values may call those that build plain data."""
_EXCEPTIONS = {
    n: t for n, t in vars(builtins).items() if isinstance(t, type) and issubclass(t, BaseException)
}
_CONSTANTS = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")}
_PREDICATES = ("math.isclose", "math.isnan", "math.isinf")
_KNOWN = {*(name.partition(".")[0] for name in (*_FUNCTIONS, *_CONSTANTS))}
_REFUSED = {"eval", "exec", "compile", "__import__", "getattr", "globals", "locals", "vars"}
_OUTER = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.keyword, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.comprehension),
)
"""Syntax allowed around the program's calls in the jail: nothing that could hold an expected value."""


_OPERATORS: dict[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
    **{ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_},
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.Is: operator.is_, ast.IsNot: operator.is_not},
}


def check_compiles(source: str) -> str:
    """Return an expression for the jail, where it is compiled in each program's time; BadTest if it cannot be."""
    if len(source) > _LONGEST_SOURCE:
        raise BadTest(
            f"{source:.60} has {len(source)} characters; at most {_LONGEST_SOURCE} are compiled"
        )
    try:
        compile(source, "test", "eval", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise BadTest(f"{source:.60} cannot be compiled ({error})") from None
    return source


def read_asserts(text: str) -> tuple[list[ProgramCase], str]:
    """Parse a test into cases and its imports, for the program's namespace. Raises BadTest for other statements."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTest(f"{' '.join(text.split()):.80} is no Python ({error})") from None
    cases, imports = [], []
    for line in tree.body:
        if isinstance(line, (ast.Import, ast.ImportFrom)):
            if isinstance(
                line, ast.Import
            ):  # pytest is judged outside, and is not installed in the jail
                line.names = [alias for alias in line.names if alias.name != "pytest"]
            if line.names and getattr(line, "module", "") != "pytest":
                imports.append(ast.unparse(line))
            continue
        sources, exceptions = list[str](), tuple[str, ...]()
        try:
            match line:
                case ast.Assert(test=test):
                    outside = _split(test, sources, is_truth=True)
                case ast.With(
                    items=[ast.withitem(ast.Call(func=func, args=[types], keywords=[]))],
                    body=[ast.Expr(value=call) | ast.Assign(value=call)],
                ) if _name(func) in ("pytest.raises", "raises"):
                    outside = _send(call, sources)
                    exceptions = tuple(name.rpartition(".")[2] for name in _names(types))
                case _:
                    raise BadTest("it is no assert, and no pytest.raises(TYPE) around one call")
            if not sources:
                raise BadTest("it calls nothing of the program")
        except BadTest as error:
            raise BadTest(f"{_show(line)}: {error}") from None
        except RecursionError:
            raise BadTest(f"{' '.join(text.split()):.80} is nested too deeply") from None
        length = 0  # characters of the expected values as plain data: [0] * 10**6 is short only in the test
        for expected in (
            node.value for node in ast.walk(outside) if isinstance(node, ast.Constant)
        ):
            with suppress(NotPlain):  # a range, or types
                length += len(encode(expected.value if isinstance(expected, Approx) else expected))
        cases.append(
            ProgramCase(
                tuple(sources), partial(_evaluate, outside), max(length, len(text)), exceptions
            )
        )
    return cases, "\n".join(imports)


# --- what goes into the jail ------------------------------------------------------------------------------------------


def _split(node: ast.expr, sources: list[str], *, is_truth: bool = False) -> ast.expr:
    """Return the part of an assert that stays outside; append to ``sources`` the expressions for the jail.

    In the result, constants have their values, and an expression of the program's is its index in ``sources``, as a
    name. ``is_truth``: the value is taken as true or false, so that the program must not have compared anything itself.
    """
    name = _name(node.func) if isinstance(node, ast.Call) else ""
    if is_truth:
        match node:
            case ast.BoolOp(op=op, values=parts):
                return ast.BoolOp(op, [_split(part, sources, is_truth=True) for part in parts])
            case ast.UnaryOp(op=ast.Not() as op, operand=operand):
                return ast.UnaryOp(op, _split(operand, sources, is_truth=True))
            case ast.Compare(left=left, ops=ops, comparators=others):
                first, *rest = _split_sides([left, *others], sources, ops)
                return ast.Compare(first, ops, rest)
            case ast.Call(args=[tested, kinds]) if name == "isinstance":
                types: Any = tuple(map(_TYPES.get, _names(kinds)))
                if None in types:
                    raise BadTest("isinstance is understood of the types of plain data")
                return ast.Call(node.func, [_send(tested, sources), ast.Constant(types)], [])
        if _mentions(node) and not _is_plain_call(node) and name not in ("isclose", *_PREDICATES):
            raise BadTest(f"{_show(node)} would be judged by the program itself; compare with ==")
    match node:
        case ast.Call(func=func, args=args, keywords=keywords) if _mentions(node) and (
            (name == "isclose" and is_truth)
            or (isinstance(func, ast.Attribute) and name in _FUNCTIONS)
        ):  # of math, which a program may not import, or of pytest
            func = ast.Attribute(ast.Name("math"), "isclose") if name == "isclose" else func
            options = [ast.keyword(keyword.arg, _constant(keyword.value)) for keyword in keywords]
            return ast.Call(func, _split_sides(args, sources), options)
        case ast.Call(args=[ast.BinOp(left=left, op=ast.Sub() as minus, right=right)]) if (
            name == "abs"
        ):
            left, right = _split_sides([left, right], sources)
            return ast.Call(node.func, [ast.BinOp(left, minus, right)], [])
        case ast.List(elts=items) | ast.Tuple(elts=items) if _mentions(node):
            return type(node)([_split(item, sources) for item in items])
    return _send(node, sources) if _mentions(node) else _constant(node)


def _split_sides(
    sides: Sequence[ast.expr], sources: list[str], ops: Sequence[ast.cmpop] = ()
) -> list[ast.expr]:
    """Split values to compare; raise BadTest where the program could make them agree or compares them itself."""
    for pair, op in zip(pairwise(sides), ops, strict=False):
        constants = [side.value for side in pair if isinstance(side, ast.Constant)]
        if isinstance(op, (ast.Is, ast.IsNot)) and not any(
            c is None or isinstance(c, bool) for c in constants
        ):
            raise BadTest(
                "is, of anything but None, True or False, has no meaning outside of the program"
            )
        if any(
            isinstance(c, bool) for c in constants
        ):  # f(1).equals(2) == True: the program would say yes
            for side in pair:
                while isinstance(side, ast.Subscript):
                    side = side.value
                if _mentions(side) and not _is_plain_call(side):
                    raise BadTest(
                        f"{_show(side)} would be judged by the program itself; compare with =="
                    )
    if any(_mentions(a) and _mentions(b) for a, b in pairwise(sides)):
        raise BadTest("both sides are the program's own, and it could make any two agree")
    return [_split(side, sources) for side in sides]


def _send(node: ast.expr, sources: list[str]) -> ast.expr:
    """Append an expression for the jail and return its name. It must not contain an expected value."""
    if not _mentions(node):
        raise BadTest("it calls nothing of the program")
    for part in ast.walk(node):
        if isinstance(part, (ast.Compare, ast.BoolOp, ast.IfExp, ast.NamedExpr)) and _mentions(
            part
        ):
            raise BadTest(f"{_show(part)} would be judged by the program itself; compare with ==")
        if isinstance(part, ast.Attribute) and part.attr.startswith("__"):
            raise BadTest(f"{part.attr} would be answered by the program itself; compare with ==")
        if isinstance(part, ast.Name) and part.id in _REFUSED:
            raise BadTest(f"{part.id} is not understood; call the function itself")
    outer: list[ast.AST] = [node]
    while outer:  # down to the program's functions: what stands in their arguments is their input
        part = outer.pop()
        if not isinstance(part, _OUTER):
            raise BadTest(f"{_show(part)} is made of what the program gave; compare f(...) with ==")
        if (
            not isinstance(part, (ast.Call, ast.Lambda))
            or _name(getattr(part, "func", part)) in _FUNCTIONS
        ):
            outer += filter(_mentions, ast.iter_child_nodes(part))
    if isinstance(node, ast.Call) and _name(node.func) in _LAZY:
        raise BadTest(f"{_show(node)} is no plain data; compare list(...)")
    sources.append(check_compiles(ast.unparse(node)))
    return ast.Name(str(len(sources) - 1))


def _is_plain_call(node: ast.expr) -> bool:
    """``f(x)``, ``module.f(x)`` or ``Class().f(x)``: the function itself answers, without the expected value.

    Not ``f(x).equals(y)``, where what the program gave would answer, nor ``is_close(f(x), y)``.
    """
    owners = dict[ast.AST, ast.expr]()  # of each call what it begins with: f, module or Class()
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and _name(part.func) not in _FUNCTIONS:
            owner = part.func
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            owners[part] = owner
    if node not in owners or len({*filter(None, map(_name, owners.values()))}) != 1:
        return False
    owner = owners[node]
    is_method = isinstance(owner, ast.Call) and _name(owner.func).rpartition(".")[2][:1].isupper()
    return isinstance(owner, ast.Name) or is_method


def _mentions(node: ast.AST) -> bool:
    """Whether the expression uses a name of the program."""
    return any(isinstance(part, ast.Name) and part.id not in _KNOWN for part in ast.walk(node))


def _names(node: ast.expr) -> list[str]:
    """Names of a type or of a tuple of types."""
    return list(map(_name, node.elts if isinstance(node, ast.Tuple) else [node]))


def _name(node: ast.expr) -> str:
    """``f`` or ``math.f``; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _show(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 80 else text[:77] + "..."


# --- what stays outside -----------------------------------------------------------------------------------------------


def _constant(node: ast.expr) -> ast.Constant:
    """Evaluate an expression without names of the program; BadTest if that fails."""
    for part in ast.walk(node):
        if isinstance(part, (ast.BoolOp, ast.Compare, ast.Not)):
            raise BadTest(f"{_show(node)} is not understood, and calls nothing of the program")
    try:
        value = _evaluate(node)
    except BadTest:
        raise
    except Exception as error:
        raise BadTest(f"{_show(node)} has no value ({type(error).__name__}: {error})") from None
    if isinstance(value, Iterator):  # the first program would use it up
        raise BadTest(f"{_show(node)} is no plain data; compare list(...)")
    return ast.Constant(value)


def _evaluate(node: ast.expr, values: Sequence[Any] = ()) -> Any:
    """Evaluate an expression in which index names stand for ``values`` of the program."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=index) if index.isdecimal():
            return values[int(index)]
        case ast.Attribute() if _name(node) in _CONSTANTS:
            return _CONSTANTS[_name(node)]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            display = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
            return display(_evaluate(item, values) for item in items)
        case ast.Dict(keys=keys, values=items) if None not in keys:
            return {
                _evaluate(key): _evaluate(item)
                for key, item in zip(keys, items, strict=True)
                if key is not None
            }
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)(
                _evaluate(part, values) for part in parts
            )
        case ast.Compare(left=left, ops=ops, comparators=others):
            nodes = [left, *others]
            sides = [_evaluate(side, values) for side in nodes]
            pairs = zip(ops, nodes, pairwise(sides), strict=False)
            return all(
                _compare(op, a, b, is_left_expected=isinstance(n, ast.Constant))
                for op, n, (a, b) in pairs
            )
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, values))
        case ast.Call(func=func, args=args, keywords=keywords) if _name(func) in _FUNCTIONS:
            options = {str(keyword.arg): _evaluate(keyword.value) for keyword in keywords}
            inputs = [_evaluate(arg, values) for arg in args]
            if any(isinstance(each, range) and len(each) > _MOST_ITEMS for each in inputs):
                raise ValueError(f"more than {_MOST_ITEMS} items")
            return _FUNCTIONS[_name(func)](*inputs, **options)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _evaluate(left, values), _evaluate(right, values)
            # Bounded, for the trainer computes it: 10**10**10, [0] * 10**10 and "%99999999d" % 1 have no end.
            if isinstance(op, ast.Mod | ast.Div | ast.FloorDiv | ast.Pow) and not isinstance(
                a, (int, float, complex)
            ):
                raise TypeError("arithmetic is for numbers")
            if isinstance(op, ast.Pow) and not (abs(a) <= 1e6 and abs(b) <= 1000):
                raise ValueError("too large a power")
            sizes = [len(each) for each in (a, b) if hasattr(each, "__len__")]
            if (
                sizes
                and isinstance(op, ast.Mult)
                and sizes[0] * (b if isinstance(b, int) else a) > _MOST_ITEMS
            ):
                raise ValueError(f"more than {_MOST_ITEMS} items")
            return _OPERATORS[type(op)](a, b)
    raise BadTest(f"{_show(node)} is not understood, and calls nothing of the program")


def _compare(op: ast.cmpop, left: Any, right: Any, *, is_left_expected: bool) -> bool:
    """Compare two values, of which the type of the expected one decides about a tolerance."""
    is_same = (lambda a, b: equal(b, a)) if is_left_expected else equal
    match op:
        case ast.Eq() | ast.NotEq():
            return is_same(left, right) == isinstance(op, ast.Eq)
        case ast.In() | ast.NotIn():
            if isinstance(right, range):  # Python goes over all of it for a float
                is_in = isinstance(left, (int, float)) and left % 1 == 0 and int(left) in right
            elif isinstance(right, (str, bytes)):
                is_in = left in right
            else:
                is_in = any(is_same(left, item) for item in right)
            return is_in == isinstance(op, ast.In)
    return bool(_OPERATORS[type(op)](left, right))
