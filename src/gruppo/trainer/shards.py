"""Tensors in files of several ranks: each writes its own slices, and any number of ranks reads
those that it needs.

``step_000010/model-shard-00002-of-00004.safetensors`` is in the format of
``torch.distributed.checkpoint``'s Hugging Face storage.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gruppo import distributed as dist
from gruppo.distributed.sharding import ROOT

_HOOKS = {
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
}
_HOOKS |= {"_forward_pre_hooks_with_kwargs", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"}
"""Those that FSDP adds to modules. None of them is called in a save."""


class Shard(NamedTuple):
    """A slice of a tensor."""

    data: Tensor
    offset: list[int]


def own_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """What this rank has to write; of equal copies, the first rank that has one writes it. Slices
    are in host memory."""
    sharded: dict[str, Any] = only_sharded(tensors)
    shards = {}
    for name, tensor in tensors.items():
        if name not in sharded:
            if dist.is_main():
                shards[name] = Shard(tensor.detach().contiguous(), [0] * tensor.dim())
            continue
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = sharded[name].device_mesh, sharded[name].placements
        coordinates = zip(mesh.get_coordinate() or (), placements, strict=True)
        is_copy = any(index for index, kind in coordinates if kind.is_replicate())
        local = sharded[name].to_local()
        if local.numel() and not is_copy:
            _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
            shards[name] = Shard(local.detach().cpu().contiguous(), [*offset])
    return shards


def only_sharded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that are divided among ranks."""
    if "torch.distributed.tensor" not in sys.modules:  # whose import takes a second
        return {}
    from torch.distributed.tensor import DTensor

    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def read(folder: Path, name: str, sharded: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Tensors of ``name.safetensors`` or of its shards; None if there are neither.

    Of a tensor that is in ``sharded``, a DTensor, only this rank's slice is read, and returned as
    such a DTensor.
    """
    file = folder / f"{name}.safetensors"
    paths = [file] if file.is_file() else sorted(folder.glob(f"{name}-shard-*-of-*.safetensors"))
    if not paths:
        return None
    if paths == [file] and not sharded:
        return load_file(file)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystem

    class OneKind(FileSystem):
        def ls(self, path: str | os.PathLike[str]) -> list[str]:
            return [str(path) for path in paths]

    reader = dcp.HuggingFaceStorageReader(str(folder))
    reader.fs = OneKind()
    tensors: dict[str, Any] = {}
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    for key, saved in metadata.items():
        if sum(prod(chunk.sizes) for chunk in saved.chunks) != prod(saved.size):
            raise ValueError(f"shards of {key} are missing")
        like, dtype = sharded.get(key), saved.properties.dtype
        if like is None or like.shape != saved.size:
            tensors[key] = torch.empty(saved.size, dtype=dtype)
        else:  # made like the other one, so that it is offloaded where that is
            tensors[key] = torch.empty_like(like, dtype=dtype, requires_grad=False)
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # that there are no ranks, where there are none
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # not an Exception
        raise ValueError(f"{paths[0].name}: {next(iter(error.failures.values()))[0]}") from None
    return tensors


@contextmanager
def whole_parameters(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """On the main rank and for the length of the block, turn a sharded module into a plain one. A
    collective.

    ``names``: of the parameters that are then whole, on the CPU. What FSDP adds to modules is gone
    too: a class of its own, which a save would write into a config, and hooks, without which they
    can be copied.
    """
    whole: dict[Any, nn.Parameter] = {}
    sharded: Any = only_sharded({n: p for n, p in module.named_parameters() if n in names})
    with dist.fail_together():
        for parameter in sharded.values():
            full = parameter.detach().full_tensor()
            if dist.is_main():
                whole[parameter] = nn.Parameter(full.cpu(), requires_grad=parameter.requires_grad)
    with _plain(module, whole):
        yield


@contextmanager
def _plain(module: nn.Module, whole: Mapping[Any, nn.Parameter]) -> Iterator[None]:
    """Put whole parameters in place of sharded ones, and take off what FSDP has added to
    modules."""
    kept = [(part, type(part), dict(vars(part))) for part in module.modules() if whole]
    try:
        for part, kind, own in kept:
            attributes = vars(part)
            attributes["_parameters"] = {
                name: p if p is None else whole.get(p, p) for name, p in own["_parameters"].items()
            }
            for name in _HOOKS & own.keys():
                attributes[name] = type(own[name])()
            for name in own:
                if name.startswith(("__composable_api", ROOT)):
                    del attributes[name]
            if kind.__name__.startswith("FSDP"):
                part.__class__ = kind.__bases__[1]
        yield
    finally:
        for part, kind, own in kept:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(own)
