"""Reward per generated token: how many tokens runs needed for the held-out reward that other runs
ended with.

``python -m benchmarks.tokens runs/plain-s0 runs/plain-s1 runs/grown-s0 runs/grown-s1`` reads their
metrics. Runs whose names differ in what follows ``-s`` are seeds of one variant; the first variant
is what the others are compared with. Where a reward is reached is read from evaluations smoothed
over three in a row, on the line between two of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SMOOTHED = 3


@dataclass(frozen=True)
class Curve:
    """Held-out reward against the tokens that were generated for training."""

    tokens: tuple[float, ...]
    reward: tuple[float, ...]

    @classmethod
    def read(cls, run: Path) -> Curve:
        """Of a run with ``--evaluation.every``; a run that was evaluated at its ends alone has two
        points."""
        found: list[tuple[float, float]] = []
        tokens = 0.0
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            tokens = row.get("progress/tokens", tokens)
            if row.get("eval/reward_mean") is not None:
                found.append((tokens, row["eval/reward_mean"]))
        return cls(tuple(t for t, _ in found), tuple(r for _, r in found))

    def smooth(self) -> Curve:
        """Each point the mean of itself and the two before it: no point knows what came later."""
        means = [
            statistics.mean(self.reward[max(n - SMOOTHED + 1, 0) : n + 1])
            for n in range(len(self.reward))
        ]
        return Curve(self.tokens, tuple(means))

    def until(self, reward: float) -> float:
        """Tokens at which the reward is first reached; infinite where it never is."""
        for n, value in enumerate(self.reward):
            if value >= reward:
                if n == 0:
                    return self.tokens[0]
                before = self.reward[n - 1]
                share = (reward - before) / (value - before)
                return self.tokens[n - 1] + share * (self.tokens[n] - self.tokens[n - 1])
        return math.inf

    def at(self, tokens: float) -> float:
        """The reward after so many tokens, on the line between two evaluations; NaN beyond the
        last."""
        for n in range(1, len(self.tokens)):
            if self.tokens[n] >= tokens:
                share = (tokens - self.tokens[n - 1]) / (self.tokens[n] - self.tokens[n - 1])
                return self.reward[n - 1] + share * (self.reward[n] - self.reward[n - 1])
        return math.nan


def by_variant(runs: Sequence[Path]) -> dict[str, dict[str, Curve]]:
    """Curves by variant and seed."""
    found: dict[str, dict[str, Curve]] = {}
    for run in runs:
        variant, _, seed = run.name.rpartition("-s")
        found.setdefault(variant or run.name, {})[seed] = Curve.read(run)
    return found


def table(curves: Mapping[str, Mapping[str, Curve]], share: float) -> str:
    """Markdown: tokens to ``share`` of the smoothed reward that the first variant ended with under
    the same seed."""
    first = {seed: curve.smooth() for seed, curve in next(iter(curves.values())).items()}
    lines = [
        "| variant | seed | tokens in all | reward at the end | target | tokens to it | of the "
        "first variant's |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for variant, seeds in curves.items():
        for seed in sorted(seeds.keys() & first.keys()):
            curve, target = seeds[seed].smooth(), share * first[seed].reward[-1]
            needed, base = curve.until(target), first[seed].until(target)
            said = (
                f"{needed:,.0f} | {needed / base:.0%}"
                if math.isfinite(needed)
                else "not reached | "
            )
            lines.append(
                f"| {variant} | {seed} | {curve.tokens[-1]:,.0f} | {curve.reward[-1]:.3f} | "
                f"{target:.3f} | {said} |"
            )
    return "\n".join(lines)


def rewards_at(curves: Mapping[str, Mapping[str, Curve]], tokens: Sequence[float]) -> str:
    """Markdown: the mean over seeds of the held-out reward after so many tokens, between two
    evaluations each."""
    lines = ["| variant | seeds | " + " | ".join(f"{t:,.0f} tokens" for t in tokens) + " |"]
    lines.append("|---" * (len(tokens) + 2) + "|")
    for variant, seeds in curves.items():
        found = [statistics.mean(curve.at(t) for curve in seeds.values()) for t in tokens]
        said = " | ".join("" if math.isnan(value) else f"{value:.3f}" for value in found)
        lines.append(f"| {variant} | {len(seeds)} | {said} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the reward that the first variant ended with"
    )
    parser.add_argument("--at", nargs="*", type=float, default=[10e3, 20e3, 30e3, 40e3, 50e3])
    options = parser.parse_args()
    curves = by_variant(options.runs)
    print(table(curves, options.share), rewards_at(curves, options.at), sep="\n\n")


if __name__ == "__main__":
    main()
