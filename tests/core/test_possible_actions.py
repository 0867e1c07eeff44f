"""Under top_k, a head over the actions that some row may take gives what the whole head gives."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from gruppo.core import distributions
from gruppo.core.distributions import categorical, chunked_categorical, possible_actions

ROWS, WIDTH, VOCABULARY = 9, 6, 203


def example(dtype=torch.float64, *, step=0.0, scale=1.0):
    """``step``: logits are multiples of it, so that many are equal."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    features = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            if step:
                parameter.copy_((parameter / step).round() * step)
    features = ((features / step).round() * step if step else features).to(dtype)
    actions = torch.randint(
        VOCABULARY, (ROWS,), generator=generator
    )  # most of them outside the top k
    return head, features.requires_grad_(), actions, 0.5 + torch.rand(ROWS, generator=generator)


def outcome(score, head, features):
    logprobs, nats = score(features)
    weights = torch.arange(1.0, len(logprobs) + 1, dtype=logprobs.dtype)
    loss = (weights * logprobs).sum() + (
        0 if nats is None or not nats.requires_grad else (weights * nats).sum()
    )
    return [
        logprobs,
        *([] if nats is None else [nats]),
        *torch.autograd.grad(loss, [features, *head.parameters()]),
    ]


@pytest.mark.silent_bug(7)
@settings(max_examples=40, deadline=None)
@given(
    top_k=st.sampled_from([1, 3, 20]),
    top_p=st.sampled_from([1.0, 0.7]),
    entropy=st.sampled_from(["none", "value", "gradient"]),
    step=st.sampled_from([0.0, 0.5]),
    chunk=st.sampled_from([4, 256]),
)
def test_a_head_over_possible_actions_changes_neither_value_nor_gradient(
    top_k, top_p, entropy, step, chunk
):
    head, features, actions, temperature = example(step=step)
    kind = {"top_k": top_k, "top_p": top_p, "entropy": entropy}
    got = outcome(
        lambda x: chunked_categorical(x, head, actions, temperature, chunk=chunk, **kind),
        head,
        features,
    )
    needed = outcome(lambda x: categorical(head(x), actions, temperature, **kind), head, features)
    for ours, theirs in zip(got, needed, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_ties_at_the_edge_are_possible_however_many_they_are():
    head = nn.Linear(1, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.fill_(1.0)
        head.weight[7] = 2.0
        head.weight[100:] = 0.0
    found = possible_actions(torch.ones(1, 1), head, torch.tensor([150]), 2, 256)
    assert found.tolist() == [*range(100), 150]


def test_few_actions_are_possible_and_only_their_logits_are_computed_again(monkeypatch):
    head, features, actions, temperature = example(scale=3.0)
    widths = []
    plain = distributions.categorical
    monkeypatch.setattr(
        distributions,
        "categorical",
        lambda logits, *a, **k: widths.append(logits.shape[1]) or plain(logits, *a, **k),
    )
    chunked_categorical(features, head, actions, temperature, top_k=1)[0].sum().backward()
    assert (
        len(widths) == 2 and max(widths) <= ROWS * (2 * 1 + 8) + ROWS < VOCABULARY
    )  # forward, and again backward
    widths.clear()
    chunked_categorical(features, head, actions, temperature, top_k=VOCABULARY // 2)
    assert widths == [VOCABULARY], "most actions are possible: nothing to save"
