"""``gruppo plan``: seconds and memory of a step on a number of GPUs, in closed form.

Work and bytes of a model, divided by the fraction of a GPU's peak rates that published runs reach.
A step of published systems differs from this by a factor of 1.5 in the median.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gruppo.config.schema import Config, PlanOptions
from gruppo.config.stages import highest
from gruppo.distributed.memory import WeightCounts, gathered_bytes, state_bytes
from gruppo.errors import GruppoError
from gruppo.modalities.text.memory import activations, key_numbers
from gruppo.modalities.text.modality import found_model
from gruppo.tracking.formatting import duration, number

TRAIN_FRACTION, READ_FRACTION, SPARSE_FRACTION = 0.33, 0.40, 0.38
"""Of peak operations, of peak bandwidth while decoding, and of both once more by mixtures of
experts: fitted to published steps of NeMo RL, verl and Qwen3-235B."""
PUBLISH_BYTES_PER_S = 1e11
ADAM_BYTES = 28
"""Per trained weight: weight, gradient and two moments read, all but the gradient written."""
USABLE = 0.9
"""Share of a server's memory: vLLM's default."""
GIB = 2**30
SHOWN = 6
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model."""

    settings: Any
    """Its text configuration in transformers."""
    counts: WeightCounts
    active: int
    """Weights that one token is multiplied with."""
    cache_bytes: int
    """Keys and values of one token in bfloat16."""
    reached: float
    """Share of the rates of dense models."""

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Measure a transformers configuration; the model is built without memory for weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        text, counts = config.get_text_config(), WeightCounts.of(module)
        active = counts.total
        if not text.tie_word_embeddings:
            active -= text.vocab_size * text.hidden_size
        experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
        if experts:
            count = next(getattr(text, name) for name in EXPERT_COUNTS if hasattr(text, name))
            active -= round(experts * (1 - text.num_experts_per_tok / count))
        cache_bytes = 2 * 2 * text.num_hidden_layers * key_numbers(text)
        return cls(text, counts, active, cache_bytes, SPARSE_FRACTION if experts else 1.0)


def open_shape(model: str) -> ModelShape:
    """Read the sizes of a model folder, a bundled model, or a hub id in the cache."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(found_model(model)[0], local_files_only=True)
        return ModelShape.of(config)
    except Exception as error:
        raise GruppoError(f"""the sizes of the model {model!r} are unknown: there is no config.json
            of a causal language model here ({type(error).__name__}). Download it, and give its
            folder with --model-config.""") from error


class Split(NamedTuple):
    """One division of the GPUs."""

    trainers: int
    servers: int
    """GPUs that sample; 0 if the trainers do, in turns."""
    sample_s: float
    train_s: float
    step_s: float
    tokens_per_s: float
    trainer_gib: float
    server_gib: float


def splits(config: Config, shape: ModelShape, options: PlanOptions) -> list[Split]:
    """Return the splits that fit, fastest first."""
    # With all GPUs as trainers, they sample too, in turns; with lag, others sample.
    most = options.gpus - (config.engine.lag > 0)
    if not most:
        raise GruppoError("--gpus 1 leaves no server for --engine.lag; it needs at least 2.")
    found = [estimate(config, shape, options, trainers) for trainers in range(1, most + 1)]
    fitting = [s for s in found if max(s.trainer_gib, s.server_gib / USABLE) <= options.memory]
    if not fitting:
        raise GruppoError(
            f"the model does not fit: {most} trainers need {found[-1].trainer_gib:.1f} GiB each, "
            f"servers {found[-1].server_gib:.1f}, and a GPU has {options.memory:g} GiB",
            advice="Give more --gpus, a larger --memory, or $lora.rank",
        )
    return sorted(fitting, key=lambda split: split.step_s)


def estimate(config: Config, shape: ModelShape, options: PlanOptions, trainers: int) -> Split:
    """Estimate one split.

    Rows are taken to end at a constant rate: the longest of n has mean x (ln n + 0.58) tokens.
    """
    rollout, prompt = config.rollout, options.prompt_tokens
    rows = rollout.prompts * rollout.group_size
    limit = rollout.max_new_tokens
    mean = min(options.mean_tokens or limit / 2, limit)
    flops = 1e12 * options.tflops * TRAIN_FRACTION * shape.reached  # of one GPU
    bandwidth = 1e12 * options.bandwidth * READ_FRACTION * shape.reached
    servers = options.gpus - trainers
    sampling_gpus = servers or trainers
    forward = 2 * shape.active  # operations of a token, and bytes of what it reads

    # steps of the longest row, each bound by bandwidth or by operations, after the prefill
    steps = min(mean * (math.log(rows) + 0.58), limit)
    decoded = rows * mean / steps  # rows that have not ended, on average
    caches = decoded * (prompt + mean / 2) * shape.cache_bytes
    weights = forward * min(sampling_gpus, rows)  # each server reads its own
    step = max((weights + caches) / bandwidth, forward * decoded / flops)
    sample_s = (forward * prompt * rollout.prompts / flops + steps * step) / sampling_gpus

    tokens = rollout.prompts * prompt + rows * mean
    train_s = forward * tokens * passes(config) / flops / min(trainers, rollout.prompts)
    if not config.lora.rank:
        adam = ADAM_BYTES * shape.counts.trained * config.updates_per_batch
        train_s += adam / bandwidth / trainers

    weights = 2 * shape.counts.total
    trainer_s = train_s + (weights / PUBLISH_BYTES_PER_S if servers else 0.0)
    step_s = max(sample_s, trainer_s) if config.engine.lag else sample_s + trainer_s
    longest = prompt + limit
    trainer = trainer_bytes(config, shape, longest, trainers) / GIB
    server = (weights + longest * shape.cache_bytes) / sampling_gpus / GIB
    rate = rows * mean / step_s
    return Split(trainers, servers, sample_s, train_s, step_s, rate, trainer, server)


def networks(config: Config) -> int:
    """Networks that are trained: a separate critic is one more."""
    return 1 + (config.objective.has_critic and config.critic.kind == "separate")


def passes(config: Config) -> int:
    """Work on a batch, in forwards: a backward is two, or one below an adapter."""
    backward = 1 if config.lora.rank else 2
    found = config.optim.epochs * (1 + backward + (config.optim.recompute == "layer"))
    found += highest(config, "kl_coef") > 0
    found += config.updates_per_batch > 1  # old log-probs
    return found * networks(config)


def trainer_bytes(config: Config, shape: ModelShape, longest: int, gpus: int) -> float:
    """Bytes of one of ``gpus`` sharded trainers, with a micro-batch of one longest row."""
    counts = shape.counts
    kept = 2.0 * counts.total / gpus
    if not config.lora.rank:
        kept *= highest(config, "kl_coef") > 0
        kept += networks(config) * sum(state_bytes(counts, shards=gpus).values())
    kept += sum(gathered_bytes(counts, shards=gpus, compute_bytes=2).values())
    return kept + activations(
        shape.settings,
        longest,
        torch.bfloat16,
        is_recomputed=config.optim.recompute == "layer",
    )


def print_plan(config: Config, options: PlanOptions) -> None:
    """Print the fastest splits and the duration of the run."""
    found = splits(config, open_shape(options.model_config or config.model), options)
    print(
        f"{config.rollout.prompts * config.rollout.group_size} rows a step, "
        f"lag {config.engine.lag}, {options.gpus} GPUs"
    )
    print(*[f"{name:>12}" for name in Split._fields])
    for trainers, servers, *numbers in found[:SHOWN]:
        cells = [trainers, servers or "shared", *map(number, numbers)]
        print(*[f"{cell:>12}" for cell in cells])
    print(
        f"{config.steps} steps in {duration(found[0].step_s * config.steps)}. Published steps "
        f"differ by a factor of 1.5."
    )
