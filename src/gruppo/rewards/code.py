"""Rewards for code: programs of completions run in a jail, and their output is compared outside."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gruppo.platforms import usable_processors
from gruppo.rewards.code_cases import BadTest, ProgramTests, read_tests
from gruppo.rewards.sandbox.jail import choose_sandbox
from gruppo.rewards.sandbox.plain_data import NotPlain
from gruppo.rewards.sandbox.protocol import CaseResult, Sandbox, SandboxError, SandboxLimits
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
LogExtra = Callable[[str, Iterable[Any]], None] | None


@dataclass(frozen=True)
class ProgramScore:
    """Passed cases of one program."""

    passed: int
    total: int
    failures: tuple[str, ...] = ()
    """Of each case that failed: error, timeout, not_run, wrong, no_program."""
    message: str = ""
    """Why the first case failed; empty if all passed."""


class CodeTests:
    """Share of a row's tests that the program in a completion passes, 0 to 1. In TRL's calling
    convention.

    The program is the last block of the completion that is fenced as Python; without one the last
    fenced block, closed or not; without a fence the whole text. It runs in a sandbox
    (``gruppo.rewards.sandbox``) and returns plain data; what is expected never enters its process,
    so no exit code, print or ``__eq__`` can pass for a right answer.

    ``all_or_nothing``: 1 where every test passes, else 0. ``column``: where the tests are.
    ``case_s``, ``program_s`` and ``memory_mib``: see ``SandboxLimits``. ``workers``: programs that
    run at once; 0: one for each processor, at most 16. ``sandbox``: where programs run, see
    ``choose_sandbox``; empty: in gruppo's jail. ``packages``: names, separated by commas, that
    programs may import besides the standard library. A row without tests is not scored; one whose
    tests cannot be judged from outside is a failure with the reason. Weakness: tests that stand in
    the prompt can be answered from a table. Raises GruppoError where no program runs, or the jail
    does not hold.
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
        sandbox: str | Callable[[SandboxLimits], Sandbox] = "",
        packages: str = "",
    ) -> None:
        self.all_or_nothing = all_or_nothing
        self.column = column
        self.limits = SandboxLimits(case_s, program_s, memory_mib)
        self.open_sandbox = choose_sandbox(sandbox, self.limits, packages.replace(",", " ").split())
        # The ranks of a machine share its processors.
        processors = max(1, usable_processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.workers = workers or min(_MOST_WORKERS, processors)

    def check(self, columns: Collection[str]) -> None:
        """Raise DataError where the data have no column of tests."""
        required = [self.column] if self.column else COLUMNS
        if not {*columns} & {*required}:
            raise DataError(
                f"reward code_tests reads the column {' or '.join(required)}, which the data do "
                f"not have; they have: {', '.join(sorted(columns)) or 'no columns'}",
                advice="Name it with $reward code_tests:column=NAME",
            )

    def __call__(
        self,
        completions: Sequence[Any],
        log_metric: LogMetric = None,
        log_extra: LogExtra = None,
        **columns: Any,
    ) -> list[Any]:
        """One score per completion; None without tests; ``CallError`` where it could not be
        scored."""
        programs = [program_in(text_of(completion)) for completion in completions]
        results = self._run(programs, columns)
        scores = [result for result in results if isinstance(result, ProgramScore)]
        if log_metric is not None and scores:
            for name, value in code_metrics(scores).items():
                log_metric(name, value)
        if log_extra is not None:
            known = [result if isinstance(result, ProgramScore) else None for result in results]
            log_extra("code_error", [score and score.message for score in known])
            passed = [score and f"{score.passed}/{score.total}" for score in known]
            log_extra("code_passed", passed)
        return [
            self._share(result) if isinstance(result, ProgramScore) else result
            for result in results
        ]

    def _share(self, score: ProgramScore) -> float:
        if self.all_or_nothing:
            return float(score.passed == score.total)
        return score.passed / score.total

    def _run(
        self, programs: Sequence[str], columns: dict[str, Any]
    ) -> list[ProgramScore | CallError | None]:
        """Score each row by its tests. A program that occurs several times for one task is run
        once."""
        column = self.column or next((name for name in COLUMNS if name in columns), COLUMNS[0])
        names = (column, "entry_point", "test_setup_code", "test_imports")
        rows = [*zip(*(columns.get(name) or [None] * len(programs) for name in names), strict=True)]
        # rows of a group hold the same cells
        keys = [
            (program, *(cell if isinstance(cell, str) else id(cell) for cell in row))
            for program, row in zip(programs, rows, strict=True)
        ]
        tasks = dict(zip(keys, rows, strict=True))
        workers = max(1, min(self.workers, len(tasks)))
        with _SandboxPool(self.open_sandbox, workers) as pool:
            scores = pool.map((str(program) for program, *_ in tasks), tasks.values())
            found = dict(zip(tasks, scores, strict=True))
        return [found[key] for key in keys]


code_tests = CodeTests  # ``CodeTests`` under the name that ``--reward`` has for it


class _SandboxPool:
    """Sandboxes, one for each thread, opened at its first program and after one that failed."""

    def __init__(self, open_sandbox: Callable[[], Sandbox], workers: int) -> None:
        self.open = open_sandbox
        self.opened = list[Sandbox]()
        self.own = threading.local()
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="gruppo-code")

    def __enter__(self) -> _SandboxPool:
        return self

    def __exit__(self, *_: object) -> None:
        for sandbox in self.opened:  # whoever waits for one gets a SandboxError
            sandbox.end()
        self.threads.shutdown(cancel_futures=True)
        for sandbox in self.opened:
            sandbox.close()

    def map(self, programs: Iterable[str], rows: Iterable[Any]) -> Iterable[Any]:
        return self.threads.map(self.score, programs, rows)

    def score(self, program: str, cells: Sequence[Any]) -> ProgramScore | CallError | None:
        cell, entry, setup, imports = cells
        try:
            tests = read_tests(cell, entry=entry, setup=setup, imports=imports)
            if tests is None:
                return None
            if not program.strip():
                count = len(tests.cases)
                return ProgramScore(0, count, ("no_program",) * count, "there is no program")
            if getattr(self.own, "sandbox", None) is None:
                self.own.sandbox = self.open()
                self.opened.append(self.own.sandbox)
            tests = tests.evaluated(self.own.sandbox.calls)
            return score_results(_run_program(self.own.sandbox, program, tests), tests)
        except SandboxError as error:
            self.own.sandbox = None
            return CallError("exception", f"the sandbox failed: {error}", "sandbox")
        except (BadTest, NotPlain) as error:  # NotPlain: an expected value such as ...
            message = f"its tests cannot be used: {error}"
            return CallError("exception", message, message)


def _run_program(sandbox: Sandbox, program: str, tests: ProgramTests) -> list[CaseResult]:
    requests = [case.request for case in tests.cases]
    if tests.is_script:
        return sandbox.script(program, requests, room=tests.room)
    results = sandbox.calls(
        program,
        [[request] for request in requests],
        setup=tests.setup,
        entry=tests.entry,
        room=tests.room,
    )
    if tests.setup and not any(result.status == "value" for result in results):
        # A setup that fails without any program is no program's fault; a NameError may be.
        (alone,) = sandbox.calls("", [()], setup=tests.setup)
        if alone.status != "value" and not alone.message.startswith("NameError"):
            problem = _printable(alone.message)
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
        else:  # what the block is indented or quoted by is no part of the program
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
        is_value = result.status == "value"
        message = result.message
        if is_value:
            try:
                message = f"gave {result.value!r:.200}"
            except ValueError:  # an int of more digits than Python writes
                message = "gave a very large number"
        failures.append("wrong" if is_value else result.status)
        first = first or f"case {number}: {_printable(message)}"
    return ProgramScore(len(results) - len(failures), len(results), tuple(failures), first)


def code_metrics(scores: Sequence[ProgramScore]) -> dict[str, float]:
    """Shares of programs that passed, raised, timed out or were missing."""
    kinds = [{*score.failures} for score in scores]
    shares = {"code_passed_frac": sum(not failures for failures in kinds) / len(scores)}
    for kind in ("error", "timeout", "no_program"):
        shares[f"code_{kind}_frac"] = sum(kind in failures for failures in kinds) / len(scores)
    return shares


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
