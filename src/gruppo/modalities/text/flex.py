"""The layers of a decoder on CUDA: FlexAttention over the tokens of a stream, each layer compiled.

``decoder.py`` has the plain layers, which compute the same. All layers of a model share one compiled function.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gruppo.core.compiled import Compiled, NotCompiled
from gruppo.core.layers import checkpointed
from gruppo.modalities.text import decoder as plain
from gruppo.modalities.text.decoder import Decoder
from gruppo.modalities.text.layouts import SPAN_BLOCK, Tokens, stream

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
"""Relative error of a layer's output and gradient below which the compiled layer is used. A wrong mask makes 0.1 to 1;
products of float32 may be rounded to TF32, 3e-4."""


def block_mask(spans: Int[Tensor, "3 N"], device: torch.device) -> BlockMask:
    """The mask of a stream, computed from the spans of its tokens: nothing of size N x N is formed.

    A block of keys is partly seen where a span of a query of the block reaches into it, and wholly where one span of
    each query covers it. N is a multiple of the block.
    """
    length, count = spans.shape[1], spans.shape[1] // SPAN_BLOCK
    query = torch.arange(length)
    row = query // SPAN_BLOCK
    # how many queries of a block of rows reach into a block of keys, and cover it: +1 where a run begins, -1 behind it
    seen, covered = torch.zeros(2, count, count + 1, dtype=torch.long)
    shared_start, shared_end, text_start = spans
    for first, end in ((shared_start, shared_end), (text_start, query + 1)):
        outer, inner = (
            (first // SPAN_BLOCK, -(-end // SPAN_BLOCK)),
            (-(-first // SPAN_BLOCK), end // SPAN_BLOCK),
        )
        for counts, (begin, past) in ((seen, outer), (covered, inner)):
            some = (end > first) & (past > begin)
            one = torch.ones(int(some.sum()), dtype=torch.long)
            counts.index_put_((row[some], begin[some]), one, accumulate=True)
            counts.index_put_((row[some], past[some]), -one, accumulate=True)
    covered = covered.cumsum(dim=1)[:, :-1] == SPAN_BLOCK
    partly = (seen.cumsum(dim=1)[:, :-1] > 0) & ~covered
    # copies that do not wait for the device; the source is read before they return
    shared_start, shared_end, text_start = spans.to(device, non_blocking=True)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((k >= shared_start[q]) & (k < shared_end[q])) | ((k >= text_start[q]) & (k <= q))

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        blocks = blocks.to(device, non_blocking=True).int()
        order = blocks.argsort(dim=1, descending=True, stable=True)
        return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(partly),
        *listed(covered),
        BLOCK_SIZE=SPAN_BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _layer(x: Tensor, layer: Any, cos: Tensor, sin: Tensor, mask: BlockMask) -> Tensor:
    """One layer in plain operations, which a compiler fuses; sizes are read from the module, where they are static."""
    part, normed = layer.self_attn, layer.input_layernorm(x)
    projections = (part.q_proj, part.k_proj, part.v_proj)
    q, k, v = (
        project(normed).unflatten(-1, (-1, part.head_dim)) for project in projections
    )  # [N, heads, D]
    if getattr(part, "q_norm", None) is not None:
        q, k = part.q_norm(q), part.k_norm(k)
    q, k, v = (
        each.transpose(0, 1)[None] for each in (_rotate(q, cos, sin), _rotate(k, cos, sin), v)
    )
    attended = flex_attention(q, k, v, block_mask=mask, scale=part.scaling, enable_gqa=True)
    assert isinstance(attended, Tensor)
    x = x + part.o_proj(attended[0].transpose(0, 1).flatten(1))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _rotate(x: Float[Tensor, "N h D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "N h D"]:
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]).to(x.dtype)


compiled_layer = Compiled(_layer, "layers with FlexAttention", needs_compiling=True)
_checked: dict[str, bool] = {}
"""Whether the compiled layer agrees with the plain one, by the layer's description, dtype and device."""


def features(decoder: Decoder, stream: Tokens) -> Float[Tensor, "N F"]:
    """``stream_features`` of a stream with spans, by compiled layers; ``NotCompiled`` where they cannot be."""
    weight = next(decoder.embed.parameters())
    assert stream.spans is not None
    mask = block_mask(stream.spans, weight.device)
    x, cos, sin = plain.embedded(decoder, stream.to(weight.device, torch.float32))
    for layer in decoder.layers:
        x = checkpointed(layer, _run)(x, layer, cos, sin, mask)
    return plain.norm(decoder.norm, x)


def _run(x: Tensor, *args: Any) -> Tensor:
    """The compiled layer, in the variant with a gradient always: another rounds differently, and a ratio is not 1."""
    if torch.is_grad_enabled():
        return compiled_layer(x if x.requires_grad else x.detach().requires_grad_(), *args)
    with torch.enable_grad():
        return compiled_layer(x.detach().requires_grad_(), *args).detach()


def is_usable(decoder: Decoder) -> bool:
    """Whether the layers can be compiled here and agree with the plain ones, forward and backward; tried once."""
    weight = next(decoder.layers[0].parameters())
    if not compiled_layer.is_used(weight.device):
        return False
    key = f"{weight.dtype} {weight.device} {decoder.layers[0]!r}"
    if key not in _checked:
        try:
            _checked[key] = _agrees(decoder)
        except NotCompiled:
            return False
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compiling the backward pass
            compiled_layer.fail(error)
            return False
        if not _checked[key]:
            compiled_layer.fail("its numbers differ from those of the plain layers")
    return _checked[key]


def _agrees(decoder: Decoder) -> bool:
    """Compare output and gradient of the first layer over two groups, with the weights as they are."""
    weight, layer = next(decoder.embed.parameters()), decoder.layers[0]
    prompts, owners = [torch.arange(n) % 7 for n in (150, 3)], torch.tensor([0, 0, 1])
    completions = [torch.arange(n) % 5 for n in (90, 40, 7)]
    results = []
    for has_blocks in (True, False):
        tokens = stream(prompts, completions, owners, has_blocks=has_blocks)
        count = int(tokens.start[-1]) + len(completions[-1]) - 1  # what follows is padding
        tokens = tokens.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        with torch.enable_grad():
            x, cos, sin = plain.embedded(decoder, tokens)
            x = x.detach().requires_grad_()
            if tokens.spans is None:
                out = plain.layer_output(x, decoder, layer, tokens, cos, sin)
            else:
                out = _run(x, layer, cos, sin, block_mask(tokens.spans, weight.device))
            grad = torch.autograd.grad(out[:count].float().square().sum(), x)[0]
        results.append((out[:count].detach().double() - x[:count].detach(), grad[:count].double()))
    tolerance = TOLERANCE.get(weight.dtype, 1e-3)
    return all(
        float((fast - slow).norm() / slow.norm()) < tolerance
        for slow, fast in zip(*results, strict=True)
    )
