"""Conversations: the policy writes, the environment replies, and so on until one of them has done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gruppo.environments.environment import Asked, Environment
from gruppo.seeds import seed_at
from gruppo.timeouts import Unanswered
from gruppo.types import Finish, Request, Rollouts

Write = Callable[..., Rollouts]
"""``sample`` of a policy or ``generate`` of an engine."""
ContinueRollouts = Callable[..., Rollouts]
"""``continue_rollouts`` of either: rows that got a reply are written on."""


def converse(
    write: Write,
    continue_rollouts: ContinueRollouts,
    environment: Environment,
    requests: Sequence[Request],
    sampling: Any,
    *,
    seed: int,
) -> Rollouts:
    """Rows of several turns, in the order of the requests.

    A row ends as "stop" where its environment returns None or the policy has given ``environment.turns`` answers; as
    "length" where the policy has written ``sampling.max_actions`` tokens in all, or the model's context is full; as
    "error" where the environment fails. ``per_row`` then has ``state`` (the dict of its conversation), ``turns``
    (answers of the policy), ``ended`` (whether by the environment), ``words`` (what it wrote itself, as one text),
    ``sample`` (its number in the group) and ``environment_failure`` (a text or None).
    """
    rollouts = _begun(write(requests, sampling, seed=seed), requests)
    table = _Table(rollouts, seed)
    turns = torch.ones(len(rollouts), dtype=torch.long)
    ended = torch.zeros(len(rollouts), dtype=torch.bool)
    speaking = [row for row, finish in enumerate(rollouts.finish) if finish != "error"]
    while speaking:
        answers = environment.replies({row: table.asked(rollouts, row, int(turns[row])) for row in speaking})
        replies = {}
        for row, answer in answers.items():
            if isinstance(answer, Unanswered):
                table.failed[row] = answer.message
            elif answer is None:
                ended[row] = True
            elif turns[row] < environment.turns and rollouts.finish[row] == "stop":
                replies[row] = answer
        if not replies:
            break
        before = rollouts.mask.sum(dim=1)
        rollouts = continue_rollouts(
            rollouts, replies, sampling, seed=seed, max_reply_tokens=environment.max_reply_tokens
        )
        wrote = rollouts.mask.sum(dim=1) > before
        turns += wrote
        speaking = [row for row in replies if wrote[row] and rollouts.finish[row] != "error"]
        for row in speaking:
            table.words[row] += rollouts.per_row["text"][row]
    table.failed |= {row: text for row, text in enumerate(rollouts.per_row["environment_failure"]) if text is not None}
    ends: dict[int, Finish] = dict.fromkeys(table.failed, "error")
    held = {name: value for name, value in rollouts.per_row.items() if name != "text"}
    held |= {"state": tuple(table.states), "turns": turns, "ended": ended, "environment_failure": table.failures()}
    held["words"] = tuple(table.words)
    finish = tuple(ends.get(row, finish) for row, finish in enumerate(rollouts.finish))
    return replace(rollouts, finish=finish, per_row=held)


def _begun(rollouts: Rollouts, requests: Sequence[Request]) -> Rollouts:
    """First turns, with what the next ones need to know of each row."""
    numbers = torch.tensor([request.first + i for request in requests for i in range(request.size)])
    texts = tuple(output if isinstance(output, str) else output[-1]["content"] for output in rollouts.completions)
    held = {"sample": numbers, "text": texts, "environment_failure": (None,) * len(rollouts)}
    return replace(rollouts, per_row={**rollouts.per_row, **held})


class _Table:
    """What the environment is asked of each row, and what is held of it from turn to turn."""

    def __init__(self, rollouts: Rollouts, seed: int) -> None:
        self.prompts = [rollouts.prompts[group] for group in rollouts.group_ids.tolist()]
        self.states: list[dict[str, Any]] = [{} for _ in self.prompts]
        self.seeds = [
            seed_at(seed, "environment", prompt.draw, number)
            for prompt, number in zip(self.prompts, rollouts.per_row["sample"].tolist(), strict=True)
        ]
        self.words = list(rollouts.per_row["text"])
        """Of the policy alone."""
        self.failed: dict[int, str] = {}

    def asked(self, rollouts: Rollouts, row: int, turn: int) -> Asked:
        said, text = rollouts.completions[row], rollouts.per_row["text"][row]
        return Asked(self.prompts[row], said, text, turn, self.seeds[row], self.states[row])

    def failures(self) -> tuple[str | None, ...]:
        return tuple(self.failed.get(row) for row in range(len(self.prompts)))


class Conversing:
    """An engine whose rows are conversations with an environment."""

    def __init__(self, engine: Any, environment: Environment) -> None:
        self.engine, self.environment = engine, environment

    @property
    def version(self) -> int:
        return self.engine.version

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        return converse(
            self.engine.generate, self.engine.continue_rollouts, self.environment, requests, sampling, seed=seed
        )

    def sync(self, policy: Any, version: int) -> None:
        self.engine.sync(policy, version)

    def close(self) -> None:
        self.engine.close()


def written(rollouts: Rollouts) -> Int[Tensor, "B"]:
    """Actions of each row, what an environment said not counted."""
    return rollouts.mask.sum(dim=1) if "turns" in rollouts.per_row else rollouts.lengths


def failures_of(rollouts: Rollouts) -> dict[int, str]:
    """Of the rows whose environment failed, why."""
    texts: Sequence[str | None] = rollouts.per_row.get("environment_failure", ())
    return {row: text for row, text in enumerate(texts) if text is not None}
