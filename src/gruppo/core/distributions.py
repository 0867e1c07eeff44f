"""Distributions over actions: categorical (sampling and scoring under one definition) and diagonal
normal.

Log-probabilities and entropies are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from gruppo.core.linear_head import EntropyMode, is_plain_linear, linear_categorical

CDF_BLOCK = 256
"""Columns summed at once by the two-level inverse CDF."""
LOGITS_PER_PASS = 2**19
"""Logits that ``sample_categorical`` works on at a time on a CPU, so that intermediate results stay
in its cache."""
SHORTLIST = 256
"""Initial number of sorted actions when sampling a truncated distribution."""
LOG_2_PI = math.log(2 * math.pi)


# --- temperature, top-k and top-p -----------------------------------------------------------------


def apply_temperature(
    logits: Float[Tensor, "N V"], temperature: Tensor | float
) -> Float[Tensor, "N V"]:
    """Logits in float32 at least, divided by the temperature. Dividing log-probabilities instead
    would be wrong."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, float | int):
        return logits if temperature == 1 else logits / temperature
    return logits / temperature[:, None].to(logits.dtype)


def apply_top_k_top_p(
    logits: Float[Tensor, "N V"],
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    always: Int[Tensor, "N"] | None = None,
) -> Float[Tensor, "N V"]:
    """-inf outside the top-k set, then outside the smallest set whose probability reaches top_p (at
    least one stays).

    Ties at the k-th logit are all kept. ``always`` keeps one action per row in any case. When
    scoring, it is the sampled action, whose logit rounding or an update may have moved across the
    edge.
    """
    kept = None
    if 0 < top_k < logits.shape[-1]:
        kept = logits >= logits.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1:
        limited = logits if kept is None else logits.masked_fill(~kept, -torch.inf)
        nucleus = _nucleus(limited.softmax(dim=-1), top_p)
        kept = nucleus if kept is None else kept & nucleus
    if kept is None:
        return logits
    if always is not None:
        kept = kept.scatter(-1, always[:, None], True)
    return logits.masked_fill(~kept, -torch.inf)


def _nucleus(p: Float[Tensor, "N V"], top_p: float) -> Bool[Tensor, "N V"]:
    """The most likely actions until they reach ``top_p``; ties go to the first."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    # the mass before this action is still short of top_p
    reached = ordered.cumsum(dim=-1) - ordered < top_p
    return torch.zeros_like(reached).scatter(-1, order, reached)


# --- sampling -------------------------------------------------------------------------------------


def sample_categorical(
    logits: Float[Tensor, "N V"],
    uniforms: Float[Tensor, "N"],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Int[Tensor, "N"], Float[Tensor, "N"]]:
    """Actions by the inverse CDF at the given uniforms, and their log-probabilities. Temperature 0
    is the argmax.

    One uniform per action makes every sample addressable. The CDF is summed in blocks, so no [N, V]
    cumulative sum is formed; that of a truncated distribution is over the likely actions alone. A
    greedy action has its log-probability at temperature 1.
    """
    rows = LOGITS_PER_PASS // logits.shape[-1] if logits.device.type == "cpu" else len(logits)
    parts = []
    for start in range(0, len(logits), max(rows, 1)):
        part = slice(start, start + max(rows, 1))
        scaled = apply_temperature(logits[part], temperature or 1.0)
        if temperature == 0:
            actions = scaled.argmax(dim=-1)
            logprobs = scaled.gather(-1, actions[:, None])[:, 0] - scaled.logsumexp(dim=-1)
            parts.append((actions, logprobs))
        else:
            own_uniforms = uniforms[part].to(logits.device)
            if 0 < top_k < logits.shape[-1] or top_p < 1:
                parts.append(_sample_truncated(scaled, own_uniforms, top_k, top_p))
            else:
                parts.append(_sample_logits(scaled, own_uniforms))
    actions, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return actions, logprobs


def _sample_logits(
    logits: Float[Tensor, "N V"], uniforms: Float[Tensor, "N"]
) -> tuple[Tensor, Tensor]:
    """First action whose cumulative probability exceeds the uniform, found by block and then within
    the block."""
    p = logits.softmax(dim=-1)  # in one pass over memory, unlike exp and sum
    vocabulary = p.shape[-1]
    whole = vocabulary - vocabulary % CDF_BLOCK
    mass = p[:, :whole].unflatten(-1, (-1, CDF_BLOCK)).sum(dim=-1)  # [N, blocks]
    if whole < vocabulary:
        mass = torch.cat([mass, p[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    mass = mass.double()
    block, remainder = _invert_cdf(mass, uniforms.to(mass) * mass.sum(dim=-1))
    # Within the block the search goes on with what remains of the uniform.
    columns = block[:, None] * CDF_BLOCK + torch.arange(CDF_BLOCK, device=p.device)
    within = p.gather(-1, columns.clamp(max=vocabulary - 1))  # [N, CDF_BLOCK]
    within = within.masked_fill(columns >= vocabulary, 0).double()
    column, _ = _invert_cdf(within, remainder)
    # beyond the end only for logits that are not finite
    actions = (block * CDF_BLOCK + column).clamp(max=vocabulary - 1)
    return actions, p.gather(-1, actions[:, None])[:, 0].log()


def _invert_cdf(mass: Float[Tensor, "N C"], target: Float[Tensor, "N"]) -> tuple[Tensor, Tensor]:
    """First index whose cumulative mass exceeds the target, and the target minus the mass before
    the index.

    An index without mass is never chosen: where rounding runs beyond the end, the last one with
    mass is.
    """
    cumulative = mass.cumsum(dim=-1)
    last = mass.shape[-1] - 1 - (mass > 0).flip(-1).int().argmax(dim=-1)
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].minimum(last)
    before = cumulative.gather(-1, index[:, None])[:, 0] - mass.gather(-1, index[:, None])[:, 0]
    return index, (target - before).clamp(min=0)


def _sample_truncated(
    logits: Float[Tensor, "N V"], uniforms: Float[Tensor, "N"], top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """``_sample_logits`` of ``apply_top_k_top_p``, sorting only a shortlist of the most likely
    actions.

    A row whose truncated set may extend beyond its shortlist gets a longer one. Actions that tie
    with the edge of the set must be on the list; it is in the order of the vocabulary, as without a
    shortlist.
    """
    rows, vocabulary = logits.shape
    actions, logprobs = logits.new_zeros(rows, dtype=torch.long), logits.new_zeros(rows)
    pending = torch.arange(rows, device=logits.device)
    width = max(SHORTLIST, 2 * top_k)
    while len(pending):
        some, width = logits[pending], min(width, vocabulary)
        values, ids = some.topk(width, dim=-1)
        ids, by_id = ids.sort(dim=-1)
        lowest, values = values[:, -1:], values.gather(-1, by_id)
        if 0 < top_k < vocabulary:
            values = apply_top_k_top_p(values, top_k=top_k, top_p=1.0)
            is_whole = (values > lowest) | values.isneginf()
            values = apply_top_k_top_p(values, top_p=top_p)
        else:
            p = some.softmax(dim=-1).gather(-1, ids)
            kept = _nucleus(p, top_p)
            is_whole = (p > p.amin(dim=-1, keepdim=True)) | ~kept
            values = values.masked_fill(~kept, -torch.inf)
        sampled, logprobs[pending] = _sample_logits(values, uniforms[pending])
        actions[pending] = ids.gather(-1, sampled[:, None])[:, 0]
        pending = pending[~(is_whole.all(dim=-1) | (width == vocabulary))]
        width *= 16
    return actions, logprobs


# --- scoring --------------------------------------------------------------------------------------


def categorical(
    logits: Float[Tensor, "N V"],
    actions: Int[Tensor, "N"],
    temperature: Float[Tensor, "N"],
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    entropy: EntropyMode = "none",
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"] | None]:
    """Log-probabilities of the actions under the distribution that ``sample_categorical`` samples,
    and its entropy."""
    if entropy == "gradient":
        scaled = apply_temperature(logits, temperature)
        scaled = apply_top_k_top_p(scaled, top_k=top_k, top_p=top_p, always=actions)
        log_p = scaled.log_softmax(dim=-1)
        # 0 log 0 = 0, gradients too
        nats = -(log_p.exp() * torch.where(log_p.isfinite(), log_p, 0)).sum(dim=-1)
        return log_p.gather(-1, actions[:, None])[:, 0], nats
    has_entropy = entropy == "value"
    logprobs, nats = _CategoricalLogprob.apply(
        logits, actions, temperature, top_k, top_p, has_entropy
    )
    return logprobs, nats if has_entropy else None


class _CategoricalLogprob(torch.autograd.Function):
    """One log-probability per row, and the entropy as a number, in few passes over [N, V].

    d logprob / d logits = (one-hot - p) / temperature. A test compares it with the plain
    computation of ``entropy="gradient"``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        actions: Tensor,
        temperature: Tensor,
        top_k: int,
        top_p: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        scaled = apply_temperature(logits, temperature)
        scaled = apply_top_k_top_p(scaled, top_k=top_k, top_p=top_p, always=actions)
        log_total = scaled.logsumexp(dim=-1)
        ctx.save_for_backward(scaled, log_total, actions, temperature)
        ctx.dtype = logits.dtype
        entropy = torch.zeros_like(log_total)
        if with_entropy:
            # log sum exp(z) - sum p z, where -inf becomes a number so that 0 times it is 0
            p = (scaled - log_total[:, None]).exp_()
            z = scaled.clamp(min=torch.finfo(scaled.dtype).min)
            entropy = log_total - torch.einsum("nv,nv->n", p, z)
        ctx.mark_non_differentiable(entropy)
        return scaled.gather(-1, actions[:, None])[:, 0] - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        scaled, log_total, actions, temperature = ctx.saved_tensors
        grad = (grad / temperature.to(grad.dtype))[:, None]  # [N, 1]
        grad_logits = (scaled - log_total[:, None]).exp_().mul_(-grad)
        grad_logits.scatter_add_(-1, actions[:, None], grad)
        return grad_logits.to(ctx.dtype), None, None, None, None, None


def chunked_categorical(
    features: Float[Tensor, "N D"],
    head: Callable[[Tensor], Tensor],
    actions: Int[Tensor, "N"],
    temperature: Float[Tensor, "N"],
    *,
    chunk: int = 256,
    top_k: int = 0,
    top_p: float = 1.0,
    entropy: EntropyMode = "none",
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"] | None]:
    """``categorical`` of ``head(features)`` without holding its logits [N, V].

    With an ``nn.Linear`` and no truncation, in blocks of the vocabulary (``linear_categorical``).
    Otherwise in chunks of ``chunk`` rows, whose logits the backward pass computes again; on a CPU,
    an ``nn.Linear`` under top_k computes those of the actions alone that some row may take.
    """
    if len(actions) and is_plain_linear(head) and head.weight.dtype == features.dtype:
        if top_k == 0 and top_p == 1:
            return linear_categorical(features, head, actions, temperature, entropy)
        if 0 < top_k < len(head.weight) // 8 and features.device.type == "cpu":
            columns = possible_actions(features, head, actions, top_k, chunk)
            # else a copy of the head costs more than it saves
            if len(columns) <= len(head.weight) // 2:
                bias = None if head.bias is None else head.bias[columns]
                head = partial(linear, weight=head.weight.index_select(0, columns), bias=bias)
                actions = torch.searchsorted(columns, actions)

    def score(x: Tensor, a: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        return categorical(head(x), a, t, top_k=top_k, top_p=top_p, entropy=entropy)

    # whatever requires a gradient: features, or the head alone
    run = partial(checkpoint, score, use_reentrant=False) if torch.is_grad_enabled() else score
    inputs = (x.split(chunk) for x in (features, actions, temperature))
    logprobs, nats = zip(*map(run, *inputs), strict=True)
    return torch.cat(logprobs), None if entropy == "none" else torch.cat(nats)


@torch.no_grad()
def possible_actions(
    features: Float[Tensor, "N D"],
    head: nn.Linear,
    actions: Int[Tensor, "N"],
    top_k: int,
    chunk: int,
) -> Int[Tensor, "C"]:
    """Actions, in order, among which are the top-k set of each row, ties at its edge included, and
    the row's action.

    All others have probability 0, so that neither a log-probability nor its gradient needs their
    logits.
    """
    found = [actions]
    for start in range(0, len(features), chunk):
        logits = head(features[start : start + chunk])  # [n, V]
        values, ids = logits.topk(min(2 * top_k + 8, logits.shape[-1]), dim=-1)
        found.append(ids.flatten())
        # a division by the temperature may make two logits of float32 equal, if they are neighbors
        edge = values[:, top_k - 1] - 1e-6 * values[:, top_k - 1].abs()
        beyond = ~(values[:, -1] < edge)  # NaN too
        found.append((logits[beyond] >= edge[beyond, None]).any(dim=0).nonzero()[:, 0])
    return torch.cat(found).unique()


# --- diagonal normal ------------------------------------------------------------------------------


def like_events(std: Tensor, mean: Float[Tensor, "b t ..."]) -> Float[Tensor, "b t ..."]:
    """A standard deviation in float64, [b, t] or like the mean, with the mean's dimensions."""
    return std.double().reshape(*std.shape, *[1] * (mean.ndim - std.ndim))


def sum_events(nats: Tensor, mean: Float[Tensor, "b t ..."]) -> Float[Tensor, "B T"]:
    """Sum over event dimensions, those after the first two of the mean."""
    nats = nats.expand(mean.shape)
    return nats.flatten(2).sum(dim=-1) if mean.ndim > 2 else nats


def gaussian_logprob(
    x: Float[Tensor, "b t ..."], mean: Float[Tensor, "b t ..."], std: Tensor
) -> Float[Tensor, "B T"]:
    """log N(x; mean, std^2 I) = -|x - mean|^2 / (2 std^2) - d log std - (d / 2) log 2 pi, over
    event dimensions.

    ``std`` has the shape of ``mean``, or its first two dimensions [b, t]. In float64: over 16,384
    dimensions at a std of 0.02, float32 loses 8e-3 nats.
    """
    std = like_events(std, mean)
    z = (x.double() - mean.double()) / std
    return sum_events(-z.square() / 2 - std.log() - LOG_2_PI / 2, mean)


def gaussian_entropy(mean: Float[Tensor, "b t ..."], std: Tensor) -> Float[Tensor, "B T"]:
    """d log std + (d / 2) (1 + log 2 pi), float64. Only the shape of ``mean`` is used."""
    return sum_events(like_events(std, mean).log() + (1 + LOG_2_PI) / 2, mean)
