"""Rewards to advantages: what a reward is compared with, and what the difference is divided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.core.running import Ema, prompt_mean, prompt_std, remembered
from gruppo.core.weights import AllSum, identity

Baseline = Literal["none", "mean", "leave_one_out", "batch_mean", "running", "prompt", "critic"]
Scale = Literal["none", "group", "batch", "running", "prompt"]
Share = Callable[[Any], list[Any]]


def alone(x: Any) -> list[Any]:
    """What each rank gives, over one process."""
    return [x]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rewards of one batch, with what every baseline and scale asks of them."""

    rewards: Float[Tensor, "B"]
    scored: Bool[Tensor, "B"]
    r: Float[Tensor, "B"]
    """float64; 0 where not scored."""
    group_ids: Int[Tensor, "B"]
    count: Float[Tensor, "groups"]
    """Scored rows of each group."""
    all_sum: AllSum
    owners: Int[Tensor, "B"]
    """Which of them are one sample's; without steps, each is of its own."""

    @classmethod
    def of(cls, rewards: Tensor, group_ids: Tensor, all_sum: AllSum, owners: Tensor | None = None) -> _Rows:
        scored = rewards.isfinite()
        count = _per_group(scored.double(), group_ids, _groups(group_ids))
        owners = torch.arange(len(rewards), device=rewards.device) if owners is None else owners
        return cls(rewards, scored, torch.where(scored, rewards, 0).double(), group_ids, count, all_sum, owners)

    def batch_mean(self) -> tuple[Tensor, Tensor]:
        """Over the scored rows of all ranks, and how many they are."""
        total = self.all_sum(torch.stack([self.r.sum(), self.scored.sum().double()]))
        return total[0] / total[1].clamp(min=1), total[1]

    def deviation(self, mean: Tensor) -> Tensor:
        return torch.where(self.scored, self.r - mean, 0.0)


def group_advantages(
    rewards: Float[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    mask: Bool[Tensor, "B T"],
    *,
    baseline: Baseline,
    scale: Scale,
    eps: float = 1e-4,
    decay: float = 0.99,
    state: Mapping[str, Any] | None = None,
    prompt_ids: Sequence[str] | None = None,
    owners: Int[Tensor, "B"] | None = None,
    all_sum: AllSum = identity,
    share: Share = alone,
) -> tuple[Float[Tensor, "B T"], dict[str, Any]]:
    """One advantage a row, spread over its actions; and the running statistics after this batch.

    A = (r - baseline) / (scale + eps); without a scale, A = r - baseline.

    Baselines: the group's mean; ``leave_one_out``, the mean of the group's *other* rows, G / (G - 1) (r - mean)
    (RLOO, arXiv 2402.14740); ``batch_mean``, over the rows of all ranks; ``running``, its moving average over steps,
    which turns the advantage of a group into the difficulty of its prompt; ``prompt``, the mean of the last rewards of
    the same prompt; ``none``.

    Scales: standard deviation with ddof 1 of the group's rewards (GRPO, arXiv 2402.03300); ``batch``, of all raw
    rewards on all ranks; ``running``, of the rewards *within* groups, as a moving average of the pooled variance,
    bias-corrected; ``prompt``, of the last rewards of the same prompt over all its draws, found by ``prompt_ids``,
    one for each group. Baseline and scale ``prompt`` together are DDPO's (arXiv 2305.13301).

    Rewards that are not finite are not scored: they enter no statistic and get 0. A group with fewer than two scored
    rows has nothing to compare and gets 0 under the group baselines. So does, exactly, a group without spread; under
    the batch scale a batch without; and under a mean of batches a row equal to it. A difference counts as none when it
    is rounding residue, which no eps tells apart from signal. ``eps`` 1e-4 is TRL's.
    Computed in float64, returned in float32. ``state`` is JSON; the same on all ranks.
    """
    rows, state = _Rows.of(rewards, group_ids, all_sum, owners), dict(state or {})
    if "prompt" in (baseline, scale):
        if prompt_ids is None:
            raise ValueError("baseline='prompt' and scale='prompt' need prompt_ids, one for each group.")
        state["prompts"] = remembered(rewards, group_ids, prompt_ids, state.get("prompts", {}), share)
    base = _baseline(rows, baseline, decay, state, prompt_ids)
    advantages, silent = rows.r - base, ~rows.scored
    if baseline in ("batch_mean", "running", "prompt"):  # row by row, so every rank decides alone
        silent = silent | (advantages.abs() <= _residue(rewards, base))
    if baseline in ("mean", "leave_one_out") or scale == "group":
        silent = silent | has_no_spread(rewards, group_ids)[group_ids] | is_alone(group_ids, rows.owners)
    if scale != "none":
        std, size = _scale(rows, scale, decay, state, prompt_ids)
        advantages = advantages / (std + eps)
        silent = silent | ~(std > _residue(rewards, size))
    advantages = torch.where(silent, 0.0, advantages).to(torch.float32)
    return torch.where(mask, advantages[:, None], 0.0), state


def step_advantages(
    rewards: Float[Tensor, "B T"], group_ids: Int[Tensor, "B"], **choices: Any
) -> tuple[Float[Tensor, "B T"], dict[str, Any]]:
    """``group_advantages`` of the steps of rows, wherever they stand: all steps of a group's rows are compared.

    A = (r - mean R) / (std R + eps), R = every step reward of the group: process supervision of DeepSeekMath
    (arXiv 2402.03300), section 4.1.3. ``leave_one_out`` leaves out all steps of the own row. What is not finite is no
    step, and gets 0; so do the steps of a group of which one row alone has any.
    """
    row, column = rewards.isfinite().nonzero(as_tuple=True)
    once = torch.ones(len(row), 1, dtype=torch.bool, device=rewards.device)
    steps, state = group_advantages(rewards[row, column], group_ids[row], once, owners=row, **choices)
    return torch.zeros_like(rewards, dtype=torch.float32).index_put((row, column), steps[:, 0]), state


def position_advantages(
    rewards: Float[Tensor, "B T"], group_ids: Int[Tensor, "B"], mask: Bool[Tensor, "B T"], **choices: Any
) -> tuple[Float[Tensor, "B T"], dict[str, Any]]:
    """``group_advantages`` of rewards that each belong to one action (patches): a column of a group is a group."""
    rows, columns = mask.shape
    ids = group_ids[:, None] * columns + torch.arange(columns, device=group_ids.device)
    flat = torch.where(mask, rewards, torch.nan).flatten()
    advantages, state = group_advantages(flat, ids.flatten(), mask.reshape(-1, 1), **choices)
    return advantages.reshape(rows, columns), state


# --- baselines -------------------------------------------------------------------------------------------------------


def _baseline(
    rows: _Rows, baseline: str, decay: float, state: dict[str, Any], prompt_ids: Sequence[str] | None
) -> Tensor:
    if baseline == "prompt":
        assert prompt_ids is not None
        return torch.where(rows.scored, prompt_mean(state["prompts"], prompt_ids)[rows.group_ids], 0)
    if baseline == "running":
        mean, count = rows.batch_mean()
        moving = Ema.of(state.get("mean")).after(float(mean), decay) if count > 0 else Ema.of(state.get("mean"))
        state["mean"] = moving.to_list()
        return torch.full_like(rows.r, moving.value)
    return BASELINES[baseline](rows)


def _group_mean(rows: _Rows) -> Tensor:
    total = _per_group(rows.r, rows.group_ids, len(rows.count))
    return (total / rows.count.clamp(min=1))[rows.group_ids]


def _leave_one_out(rows: _Rows) -> Tensor:
    owners, scored = _groups(rows.owners), rows.scored.double()
    others = _per_group(rows.r, rows.group_ids, len(rows.count))[rows.group_ids]
    others = others - _per_group(rows.r, rows.owners, owners)[rows.owners]
    count = rows.count[rows.group_ids] - _per_group(scored, rows.owners, owners)[rows.owners]
    return others / count.clamp(min=1)


BASELINES: dict[str, Callable[[_Rows], Tensor]] = {
    "none": lambda rows: torch.zeros_like(rows.r),
    "mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "batch_mean": lambda rows: rows.batch_mean()[0],
}


# --- scales: the standard deviation, and the size of the numbers it was made of ---------------------------------------


def _scale(
    rows: _Rows, scale: str, decay: float, state: dict[str, Any], prompt_ids: Sequence[str] | None
) -> tuple[Tensor, Tensor]:
    largest = torch.where(rows.scored, rows.r, 0).abs()
    if scale == "group":
        return group_std(rows.rewards, rows.group_ids)[rows.group_ids], torch.zeros_like(rows.r)  # has_no_spread rules
    if scale == "batch":
        mean, count = rows.batch_mean()
        square = rows.all_sum(rows.deviation(mean).square().sum())
        return (square / (count - 1).clamp(min=1)).sqrt(), mean
    if scale == "running":
        return _running_within(rows, decay, state), largest
    assert prompt_ids is not None
    return prompt_std(state["prompts"], prompt_ids)[rows.group_ids], largest


def _running_within(rows: _Rows, decay: float, state: dict[str, Any]) -> Tensor:
    """Square root of the moving average of the pooled within-group variance, sum (r - mean)^2 / sum (G - 1)."""
    has_two = rows.count > 1
    square = rows.deviation(_group_mean(rows)).square() * has_two[rows.group_ids]
    freedom = torch.where(has_two, rows.count - 1, 0).sum()
    total = rows.all_sum(torch.stack([square.sum(), freedom]))
    moving = Ema.of(state.get("within_var"))
    if total[1] > 0:
        moving = moving.after(float(total[0] / total[1]), decay)
    state["within_var"] = moving.to_list()
    return torch.full_like(rows.r, moving.value**0.5)


def group_std(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Float[Tensor, "groups"]:
    """Standard deviation (ddof 1) of each group's scored rewards, float64; NaN for a group with fewer than two."""
    rows = _Rows.of(rewards, group_ids, identity)
    square = _per_group(rows.deviation(_group_mean(rows)).square(), group_ids, len(rows.count))
    return (square / (rows.count - 1).where(rows.count > 1, torch.nan)).sqrt()


def has_no_spread(rewards: Float[Tensor, "B"], group_ids: Int[Tensor, "B"]) -> Bool[Tensor, "groups"]:
    """Groups with fewer than two scored rewards, or whose rewards are equal up to 4 rounding errors of their dtype."""
    scored, groups = rewards.isfinite(), _groups(group_ids)
    high = _reduce(torch.where(scored, rewards, -torch.inf), group_ids, groups, "amax")
    low = _reduce(torch.where(scored, rewards, torch.inf), group_ids, groups, "amin")
    count = _per_group(scored.double(), group_ids, groups)
    return (count < 2) | (high - low <= _residue(rewards, torch.maximum(high.abs(), low.abs())))


def is_alone(group_ids: Int[Tensor, "B"], owners: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
    """Rewards in whose group all are of one sample: there is none to compare it with."""
    groups = _groups(group_ids)
    first, last = (_reduce(owners, group_ids, groups, how) for how in ("amin", "amax"))
    return (first == last)[group_ids]


def _residue(rewards: Tensor, size: Tensor) -> Tensor:
    """What rounding alone can make of equal rewards of that size."""
    return 4 * torch.finfo(rewards.dtype).eps * size.abs()


def _groups(group_ids: Tensor) -> int:
    return int(group_ids.max()) + 1 if group_ids.numel() else 0


def _per_group(x: Tensor, group_ids: Tensor, groups: int) -> Tensor:
    return x.new_zeros(groups).index_add(0, group_ids, x)


def _reduce(x: Tensor, group_ids: Tensor, groups: int, how: str) -> Tensor:
    return x.new_zeros(groups).scatter_reduce(0, group_ids, x, how, include_self=False)
