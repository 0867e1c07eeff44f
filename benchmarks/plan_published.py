"""What ``gruppo plan``'s formulas say of published runs: constants from some tables, predictions of another.

Three constants are fitted: the fraction of peak operations, that of peak bandwidth in decoding, and by how much
mixtures of experts fall short of both. Three tables are predicted in turn with the constants of the two others; a
fourth, which tells nothing but two step times, is predicted with those of all three. Sources:

nemo: NVIDIA-NeMo/RL, docs/about/performance-summary.md (v0.4). H100, GRPO, mean and longest lengths published. Rows of
    DeepSeek V3 are left out: its attention has no formula here. One step off-policy: half of the GPUs sample.
verl: verl-project/verl, docs/advance/fully_async.md. Qwen2.5-Math-7B, H20, DAPO, 512 x 16 samples of up to 28K. Mean
    lengths are not published: the synchronous update on 32 GPUs tells them.
qwen: Qwen3-235B on H200: 64 train 2.75 samples/s at 10.5% MFU, which tells their length; 192 sample 1.95 samples/s.
llama: LlamaRL (arXiv 2505.24034): 405B, 1024 H100, a step of 635.8 s in turns and of 59.5 s asynchronously. The first
    tells the length of an assumed batch of 2048 samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from transformers import AutoConfig

from gruppo.config import schema
from gruppo.config.schema import Config
from gruppo.plan import capacity
from gruppo.plan.capacity import Machine, Work, geometric_survival, published_rates
from gruppo.plan.fit import fit_positive
from gruppo.plan.formulas import ModelShape, decode_step_s
from gruppo.plan.hardware import GPUS

Fractions = Sequence[float]
START = (0.3, 0.5, 0.4)
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {"kind": "llama", "sizes": (4096, 14336, 32, 32, 8, 128, 128256)},
    "llama-405b": {"kind": "llama", "sizes": (16384, 53248, 126, 128, 8, 128, 128256)},
    "qwen-math-7b": {"kind": "qwen2", "sizes": (3584, 18944, 28, 28, 4, 128, 152064)},
    "qwen3-32b": {"kind": "qwen3", "sizes": (5120, 25600, 64, 64, 8, 128, 151936)},
    "qwen3-30b": {
        "kind": "qwen3_moe",
        "sizes": (2048, 6144, 48, 32, 4, 128, 151936),
        "expert": 768,
    },
    "qwen3-235b": {
        "kind": "qwen3_moe",
        "sizes": (4096, 12288, 94, 64, 4, 128, 151936),
        "expert": 1536,
    },
}
"""Of their config.json: hidden, intermediate, layers, heads, key-value heads, size of a head, vocabulary."""
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
PROMPT = 150.0
"""Tokens; published lengths include it."""


@cache
def shape(name: str) -> ModelShape:
    model = MODELS[name]
    moe = (
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": model["expert"]}
        if "expert" in model
        else {}
    )
    sizes = dict(zip((*NAMES, "head_dim", "vocab_size"), model["sizes"], strict=True))
    return ModelShape.of(
        AutoConfig.for_model(model["kind"], **sizes, **moe, tie_word_embeddings=False)
    )


@dataclass(frozen=True)
class Job:
    """A published run."""

    model: str
    gpu: str
    gpus: int
    samples: int
    mean: float
    longest: int
    parallel: int
    lag: int = 0


def run(job: Job, fractions: Fractions) -> dict[str, float]:
    """Seconds of a step and of its parts, with half of the GPUs on either side where there is a lag."""
    gpu = GPUS[job.gpu]
    # these trainers make room for servers on the same GPUs by moving their state to the CPU
    more = 0.0 if job.lag else 16 * shape(job.model).counts.total / job.gpus
    machine = Machine(
        job.gpu, gpu.memory + more, published_rates(gpu, shape(job.model), fractions), 2, 0.0, ""
    )
    rollout = schema.RolloutConfig(prompts=job.samples, group_size=1, max_new_tokens=job.longest)
    engine = schema.EngineConfig(kind="vllm", lag=job.lag, max_inflight=1024)
    optim = schema.OptimConfig(
        minibatches=2
    )  # these systems evaluate old log-probs before they update
    config = Config(rollout=rollout, engine=engine, optim=optim)
    trainers = job.gpus // 2 if job.lag else job.gpus
    survival = geometric_survival(min(max(job.mean, 2.0), job.longest - 1.0), job.longest)
    work = Work(config, shape(job.model), machine, PROMPT, survival)
    found = capacity.simulated(work, job.gpus, trainers, job.parallel, is_shared=not job.lag)
    generate = found.trainer_waits * found.step_s
    learn = found.step_s - generate - 2 * shape(job.model).counts.total / capacity.PUBLISH_BYTES
    return {"step": found.step_s, "generate": generate, "old": learn / 4, "update": 3 * learn / 4}


def solved(predicted: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where an increasing function has a value."""
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predicted(middle) < target else (low, middle)
    return math.sqrt(low * high)


def nemo(fractions: Fractions) -> dict[str, tuple[float, float]]:
    rows = (
        ("llama-8b", 16, 2048, 1060, 4096, 1, 0, 97.7),
        ("llama-8b", 16, 2048, 1129, 4096, 1, 1, 74.6),
        ("qwen3-235b", 128, 512, 5671, 8192, 16, 0, 506.0),
        ("qwen3-235b", 256, 512, 5691, 8192, 8, 1, 241.0),
        ("qwen3-30b", 32, 2048, 3154, 4096, 4, 0, 225.0),
        ("qwen3-30b", 32, 2048, 3158, 4096, 2, 1, 244.0),
        ("qwen3-32b", 32, 2048, 3206, 4096, 4, 0, 393.0),
        ("qwen3-32b", 64, 2048, 3207, 4096, 4, 1, 215.0),
    )
    found = {}
    for model, gpus, samples, mean, longest, parallel, lag, step_s in rows:
        job = Job(model, "h100", gpus, samples, mean - PROMPT, longest - int(PROMPT), parallel, lag)
        found[f"{model}, {gpus} GPUs, lag {lag}: step"] = (run(job, fractions)["step"], step_s)
    return found


def verl(fractions: Fractions) -> dict[str, tuple[float, float]]:
    def job(
        gpus: int, mean: float, lag: int = 0
    ) -> Job:  # a quarter of the GPUs and samples: as long, and faster
        return Job("qwen-math-7b", "h20", gpus // 4, 512 * 16 // 4, mean, 28 * 1024, 1, lag)

    # the work of an update is all but proportional to the length
    trial = 2000.0
    mean = min(trial * 269.80 / run(job(32, trial), fractions)["update"], 20_000.0)
    rows = {
        32: (357.41, 107.71, None, 294.77),
        64: (150.72, 70.26, 133.41, 189.26),
        128: (177.85, 53.92, 113.81, 150.63),
    }
    found = {}
    for gpus, (generate, old, update, ahead) in rows.items():
        parts = run(job(gpus, mean), fractions)
        published = {"generate": generate, "old": old} | ({"update": update} if update else {})
        found |= {
            f"{gpus} GPUs in turns: {part}": (parts[part], value)
            for part, value in published.items()
        }
        found[f"{gpus} GPUs ahead: step"] = (run(job(gpus, mean, lag=1), fractions)["step"], ahead)
    return found


def qwen(fractions: Fractions) -> dict[str, tuple[float, float]]:
    sizes, gpu = shape("qwen3-235b"), GPUS["h200"]
    per_sample = 0.105 * 64 * gpu.flops / 2.75  # operations, from which the length follows
    tokens = per_sample / (6 * (sizes.trunk + sizes.head))
    rates, cached = published_rates(gpu, sizes, fractions), tokens / 2
    room = (8 * capacity.USABLE * gpu.memory - 2 * sizes.counts.total) / (2 * sizes.kv_numbers)
    rows = int(min(512, room / cached))
    seconds = tokens * decode_step_s(sizes, rates, rows, rows * cached, width=2, gpus=8)
    return {
        "64 GPUs train: samples/s": (64 * rates.train_flops / per_sample, 2.75),
        "192 GPUs sample: samples/s": (192 / 8 * rows / seconds, 1.95),
    }


def llama(fractions: Fractions) -> dict[str, tuple[float, float]]:
    job = lambda mean, lag: Job("llama-405b", "h100", 1024, 2048, mean, 32 * 1024, 16, lag)  # noqa: E731
    mean = solved(lambda mean: run(job(mean, 0), fractions)["step"], 635.8, 50, 16_000)
    return {"1024 GPUs ahead: step": (run(job(mean, 1), fractions)["step"], 59.5)}


TABLES = {"nemo": nemo, "verl": verl, "qwen": qwen}


def fitted(tables: list[str]) -> Fractions:
    """The constants that are nearest to some tables, each table with the same weight."""
    measured = [one[1] for name in tables for one in TABLES[name](START).values()]

    def predicted(values: np.ndarray) -> np.ndarray:
        logs = []
        for name in tables:
            rows = list(TABLES[name](values.tolist()).values())
            logs += [math.log(p / m) / math.sqrt(len(rows)) for p, m in rows]
        return np.exp(logs)

    return fit_positive(predicted, np.ones(len(measured)), np.array(START), rounds=8).tolist()


def main() -> None:
    capacity.STEPS = 1
    errors = []
    for name in (*TABLES, "llama"):
        fractions = fitted([other for other in TABLES if other != name])
        rows = (TABLES | {"llama": llama})[name](fractions)
        found = [abs(math.log(p / m)) for p, m in rows.values()]
        errors += found if name != "llama" else []
        print(f"{name}, with {told(fractions)} of the others")
        for row, (predicted, published) in rows.items():
            print(
                f"  {row:<40}{predicted:10.2f} /{published:8.2f}{predicted / published - 1:+8.0%}"
            )
        print(
            f"  {'median, as a factor':<40}{math.exp(statistics.median(found)):28.2f}", flush=True
        )
    print(f"of all three: {told(fitted(list(TABLES)))}")
    print(
        f"median of all rows, each predicted from other tables: a factor of {math.exp(statistics.median(errors)):.2f}"
    )


def told(fractions: Fractions) -> str:
    return "fractions {:.3f} of operations, {:.3f} of bandwidth, {:.3f} with experts".format(
        *fractions
    )


if __name__ == "__main__":
    main()
