"""Parameters, gradients and optimizer state sharded over ranks with FSDP2, applied to a model from
outside.

Each block of the model is a unit: its weights are gathered when its forward runs, and again in the
backward pass. What is in no block, such as the last norm and the head, belongs to the root unit,
which is gathered during ``forward`` of the whole model. Outside of ``forward`` and ``gathered``
every weight is a DTensor, of which a rank holds its shard.

Gradients are summed over ranks, not averaged: the loss weights have the denominators of all ranks
already.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.core.layers import layers_of
from gruppo.distributed.collectives import world_size
from gruppo.types import Gaussian, GruppoError, Likelihood

Shard = Literal["none", "fsdp", "hybrid"]
T = TypeVar("T")

_requested = False
_world: Any = None
_mesh: Any = None
"""Ranks that the weights are sharded over, and with "hybrid" replicated over; None while nothing is
sharded."""


# --- applying it ----------------------------------------------------------------------------------


def request(mode: Shard) -> bool:
    """Say how models that are opened next will be sharded; return whether they will. A world of one
    shards nothing."""
    global _requested
    _requested = mode != "none" and world_size() > 1
    return _requested


def is_requested() -> bool:
    """Whether models that are opened now will be sharded: they are left on the CPU until then, a
    device too small."""
    return _requested


def shard(
    module: nn.Module,
    units: Sequence[nn.Module] | None = None,
    *,
    mode: Shard,
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
    is_offloaded: bool = False,
) -> None:
    """Shard a module in place over all ranks, each of ``units`` (``blocks_of`` by default) and the
    rest by themselves.

    ``compute_dtype``: of forward and backward; the shards keep the dtype that the weights have, and
    gradients are reduced in float32. None computes in the dtype of the weights. Weights may be on
    the CPU before: a unit at a time is moved to ``device``. ``is_offloaded``: shards and their
    gradients stay on the CPU, and are copied to ``device`` when they are gathered.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module"
    )  # of views: nothing is changed in place here
    reduce_dtype = None
    if compute_dtype is not None:
        reduce_dtype = torch.promote_types(compute_dtype, torch.float32)
    # FSDP cannot cut a single number: these stay whole on each rank, and their gradients are summed
    # like replicas'
    numbers = {parameter for parameter in module.parameters() if parameter.dim() == 0}
    is_pinned = device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": _mesh_of(mode, device),
        # inputs stay as they are: positions and attention biases need more digits than bfloat16 has
        "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(is_pinned) if is_offloaded else OffloadPolicy(),
        "ignored_params": numbers,
        # also the root, for its backward: kept, it would stay whole after a forward without one
        "reshard_after_forward": True,
    }
    try:
        for unit in blocks_of(module) if units is None else units:
            fully_shard(unit, **options)
        root: Any = fully_shard(_Root(module), **options)
    except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
        raise _cannot_shard(module, " ".join(str(error).split())) from error
    vars(module)[ROOT] = root  # not a submodule: names of weights stay as they are
    for parameter in numbers:
        parameter.data = parameter.data.to(device)
    for part in module.modules():
        if (
            scales := getattr(part, "quant_state", None)
        ) is not None:  # of 4-bit weights: whole on each rank
            scales.to(device)
    for part in sharded_units(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    with (
        torch.no_grad()
    ):  # FSDP reads which weights are trained now, before a forward in which they are frozen
        forward(module, lambda: None)


class _Root(nn.Module):
    """Runs a function as the forward of a whole model, which may then call the model's own
    forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)


ROOT = "_gruppo_root"
"""Attribute of a sharded model: its ``_Root``."""


def is_hybrid_possible() -> bool:
    """Whether there are several machines, with the same number of ranks on each, two or more."""
    ranks, local = world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ranks % local == 0 and 1 < local < ranks


def _mesh_of(mode: Shard, device: torch.device) -> Any:
    """All ranks, or machines by the ranks of each ("hybrid"): weights are sharded over the last
    dimension."""
    global _mesh, _world
    if _mesh is not None and _world is torch.distributed.group.WORLD:
        return _mesh
    _world = torch.distributed.group.WORLD
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils import _pytree

    ranks, local = world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if mode == "hybrid" and not is_hybrid_possible():
        raise GruppoError(
            f"""distributed.shard=hybrid shards within each machine and replicates over machines;
                {ranks} ranks at {local} per machine leave nothing to
                {"shard" if local == 1 else "replicate"}""",
            option="distributed.shard",
            advice="fsdp, or start the same number of ranks (2 or more) on each of several "
            "machines",
        )
    shape = {"replicate": ranks // local, "shard": local} if mode == "hybrid" else {"shard": ranks}
    _mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    for record in (Gaussian, Likelihood):  # FSDP looks for tensors in what a forward returns
        if record not in _pytree.SUPPORTED_NODES:
            _pytree.register_dataclass(record)
    return _mesh


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The parts of a model that are sharded by themselves: its layers, and an input embedding that
    is not tied.

    A part that shares a weight with the rest of the model belongs to the root.
    """
    parts = layers_of(module)
    get_embedding: Any = getattr(module, "get_input_embeddings", None)
    if callable(get_embedding):
        with suppress(NotImplementedError):  # of networks without an embedding
            parts.append(get_embedding())
    places = _places(module)
    return [
        part for part in parts if all(places[key] == count for key, count in _places(part).items())
    ]


def _places(module: nn.Module) -> Counter[int]:
    """Of each parameter, by identity, in how many places it is."""
    return Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))


def _cannot_shard(module: nn.Module, reason: str) -> GruppoError:
    return GruppoError(
        f"{type(module).__name__} cannot be sharded: {reason:.300}",
        option="distributed.shard",
        advice="none, which keeps all weights on each rank",
    )


# --- computing with it ----------------------------------------------------------------------------


def forward(module: nn.Module, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``function(*args, **kwargs)`` as the forward of a module, whose weights are then whole
    if it is sharded.

    FSDP gathers a unit's weights in hooks around its forward, and registers its backward on the
    tensors among the arguments and results; those of ``Likelihood`` are found too. A collective:
    each rank calls it equally often.
    """
    if _mesh is None or not is_unit(module):
        return function(*args, **kwargs)
    target: Any = module
    try:
        if ROOT in vars(module):
            return target._gruppo_root(function, *args, **kwargs)
        target.forward = function  # hides that of the class, for the hooks of this call
        return target(*args, **kwargs)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise _cannot_shard(
                module, "it reads weights of a part without calling that part"
            ) from error
        raise
    finally:
        vars(target).pop("forward", None)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Hold all weights whole on each rank within, in the compute dtype, as for sampling. They must
    not be changed.

    A collective as it begins; within, forwards communicate nothing, so that ranks may run different
    numbers of them.
    """
    units = sharded_units(module)
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)


def is_unit(module: nn.Module) -> bool:
    """Whether FSDP gathers weights around the forward of this module: a sharded model, or one of
    its units."""
    if _mesh is None:
        return False
    from torch.distributed.fsdp import FSDPModule

    return ROOT in vars(module) or isinstance(module, FSDPModule)


def sharded_units(module: nn.Module) -> list[Any]:
    """The units of a sharded model as FSDP modules, the root first."""
    root = vars(module).get(ROOT)
    return (
        []
        if root is None
        else [part for part in root.modules() if is_unit(part) and part is not module]
    )


# --- sharded tensors ------------------------------------------------------------------------------


def replicas() -> int:
    """How many ranks hold the same shard: the machines of a hybrid mesh."""
    return 1 if _mesh is None else _mesh.size() // _mesh["shard"].size()


def is_sharded(tensor: Tensor) -> bool:
    if _mesh is None:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which shares its memory; the tensor itself if it is not
    sharded."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, or the sum of a number's parts; a collective if it is sharded."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def clip_grad_norm(parameters: Iterable[nn.Parameter], limit: float) -> Float[Tensor, ""]:
    """Scale gradients to a norm of at most ``limit``; return the norm before, over the shards of
    all ranks."""
    parameters = list(parameters)
    if not any(map(is_sharded, parameters)):
        return nn.utils.clip_grad_norm_(parameters, limit)
    # whole and sharded ones apart: torch does not combine the two kinds
    kinds = [[p for p in parameters if is_sharded(p) == kind] for kind in (False, True)]
    grads = ([p.grad for p in kind if p.grad is not None] for kind in kinds)
    norms = [whole(nn.utils.get_total_norm(kind)) for kind in grads if kind]
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, limit, total)
    return total
