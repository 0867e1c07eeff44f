"""Fused linear head and categorical log-probability: logits of a large vocabulary are computed in
tiles, never held."""

from __future__ import annotations

from typing import Any, Literal, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gruppo.core.compiled import Compiled

EntropyMode = Literal["none", "value", "gradient"]
"""Whether the entropy is computed, and whether it can be differentiated."""
TILE_ON_CPU, TILE = (256, 4096), (4096, 8192)
"""Rows and columns of logits computed at once. On a CPU they stay in the cache from one pass to the
next.

The columns decide how sums are rounded, so they are the same on all machines; the rows change no
bit.
"""
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


def _tile_shape(device: torch.device) -> tuple[int, int]:
    return TILE_ON_CPU if device.type == "cpu" else TILE


def tile_bytes(rows: int, vocabulary: int, width: int, device: torch.device) -> int:
    """Peak memory of the logits of N rows and their gradient; ``width`` is the bytes of one
    feature.

    A tile of z and one of p in float32, N columns of the gradient, and the logits that are kept.
    """
    tile_rows, columns = _tile_shape(device)
    columns = min(columns, vocabulary)
    kept = min(width * rows * vocabulary, KEPT_ON_CPU) if device.type == "cpu" else 0
    return 2 * 4 * min(tile_rows, rows) * columns + width * rows * columns + kept


class _LinearCategorical(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mode: EntropyMode,
        to_keep: int,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        actions: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor]:
        kept = list[Tensor]()  # logits of the first tiles
        blocks, parts = _tiles(features, weight)
        dtype = torch.promote_types(features.dtype, torch.float32)
        # of each block alone: log sum exp z, and the entropy of its softmax
        log_totals = features.new_zeros(len(blocks), len(features), dtype=dtype)
        entropies = torch.zeros_like(log_totals)
        action_logits = torch.zeros_like(log_totals[0])
        for block, columns in enumerate(blocks):
            for rows in parts:
                logits = _logits(features, weight, bias, rows, columns)
                to_keep -= logits.nbytes
                if to_keep >= 0:
                    kept.append(logits)
                log_totals[block, rows], entropies[block, rows], action_logit = compiled_summary(
                    logits,
                    temperature[rows, None].to(dtype),
                    actions[rows, None] - columns.start,
                    bias is not None,
                    mode != "none",
                )
                action_logits[rows] += action_logit  # 0 if the action is in another block
        log_total = log_totals.logsumexp(dim=0)
        log_share = log_totals.log_softmax(dim=0)  # share of each block in the mass
        entropy = torch.zeros_like(log_total)
        if mode != "none":
            entropy = (log_share.exp() * (entropies - log_share)).sum(dim=0)
        inputs = (features, weight, bias, actions, temperature)
        ctx.save_for_backward(*inputs, log_totals, log_total - entropy, *kept)
        ctx.mode = mode
        if mode != "gradient":
            ctx.mark_non_differentiable(entropy)
        return action_logits - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, actions, temperature, log_totals, shift, *kept = ctx.saved_tensors
        needs_features, needs_weight, needs_bias = ctx.needs_input_grad[2:5]
        dtype = log_totals.dtype
        grad = grad / temperature.to(grad.dtype)
        entropy_grad = entropy_grad / temperature.to(grad.dtype)
        grad_features = torch.zeros_like(features, dtype=dtype) if needs_features else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        first_tiles = iter(kept)
        blocks, parts = _tiles(features, weight)
        buffer = features.new_empty(len(features), blocks[0].stop)
        for columns, share in zip(blocks, log_totals.softmax(dim=0), strict=True):
            grad_logits = buffer.view(-1)[: len(features) * (columns.stop - columns.start)]
            grad_logits = grad_logits.view(len(features), -1)
            for rows in parts:
                logits = next(first_tiles, None)
                if logits is None:
                    logits = _logits(features, weight, bias, rows, columns)
                of_entropy = (shift[rows, None], entropy_grad[rows, None])
                grad_logits[rows] = compiled_gradient(
                    logits,
                    temperature[rows, None].to(dtype),
                    actions[rows, None] - columns.start,
                    bias is not None,
                    grad[rows, None],
                    share[rows, None],
                    of_entropy if ctx.mode == "gradient" else None,
                )
            if grad_features is not None:
                grad_features += (grad_logits @ weight[columns]).to(dtype)
            if grad_weight is not None:
                torch.mm(grad_logits.T, features, out=grad_weight[columns])
            if grad_bias is not None:
                grad_bias[columns] = grad_logits.sum(dim=0)
        grad_features = None if grad_features is None else grad_features.to(features.dtype)
        return None, None, grad_features, grad_weight, grad_bias, None, None


def _tiles(features: Tensor, weight: Tensor) -> tuple[list[slice], list[slice]]:
    """Columns and rows of the tiles of the logits [N, V]."""
    rows, columns = _tile_shape(features.device)
    return _slices(len(weight), columns), _slices(len(features), rows)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _logits(
    features: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, columns: slice
) -> Float[Tensor, "n c"]:
    bias = None if bias is None else bias[columns]
    return nn.functional.linear(features[rows], weight[columns], bias)


# --- one tile, in operations that a compiler fuses on CUDA ----------------------------------------


def _scaled(
    logits: Float[Tensor, "n c"], temperature: Float[Tensor, "n 1"], has_bias: bool
) -> Float[Tensor, "n c"]:
    z = logits.to(temperature.dtype) / temperature
    return z.clamp_(min=NO_LOGIT) if has_bias else z


def _summary(
    logits: Tensor,
    temperature: Tensor,
    action: Int[Tensor, "n 1"],
    has_bias: bool,
    needs_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """log sum exp z over the tile, the entropy of its softmax, and z of the action, 0 if it is
    outside; [n] each."""
    z = _scaled(logits, temperature, has_bias)
    p = z.softmax(dim=-1)  # faster than the exponential alone
    top = z.amax(dim=-1)
    log_top = p.amax(dim=-1).log()  # top - log sum exp z
    is_inside = (action >= 0) & (action < z.shape[1])
    action_logit = z.gather(-1, torch.where(is_inside, action, 0))
    entropy = torch.zeros_like(top)
    if needs_entropy:
        entropy = -log_top - z.sub_(top[:, None]).mul_(p).sum(dim=-1)
    return top - log_top, entropy, torch.where(is_inside, action_logit, 0)[:, 0]


def _gradient(
    logits: Tensor,
    temperature: Tensor,
    action: Int[Tensor, "n 1"],
    has_bias: bool,
    grad: Tensor,
    share: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Float[Tensor, "n c"]:
    """Gradient of the logits times the temperature.

    [n, 1]: ``grad`` of the log-prob, ``share`` of the tile in the mass, and if the entropy H has a
    gradient, log sum exp z - H and that gradient.
    """
    z = _scaled(logits, temperature, has_bias)
    p = z.softmax(dim=-1)
    if of_entropy is None:
        p *= -(grad * share)
    else:
        shift, entropy_grad = of_entropy
        z -= shift  # log p + H
        p *= z.mul_(entropy_grad).add_(grad).mul_(-share)
    is_inside = (action >= 0) & (action < z.shape[1])
    p.scatter_add_(-1, torch.where(is_inside, action, 0), torch.where(is_inside, grad, 0))
    return p


compiled_summary = Compiled(_summary, "the head's log-probs")
compiled_gradient = Compiled(_gradient, "the head's gradient")
