"""How a step's cost grows with group size, prompt length, completion length and model size, each
over a factor of 8.

``python -m benchmarks.scaling --plot docs/images/scaling.png``: each point in a process of its own,
so that its peak memory is its own; rollout and update apart; the shortest of some steps after a
warm-up step. A line with an intercept is fitted through each series, and the largest distance from
it told, in shares of the line: linear means within 15%.

Base: 2 prompts of 110 tokens x 8 completions of 64 tokens each, SmolLM2-135M's shape with 30 layers
and random weights. Group size is measured with prompts of 55 and of 441 tokens: a further
completion should cost about the same. ``--short``: 1 prompt, 4 layers, one step a point, all points
in one process, hence without memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import memory, report
from benchmarks.memory import GB
from benchmarks.scaling_plot import draw
from benchmarks.turns import MARK, say
from benchmarks.workloads import WORDS
from gruppo.modalities.text.bundled import smollm2_135m

BASE = {"prompts": 2, "group_size": 8, "words": WORDS[110], "new_tokens": 64, "layers": 30}
LINEAR = 0.15
"""The most that a point of a line may be away from it."""
PHASES = ("rollout_s", "update_s")


class Series(NamedTuple):
    """Points that differ in one thing."""

    name: str
    axis: str
    knob: str
    values: tuple[int, ...]
    rest: Mapping[str, int]

    def specs(self) -> list[dict[str, Any]]:
        return [{**BASE, **self.rest, self.knob: value} for value in self.values]


GROUPS, DEPTHS = (4, 8, 16, 32), (4, 8, 16, 32)
SERIES = (
    Series(
        "group size, short prompts",
        "completions of a prompt",
        "group_size",
        GROUPS,
        {"words": WORDS[55]},
    ),
    Series(
        "group size, long prompts",
        "completions of a prompt",
        "group_size",
        GROUPS,
        {"words": WORDS[440]},
    ),
    Series("prompt length", "tokens of a prompt", "words", tuple(WORDS.values()), {}),
    Series("completion length", "tokens of a completion", "new_tokens", (32, 64, 128, 256), {}),
    Series("model size", "layers", "layers", DEPTHS, {}),
)


def smaller(series: Series) -> Series:
    """With an eighth of the layers, and half of the prompts."""
    if series.knob == "layers":
        return series._replace(
            values=tuple(depth // 2 for depth in DEPTHS), rest={**series.rest, "prompts": 1}
        )
    return series._replace(rest={**series.rest, "prompts": 1, "layers": 4})


class Line(NamedTuple):
    """y = intercept + slope x, and how far a point is from it at most, in shares of the line."""

    intercept: float
    slope: float
    distance: float


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares. slope = cov(x, y) / var(x);  distance = max |y - line| / line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = covariance / sum((a - mean_x) ** 2 for a in x)
    intercept = mean_y - slope * mean_x
    lines = [intercept + slope * a for a in x]
    return Line(
        intercept,
        slope,
        max(abs(b - at) / at if at > 0 else float("inf") for b, at in zip(y, lines, strict=True)),
    )


@cache
def policy_of(folder: str, layers: int, compute: Any) -> Any:
    """A policy of the folder's shape with so many layers and random weights; no row ends before its
    last token."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from gruppo.modalities.text.load import from_transformers

    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    policy = from_transformers(module, AutoTokenizer.from_pretrained(folder), compute=compute)
    policy.chat.eos_ids = ()
    return policy


def point(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Shortest rollout and update of some steps after a warm-up step, and the peak memory."""
    import transformers.models.llama.modeling_llama  # noqa: F401  # part of the imports, not of the model

    from benchmarks.runs import one_step, started

    after_imports = memory.begin()
    run = started(spec, model=policy_of(spec["model"], spec["layers"], spec["compute"]))
    steps = [one_step(run) for _ in range(spec["steps"] + 1)][1:]
    return {
        **{phase: min(step[phase] for step in steps) for phase in PHASES},
        "peak_gb": memory.most(after_imports) / GB,
        "prompt_tokens": steps[0]["prompt_tokens"][0],
        "compute": run.config.compute,
        "steps": [{phase: step[phase] for phase in PHASES} for step in steps],
    }


def in_own_process(spec: Mapping[str, Any]) -> dict[str, Any]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.scaling",
        "--point",
        json.dumps(spec),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"the point {spec} ended early. {done.stderr[-2000:]}")
    return json.loads(lines[-1][len(MARK) :])


def measure(
    common: Mapping[str, Any], series: Sequence[Series], *, apart: bool
) -> dict[str, list[dict[str, Any]]]:
    """Points of each series; those that two series share are measured once. Without ``apart``, in
    this process."""
    known: dict[str, dict[str, Any]] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for one in series:
        for spec in one.specs():
            spec |= common
            if (key := json.dumps(spec)) not in known:
                known[key] = (in_own_process if apart else point)(spec)
                told = ", ".join(f"{phase} {known[key][phase]:.2f}" for phase in PHASES)
                print(
                    f"{one.name}, {one.knob}={spec[one.knob]}: {told}", file=sys.stderr, flush=True
                )
            found.setdefault(one.name, []).append(known[key])
    return found


def summarise(
    series: Sequence[Series],
    points: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    with_memory: bool,
) -> dict[str, Any]:
    """Of each series: where its points are, and the line through each phase's."""
    found = {}
    for one in series:
        of_series = points[one.name]
        x = [p["prompt_tokens"] for p in of_series] if one.knob == "words" else list(one.values)
        measures = {phase: [p[phase] for p in of_series] for phase in PHASES}
        if with_memory:
            measures["peak_gb"] = [p["peak_gb"] for p in of_series]
        lines = {name: fit(x, y)._asdict() for name, y in measures.items()}
        found[one.name] = {
            "axis": one.axis,
            "x": x,
            "prompt_tokens": of_series[0]["prompt_tokens"],
            **measures,
            "lines": lines,
        }
    return found


def marginal(found: Mapping[str, Any]) -> dict[str, float] | None:
    """Seconds that one more completion of each prompt costs, with short and with long prompts; None
    if not measured."""
    kinds = {kind: found.get(f"group size, {kind} prompts") for kind in ("short", "long")}
    if not all(kinds.values()):
        return None
    cost = {
        kind: sum(series["lines"][phase]["slope"] for phase in PHASES)
        for kind, series in kinds.items()
        if series
    }
    return {**cost, "long_over_short": cost["long"] / cost["short"]}


def table(found: Mapping[str, Any], further: Mapping[str, float] | None) -> str:
    lines = [
        f"{'grows with':<28}{'from':>6}{'to':>6}  "
        f"{'of':<10}{'first':>8}{'last':>8}{'off the line':>14}"
    ]
    for name, series in found.items():
        for what, line in series["lines"].items():
            y, verdict = series[what], "linear" if line["distance"] <= LINEAR else "not linear"
            lines.append(
                f"{name:<28}{series['x'][0]:>6}{series['x'][-1]:>6}  "
                f"{what:<10}{y[0]:8.2f}{y[-1]:8.2f}"
                f"{line['distance']:9.0%} {verdict}"
            )
    if further:
        lines.append(
            f"one more completion of each prompt: {further['short'] * 1e3:.0f} ms with short "
            f"prompts, "
            f"{further['long'] * 1e3:.0f} ms with long ones, {further['long_over_short']:.2f} "
            f"times as much"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that is not")
    parser.add_argument(
        "--series", nargs="+", default=[s.name for s in SERIES], choices=[s.name for s in SERIES]
    )
    parser.add_argument(
        "--point",
        type=json.loads,
        default=None,
        help="measure this one here; for the benchmark itself",
    )
    options = parser.parse_args(arguments)
    if options.point:
        return say(**point(options.point))
    common = {
        "model": options.model or str(smollm2_135m().path),
        "compute": options.compute,
        "steps": options.steps,
    }
    series = [one for one in SERIES if one.name in options.series]
    if options.short:
        series, common["steps"] = [smaller(one) for one in series], 1
    points = measure(common, series, apart=not options.short)
    found = summarise(series, points, with_memory=not options.short)
    further = marginal(found)
    results = {"series": found, "one_more_completion_s": further, "steps": common["steps"]}
    measured = {"common": common, "points": points}
    report.tell("scaling", results, table(found, further), options, draw=draw, measured=measured)


if __name__ == "__main__":
    main()
