"""Conversations: the policy writes, the environment replies, until one of them is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gruppo.environments.classes import Episode
from gruppo.environments.environment import Environment
from gruppo.environments.tools import COUNTS
from gruppo.seeds import seed_at
from gruppo.timeouts import CallError
from gruppo.types import DataError, Finish, Prompt, Request, Rollouts


def converse(
    generate: Callable[..., Rollouts],
    continue_rollouts: Callable[..., Rollouts],
    environment: Environment,
    requests: Sequence[Request],
    sampling: Any,
    *,
    seed: int,
    check_prompt: Callable[[Prompt, Any], str | None] = lambda prompt, sampling: None,
) -> Rollouts:
    """Sample rollouts of several turns, in the order of the requests.

    ``generate`` and ``continue_rollouts`` (the next turn of rows that got a reply) are those of an
    engine or a policy. A row ends as "stop" where its environment returns None or the policy has
    given ``environment.turns`` answers; as "length" where the policy has written
    ``sampling.max_actions`` tokens in all, or the model's context is full; as "error" where the
    environment fails, or begins with a prompt that ``check_prompt`` refuses. ``per_row`` then has
    ``state`` (the dict of its conversation), ``turns`` (answers of the policy), ``turn_ends`` (the
    last column of each), ``ended`` (whether the environment ended it), ``policy_text`` (everything
    the policy wrote, as one text), ``sample`` (its number in the group), ``environment_failure`` (a
    text or None), ``context_full`` (1 if it ended at a turn that did not fit the model's context)
    and ``reencoded`` (turns that read the whole history again, since its keys and values were not
    kept). With tools it has ``tool_counts``, one number for each of ``COUNTS``; with environments
    of a class, ``inputs``, what the row was prompted with, and ``environment_rewards``.
    """
    episodes = [
        episode_of(r.prompt, n, seed) for r in requests for n in range(r.first, r.first + r.size)
    ]
    try:
        environment.open(episodes, lambda prompt: check_prompt(prompt, sampling))
        own_requests = prompted(requests, episodes, has_more_turns=environment.turns > 1)
        # One name for all turns: another would hold the keys and values of its rows to the end.
        rollouts = _with_columns(generate(own_requests, sampling, seed=seed), episodes)
        answered = list(range(len(episodes)))
        while replies := _replies(environment, episodes, rollouts, answered):
            before = rollouts.mask.sum(dim=1)
            rollouts = continue_rollouts(
                rollouts,
                replies,
                sampling,
                seed=seed,
                max_reply_tokens=environment.max_reply_tokens,
            )
            has_answered = rollouts.mask.sum(dim=1) > before
            answered = [row for row in replies if has_answered[row]]
        # Replies that the policy could not read failed in continue_rollouts.
        for row, failure in environment_failures(rollouts).items():
            episodes[row].failure = failure
        environment.finish(episodes)
    finally:
        environment.close(episodes)
    return _with_episodes(rollouts, environment, episodes)


def _with_columns(rollouts: Rollouts, episodes: Sequence[Episode]) -> Rollouts:
    """The first turn with the columns that ``continue_rollouts`` reads and writes."""
    count = len(rollouts)
    answers = rollouts.completions
    texts = tuple(one if isinstance(one, str) else one[-1]["content"] for one in answers)
    columns = {
        "text": texts,  # if it is not there: as written, with the calls
        **rollouts.per_row,
        "sample": torch.tensor([episode.sample for episode in episodes]),
        "environment_failure": (None,) * count,
        "context_full": torch.zeros(count, dtype=torch.long),
        "reencoded": torch.zeros(count, dtype=torch.long),
    }
    return replace(rollouts, per_row=columns)


def _replies(
    environment: Environment, episodes: Sequence[Episode], rollouts: Rollouts, answered: list[int]
) -> dict[int, Any]:
    """Note the answers of these rows; return the environment's replies to those that go on."""
    asked, replies = dict[int, Episode](), dict[int, Any]()
    for row in answered:
        episode, finish = episodes[row], rollouts.finish[row]
        episode.completion, episode.text = rollouts.completions[row], rollouts.per_row["text"][row]
        episode.turn += 1
        episode.turn_ends.append(int(rollouts.lengths[row]) - 1)
        if episode.turn == 1 or finish != "error":
            episode.policy_text += episode.text
        # A row that was cut at max_actions has no room for another turn.
        episode.is_last = episode.turn >= environment.turns or finish != "stop"
        if finish != "error" and episode.failure is None:
            asked[row] = episode
    for row, answer in environment.replies(asked).items():
        if isinstance(answer, CallError):
            asked[row].failure = answer.message
        elif answer is None:
            asked[row].has_ended = True
        elif not asked[row].is_last:
            replies[row] = answer
    return replies


def _with_episodes(
    rollouts: Rollouts, environment: Environment, episodes: Sequence[Episode]
) -> Rollouts:
    """The rollouts with what is known of each conversation."""
    columns = {n: value for n, value in rollouts.per_row.items() if n not in ("text", "kept")}
    columns |= {
        "state": tuple(episode.state for episode in episodes),
        "turns": torch.tensor([episode.turn for episode in episodes], dtype=torch.long),  # [B]
        "ended": torch.tensor([episode.has_ended for episode in episodes], dtype=torch.bool),
        "turn_ends": tuple(tuple(episode.turn_ends) for episode in episodes),
        "policy_text": tuple(episode.policy_text for episode in episodes),
        "environment_failure": tuple(episode.failure for episode in episodes),
    }
    if environment.tools:
        counts = [[episode.counts[name] for name in COUNTS] for episode in episodes]
        columns["tool_counts"] = torch.tensor(counts).reshape(-1, len(COUNTS))  # [B, 5]
    if environment.classes:
        columns["inputs"] = tuple(episode.inputs for episode in episodes)
        columns["environment_rewards"] = tuple(episode.rewards for episode in episodes)
    finish: tuple[Finish, ...] = tuple(
        own if episode.failure is None else "error"
        for episode, own in zip(episodes, rollouts.finish, strict=True)
    )
    # the prompts of the data, in the order of the groups
    groups = rollouts.group_ids.tolist()
    prompts = {group: episode.prompt for group, episode in zip(groups, episodes, strict=True)}
    own_prompts = tuple(prompts[group] for group in sorted(prompts))
    return replace(rollouts, finish=finish, per_row=columns, prompts=own_prompts)


def episode_of(prompt: Prompt, sample: int, seed: int) -> Episode:
    """A new conversation; addressed by draw and sample, so that neither order nor company of the
    rows changes it."""
    own = seed_at(seed, "environment", prompt.draw, sample)
    of_group = seed_at(seed, "environment", prompt.draw)
    return Episode(prompt, sample, seed=own, group_seed=of_group, inputs=prompt.inputs)


def reset_prompt(environment: Environment, prompt: Prompt, seed: int) -> Prompt:
    """The prompt with what ``reset`` of its environment adds; raises DataError where that fails."""
    if not environment.classes:
        return prompt
    episode = episode_of(prompt, 0, seed)
    try:
        environment.open([episode])
    finally:
        environment.close([episode])
    if episode.failure is not None:
        raise DataError(f"prompt {prompt.id!r}: {episode.failure}")
    return replace(prompt, inputs=episode.inputs)


def prompted(
    requests: Sequence[Request], episodes: Sequence[Episode], *, has_more_turns: bool
) -> list[Request]:
    """The requests with the prompts of their environments. A group has one prompt: a row that
    began with another than the first one fails."""
    changed, rest = list[Request](), iter(episodes)
    for request in requests:
        rows = [next(rest) for _ in range(request.size)]
        begun = [episode for episode in rows if episode.failure is None]
        inputs = begun[0].inputs if begun else request.prompt.inputs
        for episode in begun:
            if episode.inputs != inputs:
                episode.failure = (
                    "reset began the conversations of a group differently. Let reset(seed) return "
                    "the same for the same seed and columns."
                )
        for episode in rows:
            episode.inputs = inputs
        prompt = replace(request.prompt, inputs=inputs)
        changed.append(Request(prompt, request.size, request.first, has_more_turns))
    return changed


class ConversationEngine:
    """An engine whose rollouts are conversations with an environment."""

    def __init__(
        self, engine: Any, environment: Environment, check_prompt: Callable[..., str | None]
    ) -> None:
        self.engine, self.environment, self.check_prompt = engine, environment, check_prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        return converse(
            self.engine.generate,
            self.engine.continue_rollouts,
            self.environment,
            requests,
            sampling,
            seed=seed,
            check_prompt=self.check_prompt,
        )

    def close(self) -> None:
        self.environment.close()
        self.engine.close()


def completion_lengths(rollouts: Rollouts) -> Int[Tensor, "B"]:
    """Actions of the policy in each row, without the tokens of the environment."""
    return rollouts.mask.sum(dim=1) if "turns" in rollouts.per_row else rollouts.lengths


def environment_failures(rollouts: Rollouts) -> dict[int, str]:
    """Row to reason, of the rows whose environment failed."""
    reasons = rollouts.per_row.get("environment_failure", ())
    return {row: reason for row, reason in enumerate(reasons) if reason is not None}
