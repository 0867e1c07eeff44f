"""Log-probabilities under a linear head, in blocks of the vocabulary, equal those of whole
logits."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from gruppo.core import linear_head
from gruppo.core.distributions import categorical, chunked_categorical

ROWS, WIDTH, VOCABULARY = 11, 6, 37


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Tiles that end inside the rows and inside the vocabulary."""
    monkeypatch.setattr(linear_head, "TILE_ON_CPU", (4, 8))


def a_head(
    *, bias: bool = True, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> nn.Linear:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return head


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    return (
        features,
        torch.randint(VOCABULARY, (rows,), generator=generator),
        0.5 + torch.rand(rows, generator=generator),
    )


def outcome(score, head: nn.Linear, features: Tensor, entropy: str) -> list[Tensor]:
    """Values, and the gradients of a loss in all that is trained."""
    features = features.detach().clone().requires_grad_(features.requires_grad)
    logprobs, nats = score(features)
    loss = (torch.arange(1, len(logprobs) + 1) / len(logprobs) * logprobs).sum()
    if entropy == "gradient":
        loss = loss + (nats.square() * torch.arange(len(nats)) / len(nats)).sum()
    trained = [x for x in (features, *head.parameters()) if x.requires_grad]
    return [logprobs, *([] if nats is None else [nats]), *torch.autograd.grad(loss, trained)]


def both(head: nn.Linear, features: Tensor, actions: Tensor, temperature: Tensor, entropy: str):
    blocks = outcome(
        lambda x: chunked_categorical(x, head, actions, temperature, entropy=entropy),
        head,
        features,
        entropy,
    )
    whole = outcome(
        lambda x: categorical(head(x), actions, temperature, entropy=entropy),
        head,
        features,
        entropy,
    )
    return zip(blocks, whole, strict=True)


@pytest.mark.silent_bug(3)
@settings(max_examples=25)
@given(
    rows=st.integers(1, ROWS),
    bias=st.booleans(),
    entropy=st.sampled_from(["none", "value", "gradient"]),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_blocks_change_neither_value_nor_gradient(rows, bias, entropy, scale):
    features, actions, temperature = inputs(rows)
    head = a_head(bias=bias, scale=scale)
    largest = float(head(features).detach().abs().max())
    for ours, theirs in both(head, features.requires_grad_(), actions, temperature, entropy):
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=5e-6 * max(float(theirs.detach().abs().max()), largest, 1)
        )


def test_the_entropy_of_a_sharp_distribution_loses_nothing_to_the_size_of_its_logits():
    """log sum exp z - sum p z of logits around 300 would be off by more than this entropy is
    large."""
    features, actions, temperature = inputs()
    head = a_head(scale=30.0)
    logits = head(features).detach().double()
    _, nats = chunked_categorical(features, head, actions, temperature, entropy="value")
    _, exact = categorical(logits, actions, temperature.double(), entropy="gradient")
    assert float(exact.min()) < 1e-3
    torch.testing.assert_close(nats.double(), exact, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("frozen", ["features", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient_and_changes_that_of_nothing_else(frozen):
    features, actions, temperature = inputs()
    head = a_head()
    features.requires_grad_(frozen != "features")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(frozen != name)
    pairs = list(both(head, features, actions, temperature, "none"))
    assert len(pairs) == 3  # the log-probs and two gradients
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=5e-6)


def test_bf16_logits_are_rounded_as_the_head_rounds_them_and_scored_in_float32():
    features, actions, temperature = inputs(dtype=torch.bfloat16)
    head = a_head(dtype=torch.bfloat16)
    (logprobs, whole), *gradients = both(
        head, features.requires_grad_(), actions, temperature, "none"
    )
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, whole, rtol=0, atol=5e-6)
    for ours, theirs in gradients:
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


def test_what_a_bias_of_minus_infinity_forbids_has_no_mass():
    """A padded vocabulary: whole blocks without any."""
    features, actions, temperature = inputs()
    head = a_head()
    with torch.no_grad():
        head.bias[20:] = -torch.inf
    for ours, theirs in both(
        head, features.requires_grad_(), actions % 20, temperature, "gradient"
    ):
        torch.testing.assert_close(ours, theirs, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize(
    ("limit", "tiles"), [(0, 0), (2 * 4 * 8 * 4, 2), (2**26, 4 * 5)], ids=["none", "two", "all"]
)
def test_logits_are_kept_for_the_backward_pass_up_to_a_limit_and_change_no_bit(
    monkeypatch, limit, tiles
):
    """16 rows, padding included, in tiles of 4, and 37 columns in tiles of 8, of 4 bytes each."""
    features, actions, temperature = inputs()
    head = a_head()

    def score(x: Tensor):
        return chunked_categorical(x, head, actions, temperature, entropy="gradient")

    monkeypatch.setattr(linear_head, "KEPT_ON_CPU", 0)
    plain = outcome(score, head, features.requires_grad_(), "gradient")
    monkeypatch.setattr(linear_head, "KEPT_ON_CPU", limit)
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        got = outcome(score, head, features, "gradient")
    logits = [x for x in held if x.ndim == 2 and len(x) == 4]
    assert len(logits) == tiles and sum(x.nbytes for x in logits) <= limit
    assert all(map(torch.equal, got, plain))


class Doubled(nn.Linear):
    def forward(self, features: Tensor) -> Tensor:
        return 2 * super().forward(features)


def _hooked() -> nn.Linear:
    head = a_head()
    head.register_forward_hook(lambda module, inputs, out: 2 * out)
    return head


def _patched() -> nn.Linear:
    head = a_head()
    head.forward = lambda features: 2 * nn.functional.linear(features, head.weight, head.bias)
    return head


@pytest.mark.parametrize(
    "head", [Doubled(WIDTH, VOCABULARY), _hooked(), _patched()], ids=["subclass", "hook", "patch"]
)
def test_a_head_that_does_more_than_its_product_is_called(head):
    features, actions, temperature = inputs()
    got, _ = chunked_categorical(features, head, actions, temperature)
    torch.testing.assert_close(got, categorical(head(features), actions, temperature)[0])
    linear = nn.functional.linear(features, head.weight, head.bias)
    assert not torch.allclose(got, categorical(linear, actions, temperature)[0])
