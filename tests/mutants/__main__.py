"""``python -m tests.mutants``: inject every bug of the catalogue and show which test catches it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.runner import Job, Report, Told, run_all


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every mutant is caught, 1 where one survives or a named test is not green on the code as it is."""
    options = _parser().parse_args(arguments)
    mutants = [m for m in MUTANTS if options.bug in (None, m.bug) and options.k.lower() in _words(m)]
    mutants.sort(key=lambda mutant: (mutant.bug == 0, mutant.bug))
    if not mutants:
        print("no mutant has that text and number; leave out -k or --bug to see them all.")
        return 1
    listing, began = Listing(mutants), time.monotonic()
    print(f"{len(mutants)} mutants on {options.cores} cores; first their tests on the code as it is.", flush=True)
    fit = [mutant for mutant in mutants if not listing.refuses(mutant)]
    run_all(healthy(fit) + [Job((mutant.by,), mutant) for mutant in fit], options.cores, listing.add)
    is_good = listing.close(time.monotonic() - began)
    if options.json:
        text = json.dumps({"mutants": listing.rows, "not_green": listing.sick}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    return 0 if is_good else 1


def healthy(mutants: Sequence[Mutant]) -> list[Job]:
    """The named tests on the code as it is, file by file."""
    named = sorted({mutant.by for mutant in mutants})
    files = dict.fromkeys(test.partition("::")[0] for test in named)
    return [Job(tuple(test for test in named if test.startswith(f"{file}::"))) for file in files]


class Listing:
    """What is shown and kept, line by line as jobs end."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self.rows: list[dict[str, str | int | float]] = []
        self.sick: list[str] = []
        self._width = {name: max((len(getattr(m, name)) for m in mutants), default=0) for name in ("what", "file")}

    def refuses(self, mutant: Mutant) -> bool:
        """Whether a mutant no longer fits the code; it is then listed as one that survived."""
        complaints = mutant.complaints()
        if complaints:
            self.add(Job((mutant.by,), mutant), Told(problem=complaints[0]))
        return bool(complaints)

    def add(self, job: Job, told: Told) -> None:
        """Take down what became of a job."""
        if job.mutant is None:
            self.sick += [f"{test}: {why}" for test, why in not_green(job, told)]
            return
        row = row_of(job.mutant, told)
        self.rows.append(row)
        number = str(row["bug"] or "-").rjust(2)
        what, file = f"{row['what']:{self._width['what']}}", f"{row['file']:{self._width['file']}}"
        print(f"{row['verdict']:8}  {number}  {what}  {file}  {row['test']}", flush=True)

    def close(self, seconds: float) -> bool:
        """The reasons of those that survived, and one line of sums; whether all is well."""
        survived = [row for row in self.rows if row["verdict"] != "caught"]
        for row in survived:
            print(f"SURVIVED: {row['what']} ({row['file']}): {row['said']}")
        for line in self.sick:
            print(f"NOT GREEN on the code as it is: {line}")
        print(f"{len(self.rows) - len(survived)} of {len(self.rows)} mutants caught, in {seconds:.0f} s")
        return not survived and not self.sick


def row_of(mutant: Mutant, told: Told) -> dict[str, str | int | float]:
    """What is kept of a mutant."""
    failure = told.failed_in(mutant.by)
    others = (report.message for report in told.reports if report.outcome == "failed")
    return {
        "bug": mutant.bug,
        "what": mutant.what,
        "file": mutant.file,
        "test": mutant.by,
        "verdict": "SURVIVED" if failure is None else "caught",
        "said": failure.message if failure else told.problem or next(others, "every test passed"),
        "seconds": round(told.seconds, 1),
    }


def not_green(job: Job, told: Told) -> list[tuple[str, str]]:
    """Named tests that do not pass on the code as it is, and why: what they say of a mutant is worth nothing."""
    unknown = Report("", "", "", told.problem or "it did not run, or was skipped")
    return [(test, (told.failed_in(test) or unknown).message) for test in job.tests if not told.is_green(test)]


def _words(mutant: Mutant) -> str:
    return f"{mutant.what} {mutant.file} {mutant.by}".lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="only mutants whose words, file or test hold the text")
    parser.add_argument("--bug", type=int, metavar="N", help="only mutants of this silent bug")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list as JSON too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
