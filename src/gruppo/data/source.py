"""Prompt sources: a seeded stream of items with a position to resume from, and a part held out for evaluation."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

MAX_SKIPPED = 1000
"""Consecutive draws without a prompt that end the run."""
PROBED = 1000
"""Draws of an endless source from which the quantiles of the difficulty are computed."""
MAX_PASSED_OVER = 10_000
"""Consecutive prompts that are too hard and end the run: the level leaves next to nothing."""


@dataclass(eq=False)
class IndexedSource:
    """Endless, resumable stream of prompts over items that a function turns into prompts.

    The item of a draw is a pure function of the seed and the draw, so that the position is all a resume needs.
    Held-out items never enter the stream, and give the same prompts in the same order in every run.
    """

    name: str
    seed: int
    train: Sequence[Any] | Callable[[int], Any]
    """Items of an epoch, reshuffled every epoch; or the item of a draw, for an endless source."""
    evaluation: Sequence[Any] | Callable[[], Iterable[Any]]
    """Held-out items in the order of evaluations, or a function that lists them."""
    prompt_at: Callable[[Any, int], Prompt | None]
    """Prompt of an item and a draw, for a held-out item its place. None skips it, such as for an unreadable file."""
    columns: tuple[str, ...]
    """What rewards can ask for: "target", and the keys of ``Prompt.meta``."""
    digest: str
    """SHA-256 of everything that determines the prompts, apart from the seed."""
    identity: Mapping[str, Any]
    """Further settings that have to be equal for a position to be resumed."""
    all_items: Sequence[Any] = ()
    """Items for ``all_prompts``; empty for an endless source, or where making all prompts is expensive."""
    classes: int | list[str] | None = None
    """Number or names of the classes, where prompts are classes."""
    degradation: Any = None
    """The degradation of images that are degraded on the fly."""
    level: float | None = None
    """Share of the prompts, the easiest, that a ``Curriculum`` draws; None without one."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files left out so far, each with the reason."""
    position: int = field(default=0, init=False)
    _order: tuple[int, Any] = field(
        default=(-1, None), init=False
    )  # of one epoch: recomputing it costs little

    @property
    def epoch_size(self) -> int:
        """Draws in which each training item comes once; 0 for an endless source."""
        return 0 if callable(self.train) else len(self.train)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts. Draws are consecutive, with a gap for each one that is skipped."""
        prompts, draw, skipped = list[Prompt](), self.position, 0
        while len(prompts) < n:
            if callable(self.train):
                item = self.train(draw)
            else:
                epoch, place = divmod(draw, len(self.train))
                if self._order[0] != epoch:
                    # addressed by the epoch: a resumed run needs no state of a generator
                    generator = generator_at(self.seed, "epoch", epoch)
                    self._order = epoch, torch.randperm(len(self.train), generator=generator)
                item = self.train[int(self._order[1][place])]
            prompt = self.prompt_at(item, draw)
            draw, skipped = draw + 1, skipped + 1 if prompt is None else 0
            if prompt is not None:
                prompts.append(prompt)
            elif skipped >= min(
                MAX_SKIPPED, 2 * self.epoch_size or MAX_SKIPPED
            ):  # two epochs of a small folder
                last = next(
                    reversed(self.unreadable.values()), "Lower --prompts.held-out-fraction."
                )
                raise DataError(f"{skipped} draws of {self.name} in a row gave no prompt. {last}")
        self.position = draw  # only now: after an error the same prompts can be taken again
        return prompts

    def held_out(self, n: int) -> list[Prompt]:
        """At most n evaluation prompts, the same ones in the same order in every run."""
        prompts = list[Prompt]()
        items = self.evaluation() if callable(self.evaluation) else self.evaluation
        for item in items if n > 0 else ():
            if (prompt := self.prompt_at(item, len(prompts))) is not None:
                prompts.append(prompt)
            if len(prompts) == n:
                break
        return prompts

    def only_held_out(self) -> IndexedSource:
        """Return a source whose training items are all held out too, in an order that depends on nothing else."""
        train = self.train
        if callable(train):
            return replace(self, evaluation=lambda: map(train, itertools.count()))
        # shuffled, so that the first n are a random sample of the data in any order of the rows
        order = torch.randperm(len(train), generator=generator_at(0, "held out"))
        held_out = self.evaluation() if callable(self.evaluation) else self.evaluation
        return replace(self, evaluation=[*held_out, *(train[index] for index in order.tolist())])

    def all_prompts(self) -> Iterator[Prompt]:
        """Every prompt once, held out or not, in the order of the data; the position does not change."""
        return (
            prompt for item in self.all_items if (prompt := self.prompt_at(item, 0)) is not None
        )

    def fingerprint(self) -> str:
        return self.digest

    def state_dict(self) -> dict[str, Any]:
        return {
            "cursor": self.position,
            "fingerprint": self.digest,
            "seed": self.seed,
            **self.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. One of another stream would silently repeat or skip prompts: refused."""
        current = self.state_dict()
        if changed := [
            key for key, value in current.items() if key != "cursor" and state.get(key) != value
        ]:
            reasons = "; ".join(
                f"{key} was {state.get(key)!r}, is {current[key]!r}" for key in changed
            )
            raise DataError(f"""the saved position does not belong to {self.name}: {reasons}. Resume with the data, seed
                and held-out fraction of the saved run, or start a new run.""")
        if not isinstance(position := state.get("cursor"), int) or position < 0:
            raise DataError(
                f"the saved position of {self.name} is {position!r}. Resume from an earlier checkpoint."
            )
        self.position = position


class SourceWrapper:
    """A prompt source around another one, which supplies everything that is not defined here.

    Optional members that the inner source does not have get a neutral value, so that no caller has to look for them:
    any object with ``take``, ``state_dict`` and ``load_state_dict`` becomes a complete source.
    """

    DEFAULTS: Mapping[str, Any] = {
        **dict.fromkeys(("columns", "classes", "degradation", "level")),  # None
        **{
            "held_out": lambda n: [],
            "all_prompts": lambda: iter(()),
            "fingerprint": lambda: None,
            "epoch_size": 0,
        },
    }

    def __init__(self, source: Any) -> None:
        self.source = source
        self.name: str = getattr(source, "name", type(source).__name__)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # copy and pickle ask for it before __init__ has run
            raise AttributeError(name)
        default = [self.DEFAULTS[name]] if name in self.DEFAULTS else []
        return getattr(self.source, name, *default)


class Curriculum(SourceWrapper):
    """A source whose ``take`` passes over prompts that are harder than ``level`` allows.

    ``level`` is a share of the prompts, easiest first, by the number in ``column``; higher is harder. All prompts as
    hard as the hardest of that share belong to it too, so a level is never empty, and has more than its share where
    many prompts are equally hard. The share is exact over the training items of a finite source, and over the first
    ``PROBED`` draws of an endless one. A prompt that is passed over is not deferred: it comes again in the next epoch.
    Held-out prompts do not depend on the level. The level itself is a parameter of the stage, not part of the state.
    """

    def __init__(self, source: Any, column: str) -> None:
        super().__init__(source)
        self.column, self.level = column, 1.0
        self.passed_over = 0
        """Prompts that were too hard, since the run was started or resumed."""
        if self.columns is not None and column not in self.columns:
            columns = f"its columns are {', '.join(map(repr, self.columns))}{nearest(column, self.columns)}"
            raise DataError(
                f"{self.name} has no column {column!r}; {columns}",
                advice="Name one with a number, higher is harder, with $prompts.difficulty_column",
            )
        before = source.state_dict()
        self._sorted = sorted(map(self.difficulty, source.take(self.epoch_size or PROBED)))
        source.load_state_dict(before)
        self._digest = hashlib.sha256(json.dumps(self._sorted).encode()).hexdigest()

    @property
    def hardest(self) -> float:
        """The greatest difficulty that the level allows; infinite at level 1."""
        if self.level >= 1:
            return math.inf
        # the quantile itself, not interpolated: a level always contains at least its hardest prompt
        return self._sorted[max(math.ceil(self.level * len(self._sorted)), 1) - 1]

    def difficulty(self, prompt: Prompt) -> float:
        """The number in the prompt's column."""
        value = prompt.meta.get(self.column)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise DataError(
                f"""prompt {prompt.id!r} of {self.name} has {self.column}={value!r:.60}, which is not a
                    number; every prompt needs a difficulty""",
                advice="Fix the data, or set another $prompts.difficulty_column",
            )
        return float(value)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts of the stream that are not too hard."""
        hardest, limit, too_hard = self.hardest, max(MAX_PASSED_OVER, 2 * self.epoch_size), 0
        prompts = list[Prompt]()
        while len(prompts) < n:
            prompt = self.source.take(1)[
                0
            ]  # one at a time, so that the position stays right behind the last prompt
            is_hard = self.difficulty(prompt) > hardest
            prompts += [] if is_hard else [prompt]
            self.passed_over += is_hard
            too_hard = too_hard + 1 if is_hard else 0
            if too_hard >= limit:
                raise DataError(f"""{limit} prompts of {self.name} in a row have {self.column} above {hardest:g}, the
                    hardest at difficulty={self.level:g}. Raise the stage's difficulty.""")
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self.source.state_dict(),
            "column": self.column,
            "difficulties": self._digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (state.get("column"), state.get("difficulties")) != (self.column, self._digest):
            raise DataError(f"""the difficulties of {self.name} differ from those of the saved run: the column was
                {state.get("column")!r} and is {self.column!r}, or its numbers have changed. Resume with the same data
                and column, or start a new run.""")
        self.source.load_state_dict(state["source"])


# --- held-out split ---------------------------------------------------------------------------------------------------


def prompt_key(inputs: Any) -> str:
    """Content of a prompt as canonical JSON: equal prompts have equal keys, in any order of their fields."""
    return json.dumps(inputs, sort_keys=True, separators=(",", ":"))


def hash_unit(key: str) -> float:
    """Number in [0, 1) that depends on the key alone (BLAKE2b).

    A key is held out where this is below the fraction: every run and machine agrees, and a smaller fraction holds out
    a subset of what a larger one does.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (
        int.from_bytes(digest, "little") >> 11
    ) / 2**53  # the 53 bits that a float holds exactly


def split_by_hash(keys: Sequence[str], fraction: float, name: str) -> tuple[list[int], list[int]]:
    """Indices to train on, in order, and held-out ones, in the order of their hashes. Equal keys stay together.

    With a fraction above 0, at least one of two or more different keys is held out.
    """
    if not 0 <= fraction < 1:
        raise GruppoError(
            f"held_out_fraction={fraction} is outside [0, 1)",
            option="prompts.held_out_fraction",
            advice="0.1",
        )
    hashes = [hash_unit(key) for key in keys]
    distinct = sorted(set(hashes))
    # of few prompts often none hashes below the fraction, and an evaluation needs at least one
    is_short = fraction > 0 and len(distinct) > 1 and distinct[0] >= fraction
    limit = (
        distinct[1] if is_short else fraction
    )  # where short, the smallest hash alone is below it
    if not (train := [index for index, x in enumerate(hashes) if x >= limit]):
        raise DataError(
            f"""all {len(hashes)} prompts of {name} are held out for evaluation, which leaves none to
                    train on""",
            advice="Lower $prompts.held_out_fraction, or add prompts",
        )
    held_out = [index for index, x in enumerate(hashes) if x < limit]
    # ordered by hash, so that the first n are a random sample of the data in any order of the rows
    return train, sorted(held_out, key=lambda index: (hashes[index], index))


def nearest(word: str, words: Iterable[str]) -> str:
    """``"; the nearest is 'x'"``, or an empty text where no word is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; the nearest is {close[0]!r}" if close else ""


def digest_of(facts: Any) -> str:
    """SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def leave_out(unreadable: dict[str, str], name: str, reason: str) -> None:
    """Count a file that cannot be used, and log it the first time."""
    if name not in unreadable:
        unreadable[name] = reason
        log.warning("left out: %s %d so far.", reason, len(unreadable))
