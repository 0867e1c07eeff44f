"""The layers of a network, and layers whose activations are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gruppo.types import GruppoError


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ``nn.ModuleList``s; without a list, the children that have
    children.

    So no part is taken whose weights its parent may read without calling it, such as a table of
    positions.
    """
    layers = list(_outermost_lists(module))
    while not layers:
        layers = [child for child in module.children() if list(child.children())]
        if len(layers) != 1:
            break
        module, layers = layers[0], []
    return [layer for layer in dict.fromkeys(layers) if list(layer.parameters())]


def _outermost_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _outermost_lists(child)


class Recomputed:
    """Marks the class of a layer that keeps its inputs alone; see ``recompute_layers``."""


def recompute_layers(*modules: nn.Module) -> bool:
    """Let each layer keep only its inputs for the backward pass, which computes the rest again.
    Chen et al. 2016.

    The class of a layer is replaced: a copy of the layer then runs its own forward. Return True, or
    raise GruppoError where a module has no layers.
    """
    for module in modules:
        if not (layers := layers_of(module)):
            raise GruppoError(
                f"""optim.recompute=layer: {type(module).__name__} has no layers that could be
                    computed again, neither a list nor parts of several modules""",
                option="optim.recompute",
                advice="none",
            )
        for layer in layers:
            if not isinstance(layer, Recomputed):
                kind: Any = type(layer)
                layer.__class__ = _recomputed(kind)
    return True


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpointed(self, partial(kind.forward, self))(*args, **kwargs)

    return type(f"Recomputed{kind.__name__}", (Recomputed, kind), {"forward": forward})


def checkpointed(layer: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a layer runs, with its activations computed again if the layer's are."""
    if not isinstance(layer, Recomputed) or not torch.is_grad_enabled():
        return function
    # nothing in a forward is random: dropout is off
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
