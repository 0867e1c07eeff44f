"""Running a causal language model: features for scoring, a decoding state for sampling, which fast
ways are exact."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gruppo.modalities.text.decoder import Decoder, read_decoder, stream_features
from gruppo.modalities.text.decoding import FusedDecoder, KeptRow, LayeredDecoding
from gruppo.modalities.text.layouts import Texts, Tokens, pad, stream
from gruppo.modalities.text.static_decoding import StaticDecoding
from gruppo.protocols import device_of
from gruppo.types import NumericalStop

if TYPE_CHECKING:
    from gruppo.modalities.text.custom import ModelFunction

TOLERANCE = 3e-3
"""Relative error below which a fast way is used. Rounding in float32 makes 1e-6 to 1e-4 on trained
models; a wrong position, mask or cap makes 1e-2 to 1."""
WINDOW = re.compile(r"(window|window_size|chunk_size)$")
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
    runs_layers: bool = False
    """Whether running the layers ourselves is exact: over streams, and in ``LayeredDecoding``."""
    source: ModelFunction | None = None
    """The function that made the module, if it was opened by name."""

    def decoder(self) -> Decoder | None:
        """The layers, if they can be run now: a hook on one needs the model's own forward."""
        return read_decoder(self.module) if self.runs_layers else None

    @property
    def is_padded(self) -> bool:
        """Whether each completion is scored with a copy of its prompt, not as part of a stream."""
        return self.decoder() is None

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Features to logits; an ``nn.Linear`` is run in chunks by the scoring."""
        return self.module.get_output_embeddings() if self.splits else nn.Identity()

    def features(self, ids: Int[Tensor, "b L"]) -> Float[Tensor, "b L F"]:
        """Features of rows padded on the right."""
        if self.is_plain:
            return self.module(ids)
        network = self.module.base_model if self.splits else self.module
        output = network(input_ids=ids, use_cache=False)
        return output.last_hidden_state if self.splits else output.logits

    def features_before(
        self, prompts: Texts, completions: Texts, owners: Tensor, row: Tensor, column: Tensor
    ) -> Float[Tensor, "n F"]:
        """Features at the token before each action, which predicts it.

        ``owners`` [b]: the prompt of each completion. An action is a completion and its column,
        ``row`` and ``column`` [n].
        """
        tokens: Tokens
        decoder = self.decoder()
        if decoder is None:
            tokens = pad(prompts, completions, owners)
            features = self.features(tokens.ids.to(device_of(self.module))).flatten(0, 1)
        else:
            tokens = stream(prompts, completions, owners)
            features = stream_features(decoder, tokens)
        return features[tokens.before(row, column).to(features.device, non_blocking=True)]

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
        if (decoder := self.decoder()) is not None:
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
        accepted = {name: value for name, value in options.items() if name in self.accepted}
        self.logits = self.module(
            input_ids=ids,
            attention_mask=self.mask.long(),
            past_key_values=self.cache,
            use_cache=True,
            **accepted,
        ).logits[:, -1]


Decoding = RereadDecoding | CachedDecoding | LayeredDecoding
"""Rows during sampling: ``logits`` of each row's next token, ``advance(tokens)`` and
``select(slots)``."""


def probe(module: Any) -> Backbone:
    """Return the backbone with every fast way that agrees with the plain one on a few tokens.

    A few tokens cannot show everything, so some are ruled out by the config (``_has_odd_layers``).
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

    splits = agrees(_logits_of_large_features, splits=True)
    can_run_layers = splits and not _has_odd_layers(module.config.get_text_config())
    return Backbone(
        module,
        splits=splits,
        caches=agrees(_decoded_logits, caches=True),
        runs_layers=can_run_layers
        and read_decoder(module) is not None
        and agrees(_scored_logits, splits=True, runs_layers=True)
        and agrees(_decoded_logits, splits=True, runs_layers=True),
    )


def _has_odd_layers(config: Any) -> bool:
    """Whether layers differ from the common ones where a few tokens cannot show it: a window of
    attention hides far tokens; clipped values (OLMo) and scaled positions (Ministral, LongRoPE)
    differ at large values or far positions only."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = any(value and WINDOW.search(name) for name, value in vars(config).items())
    rope = getattr(config, "rope_parameters", None) or {}
    is_scaled = "llama_4_scaling_beta" in rope or rope.get("rope_type") in ("dynamic", "longrope")
    is_clipped = getattr(config, "clip_qkv", None) is not None
    return kinds != {"full_attention"} or has_window or is_scaled or is_clipped


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
