"""A small classifier of small images, to be frozen and used as a reward, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from gruppo.rewards.images import log_probabilities
from gruppo.seeds import generator_at
from gruppo.types import DataError

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Images [b, C, H, W] to other images of the same classes."""


class Reader(nn.Module):
    """Three 3 x 3 convolutions, each with the largest of its neighbours kept: images [b, C, H, W] to logits."""

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1),
            nn.GELU(),
            nn.AdaptiveMaxPool2d(3),
            nn.Flatten(),
        )
        self.head = nn.Linear(36 * width, classes)

    def forward(self, images: Float[Tensor, "b C H W"]) -> Float[Tensor, "b classes"]:
        return self.head(self.trunk(images))

    def save(self, path: Path) -> None:
        safetensors.torch.save_file(self.state_dict(), path)

    def load(self, path: Path) -> Reader:
        """Its own weights, all of them: a file that lacks one or holds another is refused."""
        try:
            self.load_state_dict(safetensors.torch.load_file(path))
        except Exception as problem:  # safetensors and torch have errors of their own for files that do not fit
            reason = " ".join(str(problem).split())
            raise DataError(f"{path} does not hold a reader's weights: {reason} Remove it to train anew.") from problem
        return self


def fit(
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
    """Train by AdamW on the cross-entropy, at a one-cycle rate; ``module`` itself, in eval mode.

    Batches and what ``augment`` draws depend on the seed alone, and so do the weights, if they are initialised by it.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=1e-2)
    steps = epochs * -(-len(images) // batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    augment = augment or shifted
    module.train()
    for epoch in range(epochs):
        generator = generator_at(seed, "fit", epoch)
        for rows in torch.randperm(len(images), generator=generator).split(batch):
            loss = cross_entropy(module(augment(images[rows], generator)), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
    return module.eval()


def shifted(images: Float[Tensor, "b C H W"], generator: torch.Generator, pixels: int = 2) -> Tensor:
    """Each image moved by up to so many pixels down and to the right or back, black where it came from."""
    rows, columns = (torch.arange(side) for side in images.shape[-2:])
    moves = torch.randint(2 * pixels + 1, (2, len(images)), generator=generator)
    wide = pad(images, [pixels] * 4)
    rows, columns = moves[0][:, None] + rows, moves[1][:, None] + columns  # [b, H], [b, W]
    place = torch.arange(len(images))[:, None, None]
    return wide.movedim(1, -1)[place, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def accuracy(module: nn.Module, images: Float[Tensor, "N C H W"], labels: Int[Tensor, "N"]) -> float:
    """Share of images whose likeliest class is theirs."""
    likeliest = torch.stack(log_probabilities(module, list(images))).argmax(dim=-1)
    return float((likeliest == labels).double().mean())
