"""Layers that are computed again in the backward pass keep less, and have the same gradients to the
last bit."""

from __future__ import annotations

import copy

import pytest
import torch
from tests import fakes
from tests.modalities.updates import SAMPLING, whole
from torch import nn

from gruppo.core.layers import layers_of, recompute_layers
from gruppo.types import GruppoError


def pass_over(policy):
    """Gradients of one forward and backward, and how many numbers were kept between the two."""
    rollouts = fakes.ragged(policy.sample(fakes.requests(3, 2), SAMPLING, seed=3))
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    policy.module.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = policy.likelihood(rollouts, whole(rollouts)).logprobs
    logprobs.sum().backward()
    return [
        parameter.grad.clone()
        for parameter in policy.module.parameters()
        if parameter.grad is not None
    ], sum(kept)


@pytest.mark.parametrize("make", [fakes.llama, fakes.gpt2, fakes.plain, fakes.adapted])
def test_recomputed_layers_have_the_same_gradients_to_the_last_bit_and_keep_less_than_half(make):
    policy = make()
    gradients, kept = pass_over(policy)
    policy.recompute()
    again, kept_again = pass_over(policy)
    assert all(map(torch.equal, gradients, again))
    assert len(gradients) == len(again)
    assert kept_again < kept / 2


def test_a_copy_of_a_recomputed_layer_runs_its_own_weights():
    layer = fakes.TinyGPT().blocks[0]
    recompute_layers(nn.Sequential(nn.ModuleList([layer])))
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    x = torch.ones(1, 3, 16)
    assert torch.equal(copied(x), x)
    assert not torch.equal(layer(x), x)


def test_layers_are_those_of_the_outermost_lists_or_the_parts_with_parts():
    model = fakes.TinyGPT()
    assert layers_of(model) == [*model.blocks]
    block = fakes.Block(16, 0.0)
    assert layers_of(block) == []  # its one part with parts has none that has any
    two = nn.ModuleDict(
        {"first": fakes.Block(16, 0.0), "second": fakes.Block(16, 0.0), "head": nn.Linear(16, 2)}
    )
    assert layers_of(two) == [two["first"], two["second"]]


def test_a_network_without_layers_is_refused():
    with pytest.raises(GruppoError, match=r"Linear has no layers.*Set optim\.recompute none"):
        recompute_layers(nn.Linear(2, 2))
