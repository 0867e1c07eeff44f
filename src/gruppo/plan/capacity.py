"""The plan of a recipe on a number of GPUs: which split of trainers and servers is fastest, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from gruppo.config.schema import Config
from gruppo.errors import GruppoError
from gruppo.modalities.text.policy import BATCH_ROWS
from gruppo.plan.fit import Constants
from gruppo.plan.formulas import ModelShape, Rates, decode_step_s, learn_s, trainer_bytes
from gruppo.plan.hardware import GPUS, THIS, Gpu, find_gpu, recognized
from gruppo.plan.simulate import Loop, simulate

PUBLISHED, PUBLISHED_ERROR = (0.332, 0.398, 0.379), 0.47
"""Fractions of a GPU's peaks that published runs reach: of operations, of bandwidth while decoding, and of both once
more by mixtures of experts; and the median error of tables that they were not fitted to: ``python -m
benchmarks.plan_published``."""
PUBLISH_BYTES = 1e11
"""Per second, to all servers: a trillion weights in about 20 s (published by several systems of that size)."""
USABLE = 0.9
"""Of a server's memory: vLLM's default."""
MAX_TENSOR_PARALLEL = 16
OF_UPDATES = ("gradients", "gathered", "activations", "reserved")
"""Parts of a trainer's memory that servers on the same GPUs may use while they sample."""
STEPS = 4
"""Simulated after those in which the loop fills."""
GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What one GPU of the plan has and reaches, and how well that is known."""

    name: str
    memory: float
    """Bytes; infinite where unknown."""
    rates: Rates
    width: int
    """Bytes of a weight as it is computed with."""
    error: float
    """Median relative error of seconds that were predicted and then measured."""
    source: str


@dataclass(frozen=True)
class Work:
    """What is planned."""

    config: Config
    shape: ModelShape
    machine: Machine
    prompt: float
    """Mean tokens of a prompt."""
    survival: Sequence[float]
    """Share of rows longer than 0, 1, ... tokens, as far as known."""


@dataclass(frozen=True)
class Split:
    """A division of the GPUs, and what the simulation says of it."""

    trainers: int
    servers: int
    tensor_parallel: int
    is_shared: bool
    """Whether trainers and servers are the same GPUs, and work in turns."""
    gpus: int
    """That have something to do."""
    step_s: float
    tokens_per_s: float
    samples_per_s: float
    trainer_waits: float
    """Share of the time."""
    servers_idle: float
    lag_mean: float
    lag_max: int
    trainer_gib: float
    server_gib: float


def machine_for(name: str, constants: Constants, shape: ModelShape) -> Machine:
    """The rates of a GPU: measured on it, scaled from another GPU by their peaks, or from published runs."""
    rates, device = constants.rates, str(constants.machine["gpu"] or constants.machine["cpu"])
    error, measured = constants.errors["step"], f"measured on {device}"
    if name == THIS:  # of unknown memory, where everything fits
        return Machine(name, constants.memory or math.inf, rates, constants.width, error, measured)
    gpu, key = find_gpu(name), recognized(str(constants.machine["gpu"] or ""))
    if not key:
        why = f"published runs, since a fit on {device} says nothing about a GPU"
        return Machine(name, gpu.memory, published_rates(gpu, shape), 2, PUBLISHED_ERROR, why)
    flops, read = gpu.flops / GPUS[key].flops, gpu.bytes_per_s / GPUS[key].bytes_per_s
    # as measured: publishing, which is the network's, and the seconds per token and row of calls, rewards and metrics
    rates = replace(
        rates, train_flops=rates.train_flops * flops, decode_flops=rates.decode_flops * flops
    )
    rates = replace(
        rates, read_bytes=rates.read_bytes * read, update_bytes=rates.update_bytes * read
    )
    scaled = "" if GPUS[key] == gpu else f", scaled by peak rates to {name}"
    return Machine(name, gpu.memory, rates, 2, error, measured + scaled)


def published_rates(gpu: Gpu, shape: ModelShape, fractions: Sequence[float] = PUBLISHED) -> Rates:
    train, read, sparse = fractions
    share = sparse if shape.experts else 1.0
    flops, read_bytes = share * train * gpu.flops, share * read * gpu.bytes_per_s
    return Rates(flops, flops, read_bytes, read_bytes, PUBLISH_BYTES)


# --- lengths ----------------------------------------------------------------------------------------------------------


def sampled_lengths(survival: Sequence[float], longest: int, count: int) -> np.ndarray:
    """Lengths of rows, cut at ``longest``. Beyond what was sampled, rows end at the mean rate of what was."""
    tail = np.full(
        max(longest + 1 - len(survival), 0), 1 - (1 - survival[-1]) / (sum(survival[:-1]) or 1)
    )
    shares = np.concatenate([survival, survival[-1] * np.cumprod(tail)])[: longest + 1]
    chance = np.random.default_rng(0).random(count)
    return np.clip(np.searchsorted(-shares, -chance, side="left"), 1, longest)


def geometric_survival(mean: float, longest: int) -> list[float]:
    """Of rows that end at a constant rate and are cut at ``longest``, with a mean of (1 - (1 - p)^longest) / p."""
    if not 1 <= mean <= longest:
        raise GruppoError(f"""--mean-tokens is {mean:g}, and rows have 1 to {longest} tokens. Set it between, or
            raise --rollout.max-new-tokens.""")
    low, high = 1e-12, 1 - 1e-12
    for _ in range(100):
        p = (low + high) / 2
        low, high = (p, high) if -math.expm1(longest * math.log1p(-p)) / p > mean else (low, p)
    return [(1 - low) ** tokens for tokens in range(longest + 1)]


# --- splits -----------------------------------------------------------------------------------------------------------


def splits(work: Work, gpus: int) -> list[Split]:
    """The splits that fit, fastest first."""
    config, shape, machine = work.config, work.shape, work.machine
    rollout, lag, longest = (
        config.rollout,
        config.engine.lag,
        work.prompt + config.rollout.max_new_tokens,
    )
    if lag and gpus < 2:
        raise GruppoError(
            f"--gpus {gpus} leaves no server beside the trainer, which --engine.lag {lag} needs; give 2."
        )
    most, of = gpus - 1 if lag else gpus, f"on {machine.name} ({machine.memory / GIB:.0f} GiB)"
    parts = {n: trainer_bytes(shape, config, longest, gpus=n) for n in range(1, most + 1)}
    needed = next((n for n, of_n in parts.items() if sum(of_n.values()) <= machine.memory), 0)
    if not needed:
        raise GruppoError(f"""the model does not fit: each of {most} trainers lacks
            {(sum(parts[most].values()) - machine.memory) / GIB:.1f} GiB of memory {of}. Give more --gpus, a larger
            --gpu, or --lora.rank.""")
    # weights of a server, and the cache of one row
    served = machine.width * (shape.counts.total + shape.kv_numbers * longest)
    sizes = [2**n for n in range(MAX_TENSOR_PARALLEL.bit_length()) if 2**n <= gpus]
    parallel = next((n for n in sizes if served / n <= USABLE * machine.memory), 0)
    if not parallel:
        raise GruppoError(f"""the model does not fit: each of the {sizes[-1]} GPUs of a server lacks
            {(served / sizes[-1] - USABLE * machine.memory) / GIB:.1f} GiB of memory {of}, {USABLE:.0%} of it used. Give
            more --gpus or a larger --gpu.""")

    @cache
    def split(trainers: int, over: int = parallel, *, is_shared: bool = False) -> Split:
        return simulated(work, gpus, trainers, over, is_shared=is_shared)

    # Ranks take whole groups: between these numbers of trainers, the slowest has as many. With more of them training is
    # faster and sampling slower: one minimum, which a ternary search finds.
    useful = sorted(
        {math.ceil(rollout.prompts / groups) for groups in range(1, rollout.prompts + 1)} | {needed}
    )
    trainers = [n for n in useful if needed <= n <= gpus - parallel]
    low, high, tried = 0, len(trainers) - 1, set[int]()
    while high - low > 2:
        third = (high - low) // 3
        pair = trainers[low + third], trainers[high - third]
        tried |= {*pair}
        low, high = (
            (low, high - third)
            if split(pair[0]).step_s <= split(pair[1]).step_s
            else (low + third, high)
        )
    found = [split(n) for n in tried | {*trainers[low : high + 1]}]
    if not lag:  # in turns, on the same GPUs: with servers beside the trainers, or by the trainers themselves
        n, over = max(n for n in useful if n <= gpus), parallel if config.engine.kind else 1
        if kept_bytes(parts[n]) + served / over <= USABLE * machine.memory:
            found.append(split(n, over, is_shared=True))
    if not found:
        raise GruppoError(f"""the model does not fit: {needed} GPUs for trainers and {parallel} for a server are more
            than {gpus}, which lack {(needed + parallel - gpus) * machine.memory / GIB:.0f} GiB. Give --gpus
            {needed + parallel}.""")
    return sorted(found, key=lambda split: (split.step_s, split.gpus))


def kept_bytes(parts: dict[str, float]) -> float:
    """Memory that a trainer keeps while servers on its GPU sample."""
    return sum(size for name, size in parts.items() if not name.startswith(OF_UPDATES))


def simulated(work: Work, gpus: int, trainers: int, parallel: int, *, is_shared: bool) -> Split:
    """What a split does, after the steps in which its loop fills."""
    config, machine, prompt = work.config, work.machine, work.prompt
    shape = work.shape.adapted(config.lora.rank)
    rollout, lag, rates = config.rollout, config.engine.lag, machine.rates
    is_local = is_shared and not config.engine.kind
    servers = trainers if is_local else (gpus if is_shared else gpus - trainers) // parallel
    servers = min(servers, (lag + 1) * rollout.prompts)
    first, steps = lag + 1, lag + 1 + STEPS
    lengths = sampled_lengths(
        work.survival, rollout.max_new_tokens, steps * rollout.prompts * rollout.group_size
    )
    # rows are admitted while their caches fit as long as they are on average; vLLM preempts some beyond
    own = trainer_bytes(shape, config, prompt + rollout.max_new_tokens, gpus=trainers)
    weights, numbers = machine.width * shape.counts.total, machine.width * shape.kv_numbers
    room = parallel * (USABLE * machine.memory - is_shared * kept_bytes(own)) - weights
    limit = BATCH_ROWS if is_local else config.engine.max_inflight
    loop = Loop(
        prompts=rollout.prompts,
        lag=lag,
        servers=servers,
        max_rows=int(
            min(limit, max(room / numbers / (prompt + lengths.mean()), rollout.group_size))
        ),
        decode_step_s=lambda n, cached: decode_step_s(
            shape, rates, n, cached, width=machine.width, gpus=parallel
        ),
        prefill_s=lambda tokens: shape.forward_flops(tokens, ()) / rates.decode_flops / parallel,
        train_s=lambda batch: (
            learn_s(shape, rates, config, batch, prompt, gpus=trainers)
            + rates.row_s * sum(map(len, batch)) / trainers
        ),
        publish_s=machine.width * shape.counts.trained / rates.publish_bytes,
        prompt_tokens=prompt,
        refills=not is_local,
    )
    timeline = simulate(loop, lengths.reshape(-1, rollout.group_size).tolist())
    step_s, lags = timeline.step_s(first), timeline.lags(rollout.prompts)[first * rollout.prompts :]
    used = max(trainers, servers * parallel) if is_shared else trainers + servers * parallel
    return Split(
        trainers,
        servers,
        parallel,
        is_shared,
        used,
        step_s,
        float(lengths.sum()) / steps / step_s,
        rollout.prompts * rollout.group_size / step_s,
        sum(timeline.waited_s[first:]) / step_s / STEPS,
        timeline.idle_s / servers / timeline.published[-1],
        sum(lags) / len(lags),
        max(lags),
        sum(own.values()) / GIB,
        (weights + numbers * timeline.most_cached) / parallel / GIB,
    )
