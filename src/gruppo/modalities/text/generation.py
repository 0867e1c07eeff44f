"""Sampling completions token by token, and continuing them after an environment's reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from gruppo.core.distributions import sample_categorical
from gruppo.modalities.text.backbones import Decoding
from gruppo.modalities.text.chat import Chat, cut_at_stop
from gruppo.modalities.text.decoding import FusedDecoder, KeptRow, LayeredDecoding
from gruppo.modalities.text.layouts import Texts
from gruppo.platforms import free_bytes
from gruppo.protocols import GenerateTokens
from gruppo.seeds import uniforms_at
from gruppo.timeouts import describe_error
from gruppo.types import DataError, Finish, Generated, Rollouts, Sampling, TokenBatch

if TYPE_CHECKING:
    from gruppo.modalities.text.policy import TextPolicy

KEPT_FRAC = 0.5
"""Share of the free memory that the rows of one batch may keep. Each is copied once more while it
is decoded."""
_FUSED: WeakValueDictionary[Any, FusedDecoder] = WeakValueDictionary()
"""By ``FusedDecoder.weights``: the copies of weights that kept rows hold, so that all batches hold
the same."""


@torch.no_grad()
def generate_locally(
    policy: TextPolicy, batch: TokenBatch, sampling: Sampling, seed: int
) -> Generated:
    """Sample the rows of a batch from the policy's own weights."""
    device = policy.device
    prompts = [ids.to(device) for ids in batch.prompts]
    prefixes = batch.prefixes and [ids.to(device) for ids in batch.prefixes]
    start = partial(policy.backbone.start, prompts, batch.owners.to(device), prefixes)
    options = (_uniforms(batch, sampling, seed), sampling, policy.chat, batch.limits)
    if batch.kept is None:
        return generate(start(), *options)
    # conversations: rows continue behind the keys and values that their last turn has left
    weights = policy.weight_version()
    histories = [batch.prompts[owner] for owner in batch.owners.tolist()]
    if batch.prefixes is not None:
        histories = [torch.cat(parts) for parts in zip(histories, batch.prefixes, strict=True)]
    usable = [
        row if row is not None and row.fits(ids, weights) else None
        for row, ids in zip(batch.kept, histories, strict=True)
    ]
    decoding = start(usable, _FUSED.get(weights))
    if not isinstance(decoding, LayeredDecoding):
        return replace(generate(decoding, *options), kept=(None,) * len(histories))
    decoding.fused.weights = weights
    _FUSED[weights] = decoding.fused
    decoding.room = int(KEPT_FRAC * free_bytes(device))
    return generate(decoding, *options, histories)


def _uniforms(batch: TokenBatch, sampling: Sampling, seed: int) -> Float[Tensor, "N T"]:
    """A number for each token, by the row's address and the tokens that were sampled in it
    before."""
    count = len(batch.addresses)
    starts = batch.starts or (0,) * count
    limits = [sampling.max_actions] * count if batch.limits is None else batch.limits.tolist()
    rows = zip(batch.addresses, starts, limits, strict=True)
    return pad_sequence(
        [uniforms_at(seed, *address, start + limit)[start:] for address, start, limit in rows],
        batch_first=True,
    )


@torch.no_grad()
def generate(
    decoding: Decoding,
    uniforms: Float[Tensor, "N T"],
    sampling: Sampling,
    chat: Chat,
    limits: Int[Tensor, "N"] | None = None,
    histories: Texts | None = None,
) -> Generated:
    """Sample until each row has an end token, a stop text, or as many tokens as uniforms.

    ``limits``: maximum tokens of each row, 1 or more. A row is never read beyond its own limit,
    where the model's context may end, so that finished rows leave the batch at once. Without limits
    they leave once they are an eighth of it, since each removal copies the cache. A row whose
    logits are not finite ends as "error", with the tokens before. A stop text may name special
    tokens. With ``histories``, the tokens before each row's first, what has been read of rows that
    stop is kept.
    """
    rows, columns = uniforms.shape
    tokens = torch.zeros(rows, columns, dtype=torch.long)
    logprobs = torch.zeros(rows, columns)
    lengths = torch.zeros(rows, dtype=torch.long)
    finish: list[Finish] = ["length"] * rows
    kept: list[KeptRow | None] = [None] * rows
    slots = torch.arange(rows)  # the row of each decoding slot
    is_open = torch.ones(rows, dtype=torch.bool)
    for t in range(columns):
        sampled, logprob = sample_categorical(
            decoding.logits,
            uniforms[slots, t],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        # the wait for the device in each step
        sampled, logprob = sampled.cpu(), logprob.float().cpu()
        is_finite = logprob.isfinite()
        for row in slots[is_open & ~is_finite].tolist():
            finish[row] = "error"
        is_open &= is_finite
        written = slots[is_open]
        tokens[written, t], logprobs[written, t] = sampled[is_open], logprob[is_open]
        lengths[written] += 1
        for slot in _stopped(is_open, sampled, tokens[slots, : t + 1], chat, sampling.stop):
            row = int(slots[slot])
            finish[row] = "stop"
            is_open[slot] = False
            if histories is not None and isinstance(decoding, LayeredDecoding):
                kept[row] = decoding.keep(slot, t, torch.cat([histories[row], tokens[row, :t]]))
        if limits is not None:
            is_open &= t + 1 < limits[slots]
        remaining = int(is_open.sum())
        if remaining == 0 or t + 1 == columns:
            break
        if len(slots) - remaining >= (max(1, len(slots) // 8) if limits is None else 1):
            stay = is_open.nonzero()[:, 0]
            decoding.select(stay.to(decoding.logits.device))
            slots, is_open, sampled = slots[stay], is_open[stay], sampled[stay]
        # rows that have ended, and have not left yet, read any token: nothing of theirs is used
        # again
        decoding.advance(torch.where(is_open, sampled, 0).to(decoding.logits.device))
    states = None if histories is None else tuple(kept)
    return Generated(tokens, logprobs, lengths, tuple(finish), kept=states)


def _stopped(
    is_open: Bool[Tensor, "N"],
    sampled: Int[Tensor, "N"],
    tokens: Int[Tensor, "N t"],
    chat: Chat,
    stop: Sequence[str],
) -> list[int]:
    """Open rows that have sampled an end token, or whose tokens hold a stop text."""
    ended = is_open & torch.isin(sampled, torch.tensor(chat.eos_ids, dtype=torch.long))
    for row in (is_open & ~ended).nonzero()[:, 0].tolist() if stop else ():
        text = chat.text_with_specials(tokens[row].tolist())
        ended[row] = any(part in text for part in stop)
    return ended.nonzero()[:, 0].tolist()


# --- further turns of a conversation --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Turn:
    """The next turn of one row."""

    row: int
    reply: Any
    prefix: Int[Tensor, "T"]
    """Tokens of the row so far, and of the reply and the template around it."""
    limit: int
    """Tokens that the policy may still sample."""
    is_last: bool
    """Whether the model's context ends at the limit: a turn that reaches it does not fit."""


def next_turns(
    policy: TextPolicy,
    rollouts: Rollouts,
    replies: Mapping[int, Any],
    sampling: Sampling,
    max_reply_tokens: int,
) -> tuple[Rollouts, list[Turn]]:
    """Encode the reply to each row, and return the turns that can be sampled.

    A row without space for another token ends as "length", one whose reply cannot be encoded as
    "error"; both stay as they are. What was kept of rows without a turn is dropped.
    """
    turns: list[Turn] = []
    finish = list(rollouts.finish)
    failures = list(rollouts.per_row["environment_failure"])
    is_full = rollouts.per_row["context_full"].clone()
    for row, reply in sorted(replies.items()):
        try:
            turn = _next_turn(policy, rollouts, row, reply, sampling, max_reply_tokens)
        except Exception as error:  # a role or a character that template or tokenizer do not know
            why = str(error) if isinstance(error, DataError) else describe_error(error)
            finish[row] = "error"
            failures[row] = f"its reply cannot be written: {why}"
            continue
        if turn.limit > 0:
            turns.append(turn)
        else:
            finish[row] = "length"
            is_full[row] = turn.is_last
    per_row = {**rollouts.per_row, "environment_failure": tuple(failures), "context_full": is_full}
    if (kept := per_row.get("kept")) is not None:
        rows = {turn.row for turn in turns}
        per_row["kept"] = tuple(state if row in rows else None for row, state in enumerate(kept))
    return replace(rollouts, finish=tuple(finish), per_row=per_row), turns


def _next_turn(
    policy: TextPolicy,
    rollouts: Rollouts,
    row: int,
    reply: Any,
    sampling: Sampling,
    max_reply_tokens: int,
) -> Turn:
    group = int(rollouts.group_ids[row])
    prompt = rollouts.prompts[group]
    before = rollouts.actions[row, : int(rollouts.lengths[row])]
    reply = _truncate(policy.chat, reply, max_reply_tokens)
    ids = policy.chat.encode_reply(
        prompt.inputs,
        rollouts.completions[row],
        reply,
        is_closed=len(before) > 0 and int(before[-1]) in policy.chat.eos_ids,
        tools=policy.tools_of(prompt),
    )
    prefix = torch.cat([before, torch.tensor(ids).long()])
    limit = space = sampling.max_actions - int(rollouts.mask[row].sum())
    if policy.context is not None:
        space = policy.context - len(rollouts.shared["prompt_ids"][group]) - len(prefix)
    return Turn(row, reply, prefix, min(limit, space), is_last=space < limit)


def _truncate(chat: Chat, reply: Any, max_tokens: int) -> Any:
    """Cut a reply to ``max_tokens`` tokens of text; messages beyond them become empty."""
    if isinstance(reply, str):
        ids = chat.encode_text(reply)
        # the last token may end within a character
        return reply if len(ids) <= max_tokens else chat.text(ids[:max_tokens]).rstrip("\ufffd")
    messages = []
    for message in reply:
        content = _truncate(chat, message["content"], max_tokens)
        max_tokens -= min(max_tokens, len(chat.encode_text(content)))
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

    Randomness depends on (seed, draw, sample) and on the number of tokens sampled in the row
    before. A turn that the model's context cuts is left out with its reply: its row ends as
    "length" behind its last whole turn.
    """
    batch = _batch_of(rollouts, turns)
    was_kept = [row is not None and bool(row.suffix) for row in batch.kept or ()]
    generated = generate(batch, sampling, seed)
    per_row = dict(rollouts.per_row)
    if batch.kept is not None and generated.kept is not None:
        kept, reencoded = list(per_row["kept"]), per_row["reencoded"].clone()
        # a history is read again if nothing was kept of it, or if no decoding has taken what was
        # kept
        for turn, is_ready, before, after in zip(
            turns, was_kept, batch.kept, generated.kept, strict=True
        ):
            reencoded[turn.row] += not (is_ready and not before.suffix)
            kept[turn.row] = after
        per_row |= {"kept": tuple(kept), "reencoded": reencoded}
    return _join_turns(policy, replace(rollouts, per_row=per_row), turns, generated, sampling.stop)


def _batch_of(rollouts: Rollouts, turns: Sequence[Turn]) -> TokenBatch:
    rows = torch.tensor([turn.row for turn in turns])
    groups, owners = rollouts.group_ids[rows].unique(return_inverse=True)
    draws = [rollouts.prompts[group].draw for group in rollouts.group_ids[rows].tolist()]
    kept = rollouts.per_row.get("kept")
    return TokenBatch(
        prompts=tuple(rollouts.shared["prompt_ids"][group] for group in groups.tolist()),
        owners=owners,
        addresses=tuple(zip(draws, rollouts.per_row["sample"][rows].tolist(), strict=True)),
        starts=tuple(rollouts.mask[rows].sum(dim=1).tolist()),
        prefixes=tuple(turn.prefix for turn in turns),
        limits=torch.tensor([turn.limit for turn in turns]),
        kept=None if kept is None else tuple(kept[turn.row] for turn in turns),
    )


def _join_turns(
    policy: TextPolicy,
    rollouts: Rollouts,
    turns: Sequence[Turn],
    generated: Generated,
    stop: Sequence[str],
) -> Rollouts:
    """Rollouts with replies and sampled turns behind the rows' tokens."""
    ends = [
        len(turn.prefix) + count
        for turn, count in zip(turns, generated.lengths.tolist(), strict=True)
    ]
    padding = (0, max(0, max(ends) - rollouts.actions.shape[1]))
    names = ("actions", "mask", "sampler_logprobs", "policy_version")
    columns: dict[str, Any] = {name: F.pad(getattr(rollouts, name), padding) for name in names}
    lengths = rollouts.lengths.clone()
    is_full = rollouts.per_row["context_full"].clone()
    finish, completions = list(rollouts.finish), list(rollouts.completions)
    texts = list(rollouts.per_row["text"])
    for n, (turn, end) in enumerate(zip(turns, ends, strict=True)):
        row, start = turn.row, len(turn.prefix)
        finish[row] = generated.finish[n]
        if turn.is_last and finish[row] == "length":
            is_full[row] = True
            continue
        count = end - start
        ids = generated.tokens[n, :count]
        columns["actions"][row, :end] = torch.cat([turn.prefix, ids])
        columns["mask"][row, start:end] = True
        columns["sampler_logprobs"][row, start:end] = generated.logprobs[n, :count]
        if generated.versions is not None:
            columns["policy_version"][row, start:end] = generated.versions[n, :count]
        lengths[row] = end
        texts[row] = cut_at_stop(policy.chat.text(ids.tolist()), stop)
        tools = policy.tools_of(rollouts.prompts[int(rollouts.group_ids[row])])
        answer = policy.completion(ids.tolist(), texts[row], turn.reply, tools, stop)
        if isinstance(answer, str):
            completions[row] += turn.reply + answer
        else:
            completions[row] = [*completions[row], *turn.reply, *answer]
    return replace(
        rollouts,
        lengths=lengths,
        completions=tuple(completions),
        finish=tuple(finish),
        per_row={**rollouts.per_row, "text": tuple(texts), "context_full": is_full},
        **columns,
    )
