"""Log-probabilities and entropy under a linear head over a large vocabulary, a block of the vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TILE_ON_CPU, TILE = (256, 4096), (4096, 8192)
"""Rows and columns of logits worked on at once. On a CPU they stay in the cache from one pass to the next."""
MULTIPLE = 16
"""Of rows, filled up with zeros: a CPU's bfloat16 products of odd sizes are a quarter slower."""
NO_LOGIT = -1e30
"""In place of the -inf that a bias may hold: it has no mass either, and 0 times it is 0."""


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Whether calling the module does nothing but x W^T + b: no subclass, no hook, no other forward, no odd weight."""
    return (
        type(module) is nn.Linear
        and type(module.weight) in (nn.Parameter, Tensor)
        and "forward" not in vars(module)
        and not has_hooks(module)
    )


def linear_categorical(
    features: Float[Tensor, "N D"],
    head: nn.Linear,
    actions: Int[Tensor, "N"],
    temperature: Float[Tensor, "N"],
    *,
    with_entropy: bool,
    entropy_gradient: bool,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """``categorical`` of the logits z = (W x + b) / temperature; the entropy is 0 where it is not wanted.

    Blocks b of the vocabulary hold shares s_b = exp(log sum_b exp z - log sum exp z) of the mass, and the entropy is
    H = sum_b s_b (H_b - log s_b). The backward pass computes logits again, with p their softmax:

        d log p_a / d z_v = [v = a] - p_v,        d H / d z_v = -p_v (log p_v + H).

    [N, V] is never held, and each block of the weight's gradient is written once. Can be differentiated once.
    """
    count = len(features)
    filling = -count % MULTIPLE
    features, actions = nn.functional.pad(features, (0, 0, 0, filling)), nn.functional.pad(actions, (0, filling))
    temperature = nn.functional.pad(temperature, (0, filling), value=1.0)
    scored = _Scored.apply(features, head.weight, head.bias, actions, temperature, with_entropy, entropy_gradient)
    return scored[0][:count], scored[1][:count]


def tile_bytes(rows: int, vocabulary: int, width: int, device: torch.device) -> int:
    """Most that the logits of N rows take at once, and their gradient; ``width`` bytes a number of the features.

    A tile of z and one of p in float32, and N columns of the gradient.
    """
    tile_rows, columns = TILE_ON_CPU if device.type == "cpu" else TILE
    columns = min(columns, vocabulary)
    return 2 * 4 * min(tile_rows, rows) * columns + width * rows * columns


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        actions: Tensor,
        temperature: Tensor,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles(features, weight, bias, temperature)
        log_totals = tiles.new(tiles.blocks, len(features))  # log sum exp z of each block
        entropies = torch.zeros_like(log_totals)  # of the softmax of each block alone
        picked = tiles.new(len(features))
        for block, columns in enumerate(tiles.columns()):
            for rows in tiles.rows():
                logits = tiles.logits(rows, columns)
                z, p = tiles.softmax(logits, rows)
                top, log_top = z.amax(dim=-1), p.amax(dim=-1).log()  # log_top = top - log sum exp z
                log_totals[block, rows] = top - log_top
                inside, place = _places(actions[rows], columns)
                picked[rows] = torch.where(inside, z.gather(-1, place)[:, 0], picked[rows])
                if with_entropy:
                    entropies[block, rows] = -log_top - z.sub_(top[:, None]).mul_(p).sum(dim=-1)
        log_total = log_totals.logsumexp(dim=0)
        log_share = log_totals.log_softmax(dim=0)  # of the mass, of each block
        entropy = (
            (log_share.exp() * (entropies - log_share)).sum(dim=0) if with_entropy else torch.zeros_like(log_total)
        )
        ctx.save_for_backward(features, weight, bias, actions, temperature, log_totals, log_total, entropy)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return picked - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, actions, temperature, log_totals, log_total, entropy = ctx.saved_tensors
        needs_features, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        tiles = _Tiles(features, weight, bias, temperature)
        grad, entropy_grad = grad / temperature.to(grad.dtype), entropy_grad / temperature.to(grad.dtype)
        to_features = tiles.new(features.shape).zero_() if needs_features else None
        to_weight = torch.empty_like(weight) if needs_weight else None
        to_bias = torch.empty_like(bias) if needs_bias else None
        to_block = features.new_empty(len(features) * min(tiles.tile_columns, len(weight)))
        for columns, of_block in zip(tiles.columns(), log_totals.softmax(dim=0), strict=True):
            width = columns.stop - columns.start
            to_logits = to_block[: len(features) * width].view(-1, width)
            for rows in tiles.rows():
                z, p = tiles.softmax(tiles.logits(rows, columns), rows)
                if ctx.entropy_gradient:
                    z -= (log_total - entropy)[rows, None]  # log p + H
                    p *= z.mul_(entropy_grad[rows, None]).add_(grad[rows, None]).mul_(-of_block[rows, None])
                else:
                    p *= -(grad * of_block)[rows, None]
                inside, place = _places(actions[rows], columns)
                p.scatter_add_(-1, place, torch.where(inside, grad[rows], 0)[:, None])
                to_logits[rows] = p
            if to_features is not None:
                to_features += (to_logits @ weight[columns]).to(to_features.dtype)
            if to_weight is not None:
                torch.mm(to_logits.T, features, out=to_weight[columns])
            if to_bias is not None:
                to_bias[columns] = to_logits.sum(dim=0)
        return None if to_features is None else to_features.to(features.dtype), to_weight, to_bias, *[None] * 4


class _Tiles:
    """The logits of N rows and V columns, in tiles. Each tile overwrites the one before: fresh memory costs a third."""

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> None:
        self.features, self.weight, self.bias = features, weight, bias
        self.dtype = torch.promote_types(features.dtype, torch.float32)
        self.temperature = temperature.to(self.dtype)[:, None]
        self.tile_rows, self.tile_columns = TILE_ON_CPU if features.device.type == "cpu" else TILE
        self.blocks = -(-len(weight) // self.tile_columns)
        elements = min(self.tile_rows, len(features)) * min(self.tile_columns, len(weight))
        self._z, self._p = self.new(2, elements)

    def columns(self) -> Iterator[slice]:
        return _cut(len(self.weight), self.tile_columns)

    def rows(self) -> Iterator[slice]:
        return _cut(len(self.features), self.tile_rows)

    def new(self, *shape: Any) -> Tensor:
        return self.features.new_empty(*shape, dtype=self.dtype)

    def logits(self, rows: slice, columns: slice) -> Float[Tensor, "n c"]:
        bias = None if self.bias is None else self.bias[columns]
        return nn.functional.linear(self.features[rows], self.weight[columns], bias)

    def softmax(self, logits: Float[Tensor, "n c"], rows: slice) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n c"]]:
        """Tempered logits, and their softmax within the tile, which is faster than their exponential alone."""
        z, p = (buffer[: logits.numel()].view_as(logits) for buffer in (self._z, self._p))
        z.copy_(logits).div_(self.temperature[rows])
        if self.bias is not None:
            z.clamp_(min=NO_LOGIT)
        return z, torch.softmax(z, dim=-1, out=p)


def _cut(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _places(actions: Int[Tensor, "n"], columns: slice) -> tuple[Tensor, Int[Tensor, "n 1"]]:
    """Which actions are among the columns, and each one's place in them; any place of the others."""
    inside = (actions >= columns.start) & (actions < columns.stop)
    return inside, torch.where(inside, actions - columns.start, 0)[:, None]
