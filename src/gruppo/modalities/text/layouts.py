"""How rows are laid out for scoring, and split into micro-batches.

stream: groups one after another without padding, each prompt once and its completions behind it. P + G (R - 1) tokens
    instead of G (P + R), since a completion's last token predicts nothing. Attention runs over blocks of queries.
packed: a group as one row of P + G R tokens, under a block mask.
padded: each prompt with its completion as a row of its own.

In the first two, positions restart at the prompt's end, as if each completion were alone, and completions do not see
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Layout = Literal["stream", "packed", "padded"]
Texts = Sequence[Int[Tensor, "L"]]
"""Token ids of some texts, each of a length of its own."""

MULTIPLE = 16
"""Streams are padded to a multiple with tokens that see nothing and that nothing sees: a CPU's bfloat16 products of odd
sizes are a quarter slower."""
BLOCK_QUERIES = 128
"""Columns of one block: later columns are not multiplied and then masked."""
BLOCK_SCORES = 2**16
"""Scores of one head in one block: few enough for a processor's cache, enough for a full matrix product."""
SPAN_BLOCK = 128
"""Streams with spans are padded to a multiple of FlexAttention's block."""
SMALL_GROUP = 128
"""Tokens of a group up to which it is one text of a block, with a mask of its own: many small groups would be many
small operations. Attention of 12 groups of 52 tokens takes 10 ms in place of 35, forward and backward."""
WASTE = 1.25
"""Completions share a block if the longest is at most this much longer than the shortest."""


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """c texts of like length: some columns of each as queries, and all columns up to their end as keys.

    A text is a prompt, a completion, or a small group as a whole.
    """

    shared: slice
    """Tokens that all queries see: the prompt's. Empty in blocks of prompts and of groups."""
    tokens: Int[Tensor, "c s"]
    """Tokens of the texts; behind the end of a short one its first is repeated, unseen by real tokens."""
    first: int
    """The queries are ``tokens[:, first:]``, [c, r]."""
    bias: Float[Tensor, "*c r S"]
    """0 where a query sees a key, -inf elsewhere; keys are the shared tokens, then these. [c, 1, r, S] of groups."""
    real: Int[Tensor, "n"] | None
    """Indices over [c, r] of the queries that are tokens and not repetitions; None if all are."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Prompts and b completions laid out for one forward; ``start`` and ``prompt_end`` index the flattened ``ids``."""

    ids: Int[Tensor, "*g L"]
    positions: Int[Tensor, "*g L"]
    start: Int[Tensor, "b"]
    """Index of the first token of each completion."""
    prompt_end: Int[Tensor, "b"]
    """Index of the last token of each completion's prompt."""
    visible: Bool[Tensor, "g L L"] | None = None
    """[query, key] of packed rows: which tokens each token attends to."""
    blocks: tuple[AttentionBlock, ...] = ()
    """Of a stream, for attention block by block."""
    spans: Int[Tensor, "3 N"] | None = None
    """Of a stream without blocks: what each token sees, the tokens from the first number to before the second (its
    prompt's, as a completion) and those from the third to itself."""

    def before(self, completion: Int[Tensor, "n"], column: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """Index of the token whose features predict the action: the one before it, at first the prompt's last."""
        return torch.where(
            column == 0, self.prompt_end[completion], self.start[completion] + column - 1
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Tokens:
        """Move a stream to the device, with the biases in the dtype of the softmax; spans stay where they are.

        Without waiting for the device, as everywhere between forward and optimizer step.
        """
        blocks = []
        for block in self.blocks:
            tokens, bias = (
                block.tokens.to(device, non_blocking=True),
                block.bias.to(device, dtype, non_blocking=True),
            )
            real = None if block.real is None else block.real.to(device, non_blocking=True)
            blocks.append(replace(block, tokens=tokens, bias=bias, real=real))
        ids, positions = (x.to(device, non_blocking=True) for x in (self.ids, self.positions))
        return replace(self, ids=ids, positions=positions, blocks=tuple(blocks))


def stream(
    prompts: Texts,
    completions: Texts,
    owners: Int[Tensor, "b"],
    *,
    has_blocks: bool = True,
    small_group: int = 0,
) -> Tokens:
    """Lay out completions, without their last tokens, behind the prompts that own them (``owners``, indices).

    Attention is described by blocks, or without ``has_blocks`` by spans. Groups of up to ``small_group`` tokens share
    blocks, which changes the rounding of their attention.
    """
    parts, blocks, spans = list[tuple[Tensor, Tensor]](), list[AttentionBlock](), list[Tensor]()
    small: dict[
        int, Tensor
    ] = {}  # by the group's first token, the text of each token, 0 for the prompt
    start, prompt_end = torch.zeros(2, len(completions), dtype=torch.long)
    end = 0
    for p, prompt in enumerate(prompts):
        members = (owners == p).nonzero()[:, 0]
        ids, positions, sizes = _concatenate(
            prompt, [completions[c][:-1] for c in members.tolist()]
        )
        parts.append((ids, positions))
        ends = end + sizes.cumsum(0)
        start[members], prompt_end[members] = ends[:-1], ends[0] - 1
        if not has_blocks:
            past = end + len(prompt)  # the first completion follows its prompt: one span for both
            own = [
                [end, past, first] if first > past else [end, end, end]
                for first in ends[:-1].tolist()
            ]
            spans.append(torch.tensor([[end, end, end], *own]).mT.repeat_interleave(sizes, dim=1))
        elif len(ids) <= small_group:
            small[end] = torch.arange(len(sizes)).repeat_interleave(sizes)
        else:
            blocks += _blocks(slice(end, end), [(end, len(prompt))])
            texts = zip(ends[:-1].tolist(), sizes[1:].tolist(), strict=True)
            blocks += _blocks(slice(end, end + len(prompt)), list(texts))
        end += len(ids)
    # blocks of whole small groups
    for group in _of_like_length(0, [(first, len(text)) for first, text in small.items()]):
        text = pad_sequence(
            [small[first] for first, _ in group], batch_first=True, padding_value=-1
        )  # [c, s]
        column, is_real = torch.arange(text.shape[1]), text >= 0
        sees = (text[:, :, None] == text[:, None]) | (text == 0)[:, None]
        visible = sees & (
            column <= column[:, None]
        )  # padding is behind all tokens, and sees the prompt
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]
        tokens = torch.tensor([first for first, _ in group])[:, None] + torch.where(
            is_real, column, 0
        )
        real = None if is_real.all() else is_real.flatten().nonzero()[:, 0]
        blocks.append(AttentionBlock(slice(0, 0), tokens, 0, bias, real))
    padding = torch.zeros(-end % (MULTIPLE if has_blocks else SPAN_BLOCK), dtype=torch.long)
    parts.append((padding, padding))
    all_ids, all_positions = (torch.cat(part) for part in zip(*parts, strict=True))
    # padding sees itself and the padding before it
    all_spans = (
        None if has_blocks else torch.cat([*spans, torch.full((3, len(padding)), end)], dim=1)
    )
    return Tokens(all_ids, all_positions, start, prompt_end, blocks=tuple(blocks), spans=all_spans)


def pack(prompts: Texts, completions: Texts, owners: Int[Tensor, "b"]) -> Tokens:
    """Lay out each prompt and its completions as a row."""
    parts = []
    start, prompt_end = torch.zeros(2, len(completions), dtype=torch.long)
    for p, prompt in enumerate(prompts):
        members = (owners == p).nonzero()[:, 0]
        ids, positions, sizes = _concatenate(prompt, [completions[c] for c in members.tolist()])
        texts, ends = torch.arange(len(sizes)).repeat_interleave(sizes), sizes.cumsum(0)
        parts.append((ids, positions, texts, torch.ones(len(ids), dtype=torch.bool)))
        start[members], prompt_end[members] = ends[:-1], ends[0] - 1
    columns = (pad_sequence(list(part), batch_first=True) for part in zip(*parts, strict=True))
    all_ids, all_positions, text, is_real = columns  # [g, L]
    # causal, within the same text or the prompt (text 0); padding is seen by itself only
    column = torch.arange(all_ids.shape[1])
    causal = column[:, None] >= column[None, :]
    same, shared = text[:, :, None] == text[:, None, :], (text == 0)[:, None, :]
    visible = causal & (same | shared) & is_real[:, None, :]
    visible |= column[:, None] == column[None, :]
    row_start = owners * len(column)
    return Tokens(all_ids, all_positions, row_start + start, row_start + prompt_end, visible)


def pad(prompts: Texts, completions: Texts, owners: Int[Tensor, "b"]) -> Tokens:
    """Lay out each completion behind a copy of its prompt, as a row."""
    rows = [torch.cat([prompts[o], c]) for o, c in zip(owners.tolist(), completions, strict=True)]
    ids = pad_sequence(rows, batch_first=True)
    start = (
        torch.arange(len(rows)) * ids.shape[1]
        + torch.tensor([len(prompt) for prompt in prompts])[owners]
    )
    return Tokens(ids, torch.arange(ids.shape[1]).expand(ids.shape), start, start - 1)


LAY_OUT: dict[Layout, Callable[..., Tokens]] = {
    "stream": partial(stream, small_group=SMALL_GROUP),
    "packed": pack,
    "padded": pad,
}


def _concatenate(prompt: Tensor, completions: Texts) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and positions of a prompt and its completions, and the length of each of these texts."""
    positions = [
        torch.arange(len(prompt)),
        *(len(prompt) + torch.arange(len(c)) for c in completions),
    ]
    return (
        torch.cat([prompt, *completions]),
        torch.cat(positions),
        torch.tensor([len(prompt), *map(len, completions)]),
    )


def _of_like_length(prefix: int, texts: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Texts (first token, length) that can share a block; ``prefix``: tokens that each of them sees before its own."""
    groups: list[list[tuple[int, int]]] = []
    for start, length in sorted((text for text in texts if text[1]), key=lambda text: -text[1]):
        longest = groups[-1][0][1] if groups else 0
        scores = (
            (len(groups[-1]) + 1) * min(longest, BLOCK_QUERIES) * (prefix + longest)
            if groups
            else 0
        )
        if not groups or longest > WASTE * length or scores > BLOCK_SCORES:
            groups.append([])
        groups[-1].append((start, length))
    return groups


def _blocks(shared: slice, texts: Sequence[tuple[int, int]]) -> Iterator[AttentionBlock]:
    """Group texts (first token, length) of like length, and cut each group into runs of columns."""
    prefix = shared.stop - shared.start
    for group in _of_like_length(prefix, texts):
        starts, lengths = torch.tensor(group).mT[:, :, None]  # [c, 1] each
        longest = group[0][1]
        for first in range(0, longest, BLOCK_QUERIES):
            columns = torch.arange(min(first + BLOCK_QUERIES, longest))
            is_real = columns < lengths  # [c, s]
            visible = columns <= columns[first:, None]  # [r, s]
            # all queries see the prompt
            visible = nn.functional.pad(visible, (prefix, 0), value=True)
            bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
            queries = is_real[:, first:]  # [c, r]
            real = None if queries.all() else queries.flatten().nonzero()[:, 0]
            yield AttentionBlock(
                shared, starts + torch.where(is_real, columns, 0), first, bias, real
            )


def split_rows(
    prompt_lengths: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    rows: Sequence[int],
    budget: int,
    layout: Layout,
) -> list[list[int]]:
    """Split rows, of all [B] that have lengths, into micro-batches of at most ``budget`` tokens, padding included.

    Where a prompt is read once for its group, rows of a group stay together if they fit; a larger group is cut into as
    few parts of like size as possible, each of which reads the prompt again. Padded parts are of like length.
    """
    by_group: dict[int, list[int]] = {}
    for row in rows:
        by_group.setdefault(row if layout == "padded" else int(group_ids[row]), []).append(row)
    parts: list[tuple[int, list[int]]] = []  # tokens, rows
    for group in by_group.values():
        prompt, row_lengths = int(prompt_lengths[group[0]]), [int(lengths[row]) for row in group]
        total = sum(row_lengths)
        # as few parts as hold the group, of like size: full ones would leave a short last one
        count = -(-total // max(budget - prompt, 1)) or 1
        limit = min(budget - prompt, -(-total // count) + max(row_lengths) - 1)
        tokens, members = 0, list[int]()
        for row, length in zip(group, row_lengths, strict=True):
            if members and tokens + length > limit:
                parts.append((prompt + tokens, members))
                tokens, members = 0, []
            tokens += length
            members.append(row)
        parts.append((prompt + tokens, members))
    parts.sort(
        key=lambda part: -part[0]
    )  # the longest first, which sets the width of padded micro-batches
    micro_batches, sizes = list[list[int]](), list[int]()
    for tokens, members in parts:
        # a stream has no padding; elsewhere each part is as long as the first, the longest
        cost = (
            sum(sizes) + tokens if layout == "stream" else (len(sizes) + 1) * max(sizes, default=0)
        )
        if not micro_batches or cost > budget:
            micro_batches.append([])
            sizes = []
        micro_batches[-1] += members
        sizes.append(tokens)
    return micro_batches
