"""How rows are laid out for scoring, and split into micro-batches.

stream: groups one after another without padding, each prompt once and its completions behind it. P
+ G (R - 1) tokens
    instead of G (P + R), since a completion's last token predicts nothing. Attention runs over
    blocks of queries.
packed: the same tokens, each group as a row of the model's own forward under a block mask.
padded: each prompt with its completion as a row of its own.

In the first two, positions restart at the prompt's end, as if each completion were alone, and
completions do not see each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Layout = Literal["stream", "packed", "padded"]
Texts = Sequence[Int[Tensor, "L"]]
"""Token ids of some texts, each of a length of its own."""

MULTIPLE = 16
"""Streams are padded to a multiple with tokens that no other token sees: a CPU's bfloat16 products
of odd sizes are a quarter slower."""
BLOCK_QUERIES = 128
"""Columns of one block: later columns are not multiplied and then masked."""
BLOCK_SCORES = 2**16
"""Scores of one head in one block: few enough for a processor's cache, enough for a full matrix
product."""
SMALL_GROUP = 128
"""Tokens of a group up to which it is one text of a block, with a mask of its own: many small
groups would be many small operations. Attention of 12 groups of 52 tokens takes 10 ms in place of
35, forward and backward."""
WASTE = 1.25
"""Completions share a block if the longest is at most this much longer than the shortest."""


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """c texts of similar length: some columns of each as queries, and all columns up to their end
    as keys.

    A text is a prompt, a completion, or a small group as a whole.
    """

    shared: slice
    """Tokens that all queries see: the prompt's. Empty in blocks of prompts and of groups."""
    tokens: Int[Tensor, "c s"]
    """Tokens of the texts; behind the end of a short one its first is repeated, unseen by real
    tokens."""
    first: int
    """The queries are ``tokens[:, first:]``, [c, r]."""
    bias: Float[Tensor, "c 1 r S"]
    """0 if a query sees a key, else -inf; keys are the shared tokens, then these."""
    real: Int[Tensor, "n"] | None
    """Indices over [c, r] of the queries that are tokens and not repetitions; None if all are."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Prompts and b completions laid out for one forward; ``start`` and ``prompt_end`` index the
    flattened ``ids``."""

    ids: Int[Tensor, "*b L"]
    start: Int[Tensor, "b"]
    """Index of the first token of each completion."""
    prompt_end: Int[Tensor, "b"]
    """Index of the last token of each completion's prompt."""

    def before(self, completion: Int[Tensor, "n"], column: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        """Index of the token whose features predict the action: the one before it, at first the
        prompt's last."""
        return torch.where(
            column == 0, self.prompt_end[completion], self.start[completion] + column - 1
        )


@dataclass(frozen=True, eq=False)
class Stream(Tokens):
    """Groups one after another."""

    positions: Int[Tensor, "N"]
    spans: Int[Tensor, "3 N"]
    """What each token sees: its prompt's tokens, if it is of a completion, from the first index to
    before the second, and those of its own text from the third to itself."""
    texts: tuple[tuple[slice, int, int], ...]
    """The prompt that all tokens of a text see, its first token, and its length; small groups are
    one text."""
    groups: tuple[slice, ...]


def sees(spans: Iterable[Tensor], query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:
    """Whether tokens with these three spans, at the indices ``query``, see the tokens ``key``."""
    shared_start, shared_end, start = spans
    return ((key >= shared_start) & (key < shared_end)) | ((key >= start) & (key <= query))


def stream(prompts: Texts, completions: Texts, owners: Int[Tensor, "b"]) -> Stream:
    """Lay out completions, without their last tokens, behind the prompts that own them (``owners``,
    indices)."""
    start, prompt_end = torch.zeros(2, len(completions), dtype=torch.long)
    ids, spans = list[Tensor](), list[tuple[int, int, int]]()
    texts, groups = list[tuple[slice, int, int]](), list[slice]()
    end = 0
    for p, prompt in enumerate(prompts):
        shared = slice(end, end + len(prompt))
        ids.append(prompt)
        spans.append((end, end, end))
        end += len(prompt)
        own = [(slice(0, 0), shared.start, len(prompt))]
        for c in (owners == p).nonzero()[:, 0].tolist():
            ids.append(completions[c][:-1])
            # the first completion follows its prompt: one span for both
            is_first = end == shared.stop
            spans.append((shared.start,) * 3 if is_first else (shared.start, shared.stop, end))
            own.append((shared, end, len(ids[-1])))
            start[c], prompt_end[c] = end, shared.stop - 1
            end += len(ids[-1])
        groups.append(slice(shared.start, end))
        size = end - shared.start
        texts += [(slice(0, 0), shared.start, size)] if size <= SMALL_GROUP else own
    ids.append(torch.zeros(-end % MULTIPLE, dtype=torch.long))
    spans.append((end, end, end))  # padding sees itself and the padding before it
    lengths = torch.tensor([len(text) for text in ids])
    of_tokens = torch.tensor(spans).mT.repeat_interleave(lengths, dim=1)
    positions = torch.arange(of_tokens.shape[1]) - of_tokens[2] + of_tokens[1] - of_tokens[0]
    return Stream(
        torch.cat(ids), start, prompt_end, positions, of_tokens, tuple(texts), tuple(groups)
    )


def pad(prompts: Texts, completions: Texts, owners: Int[Tensor, "b"]) -> Tokens:
    """Lay out each completion behind a copy of its prompt, as a row."""
    rows = [torch.cat([prompts[o], c]) for o, c in zip(owners.tolist(), completions, strict=True)]
    ids = pad_sequence(rows, batch_first=True)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])[owners]
    start = torch.arange(len(rows)) * ids.shape[1] + prompt_lengths
    return Tokens(ids, start, start - 1)


def attention_blocks(
    tokens: Stream, device: torch.device, dtype: torch.dtype
) -> list[AttentionBlock]:
    """Blocks over the texts of a stream, on the device, with biases in the dtype of the softmax.

    The copies do not wait for the device, as everywhere between forward and optimizer step.
    """
    by_prompt: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shared, start, length in tokens.texts:
        if length:
            by_prompt.setdefault((shared.start, shared.stop), []).append((start, length))
    blocks = []
    for (start, stop), texts in by_prompt.items():
        for group in _of_similar_length(stop - start, texts):
            for block in _blocks(tokens, slice(start, stop), group):
                real = None if block.real is None else block.real.to(device, non_blocking=True)
                blocks.append(
                    replace(
                        block,
                        tokens=block.tokens.to(device, non_blocking=True),
                        bias=block.bias.to(device, dtype, non_blocking=True),
                        real=real,
                    )
                )
    return blocks


def _of_similar_length(
    prefix: int, texts: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Texts (first token, length) that can share a block; ``prefix``: tokens that each sees before
    its own."""
    groups: list[list[tuple[int, int]]] = []
    for start, length in sorted(texts, key=lambda text: -text[1]):
        longest = groups[-1][0][1] if groups else 0
        count = len(groups[-1]) + 1 if groups else 0
        scores = count * min(longest, BLOCK_QUERIES) * (prefix + longest)
        if not groups or longest > WASTE * length or scores > BLOCK_SCORES:
            groups.append([])
        groups[-1].append((start, length))
    return groups


def _blocks(
    tokens: Stream, shared: slice, texts: Sequence[tuple[int, int]]
) -> Iterator[AttentionBlock]:
    """Cut texts (first token, length) of similar length, the longest first, into runs of
    columns."""
    starts, lengths = torch.tensor(texts).mT[:, :, None]  # [c, 1] each
    longest = texts[0][1]
    for first in range(0, longest, BLOCK_QUERIES):
        columns = torch.arange(min(first + BLOCK_QUERIES, longest))
        is_real = columns < lengths  # [c, s]
        own = starts + torch.where(is_real, columns, 0)
        keys = torch.cat([torch.arange(shared.start, shared.stop).expand(len(own), -1), own], dim=1)
        is_key = nn.functional.pad(is_real, (keys.shape[1] - own.shape[1], 0), value=True)
        queries = own[:, first:, None]  # [c, r, 1]
        visible = sees(tokens.spans[:, queries], queries, keys[:, None]) & is_key[:, None]
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]
        is_query = is_real[:, first:]
        real = None if is_query.all() else is_query.flatten().nonzero()[:, 0]
        yield AttentionBlock(shared, own, first, bias, real)


def split_rows(
    prompt_lengths: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    rows: Sequence[int],
    budget: int,
    layout: Layout,
) -> list[list[int]]:
    """Split rows, of all [B] that have lengths, into micro-batches of at most ``budget`` tokens,
    padding included.

    Where a prompt is read once for its group, rows of a group stay together if they fit; a larger
    group is cut into as few parts of like size as possible, each of which reads the prompt again.
    Padded parts are of like length.
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
        cost = sum(sizes) + tokens
        if layout == "padded":  # each part is as long as the first, the longest
            cost = (len(sizes) + 1) * max(sizes, default=0)
        if not micro_batches or cost > budget:
            micro_batches.append([])
            sizes = []
        micro_batches[-1] += members
        sizes.append(tokens)
    return micro_batches
