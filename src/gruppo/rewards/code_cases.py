"""The tests of a row: from the forms that data sets have to cases that a jail can be asked for."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gruppo.rewards.code_asserts import Assert, BadTest, read_asserts
from gruppo.rewards.code_same import same, same_text
from gruppo.rewards.jailed.plain import NotPlain, encode

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_BYTES_PER_CHARACTER = 8
"""What a case may say, for each character of what it is expected to."""
_STEP, _USUAL_MOST = 1 << 16, 1 << 22
"""Bytes. The room of a row is told in the jail, so that it is a coarse number that says nothing of an answer."""
FORMS = (
    'asserts ["assert f(1) == 2"], [{"input": "1\\n", "output": "2\\n"}], [{"args": [1], "output": 2}] with a column '
    'entry_point, or {"inputs": [...], "outputs": [...]}'
)


@dataclass(frozen=True)
class Case:
    """What the jail is asked for, and whether its answer is right. Only ``asked`` ever enters the jail."""

    asked: Any
    """Expressions, a tuple; or the text of standard input."""
    passes: Callable[[Any], bool]
    length: int
    """Characters of what is expected, or some more."""


@dataclass(frozen=True)
class Tests:
    """Of one row."""

    is_script: bool
    """Each case is the whole program with a standard input; else they are calls."""
    cases: tuple[Case, ...]
    setup: str = ""
    entry: str | None = None

    @property
    def room(self) -> int:
        """Bytes that the answer to any case may have beyond the usual, in steps of 64 KiB, and 4 MiB for most."""
        length = max(case.length for case in self.cases)
        least, most = 4 * length, _BYTES_PER_CHARACTER * length
        return (max(least, min(most, _USUAL_MOST)) // _STEP + 1) * _STEP


def tests_of(value: Any, *, entry: str | None = None, setup: str = "") -> Tests | None:
    """The tests in a cell of the data; None where it holds none. BadTest for what is not understood.

    ``entry``: the function that is tested, where the tests do not name it. ``setup``: code for the program's namespace.
    """
    if entry is not None and not (isinstance(entry, str) and _PATH.fullmatch(entry)):
        raise BadTest(f"entry_point is {entry!r:.60}; it needs the name of a function")
    value = _from_json(value) if isinstance(value, str) else value
    if value is None or (isinstance(value, (str, Sequence)) and not len(value)):
        return None
    _check_setup(setup)
    if isinstance(value, Mapping):
        return _paired(value, entry, setup)
    items = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [value]
    if all(isinstance(item, str) for item in items):
        return _asserted(items, entry, setup)
    if all(isinstance(item, Mapping) for item in items):
        return _listed([item for item in items if isinstance(item, Mapping)], entry, setup)
    raise BadTest(f"it is {value!r:.60}; it needs {FORMS}")


def _check_setup(setup: str) -> None:
    try:
        ast.parse(setup)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTest(f"its setup (test_imports, test_setup_code) is no Python ({error})") from None


def _from_json(text: str) -> Any:
    """A list or an object that is written as JSON; else the text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text if text.strip() else None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _asserted(texts: Sequence[str], entry: str | None, setup: str) -> Tests | None:
    cases: list[Case] = []
    for number, text in enumerate(texts, start=1):
        try:
            asserts, imports = read_asserts(text)
        except BadTest as error:
            raise BadTest(f"test {number}: {error}") from None
        setup = "\n".join(filter(None, [setup, imports]))
        cases += [_of_assert(each, text) for each in asserts]
    return Tests(is_script=False, cases=tuple(cases), setup=setup, entry=entry) if cases else None


def _of_assert(each: Assert, text: str) -> Case:
    return Case(each.sources, each.passes, len(text))


def _listed(items: Sequence[Mapping[str, Any]], entry: str | None, setup: str) -> Tests:
    """Objects with input and output, or args, kwargs and output."""
    if all("input" in item and "output" in item for item in items):
        if all(item.get("testtype") == "functional" for item in items):  # LiveCodeBench: a JSON value in each line
            lines = [(_lines_of_json(item["input"]), _lines_of_json(item["output"])[0]) for item in items]
            return _called([(args, None, output) for args, output in lines], entry, setup)
        return _scripted([(item["input"], item["output"]) for item in items])
    if all("output" in item and ("args" in item or "kwargs" in item) for item in items):
        return _called([(item.get("args"), item.get("kwargs"), item["output"]) for item in items], entry, setup)
    odd = next((item for item in items if "output" not in item), items[0])
    raise BadTest(f"a test has {', '.join(map(str, odd)) or 'nothing'}; it needs {FORMS}")


def _paired(value: Mapping[str, Any], entry: str | None, setup: str) -> Tests | None:
    """inputs and outputs side by side, as in APPS; with fn_name they are arguments and what is returned."""
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise BadTest(f"it has {', '.join(map(str, value)) or 'nothing'}; it needs {FORMS}, one output for each input")
    if not inputs:
        return None
    entry = entry or value.get("fn_name")
    if entry is None:
        return _scripted(list(zip(inputs, outputs, strict=True)))
    tests = _called([(args, None, output) for args, output in zip(inputs, outputs, strict=True)], entry, setup)
    return replace(tests, cases=tuple(map(_or_in_a_list, tests.cases, outputs)))


def _or_in_a_list(case: Case, output: Any) -> Case:
    """APPS wraps some values that are returned in a list of one."""
    if not (isinstance(output, list) and len(output) == 1):
        return case
    return replace(case, passes=lambda values: case.passes(values) or same(values[0], output[0], is_json=True))


def _scripted(pairs: Sequence[tuple[Any, Any]]) -> Tests:
    return Tests(is_script=True, cases=tuple(_of_script(_text(a), _text(b)) for a, b in pairs))


def _of_script(given: str, wanted: str) -> Case:
    return Case(given, lambda printed: same_text(printed, wanted), len(wanted))


def _text(value: Any) -> str:
    """Text, or a list of its lines."""
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise BadTest(f"an input or output is {value!r:.60}; without a column entry_point it needs text")
    return value


def _called(calls: Sequence[tuple[Any, Any, Any]], entry: str | None, setup: str) -> Tests:
    if not isinstance(entry, str) or not _PATH.fullmatch(entry):
        raise BadTest(
            "the tests have arguments and no function; it needs a column entry_point with the function's name"
        )
    cases = tuple(_of_call(entry, args, kwargs, output) for args, kwargs, output in calls)
    return Tests(is_script=False, cases=cases, setup=setup, entry=entry)


def _of_call(entry: str, args: Any, kwargs: Any, output: Any) -> Case:
    args, kwargs = [] if args is None else args, {} if kwargs is None else kwargs
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping) or not all(map(_is_word, kwargs)):
        raise BadTest(f"args is {args!r:.60}, kwargs {kwargs!r:.60}; it needs a list, and an object of keywords")
    given = [_source(argument) for argument in args] + [f"{key}={_source(item)}" for key, item in kwargs.items()]
    source = f"{entry}({', '.join(given)})"
    try:
        length = len(encode(output))
    except NotPlain as error:
        raise BadTest(f"an output cannot be compared: {error}") from None
    return Case((source,), lambda values: same(values[0], output, is_json=True), length)


def _is_word(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier()


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


def _lines_of_json(text: Any) -> list[Any]:
    try:
        return [json.loads(line) for line in str(text).splitlines() if line.strip()] or [None]
    except ValueError as error:
        raise BadTest(f"{text!r:.60} is not one JSON value a line ({error})") from None
