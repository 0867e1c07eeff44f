"""What an adapter costs in speed: sampling and gradients of SmolLM2-135M with one, and without.

``python -m benchmarks.lora``: sides take turns in one process with one thread. Sampling: new tokens
a second of the model without an adapter (as fast as a merged one), with the adapter's products
beside packed ones of the base, and with peft's layers called as they are. Gradients: tokens a
second of log-probs and backward. Needs gruppo[lora].
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks import report
from benchmarks.workloads import WORDS, prompts
from gruppo.modalities.common.lora import adapter_weights, inject
from gruppo.modalities.text import TextPolicy, decoding, from_pretrained
from gruppo.modalities.text.bundled import smollm2_135m
from gruppo.types import Prompt, Request, Sampling

GROUP = 8
Work = Callable[[], tuple[int, float]]
"""Tokens, and seconds."""


def opened(path: str, compute: Any, rank: int) -> TextPolicy:
    """The model, with an adapter that changes it a little, or without; no end token, so that all
    rows are as long."""
    adapt = partial(inject, rank=rank, alpha=2.0 * rank) if rank else None
    policy = from_pretrained(path, compute=compute, adapt=adapt)
    policy.chat.eos_ids = ()
    with torch.no_grad():
        for name, weight in adapter_weights(policy.module).items():
            if "lora_B" in name:
                weight.copy_(torch.linspace(-1e-3, 1e-3, weight.numel()).view_as(weight))
    policy.refresh(force=True)
    return policy


@contextmanager
def modules_called() -> Iterator[None]:
    """Within, decoding calls peft's layers instead of packing what they hold."""
    before = decoding.low_rank
    decoding.low_rank = lambda module: None if hasattr(module, "base_layer") else before(module)
    try:
        yield
    finally:
        decoding.low_rank = before


def sampling(
    policy: TextPolicy, rows: int, length: int, *, is_called: bool = False
) -> tuple[int, float]:
    asked = [
        Prompt(str(n), text, draw=n)
        for n, text in enumerate(prompts(max(1, rows // GROUP), WORDS[55]))
    ]
    requests = [Request(prompt, min(GROUP, rows)) for prompt in asked]
    began = time.perf_counter()
    if is_called:
        with modules_called():
            rollouts = policy.sample(requests, Sampling(max_actions=length), seed=0)
    else:
        rollouts = policy.sample(requests, Sampling(max_actions=length), seed=0)
    return int(rollouts.lengths.sum()), time.perf_counter() - began


def gradients(policy: TextPolicy, rollouts: Any) -> tuple[int, float]:
    """Of the log-probs of 640 tokens a piece, as an update has them."""
    began, tokens = time.perf_counter(), 0
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 640):
        policy.likelihood(rollouts, micro_batch).logprobs.sum().backward()
        tokens += int(micro_batch.of(rollouts.mask).sum())
    seconds = time.perf_counter() - began
    policy.module.zero_grad(set_to_none=True)
    return tokens, seconds


def in_turns(sides: Mapping[str, Work], turns: int) -> dict[str, list[float]]:
    """Tokens a second of each turn, after one that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, work in sides.items():
            tokens, seconds = work()
            if turn:
                rates[name].append(tokens / seconds)
    return rates


def measure(
    path: str, compute: Any, rank: int, rows: Sequence[int], length: int, turns: int
) -> dict[str, Any]:
    plain, lora = opened(path, compute, 0), opened(path, compute, rank)
    done = {}
    for count in rows:
        done[f"sampling {count} rows"] = in_turns(
            {
                "no adapter": partial(sampling, plain, count, length),
                "adapter": partial(sampling, lora, count, length),
                "peft's layers": partial(sampling, lora, count, length, is_called=True),
            },
            turns,
        )
    asked = [
        Request(Prompt(str(n), text, draw=n), GROUP) for n, text in enumerate(prompts(2, WORDS[55]))
    ]
    rollouts = plain.sample(asked, Sampling(max_actions=length), seed=0)
    works = {
        "no adapter": partial(gradients, plain, rollouts),
        "adapter": partial(gradients, lora, rollouts),
    }
    done["gradients"] = in_turns(works, turns)
    return done


def summarise(rates: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Medians, and each side's over that of the model without an adapter, turn by turn."""
    first = rates["no adapter"]
    return {
        name: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "of_plain": statistics.median(v / f for v, f in zip(values, first, strict=True)),
        }
        for name, values in rates.items()
    }


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    lines = [f"{'work':<20}{'side':<16}{'tokens/s':>9}{'(range)':>18}   of no adapter"]
    for work, sides in results.items():
        for name, s in sides.items():
            of_turns = f"({s['min']:.0f} to {s['max']:.0f})"
            lines.append(
                f"{work:<20}{name:<16}{s['median']:9.0f}{of_turns:>18}   {s['of_plain']:.2f}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="a Hugging Face folder; without it, SmolLM2-135M"
    )
    parser.add_argument("--compute", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="completions at once"
    )
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.model or str(smollm2_135m().path)
    measured = measure(
        path, options.compute, options.rank, options.rows, options.new_tokens, options.turns
    )
    results = {work: summarise(rates) for work, rates in measured.items()}
    print(f"lora, rank {options.rank}: {report.heading(report.machine())}\n{table(results)}")


if __name__ == "__main__":
    main()
