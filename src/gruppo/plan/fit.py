"""Constants of this machine: real steps of a recipe in a few sizes, and the rates that explain their seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from gruppo.build import Parts, build
from gruppo.config.options import NonNegative, Positive, Range, fields_of
from gruppo.config.schema import Config
from gruppo.config.serialization import build as build_config
from gruppo.errors import GruppoError
from gruppo.integrity import read_json
from gruppo.modalities.text.policy import BATCH_ROWS
from gruppo.plan.formulas import ModelShape, Rates, decode_step_s, learn_s
from gruppo.plan.simulate import Groups, Loop, simulate
from gruppo.trainer.collect import collect
from gruppo.trainer.memory import free_bytes
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import environment
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import learn
from gruppo.types import Rollouts

FITTED = ((2, 4, 64), (4, 8, 16), (8, 8, 4), (12, 8, 8), (2, 8, 32))
HELD_OUT = ((3, 8, 12), (2, 6, 48), (8, 4, 24))
"""Prompts, group size and most new tokens of the steps that are measured: some to fit, others to tell the error."""
STEPS = 2
"""Measured in each size, after one that is not. The fastest counts: what else a machine does only adds to it."""
PULL = 0.02
START = Rates(1e11, 1e11, 1e10, 1e10, 1e9, 1e-3, 1e-3)


@dataclass(frozen=True)
class Measured:
    """A step, as its own metrics tell it."""

    prompts: int
    group_size: int
    lengths: list[list[int]]
    """Sampled tokens of each group."""
    learned: list[list[int]]
    """Of the rows that had an advantage."""
    generate_s: float
    train_s: float
    publish_s: float
    step_s: float


@dataclass(frozen=True)
class Constants:
    """What ``gruppo plan --fit`` found; ``plan.json``."""

    machine: dict
    model: str
    width: Positive
    """Bytes of a weight as it is computed with."""
    memory: NonNegative
    """Bytes of the device, or free on the CPU; 0: unknown."""
    rates: Rates
    prompt_tokens: Annotated[float, Range(gt=0)]
    survival: Annotated[tuple[float, ...], Range(ge=0, le=1)]
    """Share of rows longer than 0, 1, ... tokens, as far as they were sampled."""
    errors: dict
    """Median of |predicted / measured - 1| of sizes that were not fitted, by what was measured."""
    steps: list
    """The measured steps, fitted ones first."""

    @classmethod
    def load(cls, path: Path) -> Constants:
        if not path.exists():
            raise GruppoError(f"""there are no fitted constants at {path}. Measure them on this machine with gruppo plan
                RECIPE --fit, which takes a few minutes for a small model.""")
        try:
            found: Constants = build_config(cls, read_json(path))
            for part in (found, found.rates):
                for name, (_, interval, _) in fields_of(type(part)).items():  # type: ignore[arg-type]
                    value = getattr(part, name)
                    numbers = value if isinstance(value, tuple) else (value,)
                    if interval is not None and not (
                        numbers and all(map(interval.contains, numbers))
                    ):
                        raise ValueError(f"{name} is {value!r:.80}; it needs to be {interval}")
            if not found.errors["step"] >= 0 or not {"gpu", "cpu"} <= found.machine.keys():
                raise ValueError("it names no machine or no error of a step")
            return found
        except (OSError, ValueError, TypeError, KeyError, AttributeError, GruppoError) as error:
            raise GruppoError(f"""{path} has no constants of gruppo plan ({error}). Write it again with gruppo plan
                RECIPE --fit.""") from error


# --- predictions for one machine --------------------------------------------------------------------------------------


def predict(
    shape: ModelShape,
    rates: Rates,
    config: Config,
    prompt: float,
    groups: Groups,
    learned: Groups,
    *,
    width: int,
) -> dict[str, float]:
    """Seconds of a step in which one device samples, learns and publishes in turns."""
    loop = Loop(
        prompts=len(groups),
        lag=0,
        servers=1,
        max_rows=BATCH_ROWS,
        decode_step_s=lambda rows, cached: decode_step_s(shape, rates, rows, cached, width=width),
        prefill_s=lambda tokens: shape.forward_flops(tokens, ()) / rates.decode_flops,
        train_s=lambda _: learn_s(shape, rates, config, learned, prompt),
        publish_s=width * shape.counts.trained / rates.publish_bytes,
        prompt_tokens=prompt,
        refills=False,
    )
    timeline = simulate(loop, groups)
    seconds = {
        "generate": timeline.waited_s[0],
        "train": loop.train_s(groups),
        "publish": loop.publish_s,
    }
    return seconds | {"step": timeline.published[0] + rates.row_s * sum(map(len, groups))}


def fit_positive(
    predicted: Callable[[np.ndarray], np.ndarray],
    measured: np.ndarray,
    start: np.ndarray,
    rounds: int = 40,
) -> np.ndarray:
    """Positive numbers with the least sum of squared log(predicted / measured): Levenberg and Marquardt's method.

    A weak pull to the start decides where several numbers explain the measurements equally well.
    """
    x, damping = np.log(start), 1.0

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(predicted(np.exp(x)) / measured), PULL * (x - np.log(start))])

    residual = residuals(x)
    for _ in range(rounds):
        step = 0.01  # a simulation is not smooth
        jacobian = np.stack(
            [(residuals(x + step * unit) - residual) / step for unit in np.eye(len(x))], axis=1
        )
        normal = jacobian.T @ jacobian
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), jacobian.T @ residual)
        found = residuals(tried := x - np.clip(change, -2, 2))
        if (found**2).sum() < (residual**2).sum():
            x, residual, damping = tried, found, damping / 3
        else:
            damping *= 4
    return np.exp(x)


def fit_rates(
    shape: ModelShape, config: Config, prompt: float, steps: Sequence[Measured], *, width: int
) -> Rates:
    """The rates under which the predicted seconds are nearest to those of the steps."""
    # of each step: what is neither sampling, training nor publishing, and its rows
    rest = [
        (s.step_s - s.generate_s - s.train_s - s.publish_s, s.prompts * s.group_size) for s in steps
    ]
    publish_bytes = statistics.median(
        width * shape.counts.trained / step.publish_s for step in steps
    )
    row_s = statistics.median(max(seconds, 1e-6) / count for seconds, count in rest)
    rates = replace(START, publish_bytes=publish_bytes, row_s=row_s)

    def nearest(rates: Rates, part: str, names: Sequence[str], used: Sequence[Measured]) -> Rates:
        def changed(values: np.ndarray) -> Rates:
            return replace(rates, **dict(zip(names, map(float, values), strict=True)))

        def predicted(values: np.ndarray) -> np.ndarray:
            tried = changed(values)
            found = [
                predict(shape, tried, config, prompt, one.lengths, one.learned, width=width)
                for one in used
            ]
            return np.array([one[part] for one in found])

        measured = np.array([getattr(step, f"{part}_s") for step in used])
        return changed(
            fit_positive(predicted, measured, np.array([getattr(rates, name) for name in names]))
        )

    rates = nearest(rates, "generate", ("decode_flops", "read_bytes", "token_s"), steps)
    learned = [step for step in steps if any(step.learned)]
    return nearest(rates, "train", ("train_flops", "update_bytes"), learned) if learned else rates


# --- measurements -----------------------------------------------------------------------------------------------------


def measure(run: Run, prompts: int, group_size: int, tokens: int) -> tuple[Measured, Rollouts]:
    """A step of a size."""
    rollout = replace(
        run.config.rollout, prompts=prompts, group_size=group_size, max_new_tokens=tokens
    )
    run.config = replace(run.config, rollout=rollout)
    step_params = step_params_at(run.config, 0)
    began = time.perf_counter()
    collected = collect(run, step_params)
    metrics = collected.metrics | learn(run, collected.batch, step_params)
    run.state.step += 1
    learned = time.perf_counter()
    run.engine.sync(run.policy, run.state.step)
    ended = time.perf_counter()
    rollouts = collected.rollouts
    assert rollouts is not None and collected.advantages is not None
    lengths, moves = rollouts.lengths.tolist(), (collected.advantages.nan_to_num() != 0).tolist()
    groups = [
        (rollouts.group_ids == group).nonzero()[:, 0].tolist()
        for group in rollouts.group_ids.unique()
    ]
    sampled = [[lengths[row] for row in group] for group in groups]
    moving = [[lengths[row] for row in group if moves[row]] for group in groups]
    generate_s, train_s = (
        metrics["time/rollout_s"],
        metrics["time/update_s"] + metrics["time/credit_s"],
    )
    times = (generate_s, train_s, ended - learned, ended - began)
    return Measured(prompts, group_size, sampled, moving, *times), rollouts


def survival(rows: Sequence[tuple[int, bool]]) -> list[float]:
    """Share of rows longer than 0, 1, ... tokens, from rows some of which were cut (Kaplan and Meier)."""
    share, found = 1.0, [1.0]
    for tokens in range(1, max(length for length, _ in rows) + 1):
        reached = sum(length >= tokens for length, _ in rows)
        ended = sum(length == tokens and not is_cut for length, is_cut in rows)
        share *= 1 - ended / reached
        found.append(share)
    return found


def fit(config: Config, show: Callable[[str], None]) -> Constants:
    """Measure the recipe's model on this machine, sampling by itself, and fit ``Rates``."""
    rollout = replace(config.rollout, refill_rounds=0, first_samples=0)
    evaluation, saving = (
        replace(config.evaluation, prompts=0, data=""),
        replace(config.saving, every=0),
    )
    config = replace(config.without_servers, rollout=rollout, evaluation=evaluation, saving=saving)
    free = float(free_bytes(torch.device("cpu")) or 0)
    run, _ = build(config, Parts())
    settings = getattr(run.policy.module, "config", None)
    if settings is None or not hasattr(settings, "get_text_config"):
        raise GruppoError(f"""gruppo plan has formulas for language models of transformers, and {config.model!r} is
            none. Give a recipe whose --model is one.""")
    shape, width = (
        ModelShape.of(settings).adapted(config.lora.rank),
        run.policy.compute_dtype.itemsize,
    )
    sizes, rows, prompt_lengths = (*FITTED, *HELD_OUT), list[tuple[int, bool]](), list[int]()
    fastest: dict[tuple[int, int, int], Measured] = {}
    for turn in range(
        STEPS + 1
    ):  # turn by turn, so that a slow minute of the machine is not all of one size
        show(f"measuring {len(sizes)} sizes of a step, {turn + 1} of {STEPS + 1} times")
        for size in sizes:
            step, rollouts = measure(run, *size)
            if turn:  # the fastest per token, since samples of one size differ in length
                tried = (fastest.get(size, step), step)
                fastest[size] = min(
                    tried, key=lambda step: step.step_s / sum(map(sum, step.lengths))
                )
            rows += [
                (n, end == "length")
                for n, end in zip(rollouts.lengths.tolist(), rollouts.finish, strict=True)
            ]
            prompt_lengths += [len(ids) for ids in rollouts.shared["prompt_ids"]]
    steps = [fastest[size] for size in sizes]
    prompt = statistics.mean(prompt_lengths)
    rates, device = (
        fit_rates(shape, config, prompt, steps[: len(FITTED)], width=width),
        run.policy.device,
    )
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else free
    )
    of_parts: dict[str, list[float]] = {
        part: [] for part in ("generate", "train", "publish", "step")
    }
    for step in steps[len(FITTED) :]:
        found = predict(shape, rates, config, prompt, step.lengths, step.learned, width=width)
        for part, own in of_parts.items():
            if part != "train" or any(step.learned):  # without an advantage, nothing was trained
                own.append(abs(found[part] / getattr(step, f"{part}_s") - 1))
    errors = {
        part: statistics.median(own) if own else float("nan") for part, own in of_parts.items()
    }
    machine = environment()["hardware"] | {"torch": torch.__version__}
    measured = [asdict(step) for step in steps]
    return Constants(
        machine, config.model, width, memory, rates, prompt, tuple(survival(rows)), errors, measured
    )
