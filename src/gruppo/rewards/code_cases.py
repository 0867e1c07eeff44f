"""Reads the tests of a row, in the formats of common data sets, into cases for the jail.

Only a case's request enters the jail: an expression, arguments, or text for standard input. Of
``assert abs(f(2) - 1.41) < 0.01`` it is ``f(2)``. What the request gives is compared outside.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gruppo.rewards.code_compare import EXACT_INTS, Tolerance, equal, equal_text
from gruppo.rewards.sandbox.plain_data import NotPlain, encode
from gruppo.rewards.sandbox.protocol import CaseResult

FORMS = (
    'asserts ["assert f(1) == 2"], [{"input": "1\\n", "output": "2\\n"}], [{"args": [1], "output": '
    '2}] with a column entry_point, or {"inputs": [...], "outputs": [...]}'
)
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_STEP, _USUAL_LIMIT = 1 << 16, 1 << 22
_EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_FUNCTIONS = {
    *("int", "float", "bool", "complex", "str", "bytes", "list", "tuple", "dict", "set"),
    *("frozenset", "range", "map", "filter", "zip", "enumerate", "reversed", "sorted", "len"),
    *("sum", "min", "max", "abs", "round", "any", "all", "isinstance"),
}
_KNOWN = {*_FUNCTIONS, "math", "pytest", "approx", "isclose"}
"""Names that are not the program's."""
_REFUSED = {"eval", "exec", "compile", "__import__", "getattr", "globals", "locals", "vars"}
_VERDICTS = (ast.Compare, ast.BoolOp, ast.IfExp, ast.NamedExpr)
_OUTER = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.keyword, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.comprehension),
)
"""Syntax allowed around the program's calls in the jail: nothing that could hold an expected
value."""


class BadTest(Exception):
    """A test that cannot be judged outside the jail; the message says why."""


@dataclass(frozen=True)
class ProgramCase:
    """A request to the jail, and what it has to give."""

    request: Any
    """An expression, its arguments as plain data, or the text of standard input."""
    expected: Any = None
    """The value; text; or, with ``raises``, nothing."""
    source: str = ""
    """Expression for ``(expected, rel, abs)`` that is no literal, and not evaluated yet."""
    tolerance: Tolerance = EXACT_INTS
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
        try:
            if result.status != "value":
                return False
            if self.is_script:
                return equal_text(result.value, self.expected)
            (value,) = result.value
            return any(
                equal(value, expected, self.tolerance, is_json=self.is_json)
                for expected in (self.expected, *self.alternatives)
            )
        except Exception:
            return False

    def with_expected(self, values: Any) -> ProgramCase:
        """Set what is expected and the tolerances: ``(expected, rel, abs)``."""
        expected, rel, absolute = values
        tolerance = EXACT_INTS if rel is None else Tolerance(rel, absolute, of_ints=True)
        return replace(self, expected=expected, tolerance=tolerance, source="")


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


@dataclass(frozen=True)
class ProgramTests:
    """The tests of one row."""

    is_script: bool  # each case is the whole program with a standard input; else they are calls
    cases: tuple[ProgramCase, ...]
    setup: str = ""
    entry: str | None = None

    @property
    def room(self) -> int:
        """Bytes above the usual limit that all answers of a program may have: 4 to 8 per character
        that is expected.

        The program can learn this number, so that it is coarse: steps of 64 KiB, which tell nothing
        about an answer.
        """
        length = 0
        for case in self.cases:
            expected = case.expected
            length += len(expected if isinstance(expected, str) else encode(expected))
        return (max(4 * length, min(8 * length, _USUAL_LIMIT)) // _STEP + 1) * _STEP

    def evaluated(self, calls: Callable[..., list[CaseResult]]) -> ProgramTests:
        """Evaluate what is expected and no literal, by ``calls`` of a sandbox without a program."""
        sources = [[case.source] for case in self.cases if case.source]
        if not sources:
            return self
        results = iter(calls("", sources, setup="import math", room=_USUAL_LIMIT))
        cases = []
        for case in self.cases:
            if case.source:
                result = next(results)
                if result.status != "value":
                    expected = ast.parse(case.source, mode="eval").body.elts[0]  # type: ignore[attr-defined]
                    raise BadTest(f"{_show(expected)} has no value ({result.message})")
                case = case.with_expected(result.value[0])
            cases.append(case)
        return replace(self, cases=tuple(cases))


def read_tests(
    cell: Any, *, entry: Any = None, setup: Any = None, imports: Any = None
) -> ProgramTests | None:
    """Read the tests in a cell of the data; None if it is empty, BadTest if it is not understood.

    ``entry``: the function under test, where the tests do not name it. ``setup`` and ``imports``:
    code for the program's namespace, text or a list of lines.
    """
    code = [_text(imports or "", "test_imports"), _text(setup or "", "test_setup_code")]
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):  # the text of asserts
            cell = json.loads(cell)
    if isinstance(cell, Mapping) and "inputs" in cell and "outputs" in cell:
        entry = entry or cell.get("fn_name")
        cell = _items_of_columns(cell["inputs"], cell["outputs"], "args" if entry else "input")
    if entry is not None and not (isinstance(entry, str) and _PATH.fullmatch(entry)):
        raise BadTest(f"the entry point is {entry!r:.60}; it needs the name of a function")
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    items = [cell] if isinstance(cell, (str, Mapping)) else cell
    if not isinstance(items, Sequence) or not all(
        isinstance(item, (str, Mapping)) for item in items
    ):
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
    if not cases:
        return None
    is_script = cases[0].is_script
    if any(case.is_script != is_script for case in cases):
        raise BadTest(f"tests of scripts and of functions are mixed; it needs {FORMS}")
    return ProgramTests(is_script, tuple(cases), "\n".join(filter(None, code)), entry)


def _case_of(item: Mapping[str, Any], entry: str | None) -> ProgramCase:
    """A test with arguments, or with text for standard input."""
    try:
        if "input" not in item or item.get("testtype") == "functional":
            return _call(item, entry)
        return ProgramCase(_text(item["input"]), _text(item["output"]), is_script=True)
    except KeyError as error:
        raise BadTest(f"a test has {', '.join(item)} and no {error}; it needs {FORMS}") from None


def _text(value: Any, what: str = "without a column entry_point, an input or output") -> str:
    """Join a text that may be a list of its lines."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)) or not all(isinstance(line, str) for line in lines):
        raise BadTest(f"{what} is {value!r:.60}; it needs text, or a list of lines")
    return "\n".join(lines)


def _items_of_columns(inputs: Any, outputs: Any, key: str) -> list[dict[str, Any]]:
    """Tests of inputs and outputs side by side, as in APPS; of a function, inputs are arguments."""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadTest(
            f"inputs and outputs do not match; it needs {FORMS}, one output for each input"
        )
    items = []
    for given, output in zip(inputs, outputs, strict=True):
        # some of the values that functions return are wrapped in a list
        is_wrapped = key == "args" and isinstance(output, list) and len(output) == 1
        items.append({key: given, "output": output, "or": output if is_wrapped else []})
    return items


def _call(item: Mapping[str, Any], entry: str | None) -> ProgramCase:
    """A test with arguments and an output, or of LiveCodeBench's: JSON, an argument a line."""
    if entry is None:
        raise BadTest("it has arguments and no function; it needs a column entry_point")
    args, kwargs, output = item.get("args"), item.get("kwargs"), item["output"]
    if "input" in item:
        try:
            args, outputs = (
                [json.loads(line) for line in str(item[name]).splitlines() if line.strip()]
                for name in ("input", "output")
            )
        except (ValueError, RecursionError) as error:
            raise BadTest(f"{item['input']!r:.60} is not one JSON value a line ({error})") from None
        output = outputs[0] if outputs else None
    elif args is None and kwargs is None:
        raise KeyError("args")
    args, kwargs = args or [], kwargs or {}
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        got = f"args is {args!r:.60}, kwargs {kwargs!r:.60}"
        raise BadTest(f"{got}; it needs a list, and an object of keywords")
    try:
        encode(output)
        request = {"args": encode([*args]), "kwargs": encode({**kwargs})}
    except NotPlain as error:
        raise BadTest(f"an argument or output: {error}") from None
    return ProgramCase(request, output, alternatives=tuple(item.get("or") or ()), is_json=True)


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
        raise BadTest(f"{shown} is no Python, or nested too deeply ({error})") from None
    return cases, "\n".join(imports)


def _case(line: ast.stmt) -> ProgramCase:
    """One statement as a case: equality, closeness, truth, or an exception."""
    match line:
        case ast.With(
            items=[ast.withitem(ast.Call(func=func, args=[types], keywords=[]))],
            body=[ast.Expr(value=call) | ast.Assign(value=call)],
        ) if ast.unparse(func) in ("pytest.raises", "raises"):
            kinds = types.elts if isinstance(types, ast.Tuple) else [types]
            names = tuple(ast.unparse(kind).rpartition(".")[2] for kind in kinds)
            return ProgramCase(_request(call), raises=names)
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(args=[ast.BinOp(left=left, op=ast.Sub(), right=right)]) as function,
                ops=[ast.Lt() | ast.LtE()],
                comparators=[limit],
            )
        ) if ast.unparse(function.func) == "abs":
            return _comparison(left, right, {"rel": ast.Constant(0), "abs": limit})
        case ast.Assert(
            test=ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right])
        ):
            return _comparison(left, right, {})
        case ast.Assert(test=ast.Call(args=[left, right], keywords=options) as function) if (
            ast.unparse(function.func) in ("math.isclose", "isclose")
        ):
            limits = {str(option.arg).removesuffix("_tol"): option.value for option in options}
            return _comparison(left, right, {"rel": ast.Constant(1e-9), **limits})
        case ast.Assert(test=ast.UnaryOp(op=ast.Not(), operand=call)):
            return ProgramCase(f"bool({_verdict(call)})", expected=False)
        case ast.Assert(test=call):
            return ProgramCase(f"bool({_verdict(call)})", expected=True)
    raise BadTest("it is no assert, and no pytest.raises(TYPE) around one call")


def _comparison(left: ast.expr, right: ast.expr, limits: dict[str, ast.expr]) -> ProgramCase:
    """The case in which the side that is the program's equals the other one, or is close to it."""
    if _is_own(left) and _is_own(right):
        raise BadTest("both sides are the program's own, and it could make any two agree")
    call, expected = (left, right) if _is_own(left) else (right, left)
    match expected:
        case ast.Call(func=func, args=[value], keywords=options) if ast.unparse(func) in (
            "pytest.approx",
            "approx",
        ):
            expected, limits = value, {str(option.arg): option.value for option in options}
            if "abs" in limits:
                limits = {"rel": ast.Constant(0)} | limits
            limits = {"rel": ast.Constant(1e-6), "abs": ast.Constant(1e-12)} | limits
    if limits:
        limits = {"abs": ast.Constant(0)} | limits
    sides = [expected, *(limits.get(name, ast.Constant(None)) for name in ("rel", "abs"))]
    if isinstance(expected, ast.Constant) and isinstance(expected.value, bool):
        asked = call  # f(1).equals(2) == True: the program would say yes
        while isinstance(asked, ast.Subscript):
            asked = asked.value
        _verdict(asked)
    case = ProgramCase(_request(call))
    source = ast.unparse(ast.Tuple(sides, ast.Load()))
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
        if isinstance(part, _VERDICTS) and _is_own(part):
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
        if not _is_program_call(part) and not isinstance(part, ast.Lambda):
            outer += filter(_is_own, ast.iter_child_nodes(part))
    return ast.unparse(node)


def _verdict(node: ast.expr) -> str:
    """Source of an expression that gives True or False; BadTest unless it is ``f(x)``,
    ``module.f(x)`` or ``Class().f(x)``.

    Not ``f(x).equals(y)``, where what the program gave would answer, nor ``is_close(f(x), y)``.
    """
    owners: dict[ast.AST, ast.expr] = {}  # of each call what it begins with: f, module or Class()
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and _is_program_call(part):
            owner = part.func
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            owners[part] = owner
    owner = owners.get(node, node)
    names = {owner.id for owner in owners.values() if isinstance(owner, ast.Name)}
    if isinstance(owner, ast.Call):  # Class() is named beside its methods
        is_alone = ast.unparse(owner.func).rpartition(".")[2][:1].isupper() and len(names) == 1
    else:
        is_alone = isinstance(owner, ast.Name) and names == {owner.id}
    if node not in owners or not is_alone:
        raise BadTest(f"{_show(node)} would be judged by the program itself; compare with ==")
    return _request(node)


def _is_program_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) not in _FUNCTIONS


def _is_own(node: ast.AST) -> bool:
    """Whether the expression uses a name of the program."""
    return any(isinstance(part, ast.Name) and part.id not in _KNOWN for part in ast.walk(node))


def _show(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:80]
