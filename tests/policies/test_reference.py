"""The frozen reference: the policy as it was, at a KL of exactly 0 until the policy moves."""

from __future__ import annotations

import pytest
import torch
from tests.fakes import POLICIES, plain, requests

from gruppo.policies.reference import FrozenReference
from gruppo.types import Sampling


@pytest.fixture(params=[(make, compute) for make in POLICIES for compute in ("float32", "bfloat16")], ids=str)
def policy(request):
    make, compute = request.param
    return make(compute=compute) if make is not plain else make()


def both(policy, reference, rollouts):
    pairs = [
        (policy.likelihood(rollouts, piece).logprobs, reference.likelihood(rollouts, piece).logprobs)
        for piece in policy.pieces(rollouts, rollouts.mask, 60)
    ]
    return [torch.cat([pair[n].flatten() for pair in pairs]) for n in (0, 1)]


def step(policy, rollouts):
    for piece in policy.pieces(rollouts, rollouts.mask, 10**9):
        policy.likelihood(rollouts, piece).logprobs.sum().backward()
    torch.optim.AdamW(policy.module.parameters(), lr=0.1, fused=True).step()


@pytest.mark.silent_bug(18)
def test_the_kl_of_an_unchanged_policy_is_exactly_zero_and_of_a_changed_one_not(policy):
    rollouts = policy.sample(requests(3, 2, 2), Sampling(temperature=0.8, max_actions=8), seed=0)
    reference = FrozenReference(policy)
    now, then = both(policy, reference, rollouts)
    assert torch.equal(now, then) and now.requires_grad and not then.requires_grad
    step(policy, rollouts)
    moved, still = both(policy, reference, rollouts)
    assert torch.equal(still, then) and (moved - still).abs().mean() > 0.1


@pytest.mark.silent_bug(18)
def test_the_reference_stays_as_it_was_through_updates_and_modes(policy):
    reference = FrozenReference(policy)
    rollouts = policy.sample(requests(3, 2, 2), Sampling(max_actions=8), seed=0)
    before = {name: value.clone() for name, value in reference.module.state_dict().items()}
    step(policy, rollouts)
    reference.update(policy, 1)
    policy.module.train()
    assert all(torch.equal(value, before[name]) for name, value in reference.module.state_dict().items())
    assert not reference.module.training and not any(p.requires_grad for p in reference.module.parameters())
    assert {id(p) for p in reference.module.parameters()}.isdisjoint(id(p) for p in policy.module.parameters())


def test_the_reference_gives_the_policy_no_gradient():
    policy = plain()
    reference = FrozenReference(policy)
    rollouts = policy.sample(requests(2), Sampling(max_actions=4), seed=0)
    (piece,) = policy.pieces(rollouts, rollouts.mask, 10**9)
    likelihood = reference.likelihood(rollouts, piece, want=("entropy",))
    assert not likelihood.logprobs.requires_grad and likelihood.entropy is not None
