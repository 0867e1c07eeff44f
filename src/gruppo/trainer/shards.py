"""Tensors in files of several ranks: each writes its own slices, and any number of ranks reads those that it needs.

step_000010/model-shard-00002-of-00004.safetensors    the metadata has offset and whole shape of each slice
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
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
    """A slice of a tensor, in host memory."""

    data: Tensor
    offset: list[int]
    shape: list[int]
    """Of the whole tensor."""


class Part(NamedTuple):
    """A slice of a tensor in an open file."""

    file: Any
    offset: list[int]
    size: list[int]


def own_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Copy what this rank has to write to host memory; of equal copies, the first rank that has one writes it."""
    from torch.distributed.tensor import DTensor

    shards = {}
    for name, tensor in tensors.items():
        local, offset, is_written = tensor, [0] * tensor.dim(), dist.is_main()
        if isinstance(tensor, DTensor):
            local, offset = tensor.to_local(), own_slice(tensor)[0]
            place = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
            is_written = local.numel() > 0 and all(
                index == 0 for index, kind in place if kind.is_replicate()
            )
        if is_written:
            # a copy even on a CPU: training goes on while it is written
            data = local.detach().to("cpu", copy=True).contiguous()
            shards[name] = Shard(data, offset, [*tensor.shape])
    return shards


def only_sharded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that are divided among ranks."""
    if "torch.distributed.tensor" not in sys.modules:  # whose import takes a second
        return {}
    from torch.distributed.tensor import DTensor

    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}


def own_slice(tensor: Any) -> tuple[list[int], list[int]]:
    """Offset and size of this rank's slice of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return [*offset], [*size]


def read(folder: Path, name: str, sharded: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Tensors of ``name.safetensors`` or of its shards; None if there are neither.

    Of a tensor that is in ``sharded``, a DTensor, only this rank's slice is read, and returned as such a DTensor.
    """
    tensors: dict[str, Any] = {}
    if not (paths := paths_of(folder, name)):
        return None
    with opened(paths) as (parts, shapes):
        for key, found in parts.items():
            like, shape = sharded.get(key), shapes[key]
            if sum(prod(part.size) for part in found) != prod(shape):
                raise ValueError(f"shards of {key} are missing")
            if like is None or [*like.shape] != shape:
                tensors[key] = assembled(key, found, [0] * len(shape), shape)
            else:
                own = assembled(key, found, *own_slice(like))
                # made like the other one, so that it is offloaded where that is
                tensors[key] = torch.empty_like(like, dtype=own.dtype, requires_grad=False)
                tensors[key].to_local().copy_(own)
                del own  # before the next one is read
    return tensors


def paths_of(folder: Path, name: str) -> list[Path]:
    """``name.safetensors``, or its shards."""
    whole = folder / f"{name}.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob(f"{name}-shard-*-of-*.safetensors"))


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[tuple[dict[str, list[Part]], dict[str, list[int]]]]:
    """Open safetensors files; yield the parts of each tensor, and its whole shape."""
    parts: dict[str, list[Part]] = {}
    shapes: dict[str, list[int]] = {}
    with ExitStack() as stack:
        for path in paths:
            file: Any = stack.enter_context(safe_open(path, framework="pt"))
            places = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118  # not a mapping
                size = file.get_slice(key).get_shape()
                offset, shapes[key] = (
                    json.loads(places[key]) if key in places else ([0] * len(size), size)
                )
                parts.setdefault(key, []).append(Part(file, offset, size))
        yield parts, shapes


def assembled(name: str, parts: Sequence[Part], offset: list[int], size: list[int]) -> Tensor:
    """Return the slice of a tensor at ``offset``, from what the parts have of it."""
    result: Tensor | None = None
    for part in parts:
        # part and slice overlap from low to high, in each dimension
        low = [max(a, b) for a, b in zip(offset, part.offset, strict=True)]
        ends = zip(offset, size, part.offset, part.size, strict=True)
        high = [min(a + length, b + own) for a, length, b, own in ends]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        if (
            low == part.offset
            and [b - a for a, b in zip(low, high, strict=True)] == part.size == size
        ):
            return part.file.get_tensor(name)
        piece = part.file.get_slice(name)[ranges(low, high, part.offset)]
        result = torch.empty(size, dtype=piece.dtype) if result is None else result
        result[ranges(low, high, offset)] = piece
    # a rank may have none of a tensor with fewer rows than ranks
    return parts[0].file.get_tensor(name).new_empty(size) if result is None else result


def ranges(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


@contextmanager
def whole_parameters(module: nn.Module, folder: Path, names: Collection[str]) -> Iterator[None]:
    """On the main rank and for the length of the block, turn a sharded module into a plain one. A collective.

    ``names``: of the parameters that are then whole. One tensor at a time is gathered, and mapped from a file in
    ``folder``, so that a model larger than the memory of one machine can be written. What FSDP adds to modules is gone
    too: a class of its own, which a save would write into a config, and hooks, without which they can be copied.
    """
    place, whole = folder / f".whole.tmp-{os.getpid()}", dict[nn.Parameter, nn.Parameter]()
    sharded = only_sharded({name: p for name, p in module.named_parameters() if name in names})
    kept: list[tuple[nn.Module, type, dict[str, Any]]] = []
    failure: Exception | None = None
    try:
        for number, parameter in enumerate(sharded.values()):
            one: Any = parameter
            full = one.detach().full_tensor()
            if not dist.is_main() or failure is not None:
                continue
            try:
                place.mkdir(exist_ok=True)
                full.cpu().flatten().view(torch.uint8).numpy().tofile(place / str(number))
            except (
                OSError
            ) as error:  # the other ranks gather on: it is raised after the last tensor
                failure = error
                continue
            mapped = torch.from_file(str(place / str(number)), size=full.numel(), dtype=full.dtype)
            whole[one] = nn.Parameter(mapped.view(full.shape), requires_grad=one.requires_grad)
        with dist.fail_together():
            if failure is not None:
                raise failure
        for part in module.modules() if whole else ():
            own = vars(part)
            kept.append((part, type(part), dict(own)))
            own["_parameters"] = {
                n: whole.get(p, p) if p is not None else None for n, p in part._parameters.items()
            }
            for name in _HOOKS & own.keys():
                own[name] = type(own[name])()
            for key in [key for key in own if key.startswith(("__composable_api", ROOT))]:
                del own[key]
            if type(part).__name__.startswith("FSDP"):
                part.__class__ = type(part).__bases__[1]
        yield
    finally:
        for part, kind, before in kept:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(before)
        shutil.rmtree(place, ignore_errors=True)
