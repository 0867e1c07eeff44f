"""One call of a denoising network: in its dtype, guided where asked, and with the features of its middle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gruppo.types import GruppoError


@dataclass(frozen=True, eq=False)
class Asked:
    """N states to step from; ``guidance`` on the CPU, the others where the network is."""

    x: Float[Tensor, "N ..."]
    times: Float[Tensor, "N"]
    condition: Tensor | None
    """[N, ...]"""
    guidance: Float[Tensor, "N"]
    """1 asks the network once."""

    def take(self, rows: Int[Tensor, "M"]) -> Asked:
        at = rows.to(self.x.device)
        condition = None if self.condition is None else self.condition[at]
        return Asked(self.x[at], self.times[at], condition, self.guidance[rows])

    @property
    def is_plain(self) -> bool:
        return bool((self.guidance == 1).all())

    def plain(self) -> Asked:
        """The same states without guidance."""
        return replace(self, guidance=torch.ones_like(self.guidance))


def alike(asked: Asked, groups: Int[Tensor, "N"]) -> tuple[Int[Tensor, "M"], Int[Tensor, "N"]]:
    """Which rows to ask the network for, and whose answer is each row's.

    One for all rows of a group that are equal to the bit: those that common noise has brought to one state.
    """
    own = torch.arange(len(groups))
    _, number = groups.unique(return_inverse=True)
    first = torch.full((len(own),), len(own)).scatter_reduce(0, number, own, "amin")[number]
    at = first.to(asked.x.device)
    is_same = (asked.x == asked.x[at]).flatten(1).all(dim=1) & (asked.times == asked.times[at])
    is_same = is_same.cpu() & (asked.guidance == asked.guidance[first])
    return torch.where(is_same, first, own).unique(return_inverse=True)


class Call(Protocol):
    """How a module is asked."""

    def said(
        self, module: nn.Module, x: Float[Tensor, "N ..."], times: Float[Tensor, "N"], condition: Tensor | None
    ) -> Tensor:
        """The prediction, like x. What comes is float32 or wider; the dtype of the arithmetic is for this to know."""
        ...

    def pooled(self, output: Any) -> Float[Tensor, "N F"]:
        """Features of each row, of what the middle gave."""
        ...


class PlainCall:
    """module(x, times, condition), all in the module's dtype; its middle gives [N, F, ...]."""

    def said(self, module: nn.Module, x: Tensor, times: Tensor, condition: Tensor | None) -> Tensor:
        dtype = dtype_of(module)
        return module(x.to(dtype), times.to(dtype), condition)

    def pooled(self, output: Tensor) -> Tensor:
        return output.flatten(2).mean(dim=-1) if output.ndim > 2 else output


def dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


class Network:
    """A module, the name of the submodule whose output is its middle, and how it is called."""

    def __init__(self, module: nn.Module, middle: str = "", call: Call | None = None) -> None:
        self.module, self.middle, self.call = module, middle, call or PlainCall()
        names = dict(module.named_modules())
        if middle and middle not in names:
            raise GruppoError(
                f"the network has no submodule {middle!r} to read features from; it has {', '.join(list(names)[1:9])}."
            )

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.module)

    def on(self, module: nn.Module) -> Network:
        """The same over other weights."""
        return Network(module, self.middle, self.call)

    def __call__(
        self, asked: Asked, *, nothing: Tensor | None = None, features: bool = False
    ) -> tuple[Float[Tensor, "N ..."], Float[Tensor, "N F"]]:
        """The prediction, and the features with the condition, of width 0 unless asked for.

        Guided: s + (g - 1) (s - n), with s said with the condition and n with ``nothing`` in its place (Ho & Salimans
        2022, arXiv 2207.12598, eq. 6, of which g is 1 + w).
        """
        n, guided = len(asked.x), torch.zeros(0, dtype=torch.long)
        x, times, condition = asked.x, asked.times, asked.condition
        if not asked.is_plain:
            assert condition is not None and nothing is not None
            guided = (asked.guidance != 1).nonzero()[:, 0].to(x.device)
            empty = nothing.to(condition).expand(len(guided), *nothing.shape)
            x, times = torch.cat([x, x[guided]]), torch.cat([times, times[guided]])
            condition = torch.cat([condition, empty])
        said, middle = self._called(x, times, condition, features)
        if len(guided):
            by = (asked.guidance.to(said)[guided] - 1).reshape(-1, *[1] * (said.ndim - 1))
            said = said[:n].index_add(0, guided, by * (said[:n][guided] - said[n:]))
        return said, middle[:n]

    def _called(
        self, x: Tensor, times: Tensor, condition: Tensor | None, features: bool
    ) -> tuple[Float[Tensor, "N ..."], Float[Tensor, "N F"]]:
        seen: list[Any] = []
        handle = self._watched(seen) if features else None
        try:
            said = self.call.said(self.module, x, times, condition)
        finally:
            if handle is not None:
                handle.remove()
        if not isinstance(said, Tensor) or said.shape != x.shape:
            got = list(said.shape) if isinstance(said, Tensor) else type(said).__name__
            raise GruppoError(
                f"the network said {got} of states of the shape {list(x.shape)}; it needs one number for each. Return "
                "a tensor like x."
            )
        return said, self.call.pooled(seen[0]) if features else said.new_zeros(len(x), 0)

    def _watched(self, seen: list[Any]) -> torch.utils.hooks.RemovableHandle:
        if not self.middle:
            raise GruppoError(
                "a value of each step is read from the network's middle, and this policy names none. Make it with "
                "middle='the name of a submodule', whose output is [N, F, ...]."
            )
        submodule = self.module.get_submodule(self.middle)
        return submodule.register_forward_hook(lambda _, inputs, output: seen.append(output))
