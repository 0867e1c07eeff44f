"""Any task of reasoning-gym: about a hundred procedural generators, each with its own verifier."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from gruppo.data.cursor import Cursor
from gruppo.data.errors import check_fraction, nearest
from gruppo.data.split import is_held_out, prompt_key
from gruppo.loading import import_extra
from gruppo.seeds import seed_at
from gruppo.types import DataError, GruppoError, Prompt

ASK = "Give your final answer inside <answer></answer>."
HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks of reasoning-gym 0.1.25 that walk Python sets: their entries change with the process's hash seed."""


class ReasoningGym:
    """Entries of one task; ``meta["entry"]`` is the whole entry, for the task's own verifier.

    The entry number is the draw. Entries whose question is held out are skipped, so draws rise but may leave gaps.
    ``size_per_epoch`` entries share one generator seed (some tasks build a table of that size first); the next epoch
    takes a new seed, so the stream does not end or repeat. ``task_options`` go to the task unchanged.
    """

    columns = ("target", "entry")

    def __init__(
        self,
        task: str,
        *,
        seed: int,
        size_per_epoch: int = 10_000,
        held_out_fraction: float = 0.1,
        **task_options: Any,
    ) -> None:
        check_fraction(held_out_fraction)
        self._gym = import_extra("reasoning_gym", "tasks", f"the task {task!r}")
        self.task, self.name, self.seed = task, f"reasoning_gym:{task}", seed
        self.size_per_epoch, self.held_out_fraction = size_per_epoch, held_out_fraction
        self._options = task_options
        self._check_task()
        self._epoch, self._entries = 0, self._dataset(seed_at(seed, "reasoning_gym", task, 0))
        self._evaluation: list[Prompt] | None = None
        self._fingerprint = self._hash()
        identity = {"fingerprint": self._fingerprint, "seed": seed, "held_out_fraction": held_out_fraction}
        self._cursor = Cursor(self.name, identity)

    def take(self, n: int) -> list[Prompt]:
        """The next n entries that are not held out."""
        prompts: list[Prompt] = []
        draw, skipped = self._cursor.position, 0
        while len(prompts) < n:
            prompt = self._drawn(draw)
            draw += 1
            skipped = skipped + 1 if self._is_held_out(prompt) else 0
            if skipped > 1000:
                raise DataError(
                    f"{self.name} has no question left that is not held out; lower --prompts.held-out-fraction."
                )
            if not skipped:
                prompts.append(prompt)
        self._cursor.position = draw
        return prompts

    def held_out(self, n: int) -> list[Prompt]:
        """At most n different evaluation entries, the same ones in the same order in every run, whatever its seed."""
        if self._evaluation is None or len(self._evaluation) < n:
            self._evaluation = self._find_held_out(n)
        return self._evaluation[:n]

    def fingerprint(self) -> str:
        """SHA-256 of the task, its options, the package version and the first entries of this seed."""
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def _drawn(self, draw: int) -> Prompt:
        epoch, index = divmod(draw, self.size_per_epoch)
        if self._epoch != epoch:
            self._epoch, self._entries = epoch, self._dataset(seed_at(self.seed, "reasoning_gym", self.task, epoch))
        return self._prompt(self._entry(self._entries, index), draw, f"{self.task}:{draw}")

    def _find_held_out(self, n: int) -> list[Prompt]:
        if self.held_out_fraction == 0 or n == 0:
            return []
        entries = self._dataset(seed_at("reasoning_gym", "held_out", self.task))
        found: dict[str, Prompt] = {}
        for index in range(self.size_per_epoch):
            prompt = self._prompt(self._entry(entries, index), len(found), f"{self.task}:held_out:{index}")
            if self._is_held_out(prompt):
                found.setdefault(prompt_key(prompt.inputs), prompt)
            if len(found) == n:
                break
        return list(found.values())

    def _is_held_out(self, prompt: Prompt) -> bool:
        return is_held_out(prompt_key(prompt.inputs), self.held_out_fraction)

    def _prompt(self, entry: dict[str, Any], draw: int, name: str) -> Prompt:
        messages = [{"role": "user", "content": f"{entry['question'].rstrip()}\n{ASK}"}]
        return Prompt(name, messages, entry["answer"], {"entry": entry}, draw)

    def _entry(self, entries: Any, index: int) -> dict[str, Any]:
        try:
            return entries[index]
        except Exception as problem:
            raise DataError(
                f"{self.name} could not make entry {index} ({type(problem).__name__}: {problem}); "
                "pass ReasoningGym a smaller size_per_epoch or other task options."
            ) from problem

    def _dataset(self, seed: int) -> Any:
        options = {**self._options, "seed": seed >> 32, "size": self.size_per_epoch}
        try:
            return self._gym.create_dataset(self.task, **options)
        except (TypeError, ValueError, AssertionError) as problem:
            raise GruppoError(
                f"{self.name} refuses its options {self._options} ({problem}); it knows {', '.join(self._known())}."
            ) from problem

    def _known(self) -> list[str]:
        config = self._gym.factory.DATASETS[self.task][1]
        return [field.name for field in dataclasses.fields(config) if field.name not in ("seed", "size")]

    def _check_task(self) -> None:
        tasks = self._gym.factory.DATASETS
        if self.task not in tasks:
            raise GruppoError(
                f"reasoning-gym has no task {self.task!r}{nearest(self.task, tasks)}. "
                f"It has {len(tasks)}, such as chain_sum, leg_counting and gcd."
            )
        wrong = [option for option in self._options if option not in self._known()]
        if wrong:
            raise GruppoError(
                f"{self.name} has no option {wrong[0]!r}{nearest(wrong[0], self._known())}. "
                f"It knows {', '.join(self._known())}."
            )
        if self.task in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise GruppoError(
                f"{self.name} makes other entries in every process, so a run could not be repeated or resumed; "
                "set the environment variable PYTHONHASHSEED=0 and start again, or choose another task."
            )

    def _hash(self) -> str:
        first = [self._entry(self._entries, index)["question"] for index in range(min(3, self.size_per_epoch))]
        facts = [self.task, self._options, self.size_per_epoch, metadata.version("reasoning_gym"), first]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
