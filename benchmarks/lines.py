"""How well restored lines of text are read: ``python -m benchmarks.lines NAME=RUNFOLDER
[NAME=RUNFOLDER ...]``.

Of each run, its own network is asked in several ways for the same held-out lines, which an optical
character reader reads: told the nominal parameters, the true ones, the best constant ones (of a
grid, chosen on training lines), what a head taught by clean pictures or by the true parameters of
the source lines says, and what the run's head says. Direct back-propagation is no row: the reader
is an ONNX file, through which no gradient goes. Differences are paired, line by line, with
bootstrap intervals. ``--quick`` leaves grid and taught heads out.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo.core.images import quantize
from gruppo.data.open import open_source
from gruppo.modalities.restoration import Controls, RestorationPolicy, load_restorer
from gruppo.modalities.restoration.actions import MIX
from gruppo.rewards.images import ocr_accuracy
from gruppo.seeds import generator_at
from gruppo.types import MicroBatch, Prompt

Score = Callable[[Sequence[Tensor], Sequence[Prompt]], Tensor]
"""Character accuracy of each picture [N], of its prompt's text."""
TARGET = "lines:blur=0.8-1.8,noise=5-40,count=5000,clean=no"
SOURCE = "lines:blur=0-2.5,noise=0-60,count=16000,set=1"
SHARES = (0.0, 1 / 3, 2 / 3, 1.0)
"""Of each control's range, in the grid."""
MIXES = (0.5, 0.75, 1.0)
DRAWS = 2000


@dataclass(frozen=True)
class Row:
    """One way to restore: how well its pictures are read, beside nominal and beside the run's
    head."""

    run: str
    name: str
    accuracy: float
    settings: dict[str, float] | None
    gain: dict[str, tuple[float, float, float]]
    """``over_nominal``: this less nominal; ``run_over_this``: the run's head less this. Mean, and
    the interval."""

    def line(self) -> str:
        shown = " | ".join(
            f"{100 * self.gain[name][0]:+.1f} [{100 * self.gain[name][1]:+.1f}, "
            f"{100 * self.gain[name][2]:+.1f}]"
            if name in self.gain
            else ""
            for name in ("over_nominal", "run_over_this")
        )
        values = [f"{k} {v:.3g}" for k, v in (self.settings or {}).items()]
        shown_settings = f" ({', '.join(values)})" if values else ""
        return f"| {self.run} | {self.name}{shown_settings} | {self.accuracy:.4f} | {shown} |"


HEAD = (
    "| run | pictures | character accuracy | points over nominal [95%] | the run's points over it "
    "[95%] |\n"
    "|---|---|---|---|---|"
)


def paired(a: Tensor, b: Tensor, *, draws: int = DRAWS) -> tuple[float, float, float]:
    """Mean of a - b, and the 2.5% and 97.5% quantiles of that mean over lines drawn anew, in
    pairs."""
    apart = (a - b).double()
    drawn = torch.randint(len(apart), (draws, len(apart)), generator=generator_at(0, "bootstrap"))
    low, high = (
        apart[drawn]
        .mean(dim=1)
        .quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
        .tolist()
    )
    return float(apart.mean()), low, high


def reader_score(read: Any = None) -> Score:
    reward = ocr_accuracy(read)

    def score(images: Sequence[Tensor], prompts: Sequence[Prompt]) -> Tensor:
        return torch.tensor(
            reward(images=list(images), text=[p.meta["text"] for p in prompts]), dtype=torch.float64
        )

    return score


# --- pictures -------------------------------------------------------------------------------------


@torch.no_grad()
def restored(policy: RestorationPolicy, prompts: Sequence[Prompt], values: Tensor) -> Tensor:
    """With these values of the controls, [K] or [N, K], as a file would hold them."""
    action: Any = policy.module.action
    x = torch.stack([prompt.inputs for prompt in prompts])
    values = values.float().expand(len(x), -1)
    parts = []
    for part, own in zip(x.split(64), values.split(64), strict=True):
        picture = action.restored(policy.module.call_network, part, own)
        for k, control in enumerate(action.controls):
            if control.name == MIX:
                mix = own[:, k, None, None, None]
                picture = mix * picture + (1 - mix) * part
        parts.append(picture)
    return quantize(torch.cat(parts))


def nominal(policy: RestorationPolicy) -> Tensor:
    """Each control at its start."""
    action: Any = policy.module.action
    return torch.tensor([control.start for control in action.controls])


def grid(policy: RestorationPolicy) -> list[Tensor]:
    """Every combination of ``SHARES`` of each control's range and ``MIXES``, and the nominal
    values."""
    action: Any = policy.module.action
    axes = [
        [mix for mix in MIXES if c.low <= mix <= c.high]
        if c.name == MIX
        else [c.low + s * (c.high - c.low) for s in SHARES]
        for c in action.controls
    ]
    return [nominal(policy), *(torch.tensor(values) for values in itertools.product(*axes))]


def best_constant(policy: RestorationPolicy, prompts: Sequence[Prompt], score: Score) -> Tensor:
    """The values of the grid under which these lines are read best."""
    found = [
        float(score(restored(policy, prompts, values), prompts).mean()) for values in grid(policy)
    ]
    return grid(policy)[max(range(len(found)), key=found.__getitem__)]


# --- the same head, taught ------------------------------------------------------------------------


def taught(
    policy: RestorationPolicy, source: Any, *, by: str, steps: int, lr: float = 5e-3
) -> RestorationPolicy:
    """A new head on the same network, which rests: taught ``by`` clean "pictures", or by the true
    "parameters"."""
    settings = dict(policy.module.action.settings)
    settings.pop("kind")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        action = Controls(**settings)
    network: Any = policy.module.network.requires_grad_(False)
    learner = RestorationPolicy(network, action, channels=policy.channels)
    optimizer = torch.optim.AdamW(action.head.parameters(), lr=lr, weight_decay=0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        prompts = source.take(16)
        loss = (
            _of_pictures(learner, prompts) if by == "pictures" else _of_parameters(learner, prompts)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(action.head.parameters(), 1.0)
        optimizer.step()
    return learner


def _of_pictures(policy: RestorationPolicy, prompts: Sequence[Prompt]) -> Tensor:
    demos = policy.demonstrations(prompts, seed=0)
    micro_batch = MicroBatch(torch.arange(len(prompts)), slice(0, 1))
    return policy.supervised_loss(demos, policy.likelihood(demos, micro_batch)).mean()


def _of_parameters(policy: RestorationPolicy, prompts: Sequence[Prompt]) -> Tensor:
    """Mean square of the head's mean less the true values, in units of each control's range."""
    action: Any = policy.module.action
    span = torch.tensor([control.high - control.low for control in action.controls])
    true = torch.tensor([action.true_values(prompt.meta) for prompt in prompts])
    target = (true - nominal(policy)) / span
    mean = policy.module(torch.stack([prompt.inputs for prompt in prompts]))[0].flatten(1)
    return (mean - target).square().mean()


# --- the table ------------------------------------------------------------------------------------


def judged(
    run: str,
    policy: RestorationPolicy,
    *,
    train: Sequence[Prompt],
    test: Sequence[Prompt],
    source: Any,
    score: Score,
    steps: int = 300,
) -> list[Row]:
    """The rows of one run. Without a ``source`` neither grid nor taught heads."""
    action: Any = policy.module.action
    x = torch.stack([prompt.inputs for prompt in test])
    true = torch.tensor([action.true_values(prompt.meta) for prompt in test])
    names = [control.name for control in action.controls]
    pictures: dict[str, tuple[Tensor, Tensor | None]] = {
        "as given": (x, None),
        "nominal": (restored(policy, test, nominal(policy)), nominal(policy)),
        "true parameters": (restored(policy, test, true), None),
    }
    if source is not None:
        best = best_constant(policy, train, score)
        pictures["best constant"] = (restored(policy, test, best), best)
        for by in ("pictures", "parameters"):
            pictures[f"head taught by {by}"] = (
                taught(policy, source, by=by, steps=steps).restore(x),
                None,
            )
    pictures["the run's head"] = (policy.restore(x), None)
    scores = {name: score(list(shown), test) for name, (shown, _) in pictures.items()}
    rows = []
    for name, (_, values) in pictures.items():
        gain = (
            {"over_nominal": paired(scores[name], scores["nominal"])} if name != "nominal" else {}
        )
        if name != "the run's head":
            gain["run_over_this"] = paired(scores["the run's head"], scores[name])
        settings = None if values is None else dict(zip(names, values.tolist(), strict=True))
        rows.append(Row(run, name, float(scores[name].mean()), settings, gain))
    return rows


def main(arguments: Sequence[str] | None = None, *, read: Any = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", metavar="NAME=RUN", help="run folders; NAME= may be left out"
    )
    parser.add_argument("--data", default=TARGET, help="the lines that the run learned from")
    parser.add_argument("--source", default=SOURCE, help="other lines, with clean images")
    parser.add_argument("--held-out-fraction", type=float, default=0.25, help="as in the run")
    parser.add_argument("--lines", type=int, default=1000, help="held-out lines that are read")
    parser.add_argument(
        "--grid-lines", type=int, default=100, help="training lines that a constant is chosen on"
    )
    parser.add_argument("--head-steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="neither grid nor taught heads")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    score = reader_score(read)
    target = open_source(options.data, seed=0, held_out_fraction=options.held_out_fraction)
    test, train = target.held_out(options.lines), target.take(options.grid_lines)
    found: list[Row] = []
    print(
        f"{len(test)} held-out lines; the reader is an ONNX file: direct back-propagation has no "
        f"gradient.\n"
    )
    print(HEAD, flush=True)
    for given in options.runs:
        name, _, folder = given.rpartition("=")
        policy = load_restorer(
            folder if (Path(folder) / "restorer.json").is_file() else Path(folder) / "final"
        )
        policy.module.requires_grad_(False)
        source = None if options.quick else open_source(options.source, seed=0, held_out_fraction=0)
        rows = judged(
            name or folder,
            policy,
            train=train,
            test=test,
            source=source,
            score=score,
            steps=options.head_steps,
        )
        print("\n".join(row.line() for row in rows), flush=True)
        found += rows
    if options.json:
        said = [
            {"run": r.run, "name": r.name, "accuracy": r.accuracy, "settings": r.settings, **r.gain}
            for r in found
        ]
        options.json.write_text(json.dumps(said, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
