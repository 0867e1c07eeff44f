"""How rows are laid out for scoring, and split into micro-batches.

stream: groups one after another without padding, each prompt once and its completions behind it. P + G (R - 1) tokens
    instead of G (P + R), since a completion's last token predicts nothing. Attention runs over blocks of queries.
packed: a group as one row of P + G R tokens, under a block mask.
padded: each prompt with its completion as a row of its own.

In the first two, positions restart at the prompt's end, as if each completion were alone, and completions do not see
each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Layout = Literal["stream", "packed", "padded"]

MULTIPLE = 16
"""Streams are padded to a multiple with tokens that nothing sees: a CPU's bfloat16 products of odd sizes are a quarter
slower."""
BLOCK_QUERIES = 128
"""Columns of one block: later columns are not multiplied and then masked."""
BLOCK_SCORES = 2**16
"""Scores of one head in one block: few enough for a processor's cache, enough for a full matrix product."""
WASTE = 1.25
"""Completions share a block if the longest is at most this much longer than the shortest."""


def pad_right(rows: Sequence[Int[Tensor, "L"]]) -> tuple[Int[Tensor, "b L"], Int[Tensor, "b"]]:
    """Return rows of ids as one tensor, and their lengths."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), lengths


# --- stream -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """c texts of like length: some columns of each as queries, and all columns up to their end as keys."""

    shared: slice
    """Tokens that all queries see: the prompt's. Empty in blocks of the prompt itself."""
    tokens: Int[Tensor, "c s"]
    """Tokens of the texts; behind the end of a short one its first is repeated, unseen by real tokens."""
    first: int
    """The queries are ``tokens[:, first:]``."""
    bias: Float[Tensor, "r S"]
    """0 where a query sees a key, -inf elsewhere; the keys are the shared tokens, then these."""
    real: Int[Tensor, "n"] | None
    """Indices over [c, r] of the queries that are tokens and not repetitions; None if all are."""

    @property
    def queries(self) -> Int[Tensor, "c r"]:
        return self.tokens[:, self.first :]


@dataclass(frozen=True, eq=False)
class Stream:
    """N tokens of several groups."""

    ids: Int[Tensor, "N"]
    positions: Int[Tensor, "N"]
    blocks: tuple[AttentionBlock, ...]
    start: Int[Tensor, "b"]
    """Index of the first token of each completion."""
    prompt_end: Int[Tensor, "b"]
    """Index of the last token of each completion's prompt."""

    def before(self, completion: Int[Tensor, "n"], column: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """Index of the token whose features predict the action: the one before it, at first the prompt's last."""
        return torch.where(column == 0, self.prompt_end[completion], self.start[completion] + column - 1)

    def to(self, device: torch.device, dtype: torch.dtype) -> Stream:
        """Move to the device, with the biases in the dtype of the softmax."""
        blocks = tuple(
            AttentionBlock(
                block.shared,
                block.tokens.to(device),
                block.first,
                block.bias.to(device, dtype),
                None if block.real is None else block.real.to(device),
            )
            for block in self.blocks
        )
        return Stream(self.ids.to(device), self.positions.to(device), blocks, self.start, self.prompt_end)


def stream(
    prompts: Sequence[Int[Tensor, "P"]], completions: Sequence[Int[Tensor, "R"]], owners: Int[Tensor, "b"]
) -> Stream:
    """Lay out completions, without their last tokens, behind the prompts that own them (``owners``, indices)."""
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    blocks: list[AttentionBlock] = []
    start, prompt_end = torch.zeros(len(completions), dtype=torch.long), torch.zeros(len(completions), dtype=torch.long)
    members: list[list[int]] = [[] for _ in prompts]
    for c, owner in enumerate(owners.tolist()):
        members[owner].append(c)
    end = 0
    for prompt, group in zip(prompts, members, strict=True):
        prompt_tokens = slice(end, end + len(prompt))
        ids.append(prompt)
        positions.append(torch.arange(len(prompt)))
        blocks += _blocks(slice(end, end), [prompt_tokens])
        end = prompt_tokens.stop
        texts = []
        for c in group:
            length = max(len(completions[c]) - 1, 0)
            start[c], prompt_end[c] = end, prompt_tokens.stop - 1
            ids.append(completions[c][:length])
            positions.append(len(prompt) + torch.arange(length))
            texts.append(slice(end, end + length))
            end += length
        blocks += _blocks(prompt_tokens, texts)
    padding = torch.zeros(-end % MULTIPLE, dtype=torch.long)
    ids.append(padding)
    positions.append(padding)
    blocks += _blocks(slice(end, end), [slice(end, end + len(padding))])
    return Stream(torch.cat(ids), torch.cat(positions), tuple(blocks), start, prompt_end)


def _blocks(shared: slice, texts: Sequence[slice]) -> Iterator[AttentionBlock]:
    """Group texts of like length, and cut each group into runs of columns."""
    prefix = shared.stop - shared.start
    groups: list[list[slice]] = []
    for text in sorted((t for t in texts if t.stop > t.start), key=lambda t: t.start - t.stop):
        length = text.stop - text.start
        longest = groups[-1][0].stop - groups[-1][0].start if groups else 0
        scores = (len(groups[-1]) + 1) * min(longest, BLOCK_QUERIES) * (prefix + longest) if groups else 0
        if not groups or longest > WASTE * length or scores > BLOCK_SCORES:
            groups.append([])
        groups[-1].append(text)
    for group in groups:
        starts = torch.tensor([text.start for text in group])[:, None]
        lengths = torch.tensor([text.stop - text.start for text in group])[:, None]
        longest = int(lengths.max())
        for first in range(0, longest, BLOCK_QUERIES):
            columns = torch.arange(min(first + BLOCK_QUERIES, longest))
            is_real = columns < lengths  # [c, s]
            visible = columns <= columns[first:, None]  # [r, s]
            visible = nn.functional.pad(visible, (prefix, 0), value=True)
            bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
            tokens = starts + torch.where(is_real, columns, 0)
            counts, width = is_real[:, first:].sum(dim=1).tolist(), len(columns) - first
            real = torch.cat([torch.arange(count) + n * width for n, count in enumerate(counts)])
            yield AttentionBlock(shared, tokens, first, bias, None if min(counts) == width else real)


# --- packed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Packed:
    """g packed rows of L tokens."""

    ids: Int[Tensor, "g L"]
    positions: Int[Tensor, "g L"]
    visible: Bool[Tensor, "g L L"]
    """[query, key]: which tokens each token attends to."""
    row: Int[Tensor, "b"]
    """The packed row of each completion."""
    start: Int[Tensor, "b"]
    """Column of the first token of each completion."""
    prompt_length: Int[Tensor, "b"]

    def before(self, completion: Int[Tensor, "N"], column: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        """Column of the token whose features predict the action: the one before it, at first the prompt's last."""
        return torch.where(column == 0, self.prompt_length[completion] - 1, self.start[completion] + column - 1)


def pack(
    prompts: Sequence[Int[Tensor, "P"]], completions: Sequence[Int[Tensor, "R"]], owners: Int[Tensor, "b"]
) -> Packed:
    """Lay out completions behind the prompt that owns them; ``owners`` are indices into ``prompts``."""
    texts = [[prompt] for prompt in prompts]
    positions = [[torch.arange(len(prompt))] for prompt in prompts]
    segments = [[torch.zeros(len(prompt), dtype=torch.long)] for prompt in prompts]
    ends = [len(prompt) for prompt in prompts]
    start = []
    for completion, owner in zip(completions, owners.tolist(), strict=True):
        start.append(ends[owner])
        ends[owner] += len(completion)
        texts[owner].append(completion)
        positions[owner].append(len(prompts[owner]) + torch.arange(len(completion)))
        segments[owner].append(torch.full((len(completion),), len(segments[owner])))
    ids, lengths = pad_right([torch.cat(parts) for parts in texts])
    padded_positions, _ = pad_right([torch.cat(parts) for parts in positions])
    segment, _ = pad_right([torch.cat(parts) for parts in segments])
    # causal, within the same segment or the prompt (segment 0); padding is seen by itself only
    column = torch.arange(ids.shape[1])
    causal = column[:, None] >= column[None, :]
    same = segment[:, :, None] == segment[:, None, :]
    shared = (segment == 0)[:, None, :]
    real = column < lengths[:, None]
    visible = causal & (same | shared) & real[:, None, :]
    return Packed(
        ids=ids,
        positions=padded_positions,
        visible=visible | (column[:, None] == column[None, :]),
        row=owners,
        start=torch.tensor(start),
        prompt_length=torch.tensor([len(prompt) for prompt in prompts])[owners],
    )


# --- micro-batches ----------------------------------------------------------------------------------------------------


def micro_batches_by_group(
    prompt_lengths: Int[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    rows: Sequence[int],
    budget: int,
    *,
    padded: bool,
) -> list[list[int]]:
    """Split rows into micro-batches of at most ``budget`` tokens, rows of a group together where they fit.

    A group over the budget is cut into as few parts of like size as possible, each of which reads the prompt again.
    ``padded``: the parts of a micro-batch are rows of one tensor, as long as the longest; otherwise they follow each
    other.
    """
    by_group: dict[int, list[int]] = {}
    for row in rows:
        by_group.setdefault(int(group_ids[row]), []).append(row)
    parts: list[tuple[int, list[int]]] = []  # tokens, rows
    for group in by_group.values():
        prompt, row_lengths = int(prompt_lengths[group[0]]), [int(lengths[row]) for row in group]
        total = sum(row_lengths)
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
    parts.sort(key=lambda part: -part[0])
    micro_batches: list[list[int]] = []
    sizes: list[int] = []
    for tokens, members in parts:
        if not micro_batches or (max(sizes) * (len(sizes) + 1) if padded else sum(sizes) + tokens) > budget:
            micro_batches.append([])
            sizes = []
        micro_batches[-1] += members
        sizes.append(tokens)
    return micro_batches


def micro_batches_by_length(totals: Int[Tensor, "B"], rows: Int[Tensor, "n"], budget: int) -> list[list[int]]:
    """Split rows into micro-batches of like length, so that there is little padding."""
    micro_batches: list[list[int]] = []
    for row in rows[totals[rows].argsort(descending=True, stable=True)].tolist():
        if not micro_batches or (len(micro_batches[-1]) + 1) * int(totals[micro_batches[-1][0]]) > budget:
            micro_batches.append([])
        micro_batches[-1].append(row)
    return micro_batches
