"""Seconds and memory of a step on a number of GPUs, in closed form.

    python examples/plan.py arithmetic --gpus 64

Work and bytes of a model, divided by the fraction of a GPU's peak rates that published runs reach.
A step of published systems differs from this by a factor of 1.5 in the median.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from gruppo.cli.options import parse_command, parse_config
from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.distributed.memory import WeightCounts, gathered_bytes, state_bytes
from gruppo.errors import GruppoError, as_flag
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
        active = counts.total
        if not text.tie_word_embeddings:
            active -= text.vocab_size * text.hidden_size
        experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
        if experts:
            count = next(getattr(text, name) for name in EXPERT_COUNTS if getattr(text, name, 0))
            active -= round(experts * (1 - text.num_experts_per_tok / count))
        cache_bytes = 2 * 2 * text.num_hidden_layers * key_numbers(text)
        return cls(text, counts, active, cache_bytes, bool(experts))


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


@dataclass(frozen=True)
class Split:
    """One division of the GPUs."""

    trainers: int
    servers: int
    """GPUs that sample; 0 if the trainers do, in turns."""
    sample_s: float
    train_s: float
    step_s: float
    trainer_gib: float
    server_gib: float


@dataclass(frozen=True)
class Work:
    """What is planned."""

    config: Config
    shape: ModelShape
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

    def splits(self) -> list[Split]:
        """Return the splits that fit, fastest first."""
        memory = self.gpu.memory / 2**30
        # With all GPUs as trainers, they sample too, in turns; with lag, others sample.
        most = self.gpus - 1 if self.config.engine.lag else self.gpus
        if not most:
            raise GruppoError(
                "--gpus 1 leaves no server besides the trainer, which --engine.lag needs."
            )
        needed = {
            split: max(split.trainer_gib, split.server_gib / USABLE)
            for split in map(self.split, range(1, most + 1))
        }
        fitting = [split for split, gib in needed.items() if gib <= memory]
        if not fitting:
            least = min(needed.values())
            raise GruppoError(
                f"the model does not fit: a GPU needs {least:.1f} GiB, and has {memory:.0f}",
                advice="Give more --gpus, a larger --memory, or $lora.rank",
            )
        return sorted(fitting, key=lambda split: split.step_s)

    def split(self, trainers: int) -> Split:
        """Estimate one split."""
        weights = 2 * self.shape.counts.total
        servers = self.gpus - trainers
        sampling_gpus = servers or trainers
        sampling, training = self.sample_s(sampling_gpus), self.train_s(trainers)
        published = weights / PUBLISH_BYTES_PER_S if servers else 0.0
        step = sampling + training + published
        if self.config.engine.lag:
            step = max(sampling, training + published)
        longest = self.prompt + self.config.rollout.max_new_tokens
        trainer = self.trainer_bytes(trainers) / 2**30
        server = (weights + longest * self.shape.cache_bytes) / sampling_gpus / 2**30
        return Split(trainers, servers, sampling, training, step, trainer, server)

    def flops(self, gpus: int) -> float:
        """Operations per second that published runs reach."""
        reached = TRAIN_FRACTION * (SPARSE_FRACTION if self.shape.is_sparse else 1.0)
        return self.gpu.flops * reached * gpus

    def bandwidth(self, gpus: int) -> float:
        """Bytes per second that published runs reach."""
        reached = READ_FRACTION * (SPARSE_FRACTION if self.shape.is_sparse else 1.0)
        return self.gpu.bytes_per_s * reached * gpus

    def sample_s(self, gpus: int) -> float:
        """Seconds to prefill the prompts and decode the rows.

        Steps of the longest row x max(bytes of weights and caches / bandwidth, 2 N rows /
        operations). Rows are taken to end at a constant rate: the longest of n has mean x (ln n +
        0.58) tokens.
        """
        rollout, active = self.config.rollout, self.shape.active
        steps = min(self.mean * (math.log(self.rows) + 0.58), rollout.max_new_tokens)
        rows = self.rows * self.mean / steps
        weights = 2 * active * min(gpus, self.rows)  # each server reads its own
        caches = rows * (self.prompt + self.mean / 2) * self.shape.cache_bytes
        flops = self.flops(gpus)
        step = max((weights + caches) / self.bandwidth(gpus), 2 * active * rows / flops)
        return 2 * active * self.prompt * rollout.prompts / flops + steps * step

    def train_s(self, gpus: int) -> float:
        """Seconds of the forwards, backwards and optimizer steps of a batch.

        A forward is 2 N operations a token; a backward is two forwards, or one below an adapter.
        """
        config, shape = self.config, self.shape
        tokens = config.rollout.prompts * self.prompt + self.rows * self.mean
        backward = 1 if config.lora.rank else 2
        passes = config.optim.epochs * (1 + backward + (config.optim.recompute == "layer"))
        passes += highest(config, "kl_coef") > 0
        passes += config.updates_per_batch > 1  # old log-probs
        if config.objective.has_critic and config.critic.kind == "separate":
            passes *= 2
        flops = self.flops(min(gpus, config.rollout.prompts))
        trained = 0 if config.lora.rank else shape.counts.trained
        adam_s = ADAM_BYTES * trained / self.bandwidth(gpus)
        return 2 * shape.active * tokens * passes / flops + config.updates_per_batch * adam_s

    def trainer_bytes(self, gpus: int) -> float:
        """Bytes of one of ``gpus`` sharded trainers, with a micro-batch of one longest row."""
        config, counts = self.config, self.shape.counts
        kept = 2.0 * counts.total / gpus
        if not config.lora.rank:
            has_critic = config.objective.has_critic and config.critic.kind == "separate"
            kept *= highest(config, "kl_coef") > 0
            kept += (1 + has_critic) * sum(state_bytes(counts, shards=gpus).values())
        row = activations(
            self.shape.settings,
            math.ceil(self.prompt + config.rollout.max_new_tokens),
            torch.bfloat16,
            is_recomputed=config.optim.recompute == "layer",
        )
        return kept + sum(gathered_bytes(counts, shards=gpus, compute_bytes=2).values()) + row


def print_plan(work: Work) -> None:
    """Print the fastest splits and the duration of the run."""
    found, config = work.splits(), work.config
    print(
        f"{work.rows} rows a step, mean {work.mean:g} tokens, lag {config.engine.lag}, {work.gpus} "
        f"GPUs"
    )
    print("  trainers  servers  sample s  train s  step s  tokens/s  trainer GiB  server GiB")
    for split in found[:SHOWN]:
        rate = work.rows * work.mean / split.step_s
        print(
            f"  {split.trainers:>8}{split.servers or 'shared':>9}{number(split.sample_s):>10}"
            f"{number(split.train_s):>9}{number(split.step_s):>8}{number(rate):>10}"
            f"{split.trainer_gib:>13.1f}{split.server_gib:>12.1f}"
        )
    print(
        f"{config.steps} steps in {duration(found[0].step_s * config.steps)}. Published steps "
        f"differ by a factor of 1.5."
    )


def plan(
    recipe: Annotated[str, "A recipe, as of gruppo train."],
    options: Annotated[tuple[str, ...], "Options of the recipe's config, after --."] = (),
    *,
    gpus: Annotated[int, "Number of GPUs."] = 1,
    tflops: Annotated[float, "Dense bfloat16 teraflops of a GPU, by its data sheet."] = 989.0,
    bandwidth: Annotated[float, "Terabytes per second of a GPU's memory."] = 3.35,
    memory: Annotated[float, "Gibibytes of a GPU's memory."] = 80.0,
    mean_tokens: Annotated[float, "Mean length of a completion; default: half the limit."] = 0.0,
    prompt_tokens: Annotated[float, "Mean length of a prompt."] = 200.0,
    model_config: Annotated[str, "Folder of the model's config.json; default: the recipe's."] = "",
) -> None:
    """Step time, memory and split of trainers and servers on a number of GPUs (H100 by default)."""
    config = parse_config("plan", [recipe, *options])
    shape = open_shape(model_config or config.model)
    gpu = Gpu(tflops * 1e12, bandwidth * 1e12, memory * 2**30)
    mean = mean_tokens or config.rollout.max_new_tokens / 2
    print_plan(Work(config, shape, gpu, gpus, prompt_tokens, mean))


if __name__ == "__main__":
    try:
        plan(**parse_command("plan", plan, sys.argv[1:]))
    except GruppoError as error:
        sys.exit(f"plan: {error.message(as_flag)}")
