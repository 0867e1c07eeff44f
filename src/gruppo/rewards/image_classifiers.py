"""Frozen image classifiers as rewards, and a small classifier with its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from gruppo.core.images import quantize
from gruppo.rewards.images import NAN, Image, ImageReward
from gruppo.seeds import generator_at
from gruppo.types import DataError

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Images [b, C, H, W] to other images of the same classes."""
BATCH = 256
"""Images that are classified together."""


def classifier(
    module: nn.Module,
    *,
    label: int | None = None,
    floor: float = float("-inf"),
    name: str = "classifier",
) -> ImageReward:
    """Log-probability of a class under a frozen classifier, in nats.

    ``module`` maps images [b, C, H, W] in [0, 1] to logits [b, classes]. The class is ``label``,
    the same for all, or each row's in the column ``label`` (None there: not scored). ``floor``: the
    lowest reward, so that a hopeless image does not outweigh all others. What the classifier takes
    for the class earns as much as the class does: evaluate with another one, of another
    architecture.
    """
    module.requires_grad_(False).eval()

    def score(image: Image, nats: Float[Tensor, "classes"], index: Any) -> float | None:
        if index is None:
            return None
        return max(float(nats[int(index)]), floor) if image.isfinite().all() else NAN

    def by_column(images: Sequence[Image], label: Sequence[Any], **_: Any) -> list[float | None]:
        return list(map(score, images, log_probabilities(module, images), label))

    def fixed(images: Sequence[Image], **_: Any) -> list[float | None]:
        return by_column(images, [label] * len(images))

    reward: Any = by_column if label is None else fixed
    reward.__name__ = name
    reward.timeout_s = None  # as of per_image(is_network=True)
    return reward


@torch.no_grad()
def log_probabilities(module: nn.Module, images: Sequence[Image]) -> list[Float[Tensor, "classes"]]:
    """Log-probabilities of all classes, in nats, for each image as it would be saved; float64 on
    the CPU."""
    module.eval()  # another owner may have set it to train
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    nats: list[Tensor] = []
    for start in range(0, len(images), BATCH):
        stack = torch.stack([quantize(image) for image in images[start : start + BATCH]]).to(device)
        nats += module(stack).double().log_softmax(dim=-1).cpu()
    return nats


class ImageClassifier(nn.Module):
    """Small convolutional classifier: three 3 x 3 convolutions with max pooling. Images [b, C, H,
    W] to logits."""

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise((channels, width, 2 * width, 4 * width)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)]
        self.trunk = nn.Sequential(*layers[:-1], nn.AdaptiveMaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(36 * width, classes)

    def forward(self, images: Float[Tensor, "b C H W"]) -> Float[Tensor, "b classes"]:
        return self.head(self.trunk(images))

    def load(self, path: Path) -> ImageClassifier:
        """Load all weights; raise DataError if the file does not fit."""
        try:
            self.load_state_dict(safetensors.torch.load_file(path))
        except Exception as error:  # safetensors and torch raise various errors
            reason = " ".join(str(error).split())
            raise DataError(
                f"{path} is not a saved classifier: {reason} Remove it to train a new one."
            ) from error
        return self


def train_classifier(
    module: nn.Module,
    images: Float[Tensor, "N C H W"],
    labels: Int[Tensor, "N"],
    *,
    seed: int,
    epochs: int = 20,
    lr: float = 5e-3,
    batch: int = 50,
    augment: Augment | None = None,
) -> nn.Module:
    """Train by AdamW on the cross-entropy, with a one-cycle learning rate; returns ``module`` in
    eval mode.

    The order of batches and the augmentation depend on the seed alone; so do the weights, if
    initialized by it.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=1e-2)
    steps = epochs * -(-len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    module.train()
    for epoch in range(epochs):
        generator = generator_at(seed, "fit", epoch)
        for rows in torch.randperm(len(images), generator=generator).split(batch):
            loss = cross_entropy(
                module((augment or random_shift)(images[rows], generator)), labels[rows]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return module.eval()


def random_shift(
    images: Float[Tensor, "b C H W"], generator: torch.Generator, pixels: int = 2
) -> Tensor:
    """Shift each image by up to ``pixels`` in each direction, with black borders."""
    height, width = images.shape[-2:]
    places = torch.randint(2 * pixels + 1, (2, len(images)), generator=generator).T.tolist()
    padded = pad(images, [pixels] * 4)
    return torch.stack(
        [
            image[:, top : top + height, left : left + width]
            for image, (top, left) in zip(padded, places, strict=True)
        ]
    )
