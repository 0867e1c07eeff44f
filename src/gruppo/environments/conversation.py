"""Conversations: the policy writes, the environment replies, until one of them is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gruppo.environments.environment import Environment, ReplyRequest
from gruppo.seeds import seed_at
from gruppo.timeouts import CallError
from gruppo.types import Finish, Request, Rollouts


def converse(
    generate: Callable[..., Rollouts],
    continue_rollouts: Callable[..., Rollouts],
    environment: Environment,
    requests: Sequence[Request],
    sampling: Any,
    *,
    seed: int,
) -> Rollouts:
    """Sample rollouts of several turns, in the order of the requests.

    ``generate`` and ``continue_rollouts`` (the next turn of rows that got a reply) are those of an engine or a policy.
    A row ends as "stop" where its environment returns None or the policy has given ``environment.turns`` answers; as
    "length" where the policy has written ``sampling.max_actions`` tokens in all, or the model's context is full; as
    "error" where the environment fails. ``per_row`` then has ``state`` (the dict of its conversation), ``turns``
    (answers of the policy), ``ended`` (whether the environment ended it), ``policy_text`` (everything the policy
    wrote, as one text), ``sample`` (its number in the group), ``environment_failure`` (a text or None),
    ``context_full`` (1 if it ended at a turn that did not fit the model's context) and ``reencoded`` (turns that read
    the whole history again, since its keys and values were not kept).
    """
    has_more_turns = environment.turns > 1
    requests = [replace(request, has_more_turns=has_more_turns) for request in requests]
    rollouts = generate(requests, sampling, seed=seed)
    samples = [request.first + i for request in requests for i in range(request.size)]
    texts = tuple(output if isinstance(output, str) else output[-1]["content"] for output in rollouts.completions)
    per_row = {"sample": torch.tensor(samples), "text": texts, "environment_failure": (None,) * len(rollouts)}
    per_row |= {name: torch.zeros(len(rollouts), dtype=torch.long) for name in ("context_full", "reencoded")}
    rollouts = replace(rollouts, per_row={**rollouts.per_row, **per_row})
    prompts = [rollouts.prompts[group] for group in rollouts.group_ids.tolist()]
    # addressed by draw and sample, so that neither order nor company of the rows changes a game
    seeds = [seed_at(seed, "environment", prompt.draw, n) for prompt, n in zip(prompts, samples, strict=True)]
    states: list[dict[str, Any]] = [{} for _ in prompts]
    policy_texts, failures = list(texts), dict[int, str]()
    turns = torch.ones(len(rollouts), dtype=torch.long)
    ended = torch.zeros(len(rollouts), dtype=torch.bool)
    active = [row for row, finish in enumerate(rollouts.finish) if finish != "error"]
    while active:
        calls, replies = {}, {}
        for row in active:
            completion, text, turn = rollouts.completions[row], rollouts.per_row["text"][row], int(turns[row])
            calls[row] = ReplyRequest(prompts[row], completion, text, turn, seeds[row], states[row])
        for row, answer in environment.replies(calls).items():
            if isinstance(answer, CallError):
                failures[row] = answer.message
            elif answer is None:
                ended[row] = True
            # a row that was cut at max_actions has no room for another turn, whatever the environment says
            elif turns[row] < environment.turns and rollouts.finish[row] == "stop":
                replies[row] = answer
        if not replies:
            break
        before = rollouts.mask.sum(dim=1)
        options = {"seed": seed, "max_reply_tokens": environment.max_reply_tokens}
        rollouts = continue_rollouts(rollouts, replies, sampling, **options)
        has_answered = rollouts.mask.sum(dim=1) > before
        turns += has_answered
        active = [row for row in replies if has_answered[row] and rollouts.finish[row] != "error"]
        for row in active:
            policy_texts[row] += rollouts.per_row["text"][row]
    # replies that the policy could not read fail in continue_rollouts
    failures |= environment_failures(rollouts)
    finishes: dict[int, Finish] = dict.fromkeys(failures, "error")
    finish = tuple(finishes.get(row, finish) for row, finish in enumerate(rollouts.finish))
    per_row = {name: value for name, value in rollouts.per_row.items() if name not in ("text", "kept")}
    per_row |= {"state": tuple(states), "turns": turns, "ended": ended, "policy_text": tuple(policy_texts)}
    per_row["environment_failure"] = tuple(failures.get(row) for row in range(len(prompts)))
    return replace(rollouts, finish=finish, per_row=per_row)


class ConversationEngine:
    """An engine whose rollouts are conversations with an environment."""

    def __init__(self, engine: Any, environment: Environment) -> None:
        self.engine, self.environment = engine, environment
        self.concurrency = getattr(engine, "concurrency", 0)

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        engine = self.engine
        return converse(engine.generate, engine.continue_rollouts, self.environment, requests, sampling, seed=seed)

    def sync(self, policy: Any, version: int) -> None:
        self.engine.sync(policy, version)

    def close(self) -> None:
        self.engine.close()


def completion_lengths(rollouts: Rollouts) -> Int[Tensor, "B"]:
    """Actions of the policy in each row, without the tokens of the environment."""
    return rollouts.mask.sum(dim=1) if "turns" in rollouts.per_row else rollouts.lengths


def environment_failures(rollouts: Rollouts) -> dict[int, str]:
    """Row to reason, of the rows whose environment failed."""
    reasons: Sequence[str | None] = rollouts.per_row.get("environment_failure", ())
    return {row: reason for row, reason in enumerate(reasons) if reason is not None}
