"""How a module is run: features of whole rows for scoring, and a decoding state for sampling."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_model
from torch import Tensor, nn

from gruppo.modalities.common.adapters import save_adapter
from gruppo.modalities.common.lora import has_adapter
from gruppo.modalities.text.custom import WEIGHTS, MadeBy
from gruppo.modalities.text.decoding import LayeredDecoding
from gruppo.modalities.text.layers import read_decoder
from gruppo.modalities.text.stream import Stream
from gruppo.modalities.text.trunk import stream_features

Layout = Literal["stream", "packed", "padded"]
"""Rows to score: groups one after another without padding; a group as one row under a block mask; each row alone."""


class Decoding(Protocol):
    """Rows in the middle of being written."""

    logits: Float[Tensor, "N V"]
    """Of each row's next token."""

    def advance(self, tokens: Int[Tensor, "N"]) -> None: ...

    def select(self, slots: Int[Tensor, "n"]) -> None:
        """Go on with these rows only."""
        ...


class Backbone(Protocol):
    """A causal language model in two halves."""

    module: nn.Module

    @property
    def layout(self) -> Layout:
        """Which way of reading rows scores them."""
        ...

    @property
    def trunk(self) -> nn.Module:
        """What computes the features: the module without its head, or all of it. ``on(trunk)`` has no head."""
        ...

    def features(self, ids: Int[Tensor, "b L"]) -> Float[Tensor, "b L F"]:
        """Of rows padded on the right; under causal attention what comes after a position cannot reach it."""
        ...

    def packed_features(
        self, ids: Int[Tensor, "g L"], positions: Int[Tensor, "g L"], visible: Bool[Tensor, "g L L"]
    ) -> Float[Tensor, "g L F"]:
        """Of rows with positions and visibility of their own."""
        ...

    def stream_features(self, tokens: Stream) -> Float[Tensor, "N F"]:
        """Of groups one after another."""
        ...

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Features to logits; where it is an ``nn.Linear``, that module, which scoring then runs in blocks."""
        ...

    def start(
        self,
        prompts: Sequence[Int[Tensor, "L"]],
        owners: Int[Tensor, "N"],
        behind: Sequence[Int[Tensor, "H"]] | None = None,
    ) -> Decoding:
        """Read each prompt once, and open one row for each owner, an index into the prompts.

        ``behind``: what each row has after its prompt already, a token or more.
        """
        ...

    def on(self, module: nn.Module) -> Backbone:
        """The same way of running another module of the same kind."""
        ...

    def save(self, folder: Path) -> None: ...


# --- any module from ids to logits -----------------------------------------------------------------------------------


class PlainBackbone:
    """A module that maps ids [B, T] to logits [B, T, V] causally. Decoding reads the whole row at every token."""

    layout: Layout = "padded"

    def __init__(self, module: nn.Module, made_by: MadeBy | None = None) -> None:
        self.module = module
        self.made_by = made_by
        """The function that made it, of one that was opened by name."""

    @property
    def trunk(self) -> nn.Module:
        return self.module

    def features(self, ids: Tensor) -> Tensor:
        return self.module(ids)

    def packed_features(self, ids: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        raise NotImplementedError("a plain module takes ids alone; see layout")

    def stream_features(self, tokens: Stream) -> Tensor:
        raise NotImplementedError("a plain module takes ids alone; see layout")

    def head(self, features: Tensor) -> Tensor:
        return features

    def start(self, prompts: Sequence[Tensor], owners: Tensor, behind: Sequence[Tensor] | None = None) -> Decoding:
        return RereadDecoding(self, *whole(prompts, owners, behind))

    def on(self, module: nn.Module) -> PlainBackbone:
        return PlainBackbone(module, self.made_by)

    def save(self, folder: Path) -> None:
        """model.safetensors, which safetensors.torch.load_model reads; and module.json, where a function is known."""
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.module, str(folder / WEIGHTS))
        if self.made_by is not None:
            self.made_by.write(folder)


def whole(
    prompts: Sequence[Tensor], owners: Tensor, behind: Sequence[Tensor] | None
) -> tuple[Sequence[Tensor], Tensor]:
    """Where rows have begun, each with all before it as a prompt of its own."""
    if behind is None:
        return prompts, owners
    begun = [torch.cat([prompts[owner], own]) for owner, own in zip(owners.tolist(), behind, strict=True)]
    return begun, torch.arange(len(begun), device=owners.device)


class RereadDecoding:
    """Decoding without a cache: rows padded on the right, so absolute positions are right for any causal module."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Tensor], owners: Tensor) -> None:
        self.backbone = backbone
        self.ids, self.lengths = pad_right(prompts)
        self.logits = self._read()[owners]
        self.ids, self.lengths = self.ids[owners], self.lengths[owners]

    def advance(self, tokens: Tensor) -> None:
        if int(self.lengths.max()) == self.ids.shape[1]:
            self.ids = nn.functional.pad(self.ids, (0, 1))
        self.ids[torch.arange(len(tokens)), self.lengths] = tokens
        self.lengths = self.lengths + 1
        self.logits = self._read()

    def select(self, slots: Tensor) -> None:
        self.ids, self.lengths, self.logits = self.ids[slots], self.lengths[slots], self.logits[slots]

    def _read(self) -> Tensor:
        features = self.backbone.features(self.ids)
        last = features[torch.arange(len(self.ids)), self.lengths - 1]
        return self.backbone.head(last)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


class TransformersBackbone:
    """A Hugging Face causal LM. Which of the fast ways hold for this model is found by trying, once (``probe``).

    ``splits``: trunk and head can be run apart. ``caches``: decoding with keys and values kept; ``decodes``: by layers
    of our own. ``layouts``: ways of reading rows, the fastest first.
    """

    def __init__(
        self,
        module: Any,
        *,
        splits: bool = False,
        caches: bool = False,
        decodes: bool = False,
        layouts: Sequence[Layout] = ("padded",),
    ) -> None:
        self.module = module
        self.splits, self.caches, self.decodes, self.layouts = splits, caches, decodes, tuple(layouts)
        accepted = inspect.signature(module.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @property
    def trunk(self) -> nn.Module:
        return self.module.base_model if self.splits else self.module

    def features(self, ids: Tensor) -> Tensor:
        return self._forward(input_ids=ids)

    @property
    def layout(self) -> Layout:
        """The fastest that is possible now: a hook on a layer needs the model's own forward."""
        runs_layers = self.splits and read_decoder(self.module) is not None
        return next((layout for layout in self.layouts if layout != "stream" or runs_layers), "padded")

    def packed_features(self, ids: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        dtype = next(self.module.parameters()).dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=ids.device)
        mask = mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
        return self._forward(input_ids=ids, position_ids=positions, attention_mask=mask)

    def stream_features(self, tokens: Stream) -> Tensor:
        decoder = read_decoder(self.module)
        assert decoder is not None, "see layout"
        return stream_features(decoder, tokens)

    def _forward(self, **inputs: Tensor) -> Tensor:
        if self.splits:
            return self.trunk(**inputs, use_cache=False).last_hidden_state
        return self.module(**inputs, use_cache=False).logits

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        return self.module.get_output_embeddings() if self.splits else nn.Identity()

    def start(self, prompts: Sequence[Tensor], owners: Tensor, behind: Sequence[Tensor] | None = None) -> Decoding:
        decoder = read_decoder(self.module) if self.decodes else None
        if decoder is None or self.layout != "stream":
            prompts, owners = whole(prompts, owners, behind)
            behind = None
        if decoder is not None:
            return LayeredDecoding(decoder, self.module.get_output_embeddings(), prompts, owners, behind)
        return (CachedDecoding if self.caches else RereadDecoding)(self, prompts, owners)

    def on(self, module: nn.Module) -> TransformersBackbone:
        return TransformersBackbone(
            module, splits=self.splits, caches=self.caches, decodes=self.decodes, layouts=self.layouts
        )

    def save(self, folder: Path) -> None:
        if has_adapter(self.module):
            save_adapter(self.module, folder)
            return
        _make_savable(getattr(self.module, "generation_config", None))
        self.module.save_pretrained(folder)


def _make_savable(generation: Any) -> None:
    """Published models name a temperature without do_sample, which transformers loads and then refuses to save."""
    try:
        if generation is not None:
            generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


class CachedDecoding:
    """Decoding with keys and values kept: each prompt is read once, padded on the left, positions from the mask."""

    logits: Tensor

    def __init__(self, backbone: TransformersBackbone, prompts: Sequence[Tensor], owners: Tensor) -> None:
        from transformers import DynamicCache

        self.backbone = backbone
        self.cache = DynamicCache(config=backbone.module.config)
        ids, self.mask = pad_left(prompts)
        positions = positions_from(self.mask)
        self._forward(ids, positions)
        self.positions = positions[:, -1]
        self.select(owners)

    def advance(self, tokens: Tensor) -> None:
        self.mask = nn.functional.pad(self.mask, (0, 1), value=True)
        self.positions = self.positions + 1
        self._forward(tokens[:, None], self.positions[:, None])

    def select(self, slots: Tensor) -> None:
        self.cache.batch_select_indices(slots)
        self.mask, self.positions = self.mask[slots], self.positions[slots]
        self.logits = self.logits[slots]

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        positions_too = {"position_ids": positions} if self.backbone.takes_positions else {}
        out = self.backbone.module(
            input_ids=ids,
            attention_mask=self.mask.long(),
            past_key_values=self.cache,
            use_cache=True,
            **positions_too,
            **self.backbone.last_only,
        )
        self.logits = out.logits[:, -1]


def pad_right(rows: Sequence[Int[Tensor, "L"]]) -> tuple[Int[Tensor, "b L"], Int[Tensor, "b"]]:
    """Rows of ids in one tensor, and their lengths."""
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), lengths


def pad_left(rows: Sequence[Int[Tensor, "L"]]) -> tuple[Int[Tensor, "b L"], Bool[Tensor, "b L"]]:
    """Rows of ids in one tensor, and where they are real."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return ids, torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - lengths[:, None]


def positions_from(mask: Bool[Tensor, "b L"]) -> Int[Tensor, "b L"]:
    """0, 1, 2, ... over the real tokens of each row, wherever the padding is."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)
