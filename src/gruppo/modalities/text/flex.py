"""The layers of a decoder on CUDA: FlexAttention over the tokens of a stream, each layer compiled.

``decoder.py`` has the plain layers, which compute the same. All layers of a model share one
compiled function.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from gruppo.core.compiled import Compiled
from gruppo.core.layers import checkpointed
from gruppo.modalities.text import decoder as plain
from gruppo.modalities.text.decoder import Decoder, rotate
from gruppo.modalities.text.layouts import Stream, sees, stream

BLOCK = 128
"""FlexAttention's block, to a multiple of which streams are padded."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
"""Relative error of a layer's output and gradient below which the compiled layer is used. A wrong
mask makes 0.1 to 1; products of float32 may be rounded to TF32, 3e-4."""


def block_mask(spans: Int[Tensor, "3 N"], device: torch.device) -> BlockMask:
    """The mask of a stream, computed from the spans of its tokens: nothing of size N x N is formed.

    A block of keys is partly seen if a span of a query of the block reaches into it, and wholly if
    one span of each query covers it. N is a multiple of the block.
    """
    length = spans.shape[1]
    query = torch.arange(length)[:, None]
    first = torch.arange(0, length, BLOCK)  # key of each block
    shared_start, shared_end, start = spans[:, :, None]
    reaches = covers = torch.zeros(length, len(first), dtype=torch.bool)
    for begin, end in ((shared_start, shared_end), (start, query + 1)):
        reaches = reaches | ((first < end) & (first + BLOCK > begin) & (begin < end))
        covers = covers | ((first >= begin) & (first + BLOCK <= end))
    covered = covers.view(-1, BLOCK, len(first)).all(dim=1)
    partly = reaches.view(-1, BLOCK, len(first)).any(dim=1) & ~covered
    # copies that do not wait for the device; the source is read before they return
    shared_start, shared_end, start = spans.to(device, non_blocking=True)

    def sees_of_stream(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees((shared_start[q], shared_end[q], start[q]), q, k)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        blocks = blocks.to(device, non_blocking=True).int()
        order = blocks.argsort(dim=1, descending=True, stable=True)
        return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(partly),
        *listed(covered),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees_of_stream,
        seq_lengths=(length, length),
    )


def _layer(x: Tensor, layer: Any, cos: Tensor, sin: Tensor, mask: BlockMask) -> Tensor:
    """One layer in plain operations, which a compiler fuses; sizes are read from the module, where
    they are static."""
    part, normed = layer.self_attn, layer.input_layernorm(x)
    projections = (part.q_proj, part.k_proj, part.v_proj)
    # [N, heads, D]
    q, k, v = (project(normed).unflatten(-1, (-1, part.head_dim)) for project in projections)
    if getattr(part, "q_norm", None) is not None:
        q, k = part.q_norm(q), part.k_norm(k)
    q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    attended = flex_attention(q, k, v, block_mask=mask, scale=part.scaling, enable_gqa=True)
    assert isinstance(attended, Tensor)
    x = x + part.o_proj(attended[0].transpose(0, 1).flatten(1))
    return x + layer.mlp(layer.post_attention_layernorm(x))


compiled_layer = Compiled(_layer, "layers with FlexAttention", needs_compiling=True)
_checked: dict[str, bool] = {}
"""Whether the compiled layer agrees with the plain one, by the layer's description, dtype and
device."""


def features(decoder: Decoder, stream: Stream) -> Float[Tensor, "N F"]:
    """``stream_features`` by compiled layers; raises ``NotCompiled`` if they cannot be."""
    length = len(stream.ids)
    padding = (0, -length % BLOCK)
    ids, positions = pad(stream.ids, padding), pad(stream.positions, padding)
    x, cos, sin = plain.embedded(decoder, ids, positions)
    mask = block_mask(pad(stream.spans, padding, value=length), x.device)
    for layer in decoder.layers:
        x = checkpointed(layer, _run)(x, layer, cos, sin, mask)
    return plain.norm(decoder.norm, x)


def _run(x: Tensor, *args: Any) -> Tensor:
    """The compiled layer, in the variant with a gradient always: another rounds differently, and a
    ratio is not 1."""
    if torch.is_grad_enabled():
        return compiled_layer(x if x.requires_grad else x.detach().requires_grad_(), *args)
    with torch.enable_grad():
        return compiled_layer(x.detach().requires_grad_(), *args).detach()


def is_usable(decoder: Decoder) -> bool:
    """Whether the layers can be compiled here and agree with the plain ones, forward and backward;
    tried once."""
    weight = next(decoder.layers[0].parameters())
    if not compiled_layer.is_used(weight.device):
        return False
    key = f"{weight.dtype} {weight.device} {decoder.layers[0]!r}"
    if key not in _checked:
        try:
            _checked[key] = _agrees(decoder)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # NotCompiled, or whatever compiling the backward pass raises
            compiled_layer.fail(error)
            return False
        if not _checked[key]:
            compiled_layer.fail("its numbers differ from those of the plain layers")
    return _checked[key]


def _agrees(decoder: Decoder) -> bool:
    """Compare what the first layer adds, and its gradient, over two groups, with the weights as
    they are."""
    weight = next(decoder.embed.parameters()).detach()
    embed = nn.Embedding.from_pretrained(weight[:7].clone(), freeze=False)
    first = replace(decoder, embed=embed, layers=decoder.layers[:1], norm=nn.Identity())
    prompts, owners = [torch.arange(n) % 7 for n in (150, 3)], torch.tensor([0, 0, 1])
    tokens = stream(prompts, [torch.arange(n) % 5 for n in (90, 40, 7)], owners)
    count = int(tokens.start[-1]) + 6  # padding follows
    results = []
    for run in (plain.stream_features, features):
        with torch.enable_grad():
            added = (
                run(first, tokens)[:count] - embed(tokens.ids[:count].to(weight.device))
            ).float()
            results.append(
                (added.detach(), *torch.autograd.grad(added.square().sum(), embed.weight))
            )
    tolerance = TOLERANCE.get(weight.dtype, 1e-3)
    return all(
        float((fast - slow).norm() / slow.norm()) < tolerance
        for slow, fast in zip(*results, strict=True)
    )
