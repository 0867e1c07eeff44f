"""``python -m tests.mutants``: inject bugs of the catalogue and show which test catches each.

By default those whose source or test file has changed since they were last recorded as caught, and a sample of the
others that is seeded by the commit; ``--all`` runs every one, ``--record`` records those that are caught.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import SOURCE, TESTS, Mutant
from tests.mutants.runner import Job, Report, Told, run_all

RECORD = Path(__file__).parent / "caught.json"
"""Fingerprints of the mutants that were caught, by what is wrong."""
SAMPLE = 20
"""Unchanged mutants that run all the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every mutant is caught, 1 where one survives or a named test is not green on the code as it is."""
    options = _parser().parse_args(arguments)
    mutants = [
        m for m in MUTANTS if options.bug in (None, m.bug) and options.k.lower() in _words(m)
    ]
    mutants.sort(key=lambda mutant: (mutant.bug == 0, mutant.bug))
    if not mutants:
        print("no mutant has that text and number; leave out -k or --bug to see them all.")
        return 1
    if not (options.all or options.k or options.bug is not None):
        mutants = changed_and_sample(mutants)
    listing, began = Listing(mutants, records=options.record), time.monotonic()
    print(
        f"{len(mutants)} mutants on {options.cores} cores; first their tests on the code as it is.",
        flush=True,
    )
    fit = [mutant for mutant in mutants if not listing.refuses(mutant)]
    run_all(
        healthy(fit) + [Job((mutant.by,), mutant) for mutant in fit], options.cores, listing.add
    )
    is_good = listing.close(time.monotonic() - began)
    if options.json:
        text = json.dumps({"mutants": listing.rows, "not_green": listing.sick}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    return 0 if is_good else 1


def fingerprint(mutant: Mutant) -> str:
    """Hash of the mutant, and of the source and test files that it names."""
    digest = hashlib.sha256(repr(mutant).encode())
    for path in (SOURCE / "gruppo" / mutant.file, TESTS / mutant.by.partition("::")[0]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def recorded() -> dict[str, str]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def record(caught: dict[str, str]) -> None:
    """Add fingerprints to the record; mutants that no longer exist leave it."""
    names = {mutant.what for mutant in MUTANTS}
    kept = {what: value for what, value in (recorded() | caught).items() if what in names}
    RECORD.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", encoding="utf-8")


def changed_and_sample(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Mutants that are not recorded as they are now, and a sample of the others, seeded by the commit."""
    before = recorded()
    is_recorded = [
        mutant.complaints() == [] and before.get(mutant.what) == fingerprint(mutant)
        for mutant in mutants
    ]
    unchanged = [mutant for mutant, known in zip(mutants, is_recorded, strict=True) if known]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=TESTS
    ).stdout.strip()
    sample = random.Random(commit).sample(unchanged, min(SAMPLE, len(unchanged)))
    print(
        f"{len(mutants) - len(unchanged)} changed since they were recorded; {len(sample)} others, seed {commit[:12]!r}."
    )
    chosen = {mutant.what for mutant in sample}
    return [
        m for m, known in zip(mutants, is_recorded, strict=True) if not known or m.what in chosen
    ]


def healthy(mutants: Sequence[Mutant]) -> list[Job]:
    """The named tests on the code as it is, file by file."""
    named = sorted({mutant.by for mutant in mutants})
    files = dict.fromkeys(test.partition("::")[0] for test in named)
    return [Job(tuple(test for test in named if test.startswith(f"{file}::"))) for file in files]


class Listing:
    """What is shown and kept, line by line as jobs end."""

    def __init__(self, mutants: Sequence[Mutant], *, records: bool = False) -> None:
        self.records = records
        self.rows: list[dict[str, str | int | float]] = []
        self.sick: list[str] = []
        self._width = {
            name: max((len(getattr(m, name)) for m in mutants), default=0)
            for name in ("what", "file")
        }

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
        is_green = not any(line.startswith(f"{job.mutant.by}:") for line in self.sick)
        if self.records and row["verdict"] == "caught" and is_green:
            record({job.mutant.what: fingerprint(job.mutant)})

    def close(self, seconds: float) -> bool:
        """The reasons of those that survived, and one line of sums; whether all is well."""
        survived = [row for row in self.rows if row["verdict"] != "caught"]
        for row in survived:
            print(f"SURVIVED: {row['what']} ({row['file']}): {row['said']}")
        for line in self.sick:
            print(f"NOT GREEN on the code as it is: {line}")
        print(
            f"{len(self.rows) - len(survived)} of {len(self.rows)} mutants caught, in {seconds:.0f} s"
        )
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
    return [
        (test, (told.failed_in(test) or unknown).message)
        for test in job.tests
        if not told.is_green(test)
    ]


def _words(mutant: Mutant) -> str:
    return f"{mutant.what} {mutant.file} {mutant.by}".lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "-k",
        default="",
        metavar="TEXT",
        help="only mutants whose words, file or test hold the text",
    )
    parser.add_argument("--bug", type=int, metavar="N", help="only mutants of this silent bug")
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count() or 1, help="processes at a time"
    )
    parser.add_argument("--all", action="store_true", help="every mutant, changed or not")
    parser.add_argument(
        "--record", action="store_true", help="record those that are caught in caught.json"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list as JSON too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
