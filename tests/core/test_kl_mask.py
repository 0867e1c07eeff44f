"""The KL mask: which actions it leaves out, and the exact KL to the old policy of normals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import GRPO, REINFORCE, Objective
from gruppo.types import Gaussian, GruppoError, Likelihood

LOG_RATIO = torch.tensor([[0.5, 0.5, -0.5, -0.5], [0.05, 0.5, 0.5, 0.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0, -1.0, -1.0, 1.0], [1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
KEEP = torch.tensor([[True, True, True, True], [True, True, False, True]])
WEIGHTS = KEEP.double() * torch.arange(1, 9).reshape(2, 4) / 10
OLD = torch.full((2, 4), -3.0, dtype=torch.float64)
LEFT_OUT = torch.tensor([[True, False, True, False], [False, False, False, False]])
"""k3 is 0.149 at 0.5, 0.107 at -0.5 and 0.001 at 0.05; beyond 0.1, what the advantage pushes
further."""
WIDE = Objective(clip_low=0.99, clip_high=9.0)


def loss_of(
    objective: Objective, logprobs: torch.Tensor, weights: torch.Tensor = WEIGHTS, **changes
):
    inputs = LossInputs(ADVANTAGES, KEEP, weights, OLD)
    gaussian = changes.pop("gaussian", None)
    return policy_loss(
        Likelihood(logprobs, gaussian=gaussian), replace(inputs, **changes), objective
    )


@pytest.mark.silent_bug(6)
@pytest.mark.parametrize(
    "objective", [WIDE, replace(WIDE, surrogate="cispo"), replace(WIDE, dims="mean")]
)
def test_actions_beyond_the_mask_that_would_move_further_are_left_out_and_no_others(objective):
    """The gradient is that of the batch without them; the denominators stay."""
    logprobs = (OLD + LOG_RATIO).requires_grad_()
    terms, stats = loss_of(replace(objective, kl_mask=0.1), logprobs)
    assert (stats["clip/kl_mask_frac"].count, stats["clip/kl_mask_frac"].sum) == (7, 2)
    gradient = torch.autograd.grad(terms["policy"], logprobs)[0]
    without, _ = loss_of(objective, logprobs, WEIGHTS.where(~LEFT_OUT, 0))
    assert torch.equal(gradient, torch.autograd.grad(without["policy"], logprobs)[0])
    assert terms["policy"].item() == without["policy"].item()
    assert (
        not gradient[LEFT_OUT].any()
        and gradient[0, 1] != 0
        and gradient[0, 3] != 0
        and gradient[1, 0] != 0
    )


@pytest.mark.parametrize(("mask", "count"), [(0.106, 2), (0.107, 1), (0.15, 0)])
def test_the_estimate_of_tokens_is_k3_of_the_old_policy_s_action(mask, count):
    """0.1487 = e^0.5 - 1 - 0.5, and 0.1065 = e^-0.5 - 1 + 0.5."""
    _, stats = loss_of(replace(WIDE, kl_mask=mask), OLD + LOG_RATIO)
    assert stats["clip/kl_mask_frac"].sum == count


def normals() -> tuple[Gaussian, Gaussian]:
    """KL 2 delta^2 / (2 0.5^2) at a std of 0.5 in two dimensions that move by delta; not kept ones
    are NaN."""
    delta = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, torch.nan, 0.0]], dtype=torch.float64)
    std = torch.full((2, 4), 0.5, dtype=torch.float64)
    old = torch.zeros(2, 4, 2, dtype=torch.float64)
    return Gaussian(delta[..., None].expand(2, 4, 2).clone(), std), Gaussian(old, std)


KL_OLD = torch.tensor([[0.04, 0.16, 0.36, 0.64], [1.0, 1.44, 0.0, 0.0]], dtype=torch.float64)


@pytest.mark.silent_bug(41)
def test_the_kl_to_an_old_normal_is_exact_whatever_the_log_ratios_are():
    ours, old = normals()
    _, stats = loss_of(WIDE, OLD + LOG_RATIO, gaussian=ours, old_gaussian=old)
    for name in ("kl/old_nats", "kl/old_k3_nats"):
        assert stats[name].count == 7 and stats[name].mean == pytest.approx(
            float(KL_OLD.sum()) / 7, rel=1e-12
        )
        assert stats[name].max == pytest.approx(1.44, rel=1e-12)


@pytest.mark.silent_bug(6)
def test_the_mask_of_normals_reads_their_exact_kl_and_which_way_from_the_log_ratio():
    ours, old = normals()
    logprobs = (OLD + LOG_RATIO).requires_grad_()
    further = KEEP & (ADVANTAGES * LOG_RATIO > 0)  # 0.04, 0.36 and 1.0 nats
    for mask, left_out in (
        (0.03, further),
        (0.3, further & (KL_OLD > 0.3)),
        (1.1, torch.zeros(2, 4).bool()),
    ):
        terms, stats = loss_of(
            replace(WIDE, kl_mask=mask), logprobs, gaussian=ours, old_gaussian=old
        )
        assert stats["clip/kl_mask_frac"].sum == int(left_out.sum())
        gradient = torch.autograd.grad(terms["policy"], logprobs)[0]
        without, _ = loss_of(WIDE, logprobs, WEIGHTS.where(~left_out, 0))
        assert torch.equal(gradient, torch.autograd.grad(without["policy"], logprobs)[0])


@pytest.mark.silent_bug(41)
def test_the_kl_to_a_reference_of_normals_is_told_exactly_also_in_the_reward():
    ours, ref = normals()
    objective = replace(REINFORCE, kl="k1", kl_in="reward")
    terms, stats = loss_of(objective, OLD, gaussian=ours, ref=Likelihood(OLD - 50, gaussian=ref))
    assert "kl" not in terms and stats["kl/ref_nats"].mean == pytest.approx(
        float(KL_OLD.sum()) / 7, rel=1e-12
    )


def test_k3_of_a_normal_and_the_closed_form_of_tokens_are_refused():
    with pytest.raises(GruppoError, match=r"kl='k3' of a Gaussian policy.*Set objective.kl exact"):
        GRPO.check(group_size=4, kl_coef=0.1, is_gaussian=True)
    with pytest.raises(GruppoError, match=r"kl='exact' is the closed form.*Set objective.kl k3"):
        replace(GRPO, kl="exact").check(group_size=4, kl_coef=0.1)
    replace(GRPO, kl="exact").check(group_size=4, kl_coef=0.1, is_gaussian=True)
    GRPO.check(group_size=4, is_gaussian=True)  # nothing is measured
