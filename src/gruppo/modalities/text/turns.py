"""Rows that got a reply, written on: the reply is read, what the policy answers to it is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from gruppo.modalities.text.generation import Written, cut_at_stop, write
from gruppo.seeds import uniforms_at
from gruppo.timeouts import describe
from gruppo.types import DataError, Finish, Rollouts, Sampling

if TYPE_CHECKING:
    from gruppo.modalities.text.policy import TextPolicy


@dataclass(frozen=True, eq=False)
class _Turn:
    """One row's next turn."""

    row: int
    reply: Any
    own: Int[Tensor, "T"]
    """Of the row so far."""
    added: Int[Tensor, "R"]
    """Of the reply, and of what stands between speakers."""
    room: int
    """Tokens that the policy may still write."""


def written_on(
    policy: TextPolicy,
    rollouts: Rollouts,
    replies: Mapping[int, Any],
    sampling: Sampling,
    *,
    seed: int,
    max_reply_tokens: int,
    at_once: int,
) -> Rollouts:
    """The same rows, those in ``replies`` longer by a reply, whose mask is False, and by a turn of the policy.

    A row without room for another token stays as it is and ends as "length", one whose reply cannot be written as
    "error". Histories are read anew each turn, a group's prompt once.
    """
    turns: list[_Turn] = []
    ends: dict[int, Finish] = {}
    failed = list(rollouts.per_row["environment_failure"])
    for row, reply in sorted(replies.items()):
        try:
            turn = _turn(policy, rollouts, row, _cut(policy, reply, max_reply_tokens), sampling)
        except Exception as problem:  # a role that the template does not know, a letter that the tokenizer does not
            why = str(problem) if isinstance(problem, DataError) else describe(problem)
            ends[row], failed[row] = "error", f"its reply cannot be written: {why}"
            continue
        if turn.room > 0:
            turns.append(turn)
        else:
            ends[row] = "length"
    finish = tuple(ends.get(row, finish) for row, finish in enumerate(rollouts.finish))
    held = {**rollouts.per_row, "environment_failure": tuple(failed)}
    rollouts = replace(rollouts, finish=finish, per_row=held)
    for start in range(0, len(turns), at_once):
        part = turns[start : start + at_once]
        rollouts = _joined(policy, rollouts, part, _write(policy, rollouts, part, sampling, seed), sampling)
    return rollouts


def _turn(policy: TextPolicy, rollouts: Rollouts, row: int, reply: Any, sampling: Sampling) -> _Turn:
    group = int(rollouts.group_ids[row])
    own = rollouts.actions[row, : int(rollouts.lengths[row])]
    is_closed = len(own) > 0 and int(own[-1]) in policy.chat.eos_ids
    inputs = rollouts.prompts[group].inputs
    ids = policy.chat.encode_reply(inputs, rollouts.completions[row], reply, is_closed=is_closed)
    added = torch.tensor(ids, dtype=torch.long)
    room = sampling.max_actions - int(rollouts.mask[row].sum())
    if policy.context is not None:
        room = min(room, policy.context - len(rollouts.shared["prompt_ids"][group]) - len(own) - len(added))
    return _Turn(row, reply, own, added, room)


def _cut(policy: TextPolicy, reply: Any, tokens: int) -> Any:
    """The reply, of so many tokens of text at most; messages beyond them are empty."""
    if isinstance(reply, str):
        ids = policy.chat.encode_text(reply)
        return reply if len(ids) <= tokens else policy.chat.text(ids[:tokens]).rstrip("\ufffd")  # half a letter
    kept = []
    for message in reply:
        content = _cut(policy, message["content"], tokens)
        tokens -= min(tokens, len(policy.chat.encode_text(content)))
        kept.append({**message, "content": content})
    return kept


def _write(policy: TextPolicy, rollouts: Rollouts, turns: Sequence[_Turn], sampling: Sampling, seed: int) -> Written:
    """A token's randomness hangs on (seed, draw, sample) and on how many the policy wrote in the row before it."""
    limits = torch.tensor([turn.room for turn in turns])
    uniforms = torch.zeros(len(turns), int(limits.max()), dtype=torch.float64)
    for place, turn in enumerate(turns):
        row, wrote = turn.row, int(rollouts.mask[turn.row].sum())
        draw = rollouts.prompts[int(rollouts.group_ids[row])].draw
        own = uniforms_at(seed, draw, int(rollouts.per_row["sample"][row]), wrote + turn.room)
        uniforms[place, : turn.room] = own[wrote:]
    groups, owners = rollouts.group_ids[torch.tensor([turn.row for turn in turns])].unique(return_inverse=True)
    prompts = [rollouts.shared["prompt_ids"][group].to(policy.device) for group in groups.tolist()]
    behind = [torch.cat([turn.own, turn.added]).to(policy.device) for turn in turns]
    with torch.no_grad():
        decoding = policy.backbone.start(prompts, owners.to(policy.device), behind)
        text = policy.chat.text_with_specials
        return write(decoding, uniforms, sampling, eos_ids=policy.chat.eos_ids, text=text, limits=limits)


def _joined(
    policy: TextPolicy, rollouts: Rollouts, turns: Sequence[_Turn], written: Written, sampling: Sampling
) -> Rollouts:
    lengths, finish, outputs = rollouts.lengths.clone(), list(rollouts.finish), list(rollouts.completions)
    texts = list(rollouts.per_row["text"])
    ends = [int(lengths[t.row]) + len(t.added) + int(n) for t, n in zip(turns, written.lengths, strict=True)]
    columns = max(rollouts.actions.shape[1], *ends)
    actions, mask, logprobs, versions = (
        _wide(x, columns) for x in (rollouts.actions, rollouts.mask, rollouts.sampler_logprobs, rollouts.policy_version)
    )
    for place, (turn, end) in enumerate(zip(turns, ends, strict=True)):
        row, count = turn.row, int(written.lengths[place])
        begin, speaks = int(lengths[row]), end - count
        ids = written.tokens[place, :count]
        actions[row, begin:speaks], actions[row, speaks:end] = turn.added, ids
        mask[row, speaks:end] = True
        logprobs[row, speaks:end] = written.logprobs[place, :count]
        lengths[row], finish[row] = end, written.finish[place]
        texts[row] = cut_at_stop(policy.chat.text(ids.tolist()), sampling.stop)
        outputs[row] = _output(outputs[row], turn.reply, texts[row])
    return replace(
        rollouts,
        actions=actions,
        mask=mask,
        lengths=lengths,
        completions=tuple(outputs),
        sampler_logprobs=logprobs,
        policy_version=versions,
        finish=tuple(finish),
        per_row={**rollouts.per_row, "text": tuple(texts)},
    )


def _output(before: Any, reply: Any, text: str) -> Any:
    if isinstance(before, str):
        return before + reply + text
    return [*before, *reply, {"role": "assistant", "content": text}]


def _wide(x: Tensor, columns: int) -> Tensor:
    """A copy with room for so many columns."""
    return torch.cat([x, x.new_zeros(len(x), columns - x.shape[1])], dim=1)
