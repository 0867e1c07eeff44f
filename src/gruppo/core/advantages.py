"""Rewards to advantages: baselines, scales, and the statistics that outlive a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.core.groups import (
    AllGather,
    AllSum,
    batch_moments,
    group_reduce,
    group_std,
    group_sum,
    has_no_spread,
    rounding_error,
)

Baseline = Literal["none", "mean", "leave_one_out", "batch_mean", "running", "prompt", "critic"]
Scale = Literal["none", "group", "batch", "running", "prompt"]
PROMPT_HISTORY = 32
"""Last scored rewards of a prompt that its mean and standard deviation are taken over. The same on
all ranks."""


class Ema(NamedTuple):
    """Exponential moving average, corrected for its start at 0: sum / (1 - decay^n), as in Adam
    (arXiv 1412.6980)."""

    sum: float = 0.0
    weight: float = 0.0

    def update(self, x: float, decay: float) -> Ema:
        return Ema(decay * self.sum + (1 - decay) * x, decay * self.weight + (1 - decay))

    @property
    def value(self) -> float:
        return self.sum / self.weight if self.weight else 0.0


def group_advantages(
    rewards: Float[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    mask: Bool[Tensor, "B T"] | None = None,
    *,
    baseline: Baseline,
    scale: Scale,
    eps: float = 1e-4,
    decay: float = 0.99,
    state: Mapping[str, Any] | None = None,
    prompt_ids: Sequence[str] | None = None,
    owners: Int[Tensor, "B"] | None = None,
    all_sum: AllSum = lambda x: x,
    all_gather: AllGather = lambda x: [x],
) -> tuple[Float[Tensor, "B *T"], dict[str, Any]]:
    """Advantage of each row, and the running statistics after this batch.

    A = (r - baseline) / (scale + eps); without a scale, A = r - baseline.

    Baselines:
        mean           mean of the group
        leave_one_out  mean of the group's *other* rows, so that A = G / (G - 1) (r - mean) (RLOO,
                       arXiv 2402.14740)
        batch_mean     mean of the rows of all ranks
        running        moving average of ``batch_mean`` over steps. The advantages of a group then
                       carry the difficulty of its prompt
        prompt         mean of the last rewards of the same prompt
        none           0

    Scales, standard deviations with ddof 1:
        group          of the group's rewards (GRPO, arXiv 2402.03300)
        batch          of the raw rewards of all ranks
        running        of the rewards *within* groups: the root of a bias-corrected moving average
                       of the pooled variance, sum (r - mean)^2 / sum (G - 1)
        prompt         of the last rewards of the same prompt, found by ``prompt_ids``, one for each
                       group. With baseline ``prompt``, this is DDPO's per-prompt tracker (arXiv
                       2305.13301)

    Rewards that are not finite are not scored: they enter no statistic and get 0. A group with
    fewer than two scored rows, or without spread, gets exactly 0 under the group baselines and
    scale; so does a batch without spread under the batch scale. Differences within
    ``rounding_error`` count as none. ``eps`` 1e-4 is TRL's.

    With a ``mask``, each row's advantage is spread over its actions [B, T]; without one the result
    is [B]. ``owners`` names the sample that a reward belongs to, where a sample has several; the
    default is one for each reward. Computed in float64, returned in float32. ``state`` is JSON and
    the same on all ranks.
    """
    state = dict(state or {})
    scored = rewards.isfinite()
    # Rewards that are not finite count as 0 in sums and not at all in counts, so that no NaN
    # reaches a statistic.
    r = torch.where(scored, rewards, 0).double()
    owners = torch.arange(len(rewards), device=rewards.device) if owners is None else owners
    count = group_sum(scored.double(), group_ids)
    group_mean = (group_sum(r, group_ids) / count.clamp(min=1))[group_ids]
    if baseline in ("batch_mean", "running") or scale == "batch":
        batch_sum, batch_count = all_sum(torch.stack([r.sum(), scored.sum().double()]))
        batch_mean = batch_sum / batch_count.clamp(min=1)
    if "prompt" in (baseline, scale):
        if prompt_ids is None:
            raise ValueError(
                "baseline='prompt' and scale='prompt' need prompt_ids, one of each group."
            )
        new = [rewards[(group_ids == g) & scored].tolist() for g in range(len(prompt_ids))]
        state["prompts"] = updated = dict(state.get("prompts", {}))
        # Lists are replaced, never changed: a checkpoint may hold the old ones. Every rank adds the
        # rows of all ranks.
        for rank in all_gather(list(zip(prompt_ids, new, strict=True))):
            for prompt, scores in rank:
                updated[prompt] = [*updated.get(prompt, ()), *scores][-PROMPT_HISTORY:]
        history = [torch.tensor(updated[prompt], dtype=torch.float64) for prompt in prompt_ids]

    # The baseline of each row.
    if baseline == "none":
        base = torch.zeros_like(r)
    elif baseline == "mean":
        base = group_mean
    elif baseline == "leave_one_out":
        others = group_sum(r, group_ids)[group_ids] - group_sum(r, owners)[owners]
        base = others / (count[group_ids] - group_sum(scored.double(), owners)[owners]).clamp(min=1)
    elif baseline == "batch_mean":
        base = batch_mean
    elif baseline == "running":
        base = torch.full_like(r, _moving(state, "mean", batch_sum, batch_count, decay))
    else:
        base = torch.where(scored, torch.stack([past.mean() for past in history])[group_ids], 0)
    advantages = r - base

    silent = ~scored
    if baseline in ("batch_mean", "running", "prompt"):
        # a row equal to the mean of batches has nothing to learn
        silent = silent | (advantages.abs() <= rounding_error(rewards, base))
    if baseline in ("mean", "leave_one_out") or scale == "group":
        # a group needs two samples that differ
        first, last = (group_reduce(owners, group_ids, how) for how in ("amin", "amax"))
        silent = silent | (has_no_spread(rewards, group_ids) | (first == last))[group_ids]

    # The scale: a standard deviation, which has to exceed the rounding error of this magnitude.
    magnitude = r.abs()
    if scale == "group":
        std = group_std(rewards, group_ids)[group_ids]
        magnitude = torch.zeros_like(r)  # has_no_spread decides
    elif scale == "batch":
        square = all_sum(torch.where(scored, r - batch_mean, 0.0).square().sum())
        std = (square / (batch_count - 1).clamp(min=1)).sqrt()
        magnitude = batch_mean
    elif scale == "running":
        square = torch.where(scored, r - group_mean, 0.0).square() * (count > 1)[group_ids]
        freedom = torch.where(count > 1, count - 1, 0).sum()
        pooled, freedom = all_sum(torch.stack([square.sum(), freedom]))
        variance = _moving(state, "within_var", pooled, freedom, decay)
        std = torch.full_like(r, variance**0.5)
    elif scale == "prompt":
        stds = [past.std() if len(past) > 1 else past.new_tensor(torch.nan) for past in history]
        std = torch.stack(stds)[group_ids]
    if scale != "none":
        advantages = advantages / (std + eps)
        silent = silent | ~(std > rounding_error(rewards, magnitude))
    advantages = torch.where(silent, 0.0, advantages).to(torch.float32)
    return advantages if mask is None else torch.where(mask, advantages[:, None], 0.0), state


def _moving(state: dict[str, Any], name: str, total: Tensor, count: Tensor, decay: float) -> float:
    """A moving average of the state, updated by total / count unless nothing was counted."""
    average = Ema(*state.get(name, ()))
    if count > 0:
        average = average.update(float(total / count), decay)
    state[name] = list(average)
    return average.value


def step_advantages(
    rewards: Float[Tensor, "B T"], group_ids: Int[Tensor, "B *T"], **choices: Any
) -> tuple[Float[Tensor, "B T"], dict[str, Any]]:
    """``group_advantages`` of step rewards: all steps of a group are compared, wherever they end.

    ``group_ids``: of rows, or [B, T] of single steps, such as patches of an image.

    A = (r - mean R) / (std R + eps), R = every step reward of the group. Process supervision of
    DeepSeekMath (arXiv 2402.03300), section 4.1.3. ``leave_one_out`` leaves out all steps of the
    row itself. Entries that are not finite are no steps and get 0; so do the steps of a group in
    which only one row has any.
    """
    row, column = rewards.isfinite().nonzero(as_tuple=True)
    groups = group_ids[row] if group_ids.dim() == 1 else group_ids[row, column]
    advantages, state = group_advantages(rewards[row, column], groups, owners=row, **choices)
    return torch.zeros_like(rewards, dtype=torch.float32).index_put(
        (row, column), advantages
    ), state


def normalized_rewards(
    rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """(r - mean) / std of its group (ddof 1): GRPO's advantage without eps. 0 without spread, NaN
    where not scored.

    At most (G - 1) / sqrt(G), the value of one row that differs from G - 1 equal ones.
    """
    advantages, _ = group_advantages(rewards, group_ids, baseline="mean", scale="group", eps=0.0)
    return torch.where(rewards.isfinite(), advantages, torch.nan)


def normalized_sum(
    advantages: Sequence[Float[Tensor, "B"]],
    weights: Sequence[float],
    scored: Bool[Tensor, "B"],
    *,
    eps: float = 1e-4,
    all_sum: AllSum = lambda x: x,
) -> Float[Tensor, "B"]:
    """Weighted sum of rewards that were each normalized by themselves, normalized over the batch.

    A = (S - mean S) / (std S + eps),  S = sum_k w_k A_k, with ddof 1 over the scored rows of all
    ranks: GDPO (arXiv 2601.05242). The spread of a reward then does not decide its weight. Rows
    that are not scored get 0, and so do rows that differ from the mean by rounding alone.
    """
    total = torch.stack([w * a.double() for w, a in zip(weights, advantages, strict=True)]).sum(0)
    deviation, variance, magnitude = batch_moments(total, scored, all_sum)
    is_residue = deviation.abs() <= 4 * torch.finfo(torch.float32).eps * magnitude
    return torch.where(is_residue, 0.0, deviation / (variance.sqrt() + eps)).float()
