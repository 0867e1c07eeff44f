"""Work, seconds and bytes of a step, as functions of a model's shape, rows' lengths and a device's rates.

A product of [m, k] by [k, n] is 2 m k n operations. N: weights that each token is multiplied with; of a mixture of
experts those of the experts that a token is sent to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from gruppo.config.options import NonNegative, Range
from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.distributed.memory import NF4_BITS, WeightCounts, gathered_bytes, state_bytes
from gruppo.errors import GruppoError
from gruppo.modalities.text.bundled import BUNDLED
from gruppo.modalities.text.memory import activations, key_numbers
from gruppo.plan.simulate import Groups
from gruppo.trainer.dry_run import RESERVED_BYTES

Rate = Annotated[float, Range(gt=0)]
ADAM_BYTES = 28
"""Per trained weight of an optimizer step: weight, gradient and two moments read, all but the gradient written."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model."""

    settings: Any
    """Its text configuration in transformers."""
    counts: WeightCounts
    trunk: int
    """Weights of the layers that each token is multiplied with."""
    head: int
    kv_numbers: int
    """Numbers that one token adds to the cache."""
    attention: int
    """Operations of attention per pair of a token and one that it sees, over 4."""
    experts: int = 0
    """Weights of all experts."""
    routed: float = 1.0
    """Share of the experts that a token is sent to."""
    adaptable: int = 0
    """Inputs and outputs of all linear layers but the head: a LoRA adapter has rank times as many weights."""

    @classmethod
    def of(cls, settings: Any) -> ModelShape:
        """From a configuration of transformers: the model is built without memory for weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
        text = settings.get_text_config()
        if getattr(text, "kv_lora_rank", None):
            raise GruppoError(
                f"a {text.model_type} compresses keys and values, which the plan has no formula for."
            )
        experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
        of = next(
            (
                n
                for n in ("num_experts", "num_local_experts", "n_routed_experts")
                if getattr(text, n, None)
            ),
            "",
        )
        routed = text.num_experts_per_tok / getattr(text, of) if experts and of else 1.0
        counts, head = WeightCounts.of(module), text.vocab_size * text.hidden_size
        outside = (
            head if text.tie_word_embeddings else 2 * head
        )  # a token reads one row of its embedding
        heads, output = text.num_attention_heads, module.get_output_embeddings()
        kv_heads = (
            getattr(text, "num_key_value_heads", None) or heads
        )  # fewer where queries share keys and values
        linear = [
            part
            for part in module.modules()
            if isinstance(part, torch.nn.Linear) and part is not output
        ]
        trunk = counts.total - outside - round((1 - routed) * experts)
        kv_numbers = 2 * text.num_hidden_layers * key_numbers(text)
        attention = text.num_hidden_layers * heads * key_numbers(text) // kv_heads
        adaptable = sum(part.in_features + part.out_features for part in linear)
        return cls(text, counts, trunk, head, kv_numbers, attention, experts, routed, adaptable)

    def adapted(self, rank: int) -> ModelShape:
        """With a LoRA adapter of this rank, which alone is trained and published; the model itself for 0."""
        return (
            replace(self, counts=replace(self.counts, trained=rank * self.adaptable))
            if rank
            else self
        )

    def forward_flops(self, prompt: float, rows: Sequence[float]) -> float:
        """Operations of a group's forward, its prompt read once; the last token of a row predicts nothing.

        2 N (P + sum(R - 1)) + 2 H sum(R) + 4 A (P^2 / 2 + sum(R P + R^2 / 2)).
        """
        total = sum(rows)
        pairs = prompt**2 / 2 + total * prompt + sum(length * length for length in rows) / 2
        tokens = prompt + total - len(rows)
        return 2 * self.trunk * tokens + 2 * self.head * total + 4 * self.attention * pairs

    def bytes_read(self, rows: int, width: int) -> float:
        """Bytes of weights that a decode step of ``rows`` reads: of the experts those that some row is sent to."""
        touched = 1 - (1 - self.routed) ** rows if self.experts else 1.0
        dense = self.trunk + self.head - self.routed * self.experts
        return width * (dense + touched * self.experts)


def open_shape(model: str) -> ModelShape:
    """The shape of a model folder, a bundled model, or a hub id in the cache, from its config.json."""
    from transformers import AutoConfig

    source = str(BUNDLED[model]().path) if model in BUNDLED else str(Path(model).expanduser())
    try:
        return ModelShape.of(AutoConfig.from_pretrained(source, local_files_only=True))
    except GruppoError:
        raise
    except Exception as error:
        raise GruppoError(f"""the sizes of the model {model!r} are unknown: there is no config.json of a causal language
            model here ({type(error).__name__}). Download it, and give its folder with --model-config.""") from error


@dataclass(frozen=True)
class Rates:
    """What one device reaches; fitted."""

    train_flops: Rate
    """Operations per second of forward and backward."""
    decode_flops: Rate
    """Operations per second of prefill, and of decoding many rows."""
    read_bytes: Rate
    """Bytes per second of weights and cache read while decoding few rows."""
    update_bytes: Rate
    """Bytes per second of the optimizer."""
    publish_bytes: Rate
    """Bytes per second of new weights, from trainers to all servers."""
    token_s: NonNegative = 0.0
    """Seconds of a decode step whatever its rows: calls, sampling."""
    row_s: NonNegative = 0.0
    """Seconds per row for rewards, advantages and metrics."""


def decode_step_s(
    shape: ModelShape, rates: Rates, rows: int, cached: float, *, width: int, gpus: int = 1
) -> float:
    """Seconds of one decode step of b rows with ``cached`` tokens: max((W + kv C) / bandwidth, (2 N b + 4 A C) / F)."""
    read = shape.bytes_read(rows, width) + width * shape.kv_numbers * cached
    flops = 2 * (shape.trunk + shape.head) * rows + 4 * shape.attention * cached
    return rates.token_s + max(read / rates.read_bytes, flops / rates.decode_flops) / gpus


def train_s(
    shape: ModelShape,
    rates: Rates,
    groups: Groups,
    prompt: float,
    *,
    gpus: int = 1,
    passes: float = 3.0,
    updates: int = 1,
    minibatches: int = 1,
) -> float:
    """Seconds in which the slowest of ``gpus`` ranks does ``passes`` forwards' worth of work on its groups, and AdamW
    ``updates`` steps."""
    work = [shape.forward_flops(prompt, rows) for rows in groups if rows]
    if (
        minibatches > 1
    ):  # rows are dealt out at random, and each minibatch reads the prompts of its rows
        again = [
            minibatches * (1 - (1 - 1 / minibatches) ** len(rows)) - 1 for rows in groups if rows
        ]
        work = [
            flops + reads * shape.forward_flops(prompt, ())
            for flops, reads in zip(work, again, strict=True)
        ]
    slowest = max((sum(work[rank::gpus]) for rank in range(min(gpus, len(work)))), default=0.0)
    optimizer = updates * ADAM_BYTES * shape.counts.trained / gpus / rates.update_bytes
    return passes * slowest / rates.train_flops + optimizer


def learn_s(
    shape: ModelShape, rates: Rates, config: Config, groups: Groups, prompt: float, *, gpus: int = 1
) -> float:
    """Seconds of a batch's training on ``gpus`` ranks, a separate critic included. ``shape``: with its adapter."""
    # a backward is two forwards' worth of work, or one without gradients of the weights below an adapter
    epochs = config.optim.epochs * (
        2.0 + (not config.lora.rank) + (config.optim.recompute == "layer")
    )
    # before the updates: log-probs of a reference, and the policy's with the values of a head on it. Where there are
    # no such values, and the batch has one update, its own log-probs are the old ones.
    has_kl, has_critic = bool(highest(config, "kl_coef")), config.objective.has_critic
    is_separate = has_critic and config.critic.kind == "separate"
    has_old = config.updates_per_batch > 1 or (has_kl and config.objective.kl_in == "reward")
    evaluated = has_kl + (has_old or (has_critic and not is_separate))
    of_adam = {"updates": config.updates_per_batch, "minibatches": config.optim.minibatches}
    seconds = train_s(shape, rates, groups, prompt, gpus=gpus, passes=evaluated + epochs, **of_adam)
    if is_separate:
        critic = replace(shape, head=0)
        seconds += train_s(critic, rates, groups, prompt, gpus=gpus, passes=1 + epochs, **of_adam)
    return seconds


def trainer_bytes(
    shape: ModelShape, config: Config, longest: float, *, gpus: int
) -> dict[str, float]:
    """Bytes of one rank of ``gpus`` that shard weights, gradients and AdamW's state (FSDP).

    The micro-batch is one row of the longest kind: what a trainer needs at least.
    """
    lora = config.lora
    counts = shape.adapted(lora.rank).counts
    base = counts.total * (NF4_BITS / 8 if lora.load_in_4bit else 2) if lora.rank else 0.0
    parts = state_bytes(counts, shards=gpus, base_bytes=base)
    if (
        config.objective.has_critic and config.critic.kind == "separate"
    ):  # its adapter is on the same base
        parts |= {f"critic, {name}": size for name, size in parts.items() if name != "base"}
    if highest(config, "kl_coef") and not base:
        parts["reference"] = 2.0 * counts.total / gpus
    if gpus == 1 and not base:
        parts["compute copy"] = 2.0 * counts.total
    parts |= gathered_bytes(
        counts, shards=gpus, compute_bytes=2, block_bytes=1 if lora.load_in_4bit else 0
    )
    recomputes = config.optim.recompute == "layer"
    rows = activations(
        shape.settings, math.ceil(longest), torch.bfloat16, "stream", is_recomputed=recomputes
    )
    return parts | {"activations": float(rows), "reserved": float(RESERVED_BYTES)}
