"""Any task of reasoning-gym: about a hundred procedural generators, each with its own verifier."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache, partial
from importlib import metadata
from typing import Any

from gruppo.data.source import IndexedSource, digest_of, hash_unit, prompt_key
from gruppo.loading import did_you_mean, import_extra
from gruppo.seeds import seed_at
from gruppo.types import DataError, GruppoError, Prompt

INSTRUCTION = "Give your final answer inside <answer></answer>."


def reasoning_gym(
    task: str,
    *,
    seed: int,
    size_per_epoch: int = 10_000,
    held_out_fraction: float = 0.1,
    **task_options: Any,
) -> IndexedSource:
    """Entries of one task; ``meta["entry"]`` is the whole entry, for the task's own verifier.

    The entry number is the draw; draws with a held-out question are skipped. ``size_per_epoch``
    entries share one generator seed (some tasks build a table of that size first); the next epoch
    has a new seed, so the stream neither ends nor repeats. ``task_options`` are passed to the task
    unchanged.
    """
    package = import_extra("reasoning_gym", "tasks", f"the task {task!r}")
    tasks = package.factory.DATASETS
    name = f"reasoning_gym:{task}"
    if task not in tasks:
        raise GruppoError(f"""reasoning-gym has no task {task!r}. It has {len(tasks)}, such as
            chain_sum, leg_counting and gcd.{did_you_mean(task, tasks)}""")

    # two data sets are kept: of the epoch and of evaluations
    make = lru_cache(2)(partial(package.create_dataset, task, **task_options, size=size_per_epoch))

    def entry_at(index: int, *address: Any) -> dict[str, Any]:
        try:
            # 31 bits of the seed: NumPy's RandomState takes at most 32
            return make(seed=seed_at(*address) >> 32)[index]
        except Exception as problem:
            raise DataError(f"""{name} with the options {task_options} could not make entry {index}
                ({type(problem).__name__}: {problem}); pass a smaller size_per_epoch or other task
                options.""") from problem

    @cache
    def evaluation_entry(index: int) -> dict[str, Any]:
        return entry_at(index, "reasoning_gym", "held_out", task)

    def held_out_items() -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and entry of each different question of the evaluation."""
        questions: set[str] = set()
        for index in range(size_per_epoch if held_out_fraction else 0):
            entry = evaluation_entry(index)
            question = entry["question"].rstrip()
            if question not in questions:
                questions.add(question)
                yield index, entry

    def prompt_at(item: int | tuple[int, dict[str, Any]], draw: int) -> Prompt | None:
        """Prompt of an entry of the stream, or of the evaluation; None if its question belongs to
        the other."""
        if isinstance(item, int):
            epoch, index = divmod(item, size_per_epoch)
            entry = entry_at(index, seed, "reasoning_gym", task, epoch)
            prompt_id = f"{task}:{item}"
        else:
            number, entry = item
            prompt_id = f"{task}:held_out:{number}"
        messages = [{"role": "user", "content": f"{entry['question'].rstrip()}\n{INSTRUCTION}"}]
        is_held_out = hash_unit(prompt_key(messages)) < held_out_fraction
        prompt = Prompt(prompt_id, messages, entry["answer"], {"entry": entry}, draw)
        return prompt if is_held_out != isinstance(item, int) else None

    # the first entries too: a task can change with the packages that it uses
    places = range(min(3, size_per_epoch))
    first = [entry_at(n, seed, "reasoning_gym", task, 0)["question"] for n in places]
    version = metadata.version("reasoning_gym")
    options = sorted(task_options.items())
    digest = digest_of([task, options, size_per_epoch, held_out_fraction, version, first])
    columns = ("target", "entry")
    return IndexedSource(name, seed, lambda draw: draw, held_out_items, prompt_at, columns, digest)
