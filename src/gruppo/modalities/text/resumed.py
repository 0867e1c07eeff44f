"""Decoding that goes on from kept keys and values: a further turn reads only what is new in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gruppo.modalities.text import decoding as layered
from gruppo.modalities.text.decoding import LayeredDecoding
from gruppo.modalities.text.kept import KeptRow
from gruppo.modalities.text.layouts import Texts

D = TypeVar("D", bound=LayeredDecoding)
Tensors = tuple[Tensor, ...]


@torch.no_grad()
def resume(kind: type[D], rows: Sequence[KeptRow], unread: Texts) -> D:
    """Open a decoding of rows that go on behind their kept keys and values, and read one or more new tokens of each.

    Every row ends at the same column of the suffixes, so that all write the next one; columns before its first token
    are masked. Of rows that are equal in all tokens, one is read. Each row is taken out of ``rows``.
    """
    decoding, device = kind.__new__(kind), unread[0].device
    assert rows[0].fused is not None, "kept by a LayeredDecoding"
    decoding.use(rows[0].fused)
    groups = {id(row.prompt): row.prompt for row in rows}
    prompts, places = list(groups.values()), list(groups)
    owners = torch.tensor([places.index(id(row.prompt)) for row in rows], device=device)
    kept, added = [row.suffix[0].shape[2] for row in rows], [len(ids) for ids in unread]
    ends = torch.tensor(kept) + torch.tensor(added)
    begun = int(ends.max())
    decoding.names, decoding.kept_prompts = list(range(len(prompts))), dict(enumerate(prompts))
    decoding.lengths = torch.tensor([prompt[0].shape[2] for prompt in prompts], device=device)
    decoding.begun = decoding.written = begun
    decoding.starts = (begun - ends).to(device)
    decoding._lay_out(owners)

    kv_heads = decoding.decoder.kv_heads
    decoding.prompts = decoding._empty(len(prompts), int(decoding.lengths.max()))
    for layer, buffer in enumerate(decoding.prompts):
        for n, prompt in enumerate(prompts):
            buffer[:, n * kv_heads : (n + 1) * kv_heads, : prompt[layer].shape[2]] = prompt[layer]
    taken = [row.suffix for row in rows]
    for row in rows:
        row.suffix = []
    cells, shape = decoding.home.tolist(), (2, decoding.groups, kv_heads, decoding.width)
    decoding.suffixes = []
    for layer in range(
        len(decoding.blocks)
    ):  # one layer at a time, so that only one layer is in memory twice
        size = (
            2,
            decoding.groups * kv_heads * decoding.width,
            begun + decoding.columns,
            decoding.decoder.head_dim,
        )
        buffer = torch.zeros(size, dtype=decoding._dtype_for(size[2]), device=device)
        by_cell = buffer.view(*shape, *size[2:])
        for cell, layers, start in zip(cells, taken, decoding.starts.tolist(), strict=True):
            suffix, layers[layer] = layers[layer], layers[layer][:, :, :0]
            group, column = divmod(cell, decoding.width)
            by_cell[:, group, :, column, start : start + suffix.shape[2]] = suffix
        decoding.suffixes.append(buffer)

    whole = [
        (id(row.prompt), *row.ids.tolist(), *ids.tolist())
        for row, ids in zip(rows, unread, strict=True)
    ]
    models = torch.tensor(
        [whole.index(text) for text in whole], device=device
    )  # the row that is read for each
    is_read = (models == torch.arange(len(rows), device=device)).tolist()
    decoding.logits = _read(
        decoding, [ids if own else ids[:0] for own, ids in zip(is_read, unread, strict=True)]
    )
    if not all(is_read):
        from_cells, to_cells = decoding.home[models], decoding.home
        width, columns = decoding.width, slice(begun - max(added), begun)
        for buffer in decoding.suffixes:
            by_cell = buffer.view(*shape, *buffer.shape[2:]).transpose(2, 3)[
                ..., columns, :
            ]  # [2, g, j, K, A, D]
            by_cell[:, to_cells // width, to_cells % width] = by_cell[
                :, from_cells // width, from_cells % width
            ]
        decoding.logits = decoding.logits[models]
    return decoding


def _read(decoding: LayeredDecoding, unread: Texts) -> Tensor:
    """Read the last tokens of each row, which end at column ``begun``; logits after each row's last one, [N, V].

    Products of weights are computed for these tokens only, attention for a rectangle of columns of all cells.
    """
    device, begun, width = decoding.owners.device, decoding.begun, decoding.width
    at_once = max(1, layered.READ_AT_ONCE // (decoding.groups * width))  # columns in one pass
    row = torch.cat([torch.full((len(ids),), n) for n, ids in enumerate(unread)]).to(device)
    column = torch.cat([torch.arange(begun - len(ids), begun) for ids in unread]).to(device)
    tokens = torch.cat(list(unread))
    for start in range(begun - max(map(len, unread)), begun, at_once):
        stop = min(start + at_once, begun)
        inside = (column >= start) & (column < stop)
        rows, at, ids = row[inside], column[inside], tokens[inside]
        x = decoding.decoder.embed(ids)
        turns = decoding._turns(x, (decoding.lengths[decoding.owners] - decoding.starts)[rows] + at)
        columns = torch.arange(stop, device=device)
        # [cells, C, W]: columns before the row's first token, and those after the query
        mask = (columns < decoding.first[:, None, None]) | (columns > columns[start:, None])
        cell = decoding.home[rows]
        for block, prompt, suffix in zip(
            decoding.blocks, decoding.prompts, decoding.suffixes, strict=True
        ):
            q, k, v = block.rotate(block.qkv(block.attention_norm(x)), turns)
            x = block.finish(
                x, _attend(decoding, (q * block.scale, k, v), prompt, suffix, (cell, at), mask)
            )
    # the last pass holds the last token of every row that was read
    hidden, is_last = x.new_zeros(len(unread), x.shape[-1]), at == begun - 1  # [N, F]
    hidden[rows[is_last]] = x[is_last]
    return decoding.head(decoding.norm(hidden))


def _attend(
    decoding: LayeredDecoding,
    qkv: Tensors,
    prompt: Tensor,
    suffix: Tensor,
    place: Tensors,
    mask: Tensor,
) -> Tensor:
    """Write keys and values of n tokens to their cells and columns, and attend to the prompt and the row so far."""
    (q, k, v), (cell, at) = qkv, place
    g, j, kv_heads, dim = (
        decoding.groups,
        decoding.width,
        decoding.decoder.kv_heads,
        decoding.decoder.head_dim,
    )
    rep, count, stop = decoding.decoder.heads // kv_heads, *mask.shape[1:]
    at_query = at - (stop - count)  # queries are the last of the columns that they see
    by_cell = suffix.view(2, g, kv_heads, j, -1, dim)
    for n, new in enumerate((k, v)):
        by_cell[n, cell // j, :, cell % j, at] = new.to(suffix.dtype)
    queries = q.new_zeros(g * j, count, kv_heads * rep, dim)
    queries[cell, at_query] = q
    # [g, K, j, rep C, D]
    queries = (
        queries.view(g, j, count, kv_heads, rep, dim)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(g, kv_heads, j, -1, dim)
    )
    to_prompt = torch.bmm(queries.reshape(g * kv_heads, -1, dim).to(prompt.dtype), prompt[0].mT)
    to_suffix = torch.bmm(
        queries.reshape(g * kv_heads * j, -1, dim).to(suffix.dtype), suffix[0, :, :stop].mT
    )
    width = prompt.shape[2]
    scores = torch.cat([to_prompt.view(-1, rep * count, width), to_suffix], dim=-1).to(
        decoding.exact
    )
    by_group = scores.view(g, kv_heads, j, rep, count, -1)
    if decoding.padding is not None:
        by_group[..., :width].masked_fill_(decoding.padding[..., None, :], -torch.inf)
    by_group[..., width:].masked_fill_(mask.view(g, 1, j, 1, count, stop), -torch.inf)
    of_prompt, of_suffix = scores.softmax(dim=-1).split([width, stop], dim=-1)
    attended = torch.bmm(
        of_prompt.reshape(g * kv_heads, -1, width).to(prompt.dtype), prompt[1]
    ).view(-1)
    attended = attended + torch.bmm(of_suffix.to(suffix.dtype), suffix[1, :, :stop]).view(-1)
    attended = (
        attended.view(g, kv_heads, j, rep, count, dim)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(g * j, count, -1)
    )
    return attended[cell, at_query].to(decoding.dtype)
