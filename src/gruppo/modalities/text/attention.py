"""Attention over a stream, block by block; scores are computed again in the backward pass instead of stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from gruppo.modalities.text.layouts import AttentionBlock


def attend(
    q: Float[Tensor, "N H D"], k: Float[Tensor, "N K D"], v: Float[Tensor, "N K D"], blocks: Sequence[AttentionBlock]
) -> Float[Tensor, "N H D"]:
    """softmax(q k + bias) v, each query over the keys of its block; ``q`` carries the scale.

    H / K query heads share one key head. Products are in the dtype of ``q``, the softmax in that of the blocks' biases,
    float32 or more. Only q, k and v are stored for the backward pass.
    """
    return _Attention.apply(q, k, v, blocks)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[AttentionBlock]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.blocks = blocks
        out = torch.empty_like(q)
        for block in blocks:
            _, p, _, values = _probabilities(q, k, v, block)
            _put(out, torch.bmm(p, values), block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        to_q = torch.empty_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        to_k, to_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))  # a prompt's gradient comes from many blocks
        for block in ctx.blocks:
            queries, p, keys, values = _probabilities(q, k, v, block)
            from_above = _queries(grad, block, k.shape[1], hide=True)
            _add(to_v, torch.bmm(p.mT, from_above), block)
            to_scores = torch.ops.aten._softmax_backward_data(torch.bmm(from_above, values.mT), p, -1, p.dtype)
            _put(to_q, torch.bmm(to_scores, keys), block)
            _add(to_k, torch.bmm(to_scores.mT, queries), block)
        return to_q, to_k.to(k.dtype), to_v.to(v.dtype), None


def _probabilities(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [cK, Gr, D], probabilities [cK, Gr, S], keys and values [cK, S, D]; G heads share one of K."""
    kv_heads = k.shape[1]
    queries, keys, values = _queries(q, block, kv_heads), _keys(k, block), _keys(v, block)
    scores = torch.bmm(queries, keys.mT).to(block.bias.dtype)
    scores.view(-1, *block.bias.shape).add_(block.bias)
    return queries, torch.softmax(scores, dim=-1).to(q.dtype), keys, values


def _queries(x: Tensor, block: AttentionBlock, kv_heads: int, *, hide: bool = False) -> Tensor:
    """[N, H, D] to the block's queries [cK, Gr, D]; ``hide`` sets repetitions to 0."""
    index = block.tokens[:, block.first :]
    texts, rows = index.shape
    taken = x.index_select(0, index.flatten())  # [cr, H, D]
    if hide and block.real is not None:
        real = torch.zeros(len(taken), 1, 1, dtype=x.dtype, device=x.device)
        taken *= real.index_fill_(0, block.real, 1)
    shared_by = x.shape[1] // kv_heads
    taken = taken.view(texts, rows, kv_heads, shared_by, x.shape[2]).permute(0, 2, 3, 1, 4)
    return taken.reshape(texts * kv_heads, shared_by * rows, x.shape[2])


def _keys(x: Tensor, block: AttentionBlock) -> Tensor:
    """[N, K, D] to the block's keys [cK, S, D]."""
    texts, columns = block.tokens.shape
    suffix = x.index_select(0, block.tokens.flatten()).unflatten(0, (texts, columns)).transpose(1, 2)  # [c, K, s, D]
    shared = x[block.shared].transpose(0, 1).expand(texts, -1, -1, -1)  # [c, K, P, D]
    return torch.cat([shared, suffix], dim=2).flatten(0, 1)


def _put(out: Tensor, of_queries: Tensor, block: AttentionBlock) -> None:
    """Write the block's queries [cK, Gr, D] to their places in [N, H, D]."""
    index = block.tokens[:, block.first :]
    texts, rows = index.shape
    heads, width = out.shape[1:]
    rowwise = of_queries.view(texts, heads, rows, width).transpose(1, 2).reshape(-1, heads, width)  # [cr, H, D]
    index = index.flatten()
    if block.real is not None:
        rowwise, index = rowwise.index_select(0, block.real), index.index_select(0, block.real)
    out.index_copy_(0, index, rowwise)


def _add(out: Tensor, of_keys: Tensor, block: AttentionBlock) -> None:
    """Add the block's keys [cK, S, D] to their places in [N, K, D]."""
    texts = len(block.tokens)
    kv_heads, width = out.shape[1:]
    prefix = block.shared.stop - block.shared.start
    of_keys = of_keys.view(texts, kv_heads, -1, width).transpose(1, 2)  # [c, S, K, D]
    if prefix:
        out[block.shared] += of_keys[:, :prefix].sum(dim=0, dtype=out.dtype)
    suffix = of_keys[:, prefix:].reshape(-1, kv_heads, width)
    out.index_add_(0, block.tokens.flatten(), suffix.to(out.dtype))
