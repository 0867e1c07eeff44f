"""Conversations: the policy writes, the environment replies, until one of them is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Int, Shaped
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
    rollouts = replace(rollouts, finish=finish, per_row=columns)
    if not environment.classes:
        return rollouts
    # the prompts of the data, in the order of the groups
    groups = rollouts.group_ids.tolist()
    prompts = {group: episode.prompt for group, episode in zip(groups, episodes, strict=True)}
    return regrouped(rollouts, [prompts[group] for group in sorted(prompts)])


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
    """The requests with the prompts of their environments. Rows with different prompts become
    groups of their own."""
    changed, rows = list[Request](), iter(episodes)
    for request in requests:
        own = [next(rows).inputs for _ in range(request.size)]
        prompt, first = replace(request.prompt, inputs=own[0]), request.first
        if all(inputs == own[0] for inputs in own):
            changed.append(Request(prompt, request.size, first, has_more_turns))
            continue
        for n, inputs in enumerate(own, start=first):
            apart = replace(prompt, id=f"{prompt.id} #{n}", inputs=inputs)
            changed.append(Request(apart, 1, n, has_more_turns))
    return changed


def join_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """``Rollouts.cat``, where the rows of a group may have begun differently in different parts."""
    # under other ids, so that no groups of different parts are joined before their prompts are
    # compared
    apart = [
        replace(part, prompts=tuple(replace(p, id=f"{n} {p.id}") for p in part.prompts))
        for n, part in enumerate(parts)
    ]
    return regrouped(Rollouts.cat(apart), [prompt for part in parts for prompt in part.prompts])


def regrouped(rollouts: Rollouts, prompts: Sequence[Prompt]) -> Rollouts:
    """Join groups of the same prompt and draw. ``prompts``: the prompt of each group as it is in
    the data.

    Where their rows had different prompts, the common first tokens become the group's prompt, and
    the rest precedes each row's actions, where it is neither learned from nor counted as an answer.
    """
    rollouts = replace(rollouts, prompts=tuple(prompts))
    keys = [(prompt.id, prompt.draw) for prompt in prompts]
    if len({*keys}) == len(keys) or "prompt_ids" not in rollouts.shared:
        return Rollouts.cat([rollouts])
    ids = [tokens.tolist() for tokens in rollouts.shared["prompt_ids"]]
    common = {
        key: _common([own for own, other in zip(ids, keys, strict=True) if other == key])
        for key in keys
    }
    for (name, _), prefix in common.items():
        if not prefix:
            raise DataError(f"""prompt {name!r}: reset began the conversations of a group without a
                token in common. Let reset(seed) return the same for the same seed and columns.""")
    heads = [torch.tensor(own[len(common[key]) :]) for own, key in zip(ids, keys, strict=True)]
    shared = {**rollouts.shared, "prompt_ids": tuple(torch.tensor(common[key]) for key in keys)}
    joined = Rollouts.cat([replace(rollouts, shared=shared)])
    return _prefixed(joined, [heads[group] for group in rollouts.group_ids.tolist()])


def _prefixed(rollouts: Rollouts, heads: Sequence[Tensor]) -> Rollouts:
    """The rollouts with tokens before the actions of each row; the mask is False on them, so that
    they are not learned from."""
    added = torch.tensor([len(head) for head in heads])  # [B]
    if not added.any():
        return rollouts
    lengths, per_row = rollouts.lengths + added, dict(rollouts.per_row)
    fields: dict[str, Any] = {
        name: shifted(getattr(rollouts, name), added, int(lengths.max()))  # [B, T]
        for name in ("actions", "mask", "sampler_logprobs", "policy_version")
    }
    for actions, head in zip(fields["actions"], heads, strict=True):
        actions[: len(head)] = head
    if "turn_ends" in per_row:
        ends = zip(per_row["turn_ends"], added.tolist(), strict=True)
        per_row["turn_ends"] = tuple(tuple(end + n for end in own) for own, n in ends)
    return replace(rollouts, lengths=lengths, per_row=per_row, **fields)


def _common(several: Sequence[Sequence[int]]) -> list[int]:
    """The first tokens that all have in common."""
    columns = zip(*several, strict=False)
    return [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]


def shifted(
    x: Shaped[Tensor, "B T"], by: Int[Tensor, "B"], columns: int, fill: float = 0
) -> Shaped[Tensor, "B C"]:
    """Rows moved to the right, each by its own number of columns."""
    moved = x.new_full((len(x), columns), fill)  # [B, C]
    for row, start in enumerate(by.tolist()):
        end = min(start + x.shape[1], columns)
        moved[row, start:end] = x[row, : end - start]
    return moved


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
