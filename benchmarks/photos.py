"""What a restorer trained by rewards does to held-out photographs: ``python -m benchmarks.photos
NAME=RUN [...]``.

Beside each run's deterministic pictures stand its own network without any action, the best filter
of detail with one gain a band for all pictures, and heads trained by back-propagation in place of
rewards: of the pixels, and of a stand-in for bytes. Bytes are those of JPEG files of quality 90
without their header.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import LUMA, charbonnier, detail_bands, psnr, quantize
from gruppo.core.schedules import warmup_decay
from gruppo.data.open import open_source
from gruppo.data.source import IndexedSource
from gruppo.modalities.restoration import RestorationPolicy, load_restorer
from gruppo.rewards.images import jpeg_bytes
from gruppo.types import GruppoError

QUALITY = 90
DATA = "photos:noise=25"
RESAMPLES = 2000
PART = 48
"""Pictures that a network is asked for together."""

Pictures = Float[Tensor, "N C H W"]


# --- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Measures:
    """Of each picture."""

    psnr: Float[Tensor, "N"]
    bytes: Float[Tensor, "N"]


@dataclass(frozen=True)
class Row:
    """One line of the table. Differences are to the network without any action, with 95% intervals
    over pictures."""

    name: str
    psnr: float
    d_psnr: float
    d_psnr_interval: tuple[float, float]
    bytes: float
    saved_frac: float
    saved_interval: tuple[float, float]
    cpu_s: float = 0.0
    """Of what the benchmark itself trained or searched."""
    gains: tuple[float, ...] = ()

    def line(self) -> str:
        (low, high), (least, most) = self.d_psnr_interval, self.saved_interval
        return (
            f"| {self.name} | {self.psnr:.2f} | {self.d_psnr:+.3f} [{low:+.3f}, {high:+.3f}] | "
            f"{self.bytes:.0f} "
            f"| {self.saved_frac:.1%} [{least:.1%}, {most:.1%}] | {self.cpu_s:.0f} |"
        )


HEAD = (
    "| pictures | PSNR, dB | over the network | JPEG bytes | fewer bytes than the network | CPU s "
    "here |\n"
    "|---|---|---|---|---|---|"
)


def measured(pictures: Pictures, clean: Pictures) -> Measures:
    """As files of 8 bits would hold them."""
    saved = quantize(pictures)
    return Measures(psnr(saved, clean), sizes(saved))


def sizes(pictures: Pictures) -> Float[Tensor, "N"]:
    """Bytes of each one's JPEG file, without the header."""
    header = _header(tuple(pictures.shape[1:]))
    return torch.tensor(
        [jpeg_bytes(picture, QUALITY) - header for picture in pictures], dtype=torch.float64
    )


@cache
def _header(shape: tuple[int, ...]) -> int:
    return jpeg_bytes(torch.zeros(*shape), QUALITY)


def row_of(name: str, found: Measures, base: Measures, **more: Any) -> Row:
    """Paired: the same pictures are drawn again for both sides. Bytes are compared in sum, PSNR in
    the mean."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(base.psnr), (RESAMPLES, len(base.psnr)), generator=generator)
    apart = found.psnr - base.psnr
    saved = 1 - found.bytes[drawn].sum(dim=1) / base.bytes[drawn].sum(dim=1)
    return Row(
        name,
        float(found.psnr.mean()),
        float(apart.mean()),
        _interval(apart[drawn].mean(dim=1)),
        float(found.bytes.mean()),
        float(1 - found.bytes.sum() / base.bytes.sum()),
        _interval(saved),
        **more,
    )


def _interval(of: Tensor) -> tuple[float, float]:
    low, high = of.quantile(torch.tensor([0.025, 0.975], dtype=of.dtype)).tolist()
    return low, high


# --- one filter for all pictures ------------------------------------------------------------------


def best_filter(base: Pictures, clean: Pictures, least_psnr: float) -> tuple[float, ...]:
    """Gains, the same for all pictures, with the fewest bytes at that mean PSNR or above; 0 where
    none is better.

    An oracle: the pictures that it is judged by choose it. Searched on a grid of 0.2, and of 0.05
    around its best.
    """
    details = detail_bands(base)
    best = (0.0,) * details.shape[1]
    fewest = float(sizes(base).sum())
    for around in (COARSE, FINE):
        first = best if around is FINE else (0.0,) * len(best)
        values = [[one + apart for apart in around] for one in first]
        for gains in _by_bytes(base, details, clean, values, least_psnr)[:TRIES]:
            found = measured(filtered(base, details, gains), clean)
            if float(found.psnr.mean()) >= least_psnr:
                if float(found.bytes.sum()) < fewest:
                    best, fewest = tuple(gains.tolist()), float(found.bytes.sum())
                break
    return best


COARSE, FINE = [n / 5 for n in range(-6, 2)], [n / 20 for n in range(-3, 4)]
TRIES = 60
"""Points of a grid whose files are written, the smallest first, until one keeps the PSNR."""


def _by_bytes(
    base: Pictures,
    details: Tensor,
    clean: Pictures,
    values: Sequence[Sequence[float]],
    least_psnr: float,
) -> Float[Tensor, "G K"]:
    """Those points of the grid that keep the PSNR, the fewest bytes first; both as they are before
    rounding.

    A file holds luma and chroma apart, so that their gains cost bytes that add up: 2 x n^2 files of
    each picture, not n^4. Squared errors are quadratic in all gains.
    """
    parts = []
    for first in range(0, len(values), 2):
        points = torch.tensor(
            list(itertools.product(*values[first : first + 2])), dtype=torch.float64
        )
        own = details[:, first : first + 2]
        parts.append(
            (points, torch.stack([sizes(filtered(base, own, point)).sum() for point in points]))
        )
    grid = torch.stack(
        [torch.cat(point) for point in itertools.product(*(points for points, _ in parts))]
    )
    size = torch.stack(
        [torch.stack(one).sum() for one in itertools.product(*(cost for _, cost in parts))]
    )
    d, apart = details.flatten(2).double(), (base - clean).flatten(1).double()
    cross = torch.einsum("nkp,np->nk", d, apart)
    error = torch.einsum("gk,nkl,gl->gn", grid, d @ d.transpose(1, 2), grid) + 2 * grid @ cross.T
    error = (error + apart.square().sum(dim=1)) / apart.shape[1]
    keeps = (-10 * error.log10()).mean(dim=1) >= least_psnr - 0.01
    return grid[keeps][size[keeps].argsort()]


def filtered(base: Pictures, details: Tensor, gains: Float[Tensor, "K"]) -> Pictures:
    """y + sum_k g_k band_k(y)"""
    return base + (gains.to(base)[:, None, None, None] * details).sum(dim=1)


# --- heads by back-propagation --------------------------------------------------------------------


def taught(
    policy: RestorationPolicy,
    loss: Callable[[Pictures, Pictures], Tensor],
    data: str,
    *,
    steps: int = 200,
    batch: int = 16,
    lr: float = 5e-3,
    seed: int = 0,
) -> RestorationPolicy:
    """A copy whose head begins anew over the frozen network, and goes down the gradient of a loss
    of its pictures."""
    policy = policy.at(copy.deepcopy(policy.module))
    policy.module.requires_grad_(False)
    head: Any = policy.module.action
    torch.manual_seed(seed)
    for layer in head.head.children():
        layer.reset_parameters()
    torch.nn.init.zeros_(head.head.conv_out.weight)
    torch.nn.init.zeros_(head.head.conv_out.bias)
    weights = [weight.requires_grad_() for weight in head.head.parameters()]
    optimiser = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    pairs = opened(data, seed)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = warmup_decay(
            step, peak=lr, warmup=10, total=steps, decay="cosine"
        )
        prompts = pairs.take(batch)
        noisy = torch.stack([prompt.inputs for prompt in prompts])
        clean = torch.stack([prompt.target for prompt in prompts])
        optimiser.zero_grad()
        loss(policy.output_of(noisy), clean).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
    return policy


def of_pixels(pictures: Pictures, clean: Pictures) -> Tensor:
    """Charbonnier: fidelity alone."""
    return charbonnier(pictures, clean).mean()


def of_rate(weight: float) -> Callable[[Pictures, Pictures], Tensor]:
    """-PSNR + weight x the stand-in for kB: what has a gradient in place of a JPEG file."""

    def loss(pictures: Pictures, clean: Pictures) -> Tensor:
        error = (pictures - clean).square().flatten(1).mean(dim=1)
        return (10 * error.log10() + weight * rate(pictures)).mean()

    return loss


LUMA_STEPS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
"""ITU-T T.81, table K.1, at quality 50; a fifth of it at 90. Chroma's is 99 but in its first
corner."""


def rate(pictures: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N"]:
    """sum log2(1 + |coefficient / quantisation step|) / 8000 of the 8 x 8 cosine transforms that a
    JPEG file holds."""
    y = (pictures * torch.tensor(LUMA)[:, None, None]).sum(dim=1, keepdim=True)
    blue, red = (pictures[:, 2:] - y) * 0.564, (pictures[:, :1] - y) * 0.713
    chroma = torch.nn.functional.avg_pool2d(torch.cat([blue, red], dim=1), 2)
    steps = (torch.tensor(LUMA_STEPS) / 5).round().clamp(min=1)
    coarse = torch.full((8, 8), 20.0)
    corner = torch.tensor(
        [[17.0, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]
    )
    coarse[:4, :4] = (corner / 5).round()
    return (_bits(y, steps) + _bits(chroma, coarse)) / 8000


def _bits(planes: Float[Tensor, "N P H W"], steps: Float[Tensor, "8 8"]) -> Float[Tensor, "N"]:
    cosines = _cosines()
    blocks = (planes * 255).unfold(2, 8, 8).unfold(3, 8, 8)  # [N, P, h, w, 8, 8]
    return (1 + (cosines @ blocks @ cosines.T / steps).abs()).log2().flatten(1).sum(dim=1)


@cache
def _cosines() -> Float[Tensor, "8 8"]:
    """Orthonormal."""
    n = torch.arange(8.0)
    found = (math.pi * (2 * n + 1) * n[:, None] / 16).cos() / 2
    found[0] /= math.sqrt(2)
    return found


# --- a run ----------------------------------------------------------------------------------------


@torch.no_grad()
def shown(policy: RestorationPolicy, noisy: Pictures) -> tuple[Pictures, Pictures]:
    """What the network makes of each without any action, and the deterministic picture."""
    parts = noisy.split(PART)
    return (
        torch.cat([policy.output_of(part, "base") for part in parts]),
        torch.cat([policy.output_of(part) for part in parts]),
    )


def compared(
    name: str,
    policy: RestorationPolicy,
    noisy: Pictures,
    clean: Pictures,
    *,
    data: str = DATA,
    teach_steps: int = 200,
    rate_weight: float = 5.0,
) -> Iterator[Row]:
    """The table's rows of one run, one after the other."""
    base, restored = shown(policy, noisy)
    alone, found = measured(base, clean), measured(restored, clean)
    yield row_of("degraded", measured(noisy, clean), alone)
    yield row_of(f"{name}: network alone", alone, alone)
    yield row_of(f"{name}: restored", found, alone)
    floors = {
        "at this PSNR": float(found.psnr.mean()),
        "at the network's": float(alone.psnr.mean()),
    }
    for what, floor in floors.items():
        began = time.process_time()
        gains = best_filter(base, clean, floor)
        spent = time.process_time() - began
        yield row_of(
            f"{name}: best filter {what}", _by(gains, base, clean), alone, cpu_s=spent, gains=gains
        )
    losses = (
        {"pixels": of_pixels, "stand-in for bytes": of_rate(rate_weight)} if teach_steps else {}
    )
    for what, loss in losses.items():
        began = time.process_time()
        other = taught(policy, loss, data, steps=teach_steps)
        spent = time.process_time() - began
        by = measured(shown(other, noisy)[1], clean)
        yield row_of(f"{name}: head by back-propagation, {what}", by, alone, cpu_s=spent)


def _by(gains: Sequence[float], base: Pictures, clean: Pictures) -> Measures:
    return measured(filtered(base, detail_bands(base), torch.tensor(gains)), clean)


def held_out(data: str = DATA) -> tuple[Pictures, Pictures]:
    """All crops of the held-out photographs, degraded and clean."""
    prompts = opened(data, 0).held_out(10**6)
    if not prompts:
        raise GruppoError(f"data={data!r} holds no image out. Give data of more images.")
    return torch.stack([prompt.inputs for prompt in prompts]), torch.stack(
        [prompt.target for prompt in prompts]
    )


def opened(data: str, seed: int) -> IndexedSource:
    """Degraded images with their clean ones."""
    pairs = open_source(data, seed=seed)
    if not isinstance(pairs.take(1)[0].inputs, torch.Tensor):
        raise GruppoError(f"data={data!r} are no pairs of images; write {DATA!r}.")
    return pairs


def sheet(
    path: Path, policy: RestorationPolicy, noisy: Pictures, clean: Pictures, *, count: int = 8
) -> None:
    """Some crops side by side: degraded, the network alone, restored, clean."""
    from gruppo.tracking.images import make_sheet

    chosen = torch.linspace(0, len(noisy) - 1, count).long()
    columns = noisy[chosen], *shown(policy, noisy[chosen]), clean[chosen]
    cells = [quantize(column[n : n + 1])[0] for n in range(count) for column in columns]
    make_sheet(cells, columns=len(columns))[0].save(path)


def final_of(run: Path) -> Path:
    """A run's folder, or that of the policy itself."""
    return run / "final" if (run / "final").is_dir() else run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; NAME=RUN names one")
    parser.add_argument("--data", default=DATA)
    parser.add_argument(
        "--teach-steps", type=int, default=200, help="of each head by back-propagation; 0 for none"
    )
    parser.add_argument(
        "--rate-weight", type=float, default=5.0, help="dB that a kB of the stand-in costs"
    )
    parser.add_argument(
        "--sheet",
        type=Path,
        help="a PNG of some crops of the first run, side by side; no table then",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    noisy, clean = held_out(options.data)
    if options.sheet:
        return sheet(
            options.sheet,
            load_restorer(final_of(Path(options.runs[0].rpartition("=")[2]))),
            noisy,
            clean,
        )
    print(f"{len(noisy)} crops of {noisy.shape[-2]} x {noisy.shape[-1]}\n{HEAD}", flush=True)
    found: list[Row] = []
    for given in options.runs:
        name, _, run = given.rpartition("=")
        rows = compared(
            name or Path(run).name,
            load_restorer(final_of(Path(run))),
            noisy,
            clean,
            data=options.data,
            teach_steps=options.teach_steps,
            rate_weight=options.rate_weight,
        )
        for row in rows:
            if found and row.name == found[0].name:
                continue
            print(row.line(), flush=True)
            found.append(row)
    if options.json:
        options.json.write_text(
            json.dumps([asdict(row) for row in found], indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
