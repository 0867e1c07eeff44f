"""Agreement of a judge with labels, before it trains anything.

    python examples/judge_check.py examples/judge.toml labels.jsonl

A row of the labels has a prompt and either completion and label, a number, or chosen and rejected.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from gruppo.integrity import json_lines, parse_json
from gruppo.loading import counted
from gruppo.rewards.judge import Judge
from gruppo.timeouts import CallError
from gruppo.types import DataError

MAX_ROWS = 5000
"""Labels of a file: all pairs of them are compared."""


def check_judge(file: str, labels: Path) -> list[str]:
    """Ask a judge about labelled completions, as in training, and describe how it agrees with the
    labels.

    Two completions are compared if they answer the same prompt; if no prompt has two, all of them
    are. Accuracy is the share of pairs with different labels that the judge orders as the labels
    do, half for ties. tau-b is Kendall's.
    """
    judge = Judge(file)
    reference = judge.config.reference
    rows = read_labels(labels, reference)
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(json.dumps(row["prompt"]), len(numbers)) for row in rows]
    if len(numbers) == len(rows):
        groups = [0] * len(rows)
    columns = {reference: [row[reference] for row in rows]} if reference else {}
    rewards = asyncio.run(
        judge(
            prompts=[row["prompt"] for row in rows],
            completions=[row["completion"] for row in rows],
            log_extra=lambda *_: None,
            **columns,
        )
    )
    failures = [reward.message for reward in rewards if isinstance(reward, CallError)]
    if len(failures) == len(rows):
        problem = f"the judge {file} has scored none of {len(rows)} completions"
        raise DataError(f"{problem}: {failures[0]}.")
    scored = [math.nan if isinstance(reward, CallError) else reward for reward in rewards]
    labelled = np.array([row["label"] for row in rows])
    found = agreement(np.array(scored), labelled, np.array(groups))
    count = f"{len(rows) - len(failures)} scored, {len(failures)} failed"
    lines = [f"{counted(len(rows), 'labelled completion')}, {count}"]
    lines += [f"  {count} x {reason}" for reason, count in Counter(failures).most_common(5)]
    pairs = f"{found['pairs']:.0f} pairs with different labels"
    lines.append(f"accuracy       {found['accuracy']:.3f}  of {pairs}")
    lines.append(f"Kendall tau-b  {found['tau']:.3f}")
    return [*lines, f"used           {judge.usage()}"]


def read_labels(path: Path, reference: str = "") -> list[dict[str, Any]]:
    """Rows with prompt, completion and label. One with chosen and rejected gives two, with the
    labels 1 and 0."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(json_lines(path), start=1):
        try:
            row = parse_json(line)
            if "chosen" in row:
                labelled = [(row["chosen"], 1.0), (row["rejected"], 0.0)]
            else:
                labelled = [(row["completion"], float(row["label"]))]
            for text, label in labelled:
                texts = all(isinstance(one, str | list) for one in (row["prompt"], text))
                if not texts or not math.isfinite(label) or reference not in {"", *row}:
                    raise ValueError
                rows.append({**row, "completion": text, "label": label})
        except (ValueError, TypeError, KeyError):
            also = f", each with {reference!r}" if reference else ""
            raise DataError(f"""{path}, row {number}: it needs a prompt with either a completion and
                a label, a number, or chosen and rejected{also}.""") from None
    if not 2 <= len(rows) <= MAX_ROWS:
        raise DataError(f"{path} has {len(rows)} labelled completions; it needs 2 to {MAX_ROWS}.")
    return rows


def agreement(rewards: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Agreement of two orders over the pairs of equal group that are scored; NaN if nothing can be
    compared."""
    first, second = np.nonzero(np.triu(groups[:, None] == groups[None], 1))
    is_scored = np.isfinite(rewards[first] - rewards[second])
    first, second = first[is_scored], second[is_scored]
    ours = np.sign(np.round(rewards[first] - rewards[second], 9))
    theirs = np.sign(np.round(labels[first] - labels[second], 9))
    differs = theirs != 0
    with np.errstate(invalid="ignore", divide="ignore"):
        accuracy = np.where(ours == 0, 0.5, ours == theirs)[differs].sum() / differs.sum()
        tau = (ours * theirs).sum() / np.sqrt((ours**2).sum() * (theirs**2).sum())
    return {"accuracy": float(accuracy), "tau": float(tau), "pairs": int(differs.sum())}


if __name__ == "__main__":
    print("\n".join(check_judge(sys.argv[1], Path(sys.argv[2]))))
