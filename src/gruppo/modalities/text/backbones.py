"""Running a causal language model: features for scoring, a decoding state for sampling, which fast
ways are exact."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gruppo.core.compiled import NotCompiled
from gruppo.distributed.sharding import is_unit
from gruppo.modalities.text import flex
from gruppo.modalities.text.decoder import read_decoder, stream_features
from gruppo.modalities.text.decoding import FusedDecoder, KeptRow, LayeredDecoding
from gruppo.modalities.text.layouts import Layout, Stream, Texts, Tokens, pad, sees, stream
from gruppo.modalities.text.static_decoding import StaticDecoding
from gruppo.protocols import device_of
from gruppo.types import NumericalStop

if TYPE_CHECKING:
    from gruppo.modalities.text.custom import ModelFunction

TOLERANCE = 3e-3
"""Relative error below which a fast way is used. Rounding in float32 makes 1e-6 to 1e-4 on trained
models; a wrong position, mask or cap makes 1e-2 to 1."""
WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window",
    "attention_window_size",
    "attention_chunk_size",
)
"""Config entries of models whose attention does not reach every token."""


@dataclass(eq=False)
class Backbone:
    """A causal language model, and which fast ways of running it are exact (``probe``)."""

    module: Any
    is_plain: bool = False
    """Whether the module maps ids [B, T] to logits [B, T, V]; otherwise it has the interface of
    Hugging Face.

    T is never 1: no distribution to learn needs it, and some modules (nanochat's) have no forward
    for it.
    """
    splits: bool = False
    """Whether trunk and head can be run apart."""
    caches: bool = False
    """Whether decoding with the model's own cache of keys and values is exact."""
    decodes: bool = False
    """Whether decoding layer by layer is exact (``LayeredDecoding``)."""
    layouts: tuple[Layout, ...] = ("padded",)
    """Layouts of rows, the fastest first."""
    dtype: torch.dtype | None = None
    """Of a forward of sharded weights, whose shards have another; None for that of the weights."""
    compiles: bool = False
    """Whether streams on CUDA run as compiled layers, where those agree with the plain ones. Not
    while probed: first the plain layers are compared with the model's own forward."""
    source: ModelFunction | None = None
    """The function that made the module, if it was opened by name."""

    @property
    def layout(self) -> Layout:
        """The fastest layout that is possible now: a hook on a layer needs the model's own
        forward."""
        runs_layers = self.splits and read_decoder(self.module) is not None
        return next(
            (layout for layout in self.layouts if layout != "stream" or runs_layers), "padded"
        )

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Features to logits; an ``nn.Linear`` is run in chunks by the scoring."""
        return self.module.get_output_embeddings() if self.splits else nn.Identity()

    def features(self, ids: Int[Tensor, "b L"], **inputs: Any) -> Float[Tensor, "b L F"]:
        """Features of rows padded on the right, or with positions and an attention mask."""
        if self.is_plain:
            return self.module(ids)
        network = self.module.base_model if self.splits else self.module
        output = network(input_ids=ids, use_cache=False, **inputs)
        return output.last_hidden_state if self.splits else output.logits

    def features_before(
        self, prompts: Texts, completions: Texts, owners: Tensor, row: Tensor, column: Tensor
    ) -> Float[Tensor, "n F"]:
        """Features at the token before each action, which predicts it.

        ``owners`` [b]: the prompt of each completion. An action is a completion and its column,
        ``row`` and ``column`` [n].
        """
        tokens: Tokens
        if self.layout == "padded":
            tokens = pad(prompts, completions, owners)
            features = self.features(tokens.ids.to(device_of(self.module))).flatten(0, 1)
        else:
            tokens = stream(prompts, completions, owners)
            is_packed = self.layout == "packed"
            features = (self._packed_features if is_packed else self._stream_features)(tokens)
        return features[tokens.before(row, column).to(features.device, non_blocking=True)]

    def _stream_features(self, tokens: Stream) -> Float[Tensor, "N F"]:
        """Features by our layers, compiled on CUDA if those agree with the plain ones and hold
        whole weights."""
        decoder = read_decoder(self.module)
        assert decoder is not None, "see layout"
        if self.compiles and not is_unit(decoder.layers[0]) and flex.is_usable(decoder):
            with suppress(NotCompiled):
                return flex.features(decoder, tokens)
        return stream_features(decoder, tokens)

    def _packed_features(self, tokens: Stream) -> Float[Tensor, "N F"]:
        """Features by the model's own forward, all groups in one row under a block mask.

        One forward: with sharded weights, ranks have other numbers of groups.
        """
        device = device_of(self.module)
        dtype = self.dtype or next(self.module.parameters()).dtype
        index = torch.arange(len(tokens.ids))
        visible = sees(tokens.spans[:, :, None], index[:, None], index)
        # added to the scores: the smallest number, as in transformers' own masks, and not -inf
        mask = torch.zeros(visible.shape, dtype=dtype)
        mask = mask.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]  # [1, 1, N, N]
        positions = tokens.positions[None].to(device)
        ids = tokens.ids[None].to(device)
        return self.features(ids, position_ids=positions, attention_mask=mask.to(device))[0]

    def start(
        self,
        prompts: Texts,
        owners: Tensor,
        prefixes: Texts | None = None,
        kept: Sequence[KeptRow | None] = (),
        fused: FusedDecoder | None = None,
    ) -> Decoding:
        """Read each prompt, and open one row for each owner [N], an index into the prompts.

        ``prefixes``: tokens that each row already has after its prompt, one or more; ``kept``: keys
        and values of their first. ``fused``: of the present weights, if there is one already.
        """
        decoder = read_decoder(self.module) if self.decodes else None
        if decoder is not None:
            kind = StaticDecoding if owners.device.type == "cuda" else LayeredDecoding
            fused = fused or FusedDecoder(decoder, self.module.get_output_embeddings())
            return kind(fused, prompts, owners, prefixes, kept)
        if prefixes is not None:  # each row becomes a prompt of its own
            both = zip(owners.tolist(), prefixes, strict=True)
            prompts = [torch.cat([prompts[owner], prefix]) for owner, prefix in both]
            owners = torch.arange(len(prompts), device=owners.device)
        return (CachedDecoding if self.caches else RereadDecoding)(self, prompts, owners)


class RereadDecoding:
    """Decoding without a cache: rows are padded on the right, so that absolute positions are right
    for any module."""

    def __init__(self, backbone: Backbone, prompts: Texts, owners: Tensor) -> None:
        self.backbone = backbone
        self.ids = pad_sequence([prompt[:-1] for prompt in prompts], batch_first=True)
        self.lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.ids.device)
        self.advance(torch.stack([prompt[-1] for prompt in prompts]))
        self.select(owners)

    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        """Append one token to each row, and read all rows again."""
        # nanochat's module refuses a single token
        columns = max(int(self.lengths.max()) + 1, 2 if self.backbone.is_plain else 1)
        self.ids = nn.functional.pad(self.ids, (0, max(columns - self.ids.shape[1], 0)))  # [N, L]
        rows, last = torch.arange(len(tokens)), self.lengths
        self.ids[rows, last], self.lengths = tokens, last + 1
        self.logits = self.backbone.head(self.backbone.features(self.ids)[rows, last])  # [N, V]

    def select(self, slots: Int[Tensor, "n"]) -> None:
        """Continue with these rows only."""
        self.ids, self.lengths = self.ids[slots], self.lengths[slots]
        self.logits = self.logits[slots]


class CachedDecoding:
    """Decoding with cached keys and values: each prompt is read once, padded on the left, positions
    from the mask."""

    logits: Float[Tensor, "N V"]

    def __init__(self, backbone: Backbone, prompts: Texts, owners: Tensor) -> None:
        from transformers import DynamicCache

        self.module = backbone.module
        self.accepted = inspect.signature(self.module.forward).parameters
        self.cache = DynamicCache(config=self.module.config)
        ids = pad_sequence(list(prompts), batch_first=True, padding_side="left")  # [b, L]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
        columns = torch.arange(ids.shape[1], device=ids.device)
        self.mask = columns >= ids.shape[1] - lengths[:, None]
        # 0, 1, 2, ... over the real tokens of each row
        positions = (self.mask.long().cumsum(dim=1) - 1).clamp(min=0)
        self._forward(ids, positions)
        self.positions = positions[:, -1]
        self.select(owners)

    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        self.mask = nn.functional.pad(self.mask, (0, 1), value=True)
        self.positions = self.positions + 1
        self._forward(tokens[:, None], self.positions[:, None])

    def select(self, slots: Int[Tensor, "n"]) -> None:
        self.cache.batch_select_indices(slots)
        self.mask, self.positions = self.mask[slots], self.positions[slots]
        self.logits = self.logits[slots]

    def _forward(self, ids: Int[Tensor, "N t"], positions: Int[Tensor, "N t"]) -> None:
        options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self.accepted}
        options |= {
            "attention_mask": self.mask.long(),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        self.logits = self.module(input_ids=ids, **options).logits[:, -1]


Decoding = RereadDecoding | CachedDecoding | LayeredDecoding
"""Rows during sampling: ``logits`` of each row's next token, ``advance(tokens)`` and
``select(slots)``."""


def probe(module: Any) -> Backbone:
    """Return the backbone with every fast way that agrees with the plain one on a few tokens.

    A few tokens cannot show everything, so some are ruled out by the config: a window of attention
    hides far tokens; clipped values (OLMo) and scaled positions (Ministral, LongRoPE) differ at
    large values or far positions only.
    """
    plain = Backbone(module)
    device = next(module.parameters()).device
    vocabulary = module.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        ids = torch.arange(1, 5, device=device)[None] % vocabulary
        if not plain.features(ids).isfinite().all():
            raise NumericalStop(f"""the weights of this {type(module).__name__} give logits that are
                not finite, so nothing can be sampled from it. Use another model, or an earlier save
                of it.""")
    # ordinary tokens, multiples of a prime: the first ids of a vocabulary are often special ones,
    # on which a trained model is ill-conditioned
    prompts = [torch.arange(1, n, device=device) * 7919 % vocabulary for n in (4, 7)]
    plain_logits = cache(lambda logits_of: logits_of(plain, prompts).float())

    def agrees(logits_of: Callable[[Backbone, Texts], Tensor], **fast_way: Any) -> bool:
        try:
            with torch.no_grad():
                logits = logits_of(replace(plain, **fast_way), prompts).float()
                expected = plain_logits(logits_of)
        except Exception:  # whatever a model raises, the plain way remains
            return False
        # root mean square of the difference, over that of the expected logits about their mean
        spread = (expected - expected.mean(dim=-1, keepdim=True)).norm()
        return float((logits - expected).norm() / spread) < TOLERANCE

    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = any(getattr(config, name, None) is not None for name in WINDOWS)
    is_full = kinds == {"full_attention"} and not has_window
    rope = getattr(config, "rope_parameters", None) or {}
    is_odd = getattr(config, "clip_qkv", None) is not None or "llama_4_scaling_beta" in rope
    is_odd = is_odd or rope.get("rope_type") in ("dynamic", "longrope")
    splits = agrees(_logits_of_large_features, splits=True)
    runs_layers = splits and is_full and not is_odd and read_decoder(module) is not None
    layouts: list[Layout] = []
    if runs_layers and agrees(_scored_logits, splits=True, layouts=("stream",)):
        layouts.append("stream")
    if is_full and agrees(_scored_logits, layouts=("packed",)):
        layouts.append("packed")
    return Backbone(
        module,
        splits=splits,
        caches=agrees(_decoded_logits, caches=True),
        decodes=runs_layers and agrees(_decoded_logits, splits=True, decodes=True),
        layouts=(*layouts, "padded"),
        compiles=True,
    )


def _logits_of_large_features(backbone: Backbone, prompts: Texts) -> Tensor:
    # so large that a cap on them shows
    head = backbone.module.get_output_embeddings()
    with head.register_forward_hook(lambda head, args, logits: logits * 1e3):
        return backbone.head(backbone.features(pad_sequence(list(prompts), batch_first=True)))


def _decoded_logits(backbone: Backbone, prompts: Texts) -> Tensor:
    device = prompts[0].device
    decoding = backbone.start(prompts, torch.tensor([1, 0, 0], device=device))
    decoding.advance(torch.tensor([1, 2, 1], device=device))
    decoding.select(torch.tensor([0, 2], device=device))
    decoding.advance(torch.tensor([2, 0], device=device))
    return decoding.logits


def _scored_logits(backbone: Backbone, prompts: Texts) -> Tensor:
    first, second = (prompt.cpu() for prompt in prompts)
    row, column = torch.cartesian_prod(torch.arange(2), torch.arange(1, len(second))).T
    owners = torch.tensor([0, 0])
    features = backbone.features_before([first], [second, second + 1], owners, row, column)
    return backbone.head(features)
