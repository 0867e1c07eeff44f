"""The local engine: samples are the policy's own, stamped with the version of the weights that
chose them."""

from __future__ import annotations

import pytest
import torch
from tests.fakes import POLICIES, llama, plain, prompts, requests
from torch import nn

from gruppo.engines import LocalEngine
from gruppo.testing import check_engine
from gruppo.types import Sampling

SAMPLING = Sampling(max_actions=6)


@pytest.mark.slow
@pytest.mark.parametrize("make", POLICIES, ids=lambda make: make.__name__)
def test_it_keeps_the_contract_of_engines_with_every_policy(make):
    policy = make()
    check_engine(LocalEngine(policy), policy, prompts())


@pytest.mark.silent_bug(9)
def test_rows_carry_the_version_where_the_policy_chose():
    policy = plain()
    engine = LocalEngine(policy, version=4)
    rollouts = engine.generate(requests(2, 1), SAMPLING, seed=0)
    assert torch.equal(rollouts.policy_version, rollouts.mask * 4)
    engine.sync(policy, 5)
    assert engine.generate(requests(1), SAMPLING, seed=0).policy_version.max() == 5


@pytest.mark.silent_bug(9)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_sync_catches_weights_that_did_not_arrive(compute):
    """The policy's module was replaced, and sampling still runs on the old one."""
    policy = llama(compute=compute)
    engine = LocalEngine(policy)
    policy.module = llama(seed=1).module
    with pytest.raises(RuntimeError, match="version 1 did not arrive"):
        engine.sync(policy, 1)
    assert engine.version == 0


@pytest.mark.silent_bug(9)
def test_sync_catches_parameters_that_were_exchanged_under_a_copy():
    policy = llama(compute="bfloat16")
    engine = LocalEngine(policy)
    policy.module.lm_head.weight = policy.module.model.embed_tokens.weight = nn.Parameter(
        torch.ones(267 - 4, 32)
    )
    with pytest.raises(RuntimeError, match="did not arrive"):
        engine.sync(policy, 1)


@pytest.mark.silent_bug(9)
def test_sync_looks_at_every_parameter_and_all_over_it():
    """The last number of the last parameter alone did not arrive."""
    policy = llama(compute="bfloat16")
    engine = LocalEngine(policy)
    policy.copy.pairs.pop()  # the copy no longer follows it
    with torch.no_grad():
        list(policy.module.parameters())[-1][-1] += 1
    with pytest.raises(RuntimeError, match="did not arrive"):
        engine.sync(policy, 1)


def test_weights_that_are_nan_arrive_too():
    """What NaN means is decided where rollouts are read; it is no failure of the sync."""
    policy = plain()
    engine = LocalEngine(policy)
    with torch.no_grad():
        policy.module.head.weight.fill_(torch.nan)
    engine.sync(policy, 1)
    assert set(engine.generate(requests(2), SAMPLING, seed=0).finish) == {"error"}
    engine.close()
