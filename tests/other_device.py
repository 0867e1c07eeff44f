"""A second device without hardware: tensors that say "meta", hold numbers, and refuse to meet those
of the CPU.

As on CUDA, a tensor of the CPU without dimensions may join, and so may indices. Everything runs on
the CPU's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
MOVES = {"copy_", "_to_copy"}
TAKES_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Moved(Tensor):
    """A tensor on the other device; ``inner`` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Moved:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Moved({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Constructors(TorchFunctionMode):
    """``torch.tensor`` and its kin move what they make below a dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in (torch.tensor, torch.as_tensor, torch.asarray)
            and kwargs.get("device") is not None
        ):
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if func is Tensor.tolist and isinstance(args[0], Moved):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Within it, the device that it yields, "meta", is the other device."""
    with Constructors(), Dispatch():
        yield DEVICE


def dispatch(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::")[-1]  # type: ignore[attr-defined]
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    moved = [x for x in tensors if isinstance(x, Moved)]
    needed = tensors
    if name in TAKES_INDICES:
        needed = [args[0], *args[2:3]]
    if moved and name not in MOVES:
        for x in needed:
            if not isinstance(x, Moved) and x.dim():
                raise RuntimeError(f"{name}: tensors on the other device and on the CPU")
    if name in TAKES_INDICES and not isinstance(args[0], Moved) and moved:
        raise RuntimeError(f"{name}: indices on the other device of a tensor on the CPU")
    device = kwargs.get("device")
    is_moved = bool(moved) if device is None else torch.device(device) == DEVICE
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "copy_":
        is_moved = isinstance(args[0], Moved)
    wrappers = {id(x.inner): x for x in moved}
    inner_args, inner_kwargs = tree_map(
        lambda x: x.inner if isinstance(x, Moved) else x, (args, kwargs)
    )
    out = func(*inner_args, **inner_kwargs)

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor) or not is_moved:
            return x
        return wrappers[id(x)] if id(x) in wrappers else Moved(x)

    return tree_map(wrapped, out)
