"""The layers of a common decoder, read from a Hugging Face model and run over a stream of tokens.

Running them ourselves takes few passes over memory and keeps little for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

from gruppo.core.linear_head import has_hooks
from gruppo.modalities.common.lora import LowRank, low_rank
from gruppo.modalities.text.attention import attend
from gruppo.modalities.text.layouts import Tokens


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder of the common architecture (Llama, Mistral, Qwen2, Qwen3): rotary positions, RMS norms, a gated MLP."""

    embed: nn.Module
    layers: tuple[Any, ...]
    """The model's own: x + attention(norm(x)), then x + down(act(gate) * up) of norm(x)."""
    norm: nn.Module
    rotary: nn.Module
    """Gives cosines and sines [1, N, D] at positions [1, N], in the dtype of its first argument."""
    heads: int
    kv_heads: int
    head_dim: int
    is_silu: bool
    """Whether ``act`` is x sigmoid(x), judged by its values: it has several names."""


_PROBE = torch.tensor([-9.0, -1.0, -0.1, 0.0, 0.3, 2.0, 7.0])
"""Inputs that tell SiLU from other activations."""


def read_decoder(module: Any) -> Decoder | None:
    """Return the layers of a Hugging Face causal LM; None if its architecture is another.

    Names do not prove what a model computes: whoever runs the layers compares with the model's own forward first
    (``backbones.probe``). A model with a hook in one of these parts needs its own forward, which calls the hook.
    """
    try:
        trunk = module.base_model
        layers, hookable = tuple(trunk.layers), [trunk, trunk.norm]
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            hookable += [layer, attention, mlp, layer.input_layernorm, layer.post_attention_layernorm]
            inner = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None), mlp.act_fn)
            hookable += [part for part in inner if isinstance(part, nn.Module)]
        if any(map(has_hooks, hookable)):
            return None
        attention = layers[0].self_attn
        head_dim = int(attention.head_dim)
        query, key = attention.q_proj.out_features, attention.k_proj.out_features
        if query % head_dim or key % head_dim or query % key:
            return None
        heads, kv_heads = query // head_dim, key // head_dim
        is_silu = all(torch.equal(layer.mlp.act_fn(_PROBE), silu(_PROBE)) for layer in layers)
        embed, rotary = trunk.embed_tokens, trunk.rotary_emb
        return Decoder(embed, layers, trunk.norm, rotary, heads, kv_heads, head_dim, is_silu)
    except (AttributeError, TypeError, ValueError):
        return None


def stream_features(decoder: Decoder, stream: Tokens) -> Float[Tensor, "N F"]:
    """Return the input of the model's head at each token of the stream, as its own forward would compute it."""
    weight = next(decoder.embed.parameters())
    wide = torch.promote_types(weight.dtype, torch.float32)
    stream = stream.to(weight.device, wide)
    x = decoder.embed(stream.ids)
    cos, sin = (half[0].contiguous() for half in decoder.rotary(x.to(wide), stream.positions[None]))
    for layer in decoder.layers:
        # functions, so that the tensors of one half are freed before the other
        x = x + _attention(decoder, layer.self_attn, norm(layer.input_layernorm, x), stream, cos, sin)
        x = x + _mlp(decoder, layer.mlp, norm(layer.post_attention_layernorm, x))
    return norm(decoder.norm, x)


def _attention(decoder: Decoder, part: Any, x: Tensor, stream: Tokens, cos: Tensor, sin: Tensor) -> Tensor:
    projections = (part.q_proj, part.k_proj, part.v_proj)
    q, k, v = (project(x).unflatten(-1, (-1, decoder.head_dim)) for project in projections)  # [N, heads, D]
    if getattr(part, "q_norm", None) is not None:
        q, k = norm(part.q_norm, q), norm(part.k_norm, k)
    q, k = _Rotated.apply(q, cos, sin, part.scaling), _Rotated.apply(k, cos, sin, 1.0)
    return part.o_proj(attend(q, k, v, stream.blocks).flatten(-2))


def _mlp(decoder: Decoder, part: Any, x: Tensor) -> Tensor:
    gate, up = part.gate_proj(x), part.up_proj(x)
    down = low_rank(part.down_proj) if decoder.is_silu else None
    if isinstance(down, LowRank):
        return _GatedDown.apply(gate, up, down.base.weight, down.base.bias, down.a, down.b, down.scale)
    if down is not None:
        return _GatedDown.apply(gate, up, down.weight, down.bias, None, None, 1.0)
    return part.down_proj(part.act_fn(gate) * up)


def norm(module: Any, x: Float[Tensor, "*b F"]) -> Float[Tensor, "*b F"]:
    """The RMS norm of a module in few passes if its parts have the usual names, else the module itself."""
    eps = getattr(module, "variance_epsilon", None)
    return module(x) if eps is None else _RmsNorm.apply(x, module.weight, eps)


class _RmsNorm(torch.autograd.Function):
    """y = w x r,  r = (mean x^2 + eps)^(-1/2), in float32 at least; the input and r are kept. Zhang & Sennrich 2019."""

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
        to_weight = product.flatten(0, -2).sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        product *= weight
        shrink = product.mean(dim=-1, keepdim=True)
        to_x = torch.addcmul(grad * weight, normed, shrink, value=-1).mul_(r)
        return to_x.to(x.dtype), to_weight, None


class _Rotated(torch.autograd.Function):
    """scale (x cos + rotate_half(x) sin), in the dtype of cos. Su et al. 2021; halves, not pairs, are rotated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.scale = scale
        return _rotate(x, cos, sin, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.scale), None, None, None


def _rotate(x: Float[Tensor, "N h D"], cos: Tensor, sin: Tensor, scale: float) -> Float[Tensor, "N h D"]:
    wide = x.to(cos.dtype)
    half = x.shape[-1] // 2
    cos, sin = (cos * scale)[:, None], (sin * scale)[:, None]
    out = wide * cos
    out[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(wide[..., :half], sin[..., half:])
    return out.to(x.dtype)


class _GatedDown(torch.autograd.Function):
    """(W + scale B A)(silu(gate) up) + b, Shazeer 2020; without an adapter A and B are None.

    What they multiply is computed again in the backward pass instead of kept.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, *adapter: Any) -> Tensor:
        a, b, scale = adapter
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
        to_gate = torch.ops.aten.silu_backward(up * to_gated, gate)
        return to_gate, opened.mul_(to_gated), to_weight, to_bias, to_a, to_b, None
