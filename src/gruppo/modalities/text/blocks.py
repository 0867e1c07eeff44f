"""Decoder layers as few, fast operations: fused products of weights in the processor's own layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn
from torch.nn import functional as F

from gruppo.core.linear_head import has_hooks
from gruppo.modalities.common.lora import LowRank, low_rank
from gruppo.modalities.text.decoder import Decoder, Layer

Map = Callable[[Tensor], Tensor]


class FusedLayer:
    """One layer without its attention, which the caller computes.

    On a CPU with the operation, plain ``nn.Linear`` products are fused: q, k, v in one, gate and up in another, over
    copies of the weights in the processor's layout. 1.3 times as fast at 32 rows, 1.6 at 2. The copies take as much
    memory as the weights and do not follow them. An adapter adds two small products. Other modules are called as usual.
    """

    def __init__(self, layer: Layer, decoder: Decoder) -> None:
        self.layer = layer
        self.turned = decoder.heads + decoder.kv_heads
        self.heads, self.head_dim = self.turned + decoder.kv_heads, decoder.head_dim
        self.attention_norm, self.mlp_norm = lean_norm(layer.attention_norm), lean_norm(layer.mlp_norm)
        self.qkv = fused(layer.q, layer.k, layer.v)
        self.o, self.down = fused(layer.o), fused(layer.down)
        self.gate_up = fused(layer.gate, layer.up)
        self.act = layer.act

    def project(self, x: Float[Tensor, "N F"]) -> Float[Tensor, "N A"]:
        """Queries, keys and values of all heads, concatenated, before the rotation."""
        return self.qkv(self.attention_norm(x))

    def rotate(
        self, qkv: Float[Tensor, "N A"], turns: Complex[Tensor, "N 1 d"]
    ) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "N K D"]]:
        """Rotated heads of queries, then keys, in float32 at least; and the values' heads unchanged.

        Rotated pairs come out adjacent: scores do not depend on the order of the elements of a head.
        """
        qkv = qkv.unflatten(-1, (self.heads, self.head_dim))
        qk, v = qkv[:, : self.turned], qkv[:, self.turned :]
        if self.layer.q_norm is not None and self.layer.k_norm is not None:
            heads = self.heads - 2 * v.shape[1]
            qk = torch.cat([self.layer.q_norm(qk[:, :heads]), self.layer.k_norm(qk[:, heads:])], dim=1)
        first, second = qk.to(turns.real.dtype).chunk(2, dim=-1)
        return torch.view_as_real(torch.complex(first, second).mul_(turns)).flatten(-2), v

    def finish(self, x: Float[Tensor, "N F"], attended: Float[Tensor, "N B"]) -> Float[Tensor, "N F"]:
        """The output of the layer, given the output of its attention."""
        x = self.o(attended).add_(x)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up)).add_(x)


def lean_norm(module: Any) -> Map:
    """The RMS norm of the module as one operation if it gives the same numbers, else the module itself."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or has_hooks(module):
        return module
    weight = weight.detach()

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    x = torch.linspace(-2, 3, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
    needed = module(x).detach()
    return norm if _is_close(norm(x), needed) else module


def fused(*modules: Any) -> Map:
    """A function that concatenates the outputs of the modules for one input."""
    parts = [part for module in modules if (part := low_rank(module)) is not None]
    bases = [part.base if isinstance(part, LowRank) else part for part in parts]
    if len(bases) == len(modules) and bases[0].weight.device.type == "cpu" and _packs(bases[0].weight.dtype):
        has_adapters = any(isinstance(part, LowRank) for part in parts)
        return _with_adapters(_packed(bases), parts) if has_adapters else _packed(bases)
    if len(modules) == 1:
        return modules[0]
    return lambda x: torch.cat([module(x) for module in modules], dim=-1)


def _with_adapters(product: Map, parts: Sequence[LowRank | nn.Linear]) -> Map:
    """W x + B A x of all parts: all A in one product, and all B, scaled, as a block diagonal in another."""
    adapters = [part for part in parts if isinstance(part, LowRank)]
    ranks = sum(len(part.a) for part in adapters)
    down = torch.cat([part.a.detach() for part in adapters])  # [ranks, i]
    up, column = [], 0
    for part in parts:
        rows = part.base.out_features if isinstance(part, LowRank) else part.out_features
        block = down.new_zeros(rows, ranks)
        if isinstance(part, LowRank):
            block[:, column : column + len(part.a)] = part.scale * part.b.detach()
            column += len(part.a)
        up.append(block)
    shrink, widen = _as_product(down), _as_product(torch.cat(up))
    return lambda x: product(x).add_(widen(shrink(x)))


def _packed(linears: Sequence[nn.Linear]) -> Map:
    weights = [linear.weight.detach() for linear in linears]
    bias = None
    if any(linear.bias is not None for linear in linears):
        zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
        bias = torch.cat(
            [zero if of.bias is None else of.bias.detach() for of, zero in zip(linears, zeros, strict=True)]
        )
    return _as_product(torch.cat(weights) if len(weights) > 1 else weights[0], bias)


def _as_product(weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None) -> Map:
    product = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, 32)  # the layout fits any number of rows
    return lambda x: product(x, packed, bias, "none", [], "")


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether PyTorch's private operations for packed weights exist here and are right."""
    linear = nn.utils.skip_init(nn.Linear, 48, 80, dtype=dtype)  # without using the global generator
    x = torch.linspace(-1, 1, 3 * 48, dtype=dtype).view(3, 48)
    try:
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.arange(parameter.numel()).sin().view_as(parameter))
            return dtype in (torch.bfloat16, torch.float32) and _is_close(_packed([linear])(x), linear(x))
    except (AttributeError, RuntimeError):
        return False


def _is_close(got: Tensor, needed: Tensor) -> bool:
    scale = float(needed.abs().max()) * torch.finfo(needed.dtype).eps
    return got.shape == needed.shape and float((got - needed).abs().max()) <= 8 * scale
