"""Sampling completions token by token, and continuing them after an environment's reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gruppo.core.distributions import sample_categorical
from gruppo.modalities.text.backbones import Decoding
from gruppo.modalities.text.chat import Chat
from gruppo.protocols import GenerateTokens
from gruppo.seeds import uniforms_at
from gruppo.timeouts import describe_error
from gruppo.types import DataError, Finish, Generated, Rollouts, Sampling, TokenBatch

if TYPE_CHECKING:
    from gruppo.modalities.text.policy import TextPolicy


@torch.no_grad()
def generate(
    decoding: Decoding,
    uniforms: Float[Tensor, "N T"],
    sampling: Sampling,
    chat: Chat,
    limits: Int[Tensor, "N"] | None = None,
) -> Generated:
    """Sample until each row has an end token, a stop text, or as many tokens as uniforms.

    ``limits``: maximum tokens of each row, 1 or more. A row is never read beyond its own limit, where the model's
    context may end, so that finished rows leave the batch at once. Without limits they leave once they are an eighth of
    it, since each removal copies the cache. A row whose logits are not finite ends as "error", with the tokens before.
    A stop text may name special tokens.
    """
    rows, columns = uniforms.shape
    tokens = torch.zeros(rows, columns, dtype=torch.long)
    logprobs = torch.zeros(rows, columns)
    lengths = torch.zeros(rows, dtype=torch.long)
    finish: list[Finish] = ["length"] * rows
    ends = torch.tensor(list(chat.eos_ids), dtype=torch.long)
    slots = torch.arange(rows)  # the row of each decoding slot
    is_open = torch.ones(rows, dtype=torch.bool)

    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p

    for t in range(columns):
        sampled, logprob = sample_categorical(
            decoding.logits, uniforms[slots, t], temperature=temperature, top_k=top_k, top_p=top_p
        )
        sampled, logprob = sampled.cpu(), logprob.float().cpu()
        broken = is_open & ~logprob.isfinite()
        good = is_open & ~broken
        tokens[slots[good], t], logprobs[slots[good], t] = sampled[good], logprob[good]
        lengths[slots[good]] += 1
        stopped = good & torch.isin(sampled, ends)
        if sampling.stop:
            for slot in (good & ~stopped).nonzero()[:, 0].tolist():
                row = int(slots[slot])
                text = chat.text_with_specials(tokens[row, : int(lengths[row])].tolist())
                stopped[slot] = any(stop in text for stop in sampling.stop)
        for row in slots[stopped].tolist():
            finish[row] = "stop"
        for row in slots[broken].tolist():
            finish[row] = "error"
        is_open = good & ~stopped
        if limits is not None:
            is_open &= lengths[slots] < limits[slots]
        remaining = int(is_open.sum())
        if remaining == 0 or t + 1 == columns:
            break
        if len(slots) - remaining >= (max(1, len(slots) // 8) if limits is None else 1):
            kept = is_open.nonzero()[:, 0]
            decoding.select(kept.to(decoding.logits.device))
            slots, is_open, sampled = slots[kept], is_open[kept], sampled[kept]
        decoding.advance(torch.where(is_open, sampled, 0).to(decoding.logits.device))
    return Generated(tokens, logprobs, lengths, tuple(finish))


def generate_locally(policy: TextPolicy, batch: TokenBatch, sampling: Sampling, seed: int) -> Generated:
    """Sample the rows of a batch from the policy's own weights."""
    if batch.limits is None:
        uniforms = torch.stack([uniforms_at(seed, *address, sampling.max_actions) for address in batch.addresses])
    else:
        uniforms = torch.zeros(len(batch.owners), int(batch.limits.max()), dtype=torch.float64)
        for row, (start, limit) in enumerate(zip(batch.starts, batch.limits.tolist(), strict=True)):
            uniforms[row, :limit] = uniforms_at(seed, *batch.addresses[row], start + limit)[start:]
    prompts = [ids.to(policy.device) for ids in batch.prompts]
    prefixes = None if batch.prefixes is None else [ids.to(policy.device) for ids in batch.prefixes]
    with torch.no_grad():
        decoding = policy.backbone.start(prompts, batch.owners.to(policy.device), prefixes)
        return generate(decoding, uniforms, sampling, policy.chat, batch.limits)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the first stop text."""
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


# --- further turns of a conversation ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Turn:
    """The next turn of one row."""

    row: int
    reply: Any
    prefix: Int[Tensor, "T"]
    """Tokens of the row so far."""
    added: Int[Tensor, "R"]
    """Tokens of the reply and of the template around it."""
    limit: int
    """Tokens that the policy may still sample."""


def next_turns(
    policy: TextPolicy, rollouts: Rollouts, replies: Mapping[int, Any], sampling: Sampling, max_reply_tokens: int
) -> tuple[Rollouts, list[Turn]]:
    """Encode the reply to each row, and return the turns that can be sampled.

    A row without space for another token ends as "length", one whose reply cannot be encoded as "error"; both stay as
    they are.
    """
    turns: list[Turn] = []
    finish, failures = list(rollouts.finish), list(rollouts.per_row["environment_failure"])
    for row, reply in sorted(replies.items()):
        group = int(rollouts.group_ids[row])
        prefix = rollouts.actions[row, : int(rollouts.lengths[row])]
        is_closed = len(prefix) > 0 and int(prefix[-1]) in policy.chat.eos_ids
        try:
            reply = _truncate(policy, reply, max_reply_tokens)
            inputs, completion = rollouts.prompts[group].inputs, rollouts.completions[row]
            added = torch.tensor(policy.chat.encode_reply(inputs, completion, reply, is_closed=is_closed)).long()
        except Exception as problem:  # a role unknown to the template, a character unknown to the tokenizer
            why = str(problem) if isinstance(problem, DataError) else describe_error(problem)
            finish[row], failures[row] = "error", f"its reply cannot be written: {why}"
            continue
        limit = sampling.max_actions - int(rollouts.mask[row].sum())
        if policy.context is not None:
            before = len(rollouts.shared["prompt_ids"][group]) + len(prefix) + len(added)
            limit = min(limit, policy.context - before)
        if limit > 0:
            turns.append(Turn(row, reply, prefix, added, limit))
        else:
            finish[row] = "length"
    per_row = {**rollouts.per_row, "environment_failure": tuple(failures)}
    return replace(rollouts, finish=tuple(finish), per_row=per_row), turns


def _truncate(policy: TextPolicy, reply: Any, max_tokens: int) -> Any:
    """Cut a reply to ``max_tokens`` tokens of text; messages beyond them become empty."""
    if isinstance(reply, str):
        ids = policy.chat.encode_text(reply)
        if len(ids) <= max_tokens:
            return reply
        return policy.chat.text(ids[:max_tokens]).rstrip("\ufffd")  # the last token may end within a character
    messages = []
    for message in reply:
        content = _truncate(policy, message["content"], max_tokens)
        max_tokens -= min(max_tokens, len(policy.chat.encode_text(content)))
        messages.append({**message, "content": content})
    return messages


def append_turns(
    policy: TextPolicy,
    generate: GenerateTokens,
    rollouts: Rollouts,
    turns: Sequence[Turn],
    sampling: Sampling,
    seed: int,
) -> Rollouts:
    """Append to each of these rows its reply, with mask False, and a sampled turn of the policy.

    Randomness depends on (seed, draw, sample) and on the number of tokens sampled in the row before. Histories are read
    again each turn, the prompt of a group once.
    """
    rows = torch.tensor([turn.row for turn in turns])
    groups, owners = rollouts.group_ids[rows].unique(return_inverse=True)
    draws = [rollouts.prompts[group].draw for group in rollouts.group_ids[rows].tolist()]
    prefixes = tuple(torch.cat([turn.prefix, turn.added]) for turn in turns)
    batch = TokenBatch(
        prompts=tuple(rollouts.shared["prompt_ids"][group] for group in groups.tolist()),
        owners=owners,
        addresses=tuple(zip(draws, rollouts.per_row["sample"][rows].tolist(), strict=True)),
        starts=tuple(rollouts.mask[rows].sum(dim=1).tolist()),
        prefixes=prefixes,
        limits=torch.tensor([turn.limit for turn in turns]),
    )
    generated = generate(batch, sampling, seed)

    lengths, finish, completions = rollouts.lengths.clone(), list(rollouts.finish), list(rollouts.completions)
    texts, counts = list(rollouts.per_row["text"]), generated.lengths.tolist()
    ends = [len(prefix) + count for prefix, count in zip(prefixes, counts, strict=True)]
    padding = (0, max(0, max(ends) - rollouts.actions.shape[1]))
    columns = (rollouts.actions, rollouts.mask, rollouts.sampler_logprobs, rollouts.policy_version)
    actions, mask, logprobs, versions = (torch.nn.functional.pad(x, padding) for x in columns)
    for place, (turn, end) in enumerate(zip(turns, ends, strict=True)):
        row, count = turn.row, counts[place]
        span, ids = slice(end - count, end), generated.tokens[place, :count]
        actions[row, len(turn.prefix) : span.start], actions[row, span] = turn.added, ids
        mask[row, span] = True
        logprobs[row, span] = generated.logprobs[place, :count]
        if generated.versions is not None:
            versions[row, span] = generated.versions[place, :count]
        lengths[row], finish[row] = end, generated.finish[place]
        texts[row] = cut_at_stop(policy.chat.text(ids.tolist()), sampling.stop)
        if isinstance(completions[row], str):
            completions[row] += turn.reply + texts[row]
        else:
            completions[row] = [*completions[row], *turn.reply, {"role": "assistant", "content": texts[row]}]
    return replace(
        rollouts,
        actions=actions,
        mask=mask,
        lengths=lengths,
        completions=tuple(completions),
        sampler_logprobs=logprobs,
        policy_version=versions,
        finish=tuple(finish),
        per_row={**rollouts.per_row, "text": tuple(texts)},
    )
