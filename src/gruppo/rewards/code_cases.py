"""The tests of a row: from the forms of data sets to cases for the jail."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gruppo.rewards.code_asserts import BadTest, ProgramCase, read_asserts
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

    is_script: bool
    """Each case is the whole program with a standard input; else they are calls."""
    cases: tuple[ProgramCase, ...]
    setup: str = ""
    entry: str | None = None

    @property
    def cap(self) -> int:
        """Bytes beyond the usual that the answer to any case may have: 4 to 8 for each character of the longest.

        The program can learn this number, so that it is one for the row, and coarse: steps of 64 KiB, which say
        nothing of an answer.
        """
        length = max(case.length for case in self.cases)
        return (max(4 * length, min(8 * length, _USUAL_MOST)) // _STEP + 1) * _STEP


def read_tests(cell: Any, *, entry: Any = None, setup: Any = None, imports: Any = None) -> ProgramTests | None:
    """The tests in a cell of the data; None where it holds none. BadTest for what is not understood.

    ``entry``: the function that is tested, where the tests do not name it. ``setup`` and ``imports``: code for the
    program's namespace, text or a list of lines.
    """
    lines = list[str]()
    for name, value in (("test_imports", imports), ("test_setup_code", setup)):
        texts = [value or ""] if value is None or isinstance(value, str) else value
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise BadTest(f"{name} is {value!r:.60}; it needs text, or a list of lines")
        lines += texts
    if entry is not None and not (isinstance(entry, str) and _PATH.fullmatch(entry)):
        raise BadTest(f"entry_point is {entry!r:.60}; it needs the name of a function")
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):  # the text of asserts
            cell = json.loads(cell)
    if cell is None or (isinstance(cell, str) and not cell.strip()) or (isinstance(cell, Sequence) and not cell):
        return None
    code = "\n".join(filter(None, lines))
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTest(f"its setup (test_imports, test_setup_code) is no Python ({error})") from None
    if isinstance(cell, Mapping):
        return _read_columns(cell, entry, code)
    items = list(cell) if isinstance(cell, Sequence) and not isinstance(cell, str) else [cell]
    if all(isinstance(item, str) for item in items):
        return _read_asserts(items, entry, code)
    if not all(isinstance(item, Mapping) for item in items):
        raise BadTest(f"it is {cell!r:.60}; it needs {FORMS}")
    if all("input" in item and "output" in item for item in items):
        if any(item.get("testtype") != "functional" for item in items):
            return _script([(item["input"], item["output"]) for item in items])
        calls = []
        for item in items:  # LiveCodeBench: a JSON value in each line
            try:
                args, output = (
                    [json.loads(x) for x in str(item[k]).splitlines() if x.strip()] for k in ("input", "output")
                )
            except ValueError as error:
                raise BadTest(f"{item['input']!r:.60} is not one JSON value a line ({error})") from None
            calls.append((args, None, output[0] if output else None))
        return _calls(calls, entry, code)
    if all("output" in item and ("args" in item or "kwargs" in item) for item in items):
        return _calls([(item.get("args"), item.get("kwargs"), item["output"]) for item in items], entry, code)
    odd = next((item for item in items if "output" not in item), items[0])
    raise BadTest(f"a test has {', '.join(map(str, odd)) or 'nothing'}; it needs {FORMS}")


def _read_asserts(texts: Sequence[str], entry: str | None, setup: str) -> ProgramTests | None:
    cases: list[ProgramCase] = []
    for number, text in enumerate(texts, start=1):
        try:
            read, imports = read_asserts(text)
        except BadTest as error:
            raise BadTest(f"test {number}: {error}") from None
        setup = "\n".join(filter(None, [setup, imports]))
        cases += read
    return ProgramTests(is_script=False, cases=tuple(cases), setup=setup, entry=entry) if cases else None


def _read_columns(cell: Mapping[str, Any], entry: str | None, setup: str) -> ProgramTests | None:
    """inputs and outputs side by side, as in APPS; with fn_name they are arguments and what is returned."""
    inputs, outputs = cell.get("inputs"), cell.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise BadTest(f"it has {', '.join(map(str, cell)) or 'nothing'}; it needs {FORMS}, one output for each input")
    entry = entry or cell.get("fn_name")
    if not inputs:
        return None
    if entry is None:
        return _script(list(zip(inputs, outputs, strict=True)))
    calls = [(args, None, output) for args, output in zip(inputs, outputs, strict=True)]
    return _calls(calls, entry, setup, may_be_wrapped=True)


def _script(pairs: Sequence[tuple[Any, Any]]) -> ProgramTests:
    cases = []
    for pair in pairs:
        texts = []
        for value in pair:  # text, or a list of its lines
            lines = [value] if isinstance(value, str) else value
            if not isinstance(lines, (list, tuple)) or not all(isinstance(line, str) for line in lines):
                raise BadTest(f"an input or output is {value!r:.60}; without a column entry_point it needs text")
            texts.append("\n".join(lines))
        cases.append(ProgramCase(texts[0], partial(equal_text, expected=texts[1]), len(texts[1])))
    return ProgramTests(is_script=True, cases=tuple(cases))


def _calls(
    calls: Sequence[tuple[Any, Any, Any]], entry: Any, setup: str, *, may_be_wrapped: bool = False
) -> ProgramTests:
    """Cases of args, kwargs and output. ``may_be_wrapped``: APPS wraps some values that are returned in a list."""
    if not isinstance(entry, str) or not _PATH.fullmatch(entry):
        raise BadTest(
            "the tests have arguments and no function; it needs a column entry_point with the function's name"
        )
    cases = []
    for args, kwargs, output in calls:
        args, kwargs = [] if args is None else args, {} if kwargs is None else kwargs
        are_names = isinstance(kwargs, Mapping) and all(isinstance(k, str) and k.isidentifier() for k in kwargs)
        if not isinstance(args, (list, tuple)) or not are_names:
            raise BadTest(f"args is {args!r:.60}, kwargs {kwargs!r:.60}; it needs a list, and an object of keywords")
        sources = [*map(_source, args), *(f"{key}={_source(item)}" for key, item in kwargs.items())]
        try:
            length = len(encode(output))
        except NotPlain as error:
            raise BadTest(f"an output cannot be compared: {error}") from None
        outputs = [output, *(output if may_be_wrapped and isinstance(output, list) and len(output) == 1 else [])]
        cases.append(ProgramCase((f"{entry}({', '.join(sources)})",), partial(_is_one_of, outputs), length))
    return ProgramTests(is_script=False, cases=tuple(cases), setup=setup, entry=entry)


def _is_one_of(outputs: Sequence[Any], values: Sequence[Any]) -> bool:
    return any(equal(values[0], output, is_json=True) for output in outputs)


def _source(value: Any) -> str:
    """Python that makes a value of JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)  # without a limit of digits
    if value is None or isinstance(value, (bool, float, str)):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_source, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(_source(item) + ', ' for item in value)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_source(key)}: {_source(item)}" for key, item in value.items()) + "}"
    raise BadTest(f"an argument is a {type(value).__name__}; it needs plain data")
