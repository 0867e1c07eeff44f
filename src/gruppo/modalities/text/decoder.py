"""The layers of a common decoder, read from a Hugging Face model and run over a stream of tokens.

Running them ourselves takes few passes over memory and keeps little for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gruppo.core.linear_head import has_hooks
from gruppo.modalities.common.lora import LowRank, low_rank
from gruppo.modalities.text.attention import attend
from gruppo.modalities.text.layouts import Stream


@dataclass(frozen=True, eq=False)
class Layer:
    """One block: x + attention(norm(x)), then x + down(act(gate) * up) of norm(x)."""

    attention_norm: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    """On each head, before the rotation."""
    mlp_norm: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    act: Callable[[Tensor], Tensor]
    is_silu: bool
    """Whether ``act`` is x sigmoid(x), judged by its values: it has several names."""
    scale: float
    """Of the scores q k."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder of the common architecture (Llama, Mistral, Qwen2, Qwen3): rotary positions, RMS norms, a gated MLP."""

    embed: nn.Module
    layers: tuple[Layer, ...]
    norm: nn.Module
    rotary: nn.Module
    heads: int
    kv_heads: int
    head_dim: int

    def rotations(self, like: Tensor, positions: Int[Tensor, "N"]) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """Return cosines and sines at the positions, in the dtype of ``like``."""
        cos, sin = self.rotary(like, positions[None])
        return cos[0], sin[0]


_PROBE = torch.tensor([-9.0, -1.0, -0.1, 0.0, 0.3, 2.0, 7.0])
"""Inputs that tell SiLU from other activations."""


def read_decoder(module: Any) -> Decoder | None:
    """Return the layers of a Hugging Face causal LM; None if its architecture is another.

    Names do not prove what a model computes: whoever runs the layers compares with the model's own forward first
    (``backbones.probe``). A model with a hook in one of these parts needs its own forward, which calls the hook.
    """
    try:
        trunk = module.base_model
        attention = trunk.layers[0].self_attn
        head_dim = int(attention.head_dim)
        query, key = attention.q_proj.out_features, attention.k_proj.out_features
        if query % head_dim or key % head_dim or query % key:
            return None
        layers = []
        hookable = [trunk, trunk.norm]
        for block in trunk.layers:
            attention, mlp = block.self_attn, block.mlp
            layer = Layer(
                attention_norm=block.input_layernorm,
                q=attention.q_proj,
                k=attention.k_proj,
                v=attention.v_proj,
                o=attention.o_proj,
                q_norm=getattr(attention, "q_norm", None),
                k_norm=getattr(attention, "k_norm", None),
                mlp_norm=block.post_attention_layernorm,
                gate=mlp.gate_proj,
                up=mlp.up_proj,
                down=mlp.down_proj,
                act=mlp.act_fn,
                is_silu=torch.equal(mlp.act_fn(_PROBE), nn.functional.silu(_PROBE)),
                scale=float(attention.scaling),
            )
            layers.append(layer)
            hookable += [block, attention, mlp, layer.attention_norm, layer.mlp_norm]
            hookable += [part for part in (layer.q_norm, layer.k_norm, layer.act) if isinstance(part, nn.Module)]
        if any(map(has_hooks, hookable)):
            return None
        return Decoder(
            embed=trunk.embed_tokens,
            layers=tuple(layers),
            norm=trunk.norm,
            rotary=trunk.rotary_emb,
            heads=query // head_dim,
            kv_heads=key // head_dim,
            head_dim=head_dim,
        )
    except (AttributeError, TypeError, ValueError):
        return None


def stream_features(decoder: Decoder, stream: Stream) -> Float[Tensor, "N F"]:
    """Return the input of the model's head at each token of the stream, as its own forward would compute it."""
    weight = next(decoder.embed.parameters())
    wide = torch.promote_types(weight.dtype, torch.float32)
    stream = stream.to(weight.device, wide)
    x = decoder.embed(stream.ids)
    cos, sin = (half.contiguous() for half in decoder.rotations(x.to(wide), stream.positions))
    for layer in decoder.layers:
        # functions, so that the tensors of one half are freed before the other
        x = x + _attention(decoder, layer, norm(layer.attention_norm, x), stream, cos, sin)
        x = x + _mlp(layer, norm(layer.mlp_norm, x))
    return norm(decoder.norm, x)


def _attention(decoder: Decoder, layer: Layer, x: Tensor, stream: Stream, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (-1, decoder.head_dim)) for part in (layer.q, layer.k, layer.v))  # [N, heads, D]
    q = q if layer.q_norm is None else norm(layer.q_norm, q)
    k = k if layer.k_norm is None else norm(layer.k_norm, k)
    q, k = _Rotated.apply(q, cos, sin, layer.scale), _Rotated.apply(k, cos, sin, 1.0)
    return layer.o(attend(q, k, v, stream.blocks).flatten(-2))


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    gate, up = layer.gate(x), layer.up(x)
    down = low_rank(layer.down) if layer.is_silu else None
    if isinstance(down, nn.Linear):
        return _GatedDown.apply(gate, up, down.weight, down.bias)
    if isinstance(down, LowRank) and not down.base.weight.requires_grad:
        return _GatedLowRank.apply(gate, up, down.base.weight, down.base.bias, down.a, down.b, down.scale)
    return layer.down(layer.act(gate) * up)


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
    """W (silu(gate) up) + b; what W multiplies is computed again in the backward pass instead of kept. Shazeer 2020."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return nn.functional.linear(nn.functional.silu(gate).mul_(up), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        opened = nn.functional.silu(gate)
        to_weight = grad.mT @ (opened * up) if ctx.needs_input_grad[2] else None
        to_bias = grad.sum(dim=0) if ctx.needs_input_grad[3] else None
        to_gated = grad @ weight
        return torch.ops.aten.silu_backward(up * to_gated, gate), opened.mul_(to_gated), to_weight, to_bias


class _GatedLowRank(torch.autograd.Function):
    """(W + scale B A)(silu(gate) up) + b, with W frozen; what they multiply is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight, a, b)
        ctx.scale = scale
        gated = nn.functional.silu(gate).mul_(up)
        linear = nn.functional.linear
        return linear(gated, weight, bias).add_(linear(linear(gated, a), b).mul_(scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight, a, b = ctx.saved_tensors
        opened = nn.functional.silu(gate)
        scaled = grad * ctx.scale
        to_low = scaled @ b  # [N, r]
        to_a = to_b = None
        if ctx.needs_input_grad[4] or ctx.needs_input_grad[5]:
            gated = opened * up
            to_a, to_b = to_low.mT @ gated, scaled.mT @ (gated @ a.mT)
        to_gated = (grad @ weight).add_(to_low @ a)
        to_gate = torch.ops.aten.silu_backward(up * to_gated, gate)
        return to_gate, opened.mul_(to_gated), None, None, to_a, to_b, None
