"""Rewards for code: what a model wrote is run in a jail, and what it gives is compared outside."""

from __future__ import annotations

import os
import queue
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gruppo.rewards.code_asserts import BadTest
from gruppo.rewards.code_cases import Case, Tests, tests_of
from gruppo.rewards.jail import Jail, JailError, Limits, Said, require_jail
from gruppo.rewards.text import text_of
from gruppo.timeouts import Unanswered
from gruppo.types import DataError

COLUMNS = ("tests", "test_list", "input_output")
"""Where tests are looked for, in this order, unless ``column`` says where."""
_FENCE = re.compile(r"(?P<prefix>[ \t>]*)(?P<mark>`{3,}|~{3,})")
_PYTHON = {"python", "py", "python3", "{python}", "{.python}"}
_MOST_WORKERS = 16


@dataclass(frozen=True)
class Verdict:
    """What became of one program."""

    passed: int
    of: int
    kinds: tuple[str, ...] = ()
    """Of the cases that failed: error, timeout, not_run, wrong, no_program."""
    why: str = ""
    """Of the first case that failed; empty where all passed."""

    @property
    def share(self) -> float:
        return self.passed / self.of


class CodeTests:
    """The share of a row's tests that the program in a completion passes, 0 to 1. In TRL's calling convention.

    The program is the last block of the completion that is fenced as Python; without one the last fenced block, closed
    or not; without a fence the whole text. It runs in a jail (``gruppo.rewards.jail``) and hands out plain data; what
    is expected never enters the jail, so no exit code, print or ``__eq__`` can pass for a right answer.

    ``all_or_nothing``: 1 where every test passes, else 0. ``column``: where the tests are. ``case_s``, ``program_s``,
    ``memory_mib``: see ``jail.Limits``. ``workers``: programs that run at once; 0: as many as there are processors, up
    to 16. A row without tests is not scored; one whose tests cannot be judged from outside is a failure that says why.
    What a policy can gain: tests that stand in the prompt can be answered from a table.
    """

    __name__ = "code_tests"
    timeout_s = None
    """Each program has its own limits."""

    def __init__(self, *, all_or_nothing: bool, column: str, limits: Limits, workers: int) -> None:
        self.all_or_nothing, self.column, self.limits = all_or_nothing, column, limits
        self.workers = workers or min(_MOST_WORKERS, _processors())

    def check(self, columns: Collection[str]) -> None:
        """Refuse data that have no column of tests."""
        if self.column in columns or (not self.column and any(name in columns for name in COLUMNS)):
            return
        wanted = self.column or " or ".join(COLUMNS)
        raise DataError(
            f"reward code_tests reads the column {wanted}, which the data do not have; they have: "
            f"{', '.join(sorted(columns)) or 'no columns'}. Name it with --reward code_tests:column=NAME."
        )

    def __call__(
        self,
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, Iterable[Any]], None] | None = None,
        **columns: Any,
    ) -> list[Any]:
        """One number for each completion; None without tests; ``Unanswered`` where it could not be found out."""
        tests = self._tests(len(completions), columns)
        programs = [program_in(text_of(completion)) for completion in completions]
        verdicts = self._verdicts(programs, tests)
        scored = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
        if log_metric is not None and scored:
            for name, value in code_metrics(scored).items():
                log_metric(name, value)
        if log_extra is not None:
            log_extra("code_error", [v.why if isinstance(v, Verdict) else None for v in verdicts])
            log_extra("code_passed", [f"{v.passed}/{v.of}" if isinstance(v, Verdict) else None for v in verdicts])
        return [self._score(verdict) for verdict in verdicts]

    def _score(self, verdict: Verdict | Unanswered | None) -> Any:
        if not isinstance(verdict, Verdict):
            return verdict
        return float(verdict.passed == verdict.of) if self.all_or_nothing else verdict.share

    def _tests(self, size: int, columns: dict[str, Any]) -> list[Tests | BadTest | None]:
        """Of each row; rows of a group hold the same cell, which is read once."""
        name = self.column or next((name for name in COLUMNS if name in columns), COLUMNS[0])
        cells = columns.get(name) or [None] * size
        entries, setups = (columns.get(key) or [None] * size for key in ("entry_point", "test_setup_code"))
        imports = columns.get("test_imports") or [None] * size
        known: dict[Any, Tests | BadTest | None] = {}
        found = []
        for cell, entry, setup, lines in zip(cells, entries, setups, imports, strict=True):
            key = (id(cell), *(each if isinstance(each, str) else id(each) for each in (entry, setup, lines)))
            if key not in known:
                known[key] = _read_tests(cell, entry, setup, lines)
            found.append(known[key])
        return found

    def _verdicts(
        self, programs: Sequence[str], tests: Sequence[Tests | BadTest | None]
    ) -> list[Verdict | Unanswered | None]:
        """Of each row. What is written twice for one task, as by a policy that is sure, is run once."""
        keys = [(program, id(own)) for program, own in zip(programs, tests, strict=True)]
        once = dict(zip(keys, zip(programs, tests, strict=True), strict=True))
        jails = _Jails(self.limits)
        pool = ThreadPoolExecutor(max(1, min(self.workers, len(once))), thread_name_prefix="gruppo-code")
        try:
            found = dict(zip(once, pool.map(lambda task: jails.verdict(*task), once.values()), strict=True))
            return [found[key] for key in keys]
        finally:
            jails.end()
            pool.shutdown(cancel_futures=True)
            jails.close()


class _Jails:
    """Interpreters that wait for programs: as many as are used at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._idle, self._all = limits, queue.SimpleQueue[Jail](), list[Jail]()
        self._problems = dict[str, str]()
        """Of setups, by their text; empty where there is none."""

    def verdict(self, program: str, tests: Tests | BadTest | None) -> Verdict | Unanswered | None:
        if tests is None:
            return None
        if isinstance(tests, BadTest):
            return Unanswered("exception", str(tests), str(tests))
        if not program.strip():
            return Verdict(0, len(tests.cases), ("no_program",) * len(tests.cases), "there is no program")
        try:
            jail = self._taken()
            try:
                said = _asked(jail, program, tests)
                problem = "" if any(each.status == "value" for each in said) else self._problem(jail, tests.setup)
            except JailError:
                jail.close()
                raise
        except JailError as error:
            return Unanswered("exception", f"the jail failed: {error}", "jail")
        self._idle.put(jail)
        if problem:
            message = f"its tests cannot be used: its setup (test_imports, test_setup_code) fails: {problem}"
            return Unanswered("exception", message, message)
        return judged(said, tests)

    def end(self) -> None:
        """Stop all that runs."""
        for jail in self._all:
            jail.end()

    def close(self) -> None:
        for jail in self._all:
            jail.close()

    def _problem(self, jail: Jail, setup: str) -> str:
        """Why a setup fails without any program, whose fault it is not then; a NameError may be the program's."""
        if setup and setup not in self._problems:
            (alone,) = jail.calls("", [()], setup=setup)
            is_its_own = alone.status != "value" and not alone.why.startswith("NameError")
            self._problems[setup] = _printable(alone.why) if is_its_own else ""
        return self._problems.get(setup, "")

    def _taken(self) -> Jail:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            jail = Jail(self.limits)
            self._all.append(jail)
            return jail


def code_tests(
    *,
    all_or_nothing: bool = False,
    column: str = "",
    case_s: float = Limits.case_s,
    program_s: float = Limits.program_s,
    memory_mib: int = Limits.memory_mib,
    workers: int = 0,
) -> CodeTests:
    """``CodeTests`` with these options. GruppoError where no jail holds, before anything is run."""
    limits = Limits(case_s, program_s, memory_mib)
    if workers < 0:
        raise ValueError(f"workers={workers}; it needs 0, for as many as there are processors, or more")
    require_jail()
    return CodeTests(all_or_nothing=all_or_nothing, column=column, limits=limits, workers=workers)


def program_in(text: str) -> str:
    """The program in a completion: the last Python block, else the last block, else the whole text."""
    blocks = list(_blocks(text))
    ours = [body for tag, body in blocks if tag in _PYTHON] or [body for _, body in blocks]
    return (ours[-1] if ours else text).lstrip("\ufeff")


@dataclass(frozen=True)
class _Fence:
    """A line that opens or closes a block."""

    prefix: str
    """Of its line: the block is indented or quoted by it."""
    mark: str
    tag: str


def _fence_of(line: str) -> _Fence | None:
    found = _FENCE.match(line)
    rest = line[found.end() :] if found is not None else ""
    if found is None or "`" in rest:
        return None
    return _Fence(found["prefix"], found["mark"], next(iter(rest.split()), "").lower())


def _without(prefix: str, line: str) -> str:
    """As much of the prefix as the line begins with is no part of the program."""
    shared = next(
        (n for n, (a, b) in enumerate(zip(prefix, line, strict=False)) if a != b), min(len(prefix), len(line))
    )
    return line[shared:]


def _blocks(text: str) -> Iterable[tuple[str, str]]:
    """Tag and body of each fenced block; one that is not closed goes to the end."""
    opened, body = None, list[str]()
    for line in text.splitlines():
        fence = _fence_of(line)
        if opened is None:
            opened, body = fence, []
        elif fence is not None and not fence.tag and fence.mark.startswith(opened.mark):
            yield opened.tag, "\n".join(body)
            opened = None
        else:
            body.append(_without(opened.prefix, line))
    if opened is not None:
        yield opened.tag, "\n".join(body)


def judged(said: Sequence[Said], tests: Tests) -> Verdict:
    """Each case's answer against what was expected; this is the only place where both are."""
    found: list[tuple[str, str]] = []
    for case, answer in zip(tests.cases, said, strict=True):
        if answer.status != "value":
            found.append((answer.status, answer.why))
        else:
            found.append(("", "") if _passes(case, answer.value) else ("wrong", f"gave {_shown(answer.value)}"))
    kinds = tuple(kind for kind, _ in found if kind)
    first = next((f"case {n}: {_printable(why)}" for n, (kind, why) in enumerate(found, start=1) if kind), "")
    return Verdict(len(found) - len(kinds), len(found), kinds, first)


def _passes(case: Case, value: Any) -> bool:
    """What cannot be compared is not what was expected: a program that makes it so is wrong, and not unscored."""
    try:
        return case.passes(value)
    except Exception:
        return False


def _asked(jail: Jail, program: str, tests: Tests) -> list[Said]:
    asked, room = [case.asked for case in tests.cases], [tests.room] * len(tests.cases)
    if tests.is_script:
        return jail.script(program, asked, caps=room)
    return jail.calls(program, asked, setup=tests.setup, entry=tests.entry, caps=room)


def _read_tests(cell: Any, entry: Any, setup: Any, imports: Any) -> Tests | BadTest | None:
    try:
        lines = [*_lines("test_imports", imports), *_lines("test_setup_code", setup)]
        return tests_of(cell, entry=entry, setup="\n".join(filter(None, lines)))
    except BadTest as error:
        return BadTest(f"its tests cannot be used: {error}")


def _lines(name: str, value: Any) -> list[str]:
    """Of a column: text, or a list of it."""
    if value is None or isinstance(value, str):
        return [value or ""]
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        return list(value)
    raise BadTest(f"{name} is {value!r:.60}; it needs text, or a list of lines")


def code_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Shares of the programs that were run."""
    first = Counter(verdict.kinds[0] if verdict.kinds else "passed" for verdict in verdicts)
    any_of = Counter(kind for verdict in verdicts for kind in set(verdict.kinds))
    shares = {
        "code_passed_frac": first["passed"],
        "code_error_frac": any_of["error"],
        "code_timeout_frac": any_of["timeout"],
        "code_no_program_frac": any_of["no_program"],
    }
    return {name: count / len(verdicts) for name, count in shares.items()}


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError:  # an int of more digits than Python writes
        return "a very large number"


def _processors() -> int:
    """Of this process, shared with the other ranks of this machine."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
