"""Conversations: the policy writes, the environment replies, until one of them is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from gruppo.environments.classes import Episode
from gruppo.environments.environment import Environment
from gruppo.environments.tools import COUNTS
from gruppo.seeds import seed_at
from gruppo.timeouts import CallError, describe_error
from gruppo.types import DataError, Finish, GruppoError, Prompt, Request, Rollouts

UNLIKE = (
    "reset began it with other tokens than the first conversation of its group, but the rows of a group share the "
    "beginning of their prompts. Let reset(seed) return the same for the same seed and columns"
)


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

    ``generate`` and ``continue_rollouts`` (the next turn of rows that got a reply) are those of an engine or a policy.
    A row ends as "stop" where its environment returns None or the policy has given ``environment.turns`` answers; as
    "length" where the policy has written ``sampling.max_actions`` tokens in all, or the model's context is full; as
    "error" where the environment fails, or begins with a prompt that ``check_prompt`` refuses. ``per_row`` then has
    ``state`` (the dict of its conversation), ``turns`` (answers of the policy), ``turn_ends`` (the last column of
    each), ``ended`` (whether the environment ended it), ``policy_text`` (everything the policy wrote, as one text),
    ``sample`` (its number in the group), ``environment_failure`` (a text or None), ``context_full`` (1 if it ended at
    a turn that did not fit the model's context) and ``reencoded`` (turns that read the whole history again, since its
    keys and values were not kept). With tools it has ``tool_counts``, one number for each of ``COUNTS``; with
    environments of a class, ``inputs``, what the row was prompted with, and ``environment_rewards``.
    """
    episodes = [
        episode_of(request.prompt, n, seed)
        for request in requests
        for n in range(request.first, request.first + request.size)
    ]
    try:
        environment.open(episodes)
        for episode in episodes if environment.classes else ():
            if episode.failure is None:
                try:
                    episode.failure = check_prompt(replace(episode.prompt, inputs=episode.inputs), sampling)
                except Exception as problem:  # messages of reset that the chat template does not take
                    episode.failure = str(problem) if isinstance(problem, GruppoError) else describe_error(problem)
            if episode.failure is not None:  # the row is sampled as any other, and left out
                episode.inputs = episode.prompt.inputs
        has_more_turns = environment.turns > 1
        own = [replace(request, has_more_turns=has_more_turns) for request in prompted(requests, episodes)]
        # no name for the first turn here: it would hold the keys and values of its rows to the end
        first = partial(generate, own, sampling, seed=seed)
        rollouts = _turns(first, continue_rollouts, environment, requests, episodes, sampling, seed)
    finally:
        environment.close(episodes)
    if not environment.classes:
        return rollouts
    of_rows, groups = [r.prompt for r in requests for _ in range(r.size)], rollouts.group_ids.tolist()
    return regrouped(rollouts, [of_rows[groups.index(group)] for group in range(len(rollouts.prompts))])


def episode_of(prompt: Prompt, sample: int, seed: int) -> Episode:
    """A new conversation; addressed by draw and sample, so that neither order nor company of the rows changes it."""
    return Episode(
        prompt=prompt,
        seed=seed_at(seed, "environment", prompt.draw, sample),
        group_seed=seed_at(seed, "environment", prompt.draw),
        inputs=prompt.inputs,
    )


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
    """The requests with the prompts of their environments. Rows with different prompts become groups of their own."""
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


def _turns(
    first: Callable[[], Rollouts],
    continue_rollouts: Callable[..., Rollouts],
    environment: Environment,
    requests: Sequence[Request],
    episodes: Sequence[Episode],
    sampling: Any,
    seed: int,
) -> Rollouts:
    """The rollouts of ``first`` with their further turns."""
    rollouts = first()
    samples = [request.first + i for request in requests for i in range(request.size)]
    texts = tuple(output if isinstance(output, str) else output[-1]["content"] for output in rollouts.completions)
    texts = rollouts.per_row.get("text", texts)  # as written, where the message is without the calls in it
    failures = {row: episode.failure for row, episode in enumerate(episodes) if episode.failure is not None}
    per_row = {"sample": torch.tensor(samples), "text": texts, "environment_failure": (None,) * len(rollouts)}
    per_row |= {name: torch.zeros(len(rollouts), dtype=torch.long) for name in ("context_full", "reencoded")}
    rollouts = replace(rollouts, per_row={**rollouts.per_row, **per_row})
    policy_texts = list(texts)
    turns = torch.ones(len(rollouts), dtype=torch.long)
    turn_ends = [[length - 1] for length in rollouts.lengths.tolist()]
    ended = torch.zeros(len(rollouts), dtype=torch.bool)
    active = [row for row, finish in enumerate(rollouts.finish) if finish != "error" and row not in failures]
    while active:
        calls, replies = {}, {}
        for row in active:
            episode = calls[row] = episodes[row]
            episode.completion, episode.text = rollouts.completions[row], rollouts.per_row["text"][row]
            episode.turn = int(turns[row])
            # a row that was cut at max_actions has no room for another turn, whatever the environment says
            episode.is_last = not (turns[row] < environment.turns and rollouts.finish[row] == "stop")
        for row, answer in environment.replies(calls).items():
            if isinstance(answer, CallError):
                failures[row] = answer.message
            elif answer is None:
                ended[row] = True
            elif not calls[row].is_last:
                replies[row] = answer
        if not replies:
            break
        before = rollouts.mask.sum(dim=1)
        options = {"seed": seed, "max_reply_tokens": environment.max_reply_tokens}
        rollouts = continue_rollouts(rollouts, replies, sampling, **options)
        has_answered = rollouts.mask.sum(dim=1) > before
        turns += has_answered
        for row in has_answered.nonzero()[:, 0].tolist():
            turn_ends[row].append(int(rollouts.lengths[row]) - 1)
        active = [row for row in replies if has_answered[row] and rollouts.finish[row] != "error"]
        for row in active:
            policy_texts[row] += rollouts.per_row["text"][row]
    # replies that the policy could not read fail in continue_rollouts
    failures |= environment_failures(rollouts)
    for row, failure in failures.items():
        episodes[row].failure = failure
    environment.finish(episodes, turns.tolist())
    failures |= {row: episode.failure for row, episode in enumerate(episodes) if episode.failure is not None}
    finishes: dict[int, Finish] = dict.fromkeys(failures, "error")
    finish = tuple(finishes.get(row, finish) for row, finish in enumerate(rollouts.finish))
    per_row = {name: value for name, value in rollouts.per_row.items() if name not in ("text", "kept")}
    per_row |= {"state": tuple(episode.state for episode in episodes), "turns": turns, "ended": ended}
    per_row |= {"turn_ends": tuple(map(tuple, turn_ends)), "policy_text": tuple(policy_texts)}
    per_row["environment_failure"] = tuple(failures.get(row) for row in range(len(episodes)))
    if environment.tools:
        counts = [[episode.counts.get(name, 0) for name in COUNTS] for episode in episodes]
        per_row["tool_counts"] = torch.tensor(counts).reshape(-1, len(COUNTS))
    if environment.classes:
        per_row["inputs"] = tuple(episode.inputs for episode in episodes)
        per_row["environment_rewards"] = tuple(episode.rewards for episode in episodes)
    return replace(rollouts, finish=finish, per_row=per_row)


def join_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """``Rollouts.cat``, where the rows of a group may have begun differently in different parts."""
    if "prompt_ids" not in parts[0].shared:
        return Rollouts.cat(parts)
    apart = [
        replace(part, prompts=tuple(replace(prompt, id=f"{n} {prompt.id}") for prompt in part.prompts))
        for n, part in enumerate(parts)
    ]
    return regrouped(Rollouts.cat(apart), [prompt for part in parts for prompt in part.prompts])


def regrouped(rollouts: Rollouts, prompts: Sequence[Prompt]) -> Rollouts:
    """Join groups of the same prompt and draw. ``prompts``: the prompt of each group as it is in the data.

    Where their rows had different prompts, the common first tokens become the group's prompt, and the rest precedes
    each row's actions, where it is neither learned from nor counted as an answer. A row without a common token fails.
    """
    members: dict[tuple[str, int], list[int]] = {}
    for n, prompt in enumerate(prompts):
        members.setdefault((prompt.id, prompt.draw), []).append(n)
    if len(members) == len(prompts):
        return replace(rollouts, prompts=tuple(prompts))
    shared = dict(rollouts.shared)
    ids = [x.tolist() for x in shared["prompt_ids"]] if "prompt_ids" in shared else [[n] for n in range(len(prompts))]
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
    added = torch.tensor([len(heads[group]) for group in groups])
    lengths, per_row = rollouts.lengths + added, dict(rollouts.per_row)
    width = max(int(lengths.max()), 1)
    names = ("actions", "mask", "sampler_logprobs", "policy_version")
    fields: dict[str, Any] = {name: shifted(getattr(rollouts, name), added, width) for name in names}
    for row, group in enumerate(groups):
        fields["actions"][row, : len(heads[group])] = torch.tensor(heads[group]).long()
    if "turn_ends" in per_row:
        ends = zip(per_row["turn_ends"], added.tolist(), strict=True)
        per_row["turn_ends"] = tuple(tuple(end + n for end in own) for own, n in ends)
    if failed:
        before = per_row.get("environment_failure", (None,) * len(groups))
        failures = [UNLIKE if group in failed else failure for group, failure in zip(groups, before, strict=True)]
        per_row["environment_failure"] = tuple(failures)
    pairs = zip(groups, rollouts.finish, strict=True)
    finish: tuple[Finish, ...] = tuple("error" if group in failed else own for group, own in pairs)
    return replace(rollouts, lengths=lengths, finish=finish, per_row=per_row, **fields)


def shifted(x: Shaped[Tensor, "B T"], by: Int[Tensor, "B"], columns: int, fill: float = 0) -> Shaped[Tensor, "B C"]:
    """Rows moved to the right, each by its own number of columns."""
    moved = x.new_full((len(x), columns), fill)
    for row, start in enumerate(by.tolist()):
        end = min(start + x.shape[1], columns)
        moved[row, start:end] = x[row, : end - start]
    return moved


class ConversationEngine:
    """An engine whose rollouts are conversations with an environment."""

    def __init__(self, engine: Any, environment: Environment, check_prompt: Callable[..., str | None]) -> None:
        self.engine, self.environment, self.check_prompt = engine, environment, check_prompt
        self.concurrency = getattr(engine, "concurrency", 0)

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        sample, options = self.engine.generate, dict[str, Any](seed=seed, check_prompt=self.check_prompt)
        return converse(sample, self.engine.continue_rollouts, self.environment, requests, sampling, **options)

    def sync(self, policy: Any, version: int) -> None:
        self.engine.sync(policy, version)

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
