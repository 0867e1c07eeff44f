"""Reads the tests of a row, in the formats of common data sets, into cases for the jail."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gruppo.rewards.code_asserts import BadTest, ProgramCase, check_compiles, read_asserts
from gruppo.rewards.code_compare import equal, equal_text
from gruppo.rewards.sandbox.plain_data import NotPlain, encode

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_STEP, _USUAL_MOST = 1 << 16, 1 << 22
FORMS = (
    'asserts ["assert f(1) == 2"], [{"input": "1\\n", "output": "2\\n"}], [{"args": [1], "output": 2}] with a column '
    'entry_point, or {"inputs": [...], "outputs": [...]}'
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
        """Bytes above the usual limit that all answers of a program may have: 4 to 8 per character that is expected.

        The program can learn this number, so that it is coarse: steps of 64 KiB, which tell nothing about an answer.
        """
        length = sum(case.length for case in self.cases)
        return (max(4 * length, min(8 * length, _USUAL_MOST)) // _STEP + 1) * _STEP


def read_tests(
    cell: Any, *, entry: Any = None, setup: Any = None, imports: Any = None
) -> ProgramTests | None:
    """Read the tests in a cell of the data; None if it is empty, BadTest if it is not understood.

    ``entry``: the function under test, where the tests do not name it. ``setup`` and ``imports``: code for the
    program's namespace, text or a list of lines.
    """
    need = "it needs text, or a list of lines"
    codes = [
        _joined(imports or "", "test_imports is", need),
        _joined(setup or "", "test_setup_code is", need),
    ]
    if entry is not None and not (isinstance(entry, str) and _PATH.fullmatch(entry)):
        raise BadTest(f"entry_point is {entry!r:.60}; it needs the name of a function")
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):  # the text of asserts
            cell = json.loads(cell)
    if (
        cell is None
        or (isinstance(cell, str) and not cell.strip())
        or (isinstance(cell, Sequence) and not cell)
    ):
        return None
    code = "\n".join(filter(None, codes))
    try:
        compile(code, "setup", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise BadTest(f"its setup (test_imports, test_setup_code) is no Python ({error})") from None

    if isinstance(
        cell, Mapping
    ):  # inputs and outputs side by side, as in APPS; with fn_name they are arguments
        inputs, outputs = cell.get("inputs"), cell.get("outputs")
        if (
            not isinstance(inputs, Sequence)
            or not isinstance(outputs, Sequence)
            or len(inputs) != len(outputs)
        ):
            got = f"it has {', '.join(map(str, cell)) or 'nothing'}"
            raise BadTest(f"{got}; it needs {FORMS}, one output for each input")
        entry = entry or cell.get("fn_name")
        if not inputs:
            return None
        if entry is not None:
            # Some of its values that are returned are wrapped in a list.
            wrapped = [x if isinstance(x, list) and len(x) == 1 else [] for x in outputs]
            calls = [
                (args, None, [output, *more])
                for args, output, more in zip(inputs, outputs, wrapped, strict=True)
            ]
            return _calls(calls, entry, code)
        cell = [
            {"input": given, "output": expected}
            for given, expected in zip(inputs, outputs, strict=True)
        ]
    items = list(cell) if isinstance(cell, Sequence) and not isinstance(cell, str) else [cell]
    cases: list[ProgramCase] = []
    if all(isinstance(item, str) for item in items):
        for number, text in enumerate(items, start=1):
            try:
                asserts, imported = read_asserts(text)
            except BadTest as error:
                raise BadTest(f"test {number}: {error}") from None
            cases += asserts
            code = "\n".join(filter(None, [code, imported]))
        return (
            ProgramTests(is_script=False, cases=tuple(cases), setup=code, entry=entry)
            if cases
            else None
        )
    if not all(isinstance(item, Mapping) for item in items):
        raise BadTest(f"it is {cell!r:.60}; it needs {FORMS}")
    if all("input" in item and "output" in item for item in items):
        if any(item.get("testtype") != "functional" for item in items):
            what, need = "an input or output is", "without a column entry_point it needs text"
            for item in items:  # each is a run of the whole program
                given, expected = (_joined(item[name], what, need) for name in ("input", "output"))
                cases.append(
                    ProgramCase(given, partial(equal_text, expected=expected), len(expected))
                )
            return ProgramTests(is_script=True, cases=tuple(cases))
        calls = []
        for item in items:  # LiveCodeBench: a JSON value in each line
            lines = (str(item[name]).splitlines() for name in ("input", "output"))
            try:
                args, output = (
                    [json.loads(line) for line in part if line.strip()] for part in lines
                )
            except ValueError as error:
                raise BadTest(
                    f"{item['input']!r:.60} is not one JSON value a line ({error})"
                ) from None
            calls.append((args, None, output[:1] or [None]))
        return _calls(calls, entry, code)
    if all("output" in item and ("args" in item or "kwargs" in item) for item in items):
        return _calls(
            [(item.get("args"), item.get("kwargs"), [item["output"]]) for item in items],
            entry,
            code,
        )
    odd = next((item for item in items if "output" not in item), items[0])
    raise BadTest(f"a test has {', '.join(map(str, odd)) or 'nothing'}; it needs {FORMS}")


def _joined(value: Any, what: str, need: str) -> str:
    """Join a text that may be a list of its lines."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)) or not all(isinstance(line, str) for line in lines):
        raise BadTest(f"{what} {value!r:.60}; {need}")
    return "\n".join(lines)


def _calls(calls: Sequence[tuple[Any, Any, Sequence[Any]]], entry: Any, setup: str) -> ProgramTests:
    """Build cases from args, kwargs and the outputs of which any is right."""
    if not isinstance(entry, str) or not _PATH.fullmatch(entry):
        raise BadTest(
            "the tests have arguments and no function; it needs a column entry_point with its name"
        )
    cases = []
    for args, kwargs, outputs in calls:
        args, kwargs = [] if args is None else args, {} if kwargs is None else kwargs
        are_names = isinstance(kwargs, Mapping) and all(
            isinstance(k, str) and k.isidentifier() for k in kwargs
        )
        if not isinstance(args, (list, tuple)) or not are_names:
            raise BadTest(
                f"args is {args!r:.60}, kwargs {kwargs!r:.60}; it needs a list, and an object of keywords"
            )
        try:
            sources = [
                *map(_source, args),
                *(f"{key}={_source(item)}" for key, item in kwargs.items()),
            ]
            length = len(encode(outputs[0]))
        except NotPlain as error:
            raise BadTest(f"an output cannot be compared: {error}") from None
        except RecursionError:
            raise BadTest("an argument is nested too deeply") from None
        source = check_compiles(f"{entry}({', '.join(sources)})")
        is_right = partial(_is_any, expected=outputs)
        cases.append(ProgramCase((source,), is_right, length))
    return ProgramTests(is_script=False, cases=tuple(cases), setup=setup, entry=entry)


def _is_any(value: Any, expected: Sequence[Any]) -> bool:
    return any(equal(value, one, is_json=True) for one in expected)


def _source(value: Any) -> str:
    """Python source of a JSON value."""
    match value:
        case float() if not math.isfinite(value):
            return f"float('{value}')"
        case None | bool() | float() | str():
            return repr(value)
        case int():
            return hex(value)  # without a limit of digits
        case list():
            return f"[{', '.join(map(_source, value))}]"
        case tuple():
            return f"({''.join(_source(item) + ', ' for item in value)})"
        case Mapping():
            return (
                "{"
                + ", ".join(f"{_source(key)}: {_source(item)}" for key, item in value.items())
                + "}"
            )
    raise BadTest(f"an argument is a {type(value).__name__}; it needs plain data")
