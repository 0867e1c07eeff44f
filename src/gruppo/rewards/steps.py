"""Steps of a completion: where its text is cut, and which of the policy's own actions ends each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gruppo.timeouts import Unanswered
from gruppo.types import GruppoError

Read = Callable[[Sequence[int]], str]
"""The text of a policy's ids, special tokens left out."""
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Step:
    text: str
    """Without its separator."""
    end: int
    """Characters of the completion up to its end, its separator included."""


@dataclass(frozen=True)
class StepScores:
    """What a reward says of the steps of one row."""

    columns: Sequence[int]
    """Of the rollouts: the action that ends each step. Two steps that end in one action are added."""
    scores: Sequence[Any]
    """A number, or None for a step that is not scored."""


def step_reward(separator: str = "\n") -> Callable[[Function], Function]:
    """Marks a reward function as one that scores steps: the parts of a completion between separators.

    It may ask for ``steps``, a list of texts for each completion, and returns a list of numbers for each completion,
    one for each of its steps (None: that step is not scored; None in place of a list: the completion is not).
    """

    separator = checked_separator(separator)

    def mark(fn: Function) -> Function:
        fn.step_separator = separator  # type: ignore[attr-defined]
        return fn

    return mark


def checked_separator(separator: Any) -> str:
    if not isinstance(separator, str) or not separator:
        raise GruppoError(
            f"separator={separator!r} cuts nothing; it needs to be a text that stands between steps, such as a line "
            "end. Write @step_reward(), or set separator=\\n."
        )
    return separator


def cut(text: str, separator: str) -> list[Step]:
    """The steps of a text: blank parts are none, and a text without any other is one."""
    steps, begin = [], 0
    while begin < len(text):
        found = text.find(separator, begin)
        stop, end = (len(text), len(text)) if found < 0 else (found, found + len(separator))
        if text[begin:stop].strip():
            steps.append(Step(text[begin:stop], end))
        begin = end
    return steps or [Step(text, len(text))]


def places(steps: Sequence[Step], output: str, ids: Sequence[int], read: Read) -> list[int]:
    """For each step, the index of the id that writes its last character; the last step ends with the last id.

    So the end token belongs to the last step. The ids are the policy's own, read from the first on: a text is never
    tokenised again, and a character of several ids is written by the last of them.
    """
    if not read(ids).startswith(output):
        raise Unanswered("exception", "its output is not what its tokens say, so that no step has a place in them")

    def written(n: int) -> int:
        return _in_common(read(ids[: n + 1]), output)

    found: list[int] = []
    for step in steps[:-1]:
        found.append(bisect_left(range(len(ids)), step.end, lo=found[-1] if found else 0, key=written))
    return [*found, len(ids) - 1] if ids else []


def _in_common(a: str, b: str) -> int:
    """Length of the beginning that two texts share."""
    if b.startswith(a):
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def placed(entry: Any, steps: Sequence[Step], columns: Sequence[int]) -> StepScores | Unanswered | None:
    """What a reward returned for one row, at its columns; None = not scored."""
    if entry is None:
        return None
    tolist = getattr(entry, "tolist", None)
    entry = entry if tolist is None else tolist()
    if not isinstance(entry, (list, tuple)):
        what = f"returned {entry!r:.60} ({type(entry).__name__}) for a completion"
        return Unanswered("exception", f"{what}; a reward of steps returns a list of numbers for each, or None")
    if len(entry) != len(steps):
        return Unanswered("exception", f"returned {len(entry)} numbers for a completion of {len(steps)} steps")
    return StepScores(columns, entry[: len(columns)])
