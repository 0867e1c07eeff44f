"""What an independent judge says of digits that models draw: ``python -m benchmarks.digits RUN [RUN
...]``.

Each model draws the same classes from the same noise, as in training (temperature 1); real held-out
digits stand beside them. The judge is trained once (about half a minute) and kept in ``build/``.
``--sheet FILE`` draws some of each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.judge import Judge, Verdict, trained_judge, verdict
from gruppo import inference
from gruppo.config import serialization
from gruppo.data.digits import load_digits, split_images
from gruppo.modalities.diffusion import DiffusionSampling
from gruppo.recipes.diffusion import PRETRAINED
from gruppo.types import Prompt, Request

KEPT = Path("build/judge.safetensors")


@dataclass(frozen=True)
class Judged:
    """One model's digits."""

    name: str
    said: Verdict
    sevens_frac: float

    def line(self) -> str:
        v = self.said
        return (
            f"| {self.name} | {v.asked_frac:.1%} | {self.sevens_frac:.1%} | {v.no_digit_frac:.1%} "
            f"| {v.jpeg_bytes:.0f} "
            f"| {v.ink:.4f} | {v.diversity:.4f} | {v.frechet:.1f} |"
        )


HEAD = (
    "| model | asked class | sevens | no digit | JPEG bytes | ink | pixel std in a class | Frechet "
    "distance |\n"
    "|---|---|---|---|---|---|---|---|"
)


def judge_of(images: Tensor, labels: Tensor) -> Judge:
    """Trained once; the same for every run that is compared."""
    judge = Judge()
    if KEPT.is_file():
        judge.load_state_dict(load_file(KEPT))
        return judge.eval()
    judge = trained_judge(images, labels)
    KEPT.parent.mkdir(exist_ok=True)
    save_file(judge.state_dict(), KEPT)
    return judge


def drawn(model: str, per_class: int, seed: int, *, ode: bool = False) -> tuple[Tensor, Tensor]:
    """Pictures and the classes asked for, class after class."""
    policy = inference.load_policy(model)
    sampling = policy.modality.sampling(serialization.load(Path(model) / "config.json"), policy)
    plain = DiffusionSampling(
        temperature=0.0 if ode else 1.0,
        max_actions=sampling.max_actions,
        transition=sampling.transition,
        eta=sampling.eta,
        guidance=sampling.guidance,
        ode_steps=sampling.ode_steps,
    )
    requests = [Request(Prompt(str(label), label, draw=label), per_class) for label in range(10)]
    rollouts = policy.sample(requests, plain, seed=seed)
    labels = torch.tensor([rollouts.prompts[int(g)].inputs for g in rollouts.group_ids])
    return torch.stack(list(rollouts.completions)), labels


def judged(name: str, judge: Judge, images: Tensor, labels: Tensor, real: Tensor) -> Judged:
    with torch.no_grad():
        sevens = float((judge(images).argmax(dim=-1) == 7).double().mean())
    return Judged(name, verdict(judge, images, labels, real), sevens)


def sheet(file: Path, shown: Sequence[tuple[str, Tensor, Tensor]], per_class: int = 3) -> None:
    """A line for each model, some of each class side by side."""
    from gruppo.tracking.images import make_sheet

    cells = []
    for _, images, labels in shown:
        chosen = [
            n for label in range(10) for n in (labels == label).nonzero()[:per_class, 0].tolist()
        ]
        cells += [images[n] for n in chosen]
    picture, _ = make_sheet(cells, columns=len(cells) // len(shown))
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.save(file)


def newest() -> Path:
    """The latest finished run that was trained on the pretrained digits."""
    finished = Path("runs").glob("digits-[cs]*/final/COMPLETE")
    return max(finished, key=lambda file: file.stat().st_mtime).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="RUN", help="run folders or models; NAME=RUN names one"
    )
    parser.add_argument(
        "--compare", action="store_true", help="the pretrained digits and the newest run on them"
    )
    parser.add_argument("--per-class", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--ode", action="store_true", help="temperature 0, as evaluations draw")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sheet", type=Path)
    options = parser.parse_args(arguments)
    if options.compare:
        options.models += [f"before={PRETRAINED}", f"after={newest()}"]
    (images, labels), (held, asked) = split_images(*load_digits())
    judge = judge_of(images, labels)
    found = [judged("real digits, held out", judge, held, asked, images)]
    shown: list[tuple[str, Tensor, Tensor]] = [("real", held, asked)]
    print(HEAD)
    print(found[0].line(), flush=True)
    for given in options.models:
        name, _, model = given.rpartition("=")
        pictures, classes = drawn(model, options.per_class, options.seed, ode=options.ode)
        found.append(judged(name or model, judge, pictures, classes, images))
        shown.append((name or model, pictures, classes))
        print(found[-1].line(), flush=True)
    if options.sheet:
        sheet(options.sheet, shown)
    if options.json:
        rows: list[dict[str, Any]] = [
            {"name": f.name, "sevens_frac": f.sevens_frac, **asdict(f.said)} for f in found
        ]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
