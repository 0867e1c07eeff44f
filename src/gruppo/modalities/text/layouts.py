"""How rows are laid out for scoring, and split into micro-batches.

stream: groups one after another without padding, each prompt once and its completions behind it.
    P + G (R - 1) tokens instead of G (P + R), since a completion's last token predicts nothing.
    Positions restart at the prompt's end and completions do not see each other, as if each were
    alone. Attention runs over blocks of queries.
padded: each prompt with its completion as a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Texts = Sequence[Int[Tensor, "L"]]
"""Token ids of some texts, each of a length of its own."""

MULTIPLE = 16
"""Streams are padded to a multiple: a CPU's bfloat16 products of odd sizes are a quarter slower."""
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
Span = tuple[int, int]
"""First token of a text, and its length."""


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """c texts of similar length: some columns of each as queries, and all columns up to their end
    as keys.

    A text is a prompt, a completion, or a small group as a whole.
    """

    shared: slice
    """Tokens that all queries see: the prompt's. Empty in blocks of prompts and of groups."""
    tokens: Int[Tensor, "c s"]
    """Tokens of the texts; behind the end of a short one, the stream's last, which is padding."""
    first: int
    """The queries are ``tokens[:, first:]``, [c, r]."""
    bias: Float[Tensor, "c 1 r S"]
    """0 if a query sees a key, else -inf; keys are the shared tokens, then these."""


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
    """Groups one after another, and padding that no other token sees."""

    positions: Int[Tensor, "N"]
    spans: Int[Tensor, "3 N"]
    """What each token sees: its prompt's tokens, if it is of a completion, from the first index to
    before the second, and those of its own text from the third to itself."""
    texts: tuple[tuple[slice, Span], ...]
    """The prompt that all tokens of a text see, and the text; small groups are one text."""


def sees(spans: Iterable[Tensor], query: Tensor, key: Tensor) -> Bool[Tensor, "..."]:
    """Whether tokens with these three spans, at the indices ``query``, see the tokens ``key``."""
    shared_start, shared_end, start = spans
    return ((key >= shared_start) & (key < shared_end)) | ((key >= start) & (key <= query))


def stream(prompts: Texts, completions: Texts, owners: Int[Tensor, "b"]) -> Stream:
    """Lay out completions, without their last tokens, behind the prompts that own them (``owners``,
    indices)."""
    start, prompt_end = torch.zeros(2, len(completions), dtype=torch.long)
    ids, spans = list[Tensor](), list[tuple[int, int, int]]()
    texts = list[tuple[slice, Span]]()
    end = 0
    for p, prompt in enumerate(prompts):
        shared = slice(end, end + len(prompt))
        ids.append(prompt)
        spans.append((end, end, end))
        end += len(prompt)
        own = [(slice(0, 0), (shared.start, len(prompt)))]
        for c in (owners == p).nonzero()[:, 0].tolist():
            ids.append(completions[c][:-1])
            spans.append((shared.start, shared.stop, end))
            own.append((shared, (end, len(ids[-1]))))
            start[c], prompt_end[c] = end, shared.stop - 1
            end += len(ids[-1])
        size = end - shared.start
        texts += [(slice(0, 0), (shared.start, size))] if size <= SMALL_GROUP else own
    ids.append(torch.zeros(MULTIPLE - end % MULTIPLE, dtype=torch.long))  # one token at least
    spans.append((end, end, end))
    lengths = torch.tensor([len(text) for text in ids])
    of_tokens = torch.tensor(spans).mT.repeat_interleave(lengths, dim=1)
    positions = torch.arange(of_tokens.shape[1]) - of_tokens[2] + of_tokens[1] - of_tokens[0]
    return Stream(torch.cat(ids), start, prompt_end, positions, of_tokens, tuple(texts))


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
    by_prompt: dict[Span, list[Span]] = {}
    for shared, text in tokens.texts:
        if text[1]:
            by_prompt.setdefault((shared.start, shared.stop), []).append(text)
    return [
        AttentionBlock(
            slice(*shared),
            own.to(device, non_blocking=True),
            first,
            bias.to(device, dtype, non_blocking=True),
        )
        for shared, texts in by_prompt.items()
        for similar in _of_similar_length(shared[1] - shared[0], texts)
        for own, first, bias in _blocks(tokens, torch.arange(*shared), similar)
    ]


def _of_similar_length(prefix: int, texts: Sequence[Span]) -> list[list[Span]]:
    """Texts that can share a block; ``prefix``: tokens that each sees before its own."""
    groups: list[list[Span]] = []
    for text in sorted(texts, key=lambda text: -text[1]):
        if groups:
            longest = groups[-1][0][1]
            scores = (len(groups[-1]) + 1) * min(longest, BLOCK_QUERIES) * (prefix + longest)
            if longest <= WASTE * text[1] and scores <= BLOCK_SCORES:
                groups[-1].append(text)
                continue
        groups.append([text])
    return groups


def _blocks(
    tokens: Stream, shared: Int[Tensor, "P"], texts: Sequence[Span]
) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Cut texts of similar length, the longest first, into runs of columns: tokens, first and bias
    of each block."""
    starts, lengths = torch.tensor(texts).mT[:, :, None]  # [c, 1] each
    longest = texts[0][1]
    for first in range(0, longest, BLOCK_QUERIES):
        columns = torch.arange(min(first + BLOCK_QUERIES, longest))
        own = torch.where(columns < lengths, starts + columns, len(tokens.ids) - 1)  # [c, s]
        keys = torch.cat([shared.expand(len(own), -1), own], dim=1)
        queries = own[:, first:, None]  # [c, r, 1]
        visible = sees(tokens.spans[:, queries], queries, keys[:, None])
        yield own, first, torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]


def split_rows(
    prompt_lengths: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    rows: Sequence[int],
    budget: int,
    *,
    is_padded: bool,
) -> list[list[int]]:
    """Split rows, of all [B] that have lengths, into micro-batches of at most ``budget`` tokens,
    padding included.

    Rows of a stream stay together by group, whose prompt is read once, if they fit; a larger group
    is cut into as few parts of similar size as possible. Padded rows are sorted by length.
    """
    by_group: dict[int, list[int]] = {}
    for row in rows:
        by_group.setdefault(row if is_padded else int(group_ids[row]), []).append(row)
    parts = list[tuple[int, list[int]]]()  # tokens, rows
    for members in by_group.values():
        parts += _parts(int(prompt_lengths[members[0]]), members, lengths[members].tolist(), budget)
    # the longest first, which sets the width of padded micro-batches
    parts.sort(key=lambda part: -part[0])
    micro_batches, sizes = list[list[int]](), list[int]()
    for tokens, members in parts:
        cost = (len(sizes) + 1) * max(sizes, default=0) if is_padded else sum(sizes) + tokens
        if not micro_batches or cost > budget:
            micro_batches.append([])
            sizes = []
        micro_batches[-1] += members
        sizes.append(tokens)
    return micro_batches


def _parts(
    prompt: int, rows: Sequence[int], lengths: Sequence[int], budget: int
) -> Iterator[tuple[int, list[int]]]:
    """Tokens and rows of each part of a group. Full parts would leave a short last one, so all have
    similar sizes."""
    total = sum(lengths)
    count = -(-total // max(budget - prompt, 1)) or 1
    limit = min(budget - prompt, -(-total // count) + max(lengths) - 1)
    tokens, members = 0, list[int]()
    for row, length in zip(rows, lengths, strict=True):
        if members and tokens + length > limit:
            yield prompt + tokens, members
            tokens, members = 0, []
        tokens += length
        members.append(row)
    yield prompt + tokens, members
