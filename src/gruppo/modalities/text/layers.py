"""The layers of a decoder, named one by one, so that they can be run in another way than their model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gruppo.core.linear_head import has_hooks


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
    """Whether ``act`` is x sigmoid(x): found by its values, which go by several names."""
    scale: float
    """Of the scores q k."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder of the common layout (Llama, Mistral, Qwen2, Qwen3): rotary positions, RMS norms, a gated MLP."""

    embed: nn.Module
    layers: tuple[Layer, ...]
    norm: nn.Module
    rotary: nn.Module
    heads: int
    kv_heads: int
    head_dim: int

    def rotations(self, like: Tensor, positions: Int[Tensor, "N"]) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """Cosines and sines at the positions, in the dtype of ``like``."""
        cos, sin = self.rotary(like, positions[None])
        return cos[0], sin[0]


def read_decoder(module: Any) -> Decoder | None:
    """The layers of a Hugging Face causal LM, or None if it has another layout than this module knows.

    Names alone do not say what a model computes: whoever runs the layers compares with the model's own forward first
    (``probe``). A part with a hook is not run apart from its model, which alone would call the hook.
    """
    try:
        trunk = module.base_model
        heads, kv_heads, head_dim = _head_shape(trunk)
        return Decoder(
            embed=trunk.embed_tokens,
            layers=tuple(_layer(block) for block in trunk.layers),
            norm=_without_hooks(trunk, trunk.norm),
            rotary=trunk.rotary_emb,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
    except (AttributeError, TypeError, ValueError):
        return None


# numbers on which an activation shows what it is
_SOME = torch.tensor([-9.0, -1.0, -0.1, 0.0, 0.3, 2.0, 7.0])


def _layer(block: Any) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    norms = (block.input_layernorm, block.post_attention_layernorm)
    more = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None), mlp.act_fn)
    _without_hooks(block, attention, mlp, *norms, *(part for part in more if isinstance(part, nn.Module)))
    return Layer(
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
        is_silu=torch.equal(mlp.act_fn(_SOME), nn.functional.silu(_SOME)),
        scale=float(attention.scaling),
    )


def _head_shape(trunk: Any) -> tuple[int, int, int]:
    attention = trunk.layers[0].self_attn
    head_dim = int(attention.head_dim)
    query, key = attention.q_proj.out_features, attention.k_proj.out_features
    if query % head_dim or key % head_dim or query % key:
        raise ValueError("the heads do not divide the features")
    return query // head_dim, key // head_dim, head_dim


def _without_hooks(*modules: Any) -> Any:
    """The last of the modules, if none has a hook that its own forward would call."""
    if any(map(has_hooks, modules)):
        raise ValueError("a hook needs the module's own forward")
    return modules[-1]
