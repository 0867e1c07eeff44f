"""Reads the tests of a row, in the formats of common data sets, into cases for the jail.

Only a case's request enters the jail: an expression, arguments, or text for standard input. Of
``assert abs(f(2) - 1.41) < 0.01`` it is ``f(2)``. What the request gives is compared outside.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from gruppo.rewards.sandbox.jail import CaseResult
from gruppo.rewards.sandbox.plain_data import encode

FORMS = (
    'asserts ["assert f(1) == 2"], [{"input": "1\\n", "output": "2\\n"}], [{"args": [1], "output": '
    '2}] with a column entry_point, or {"inputs": [...], "outputs": [...]}'
)
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FUNCTIONS = {
    *("int", "float", "bool", "complex", "str", "bytes", "list", "tuple", "dict", "set"),
    *("frozenset", "range", "map", "filter", "zip", "enumerate", "reversed", "sorted", "len"),
    *("sum", "min", "max", "abs", "round", "any", "all", "isinstance"),
}
_KNOWN = {*_FUNCTIONS, "math", "isclose"}
"""Names that are not the program's."""
_REFUSED = {"eval", "exec", "compile", "__import__", "getattr", "globals", "locals", "vars"}
_VERDICTS = (ast.Compare, ast.BoolOp, ast.IfExp, ast.NamedExpr)
_OUTER = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.keyword, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.comprehension),
)
"""Syntax allowed around the program's calls in the jail: nothing that could hold an expected
value."""
_NONE, _ZERO = ast.Constant(None), ast.Constant(0)

Tolerance = tuple[float, float]
"""Relative and absolute: numbers are close if |a - b| <= max(rel max(|a|, |b|), abs)."""
_FLOATS: Tolerance = (1e-6, 1e-9)
_NUMBERS = (int, float, complex)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_LONGEST_NUMBER = 400


class BadTest(Exception):
    """A test that cannot be judged outside the jail; the message says why."""


@dataclass(frozen=True)
class ProgramCase:
    """A request to the jail, and its expected result."""

    request: Any
    """An expression, its arguments as plain data, or the text of standard input."""
    expected: Any = None
    """The value; text; or, with ``raises``, nothing."""
    source: str = ""
    """Expression for ``(expected, rel, abs)`` that is not a literal, and not evaluated yet."""
    tolerance: Tolerance | None = None
    alternatives: tuple[Any, ...] = ()
    """Other values that are right too."""
    is_json: bool = False
    is_script: bool = False
    """Whether the request is text for the whole program."""
    raises: tuple[str, ...] = ()
    """Types of exceptions, one of which has to be raised."""

    def passes(self, result: CaseResult) -> bool:
        """Whether the result is as expected. A value that cannot be compared is not."""
        if self.raises:
            return _is_raised(result, self.raises)
        if result.status != "value":
            return False
        try:
            if self.is_script:
                return equal_text(result.value, self.expected)
            (value,) = result.value
            accepted = (self.expected, *self.alternatives)
            return any(equal(value, x, self.tolerance, is_json=self.is_json) for x in accepted)
        except Exception:
            return False

    def with_expected(self, values: Any) -> ProgramCase:
        """Set what is expected and the tolerances: ``(expected, rel, abs)``. Raises NotPlain."""
        expected, rel, absolute = values
        encode(expected)
        tolerance = None if rel is None else (rel, absolute)
        return replace(self, expected=expected, tolerance=tolerance, source="")


def _is_raised(result: CaseResult, expected: tuple[str, ...]) -> bool:
    """Whether an exception has an expected type, or derives from an expected built-in one.

    NameError counts by name alone: without the function under test, each call raises one. Without
    ``exception``, it was raised while the program was loaded, or the process ended.
    """
    names = {result.exception, result.message.partition(":")[0]}
    if result.exception and "NameError" not in names:
        kind = getattr(builtins, result.exception, None)
        names |= {base.__name__ for base in getattr(kind, "__mro__", ())}
        names |= {"IOError", "EnvironmentError"} if "OSError" in names else set()
    return bool(result.exception) and not names.isdisjoint(expected)


@dataclass(frozen=True)
class ProgramTests:
    """The tests of one row."""

    cases: tuple[ProgramCase, ...]
    setup: str = ""
    entry: str | None = None

    def evaluated(self, calls: Callable[..., list[CaseResult]]) -> ProgramTests:
        """Evaluate expected values that are not literals, by ``calls`` of a sandbox without a
        program."""
        sources = [[case.source] for case in self.cases if case.source]
        if not sources:
            return self
        results = iter(calls("", sources, setup="import math"))
        cases = list(self.cases)
        for n, case in enumerate(cases):
            if case.source:
                result = next(results)
                if result.status != "value":
                    raise BadTest(f"{case.source:.80} has no value ({result.message})")
                cases[n] = case.with_expected(result.value[0])
        return replace(self, cases=tuple(cases))


def read_tests(
    cell: Any, *, entry: Any = None, setup: Any = None, imports: Any = None
) -> ProgramTests | None:
    """Read the tests in a cell of the data; None if it is empty, BadTest if it is not understood.

    ``entry``: the function under test, if the tests do not name it. ``setup`` and ``imports``:
    code for the program's namespace, text or a list of lines.
    """
    code = [_text(imports or "", "test_imports"), _text(setup or "", "test_setup_code")]
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):  # asserts
            cell = json.loads(cell)
    if isinstance(cell, Mapping) and "inputs" in cell:
        entry = entry or cell.get("fn_name")
        cell = _items_of_columns(cell, "args" if entry else "input")
    if entry is not None and not (isinstance(entry, str) and _PATH.fullmatch(entry)):
        raise BadTest(f"the entry point is {entry!r:.60}; it needs the name of a function")
    items = [cell] if isinstance(cell, (str, Mapping)) else cell or []
    if not isinstance(items, (list, tuple)):
        raise BadTest(f"it is {cell!r:.60}; it needs {FORMS}")
    cases = list[ProgramCase]()
    for number, item in enumerate(items, start=1):
        try:
            if isinstance(item, str):
                asserts, imported = read_asserts(item)
                cases += asserts
                code.append(imported)
            else:
                cases.append(_case_of(item, entry))
        except BadTest as error:
            raise BadTest(f"test {number}: {error}") from None
    if len({case.is_script for case in cases}) > 1:
        raise BadTest(f"tests of scripts and of functions are mixed; it needs {FORMS}")
    return ProgramTests(tuple(cases), "\n".join(filter(None, code)), entry) if cases else None


def _items_of_columns(cell: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Tests of inputs and outputs side by side, as in APPS; of a function, inputs are arguments."""
    items = []
    try:
        for values, output in zip(cell["inputs"], cell["outputs"], strict=True):
            # some of the values that functions return are wrapped in a list
            is_wrapped = key == "args" and isinstance(output, list) and len(output) == 1
            items.append({key: values, "output": output, "or": output if is_wrapped else []})
    except (KeyError, TypeError, ValueError):
        raise BadTest(f"inputs and outputs do not match; it needs {FORMS}") from None
    return items


def _case_of(item: Any, entry: str | None) -> ProgramCase:
    """A test with arguments, or with text for standard input."""
    try:
        args, output = item.get("args"), item["output"]
        if item.get("testtype") == "functional":  # of LiveCodeBench: JSON, an argument a line
            args = [json.loads(line) for line in item["input"].splitlines() if line.strip()]
            output = json.loads(output)
        if args is None:
            return ProgramCase(_text(item["input"]), _text(output), is_script=True)
        if entry is None:
            raise BadTest("it has arguments and no function; it needs a column entry_point")
        if item.get("kwargs"):
            raise BadTest("it has kwargs; it needs all arguments in args")
        encode(output)
        request = {"args": encode([*args])}
        alternatives = tuple(item.get("or", ()))
        return ProgramCase(request, output, alternatives=alternatives, is_json=True)
    except BadTest:
        raise
    except Exception as error:  # a missing key, not JSON, or a value that is not plain data
        problem = f"{type(error).__name__}: {error}"
        raise BadTest(f"{item!r:.60} is not understood ({problem}); it needs {FORMS}") from None


def _text(value: Any, what: str = "without a column entry_point, an input or output") -> str:
    """Join a text that may be a list of its lines."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)) or not all(isinstance(line, str) for line in lines):
        raise BadTest(f"{what} is {value!r:.60}; it needs text, or a list of lines")
    return "\n".join(lines)


# --- asserts --------------------------------------------------------------------------------------


def read_asserts(text: str) -> tuple[list[ProgramCase], str]:
    """Parse a test into cases and its imports, for the program's namespace. Raises BadTest for
    other statements."""
    cases, imports = [], []
    try:
        for line in ast.parse(text).body:
            if isinstance(line, ast.Import):  # pytest is judged outside, and not in the jail
                line.names = [alias for alias in line.names if alias.name != "pytest"]
            if not isinstance(line, (ast.Import, ast.ImportFrom)):
                cases.append(_case(line))
            elif line.names and getattr(line, "module", "") != "pytest":
                imports.append(ast.unparse(line))
    except BadTest as error:
        raise BadTest(f"{_show(line)}: {error}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        shown = " ".join(text.split())[:80]
        raise BadTest(f"{shown} is not Python, or nested too deeply ({error})") from None
    return cases, "\n".join(imports)


def _case(line: ast.stmt) -> ProgramCase:
    """One statement as a case: equality, closeness, truth, or an exception."""
    match line:
        case ast.With(
            items=[ast.withitem(ast.Call(func=func, args=[types], keywords=[]))],
            body=[ast.Expr(value=call)],
        ) if ast.unparse(func) in ("pytest.raises", "raises"):
            kinds = types.elts if isinstance(types, ast.Tuple) else [types]
            names = tuple(ast.unparse(kind).rpartition(".")[2] for kind in kinds)
            return ProgramCase(_request(call), raises=names)
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(
                    func=ast.Name(id="abs"),
                    args=[ast.BinOp(left=left, op=ast.Sub(), right=right)],
                ),
                ops=[ast.Lt() | ast.LtE()],
                comparators=[limit],
            )
        ):
            return _comparison(left, right, _ZERO, limit)
        case ast.Assert(
            test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])
        ):
            return _comparison(left, right)
        case ast.Assert(test=ast.Call(func=func, args=[left, right], keywords=options)) if (
            ast.unparse(func) in ("math.isclose", "isclose")
        ):
            limits = {option.arg: option.value for option in options}
            rel = limits.get("rel_tol", ast.Constant(1e-9))
            return _comparison(left, right, rel, limits.get("abs_tol", _ZERO))
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=call)):
            return ProgramCase(f"bool({_verdict(call)})", expected=False)
        case ast.Assert(test=call):
            return ProgramCase(f"bool({_verdict(call)})", expected=True)
    raise BadTest("it is not an assert, and not pytest.raises(TYPE) around one call")


def _comparison(
    left: ast.expr, right: ast.expr, rel: ast.expr = _NONE, absolute: ast.expr = _ZERO
) -> ProgramCase:
    """The case in which the side that is the program's equals the other one, or is close to it."""
    if _is_own(left) and _is_own(right):
        raise BadTest("both sides are the program's own, and it could make any two agree")
    call, expected = (left, right) if _is_own(left) else (right, left)
    if isinstance(expected, ast.Constant) and isinstance(expected.value, bool):
        own = call  # f(1).equals(2) == True: the program would say yes
        while isinstance(own, ast.Subscript):
            own = own.value
        _verdict(own)
    case = ProgramCase(_request(call))
    source = ast.unparse(ast.Tuple([expected, rel, absolute], ast.Load()))
    try:
        return case.with_expected(ast.literal_eval(source))
    except (ValueError, TypeError):
        return replace(case, source=source)


def _request(node: ast.expr) -> str:
    """Source of an expression for the jail; BadTest if it holds an expected value, or makes the
    program its own judge."""
    if not _is_own(node):
        raise BadTest("it calls nothing of the program")
    for part in ast.walk(node):
        is_verdict = isinstance(part, _VERDICTS) and _is_own(part)
        is_special = isinstance(part, ast.Attribute) and part.attr.startswith("__")
        if is_verdict or is_special or (isinstance(part, ast.Name) and part.id in _REFUSED):
            raise _judged_by_itself(part)
    outer: list[ast.AST] = [node]
    while outer:  # down to the program's functions: what stands in their arguments is their input
        part = outer.pop()
        if not isinstance(part, _OUTER):
            raise BadTest(f"{_show(part)} is made of what the program gave; compare f(...) with ==")
        if not _is_program_call(part) and not isinstance(part, ast.Lambda):
            outer += filter(_is_own, ast.iter_child_nodes(part))
    return ast.unparse(node)


def _verdict(node: ast.expr) -> str:
    """Source of an expression that gives True or False; BadTest unless it is ``f(x)``,
    ``module.f(x)`` or ``Class().f(x)``.

    Not ``f(x).equals(y)``, where what the program gave would answer, nor ``is_close(f(x), y)``.
    """
    others = [part for part in ast.walk(node) if _is_program_call(part) and part is not node]
    made = getattr(getattr(node, "func", None), "value", None)  # Class()
    if others == [made] and isinstance(made, ast.Call):
        is_alone = ast.unparse(made.func).rpartition(".")[2][:1].isupper()
    else:
        is_alone = not others
    if not is_alone or not _is_program_call(node):
        raise _judged_by_itself(node)
    return _request(node)


def _judged_by_itself(node: ast.AST) -> BadTest:
    return BadTest(f"{_show(node)} would be judged by the program itself; compare with ==")


def _is_program_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) not in _FUNCTIONS


def _is_own(node: ast.AST) -> bool:
    """Whether the expression uses a name of the program."""
    return any(isinstance(part, ast.Name) and part.id not in _KNOWN for part in ast.walk(node))


def _show(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:80]


# --- equality ------------------------------------------------------------------------------------


def equal(
    got: Any, expected: Any, tolerance: Tolerance | None = None, *, is_json: bool = False
) -> bool:
    """Python's ``==`` over plain data, with a tolerance if the expected number is a float, and NaN
    equal to NaN.

    So 3 is 3.0 and True is 1; a list is not a tuple, and "3" is not 3. Floats inside sets, and
    keys, are compared exactly. ``tolerance``: replaces that of floats, and applies to ints too.
    ``is_json``: the expected value came from JSON, which has no tuples: a tuple equals the list of
    its items.
    """
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(got) != len(expected) or (type(got) is not type(expected) and not is_json):
            return False
        pairs = list(zip(got, expected, strict=True))
    elif isinstance(got, dict) and isinstance(expected, dict):
        if got.keys() != expected.keys():
            return False
        pairs = [(got[key], item) for key, item in expected.items()]
    elif isinstance(got, _NUMBERS) and isinstance(expected, _NUMBERS):
        return _is_close(got, expected, tolerance)
    else:
        return bool(got == expected)
    return all(equal(a, b, tolerance, is_json=is_json) for a, b in pairs)


def _is_close(got: complex, expected: complex, tolerance: Tolerance | None = None) -> bool:
    """An expected int is exact without a ``tolerance``: 1e9 is not 1000000007."""
    if got == expected or (got != got and expected != expected):
        return True
    if tolerance is None and isinstance(expected, int):
        return False
    rel, absolute = tolerance or _FLOATS
    try:
        return cmath.isclose(got, expected, rel_tol=rel, abs_tol=absolute)
    except OverflowError:  # an int beyond all floats
        return False


def equal_text(got: str, expected: str) -> bool:
    """Equality of the words of each line; spaces around words, and blank lines at both ends, do not
    count. The tolerance of floats applies to an expected number with a point or an exponent.
    """
    lines = [line.split() for line in got.strip().splitlines()]
    expected_lines = [line.split() for line in expected.strip().splitlines()]
    if [*map(len, lines)] != [*map(len, expected_lines)]:
        return False
    return all(map(_equal_words, chain(*lines), chain(*expected_lines)))


def _equal_words(got: str, expected: str) -> bool:
    if got == expected:
        return True
    words = (got, expected)
    if not all(len(word) <= _LONGEST_NUMBER and _NUMBER.fullmatch(word) for word in words):
        return False
    got_is_int, expected_is_int = (word.lstrip("+-").isdigit() for word in words)
    if expected_is_int:
        return not got_is_int and float(got) == int(expected)
    return _is_close(float(got), float(expected))
