"""Two steps of a sampler, of which the first is drawn and one number is learned: the optimum is
known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.fakes_diffusion import whole
from torch import nn

from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import GRPO
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.diffusion import DenoiserPolicy, DiffusionSampling
from gruppo.types import Prompt, Request

DIMS, BETA = 3, 0.7
SLOPE = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64)


class OnePicture(nn.Module):
    """Whatever it is asked, the same x0."""

    def __init__(self) -> None:
        super().__init__()
        self.x0 = nn.Parameter(torch.tensor([0.5, -0.2, 0.0], dtype=torch.float64))

    def forward(self, x, times, condition):
        return self.x0.expand_as(x)


@pytest.mark.silent_bug(1)
@pytest.mark.silent_bug(17)
def test_the_kl_regularised_policy_gradient_ends_at_its_closed_form():
    """max E[g . x] - beta KL moves the mean by std^2 g / beta.

    On the flow's two steps the first one is N(x0 / 2, 1 / 4). The rows are mean +- sqrt(d) std e_i:
    their covariance is std^2 I exactly, so that the estimate of the gradient of a linear reward is
    its expectation, and the end is exact.
    """
    policy = DenoiserPolicy(OnePicture(), (DIMS,))
    reference, start = ReferenceModel(policy), policy.module.x0.detach().clone()
    sampled = policy.sample(
        [Request(Prompt("a", None), 2 * DIMS)], DiffusionSampling(max_actions=2), seed=0
    )
    corners = torch.cat([torch.eye(DIMS), -torch.eye(DIMS)]).double() * DIMS**0.5
    objective = replace(GRPO, kl="exact", average="sequence_sum", clip_low=1.0, clip_high=9.0)
    optimizer = torch.optim.SGD(policy.module.parameters(), lr=1.0)
    micro_batch = whole(sampled)
    for _ in range(60):
        states = policy.module.x0.detach() / 2 + corners / 2  # std 1 / 2
        rollouts = replace(sampled, actions=torch.stack([states, states], dim=1))
        advantages = (states @ SLOPE - (states @ SLOPE).mean())[:, None].expand(-1, 2)
        inputs = LossInputs(
            advantages,
            rollouts.mask,
            rollouts.mask / len(states),
            ref=reference.likelihood(rollouts, micro_batch, outputs=("gaussian",)),
        )
        terms, _ = policy_loss(
            policy.likelihood(rollouts, micro_batch, outputs=("gaussian",)), inputs, objective
        )
        optimizer.zero_grad()
        (terms["policy"] + BETA * terms["kl"]).backward()
        optimizer.step()
    shift = (policy.module.x0.detach() - start) / 2
    torch.testing.assert_close(shift, 0.25 * SLOPE / BETA, rtol=1e-6, atol=1e-9)
