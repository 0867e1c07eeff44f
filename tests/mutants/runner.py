"""Tests against a changed package, each job in a process forked from one that has imported what is
heavy."""

from __future__ import annotations

import compileall
import faulthandler
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.generated import Generated
from tests.mutants.mutant import SOURCE, TESTS, Mutant

PRELOADED = (
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "hypothesis",
    "jaxtyping",
    "matplotlib.pyplot",
    "peft",
    "rich.console",
    "safetensors.torch",
    "torch",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
TIMEOUT_S = 180.0
ATTEMPTS = 2
"""A process that gives no answer says nothing of a test: its job is run again."""
BROKEN = (
    "NameError",
    "UnboundLocalError",
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "TypeError",
)
"""What code raises that would never have run: a mutant that ends so is no silent bug, and its test
proves nothing."""


@dataclass(frozen=True)
class Report:
    """What pytest said of one phase (setup, call, teardown) of one test."""

    test: str
    phase: str
    outcome: str
    message: str = ""

    @property
    def is_broken(self) -> bool:
        return self.message.partition(":")[0] in BROKEN


@dataclass(frozen=True)
class Outcome:
    """The reports of one job."""

    reports: tuple[Report, ...] = ()
    problem: str = ""
    """Why the reports are not to be trusted: another package was tested, or the process died."""
    seconds: float = 0.0
    is_silent: bool = False
    """Whether the process gave no answer at all."""

    @property
    def has_failure(self) -> bool:
        """Whether any test failed, or the process died or hung: a generated mutant is then
        caught."""
        return bool(self.problem) or any(report.outcome == "failed" for report in self.reports)

    def passed(self, test: str) -> bool:
        """Whether the named test ran and passed, in each of its forms."""
        own = self._reports_of(test)
        return not self.problem and bool(own) and all(r.outcome == "passed" for r in own)

    def is_caught_by(self, test: str) -> bool:
        """Whether the named test failed, inside its own code and not by code that cannot run."""
        failed = [r for r in self._reports_of(test) if (r.phase, r.outcome) == ("call", "failed")]
        return not self.problem and any(not report.is_broken for report in failed)

    def reason(self, test: str) -> str:
        """Why the named test says nothing, or what it said."""
        messages = [report.message for report in self._reports_of(test) if report.message]
        ran = "the test passed" if self._reports_of(test) else "the test did not run"
        return self.problem or (messages[0] if messages else ran)

    def _reports_of(self, test: str) -> list[Report]:
        return [r for r in self.reports if test in (r.test, r.test.partition("[")[0])]


@dataclass(frozen=True)
class Job:
    """Tests to run, and the mutant that they run on; without one, on the code as it is."""

    tests: tuple[str, ...]
    mutant: Mutant | Generated | None = None


def run_all(jobs: Sequence[Job], cores: int, on_done: Callable[[Job, Outcome], None]) -> None:
    """All jobs, ``cores`` at a time, on one copy of the source taken now; ``on_done`` hears of each
    as it ends."""
    assert not any(name.partition(".")[0] == "gruppo" for name in sys.modules), (
        "a fork would keep the healthy package"
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="gruppo-mutants-") as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(source, quiet=2)  # once, and not again in each copy
        waiting = [(place, 1, job) for place, job in enumerate(jobs)][::-1]  # the first is the last
        running: dict[Any, _Running] = {}
        while waiting or running:
            while waiting and len(running) < cores:
                place, attempt, job = waiting.pop()
                started = _start(job, source, Path(scratch) / f"{place}-{attempt}", place, attempt)
                running[started.process.sentinel] = started
            connection.wait(list(running), timeout=1.0)
            for sentinel, one in list(running.items()):
                if one.process.is_alive() and one.age <= TIMEOUT_S:
                    continue
                del running[sentinel]
                reported = one.end()
                is_named = not isinstance(one.job.mutant, Generated)  # others may well hang
                if reported.is_silent and is_named and one.attempt < ATTEMPTS:
                    print(f"once more ({reported.problem}): {one.job.tests[0]}", flush=True)
                    waiting.append((one.place, one.attempt + 1, one.job))
                else:
                    on_done(one.job, reported)


@dataclass
class _Running:
    job: Job
    process: BaseProcess
    folder: Path
    place: int = 0
    attempt: int = 1
    began: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    def end(self) -> Outcome:
        """Collect the answer of a process that has ended, or end it."""
        is_late = self.process.is_alive()
        if is_late:
            self.process.kill()
        self.process.join()
        try:
            answer = json.loads((self.folder / "answer.json").read_text())
            reports = tuple(Report(**report) for report in answer["reports"])
            reported = Outcome(reports, answer["problem"], self.age)
        except (OSError, ValueError):
            why = (
                f"no answer within {TIMEOUT_S:g} s"
                if is_late
                else f"exit code {self.process.exitcode}, no answer"
            )
            reported = Outcome(problem=why + self._stood_at(), seconds=self.age, is_silent=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        return reported

    def _stood_at(self) -> str:
        """The innermost lines of a process that hung, of its last thread: where to look."""
        try:
            lines = [
                line.strip()
                for line in (self.folder / "hung.txt").read_text().splitlines()
                if "File" in line
            ]
        except OSError:
            return ""
        return f", at {'; '.join(lines[:3])}" if lines else ""


def _start(job: Job, source: Path, folder: Path, place: int = 0, attempt: int = 1) -> _Running:
    """Begin a job on its own copy of the package. On healthy code all tests run, on a mutant until
    one fails."""
    shutil.copytree(source, folder / "src")
    if job.mutant is not None:
        changed = folder / "src/gruppo" / job.mutant.file
        changed.write_text(job.mutant.inject(source), encoding="utf-8")
        for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
            compiled.unlink()
    options = ["-q"] if job.mutant is None else ["-q", "-x"]
    if isinstance(job.mutant, Generated):
        options += ["-m", "not slow"]
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(job.tests, options, folder)
    )
    process.start()
    return _Running(job, process, folder, place, attempt)


def _child(tests: Sequence[str], options: Sequence[str], folder: Path) -> None:
    """Run tests with the package of ``folder`` first on every path: this process's, pytest's, and
    its children's."""
    temporary = folder / "tmp"
    temporary.mkdir()
    package, root = str(folder / "src"), str(TESTS.parent)
    os.environ |= {"PYTHONPATH": os.pathsep.join([package, root]), "TMPDIR": str(temporary)}
    tempfile.tempdir = None
    sys.path.insert(0, package)
    os.chdir(root)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(TIMEOUT_S - 5, file=(folder / "hung.txt").open("w"))
    recorder = _Recorder(tests)
    files = dict.fromkeys(str(TESTS / test.partition("::")[0]) for test in tests)
    options = [
        *options,
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={package} {root}",
        "--basetemp",
        f"{temporary}/t",  # tests trust the runs below TMPDIR
    ]
    code = pytest.main([*options, *files], plugins=[recorder])
    found = Path(getattr(sys.modules.get("gruppo"), "__file__", None) or "nowhere")
    problem = recorder.problem or ("" if code in (0, 1) else f"pytest ended with {code!r}")
    if not found.is_relative_to(package):
        problem = problem or f"the package that was tested is {found}"
    reports = [vars(report) for report in recorder.reports]
    (folder / "answer.json").write_text(json.dumps({"reports": reports, "problem": problem}))


class _Recorder:
    """A pytest plugin that selects tests and keeps what happened.

    Named on pytest's command line, one test that is gone would keep all others from running.
    """

    def __init__(self, tests: Sequence[str]) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.reports: list[Report] = []
        self.problem = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the tests that are named, by a form, a function or a file, in their order."""
        places = {}
        for item in items:
            name = item.nodeid.removeprefix("tests/")
            names = (name, name.partition("[")[0], name.partition("::")[0])
            places[item] = min((self.order[n] for n in names if n in self.order), default=-1)
        items[:] = sorted((item for item in items if places[item] >= 0), key=places.__getitem__)

    def pytest_runtest_logreport(self, report: Any) -> None:
        message = "" if report.outcome == "passed" else _last_line(report)
        if report.when == "call" or report.outcome != "passed":
            self.reports.append(
                Report(report.nodeid.removeprefix("tests/"), report.when, report.outcome, message)
            )

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.problem = f"{report.nodeid} could not be collected: {_last_line(report)}"


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().partition("\n")[0][:200]
