"""The layers of a common decoder, read from a Hugging Face model and run over a stream of tokens.

Running them ourselves takes few passes over memory and keeps little for the backward pass:
attention runs block by block, and its scores are computed again in the backward pass instead of
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

from gruppo.core.layers import checkpointed
from gruppo.core.linear_head import has_hooks
from gruppo.distributed.sharding import forward
from gruppo.modalities.common.lora import LowRank, low_rank
from gruppo.modalities.text import flex
from gruppo.modalities.text.layouts import AttentionBlock, Stream, attention_blocks
from gruppo.protocols import device_of

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [N, H, D], keys and values [N, K, D] of all tokens to what they attend to, [N, H, D]."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder of the common architecture (Llama, Mistral, Qwen2, Qwen3): rotary positions, RMS
    norms, a gated MLP."""

    embed: nn.Module
    layers: tuple[Any, ...]
    """The model's own: x + attention(norm(x)), then x + down(act(gate) * up) of norm(x)."""
    norm: nn.Module
    rotary: nn.Module
    """Gives cosines and sines [1, N, D] at positions [1, N], in the dtype of its first argument."""
    kv_heads: int
    head_dim: int
    is_silu: bool
    """Whether ``act`` is x sigmoid(x), judged by its values: it has several names."""


def read_decoder(module: Any) -> Decoder | None:
    """Return the layers of a Hugging Face causal LM; None if its architecture is another.

    Names do not prove what a model computes: whoever runs the layers compares with the model's own
    forward first (``backbones.probe``). A model with a hook in one of these parts needs its own
    forward, which calls the hook.
    """
    try:
        trunk = module.base_model
        layers = tuple(trunk.layers)
        parts = [part for layer in layers for part in layer.modules()]
        if any(has_hooks(x) for x in (trunk, trunk.norm, *parts) if not isinstance(x, nn.Linear)):
            return None
        attention = layers[0].self_attn
        head_dim = int(attention.head_dim)
        query, key = attention.q_proj.out_features, attention.k_proj.out_features
        if query % head_dim or key % head_dim or query % key:
            return None
        x = torch.tensor([-9.0, -1.0, -0.1, 0.0, 0.3, 2.0, 7.0])
        is_silu = all(torch.equal(layer.mlp.act_fn(x), silu(x)) for layer in layers)
        return Decoder(
            trunk.embed_tokens,
            layers,
            trunk.norm,
            trunk.rotary_emb,
            key // head_dim,
            head_dim,
            is_silu,
        )
    except (AttributeError, TypeError, ValueError):
        return None


def stream_features(decoder: Decoder, stream: Stream) -> Float[Tensor, "N F"]:
    """Return the input of the model's head at each token of the stream, as its own forward would
    compute it."""
    x, cos, sin = embedded(decoder, stream.ids, stream.positions)
    attend = attention_over(stream, decoder, x)
    for layer in decoder.layers:
        run = checkpointed(layer, layer_output)
        x = forward(layer, run, x, layer, attend, cos, sin, decoder.is_silu)
    return norm(decoder.norm, x)


def attention_over(stream: Stream, decoder: Decoder, like: Tensor) -> Attention:
    """Attention of a stream's tokens on the device and in the dtype of a tensor: by FlexAttention
    on CUDA, else over blocks."""
    if flex.is_usable(like.device, like.dtype, decoder.head_dim):
        return partial(flex.compiled(), mask=flex.block_mask(stream, like.device))
    blocks = attention_blocks(stream, like.device, torch.promote_types(like.dtype, torch.float32))
    return lambda q, k, v: _Attention.apply(q, k, v, blocks)


def embedded(
    decoder: Decoder, ids: Int[Tensor, "N"], positions: Int[Tensor, "N"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings [N, F], and cosines and sines [N, D] of the positions for ``rotate``, in float32
    or more.

    The copies to the device do not wait for it, as everywhere between forward and optimizer step.
    """
    device = device_of(decoder.embed)
    x = decoder.embed(ids.to(device, non_blocking=True))
    positions = positions.to(device, non_blocking=True)
    wide = torch.empty(0, dtype=torch.promote_types(x.dtype, torch.float32), device=device)
    cos, sin = decoder.rotary(wide, positions[None])
    first, second = sin[0].chunk(2, dim=-1)
    return x, cos[0].contiguous(), torch.cat([-first, second], dim=-1)


def layer_output(
    x: Tensor, layer: Any, attend: Attention, cos: Tensor, sin: Tensor, is_silu: bool
) -> Tensor:
    # functions, so that the tensors of one half are freed before the other
    x = x + _attention(layer.self_attn, norm(layer.input_layernorm, x), attend, cos, sin)
    return x + _mlp(layer.mlp, norm(layer.post_attention_layernorm, x), is_silu=is_silu)


def _attention(part: Any, x: Tensor, attend: Attention, cos: Tensor, sin: Tensor) -> Tensor:
    projections = (part.q_proj, part.k_proj, part.v_proj)
    # [N, heads, D]
    q, k, v = (project(x).unflatten(-1, (-1, part.head_dim)) for project in projections)
    if getattr(part, "q_norm", None) is not None:
        q, k = norm(part.q_norm, q), norm(part.k_norm, k)
    q, k = _Rotated.apply(q, cos, sin, part.scaling), _Rotated.apply(k, cos, sin, 1.0)
    return part.o_proj(attend(q, k, v).flatten(-2))


def _mlp(part: Any, x: Tensor, *, is_silu: bool) -> Tensor:
    gate, up = part.gate_proj(x), part.up_proj(x)
    down = low_rank(part.down_proj) if is_silu else None
    if down is None:
        return part.down_proj(part.act_fn(gate) * up)
    if isinstance(down, LowRank):
        weights = (down.base.weight, down.base.bias, down.a, down.b, down.scale)
        return _GatedDown.apply(gate, up, *weights)
    return _GatedDown.apply(gate, up, down.weight, down.bias, None, None, 1.0)


def norm(module: Any, x: Float[Tensor, "*b F"]) -> Float[Tensor, "*b F"]:
    """The RMS norm of a module in few passes if its parts have the usual names, else the module
    itself."""
    eps = getattr(module, "variance_epsilon", None)
    return module(x) if eps is None else _RmsNorm.apply(x, module.weight, eps)


class _RmsNorm(torch.autograd.Function):
    """y = w x r,  r = (mean x^2 + eps)^(-1/2), in float32 at least; the input and r are kept. Zhang
    & Sennrich 2019."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, r = ctx.saved_tensors
        normed = x * r if x.dtype == r.dtype else x.to(r.dtype).mul_(r)  # [*b, F]
        grad = grad.to(r.dtype)
        product = grad * normed
        to_weight = (
            product.flatten(0, -2).sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        product *= weight
        # r (w g - n mean(w g n)) for the gradient g of the output, with n = x r
        shrink = product.mean(dim=-1, keepdim=True)
        to_x = torch.addcmul(grad * weight, normed, shrink, value=-1).mul_(r)
        return to_x.to(x.dtype), to_weight, None


def rotate(
    x: Float[Tensor, "N h D"], cos: Float[Tensor, "N D"], sin: Float[Tensor, "N D"]
) -> Float[Tensor, "N h D"]:
    """x cos + rotate_half(x) sin, in the dtype of cos. Su et al. 2021; halves, not pairs, are
    rotated.

    ``sin`` has the signs of ``rotate_half``, which then only exchanges the halves.
    """
    wide = x.to(cos.dtype)
    return (wide * cos[:, None]).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin[:, None])


class _Rotated(torch.autograd.Function):
    """``rotate`` times ``scale``, in the dtype of x; only cosines and sines are kept for the
    backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.scale = scale
        return rotate(x, cos * scale, sin * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        # the transpose of a rotation turns the other way
        return _Rotated.apply(grad, cos, -sin, ctx.scale), None, None, None


class _GatedDown(torch.autograd.Function):
    """(W + scale B A)(silu(gate) up) + b, Shazeer 2020; without an adapter A and B are None.

    What they multiply is computed again in the backward pass instead of kept.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Any, a: Any, b: Any, scale: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight, a, b)
        ctx.scale = scale
        gated = silu(gate).mul_(up)
        out = linear(gated, weight, bias)
        return out if a is None else out.add_(linear(linear(gated, a), b).mul_(scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight, a, b = ctx.saved_tensors
        _, _, needs_weight, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        opened = silu(gate)
        to_weight = to_low = to_a = to_b = None
        if a is not None:
            scaled = grad * ctx.scale
            to_low = scaled @ b  # [N, r]
        if needs_weight or needs_a or needs_b:
            gated = opened * up
            to_weight = grad.mT @ gated if needs_weight else None
            if to_low is not None:
                to_a, to_b = to_low.mT @ gated, scaled.mT @ (gated @ a.mT)
            del gated  # before the next tensor of its size
        to_bias = grad.sum(dim=0) if needs_bias else None
        to_gated = grad @ weight
        if to_low is not None:
            to_gated.add_(to_low @ a)
        # of the gate, silu'(gate) up g for the gradient g of silu(gate) up; of up, silu(gate) g
        to_gate = torch.ops.aten.silu_backward(up * to_gated, gate)
        return to_gate, opened.mul_(to_gated), to_weight, to_bias, to_a, to_b, None


# --- attention over blocks of a stream ------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """softmax(q k + bias) v, each query over the keys of its block; ``q`` carries the scale.

    H / K query heads share one key head. Products are in the dtype of ``q``, the softmax in that of
    the blocks' biases, float32 or more. Only q, k and v are stored for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[AttentionBlock]
    ) -> Tensor:
        """q [N, H, D], k and v [N, K, D] to [N, H, D]."""
        ctx.save_for_backward(q, k, v)
        ctx.blocks = blocks
        out = torch.zeros_like(q)
        for block in blocks:
            _, p, _, values = _probabilities(q, k, v, block)
            _put(out, torch.bmm(p, values), block)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        to_q = torch.zeros_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        # a prompt's gradient comes from many blocks
        to_k, to_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        for block in ctx.blocks:
            queries, p, keys, values = _probabilities(q, k, v, block)
            from_above = _queries(grad, block, k.shape[1])
            _add(to_v, torch.bmm(p.mT, from_above), block)
            # p (g - sum(g p)) for the gradient g of the probabilities p
            to_scores = torch.ops.aten._softmax_backward_data(
                torch.bmm(from_above, values.mT), p, -1, p.dtype
            )
            _put(to_q, torch.bmm(to_scores, keys), block)
            _add(to_k, torch.bmm(to_scores.mT, queries), block)
        return to_q, to_k.to(k.dtype), to_v.to(v.dtype), None


def _probabilities(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [cK, Gr, D], probabilities [cK, Gr, S], keys and values [cK, S, D]; G heads share one
    of K."""
    queries, keys, values = _queries(q, block, k.shape[1]), _keys(k, block), _keys(v, block)
    scores = torch.bmm(queries, keys.mT).to(block.bias.dtype)
    scores.view(len(block.tokens), -1, *block.bias.shape[-2:]).add_(block.bias)
    return queries, torch.softmax(scores, dim=-1).to(q.dtype), keys, values


def _queries(x: Tensor, block: AttentionBlock, kv_heads: int) -> Tensor:
    """[N, H, D] to the block's queries [cK, Gr, D]."""
    index = block.tokens[:, block.first :]
    taken = x.index_select(0, index.flatten()).view(*index.shape, kv_heads, -1, x.shape[-1])
    return taken.permute(0, 2, 3, 1, 4).reshape(len(index) * kv_heads, -1, x.shape[-1])


def _keys(x: Tensor, block: AttentionBlock) -> Tensor:
    """[N, K, D] to the block's keys [cK, S, D]."""
    own = x.index_select(0, block.tokens.flatten()).unflatten(0, block.tokens.shape)
    shared = x[block.shared].transpose(0, 1).expand(len(block.tokens), -1, -1, -1)  # [c, K, P, D]
    return torch.cat([shared, own.transpose(1, 2)], dim=2).flatten(0, 1)


def _put(out: Tensor, of_queries: Tensor, block: AttentionBlock) -> None:
    """Write the block's queries [cK, Gr, D] to their places in [N, H, D]; those of padding
    overwrite each other."""
    index = block.tokens[:, block.first :]
    heads, width = out.shape[1:]
    rowwise = of_queries.view(len(index), heads, -1, width).transpose(1, 2)  # [c, r, H, D]
    out.index_copy_(0, index.flatten(), rowwise.reshape(-1, heads, width))


def _add(out: Tensor, of_keys: Tensor, block: AttentionBlock) -> None:
    """Add the block's keys [cK, S, D] to their places in [N, K, D]."""
    kv_heads, width = out.shape[1:]
    prefix = block.shared.stop - block.shared.start
    of_keys = of_keys.view(len(block.tokens), kv_heads, -1, width).transpose(1, 2)  # [c, S, K, D]
    if prefix:
        out[block.shared] += of_keys[:, :prefix].sum(dim=0, dtype=out.dtype)
    own = of_keys[:, prefix:].reshape(-1, kv_heads, width)
    out.index_add_(0, block.tokens.flatten(), own.to(out.dtype))
