"""Groups as one stream of tokens without padding: each prompt once, behind it its completions, which are apart.

P + G (R - 1) tokens instead of G (P + R): a completion's last token predicts nothing that was sampled. Positions
restart at the prompt's end, so that each completion is where it would be alone, and attention goes by blocks of
queries with the keys they may see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

MULTIPLE = 16
"""Of tokens, filled up with some that nothing sees: a CPU's bfloat16 products of odd sizes are a quarter slower."""
BLOCK_QUERIES = 128
"""Columns of one block: what comes after them is not multiplied and then masked."""
BLOCK_SCORES = 2**16
"""Scores of one head in one block: few enough to stay in a processor's cache, enough for a full matrix product."""
WASTE = 1.25
"""Completions share a block where the longest is at most so many times the shortest."""


@dataclass(frozen=True, eq=False)
class Block:
    """c texts of like length: a run of columns of each as queries, all columns up to its end as keys."""

    shared: slice
    """Tokens that all queries see: the prompt's. Empty where the block is of the prompt itself."""
    own: Int[Tensor, "c s"]
    """Tokens of the texts themselves; behind the end of a short one its first is repeated, unseen by what is real."""
    first: int
    """The queries are ``own[:, first:]``."""
    bias: Float[Tensor, "r S"]
    """0 where a query sees a key, -inf elsewhere; the keys are the shared ones, then the own up to its own."""
    real: Int[Tensor, "n"] | None
    """Which queries, counted over [c, r], are tokens and not repetitions; None if all are."""

    @property
    def queries(self) -> Int[Tensor, "c r"]:
        return self.own[:, self.first :]

    def to(self, device: torch.device, dtype: torch.dtype) -> Block:
        real = None if self.real is None else self.real.to(device)
        return Block(self.shared, self.own.to(device), self.first, self.bias.to(device, dtype), real)


@dataclass(frozen=True, eq=False)
class Stream:
    """N tokens of several groups."""

    ids: Int[Tensor, "N"]
    positions: Int[Tensor, "N"]
    blocks: tuple[Block, ...]
    start: Int[Tensor, "b"]
    """Where each completion starts."""
    prompt_end: Int[Tensor, "b"]
    """Where the prompt of each completion ends: its last token."""

    def before(self, completion: Int[Tensor, "n"], column: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """The token whose features predict the action: the one before it, at first the prompt's last."""
        return torch.where(column == 0, self.prompt_end[completion], self.start[completion] + column - 1)

    def to(self, device: torch.device, dtype: torch.dtype) -> Stream:
        """On the device, with the biases in the dtype of the softmax."""
        blocks = tuple(block.to(device, dtype) for block in self.blocks)
        return Stream(self.ids.to(device), self.positions.to(device), blocks, self.start, self.prompt_end)


def stream(
    prompts: Sequence[Int[Tensor, "P"]], completions: Sequence[Int[Tensor, "R"]], owners: Int[Tensor, "b"]
) -> Stream:
    """Lay out completions, less their last tokens, behind the prompts that own them (``owners``, indices)."""
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    blocks: list[Block] = []
    start, prompt_end = torch.zeros(len(completions), dtype=torch.long), torch.zeros(len(completions), dtype=torch.long)
    members: list[list[int]] = [[] for _ in prompts]
    for c, owner in enumerate(owners.tolist()):
        members[owner].append(c)
    end = 0
    for prompt, own in zip(prompts, members, strict=True):
        prompt_tokens = slice(end, end + len(prompt))
        ids.append(prompt)
        positions.append(torch.arange(len(prompt)))
        blocks += _blocks(slice(end, end), [prompt_tokens])
        end = prompt_tokens.stop
        texts = []
        for c in own:
            length = max(len(completions[c]) - 1, 0)
            start[c], prompt_end[c] = end, prompt_tokens.stop - 1
            ids.append(completions[c][:length])
            positions.append(len(prompt) + torch.arange(length))
            texts.append(slice(end, end + length))
            end += length
        blocks += _blocks(prompt_tokens, texts)
    filling = torch.zeros(-end % MULTIPLE, dtype=torch.long)
    ids.append(filling)
    positions.append(filling)
    blocks += _blocks(slice(end, end), [slice(end, end + len(filling))])
    return Stream(torch.cat(ids), torch.cat(positions), tuple(blocks), start, prompt_end)


def _blocks(shared: slice, texts: Sequence[slice]) -> Iterator[Block]:
    """Texts of like length together, cut into runs of columns."""
    for together in _of_like_length(shared, texts):
        starts = torch.tensor([text.start for text in together])[:, None]
        lengths = torch.tensor([text.stop - text.start for text in together])[:, None]
        longest = int(lengths.max())
        for first in range(0, longest, BLOCK_QUERIES):
            columns = torch.arange(min(first + BLOCK_QUERIES, longest))
            is_real = columns < lengths  # [c, s]
            own = starts + torch.where(is_real, columns, 0)
            real = _real(is_real[:, first:].sum(dim=1).tolist(), len(columns) - first)
            yield Block(shared, own, first, _bias(shared, columns, first), real)


def _bias(shared: slice, columns: Tensor, first: int) -> Tensor:
    visible = columns <= columns[first:, None]  # [r, s]
    visible = torch.nn.functional.pad(visible, (shared.stop - shared.start, 0), value=True)
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)


def _real(counts: list[int], columns: int) -> Tensor | None:
    """The first ``counts`` of each row's columns, counted over all of them; None if that is everything."""
    if min(counts) == columns:
        return None
    return torch.cat([torch.arange(count) + row * columns for row, count in enumerate(counts)])


def _of_like_length(shared: slice, texts: Sequence[slice]) -> Iterator[list[slice]]:
    batch: list[slice] = []
    for text in sorted((t for t in texts if t.stop > t.start), key=lambda t: t.start - t.stop):
        length = text.stop - text.start
        if batch:
            longest = batch[0].stop - batch[0].start
            keys = shared.stop - shared.start + longest
            scores = (len(batch) + 1) * min(longest, BLOCK_QUERIES) * keys
            if longest > WASTE * length or scores > BLOCK_SCORES:
                yield batch
                batch = []
        batch.append(text)
    if batch:
        yield batch
