"""Which tests run a function: recorded once, so that a generated mutant meets the tests that can
catch it.

``python -m tests.mutants.covering`` runs the tests that are not slow under a trace of calls and
writes ``covering.json``. A recording that is older than the code does no harm: functions that it
does not know are tested by the files that import their module.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from tests.mutants.mutant import has_test

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = str(TESTS.parent / "src/gruppo") + os.sep
RECORDING = Path(__file__).parent / "covering.json"
PARTS = "GRUPPO_COVERING"
"""Environment variable: the folder that each process of pytest writes its part to."""
MOST_TESTS = 24
MOST_OF_A_FILE = 6
MOST_SECONDS = 40.0
"""Per function, as measured while recording."""


def tests_of(file: str, function: str) -> tuple[str, ...]:
    """Return the recorded tests of a function, those that run little else first."""
    recording = _recording()
    numbers = recording["functions"].get(f"{file} {function}", ())
    tests = [recording["tests"][number] for number in numbers]
    return tuple(test for test in tests if has_test(test))


@cache
def _recording() -> dict[str, Any]:
    if not RECORDING.exists():
        return {"tests": [], "functions": {}}
    return json.loads(RECORDING.read_text(encoding="utf-8"))


class Recorder:
    """A pytest plugin that notes the functions of the package that each test calls."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{os.getpid()}.jsonl"
        self.called: set[CodeType] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.called = set()
        began = time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = time.monotonic() - began
            called, self.called = self.called, set()  # a thread of the test may still add to it
            names = sorted({name for code in called if (name := _name_of(code))})
            with self.path.open("a", encoding="utf-8") as part:
                part.write(json.dumps([item.nodeid.removeprefix("tests/"), seconds, names]) + "\n")

    def _trace(self, frame: Any, event: str, argument: object) -> None:
        self.called.add(frame.f_code)


@cache
def _name_of(code: CodeType) -> str:
    """The file below the package and the function, as mutants name them; "" for other code."""
    if not code.co_filename.startswith(PACKAGE):
        return ""
    parts = [part for part in code.co_qualname.split(".") if not part.startswith("<")]
    return f"{code.co_filename.removeprefix(PACKAGE)} {'.'.join(parts)}" if parts else ""


def pytest_configure(config: pytest.Config) -> None:
    """Record in the processes that run tests, not in the one that hands them out."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(os.environ[PARTS])))


def merge(lines: list[tuple[str, float, list[str]]], wanted: set[str]) -> dict[str, Any]:
    """Choose the tests of each wanted function: at most ``MOST_TESTS``, ``MOST_OF_A_FILE`` of one
    file, of ``MOST_SECONDS`` together, those that call the fewest functions first."""
    seconds: Counter[str] = Counter()
    called: dict[str, set[str]] = defaultdict(set)
    for test, took, names in lines:
        name = test.partition("[")[0]  # with all its parameters
        seconds[name] += took
        called[name].update(names)
    by_function: dict[str, list[str]] = defaultdict(list)
    for test in sorted(called, key=lambda test: (len(called[test]), test)):
        for function in called[test] & wanted:
            by_function[function].append(test)
    chosen = {name: _chosen(tests, seconds) for name, tests in sorted(by_function.items())}
    tests = sorted({test for some in chosen.values() for test in some})
    numbers = {test: number for number, test in enumerate(tests)}
    functions = {name: [numbers[test] for test in some] for name, some in chosen.items()}
    return {"tests": tests, "functions": functions}


def _chosen(candidates: list[str], seconds: Mapping[str, float]) -> list[str]:
    chosen: list[str] = []
    of_file: Counter[str] = Counter()
    total = 0.0
    quick = [test for test in candidates if seconds[test] <= MOST_SECONDS]
    for test in quick or candidates[:1]:
        file = test.partition("::")[0]
        if len(chosen) == MOST_TESTS or of_file[file] == MOST_OF_A_FILE:
            continue
        if quick and total + seconds[test] > MOST_SECONDS:
            continue
        chosen.append(test)
        of_file[file] += 1
        total += seconds[test]
    return chosen


def main() -> int:
    """Run the tests and write the recording."""
    import tempfile

    from tests.mutants.generated import functions

    with tempfile.TemporaryDirectory() as folder:
        jobs = os.environ.get("JOBS", str(os.cpu_count()))
        command = [sys.executable, "-m", "pytest", "-q", "-n", jobs]
        options = ["--dist", "worksteal", "-m", "not slow", "-p", "tests.mutants.covering"]
        environment = os.environ | {PARTS: folder, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [*command, *options, *sys.argv[1:]], cwd=TESTS.parent, env=environment
        )
        if ended.returncode not in (0, 1):
            return ended.returncode
        parts = [path.read_text(encoding="utf-8") for path in Path(folder).iterdir()]
    lines = [tuple(json.loads(line)) for part in parts for line in part.splitlines()]
    recording = merge(lines, set(functions()))
    RECORDING.write_text(_text(recording), encoding="utf-8")
    print(f"{len(recording['functions'])} functions, {len(recording['tests'])} tests")
    return 0


def _text(recording: Mapping[str, Any]) -> str:
    """One line a test and a function, so that a change of it can be read."""
    tests = ",\n".join(json.dumps(test) for test in recording["tests"])
    functions = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(numbers)}"
        for name, numbers in recording["functions"].items()
    )
    return f'{{"tests": [\n{tests}\n], "functions": {{\n{functions}\n}}}}\n'


if __name__ == "__main__":
    sys.exit(main())
