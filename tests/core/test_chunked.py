"""Chunked log-probabilities equal the plain ones, and never hold all logits."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from gruppo.core.distributions import categorical, chunked_categorical

ROWS, WIDTH, VOCABULARY = 23, 6, 40


class Head(nn.Module):
    """A linear head that remembers the most rows it was given at once, and how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(
            torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
        )
        self.most_rows = self.calls = 0

    def forward(self, features: Tensor) -> Tensor:
        self.most_rows = max(self.most_rows, len(features))
        self.calls += 1
        return features @ self.weight.T


def inputs(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    actions = torch.randint(VOCABULARY, (rows,), generator=generator)
    return features, actions, 0.5 + torch.rand(rows, generator=generator, dtype=torch.float64)


def outcome(run, head: Head, features: Tensor) -> list[Tensor]:
    """Values, and the gradients of a mixed loss in features and head."""
    features = features.clone().requires_grad_()
    logprobs, entropy = run(features)
    scale = torch.arange(1, len(logprobs) + 1, dtype=torch.float64)
    return [
        logprobs,
        entropy,
        *torch.autograd.grad((scale * (logprobs.exp() + entropy)).sum(), [features, head.weight]),
    ]


@pytest.mark.silent_bug(3)
@settings(max_examples=20)
@given(
    chunk=st.integers(1, ROWS + 5),
    kind=st.sampled_from([{}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7}]),
)
def test_chunks_change_neither_value_nor_gradient(chunk, kind):
    features, actions, temperature = inputs()
    head = Head()
    plain = outcome(
        lambda x: categorical(head(x), actions, temperature, entropy="gradient", **kind),
        head,
        features,
    )
    cut = outcome(
        lambda x: chunked_categorical(
            x, head, actions, temperature, chunk=chunk, entropy="gradient", **kind
        ),
        head,
        features,
    )
    for ours, theirs in zip(cut, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", ["nothing", "features", "head"])
def test_no_logits_are_kept_for_the_backward_pass(frozen):
    """What autograd holds between forward and backward has no dimension of vocabulary size but the
    head itself."""
    features, actions, temperature = inputs()
    head = Head()
    features.requires_grad_(frozen != "features")
    head.weight.requires_grad_(frozen != "head")
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        logprobs, _ = chunked_categorical(features, head, actions, temperature, chunk=4)
    assert not [x.shape for x in held if VOCABULARY in x.shape]
    forward_calls = head.calls
    logprobs.sum().backward()
    assert head.calls == 2 * forward_calls == 12
    assert head.most_rows == 4


@pytest.mark.parametrize("mode", ["gradient", "value", "none"])
def test_no_actions_give_no_numbers_and_a_gradient_of_zero(mode):
    features, actions, temperature = inputs(0)
    features.requires_grad_()
    logprobs, entropy = chunked_categorical(features, Head(), actions, temperature, entropy=mode)
    assert logprobs.shape == (0,)
    assert (entropy is not None) == (mode != "none")
    assert torch.autograd.grad(logprobs.sum(), features)[0].shape == (0, WIDTH)


@pytest.mark.silent_bug(3)
@pytest.mark.parametrize("kind", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8}])
@pytest.mark.parametrize("chunk", [2, 100])
def test_the_few_passes_way_equals_the_plain_way_in_value_entropy_and_gradient(kind, chunk):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    actions = torch.randint(11, (7,), generator=generator)
    temperature = torch.rand(7, generator=generator, dtype=torch.float64) + 0.5

    def outcome(entropy):
        x, w = features.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, nats = chunked_categorical(
            x, lambda f: f @ w.T, actions, temperature, chunk=chunk, entropy=entropy, **kind
        )
        (logprobs * torch.arange(1.0, 8, dtype=torch.float64)).sum().backward()
        return logprobs, nats, x.grad, w.grad

    for fast, plain in zip(outcome("value"), outcome("gradient"), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-12)
