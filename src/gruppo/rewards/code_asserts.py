"""Splits assert statements into calls of the program, which run in the jail, and expected values,
which stay outside.

Four forms are understood: ``f(2) == 4`` (and ``is None``), closeness, ``f(2)`` or ``not f(2)`` as
true or false, and ``pytest.raises``. Of ``assert abs(f(2) - 1.41) < 0.01`` the jail sees ``f(2)``.
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
    """A request to the jail, and how its result is judged. Only ``request`` ever enters the
    jail."""

    request: Any
    """Expressions, a tuple; or the text of standard input."""
    is_right: Callable[[Any], Any]
    """Whether the value of the expression, or the printed text, is as expected."""
    length: int
    """Upper bound of the characters of the expected output."""
    exceptions: tuple[str, ...] = ()
    """Types of which the request has to raise one; then no value is right."""

    def passes(self, result: CaseResult) -> bool:
        """Whether the result is as expected. A value that cannot be compared is not."""
        if self.exceptions:
            return _is_raised(result, self.exceptions)
        value = result.value
        try:
            if isinstance(self.request, tuple):
                (value,) = value
            return result.status == "value" and bool(self.is_right(value))
        except Exception:
            return False


def _is_raised(result: CaseResult, expected: Sequence[str]) -> bool:
    """Whether an exception has an expected type, or derives from an expected built-in one.

    NameError counts by name alone: without the function under test, each call raises one. Without
    ``exception``, it was raised while the program was loaded, or the process ended.
    """
    names = (result.exception, result.message.partition(":")[0])
    base = object if "NameError" in names else _EXCEPTIONS.get(result.exception, object)
    return bool(result.exception) and any(
        name in names or issubclass(base, _EXCEPTIONS.get(name, ())) for name in expected
    )


_EXCEPTIONS = {
    n: t for n, t in vars(builtins).items() if isinstance(t, type) and issubclass(t, BaseException)
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(int, float, bool, complex, str, bytes, list, tuple, dict, set, frozenset, range),
        *(map, filter, zip, enumerate, reversed),
        *(sorted, len, sum, min, max, abs, round, any, all, isinstance),
    )
}
"""Functions that are not the program's. Expected values may call those that build plain data."""
_APPROX, _ISCLOSE = ("pytest.approx", "approx"), ("math.isclose", "isclose")
_CONSTANTS = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")}
_KNOWN = {*_FUNCTIONS, "math", "pytest", "approx", "isclose"}
_REFUSED = {"eval", "exec", "compile", "__import__", "getattr", "globals", "locals", "vars"}
_OUTER = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.keyword, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.comprehension),
)
"""Syntax allowed around the program's calls in the jail: nothing that could hold an expected
value."""
_OPERATORS: dict[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}


def check_compiles(source: str) -> str:
    """Return an expression for the jail, where it is compiled in each program's time; BadTest if it
    cannot be."""
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
    """Parse a test into cases and its imports, for the program's namespace. Raises BadTest for
    other statements."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTest(f"{' '.join(text.split()):.80} is no Python ({error})") from None
    cases, imports = [], []
    for line in tree.body:
        if isinstance(line, (ast.Import, ast.ImportFrom)):
            if isinstance(line, ast.Import):  # pytest is judged outside, and not in the jail
                line.names = [alias for alias in line.names if alias.name != "pytest"]
            if line.names and getattr(line, "module", "") != "pytest":
                imports.append(ast.unparse(line))
            continue
        try:
            cases.append(_case(line, len(text)))
        except BadTest as error:
            raise BadTest(f"{_show(line)}: {error}") from None
        except RecursionError:
            raise BadTest(f"{' '.join(text.split()):.80} is nested too deeply") from None
    return cases, "\n".join(imports)


def _case(line: ast.stmt, length: int) -> ProgramCase:
    """One statement as a case. ``length``: characters of the test."""
    match line:
        case ast.With(
            items=[ast.withitem(ast.Call(func=func, args=[types], keywords=[]))],
            body=[ast.Expr(value=call) | ast.Assign(value=call)],
        ) if _name(func) in ("pytest.raises", "raises"):
            names = types.elts if isinstance(types, ast.Tuple) else [types]
            exceptions = tuple(_name(name).rpartition(".")[2] for name in names)
            return ProgramCase((_sent(call),), bool, length, exceptions)
        case ast.Assert(test=test):
            call, is_right, expected = _split(test)
        case _:
            raise BadTest("it is no assert, and no pytest.raises(TYPE) around one call")
    with suppress(NotPlain):  # [0] * 10**6 is short only in the test
        plain = expected.value if isinstance(expected, Approx) else expected
        length = max(length, len(encode(plain)))
    return ProgramCase((_sent(call),), is_right, length)


def _split(test: ast.expr) -> tuple[ast.expr, Callable[[Any], Any], Any]:
    """The expression for the jail, how its value is judged, and the expected value."""
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            call, expected = _sides(left, right)
            return call, partial(_is_equal, expected=expected), expected
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[right]):
            call, expected = _sides(left, right)
            if expected is not None and not isinstance(expected, bool):
                raise BadTest("is, of anything but None, True or False, has no meaning here")
            return call, lambda value: value is expected, expected
        case ast.Compare(
            left=ast.Call(args=[ast.BinOp(left=left, op=ast.Sub(), right=right)], keywords=[]) as f,
            ops=[ast.Lt() | ast.LtE() as op],
            comparators=[limit],
        ) if _name(f.func) == "abs":
            call, expected = _sides(left, right)
            most = _constant(limit)
            is_below = operator.lt if isinstance(op, ast.Lt) else operator.le
            return call, lambda value: is_below(abs(value - expected), most), expected
        case ast.Call(args=[left, right], keywords=options) if _name(test.func) in _ISCLOSE:
            call, expected = _sides(left, right)
            limits = {str(option.arg): _constant(option.value) for option in options}
            return call, lambda value: math.isclose(value, expected, **limits), expected
        case ast.UnaryOp(op=ast.Not(), operand=call):
            _refuse_own_verdict(call)
            return call, operator.not_, False
    _refuse_own_verdict(test)
    return test, bool, True


def _is_equal(value: Any, expected: Any) -> bool:
    return equal(value, expected)


def _sides(left: ast.expr, right: ast.expr) -> tuple[ast.expr, Any]:
    """Of two sides that are compared, the program's, and the value of the other."""
    if _mentions(left) and _mentions(right):
        raise BadTest("both sides are the program's own, and it could make any two agree")
    call, expected = (left, right) if _mentions(left) else (right, left)
    value = _constant(expected)
    if isinstance(value, bool):  # f(1).equals(2) == True: the program would say yes
        asked = call
        while isinstance(asked, ast.Subscript):
            asked = asked.value
        _refuse_own_verdict(asked)
    return call, value


# --- what goes into the jail ----------------------------------------------------------------------


def _sent(node: ast.expr) -> str:
    """Source of an expression for the jail. It must not contain an expected value."""
    if not _mentions(node):
        raise BadTest("it calls nothing of the program")
    for part in ast.walk(node):
        is_verdict = isinstance(part, (ast.Compare, ast.BoolOp, ast.IfExp, ast.NamedExpr))
        if is_verdict and _mentions(part):
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
        is_own = isinstance(part, ast.Call) and _name(part.func) not in _FUNCTIONS
        if not is_own and not isinstance(part, ast.Lambda):
            outer += filter(_mentions, ast.iter_child_nodes(part))
    return check_compiles(ast.unparse(node))


def _refuse_own_verdict(node: ast.expr) -> None:
    """Raise BadTest unless it is ``f(x)``, ``module.f(x)`` or ``Class().f(x)``: the function itself
    answers.

    Not ``f(x).equals(y)``, where what the program gave would answer, nor ``is_close(f(x), y)``.
    """
    owners = dict[ast.AST, ast.expr]()  # of each call what it begins with: f, module or Class()
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and _name(part.func) not in _FUNCTIONS:
            owner = part.func
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            owners[part] = owner
    owner = owners.get(node, node)
    is_method = isinstance(owner, ast.Call) and _name(owner.func).rpartition(".")[2][:1].isupper()
    is_alone = node in owners and len({*filter(None, map(_name, owners.values()))}) == 1
    if not is_alone or not (isinstance(owner, ast.Name) or is_method):
        raise BadTest(f"{_show(node)} would be judged by the program itself; compare with ==")


def _mentions(node: ast.AST) -> bool:
    """Whether the expression uses a name of the program."""
    return any(isinstance(part, ast.Name) and part.id not in _KNOWN for part in ast.walk(node))


def _name(node: ast.expr) -> str:
    """``f`` or ``math.f``; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _show(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 80 else text[:77] + "..."


# --- what stays outside ---------------------------------------------------------------------------


def _constant(node: ast.expr) -> Any:
    """Evaluate an expression without names of the program; BadTest if that fails."""
    try:
        value = _evaluate(node)
    except BadTest:
        raise
    except Exception as error:
        raise BadTest(f"{_show(node)} has no value ({type(error).__name__}: {error})") from None
    if isinstance(value, Iterator):  # the first program would use it up
        raise BadTest(f"{_show(node)} is no plain data; compare list(...)")
    return value


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Attribute() if _name(node) in _CONSTANTS:
            return _CONSTANTS[_name(node)]
        case ast.List(elts=items):
            return [*map(_evaluate, items)]
        case ast.Tuple(elts=items):
            return tuple(map(_evaluate, items))
        case ast.Set(elts=items):
            return {*map(_evaluate, items)}
        case ast.Dict(keys=keys, values=items) if None not in keys:
            return {_evaluate(k): _evaluate(v) for k, v in zip(keys, items, strict=True) if k}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
            return -_evaluate(operand) if isinstance(op, ast.USub) else +_evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _evaluate(left), _evaluate(right)
            _refuse_huge(op, a, b)
            return _OPERATORS[type(op)](a, b)
        case ast.Call(func=func, args=args, keywords=options):
            function: Any = Approx if _name(func) in _APPROX else _FUNCTIONS.get(_name(func))
            if function is not None and function is not isinstance:
                values = [*map(_evaluate, args)]
                if any(isinstance(v, range) and len(v) > _MOST_ITEMS for v in values):
                    raise ValueError(f"more than {_MOST_ITEMS} items")
                return function(*values, **{str(o.arg): _evaluate(o.value) for o in options})
    raise BadTest(f"{_show(node)} is not understood, and calls nothing of the program")


def _refuse_huge(op: ast.operator, a: Any, b: Any) -> None:
    """Raise for what is no arithmetic, or has no end: 10**10**10, [0] * 10**10, "%99999999d" %
    1."""
    is_number = isinstance(a, (int, float, complex))
    if not is_number and not isinstance(op, (ast.Add, ast.Sub, ast.Mult)):
        raise TypeError("arithmetic is for numbers")
    if isinstance(op, ast.Pow) and not (abs(a) <= 1e6 and abs(b) <= 1000):
        raise ValueError("too large a power")
    sizes = [len(each) for each in (a, b) if hasattr(each, "__len__")]
    if isinstance(op, ast.Mult) and sizes and sizes[0] * (a if is_number else b) > _MOST_ITEMS:
        raise ValueError(f"more than {_MOST_ITEMS} items")
