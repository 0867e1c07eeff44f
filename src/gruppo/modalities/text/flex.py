"""Attention over a stream on CUDA: FlexAttention under the block mask of the stream, compiled.

``decoder.py`` has the plain attention over blocks, which computes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from gruppo.core.compiled import DEVICES
from gruppo.modalities.text.layouts import Stream, sees

log = logging.getLogger("gruppo")

TOLERANCE = 2e-2
"""Relative error of outputs and gradients up to which compiled attention is used. Rounding to
bfloat16 makes 0.003; a mask that hides a quarter of the keys from a few queries, 0.03."""


def _attend(
    q: Float[Tensor, "N H D"], k: Float[Tensor, "N K D"], v: Float[Tensor, "N K D"], mask: BlockMask
) -> Float[Tensor, "N H D"]:
    """``decoder.attend`` under a block mask."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    attended = flex_attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True)
    assert isinstance(attended, Tensor)
    return attended[0].transpose(0, 1)


@cache
def compiled() -> Callable[..., Tensor]:
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def block_mask(tokens: Stream, device: torch.device) -> BlockMask:
    """What each token of a stream sees. The copy does not wait for the device."""
    shared_start, shared_end, start = tokens.spans.to(device, non_blocking=True)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees((shared_start[q], shared_end[q], start[q]), q, k)

    length = len(tokens.ids)
    return create_block_mask(visible, None, None, length, length, device)


@cache
def is_usable(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention can be compiled on a device, and agrees there with torch's own, forward and
    backward; tried once, with one warning if not."""
    if device.type not in DEVICES:
        return False
    length = 256  # two blocks of the mask: part of one is seen, or all, or nothing
    x = torch.arange(length * head_dim, device=device).sin().view(length, 1, head_dim)
    x = (x * head_dim**-0.5).to(dtype).requires_grad_()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device)
    results = []
    try:
        with torch.enable_grad():
            y = x.float().transpose(0, 1)
            own = scaled_dot_product_attention(y, y, y, is_causal=True, scale=1.0).transpose(0, 1)
            for out in (own, compiled()(x, x, x, mask).float()):
                results.append((out, torch.autograd.grad(out.square().sum(), x)[0].float()))
        for a, b in zip(*results, strict=True):
            if not (b - a).norm() <= TOLERANCE * a.norm():  # also if it is not a number
                raise RuntimeError("its numbers differ from those of torch's own attention")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no compiler, or a GPU with too little shared memory
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning("FlexAttention is not used, which is slower: %.200s", first)
        return False
    return True
