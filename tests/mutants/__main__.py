"""``python -m tests.mutants``: inject bugs and show which test catches each.

All mutants of ``bugs.txt``, each of which has to be caught by the test that it names; then a sample
of generated ones, of which at most 15% may survive and each survivor is explained in
``survivors.txt``. The sample is seeded by the commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.generated import Generated, sample
from tests.mutants.mutant import TESTS, Mutant
from tests.mutants.runner import Job, Outcome, run_all

SURVIVORS = Path(__file__).parent / "survivors.txt"
MOST_SURVIVORS = 0.15
"""Share of the generated mutants."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every named bug is caught and few generated ones survive, otherwise 1."""
    options = _parser().parse_args(arguments)
    chosen = [m for m in MUTANTS if options.bug in (None, m.bug) and options.k in _words(m)]
    is_filtered = options.bug is not None or options.k
    seed = options.seed or _commit()
    generated = [] if is_filtered else sample(options.generated, seed)
    if not chosen and not generated:
        print("no mutant has that text and number; leave out -k or --bug to see them all.")
        return 1
    began = time.monotonic()
    print(f"{len(chosen)} named mutants, {len(generated)} generated (--seed {seed}).", flush=True)
    report = Report()
    fit = [mutant for mutant in chosen if not report.refuses(mutant)]
    jobs = [*healthy(fit), *(Job((m.test,), m) for m in fit), *(Job(m.tests, m) for m in generated)]
    run_all(jobs, options.cores, report.add)
    return 0 if report.close(time.monotonic() - began) else 1


def healthy(mutants: Sequence[Mutant]) -> list[Job]:
    """Return the named tests on the code as it is, file by file."""
    named = sorted({mutant.test for mutant in mutants})
    files = dict.fromkeys(test.partition("::")[0] for test in named)
    return [Job(tuple(test for test in named if test.startswith(f"{file}::"))) for file in files]


class Report:
    """What is printed as jobs end, and the verdict."""

    def __init__(self) -> None:
        self.named = 0
        self.survived: list[str] = []
        self.not_green: list[str] = []
        self.generated = 0
        self.alive: list[str] = []

    def refuses(self, mutant: Mutant) -> bool:
        """Whether a mutant no longer fits the code; it is then reported as a survivor."""
        complaints = mutant.complaints()
        if complaints:
            self.named += 1
            self.survived.append(f"{mutant.what}: {complaints[0]}")
        return bool(complaints)

    def add(self, job: Job, outcome: Outcome) -> None:
        if job.mutant is None:
            self.not_green += [
                f"{test}: {outcome.reason(test)}" for test in job.tests if not outcome.passed(test)
            ]
        elif isinstance(job.mutant, Mutant):
            self._add_named(job.mutant, outcome)
        else:
            self._add_generated(job.mutant, outcome)

    def _add_named(self, mutant: Mutant, outcome: Outcome) -> None:
        self.named += 1
        is_caught = outcome.is_caught_by(mutant.test)
        if not is_caught:
            self.survived.append(f"{mutant.what} ({mutant.file}): {outcome.reason(mutant.test)}")
        verdict = "caught" if is_caught else "SURVIVED"
        number = str(mutant.bug or "-")
        print(f"{verdict:8}  {number:>2}  {mutant.what}  {mutant.file}  {mutant.test}", flush=True)

    def _add_generated(self, mutant: Generated, outcome: Outcome) -> None:
        self.generated += 1
        if not outcome.has_failure:
            self.alive.append(mutant.name)
        verdict = "caught" if outcome.has_failure else "alive"
        print(f"{verdict:8}   *  {mutant.name} (line {mutant.line})", flush=True)

    def close(self, seconds: float) -> bool:
        """Print what is wrong and one line of sums; return whether all is well."""
        for line in self.survived:
            print(f"SURVIVED: {line}")
        for line in self.not_green:
            print(f"NOT GREEN on the code as it is: {line}")
        explained = explanations()
        unexplained = [name for name in self.alive if name not in explained]
        for name in unexplained:
            print(f"ALIVE, and not in {SURVIVORS.name}: {name}")
        print(
            f"{self.named - len(self.survived)} of {self.named} named mutants caught, "
            f"{self.generated - len(self.alive)} of {self.generated} generated "
            f"({len(unexplained)} unexplained), in {seconds:.0f} s"
        )
        is_few = len(unexplained) <= MOST_SURVIVORS * self.generated
        return not self.survived and not self.not_green and is_few


def explanations() -> dict[str, str]:
    """Read why a generated mutant cannot be caught, by its name: ``NAME  # REASON`` a line."""
    lines = SURVIVORS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("  # ", 1) for line in lines if "  # " in line)
    return {name.strip(): reason for name, reason in pairs}


def _words(mutant: Mutant) -> str:
    return f"{mutant.what} {mutant.file} {mutant.test}".lower()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=TESTS).stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-k", default="", type=str.lower, help="named ones whose text has this")
    parser.add_argument("--bug", type=int, help="named ones of this number of the list")
    parser.add_argument("--generated", type=int, default=100, help="how many are generated")
    parser.add_argument("--seed", default="", help="of the sample; default: the commit")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
