"""Where weights rest while nothing computes with them."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from gruppo.types import GruppoError

Place = Literal["device", "cpu", "disk"]


class Shelf(Protocol):
    """Tensors by name. What is changed in them in place stays changed."""

    def read(self) -> dict[str, Tensor]: ...


class MemoryShelf:
    """These very tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def read(self) -> dict[str, Tensor]:
        return dict(self._tensors)


class DiskShelf:
    """A safetensors file that is mapped into memory while it is read, so that the system may drop its pages.

    The file has no name in the folder: its space is free again when this object or the process ends, however it ends.
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        try:
            self._handle = _nameless_file(tensors, folder)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise GruppoError(
                f"the reference could not be written to {folder}: {reason}. Give a --runs-dir with free space, or set "
                "--reference.place device."
            ) from error
        weakref.finalize(self, os.close, self._handle)
        self._like = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}

    def read(self) -> dict[str, Tensor]:
        """Each tensor mapped by itself: what is let go of needs no memory."""
        with os.fdopen(os.dup(self._handle), "r+b") as file:
            file.seek(0)
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
            places = {name: start + header[name]["data_offsets"][0] for name in self._like}
            return {name: _mapped(file, places[name], like) for name, like in self._like.items()}


def _mapped(file: Any, place: int, like: Tensor) -> Tensor:
    raw = np.memmap(file, np.uint8, "r+", offset=place, shape=(like.nbytes,))
    return torch.from_numpy(raw).view(like.dtype).view(like.shape)


def _nameless_file(tensors: Mapping[str, Tensor], folder: Path) -> int:
    """A file by its handle alone."""
    handle, name = tempfile.mkstemp(prefix=".gruppo-reference-", suffix=".safetensors", dir=folder)
    try:
        save_file({n: tensor.detach().cpu().contiguous() for n, tensor in tensors.items()}, name)
        # save_file may have put another file in its place. Windows unlinks no open file, but one on its last close.
        return os.open(name, os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0))
    finally:
        os.close(handle)
        if not hasattr(os, "O_TEMPORARY"):
            os.unlink(name)


def shelf_at(place: Place, tensors: Mapping[str, Tensor], folder: Path) -> Shelf:
    """A shelf with copies of the tensors, where ``place`` says."""
    if place == "disk":
        return DiskShelf(tensors, folder)
    device = torch.device("cpu") if place == "cpu" else None
    return MemoryShelf({name: tensor.detach().to(device, copy=True) for name, tensor in tensors.items()})


# --- modules whose weights are elsewhere -----------------------------------------------------------------------------


def empty(module: nn.Module) -> None:
    """Leave no weight in the module."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)


@contextmanager
def filled(module: nn.Module, shelf: Shelf) -> Iterator[None]:
    """Within, an empty module has the weights of the shelf; a pass of many pieces fills it once."""
    own = dict(module.named_parameters())
    if any(parameter.numel() for parameter in own.values()):
        yield
        return
    held = shelf.read()
    with lent(own, {name: held.pop(name).to(p.device, p.dtype) for name, p in own.items()}):
        yield


@contextmanager
def lent(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the parameters are the tensors, which fit them in device and dtype.

    Autograd takes no notice: a forward of before can still be gone back through after.
    """
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = tensors[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]
