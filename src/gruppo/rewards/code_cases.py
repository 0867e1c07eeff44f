"""Reads the tests of a row, in the formats of common data sets, into cases for the jail."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
    'asserts ["assert f(1) == 2"], [{"input": "1\\n", "output": "2\\n"}], [{"args": [1], "output": '
    "2}] with a column "
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
        """Bytes above the usual limit that all answers of a program may have: 4 to 8 per character
        that is expected.

        The program can learn this number, so that it is coarse: steps of 64 KiB, which tell nothing
        about an answer.
        """
        length = sum(case.length for case in self.cases)
        return (max(4 * length, min(8 * length, _USUAL_MOST)) // _STEP + 1) * _STEP


def read_tests(
    cell: Any, *, entry: Any = None, setup: Any = None, imports: Any = None
) -> ProgramTests | None:
    """Read the tests in a cell of the data; None if it is empty, BadTest if it is not understood.

    ``entry``: the function under test, where the tests do not name it. ``setup`` and ``imports``:
    code for the program's namespace, text or a list of lines.
    """
    if entry is not None and not (isinstance(entry, str) and _PATH.fullmatch(entry)):
        raise BadTest(f"entry_point is {entry!r:.60}; it needs the name of a function")
    code = _setup_code(imports, setup)
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):  # the text of asserts
            cell = json.loads(cell)
    if isinstance(cell, Mapping) and "inputs" in cell and "outputs" in cell:
        entry = entry or cell.get("fn_name")
        cell = _items_of_columns(cell, has_entry=entry is not None)
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return None
    is_list = isinstance(cell, Sequence) and not isinstance(cell, str)
    items = [*cell] if is_list else [cell]
    if all(isinstance(item, str) for item in items):
        return _asserts(items, entry, code)
    if not all(isinstance(item, Mapping) for item in items):
        raise BadTest(f"it is {cell!r:.60}; it needs {FORMS}")
    if all("input" in item and "output" in item for item in items):
        if any(item.get("testtype") != "functional" for item in items):
            return ProgramTests(is_script=True, cases=tuple(map(_run_with_input, items)))
        return _calls(map(_lines_as_json, items), entry, code)
    if all("output" in item and ("args" in item or "kwargs" in item) for item in items):
        return _calls(items, entry, code)
    odd = next((item for item in items if "output" not in item), items[0])
    raise BadTest(f"a test has {', '.join(map(str, odd)) or 'nothing'}; it needs {FORMS}")


def _setup_code(imports: Any, setup: Any) -> str:
    need = "it needs text, or a list of lines"
    codes = (
        _joined(imports or "", "test_imports is", need),
        _joined(setup or "", "test_setup_code is", need),
    )
    code = "\n".join(filter(None, codes))
    try:
        compile(code, "setup", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise BadTest(f"its setup (test_imports, test_setup_code) is no Python ({error})") from None
    return code


def _items_of_columns(cell: Mapping[str, Any], *, has_entry: bool) -> list[dict[str, Any]]:
    """Tests of inputs and outputs side by side, as in APPS; of a function, inputs are arguments."""
    inputs, outputs = cell["inputs"], cell["outputs"]
    are_lists = isinstance(inputs, Sequence) and isinstance(outputs, Sequence)
    if not are_lists or len(inputs) != len(outputs):
        got = f"it has {', '.join(map(str, cell))}"
        raise BadTest(f"{got}; it needs {FORMS}, one output for each input")
    pairs = zip(inputs, outputs, strict=True)
    if not has_entry:
        return [{"input": given, "output": expected} for given, expected in pairs]
    items = []
    for args, output in pairs:
        # Some of the values that are returned are wrapped in a list.
        wrapped = output if isinstance(output, list) and len(output) == 1 else []
        items.append({"args": args, "output": output, "or": wrapped})
    return items


def _asserts(texts: Sequence[str], entry: str | None, code: str) -> ProgramTests | None:
    cases = list[ProgramCase]()
    for number, text in enumerate(texts, start=1):
        try:
            asserts, imported = read_asserts(text)
        except BadTest as error:
            raise BadTest(f"test {number}: {error}") from None
        cases += asserts
        code = "\n".join(filter(None, [code, imported]))
    if not cases:
        return None
    return ProgramTests(is_script=False, cases=tuple(cases), setup=code, entry=entry)


def _run_with_input(item: Mapping[str, Any]) -> ProgramCase:
    """A run of the whole program."""
    what, need = "an input or output is", "without a column entry_point it needs text"
    expected = _joined(item["output"], what, need)
    is_right = partial(equal_text, expected=expected)
    return ProgramCase(_joined(item["input"], what, need), is_right, len(expected))


def _lines_as_json(item: Mapping[str, Any]) -> dict[str, Any]:
    """A test of LiveCodeBench's: an argument in each line of the input."""
    parts = []
    for name in ("input", "output"):
        lines = str(item[name]).splitlines()
        try:
            parts.append([json.loads(line) for line in lines if line.strip()])
        except ValueError as error:
            text = f"{item['input']!r:.60}"
            raise BadTest(f"{text} is not one JSON value a line ({error})") from None
    args, outputs = parts
    return {"args": args, "output": outputs[0] if outputs else None}


def _joined(value: Any, what: str, need: str) -> str:
    """Join a text that may be a list of its lines."""
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, (list, tuple)) or not all(isinstance(line, str) for line in lines):
        raise BadTest(f"{what} {value!r:.60}; {need}")
    return "\n".join(lines)


def _calls(items: Iterable[Mapping[str, Any]], entry: Any, setup: str) -> ProgramTests | None:
    """Build cases from tests with args, kwargs and an output."""
    if not isinstance(entry, str) or not _PATH.fullmatch(entry):
        raise BadTest(
            "the tests have arguments and no function; it needs a column entry_point with its name"
        )
    cases = []
    for item in items:
        args = [] if item.get("args") is None else item["args"]
        kwargs = {} if item.get("kwargs") is None else item["kwargs"]
        are_named = isinstance(kwargs, Mapping) and all(map(_is_name, kwargs))
        if not isinstance(args, (list, tuple)) or not are_named:
            got = f"args is {args!r:.60}, kwargs {kwargs!r:.60}"
            raise BadTest(f"{got}; it needs a list, and an object of keywords")
        try:
            named = [f"{key}={_source(value)}" for key, value in kwargs.items()]
            source = check_compiles(f"{entry}({', '.join([*map(_source, args), *named])})")
            length = len(encode(item["output"]))
        except NotPlain as error:
            raise BadTest(f"an output cannot be compared: {error}") from None
        except RecursionError:
            raise BadTest("an argument is nested too deeply") from None
        is_right = partial(_is_any, expected=[item["output"], *item.get("or", ())])
        cases.append(ProgramCase((source,), is_right, length))
    return ProgramTests(is_script=False, cases=tuple(cases), setup=setup, entry=entry)


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and text.isidentifier()


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
