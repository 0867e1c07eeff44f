"""How near each phase of a step is to what the machine can do: measured products and memory against
a real step.

``python -m benchmarks.roofline``: SmolLM2-135M, the workload *short* or another of
``benchmarks.step``. Work is counted by hand (``benchmarks.flops``): the tokens of a step once,
recomputation not counted. The rate that it is held against is this machine's own at the model's own
shapes: each layer's products, forward and both gradients, at the tokens of a forward, and the head
at its fastest chunk, weighted by their work. Attention's products count as work, at the mean rate
of the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import bars, flops, peaks, report
from benchmarks.ends import ScriptedEnds
from benchmarks.flops import Group, Shape
from benchmarks.runs import one_step, started
from benchmarks.workloads import WORKLOADS
from gruppo.modalities.text.bundled import smollm2_135m
from gruppo.trainer.run import Run
from gruppo.types import Prompt, Request, Sampling

Rates = Mapping[str, Mapping[str, float]]


def timed_steps(run: Run, spec: Mapping[str, Any], steps: int) -> list[dict[str, Any]]:
    """Steps after a warm-up step, each with the seconds of its optimiser and of its prefill."""
    ends = ScriptedEnds(run.policy)
    optimiser: list[float] = []
    run.optimizer.register_step_pre_hook(lambda *_: optimiser.append(-time.perf_counter()))
    run.optimizer.register_step_post_hook(
        lambda *_: optimiser.append(optimiser.pop() + time.perf_counter())
    )
    done = []
    for number in range(steps + 1):
        ends.script(spec, run.state.step)
        optimiser.clear()
        step = one_step(run)
        step |= {"optimiser_s": sum(optimiser), "prefill_s": prefill_seconds(run, spec, number)}
        done.append(step)
    return done[1:]


def prefill_seconds(run: Run, spec: Mapping[str, Any], number: int) -> float:
    """Of sampling a single token for each prompt, the draw included."""
    prompts = run.source.take(spec["prompts"])
    requests = [
        Request(Prompt(str(i), prompt.inputs, draw=number), 1) for i, prompt in enumerate(prompts)
    ]
    began = time.perf_counter()
    run.policy.sample(requests, Sampling(max_actions=1), seed=number)
    return time.perf_counter() - began


def groups_of(step: Mapping[str, Any], group_size: int) -> list[Group]:
    rows = range(0, len(step["lengths"]), group_size)
    return [(step["prompt_tokens"][row], step["lengths"][row : row + group_size]) for row in rows]


def even(tokens: int) -> int:
    """The next multiple of 16: products of odd sizes are slower, which would flatter what is held
    against them."""
    return -(-tokens // 16) * 16


def measured_peaks(
    shape: Shape, groups: Sequence[Group], micro_batches: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Rates at the shapes of a step: per product for an update, per product for decoding, and the
    memory's."""
    trunk = sum(prompt + sum(rows) - len(rows) for prompt, rows in groups)
    scored = sum(sum(rows) for _, rows in groups)
    return {
        "update": peaks.update_rates(
            shape, even(trunk // micro_batches), even(scored // micro_batches), dtype
        ),
        "prefill": peaks.forward_rates(shape, even(sum(prompt for prompt, _ in groups)), dtype),
        "decode": peaks.forward_rates(shape, sum(len(rows) for _, rows in groups), dtype),
        "memory": peaks.memory_rates(),
        "square": {str(kind): peaks.square_rate(kind) for kind in (torch.float32, torch.bfloat16)},
    }


def fastest(measured: Sequence[Rates]) -> dict[str, dict[str, float]]:
    """Of several measurements of the same rates, each at its best."""
    first = measured[0]
    return {
        kind: {name: max(one[kind][name] for one in measured) for name in first[kind]}
        for kind in first
    }


def summarise(
    shape: Shape,
    step: Mapping[str, Any],
    groups: Sequence[Group],
    best: Rates,
    *,
    bytes_each: int,
    parameters: int,
) -> dict[str, Any]:
    """Of each phase: seconds, work, rate, the rate or bandwidth that bounds it, and the fraction
    reached."""
    update, decode = flops.update(shape, groups), flops.decode(shape, groups)
    prefill = flops.prefill(shape, [prompt for prompt, _ in groups])
    decode_s, backward_s = (
        step["rollout_s"] - step["prefill_s"],
        step["update_s"] - step["optimiser_s"],
    )
    update_peak = flops.ideal_rate(flops.products(shape, groups), best["update"])
    phases = {
        "prefill": _arithmetic(
            step["prefill_s"], prefill.total, _forward_peak(shape, prefill, best["prefill"])
        ),
        "decode": _arithmetic(decode_s, decode.total, _forward_peak(shape, decode, best["decode"])),
        "update": _arithmetic(step["update_s"], update.total, update_peak),
        "  forward, backward": _arithmetic(backward_s, update.total, update_peak),
        "  optimiser": _traffic(
            step["optimiser_s"], flops.ADAM_BYTES * parameters, best["memory"]["in place"]
        ),
    }
    read = flops.decode_bytes(shape, groups, bytes_each=bytes_each)
    phases["decode"]["memory"] = _traffic(decode_s, read, best["memory"]["read"])
    return phases


def _forward_peak(shape: Shape, work: flops.Work, rates: Mapping[str, float]) -> float:
    """Operations a second of a forward, its trunk's divided among the layers' products by their
    size."""
    weights = shape.trunk_weights / shape.layers
    parts = {name: work.trunk * i * o / weights for name, (i, o) in shape.linears.items()}
    return flops.ideal_rate({**parts, "head": work.head}, rates)


def _arithmetic(seconds: float, work: float, peak: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "flops": work,
        "rate": work / seconds,
        "peak": peak,
        "fraction": work / seconds / peak,
    }


def _traffic(seconds: float, traffic: float, peak: float) -> dict[str, Any]:
    rate = traffic / seconds
    return {
        "seconds": seconds,
        "bytes": traffic,
        "rate": rate,
        "peak": peak,
        "fraction": rate / peak,
    }


def table(results: Mapping[str, Any]) -> str:
    lines = []
    for workload, found in results.items():
        lines.append(
            f"{workload}, {found['compute']}, {found['tokens_a_forward']:.0f} tokens a forward"
        )
        lines.append(
            f"{'phase':<22}{'seconds':>8}{'work':>14}{'rate':>14}"
            f"{'measured peak':>16}{'reached':>9}"
        )
        for name, phase in found["phases"].items():
            lines.append(_line(name, phase))
            if "memory" in phase:
                lines.append(_line(f"{name}, memory", phase["memory"]))
        square, memory = found["peaks"]["square"], found["peaks"]["memory"]
        told = ", ".join(
            f"{kind.removeprefix('torch.')} {rate / 1e9:.0f} GFLOP/s"
            for kind, rate in square.items()
        )
        moved = ", ".join(f"{kind} {rate / 1e9:.0f} GB/s" for kind, rate in memory.items())
        lines.append(f"products of 2048^3: {told}; memory {moved}")
    return "\n".join(lines)


def _line(name: str, phase: Mapping[str, Any]) -> str:
    work, unit = (phase["flops"], "FLOP") if "flops" in phase else (phase["bytes"], "B")
    done, rate, peak = (
        f"{number / 1e9:.0f} G{unit}" for number in (work, phase["rate"], phase["peak"])
    )
    return (
        f"{name:<22}{phase['seconds']:8.2f}{done:>14}{rate + '/s':>14}{peak + '/s':>16}"
        f"{phase['fraction']:9.0%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(arguments)
    names, steps = (["short"], 2) if options.short else (options.workloads, options.steps)
    results, measured = {}, {}
    for name in names:
        spec = {
            "model": options.model or str(smollm2_135m().path),
            "compute": options.compute,
            **WORKLOADS[name],
        }
        spec |= {"prompts": 4, "group_size": 8}
        run = started(spec)
        shape = Shape.of(run.policy.module.config)
        done = timed_steps(run, spec, steps)
        middle = statistics.median_low([step["seconds"] for step in done])
        step = next(step for step in done if step["seconds"] == middle)
        groups, micro_batches = (
            groups_of(step, spec["group_size"]),
            max(1, round(step["micro_batches"])),
        )
        dtype = run.policy.compute_dtype
        best = fastest(
            [
                measured_peaks(shape, groups, micro_batches, dtype)
                for _ in range(1 if options.short else 2)
            ]
        )
        parameters = sum(parameter.numel() for parameter in run.parameters)
        results[name] = {
            "phases": summarise(
                shape,
                step,
                groups,
                best,
                bytes_each=torch.finfo(dtype).bits // 8,
                parameters=parameters,
            ),
            "peaks": best,
            "compute": run.config.compute,
            "tokens_a_forward": sum(prompt + sum(rows) for prompt, rows in groups) / micro_batches,
        }
        measured[name] = {"spec": spec, "shape": asdict(shape), "steps": done}
    report.tell(
        "roofline", results, table(results), options, draw=bars.draw_fractions, measured=measured
    )


if __name__ == "__main__":
    main()
