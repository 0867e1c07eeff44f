"""``gruppo plan``: fits constants of this machine, or prints the plan of a recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from gruppo.config.schema import Config
from gruppo.errors import GruppoError
from gruppo.loading import counted
from gruppo.plan.capacity import GIB, Split, Work, geometric_survival, machine_for, splits
from gruppo.plan.fit import FITTED, HELD_OUT, Constants, fit
from gruppo.plan.formulas import open_shape
from gruppo.tracking.formatting import duration, number, percent

WIDTH, SHOWN = 100, 6


def run_fit(config: Config, path: Path, *, is_json: bool) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():  # said before minutes of measuring
        raise GruppoError(
            f"--constants {path}: it needs a file in a folder that exists. Make the folder, or name one."
        )
    console = Console(stderr=True)
    constants = fit(config, lambda line: console.print(line, highlight=False, style="dim"))
    text = json.dumps(asdict(constants), indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    rates, errors, machine = constants.rates, constants.errors, constants.machine
    if is_json:
        return print(text)
    print(
        f"{constants.model} on {machine['gpu'] or '{threads} threads of {cpu}'.format(**machine)}:\n"
        f"  training   {rates.train_flops / 1e9:,.0f} GFLOP/s\n"
        f"  decoding   {rates.decode_flops / 1e9:,.0f} GFLOP/s, {rates.read_bytes / 1e9:,.1f} GB/s, and "
        f"{1e3 * rates.token_s:.2g} ms a token\n"
        f"  optimizer  {rates.update_bytes / 1e9:,.1f} GB/s\n"
        f"  publishing {rates.publish_bytes / 1e9:,.2f} GB/s\n"
        f"  lengths    prompts of {constants.prompt_tokens:.0f} tokens; {percent(constants.survival[-1])} of rows are "
        f"longer than {len(constants.survival) - 1}\n"
        f"fitted to {counted(len(FITTED), 'size')} of a step; median error of {len(HELD_OUT)} others: "
        + ", ".join(f"{part} {errors[part]:.0%}" for part in ("generate", "train", "step"))
        + f"\nwritten to {path}"
    )


def run_plan(
    config: Config,
    constants: Constants,
    *,
    gpus: int,
    gpu: str,
    price: float | None,
    model: str,
    mean_tokens: float | None,
    prompt_tokens: float | None,
    is_json: bool,
) -> None:
    least = (("gpus", gpus, 1, ""), ("price", price, 0, " dollars per GPU and hour"))
    for name, value, low, what in (*least, ("prompt-tokens", prompt_tokens, 1, "")):
        if value is not None and not low <= value < math.inf:
            raise GruppoError(f"--{name} is {value:g}; it needs at least {low}{what}.")
    shape, longest = open_shape(model or config.model), config.rollout.max_new_tokens
    survival = (
        constants.survival if mean_tokens is None else geometric_survival(mean_tokens, longest)
    )
    prompt = constants.prompt_tokens if prompt_tokens is None else prompt_tokens
    work = Work(config, shape, machine_for(gpu, constants, shape), prompt, survival)
    found = splits(work, gpus)
    hours = found[0].step_s * config.steps / 3600
    gpu_hours = hours * found[0].gpus  # of those that have something to do
    cost = None if price is None else gpu_hours * price
    totals: dict[str, float | None] = {"hours": hours, "gpu_hours": gpu_hours, "cost": cost}
    if is_json:
        about: dict[str, Any] = {
            "gpu": gpu,
            "rates": asdict(work.machine.rates),
            "rates_from": work.machine.source,
        }
        about |= {"error": work.machine.error, "splits": [asdict(split) for split in found]}
        return print(json.dumps(about | totals, indent=1))
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print(render(work, found, gpus, totals))


def render(
    work: Work, found: Sequence[Split], gpus: int, totals: dict[str, float | None]
) -> RenderableType:
    """The best split with its figures, each with its error, then the other splits."""
    config, machine, best = work.config, work.machine, found[0]
    rollout, lag, error = config.rollout, config.engine.lag, f"± {machine.error:.0%}"
    of = f" of {machine.memory / GIB:.0f}" if machine.memory < math.inf else ""
    each = f" of {best.tensor_parallel} GPUs" if best.tensor_parallel > 1 else ""
    joint = " on the same GPUs as" if best.is_shared else ","
    run = f"{counted(config.steps, 'step')} in {duration(3600 * (totals['hours'] or 0))}"
    has_price = totals["cost"] is not None
    waiting = (
        f"trainers {percent(best.trainer_waits)}, servers {percent(best.servers_idle)} of the time"
    )
    stale = f"mean {number(best.lag_mean)}, at most {counted(best.lag_max, 'publish', 'publishes')}"
    figures = (
        (
            "split",
            f"{counted(best.trainers, 'trainer')}{joint} {counted(best.servers, 'server')}{each}",
            "simulated",
        ),
        ("step", f"{number(best.step_s)} s", error),
        (
            "throughput",
            f"{number(best.tokens_per_s)} tokens/s, {number(best.samples_per_s)} samples/s",
            error,
        ),
        ("waiting", waiting, "simulated"),
        ("staleness", stale, f"bound {lag}"),
        (
            "memory",
            f"trainer {best.trainer_gib:.1f}{of} GiB, server {best.server_gib:.1f}{of} GiB",
            "not measured",
        ),
        ("run", f"{run}, {number(totals['gpu_hours'])} GPU hours", error),
        (
            "cost",
            f"${totals['cost']:,.2f}" if has_price else "no price was given: --price",
            error if has_price else "",
        ),
    )
    titles = (
        "trainers",
        "servers",
        "GPUs",
        "step s",
        "tokens/s",
        "trainers wait",
        "servers wait",
        "lag",
    )
    top, right = (
        Table(box=None, show_header=False),
        (Column(title, justify="right") for title in titles),
    )
    others = Table(*right, box=None, header_style="dim")
    for row in figures:
        top.add_row(*row)
    for split in found[:SHOWN]:
        each = f" x {split.tensor_parallel}" if split.tensor_parallel > 1 else ""
        servers = f"{'shared ' * split.is_shared}{split.servers}{each}"
        rates = map(number, (split.step_s, split.tokens_per_s))
        waits = map(percent, (split.trainer_waits, split.servers_idle))
        others.add_row(
            str(split.trainers), servers, str(split.gpus), *rates, *waits, number(split.lag_mean)
        )
    notes = [f"Rates: {machine.source}. The error is the median of steps that were not fitted."]
    if len(work.survival) <= rollout.max_new_tokens:
        notes.append(
            f"Lengths beyond {len(work.survival) - 1} tokens were not sampled: rows end at the mean rate."
        )
    if best.gpus < gpus:
        idle = f"{gpus - best.gpus} of {gpus} GPUs have nothing to do: a trainer and a server need a group each."
        notes.append(f"{idle} Raise --rollout.prompts, or plan for fewer.")
    title = f"{rollout.prompts} prompts x {rollout.group_size} samples of up to {rollout.max_new_tokens} tokens"
    return Group(
        Text(f"{title}, lag {lag}, on {gpus} x {machine.name}", style="bold"),
        Padding(top, (1, 0, 1, 2), expand=False),
        Padding(others, (0, 0, 1, 2), expand=False),
        *(Text(note, style="dim") for note in notes),
    )
