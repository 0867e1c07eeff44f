"""Running a causal language model: features for scoring, a decoding state for sampling, which fast ways are exact."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_model
from torch import Tensor, nn

from gruppo.modalities.common.adapters import save_adapter
from gruppo.modalities.common.lora import has_adapter
from gruppo.modalities.text.decoder import read_decoder, stream_features
from gruppo.modalities.text.decoding import LayeredDecoding
from gruppo.modalities.text.layouts import Layout, Packed, Stream, pack, pad_right, stream
from gruppo.types import NumericalStop

if TYPE_CHECKING:
    from gruppo.modalities.text.custom import ModelFunction

TOLERANCE = 3e-3
"""Relative error below which a fast way is used. Rounding in float32 makes 1e-6 to 1e-4 on trained models; a wrong
position, mask or cap makes 1e-2 to 1."""
WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_window_size", "attention_chunk_size")
"""Config entries of models whose attention does not reach every token."""


class Decoding(Protocol):
    """Rows during sampling."""

    logits: Float[Tensor, "N V"]
    """Of each row's next token."""

    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        """Append one token to each row."""
        ...

    def select(self, slots: Int[Tensor, "n"]) -> None:
        """Continue with these rows only."""
        ...


# --- any module from ids to logits ------------------------------------------------------------------------------------


class PlainBackbone:
    """A module that maps ids [B, T] to logits [B, T, V] causally. Decoding reads the whole row at every token."""

    layout: Layout = "padded"

    def __init__(self, module: nn.Module, source: ModelFunction | None = None) -> None:
        self.module = module
        self.source = source
        """The function that made the module, if it was opened by name."""

    @property
    def trunk(self) -> nn.Module:
        """The part that computes the features: all of it, since it cannot be split from its head."""
        return self.module

    def features(self, ids: Int[Tensor, "b L"]) -> Float[Tensor, "b L F"]:
        """Features of rows padded on the right; attention is causal, so that padding does not reach real tokens."""
        return self.module(ids)

    def features_before(
        self,
        prompts: Sequence[Int[Tensor, "P"]],
        completions: Sequence[Int[Tensor, "R"]],
        owners: Int[Tensor, "b"],
        row: Int[Tensor, "n"],
        column: Int[Tensor, "n"],
    ) -> Float[Tensor, "n F"]:
        """Features at the token before each action, which predicts it; an action is a completion and its column."""
        return _padded_features_before(self, prompts, completions, owners, row, column)

    def head(self, features: Tensor) -> Tensor:
        """Features to logits."""
        return features

    def start(
        self,
        prompts: Sequence[Int[Tensor, "L"]],
        owners: Int[Tensor, "N"],
        prefixes: Sequence[Int[Tensor, "H"]] | None = None,
    ) -> Decoding:
        """Read each prompt, and open one row for each owner, an index into the prompts.

        ``prefixes``: tokens that each row already has after its prompt, one or more.
        """
        return RereadDecoding(self, *join_prefixes(prompts, owners, prefixes))

    def on(self, module: nn.Module) -> PlainBackbone:
        """Run another module of the same kind in the same way."""
        return PlainBackbone(module, self.source)

    def save(self, folder: Path) -> None:
        """Write model.safetensors, which safetensors.torch.load_model reads, and module.json if a function is known."""
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.module, str(folder / "model.safetensors"))
        if self.source is not None:
            self.source.write(folder)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


class TransformersBackbone:
    """A Hugging Face causal LM, and which of the fast ways are exact for it (``probe``).

    ``splits``: trunk and head can be run apart. ``caches``: decoding with cached keys and values; ``decodes``: layer by
    layer (``LayeredDecoding``). ``layouts``: layouts of rows, the fastest first.
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
        self.accepted = inspect.signature(module.forward).parameters

    @property
    def trunk(self) -> nn.Module:
        """The part that computes the features: the module without its head, if it splits."""
        return self.module.base_model if self.splits else self.module

    @property
    def layout(self) -> Layout:
        """The fastest layout that is possible now: a hook on a layer needs the model's own forward."""
        runs_layers = self.splits and read_decoder(self.module) is not None
        return next((layout for layout in self.layouts if layout != "stream" or runs_layers), "padded")

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Features to logits; an ``nn.Linear`` is run in chunks by the scoring."""
        return self.module.get_output_embeddings() if self.splits else nn.Identity()

    def features(self, ids: Int[Tensor, "b L"], **inputs: Tensor) -> Float[Tensor, "b L F"]:
        """Features of rows padded on the right, or with positions and an attention mask."""
        if self.splits:
            return self.trunk(input_ids=ids, **inputs, use_cache=False).last_hidden_state
        return self.module(input_ids=ids, **inputs, use_cache=False).logits

    def packed_features(self, packed: Packed) -> Float[Tensor, "g L F"]:
        weight = next(self.module.parameters())
        visible = packed.visible.to(weight.device)
        mask = torch.zeros(visible.shape, dtype=weight.dtype, device=weight.device)
        mask = mask.masked_fill_(~visible, torch.finfo(weight.dtype).min)[:, None]
        ids, positions = packed.ids.to(weight.device), packed.positions.to(weight.device)
        return self.features(ids, position_ids=positions, attention_mask=mask)

    def stream_features(self, tokens: Stream) -> Float[Tensor, "N F"]:
        decoder = read_decoder(self.module)
        assert decoder is not None, "see layout"
        return stream_features(decoder, tokens)

    def features_before(
        self, prompts: Sequence[Tensor], completions: Sequence[Tensor], owners: Tensor, row: Tensor, column: Tensor
    ) -> Float[Tensor, "n F"]:
        device, layout = next(self.module.parameters()).device, self.layout
        if layout == "stream":
            tokens = stream(prompts, completions, owners)
            return self.stream_features(tokens)[tokens.before(row, column).to(device)]
        if layout == "packed":
            packed = pack(prompts, completions, owners)
            return self.packed_features(packed)[packed.row[row].to(device), packed.before(row, column).to(device)]
        return _padded_features_before(self, prompts, completions, owners, row, column)

    def start(self, prompts: Sequence[Tensor], owners: Tensor, prefixes: Sequence[Tensor] | None = None) -> Decoding:
        decoder = read_decoder(self.module) if self.decodes else None
        if decoder is None or self.layout != "stream":
            prompts, owners = join_prefixes(prompts, owners, prefixes)
            prefixes = None
        if decoder is not None:
            return LayeredDecoding(decoder, self.module.get_output_embeddings(), prompts, owners, prefixes)
        return (CachedDecoding if self.caches else RereadDecoding)(self, prompts, owners)

    def on(self, module: nn.Module) -> TransformersBackbone:
        return TransformersBackbone(
            module, splits=self.splits, caches=self.caches, decodes=self.decodes, layouts=self.layouts
        )

    def save(self, folder: Path) -> None:
        if has_adapter(self.module):
            save_adapter(self.module, folder)
            return
        generation: Any = getattr(self.module, "generation_config", None)
        try:
            if generation is not None:
                generation.validate(strict=True)
        except ValueError:  # a published temperature without do_sample, which transformers loads and refuses to save
            generation.do_sample = True
        self.module.save_pretrained(folder)


Backbone = PlainBackbone | TransformersBackbone


def _padded_features_before(
    backbone: Backbone,
    prompts: Sequence[Tensor],
    completions: Sequence[Tensor],
    owners: Tensor,
    row: Tensor,
    column: Tensor,
) -> Float[Tensor, "n F"]:
    device = next(backbone.module.parameters()).device
    ids, _ = pad_right([torch.cat([prompts[o], c]) for o, c in zip(owners.tolist(), completions, strict=True)])
    before = torch.tensor([len(prompt) - 1 for prompt in prompts])[owners][row] + column
    return backbone.features(ids.to(device))[row.to(device), before.to(device)]


def join_prefixes(
    prompts: Sequence[Tensor], owners: Tensor, prefixes: Sequence[Tensor] | None
) -> tuple[Sequence[Tensor], Tensor]:
    """Make each row with a prefix a prompt of its own."""
    if prefixes is None:
        return prompts, owners
    joined = [torch.cat([prompts[owner], prefix]) for owner, prefix in zip(owners.tolist(), prefixes, strict=True)]
    return joined, torch.arange(len(joined), device=owners.device)


# --- decoding ---------------------------------------------------------------------------------------------------------


class RereadDecoding:
    """Decoding without a cache: rows are padded on the right, so that absolute positions are right for any module."""

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


class CachedDecoding:
    """Decoding with cached keys and values: each prompt is read once, padded on the left, positions from the mask."""

    logits: Tensor

    def __init__(self, backbone: TransformersBackbone, prompts: Sequence[Tensor], owners: Tensor) -> None:
        from transformers import DynamicCache

        self.backbone = backbone
        self.cache = DynamicCache(config=backbone.module.config)
        ids = nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_side="left")
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
        self.mask: Bool[Tensor, "b L"] = (
            torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - lengths[:, None]
        )
        # 0, 1, 2, ... over the real tokens of each row
        positions = (self.mask.long().cumsum(dim=1) - 1).clamp(min=0)
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
        options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        out = self.backbone.module(
            input_ids=ids,
            attention_mask=self.mask.long(),
            past_key_values=self.cache,
            use_cache=True,
            **{name: value for name, value in options.items() if name in self.backbone.accepted},
        )
        self.logits = out.logits[:, -1]


# --- which fast ways are exact ----------------------------------------------------------------------------------------


def probe(module: Any) -> TransformersBackbone:
    """Return the backbone with every fast way that agrees with the plain one on a few tokens.

    A few tokens cannot show everything, so some are ruled out by the config: a window of attention hides far tokens;
    clipped values (OLMo) and scaled positions (Ministral, LongRoPE) differ at large values or far positions only.
    """
    plain, split = TransformersBackbone(module), TransformersBackbone(module, splits=True)
    device, vocabulary = next(module.parameters()).device, module.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        if not plain.features(torch.arange(1, 5, device=device)[None] % vocabulary).isfinite().all():
            raise NumericalStop(
                f"the weights of this {type(module).__name__} give logits that are not finite, so nothing can be "
                "sampled from it. Use another model, or an earlier save of it."
            )
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    is_full = kinds == {"full_attention"} and all(getattr(config, name, None) is None for name in WINDOWS)
    rope = getattr(config, "rope_parameters", None) or {}
    is_odd = getattr(config, "clip_qkv", None) is not None or "llama_4_scaling_beta" in rope
    is_odd = is_odd or rope.get("rope_type") in ("dynamic", "longrope")
    # ordinary tokens: the first ids of a vocabulary are often special ones, on which a trained model is ill-conditioned
    first, second = prompts = [torch.arange(1, n, device=device) * 7919 % vocabulary for n in (4, 7)]
    owners = torch.tensor([1, 0, 0], device=device)
    completions = [second.cpu(), second.cpu() + 1]

    def split_logits() -> tuple[Tensor, Tensor]:
        """With logits so large that a cap on them would show."""
        ids, _ = pad_right(prompts)
        louder = module.get_output_embeddings().register_forward_hook(lambda head, args, logits: logits * 1e3)
        try:
            return split.head(split.features(ids)), plain.features(ids)
        finally:
            louder.remove()

    def decoded_logits(decoding: Decoding) -> tuple[Tensor, Tensor]:
        both = decoding, RereadDecoding(plain, prompts, owners)
        for state in both:
            state.advance(torch.tensor([1, 2, 1], device=device))
            state.select(torch.tensor([0, 2], device=device))
            state.advance(torch.tensor([2, 0], device=device))
        return both[0].logits, both[1].logits

    def layered_logits() -> tuple[Tensor, Tensor]:
        decoder = read_decoder(module)
        assert decoder is not None, "another architecture"
        return decoded_logits(LayeredDecoding(decoder, module.get_output_embeddings(), prompts, owners))

    def rows_alone() -> Tensor:
        """Logits of two completions, each with a prompt of its own."""
        return plain.features(torch.stack([torch.cat([first, second]), torch.cat([first, second + 1])]))

    def streamed_logits() -> tuple[Tensor, Tensor]:
        tokens = stream([first.cpu()], completions, torch.tensor([0, 0]))
        columns = torch.arange(1, len(second))
        places = torch.stack([tokens.before(torch.full_like(columns, row), columns) for row in (0, 1)])
        return split.head(split.stream_features(tokens))[places.to(device)], rows_alone()[:, len(first) : -1]

    def packed_logits() -> tuple[Tensor, Tensor]:
        got = plain.packed_features(pack([first.cpu()], completions, torch.tensor([0, 0])))
        return got[0, len(first) :].reshape(2, len(second), -1), rows_alone()[:, len(first) :]

    def agrees(attempt: Callable[[], tuple[Tensor, Tensor]]) -> bool:
        try:
            with torch.no_grad():
                got, expected = attempt()
        except Exception:  # whatever a model raises, the plain way remains
            return False
        return relative_error(got, expected) < TOLERANCE

    splits = agrees(split_logits)
    caches = agrees(lambda: decoded_logits(CachedDecoding(plain, prompts, owners)))
    runs_layers = splits and is_full and not is_odd
    decodes = runs_layers and agrees(layered_logits)
    layouts: list[Layout] = []
    if is_full:
        layouts += ["stream"] if runs_layers and agrees(streamed_logits) else []
        layouts += ["packed"] if agrees(packed_logits) else []
    return TransformersBackbone(module, splits=splits, caches=caches, decodes=decodes, layouts=(*layouts, "padded"))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, over that of the expected logits about their mean."""
    got, expected = got.float(), expected.float()
    return float((got - expected).norm() / (expected - expected.mean(dim=-1, keepdim=True)).norm())
