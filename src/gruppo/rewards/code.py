"""Rewards for code: programs of completions run in a jail, and their output is compared outside."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from gruppo.loading import visible
from gruppo.platforms import usable_processors
from gruppo.rewards.code_cases import BadTest, ProgramTests, read_tests
from gruppo.rewards.sandbox.jail import (
    CaseResult,
    Jail,
    SandboxError,
    SandboxLimits,
    require_jail,
)
from gruppo.rewards.sandbox.plain_data import NotPlain
from gruppo.rewards.text import LogMetric, text_of
from gruppo.timeouts import CallError
from gruppo.types import DataError

COLUMNS = ("tests", "test_list", "input_output")
"""Columns of tests, of which the first that exists is read; ``column`` names another."""
_FENCE = re.compile(
    r"(?P<prefix>[ \t>]*+)(?P<mark>`{3,}+|~{3,}+)(?P<rest>[^`]*+)"
)  # possessive: in linear time
_PYTHON = {"python", "py", "python3", "{python}", "{.python}"}
_MOST_WORKERS = 16


@dataclass(frozen=True)
class ProgramScore:
    """Passed cases of one program."""

    passed: int
    total: int
    failures: tuple[str, ...] = ()
    """Of each case that failed: error, timeout, not_run or wrong."""
    message: str = ""
    """Why the first case failed; empty if all passed."""


class CodeTests:
    """Share of a row's tests that the program in a completion passes, 0 to 1. In TRL's calling
    convention.

    The program is the last block of the completion that is fenced as Python; without one the last
    fenced block, closed or not; without a fence the whole text. It runs in a sandbox
    (``gruppo.rewards.sandbox``) and returns plain data; what is expected never enters its process,
    so no exit code, print or ``__eq__`` can pass for a right answer.

    ``all_or_nothing``: 1 if every test passes, else 0. ``column``: where the tests are.
    ``case_s``, ``program_s`` and ``memory_mib``: see ``SandboxLimits``. ``workers``: programs that
    run at once; 0: one for each processor, at most 16. ``packages``: names, separated by commas,
    that programs may import besides the standard library. A row without tests is not scored; one
    whose tests cannot be judged from outside is a failure with the reason. Weakness: tests that
    stand in the prompt can be answered from a table. Raises GruppoError if the jail does not hold.
    """

    __name__ = "code_tests"
    timeout_s = None  # each program has its own limits

    def __init__(
        self,
        *,
        all_or_nothing: bool = False,
        column: str = "",
        case_s: float = SandboxLimits.case_s,
        program_s: float = SandboxLimits.program_s,
        memory_mib: int = SandboxLimits.memory_mib,
        workers: int = 0,
        packages: str = "",
    ) -> None:
        self.all_or_nothing = all_or_nothing
        self.columns = (column,) if column else COLUMNS
        limits = SandboxLimits(case_s, program_s, memory_mib)
        allowed = tuple(packages.replace(",", " ").split())
        require_jail(allowed)
        self.open_jail = partial(Jail, limits, packages=allowed)
        # The ranks of a machine share its processors.
        processors = max(1, usable_processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.workers = workers or min(_MOST_WORKERS, processors)

    def check(self, columns: Collection[str]) -> None:
        """Raise DataError if the data have no column of tests."""
        if {*self.columns}.isdisjoint(columns):
            raise DataError(
                f"reward code_tests reads the column {' or '.join(self.columns)}, which the data "
                f"do not have; they have: {', '.join(sorted(columns)) or 'no columns'}",
                advice="Name it with $reward code_tests:column=NAME",
            )

    def __call__(
        self,
        completions: Sequence[Any],
        log_metric: LogMetric = None,
        log_extra: Callable[[str, Iterable[Any]], None] | None = None,
        **columns: Any,
    ) -> list[Any]:
        """One score per completion; None without tests; ``CallError`` if it could not be scored."""
        programs = [program_in(text_of(completion)) for completion in completions]
        results = self._run(programs, columns)
        known = [result if isinstance(result, ProgramScore) else None for result in results]
        scores = [score for score in known if score]
        if log_metric is not None and scores:
            for name, value in code_metrics(scores).items():
                log_metric(name, value)
        if log_extra is not None:
            log_extra("code_error", [score and score.message for score in known])
            passed = [score and f"{score.passed}/{score.total}" for score in known]
            log_extra("code_passed", passed)
        values = list[Any](results)
        for n, score in enumerate(known):
            if score:
                share = score.passed / score.total
                values[n] = float(share == 1) if self.all_or_nothing else share
        return values

    def _run(
        self, programs: Sequence[str], columns: dict[str, Any]
    ) -> list[ProgramScore | CallError | None]:
        """Score each row by its tests."""
        column = next((name for name in self.columns if name in columns), self.columns[0])
        names = (column, "entry_point", "test_setup_code", "test_imports")
        cells = [columns.get(name) or [None] * len(programs) for name in names]
        jails = _Jails(self.open_jail)
        threads = ThreadPoolExecutor(max(1, min(self.workers, len(programs))))
        try:
            return list(threads.map(jails.score, programs, *cells))
        finally:
            for jail in jails.opened:  # whoever waits for one gets a SandboxError
                jail.end()
            threads.shutdown(cancel_futures=True)
            for jail in jails.opened:
                jail.close()


code_tests = CodeTests  # ``CodeTests`` under the name that ``--reward`` has for it


class _Jails:
    """One jail for each thread, opened at its first program and after one that failed."""

    def __init__(self, open_jail: Callable[[], Jail]) -> None:
        self.open = open_jail
        self.opened = list[Jail]()
        self.own = threading.local()

    def score(
        self, program: str, cell: Any, entry: Any, setup: Any, imports: Any
    ) -> ProgramScore | CallError | None:
        try:
            tests = read_tests(cell, entry=entry, setup=setup, imports=imports)
            if tests is None:
                return None
            if not program.strip():  # nothing printed would pass where nothing is expected
                failures = ("error",) * len(tests.cases)
                return ProgramScore(0, len(failures), failures, "there is no program")
            if getattr(self.own, "jail", None) is None:
                self.own.jail = self.open()
                self.opened.append(self.own.jail)
            tests = tests.evaluated(self.own.jail.calls)
            return score_results(_run_program(self.own.jail, program, tests), tests)
        except SandboxError as error:
            self.own.jail = None
            return CallError("exception", f"the sandbox failed: {error}", "sandbox")
        except (BadTest, NotPlain) as error:  # NotPlain: an expected value such as ...
            message = f"its tests cannot be used: {error}"
            return CallError("exception", message, message)


def _run_program(jail: Jail, program: str, tests: ProgramTests) -> list[CaseResult]:
    requests = [case.request for case in tests.cases]
    if tests.cases[0].is_script:
        return jail.script(program, requests)
    cases = [[request] for request in requests]
    results = jail.calls(program, cases, setup=tests.setup, entry=tests.entry)
    if tests.setup and not any(result.status == "value" for result in results):
        # A setup that fails without any program is no program's fault; a NameError may be.
        (alone,) = jail.calls("", [()], setup=tests.setup)
        if alone.status != "value" and not alone.message.startswith("NameError"):
            problem = visible(alone.message)
            raise BadTest(f"its setup (test_imports, test_setup_code) fails: {problem}")
    return results


def program_in(text: str) -> str:
    """Extract the program of a completion: the last Python block, else the last block, else the
    whole text."""
    blocks = list[tuple[str, list[str]]]()  # language and lines; an open one goes to the end
    opened = None
    for line in text.splitlines():
        fence = _FENCE.fullmatch(line)
        if opened is None:
            if fence:
                opened = fence
                words = str(fence["rest"]).lower().split()
                blocks.append((words[0] if words else "", []))
        elif fence and not fence["rest"].strip() and fence["mark"].startswith(opened["mark"]):
            opened = None
        else:  # what the block is indented or quoted by is not part of the program
            prefix = os.path.commonprefix([opened["prefix"], line])  # noqa: RUF071
            blocks[-1][1].append(line.removeprefix(prefix))
    python = [lines for language, lines in blocks if language in _PYTHON]
    python = python or [lines for _, lines in blocks]
    return ("\n".join(python[-1]) if python else text).lstrip("\ufeff")


def score_results(results: Sequence[CaseResult], tests: ProgramTests) -> ProgramScore:
    """Compare the result of each case with its expected output; only here do both exist."""
    failures = list[str]()
    first = ""
    for number, (case, result) in enumerate(zip(tests.cases, results, strict=True), start=1):
        if case.passes(result):
            continue
        message = result.message
        if result.status == "value":
            try:
                message = f"gave {result.value!r:.200}"
            except ValueError:  # an int of more digits than Python writes
                message = "gave a very large number"
        failures.append("wrong" if result.status == "value" else result.status)
        first = first or f"case {number}: {visible(message)}"
    return ProgramScore(len(results) - len(failures), len(results), tuple(failures), first)


def code_metrics(scores: Sequence[ProgramScore]) -> dict[str, float]:
    """Shares of programs that passed, raised or timed out."""
    shares = {"code_passed_frac": sum(not score.failures for score in scores) / len(scores)}
    for kind in ("error", "timeout"):
        count = sum(kind in score.failures for score in scores)
        shares[f"code_{kind}_frac"] = count / len(scores)
    return shares
