"""Agreement of a judge with labels, before it trains anything."""

from __future__ import annotations

import asyncio
import json
import math
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

    Two completions are compared where they answer the same prompt; if no prompt has two, all of
    them are. Accuracy is the share of pairs with different labels that the judge orders as the
    labels do, half for ties. tau-b is Kendall's, kappa Cohen's over better, worse and equal, with
    each pair in both orders.
    """
    judge = Judge(file)
    reference = judge.config.reference
    rows = read_labels(labels, reference)
    groups = _groups(rows, judge, labels)
    columns = {name: [row[name] for row in rows] for name in filter(None, [reference])}
    metrics: dict[str, float] = {}
    rewards = asyncio.run(
        judge(
            prompts=[row["prompt"] for row in rows],
            completions=[row["completion"] for row in rows],
            group_ids=groups,
            log_metric=metrics.__setitem__,
            log_extra=lambda *_: None,
            **columns,
        )
    )
    failed = [reward for reward in rewards if isinstance(reward, CallError)]
    if len(failed) == len(rows):
        problem = f"the judge {file} has scored none of {len(rows)} completions"
        raise DataError(f"{problem}: {failed[0].message}.")
    numbers = [math.nan if isinstance(one, CallError | None) else one for one in rewards]
    given = np.array([row["label"] for row in rows], dtype=float)
    found = agreement(np.array(numbers, dtype=float), given, np.array(groups))
    scored = f"{len(rows) - len(failed)} scored, {len(failed)} failed"
    lines = [f"{counted(len(rows), 'labelled completion')}, {scored}"]
    for message, count in Counter(error.message for error in failed).most_common(5):
        lines.append(f"  {count} x {message}")
    pairs = f"{found['pairs']:.0f} pairs with different labels"
    lines += [
        f"accuracy       {found['accuracy']:.3f}  of {pairs}",
        f"Kendall tau-b  {found['tau']:.3f}",
        f"Cohen's kappa  {found['kappa']:.3f}",
    ]
    if f"{judge.__name__}_first_frac" in metrics:
        first, same = (metrics[f"{judge.__name__}_{name}_frac"] for name in ("first", "consistent"))
        lines += [
            f"position bias  {first - 0.5:+.3f}  the first answer wins {first:.1%} of comparisons",
            f"consistency    {same:.3f}  of pairs have one winner in both orders",
        ]
    return [*lines, judge.describe_usage(judge.usage())]


def _groups(rows: list[dict[str, Any]], judge: Judge, labels: Path) -> list[int]:
    """The prompt of each row as a number; one group for all if no prompt has two completions."""
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(json.dumps(row["prompt"]), len(numbers)) for row in rows]
    if len(numbers) < len(rows):
        return groups
    if judge.compares_group:
        raise DataError(f"""{labels}: mode="pairs" needs at least two completions of a prompt, and
            each has one. Give rows with chosen and rejected, or set mode="score".""")
    return [0] * len(rows)


def read_labels(path: Path, reference: str = "") -> list[dict[str, Any]]:
    """Rows with prompt, completion and label. One with chosen and rejected gives two, with the
    labels 1 and 0."""
    rows: list[dict[str, Any]] = []
    try:
        lines = list(json_lines(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); it needs a JSON lines file of labels."
        ) from None
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            if "chosen" in row:
                labelled: list[tuple[Any, float]] = [(row["chosen"], 1), (row["rejected"], 0)]
            else:
                labelled = [(row["completion"], float(row["label"]))]
            are_texts = all(
                isinstance(text, str | list)
                for text in (row["prompt"], *(text for text, _ in labelled))
            )
            rows += [{**row, "completion": text, "label": label} for text, label in labelled]
            if (
                not are_texts
                or not math.isfinite(rows[-1]["label"])
                or reference not in {"", *rows[-1]}
            ):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            also = f", each with {reference!r}" if reference else ""
            raise DataError(f"""{path}, line {number}: it needs a prompt with either a completion
                and a label, a number, or chosen and rejected{also}.""") from None
    if not 2 <= len(rows) <= MAX_ROWS:
        raise DataError(
            f"{path} has {len(rows)} labelled completions; it needs 2 to {MAX_ROWS}. Add or remove "
            f"rows."
        )
    return rows


def agreement(rewards: np.ndarray, labels: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Agreement of two orders over the pairs of equal group that are scored; NaN where nothing can
    be compared."""
    first, second = np.nonzero(np.triu(groups[:, None] == groups[None], 1))
    is_scored = np.isfinite(rewards[first]) & np.isfinite(rewards[second])
    first, second = first[is_scored], second[is_scored]
    ours, theirs = (np.sign(np.round(x[first] - x[second], 9)) for x in (rewards, labels))
    with np.errstate(invalid="ignore", divide="ignore"):
        differs, count = theirs != 0, np.float64(len(ours))
        accuracy = np.where(ours == 0, 0.5, ours == theirs)[differs].sum() / np.float64(
            differs.sum()
        )
        tau = (ours * theirs).sum() / np.sqrt((ours**2).sum() * (theirs**2).sum())
        # in both orders, better and worse are equally frequent: chance agreement depends on ties
        # alone
        ties, label_ties = (ours == 0).sum() / count, (theirs == 0).sum() / count
        chance = ties * label_ties + (1 - ties) * (1 - label_ties) / 2
        kappa = ((ours == theirs).sum() / count - chance) / (1 - chance)
    return {
        "accuracy": float(accuracy),
        "tau": float(tau),
        "kappa": float(kappa),
        "pairs": float(differs.sum()),
    }
