"""Categorical log-densities, and the same distribution for drawing and for scoring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gruppo.core.linear_head import is_plain_linear, linear_categorical

BLOCK = 256
"""Columns summed at once by the two-level inverse CDF."""

AT_ONCE = 2**19
"""Logits that ``draw`` works on at a time: what is in between stays in the cache of a machine."""

SHORTLIST = 256
"""Actions that are ordered at first to draw from a truncated distribution."""


def temper(logits: Float[Tensor, "N V"], temperature: Tensor | float) -> Float[Tensor, "N V"]:
    """Logits in float32 at least, divided by the temperature. Dividing log-probabilities instead would be wrong."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, float | int):
        return logits if temperature == 1 else logits / temperature
    return logits / temperature[:, None].to(logits.dtype)


def truncate(
    logits: Float[Tensor, "N V"], *, top_k: int = 0, top_p: float = 1.0, always: Int[Tensor, "N"] | None = None
) -> Float[Tensor, "N V"]:
    """-inf outside the top-k set, then outside the smallest set whose probability reaches top_p (at least one stays).

    Ties at the k-th logit are all kept. ``always`` names one action a row that stays in any case: when scoring, the
    action that was drawn, whose logit rounding or an update may have moved across the edge.
    """
    inside = None
    if 0 < top_k < logits.shape[-1]:
        inside = logits >= logits.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1:
        limited = logits if inside is None else logits.masked_fill(~inside, -torch.inf)
        nucleus = _nucleus(limited.softmax(dim=-1), top_p)
        inside = nucleus if inside is None else inside & nucleus
    if inside is None:
        return logits
    if always is not None:
        inside = inside.scatter(-1, always[:, None], True)
    return logits.masked_fill(~inside, -torch.inf)


def _nucleus(p: Float[Tensor, "N V"], top_p: float) -> Bool[Tensor, "N V"]:
    """The likeliest actions until they reach ``top_p``; of equal ones the first."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1) - ordered < top_p  # mass before this action is still short of top_p
    return torch.zeros_like(reached).scatter(-1, order, reached)


def draw(
    logits: Float[Tensor, "N V"],
    uniforms: Float[Tensor, "N"],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Int[Tensor, "N"], Float[Tensor, "N"]]:
    """Actions by the inverse CDF at the given uniforms, and their log-probabilities. Temperature 0 is the argmax.

    One uniform an action makes every draw addressable. The CDF is summed in blocks, so that no [N, V] cumulative sum
    is formed, and a truncated one over the likely actions alone. Of a greedy action the log-probability is the one at
    temperature 1.
    """
    draw_some = _draw_truncated if 0 < top_k < logits.shape[-1] or top_p < 1 else _draw_any
    drawn = []
    rows = max(1, AT_ONCE // logits.shape[-1] if logits.device.type == "cpu" else len(logits))
    for some, uniform in zip(logits.split(rows), uniforms.split(rows), strict=True):
        if temperature == 0:
            actions = some.argmax(dim=-1)
            drawn.append((actions, _logprob(temper(some, 1.0), actions)))
        else:
            drawn.append(draw_some(temper(some, temperature), uniform, top_k, top_p))
    return torch.cat([actions for actions, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])


def _draw_any(logits: Tensor, uniforms: Tensor, *_: float) -> tuple[Tensor, Tensor]:
    p = logits.softmax(dim=-1)  # the one operation that reads and writes each number from the nearest memory
    actions = _invert_in_blocks(p, uniforms)
    return actions, p.gather(-1, actions[:, None])[:, 0].log()


def _draw_truncated(logits: Tensor, uniforms: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """``_draw_any`` of ``truncate``, for which only the most likely actions are ordered, more of them where needed."""
    rows, vocabulary = logits.shape
    actions, logprobs = logits.new_zeros(rows, dtype=torch.long), logits.new_zeros(rows)
    left = torch.arange(rows, device=logits.device)
    width = max(SHORTLIST, 2 * top_k)
    while len(left):
        some, width = logits[left], min(width, vocabulary)
        listed, is_whole = _shortlist(some, width, top_k, top_p)
        drawn, scored = _draw_any(listed[1], uniforms[left])
        actions[left] = listed[0].gather(-1, drawn[:, None])[:, 0]
        logprobs[left] = scored
        left = left[~is_whole]
        width *= 16
    return actions, logprobs


def _shortlist(
    logits: Float[Tensor, "N V"], width: int, top_k: int, top_p: float
) -> tuple[tuple[Int[Tensor, "N C"], Float[Tensor, "N C"]], Bool[Tensor, "N"]]:
    """The ``width`` likeliest actions as the vocabulary orders them, their truncated logits, and whether that is all.

    Whatever could tie with the edge of the set must be on the list.
    """
    values, ids = logits.topk(width, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    lowest, values = values[:, -1:], values.gather(-1, by_id)
    if 0 < top_k < logits.shape[-1]:
        values = truncate(values, top_k=top_k, top_p=1.0)
        is_whole = (values > lowest) | values.isneginf()
        values = truncate(values, top_p=top_p)
    else:
        p = logits.softmax(dim=-1).gather(-1, ids)
        inside = _nucleus(p, top_p)
        is_whole = (p > p.amin(dim=-1, keepdim=True)) | ~inside
        values = values.masked_fill(~inside, -torch.inf)
    return (ids, values), is_whole.all(dim=-1) | (width == logits.shape[-1])


def _invert_in_blocks(p: Float[Tensor, "N V"], uniforms: Float[Tensor, "N"]) -> Int[Tensor, "N"]:
    """The first action whose cumulative probability exceeds the uniform."""
    vocabulary = p.shape[-1]
    whole = vocabulary - vocabulary % BLOCK
    mass = p[:, :whole].unflatten(-1, (-1, BLOCK)).sum(dim=-1)  # [N, blocks]
    if whole < vocabulary:
        mass = torch.cat([mass, p[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    mass = mass.double()
    block, rest = _invert(mass, uniforms.to(mass) * mass.sum(dim=-1))
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=p.device)  # [N, BLOCK]
    within = p.gather(-1, columns.clamp(max=vocabulary - 1)).masked_fill(columns >= vocabulary, 0).double()
    column, _ = _invert(within, rest)
    return (block * BLOCK + column).clamp(max=vocabulary - 1)  # past the end only where logits are not finite


def _invert(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose cumulative mass exceeds the target, and the target less what lies before it.

    An index without mass is never chosen: rounding that runs past the end falls back to the last one that has some.
    """
    cumulative = mass.cumsum(dim=-1)
    last = mass.shape[-1] - 1 - (mass > 0).flip(-1).int().argmax(dim=-1)
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].minimum(last)
    before = cumulative.gather(-1, index[:, None])[:, 0] - mass.gather(-1, index[:, None])[:, 0]
    return index, (target - before).clamp(min=0)


def _logprob(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.gather(-1, actions[:, None])[:, 0] - logits.logsumexp(dim=-1)


EntropyWanted = Literal["none", "value", "gradient"]
"""Whether a distribution's entropy is computed, and whether it can be differentiated."""


def categorical(
    logits: Float[Tensor, "N V"],
    actions: Int[Tensor, "N"],
    temperature: Float[Tensor, "N"],
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    entropy: EntropyWanted = "none",
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"] | None]:
    """Log-probabilities in nats of the actions under the distribution that ``draw`` samples, and its entropy."""
    if entropy == "gradient":
        log_p = truncate(temper(logits, temperature), top_k=top_k, top_p=top_p, always=actions).log_softmax(dim=-1)
        nats = -(log_p.exp() * torch.where(log_p.isfinite(), log_p, 0)).sum(dim=-1)  # 0 log 0 = 0, gradients too
        return log_p.gather(-1, actions[:, None])[:, 0], nats
    logprobs, nats = _Picked.apply(logits, actions, temperature, top_k, top_p, entropy == "value")
    return logprobs, nats if entropy == "value" else None


class _Picked(torch.autograd.Function):
    """One log-probability a row, and the entropy as a number, with few passes over [N, V].

    d logprob / d logits = (one-hot - p) / temperature. Equal to the plain way of ``entropy="gradient"``; a test holds
    it to that.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, actions: Tensor, temperature: Tensor, top_k: int, top_p: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        tempered = truncate(temper(logits, temperature), top_k=top_k, top_p=top_p, always=actions)
        log_total = tempered.logsumexp(dim=-1)
        ctx.save_for_backward(tempered, log_total, actions, temperature)
        ctx.dtype = logits.dtype
        entropy = _entropy(tempered, log_total) if with_entropy else torch.zeros_like(log_total)
        ctx.mark_non_differentiable(entropy)
        return tempered.gather(-1, actions[:, None])[:, 0] - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        tempered, log_total, actions, temperature = ctx.saved_tensors
        grad = (grad / temperature.to(grad.dtype))[:, None]  # [N, 1]
        to_logits = (tempered - log_total[:, None]).exp_().mul_(-grad)
        to_logits.scatter_add_(-1, actions[:, None], grad)
        return to_logits.to(ctx.dtype), None, None, None, None, None


def _entropy(logits: Tensor, log_total: Tensor) -> Tensor:
    """log sum exp(z) - sum p z, where what has no mass counts nothing."""
    p = (logits - log_total[:, None]).exp_()
    lowest = torch.finfo(logits.dtype).min
    return log_total - torch.einsum("nv,nv->n", p, logits.clamp(min=lowest))


def chunked_categorical(
    features: Float[Tensor, "N D"],
    head: Callable[[Tensor], Tensor],
    actions: Int[Tensor, "N"],
    temperature: Float[Tensor, "N"],
    *,
    chunk: int = 256,
    top_k: int = 0,
    top_p: float = 1.0,
    entropy: EntropyWanted = "none",
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"] | None]:
    """``categorical`` of ``head(features)`` without its logits [N, V].

    Under an ``nn.Linear``, in blocks of the vocabulary (``linear_categorical``). Under any other head, and where
    actions are cut to top-k or top-p, ``chunk`` rows at a time, whose logits the backward pass computes again.
    """
    if len(actions) and top_k == 0 and top_p == 1 and is_plain_linear(head) and head.weight.dtype == features.dtype:
        wanted = {"with_entropy": entropy != "none", "entropy_gradient": entropy == "gradient"}
        logprobs, nats = linear_categorical(features, head, actions, temperature, **wanted)
        return logprobs, None if entropy == "none" else nats

    def scorer() -> Callable[..., tuple[Tensor, Tensor | None]]:
        """One chunk's function, which knows whether it runs for the first time or in the backward pass."""
        wanted = [entropy]

        def one(x: Tensor, a: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            now = wanted[0]
            if now == "value":
                wanted[0] = "none"  # the second time is for the gradient, which a plain number does not need
            return categorical(head(x), a, t, top_k=top_k, top_p=top_p, entropy=now)

        return one

    parts: list[tuple[Tensor, Tensor | None]] = []
    for start in range(0, len(actions), chunk):
        rows = slice(start, start + chunk)
        arguments = (features[rows], actions[rows], temperature[rows])
        one = scorer()
        recompute = torch.is_grad_enabled()  # whatever requires a gradient: features, or the head alone
        parts.append(checkpoint(one, *arguments, use_reentrant=False) if recompute else one(*arguments))
    if not parts:
        empty = features.sum() * 0 + torch.zeros(0, device=features.device)
        return empty, None if entropy == "none" else empty
    entropies = [nats for _, nats in parts if nats is not None]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat(entropies) if entropies else None
