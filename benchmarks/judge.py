"""A judge of generated digits that no reward shares, and what it says of many of them.

``python -m benchmarks.judge`` trains the judge and the reward's reader on the same digits and
compares them on held-out ones. The judge is no part of the package, so that no run can be rewarded
by it: its network (5 x 5 convolutions, batch normalisation, pooling by means), its augmentation
(turned, scaled, sheared, with noise) and its classes (an eleventh for what is no digit: blanks,
scraps, mixtures) are not the reader's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

from gruppo.core.images import apply_symmetry, mean_luma, quantize
from gruppo.data.digits import load_digits, split_images
from gruppo.rewards.images import jpeg_bytes

NO_DIGIT = 10


class Judge(nn.Module):
    """[b, 1, 28, 28] in [0, 1] to logits of 11 classes; ``features`` [b, 48] are what the last
    layer reads."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [
                nn.Conv2d(before, after, 5, padding=2, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
            layers += [nn.AvgPool2d(2)]
        self.trunk = nn.Sequential(*layers)
        self.pool = nn.Sequential(nn.Flatten(), nn.Linear(4 * width * 9, 48), nn.ReLU())
        self.head = nn.Linear(48, NO_DIGIT + 1)

    def features(self, images: Float[Tensor, "b 1 28 28"]) -> Float[Tensor, "b 48"]:
        return self.pool(self.trunk(images))

    def forward(self, images: Float[Tensor, "b 1 28 28"]) -> Float[Tensor, "b 11"]:
        return self.head(self.features(images))


@dataclass(frozen=True)
class Verdict:
    """What is said of generated digits beside real ones."""

    asked_frac: float
    """Share that the judge takes for the class asked for."""
    no_digit_frac: float
    jpeg_bytes: float
    ink: float
    diversity: float
    """Pixel standard deviation within a class."""
    frechet: float
    """Distance to the real digits in the judge's features."""


@torch.no_grad()
def accuracy(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images whose most likely class is their label."""
    nats = torch.stack(log_probabilities(module, list(images)))
    return float((nats.argmax(dim=-1) == labels).double().mean())


def verdict(
    judge: Judge,
    images: Float[Tensor, "n 1 28 28"],
    asked: Int[Tensor, "n"],
    real: Float[Tensor, "m 1 28 28"],
) -> Verdict:
    """Compare Frechet distances at equal numbers of images only."""
    images = quantize(images)
    found = judge.eval()(images).argmax(dim=-1)
    return Verdict(
        asked_frac=float((found == asked).double().mean()),
        no_digit_frac=float((found == NO_DIGIT).double().mean()),
        jpeg_bytes=sum(map(jpeg_bytes, images)) / len(images),
        ink=float(mean_luma(images).mean()),
        diversity=float(diversity(images, asked)),
        frechet=float(frechet_distance(judge.features(images), judge.features(real))),
    )


def trained_judge(images: Tensor, labels: Tensor, *, seed: int = 0, epochs: int = 24) -> Judge:
    torch.manual_seed(seed)
    others = no_digits(images, labels, torch.Generator().manual_seed(seed))
    images = torch.cat([images, others])
    labels = torch.cat([labels, torch.full((len(others),), NO_DIGIT)])
    judge = Judge()
    train_classifier(judge, images, labels, seed=seed, epochs=epochs, augment=warped)
    return judge


def trained_reader(
    images: Tensor, labels: Tensor, *, seed: int = 0, epochs: int = 20
) -> ImageClassifier:
    torch.manual_seed(seed)
    reader = ImageClassifier()
    train_classifier(reader, images, labels, seed=seed, epochs=epochs)
    return reader


def warped(images: Float[Tensor, "b 1 H W"], generator: torch.Generator) -> Tensor:
    """Turned by up to 12 degrees, scaled by 0.85 to 1.15, sheared and moved a little, with noise of
    0 to 0.05."""
    count = len(images)
    angle, shear, right, down = ((torch.rand(4, count, generator=generator) * 2 - 1).T * spread).T
    scale = 1 + 0.15 * (torch.rand(count, generator=generator) * 2 - 1)
    cos, sin = angle.cos() / scale, angle.sin() / scale
    rows = [torch.stack([cos, shear - sin, right], dim=1), torch.stack([sin, cos, down], dim=1)]
    grid = affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    noise = (
        torch.randn(images.shape, generator=generator)
        * 0.05
        * torch.rand(count, 1, 1, 1, generator=generator)
    )
    return (grid_sample(images, grid, align_corners=False) + noise).clamp(0, 1)


spread = torch.tensor([0.21, 0.15, 0.12, 0.12])
"""Radians, then shares of half an image."""


def no_digits(
    images: Float[Tensor, "N 1 H W"], labels: Int[Tensor, "N"], generator: torch.Generator
) -> Tensor:
    """A fifth as many images that are none: a third of a digit, two halves of two classes, and
    blanks."""
    some = torch.randperm(len(images), generator=generator)[: len(images) // 5]
    scraps, halves, blanks = images[some].clone().tensor_split([len(some) // 2, len(some) * 4 // 5])
    for n, image in enumerate(scraps):
        turned = apply_symmetry(
            image, n % 4
        )  # what is kept is the top, the left, the bottom or the right
        turned[:, 11:] = 0
        scraps[n] = apply_symmetry(turned, -n % 4)
    others = torch.randperm(len(images), generator=generator)[: len(halves)]
    own = labels[some[len(scraps) :][: len(halves)]]
    halves[:, :, 14:] = torch.where(
        (labels[others] == own)[:, None, None, None], 0, images[others][:, :, 14:]
    )
    grey = torch.rand(len(blanks), 1, 1, 1, generator=generator) ** 3
    return torch.cat([scraps, halves, grey.expand_as(blanks).clone()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge-epochs", type=int, default=24)
    parser.add_argument("--reader-epochs", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    (images, labels), (held, asked) = split_images(*load_digits())
    result: dict[str, object] = {"digits": len(images), "held_out": len(held)}
    for name, train, epochs in (
        ("reader", trained_reader, options.reader_epochs),
        ("judge", trained_judge, options.judge_epochs),
    ):
        began = time.process_time()
        module = train(images, labels, seed=options.seed, epochs=epochs)
        result[f"{name}_cpu_s"] = round(time.process_time() - began, 1)
        result[f"{name}_parameters"] = sum(p.numel() for p in module.parameters())
        result[f"{name}_accuracy"] = round(accuracy(module, held, asked), 4)
    scraps = no_digits(held, asked, torch.Generator().manual_seed(options.seed + 1))
    result["judge_no_digit_accuracy"] = round(
        accuracy(module, scraps, torch.full((len(scraps),), NO_DIGIT)), 4
    )
    some = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[
        : len(held)
    ]  # they come by class
    real = asdict(verdict(module, held, asked, images[some]))
    print(
        json.dumps(
            result | {"real": {name: round(value, 4) for name, value in real.items()}}, indent=1
        )
    )


def diversity(images: Float[Tensor, "B C H W"], labels: Int[Tensor, "B"]) -> Float[Tensor, ""]:
    """Standard deviation of each pixel (ddof 1) over the images of a class; mean over pixels, then
    over classes.

    Classes with a single image are left out; NaN where there are no others. float64.
    """
    classes = [images[labels == label].double() for label in labels.unique()]
    spreads = [members.std(dim=0).mean() for members in classes if len(members) > 1]
    return torch.stack(spreads).mean() if spreads else torch.tensor(torch.nan, dtype=torch.float64)


def frechet_distance(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
    """|mx - my|^2 + tr(Cx + Cy - 2 (Cx Cy)^(1/2)) of two sets of features, covariances with ddof 1.
    float64.

    The squared 2-Wasserstein distance of two normals; of Inception features it is FID (arXiv
    1706.08500). It grows with few samples: compare at equal counts.
    """
    x, y = x.double(), y.double()
    cx, cy = torch.cov(x.T).reshape(x.shape[1], -1), torch.cov(y.T).reshape(y.shape[1], -1)
    values, vectors = torch.linalg.eigh(cx)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T  # Cx^(1/2)
    # Symmetric, with the eigenvalues of Cx Cy.
    shared = torch.linalg.eigvalsh(root @ cy @ root).clamp(min=0).sqrt().sum()  # tr (Cx Cy)^(1/2)
    return (x.mean(dim=0) - y.mean(dim=0)).square().sum() + cx.trace() + cy.trace() - 2 * shared


if __name__ == "__main__":
    main()
