"""Any task of reasoning-gym: about a hundred procedural generators, each with its own verifier."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib import metadata
from typing import Any

from gruppo.data.source import IndexedSource, check_fraction, hash_unit, nearest, prompt_key
from gruppo.loading import import_extra
from gruppo.seeds import seed_at
from gruppo.types import DataError, GruppoError, Prompt

INSTRUCTION = "Give your final answer inside <answer></answer>."
HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks of reasoning-gym 0.1.25 that iterate over sets: their entries change with the process's hash seed."""


def reasoning_gym(
    task: str,
    *,
    seed: int,
    size_per_epoch: int = 10_000,
    held_out_fraction: float = 0.1,
    **task_options: Any,
) -> IndexedSource:
    """Entries of one task; ``meta["entry"]`` is the whole entry, for the task's own verifier.

    The entry number is the draw; draws with a held-out question are skipped. ``size_per_epoch`` entries share one
    generator seed (some tasks build a table of that size first); the next epoch has a new seed, so the stream neither
    ends nor repeats. ``task_options`` are passed to the task unchanged.
    """
    check_fraction(held_out_fraction)
    package = import_extra("reasoning_gym", "tasks", f"the task {task!r}")
    tasks, name = package.factory.DATASETS, f"reasoning_gym:{task}"
    if task not in tasks:
        raise GruppoError(
            f"reasoning-gym has no task {task!r}{nearest(task, tasks)}. "
            f"It has {len(tasks)}, such as chain_sum, leg_counting and gcd."
        )
    fields = [f.name for f in dataclasses.fields(tasks[task][1]) if f.name not in ("seed", "size")]
    if unknown := [option for option in task_options if option not in fields]:
        raise GruppoError(
            f"{name} has no option {unknown[0]!r}{nearest(unknown[0], fields)}. Its options are {', '.join(fields)}."
        )
    if task in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise GruppoError(
            f"{name} makes other entries in every process, so a run could not be repeated or resumed; "
            "set the environment variable PYTHONHASHSEED=0 and start again, or choose another task."
        )

    @lru_cache(maxsize=2)
    def dataset(dataset_seed: int) -> Any:
        options = {**task_options, "seed": dataset_seed >> 32, "size": size_per_epoch}
        try:
            return package.create_dataset(task, **options)
        except (TypeError, ValueError, AssertionError) as problem:
            raise GruppoError(
                f"{name} refuses its options {task_options} ({problem}); its options are {', '.join(fields)}."
            ) from problem

    def make_prompt(dataset_seed: int, index: int, draw: int, prompt_id: str) -> Prompt:
        try:
            entry = dataset(dataset_seed)[index]
        except GruppoError:
            raise
        except Exception as problem:
            raise DataError(
                f"{name} could not make entry {index} ({type(problem).__name__}: {problem}); "
                "pass a smaller size_per_epoch or other task options."
            ) from problem
        messages = [{"role": "user", "content": f"{entry['question'].rstrip()}\n{INSTRUCTION}"}]
        return Prompt(prompt_id, messages, entry["answer"], {"entry": entry}, draw)

    def is_held_out(prompt: Prompt) -> bool:
        return hash_unit(prompt_key(prompt.inputs)) < held_out_fraction

    def prompt_at(draw: int, _: int) -> Prompt | None:
        epoch, index = divmod(draw, size_per_epoch)
        prompt = make_prompt(seed_at(seed, "reasoning_gym", task, epoch), index, draw, f"{task}:{draw}")
        return None if is_held_out(prompt) else prompt

    @cache
    def evaluation_prompt(index: int) -> Prompt:
        return make_prompt(seed_at("reasoning_gym", "held_out", task), index, 0, f"{task}:held_out:{index}")

    def held_out_items() -> Iterator[int]:
        questions = set()
        for index in range(size_per_epoch if held_out_fraction else 0):
            prompt = evaluation_prompt(index)
            key = prompt_key(prompt.inputs)
            if is_held_out(prompt) and key not in questions:
                questions.add(key)
                yield index

    first = [
        make_prompt(seed_at(seed, "reasoning_gym", task, 0), index, 0, "").meta["entry"]["question"]
        for index in range(min(3, size_per_epoch))
    ]
    facts = [task, task_options, size_per_epoch, metadata.version("reasoning_gym"), first]
    return IndexedSource(
        name,
        seed,
        lambda draw: draw,
        held_out_items,
        prompt_at,
        ("target", "entry"),
        hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(),
        {"held_out_fraction": held_out_fraction},
        held_out_prompt_at=lambda index, place: dataclasses.replace(evaluation_prompt(index), draw=place),
    )
