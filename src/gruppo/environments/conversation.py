"""Conversations: the policy writes, the environment replies, until one of them is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from gruppo.environments.classes import Episode
from gruppo.environments.environment import Environment
from gruppo.environments.tools import COUNTS
from gruppo.protocols import Engine
from gruppo.seeds import seed_at
from gruppo.timeouts import CallError, describe_error
from gruppo.types import DataError, Finish, GruppoError, Prompt, Request, Rollouts

UNLIKE = """reset began it with other tokens than the first conversation of its group, but the rows of a group share \
the beginning of their prompts. Let reset(seed) return the same for the same seed and columns"""


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
    addresses = [(r.prompt, n) for r in requests for n in range(r.first, r.first + r.size)]
    episodes = [episode_of(prompt, sample, seed) for prompt, sample in addresses]
    try:
        environment.open(episodes)
        if environment.classes:
            _check_prompts(episodes, sampling, check_prompt)
        # One name for all turns: another would hold the keys and values of its rows to the end.
        rollouts = generate(
            [
                replace(request, has_more_turns=environment.turns > 1)
                for request in prompted(requests, episodes)
            ],
            sampling,
            seed=seed,
        )
        rollouts = _with_columns(rollouts, [sample for _, sample in addresses])
        for row, episode in enumerate(episodes):
            _answered(episode, rollouts, row)
        active = [
            row
            for row, finish in enumerate(rollouts.finish)
            if finish != "error" and episodes[row].failure is None
        ]
        while active:  # further turns of the rows that got a reply
            replies = _replies(environment, rollouts, {row: episodes[row] for row in active})
            if not replies:
                break
            before = rollouts.mask.sum(dim=1)
            rollouts = continue_rollouts(
                rollouts,
                replies,
                sampling,
                seed=seed,
                max_reply_tokens=environment.max_reply_tokens,
            )
            has_answered = (rollouts.mask.sum(dim=1) > before).tolist()
            for row, episode in enumerate(episodes):
                if has_answered[row]:
                    _answered(episode, rollouts, row)
            active = [
                row for row in replies if has_answered[row] and rollouts.finish[row] != "error"
            ]
        # Replies that the policy could not read failed in continue_rollouts.
        for row, failure in environment_failures(rollouts).items():
            episodes[row].failure = failure
        environment.finish(episodes)
    finally:
        environment.close(episodes)
    rollouts = _with_episodes(rollouts, environment, episodes)
    if not environment.classes:
        return rollouts
    groups = rollouts.group_ids.tolist()
    return regrouped(
        rollouts, [addresses[groups.index(group)][0] for group in range(len(rollouts.prompts))]
    )


def _check_prompts(
    episodes: Sequence[Episode], sampling: Any, check_prompt: Callable[[Prompt, Any], str | None]
) -> None:
    """Fail the conversations whose environment begins with a prompt that the policy cannot read."""
    for episode in episodes:
        if episode.failure is None:
            try:
                prompt = replace(episode.prompt, inputs=episode.inputs)
                episode.failure = check_prompt(prompt, sampling)
            except GruppoError as problem:
                episode.failure = str(problem)
            except Exception as problem:  # messages of reset that the chat template does not take
                episode.failure = describe_error(problem)
        if episode.failure is not None:  # the row is sampled as any other, and left out
            episode.inputs = episode.prompt.inputs


def _with_columns(rollouts: Rollouts, samples: Sequence[int]) -> Rollouts:
    """The first turn with the columns that ``continue_rollouts`` reads and writes."""
    count = len(rollouts)
    texts = tuple(
        output if isinstance(output, str) else output[-1]["content"]
        for output in rollouts.completions
    )
    columns = {
        "text": texts,  # if it is not there: as written, with the calls
        **rollouts.per_row,
        "sample": torch.tensor(samples),
        "environment_failure": (None,) * count,
        "context_full": torch.zeros(count, dtype=torch.long),
        "reencoded": torch.zeros(count, dtype=torch.long),
    }
    return replace(rollouts, per_row=columns)


def _answered(episode: Episode, rollouts: Rollouts, row: int) -> None:
    """Note an answer of the policy."""
    episode.turn += 1
    episode.turn_ends.append(int(rollouts.lengths[row]) - 1)
    if episode.turn == 1 or rollouts.finish[row] != "error":
        episode.policy_text += rollouts.per_row["text"][row]


def _replies(
    environment: Environment, rollouts: Rollouts, episodes: Mapping[int, Episode]
) -> dict[int, Any]:
    """Replies of the environment to the conversations that go on, by row."""
    for row, episode in episodes.items():
        episode.completion = rollouts.completions[row]
        episode.text = rollouts.per_row["text"][row]
        # A row that was cut at max_actions has no room for another turn.
        episode.is_last = episode.turn >= environment.turns or rollouts.finish[row] != "stop"
    replies = {}
    for row, answer in environment.replies(episodes).items():
        episode = episodes[row]
        if isinstance(answer, CallError):
            episode.failure = answer.message
        elif answer is None:
            episode.has_ended = True
        elif not episode.is_last:
            replies[row] = answer
    return replies


def _with_episodes(
    rollouts: Rollouts, environment: Environment, episodes: Sequence[Episode]
) -> Rollouts:
    """The rollouts with what is known of each conversation."""
    finish: tuple[Finish, ...] = tuple(
        own if episode.failure is None else "error"
        for episode, own in zip(episodes, rollouts.finish, strict=True)
    )
    columns = {
        name: value for name, value in rollouts.per_row.items() if name not in ("text", "kept")
    }
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
    return replace(rollouts, finish=finish, per_row=columns)


def episode_of(prompt: Prompt, sample: int, seed: int) -> Episode:
    """A new conversation; addressed by draw and sample, so that neither order nor company of the
    rows changes it."""
    own, of_group = (
        seed_at(seed, "environment", prompt.draw, sample),
        seed_at(seed, "environment", prompt.draw),
    )
    return Episode(prompt=prompt, seed=own, group_seed=of_group, inputs=prompt.inputs)


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


def prompted(requests: Sequence[Request], episodes: Sequence[Episode]) -> list[Request]:
    """The requests with the prompts of their environments. Rows with different prompts become
    groups of their own."""
    changed, rows = [], iter(episodes)
    for request in requests:
        own = [next(rows) for _ in range(request.size)]
        if all(episode.inputs == own[0].inputs for episode in own):
            is_same = own[0].inputs is request.prompt.inputs
            prompt = request.prompt if is_same else replace(request.prompt, inputs=own[0].inputs)
            changed.append(replace(request, prompt=prompt))
            continue
        for n, episode in enumerate(own, start=request.first):
            prompt = replace(request.prompt, id=f"{request.prompt.id} #{n}", inputs=episode.inputs)
            changed.append(Request(prompt, 1, first=n))
    return changed


def join_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """``Rollouts.cat``, where the rows of a group may have begun differently in different parts."""
    if "prompt_ids" not in parts[0].shared:
        return Rollouts.cat(parts)
    # under other ids, so that no groups of different parts are joined before their prompts are
    # compared
    renamed = [
        tuple(replace(prompt, id=f"{n} {prompt.id}") for prompt in part.prompts)
        for n, part in enumerate(parts)
    ]
    apart = [replace(part, prompts=prompts) for part, prompts in zip(parts, renamed, strict=True)]
    return regrouped(Rollouts.cat(apart), [prompt for part in parts for prompt in part.prompts])


def regrouped(rollouts: Rollouts, prompts: Sequence[Prompt]) -> Rollouts:
    """Join groups of the same prompt and draw. ``prompts``: the prompt of each group as it is in
    the data.

    Where their rows had different prompts, the common first tokens become the group's prompt, and
    the rest precedes each row's actions, where it is neither learned from nor counted as an answer.
    A row without a common token fails.
    """
    members: dict[tuple[str, int], list[int]] = {}
    for n, prompt in enumerate(prompts):
        members.setdefault((prompt.id, prompt.draw), []).append(n)
    if len(members) == len(prompts):
        return replace(rollouts, prompts=tuple(prompts))
    shared = dict(rollouts.shared)
    ids = (
        [x.tolist() for x in shared["prompt_ids"]]
        if "prompt_ids" in shared
        else [[n] for n in range(len(prompts))]
    )
    can_cut = {*shared} == {"prompt_ids"}  # other entries are of the whole prompt
    common: list[list[int]] = [[]] * len(prompts)
    heads, failed = list(common), set[int]()
    for own in members.values():
        first = ids[own[0]]
        alike = [n for n in own if ids[n] == first or (can_cut and ids[n][0] == first[0])]
        failed |= {*own} - {*alike}
        columns = zip(*(ids[n] for n in alike), strict=False)
        prefix = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
        for n in own:
            common[n] = prefix
        for n in alike:
            heads[n] = ids[n][len(prefix) :]
    if "prompt_ids" in shared:
        shared["prompt_ids"] = tuple(map(torch.tensor, common))
    groups = rollouts.group_ids.tolist()
    rollouts = Rollouts.cat([replace(rollouts, prompts=tuple(prompts), shared=shared)])
    if not any(heads) and not failed:
        return rollouts
    added = torch.tensor([len(heads[group]) for group in groups])  # [B]
    lengths, per_row = rollouts.lengths + added, dict(rollouts.per_row)
    width, names = (
        max(int(lengths.max()), 1),
        ("actions", "mask", "sampler_logprobs", "policy_version"),
    )
    # [B, width]; the mask is False on what is added, so that it is not learned from
    fields: dict[str, Any] = {
        name: shifted(getattr(rollouts, name), added, width) for name in names
    }
    for row, group in enumerate(groups):
        fields["actions"][row, : len(heads[group])] = torch.tensor(heads[group]).long()
    if "turn_ends" in per_row:
        ends = zip(per_row["turn_ends"], added.tolist(), strict=True)
        per_row["turn_ends"] = tuple(tuple(end + n for end in own) for own, n in ends)
    if failed:
        rows = zip(groups, per_row.get("environment_failure", (None,) * len(groups)), strict=True)
        per_row["environment_failure"] = tuple(
            UNLIKE if group in failed else failure for group, failure in rows
        )
    pairs = zip(groups, rollouts.finish, strict=True)
    finish: tuple[Finish, ...] = tuple("error" if group in failed else own for group, own in pairs)
    return replace(rollouts, lengths=lengths, finish=finish, per_row=per_row, **fields)


def shifted(
    x: Shaped[Tensor, "B T"], by: Int[Tensor, "B"], columns: int, fill: float = 0
) -> Shaped[Tensor, "B C"]:
    """Rows moved to the right, each by its own number of columns."""
    moved = x.new_full((len(x), columns), fill)  # [B, C]
    for row, start in enumerate(by.tolist()):
        end = min(start + x.shape[1], columns)
        moved[row, start:end] = x[row, : end - start]
    return moved


class ConversationEngine(Engine):
    """An engine whose rollouts are conversations with an environment."""

    def __init__(
        self, engine: Any, environment: Environment, check_prompt: Callable[..., str | None]
    ) -> None:
        self.engine, self.environment, self.check_prompt = engine, environment, check_prompt
        self.concurrency = engine.concurrency

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

    def sync(self, policy: Any, version: int) -> None:
        self.engine.sync(policy, version)

    def sleep(self) -> None:
        self.engine.sleep()

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    def progress(self) -> str:
        return self.engine.progress()

    def close(self) -> None:
        self.environment.close()
        self.engine.close()


def completion_lengths(rollouts: Rollouts) -> Int[Tensor, "B"]:
    """Actions of the policy in each row, without the tokens of the environment."""
    return rollouts.mask.sum(dim=1) if "turns" in rollouts.per_row else rollouts.lengths


def environment_failures(rollouts: Rollouts) -> dict[int, str]:
    """Row to reason, of the rows whose environment failed."""
    reasons: Sequence[str | None] = rollouts.per_row.get("environment_failure", ())
    return {row: reason for row, reason in enumerate(reasons) if reason is not None}
