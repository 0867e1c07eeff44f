"""Finding out, once, which fast ways give the logits of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gruppo.modalities.text.backbones import (
    CachedDecoding,
    Decoding,
    Layout,
    RereadDecoding,
    TransformersBackbone,
    pad_right,
)
from gruppo.modalities.text.decoding import LayeredDecoding
from gruppo.modalities.text.layers import read_decoder
from gruppo.modalities.text.packing import pack
from gruppo.modalities.text.stream import stream
from gruppo.types import NumericalStop


def probe(module: Any) -> TransformersBackbone:
    """The backbone with every fast way that agrees with the plain one on a few tokens; a way that fails is not used."""
    plain = TransformersBackbone(module)
    _check_finite(plain)
    splits = _agrees(plain, _split)
    caches = _agrees(plain, _cached)
    layouts: list[Layout] = []
    config = module.config.get_text_config()
    runs_layers = splits and _attends_fully(config) and not _has_more_than_shows(config)
    decodes = runs_layers and _agrees(plain, _layered)
    if _attends_fully(config):
        layouts += ["stream"] if runs_layers and _agrees(plain, _streamed) else []
        layouts += ["packed"] if _agrees(plain, _packed) else []
    return TransformersBackbone(module, splits=splits, caches=caches, decodes=decodes, layouts=(*layouts, "padded"))


WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_window_size", "attention_chunk_size")


@torch.no_grad()
def _check_finite(plain: TransformersBackbone) -> None:
    ids = torch.arange(1, 5, device=next(plain.module.parameters()).device)[None]
    if not plain.features(ids % plain.module.get_input_embeddings().weight.shape[0]).isfinite().all():
        raise NumericalStop(
            f"the weights of this {type(plain.module).__name__} give logits that are not finite, so nothing can be "
            "sampled from it. Use another model, or an earlier save of it."
        )


def _attends_fully(config: Any) -> bool:
    """A few tokens cannot tell whether far ones are seen: a window must be known from the config."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and all(getattr(config, name, None) is None for name in WINDOWS)


def _has_more_than_shows(config: Any) -> bool:
    """Nor can they show what sets in at large values (OLMo's clip) or far positions (Ministral's scale, LongRoPE)."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        getattr(config, "clip_qkv", None) is not None
        or "llama_4_scaling_beta" in rope
        or rope.get("rope_type") in ("dynamic", "longrope")
    )


Attempt = Callable[[TransformersBackbone, list[Tensor]], tuple[Tensor, Tensor]]
"""Logits by the fast way and by the plain way."""


def _agrees(plain: TransformersBackbone, attempt: Attempt) -> bool:
    device = next(plain.module.parameters()).device
    vocabulary = plain.module.get_input_embeddings().weight.shape[0]
    # ordinary tokens: the first ids of a vocabulary are often special ones, on which a trained model is ill-conditioned
    prompts = [torch.arange(1, n, device=device) * 7919 % vocabulary for n in (4, 7)]
    try:
        with torch.no_grad():
            got, needed = attempt(plain, prompts)
    except Exception:  # whatever a foreign model raises, the plain way remains
        return False
    return relative_error(got, needed) < TOLERANCE


TOLERANCE = 3e-3
"""Rounding in float32 makes 1e-6 to 1e-4 of it on trained models, a wrong position, mask or cap 1e-2 to 1."""


def relative_error(got: Tensor, needed: Tensor) -> float:
    """Root mean square of the difference over that of the logits about their mean."""
    got, needed = got.float(), needed.float()
    return float((got - needed).norm() / (needed - needed.mean(dim=-1, keepdim=True)).norm())


def _split(plain: TransformersBackbone, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """With logits so large that a cap on them would show."""
    ids, _ = pad_right(prompts)
    split = TransformersBackbone(plain.module, splits=True)
    louder = plain.module.get_output_embeddings().register_forward_hook(lambda head, args, logits: logits * 1e3)
    try:
        return split.head(split.features(ids)), plain.features(ids)
    finally:
        louder.remove()


def _cached(plain: TransformersBackbone, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    device = prompts[0].device
    owners = torch.tensor([1, 0, 0], device=device)
    return _after_some_steps(CachedDecoding(plain, prompts, owners), plain, prompts, owners)


def _layered(plain: TransformersBackbone, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    device = prompts[0].device
    owners = torch.tensor([1, 0, 0], device=device)
    decoder = read_decoder(plain.module)
    assert decoder is not None, "another layout"
    fast = LayeredDecoding(decoder, plain.module.get_output_embeddings(), prompts, owners)
    return _after_some_steps(fast, plain, prompts, owners)


def _after_some_steps(
    fast: Decoding, plain: TransformersBackbone, prompts: list[Tensor], owners: Tensor
) -> tuple[Tensor, Tensor]:
    device = owners.device
    both = fast, RereadDecoding(plain, prompts, owners)
    for decoding in both:
        decoding.advance(torch.tensor([1, 2, 1], device=device))
        decoding.select(torch.tensor([0, 2], device=device))
        decoding.advance(torch.tensor([2, 0], device=device))
    return both[0].logits, both[1].logits


def _streamed(plain: TransformersBackbone, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    first, second = prompts
    tokens = stream([first.cpu()], [second.cpu(), second.cpu() + 1], torch.tensor([0, 0]))
    split = TransformersBackbone(plain.module, splits=True)
    columns = torch.arange(1, len(second))
    places = torch.stack([tokens.before(torch.full_like(columns, row), columns) for row in (0, 1)])
    got = split.head(split.stream_features(tokens))[places.to(first.device)]
    return got, _alone(plain, first, second)[:, len(first) : -1]


def _packed(plain: TransformersBackbone, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    first, second = prompts
    packed = pack([first.cpu()], [second.cpu(), second.cpu() + 1], torch.tensor([0, 0]))
    device = first.device
    got = plain.packed_features(packed.ids.to(device), packed.positions.to(device), packed.visible.to(device))
    return got[0, len(first) :].reshape(2, len(second), -1), _alone(plain, first, second)[:, len(first) :]


def _alone(plain: TransformersBackbone, first: Tensor, second: Tensor) -> Tensor:
    """Two completions of one prompt, each with a prompt of its own."""
    return plain.features(torch.stack([torch.cat([first, second]), torch.cat([first, second + 1])]))
