"""Fused linear head and categorical log-probability: logits of a large vocabulary are computed in
tiles, never held."""

from __future__ import annotations

from typing import Any, Literal, TypeGuard

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gruppo.core.compiled import Compiled
from gruppo.platforms import cache_bytes

EntropyMode = Literal["none", "value", "gradient"]
"""Whether the entropy is computed, and whether it can be differentiated."""
TILE_ON_CPU, TILE = (256, 4096), (4096, 8192)
"""Rows and columns of logits computed at once. On a CPU they stay in the cache from one pass to the
next.

The columns decide how sums are rounded, so they are the same on all machines; the rows change no
bit.
"""
LEAST_ROWS = 64
"""Rows below which the products of a tile are slower: the head takes 1.2 times as long at 64, and
1.45 times at 32."""
KEPT_ON_CPU = 2**26
"""Bytes of logits that a CPU keeps for the backward pass, which computes the others again: a fourth
of its products."""
ROW_MULTIPLE = 16
"""Rows are padded to a multiple with zeros: a CPU's bfloat16 products of odd sizes are a quarter
slower."""
NO_LOGIT = -1e30
"""Instead of the -inf that a bias may hold: it has no mass either, and 0 times it is 0."""


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs more than its forward; hooks of FSDP, which only gather its
    weights, aside."""
    kinds = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(
        type(getattr(hook, "__self__", None)).__name__ != "FSDPState"
        for hooks in kinds
        for hook in hooks.values()
    )


def is_plain_linear(module: Any) -> TypeGuard[nn.Linear]:
    """Whether the module computes x W^T + b and nothing else: no subclass, hook, replaced forward
    or odd weight."""
    is_linear = type(module) is nn.Linear and type(module.weight) in (nn.Parameter, Tensor)
    return is_linear and "forward" not in vars(module) and not has_hooks(module)


def linear_categorical(
    features: Float[Tensor, "N D"],
    head: nn.Linear,
    actions: Int[Tensor, "N"],
    temperature: Float[Tensor, "N"],
    entropy: EntropyMode,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"] | None]:
    """``categorical`` of the logits z = (W x + b) / temperature.

    Block b of the vocabulary holds the share s_b = exp(log sum_b exp z - log sum exp z) of the
    mass, and the entropy is H = sum_b s_b (H_b - log s_b). The backward pass computes logits again,
    with p their softmax:

        d log p_a / d z_v = [v = a] - p_v,        d H / d z_v = -p_v (log p_v + H).

    Of [N, V] at most KEPT_ON_CPU bytes are held. Each block of the weight's gradient is written
    once. Differentiable once.
    """
    count = len(features)
    padding = -count % ROW_MULTIPLE
    features, actions = (
        nn.functional.pad(features, (0, 0, 0, padding)),
        nn.functional.pad(actions, (0, padding)),
    )
    temperature = nn.functional.pad(temperature, (0, padding), value=1.0)
    to_keep = KEPT_ON_CPU if torch.is_grad_enabled() and features.device.type == "cpu" else 0
    logprobs, nats = _LinearCategorical.apply(
        entropy, to_keep, features, head.weight, head.bias, actions, temperature
    )
    return logprobs[:count], None if entropy == "none" else nats[:count]


def _tile(device: torch.device) -> tuple[int, int]:
    """Rows and columns of a tile. A CPU's has fewer rows where 10 bytes for each logit are more
    than half its cache."""
    if device.type != "cpu":
        return TILE
    rows, columns = TILE_ON_CPU
    while rows > LEAST_ROWS and 10 * rows * columns > cache_bytes()[1] // 2:
        rows //= 2
    return rows, columns


def tile_bytes(rows: int, vocabulary: int, width: int, device: torch.device) -> int:
    """Peak memory of the logits of N rows and their gradient; ``width`` is the bytes of one
    feature.

    A tile of z and one of p in float32, N columns of the gradient, and the logits that are kept.
    """
    tile_rows, columns = _tile(device)
    columns = min(columns, vocabulary)
    kept = min(width * rows * vocabulary, KEPT_ON_CPU) if device.type == "cpu" else 0
    return 2 * 4 * min(tile_rows, rows) * columns + width * rows * columns + kept


class _LinearCategorical(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mode: EntropyMode, to_keep: int, *inputs: Any) -> tuple[Tensor, Tensor]:
        tiles, (features, _, bias, *_) = _LogitTiles(*inputs), inputs
        kept = list[Tensor]()  # logits of the first tiles
        # log sum exp z of each block
        log_totals = features.new_empty(len(tiles.columns), len(features), dtype=tiles.dtype)
        entropies = torch.zeros_like(log_totals)  # of the softmax of each block alone
        action_logits = torch.zeros_like(log_totals[0])
        for block, columns in enumerate(tiles.columns):
            for rows in tiles.rows:
                if compiled_summary.is_used(features.device):
                    parts = compiled_summary(*tiles.logits(rows, columns), bias is not None)
                    log_totals[block, rows], entropies[block, rows] = parts[:2]
                    action_logits[rows] += parts[2]  # 0 where the action is in another block
                    continue
                logits, _, _ = tiles.logits(rows, columns)
                to_keep -= logits.nbytes
                if to_keep >= 0:
                    kept.append(logits)
                z, p = tiles.scaled_and_softmax(logits, rows)
                top, log_top = z.amax(dim=-1), p.amax(dim=-1).log()  # log_top = top - log sum exp z
                log_totals[block, rows] = top - log_top
                inside, place = tiles.action_places(rows, columns)
                action_logits[rows] = torch.where(
                    inside, z.gather(-1, place)[:, 0], action_logits[rows]
                )
                if mode != "none":
                    entropies[block, rows] = -log_top - z.sub_(top[:, None]).mul_(p).sum(dim=-1)
        log_total = log_totals.logsumexp(dim=0)
        log_share = log_totals.log_softmax(dim=0)  # share of each block in the mass
        entropy = torch.zeros_like(log_total)
        if mode != "none":
            entropy = (log_share.exp() * (entropies - log_share)).sum(dim=0)
        ctx.save_for_backward(*inputs, log_totals, log_total, entropy, *kept)
        ctx.mode = mode
        if mode != "gradient":
            ctx.mark_non_differentiable(entropy)
        return action_logits - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, actions, temperature, log_totals, log_total, entropy, *kept = (
            ctx.saved_tensors
        )
        needs_features, needs_weight, needs_bias = ctx.needs_input_grad[2:5]
        tiles = _LogitTiles(features, weight, bias, actions, temperature)
        grad, entropy_grad = (
            grad / temperature.to(grad.dtype),
            entropy_grad / temperature.to(grad.dtype),
        )
        grad_features = torch.zeros_like(features, dtype=tiles.dtype) if needs_features else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        first_tiles = iter(kept)
        buffer = features.new_empty(len(features) * min(tiles.tile_columns, len(weight)))
        for columns, share in zip(tiles.columns, log_totals.softmax(dim=0), strict=True):
            width = columns.stop - columns.start
            grad_logits = buffer[: len(features) * width].view(-1, width)
            for rows in tiles.rows:
                if compiled_gradient.is_used(features.device):
                    numbers = (log_total[rows], entropy[rows], grad[rows], entropy_grad[rows])
                    grad_logits[rows] = compiled_gradient(
                        *tiles.logits(rows, columns), bias is not None, *numbers
                    )
                    continue
                logits = next(first_tiles, None)
                z, p = tiles.scaled_and_softmax(
                    tiles.logits(rows, columns)[0] if logits is None else logits, rows
                )
                if ctx.mode == "gradient":
                    z -= (log_total - entropy)[rows, None]  # log p + H
                    p *= (
                        z.mul_(entropy_grad[rows, None])
                        .add_(grad[rows, None])
                        .mul_(-share[rows, None])
                    )
                else:
                    p *= -(grad * share)[rows, None]
                inside, place = tiles.action_places(rows, columns)
                p.scatter_add_(-1, place, torch.where(inside, grad[rows], 0)[:, None])
                grad_logits[rows] = p
            if grad_features is not None:
                grad_features += (grad_logits @ weight[columns]).to(grad_features.dtype)
            if grad_weight is not None:
                torch.mm(grad_logits.T, features, out=grad_weight[columns])
            if grad_bias is not None:
                grad_bias[columns] = grad_logits.sum(dim=0)
        grad_features = None if grad_features is None else grad_features.to(features.dtype)
        return None, None, grad_features, grad_weight, grad_bias, None, None


class _LogitTiles:
    """Logits [N, V] in tiles. Each tile overwrites the last one: fresh memory costs a third of the
    time."""

    def __init__(
        self,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        actions: Tensor,
        temperature: Tensor,
    ) -> None:
        self.features, self.weight, self.bias, self.actions = features, weight, bias, actions
        self.dtype = torch.promote_types(features.dtype, torch.float32)
        self.temperature = temperature.to(self.dtype)[:, None]
        self.tile_rows, self.tile_columns = _tile(features.device)
        self._buffers: Tensor | None = None
        self.rows, self.columns = (
            [slice(start, min(start + size, end)) for start in range(0, end, size)]
            for size, end in ((self.tile_rows, len(features)), (self.tile_columns, len(weight)))
        )

    def logits(
        self, rows: slice, columns: slice
    ) -> tuple[Tensor, Float[Tensor, "n 1"], Int[Tensor, "n 1"]]:
        """Logits [n, c] before scaling, temperatures, and the actions counted from the first
        column."""
        bias = None if self.bias is None else self.bias[columns]
        logits = nn.functional.linear(self.features[rows], self.weight[columns], bias)
        return logits, self.temperature[rows], (self.actions[rows] - columns.start)[:, None]

    def scaled_and_softmax(
        self, logits: Float[Tensor, "n c"], rows: slice
    ) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n c"]]:
        """Logits over the temperature, and their softmax within the tile: it is faster than the
        exponential alone."""
        if self._buffers is None:
            elements = min(self.tile_rows, len(self.features)) * min(
                self.tile_columns, len(self.weight)
            )
            self._buffers = self.features.new_empty(2, elements, dtype=self.dtype)
        z, p = (buffer[: logits.numel()].view_as(logits) for buffer in self._buffers)
        z.copy_(logits).div_(self.temperature[rows])
        if self.bias is not None:
            z.clamp_(min=NO_LOGIT)
        return z, torch.softmax(z, dim=-1, out=p)

    def action_places(self, rows: slice, columns: slice) -> tuple[Tensor, Int[Tensor, "n 1"]]:
        """Rows whose action is among the columns, and its place in them; place 0 for the others."""
        actions = self.actions[rows]
        inside = (actions >= columns.start) & (actions < columns.stop)
        return inside, torch.where(inside, actions - columns.start, 0)[:, None]


# --- a tile as plain operations, which a compiler fuses on CUDA -----------------------------------


def _scaled(
    logits: Float[Tensor, "n c"],
    temperature: Float[Tensor, "n 1"],
    action: Int[Tensor, "n 1"],
    has_bias: bool,
) -> tuple[Float[Tensor, "n c"], Bool[Tensor, "n c"]]:
    z = logits.to(temperature.dtype) / temperature
    return z.clamp(min=NO_LOGIT) if has_bias else z, torch.arange(
        z.shape[1], device=z.device
    ) == action


def _summary(
    logits: Tensor, temperature: Tensor, action: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """log sum exp z over the tile, the entropy of its softmax, and z of the action, 0 where it is
    outside; [n] each."""
    z, is_action = _scaled(logits, temperature, action, has_bias)
    log_total = z.logsumexp(dim=-1)
    entropy = log_total - ((z - log_total[:, None]).exp() * z).sum(dim=-1)
    return log_total, entropy, torch.where(is_action, z, 0).sum(dim=-1)


def _gradient(
    logits: Tensor, temperature: Tensor, action: Tensor, has_bias: bool, *numbers: Tensor
) -> Tensor:
    """Gradient of the logits; numbers [n]: log sum exp z and entropy of all columns, gradients of
    log-prob and it."""
    z, is_action = _scaled(logits, temperature, action, has_bias)
    log_total, entropy, grad, entropy_grad = (number[:, None] for number in numbers)
    log_p = z - log_total
    pulled = torch.where(is_action, grad, 0) - log_p.exp() * (
        grad + entropy_grad * (log_p + entropy)
    )
    return pulled.to(logits.dtype)


compiled_summary = Compiled(_summary, "the head's log-probs")
compiled_gradient = Compiled(_gradient, "the head's gradient")
