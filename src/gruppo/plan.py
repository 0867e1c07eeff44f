"""``gruppo plan``: seconds, memory and cost of a step on a number of GPUs, in closed form.

Work and bytes of a model, divided by the fraction of a GPU's peak rates that published runs reach.
A step of published systems differs from this by a factor of 1.5 in the median.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.distributed.memory import WeightCounts, gathered_bytes, state_bytes
from gruppo.errors import GruppoError
from gruppo.modalities.text.bundled import BUNDLED
from gruppo.modalities.text.memory import activations, key_numbers
from gruppo.tracking.formatting import duration, number

TRAIN_FRACTION, READ_FRACTION, SPARSE_FRACTION = 0.33, 0.40, 0.38
"""Of peak operations, of peak bandwidth while decoding, and of both once more by mixtures of
experts: fitted to published steps of NeMo RL, verl and Qwen3-235B."""
PUBLISH_BYTES_PER_S = 1e11
ADAM_BYTES = 28
"""Per trained weight: weight, gradient and two moments read, all but the gradient written."""
USABLE = 0.9
"""Share of a server's memory: vLLM's default."""
SHOWN = 6
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Gpu:
    """Peak rates and memory of one GPU, from its data sheet."""

    flops: float
    """Dense bfloat16 operations per second."""
    bytes_per_s: float
    memory: float
    """Bytes."""


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
    is_sparse: bool

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Measure a transformers configuration; the model is built without memory for weights."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        text = config.get_text_config()
        counts = WeightCounts.of(module)
        experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
        count = next((getattr(text, name) for name in EXPERT_COUNTS if getattr(text, name, 0)), 0)
        idle = experts * (1 - text.num_experts_per_tok / count) if experts and count else 0.0
        embedding = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
        cache_bytes = 2 * 2 * text.num_hidden_layers * key_numbers(text)
        active = counts.total - embedding - round(idle)
        return cls(text, counts, active, cache_bytes, bool(experts))


@dataclass(frozen=True)
class Work:
    """What is planned."""

    config: Config
    model: str
    """A model folder, a bundled model or a hub id in the cache."""
    gpu: Gpu
    gpus: int
    prompt: float
    """Mean tokens of a prompt."""
    mean: float
    """Mean tokens of a completion."""

    def __post_init__(self) -> None:
        limit = self.config.rollout.max_new_tokens
        if self.gpus < 1 or self.prompt < 1 or not 1 <= self.mean <= limit:
            raise GruppoError(f"""--gpus {self.gpus}, --prompt-tokens {self.prompt:g} and
                --mean-tokens {self.mean:g} need at least 1, and --mean-tokens at most the
                {limit} of --rollout.max-new-tokens.""")

    @property
    def rows(self) -> int:
        return self.config.rollout.prompts * self.config.rollout.group_size

    @property
    def longest(self) -> float:
        return self.prompt + self.config.rollout.max_new_tokens


@dataclass(frozen=True)
class Split:
    """One division of the GPUs."""

    trainers: int
    servers: int
    """GPUs that sample; the trainers' own if they work in turns."""
    is_shared: bool
    sample_s: float
    train_s: float
    step_s: float
    trainer_gib: float
    server_gib: float


def open_shape(model: str) -> ModelShape:
    """Read the sizes of a model folder, a bundled model, or a hub id in the cache."""
    from transformers import AutoConfig

    source = str(BUNDLED[model]().path) if model in BUNDLED else str(Path(model).expanduser())
    try:
        return ModelShape.of(AutoConfig.from_pretrained(source, local_files_only=True))
    except Exception as error:
        raise GruppoError(f"""the sizes of the model {model!r} are unknown: there is no config.json
            of a causal language model here ({type(error).__name__}). Download it, and give its
            folder with --model-config.""") from error


def splits(work: Work, shape: ModelShape) -> list[Split]:
    """Return the splits that fit, fastest first."""
    memory = work.gpu.memory / 2**30
    # With all GPUs as trainers, they sample too, in turns; with lag, they sample beside.
    most = work.gpus - 1 if work.config.engine.lag else work.gpus
    tried = [split_of(work, shape, trainers) for trainers in range(1, most + 1)]
    if not tried:
        raise GruppoError(
            "--gpus 1 leaves no server besides the trainer, which --engine.lag needs."
        )
    needed = [max(split.trainer_gib, split.server_gib / USABLE) for split in tried]
    fitting = [split for split, gib in zip(tried, needed, strict=True) if gib <= memory]
    if not fitting:
        raise GruppoError(
            f"the model does not fit: a GPU needs {min(needed):.1f} GiB, and has {memory:.0f}",
            advice="Give more --gpus, a larger --memory, or $lora.rank",
        )
    return sorted(fitting, key=lambda split: split.step_s)


def split_of(work: Work, shape: ModelShape, trainers: int) -> Split:
    """Estimate one split; with all GPUs as trainers, they sample too, in turns."""
    is_shared = trainers == work.gpus
    servers = work.gpus if is_shared else work.gpus - trainers
    sampling = sample_s(work, shape, servers)
    training = train_s(work, shape, trainers)
    published = 0.0 if is_shared else 2 * shape.counts.total / PUBLISH_BYTES_PER_S
    in_turns = sampling + training + published
    step = max(sampling, training + published) if work.config.engine.lag else in_turns
    trainer = trainer_bytes(work, shape, trainers) / 2**30
    server = (2 * shape.counts.total + work.longest * shape.cache_bytes) / servers / 2**30
    return Split(trainers, servers, is_shared, sampling, training, step, trainer, server)


def reached(shape: ModelShape, peak: float, fraction: float) -> float:
    """Return the rate that published runs reach of a peak rate."""
    return peak * fraction * (SPARSE_FRACTION if shape.is_sparse else 1.0)


def sample_s(work: Work, shape: ModelShape, gpus: int) -> float:
    """Seconds to prefill the prompts and decode the rows.

    Steps of the longest row x max(bytes of weights and caches / bandwidth, 2 N rows / operations).
    Rows are taken to end at a constant rate: the longest of n has mean x (ln n + 0.58) tokens.
    """
    rollout = work.config.rollout
    flops = reached(shape, work.gpu.flops, TRAIN_FRACTION) * gpus
    bandwidth = reached(shape, work.gpu.bytes_per_s, READ_FRACTION) * gpus
    steps = min(work.mean * (math.log(work.rows) + 0.58), rollout.max_new_tokens)
    active_rows = work.rows * work.mean / steps
    weights = 2 * shape.active * min(gpus, work.rows)  # each server reads its own
    caches = active_rows * (work.prompt + work.mean / 2) * shape.cache_bytes
    step = max((weights + caches) / bandwidth, 2 * shape.active * active_rows / flops)
    prefill = 2 * shape.active * work.prompt * rollout.prompts / flops
    return prefill + steps * step


def train_s(work: Work, shape: ModelShape, gpus: int) -> float:
    """Seconds of the forwards, backwards and optimizer steps of a batch.

    A forward is 2 N operations a token; a backward is two forwards, or one below an adapter.
    """
    config = work.config
    tokens = config.rollout.prompts * work.prompt + work.rows * work.mean
    backward = 1 if config.lora.rank else 2
    passes = config.optim.epochs * (1 + backward + (config.optim.recompute == "layer"))
    if highest(config, "kl_coef") > 0:
        passes += 1
    if config.updates_per_batch > 1:  # old log-probs
        passes += 1
    if config.objective.has_critic and config.critic.kind == "separate":
        passes *= 2
    flops = reached(shape, work.gpu.flops, TRAIN_FRACTION) * min(gpus, config.rollout.prompts)
    trained = 0 if config.lora.rank else shape.counts.trained
    adam_s = ADAM_BYTES * trained / gpus / reached(shape, work.gpu.bytes_per_s, READ_FRACTION)
    return 2 * shape.active * tokens * passes / flops + config.updates_per_batch * adam_s


def trainer_bytes(work: Work, shape: ModelShape, gpus: int) -> float:
    """Bytes of one of ``gpus`` sharded trainers, with a micro-batch of one longest row."""
    config, counts = work.config, shape.counts
    weights = 2.0 * counts.total / gpus
    if config.lora.rank:
        kept = weights
    else:
        has_critic = config.objective.has_critic and config.critic.kind == "separate"
        kept = (1 + has_critic) * sum(state_bytes(counts, shards=gpus).values())
        kept += weights * (highest(config, "kl_coef") > 0)
    gathered = sum(gathered_bytes(counts, shards=gpus, compute_bytes=2).values())
    row = activations(
        shape.settings,
        math.ceil(work.longest),
        torch.bfloat16,
        is_recomputed=config.optim.recompute == "layer",
    )
    return kept + gathered + row


def print_plan(work: Work, *, price: float = 0.0) -> None:
    """Print the fastest splits, the duration of the run and its cost."""
    found, config = splits(work, open_shape(work.model)), work.config
    print(
        f"{work.rows} rows a step, mean {work.mean:g} tokens, lag {config.engine.lag}, {work.gpus} "
        f"GPUs"
    )
    print("  trainers  servers  sample s  train s  step s  tokens/s  trainer GiB  server GiB")
    for split in found[:SHOWN]:
        servers = "shared" if split.is_shared else str(split.servers)
        rate = work.rows * work.mean / split.step_s
        print(
            f"  {split.trainers:>8}{servers:>9}{number(split.sample_s):>10}"
            f"{number(split.train_s):>9}{number(split.step_s):>8}{number(rate):>10}"
            f"{split.trainer_gib:>13.1f}{split.server_gib:>12.1f}"
        )
    seconds = found[0].step_s * config.steps
    cost = price * work.gpus * seconds / 3600
    paid = f", ${cost:,.2f}" if price else ""
    print(
        f"{config.steps} steps in {duration(seconds)}{paid}. Published steps differ by a factor of "
        f"1.5."
    )
