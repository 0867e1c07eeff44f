"""Prompt sources: a seeded stream of items with a position to resume from, and a part held out for
evaluation."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from gruppo.seeds import generator_at
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")
T = TypeVar("T")

MAX_SKIPPED = 1000
"""Consecutive draws without a prompt that end the run."""


@dataclass(eq=False)
class IndexedSource:
    """Endless, resumable stream of prompts over items that a function turns into prompts.

    The item of a draw is a pure function of the seed and the draw, so that the position is all a
    resume needs. Held-out items never enter the stream, and give the same prompts in the same order
    in every run.
    """

    name: str
    seed: int
    train: Sequence[Any] | Callable[[int], Any]
    """Items of an epoch, reshuffled every epoch; or the item of a draw, for an endless source."""
    evaluation: Sequence[Any] | Callable[[], Iterable[Any]]
    """Held-out items in the order of evaluations, or a function that lists them."""
    prompt_at: Callable[[Any, int], Prompt | None]
    """Prompt of an item and a draw, for a held-out item its place. None skips it, such as for an
    unreadable file."""
    columns: tuple[str, ...]
    """What rewards can ask for: "target", and the keys of ``Prompt.meta``."""
    digest: str
    """SHA-256 of everything that determines the stream, apart from the seed."""
    all_items: Sequence[Any] = ()
    """Items for ``all_prompts``; empty for an endless source, or where making all prompts is
    expensive."""
    classes: int | list[str] | None = None
    """Number or names of the classes, where prompts are classes."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files left out so far, each with the reason."""
    position: int = field(default=0, init=False)
    _order: tuple[int, Any] = field(default=(-1, None), init=False)

    @property
    def epoch_size(self) -> int:
        """Draws in which each training item comes once; 0 for an endless source."""
        return 0 if callable(self.train) else len(self.train)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts. Draws are consecutive, with a gap for each one that is skipped."""
        prompts: list[Prompt] = []
        draw, skipped = self.position, 0
        while len(prompts) < n:
            prompt = self.prompt_at(self._item_at(draw), draw)
            draw += 1
            if prompt is not None:
                prompts.append(prompt)
                skipped = 0
                continue
            skipped += 1
            if skipped >= min(MAX_SKIPPED, 2 * self.epoch_size or MAX_SKIPPED):
                reasons = ["Lower $prompts.held_out_fraction", *self.unreadable.values()]
                raise DataError(
                    f"{skipped} draws of {self.name} in a row gave no prompt", advice=reasons[-1]
                )
        self.position = draw  # only now: after an error the same prompts can be taken again
        return prompts

    def _item_at(self, draw: int) -> Any:
        if callable(self.train):
            return self.train(draw)
        epoch, place = divmod(draw, len(self.train))
        if self._order[0] != epoch:
            # addressed by the epoch: a resumed run needs no state of a generator
            generator = generator_at(self.seed, "epoch", epoch)
            self._order = (epoch, torch.randperm(len(self.train), generator=generator))
        return self.train[int(self._order[1][place])]

    def _evaluation(self) -> Iterable[Any]:
        return self.evaluation() if callable(self.evaluation) else self.evaluation

    def held_out(self, n: int) -> list[Prompt]:
        """At most n evaluation prompts, the same ones in the same order in every run."""
        prompts: list[Prompt] = []
        for item in self._evaluation() if n > 0 else ():
            prompt = self.prompt_at(item, len(prompts))
            if prompt is not None:
                prompts.append(prompt)
            if len(prompts) == n:
                break
        return prompts

    def only_held_out(self) -> IndexedSource:
        """Return a source whose training items are all held out too, in an order that depends on
        nothing else."""
        train = self.train
        if callable(train):
            return replace(self, evaluation=lambda: map(train, itertools.count()))
        # shuffled, so that the first n are a random sample of the data in any order of the rows
        order = torch.randperm(len(train), generator=generator_at(0, "held out"))
        shuffled = (train[index] for index in order.tolist())
        return replace(self, evaluation=[*self._evaluation(), *shuffled])

    def all_prompts(self) -> Iterator[Prompt]:
        """Every prompt once, held out or not, in the order of the data; the position does not
        change."""
        prompts = (self.prompt_at(item, 0) for item in self.all_items)
        return (prompt for prompt in prompts if prompt is not None)

    def fingerprint(self) -> str:
        return self.digest

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.position, "fingerprint": self.digest, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. One of another stream would silently repeat or skip
        prompts: refused."""
        for name, value in (("fingerprint", self.digest), ("seed", self.seed)):
            if state.get(name) != value:
                raise DataError(f"""the saved position does not belong to {self.name}: {name} was
                    {state.get(name)!r}, is {value!r}. Resume with the data, seed and held-out
                    fraction of the saved run (some tasks of reasoning-gym need PYTHONHASHSEED=0
                    too), or start a new run.""")
        position = state.get("cursor")
        if not isinstance(position, int) or position < 0:
            raise DataError(
                f"the saved position of {self.name} is {position!r}. Resume from an earlier "
                f"checkpoint."
            )
        self.position = position


class SourceWrapper:
    """A prompt source around another one, which supplies everything that is not defined here.

    Optional members that the inner source does not have get a neutral value, so that no caller has
    to look for them: any object with ``take``, ``state_dict`` and ``load_state_dict`` becomes a
    complete source.
    """

    DEFAULTS: Mapping[str, Any] = {
        "columns": None,
        "classes": None,
        "held_out": lambda n: [],
        "all_prompts": lambda: iter(()),
        "fingerprint": lambda: None,
        "epoch_size": 0,
    }

    def __init__(self, source: Any) -> None:
        self.source = source
        self.name: str = getattr(source, "name", type(source).__name__)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # copy and pickle ask for it before __init__ has run
            raise AttributeError(name)
        if name in self.DEFAULTS:
            return getattr(self.source, name, self.DEFAULTS[name])
        return getattr(self.source, name)


# --- held-out split -------------------------------------------------------------------------------


def prompt_key(inputs: Any) -> str:
    """Content of a prompt as canonical JSON: equal prompts have equal keys, in any order of their
    fields."""
    return json.dumps(inputs, sort_keys=True, separators=(",", ":"))


def hash_unit(key: str) -> float:
    """Number in [0, 1) that depends on the key alone (BLAKE2b).

    A key is held out where this is below the fraction: every run and machine agrees, and a smaller
    fraction holds out a subset of what a larger one does.
    """
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # the 53 bits that a float holds exactly
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def split_by_hash(keys: Sequence[str], fraction: float, name: str) -> tuple[list[int], list[int]]:
    """Indices to train on, in order, and held-out ones, in the order of their hashes. Equal keys
    stay together.

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
    limit = fraction
    if fraction > 0 and len(distinct) > 1 and distinct[0] >= fraction:
        limit = distinct[1]  # few prompts: the smallest hash alone, since an evaluation needs one
    train = [index for index, x in enumerate(hashes) if x >= limit]
    if not train:
        raise DataError(
            f"""all {len(hashes)} prompts of {name} are held out for evaluation, which leaves none
                to train on""",
            advice="Lower $prompts.held_out_fraction, or add prompts",
        )
    held_out = [index for index, x in enumerate(hashes) if x < limit]
    # ordered by hash, so that the first n are a random sample of the data in any order of the rows
    return train, sorted(held_out, key=lambda index: (hashes[index], index))


def in_turns(groups: Iterable[Sequence[T]]) -> list[T]:
    """The first item of each group, then the second of each, and so on: a short evaluation has
    every group."""
    rounds = itertools.zip_longest(*groups, fillvalue=None)
    return [item for turn in rounds for item in turn if item is not None]


def digest_of(facts: Any) -> str:
    """SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def leave_out(unreadable: dict[str, str], name: str, reason: str) -> None:
    """Count a file that cannot be used, and log it the first time."""
    if name not in unreadable:
        unreadable[name] = reason
        log.warning("left out: %s %d so far.", reason, len(unreadable))
