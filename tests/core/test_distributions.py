"""Drawing and scoring are one distribution, whatever the temperature and the truncation."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gruppo.core.distributions import (
    CDF_BLOCK,
    apply_temperature,
    apply_top_k_top_p,
    categorical,
    sample_categorical,
)

INF = float("inf")
WIDE = 2 * CDF_BLOCK + 77
"""A vocabulary of two whole blocks and a part."""
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 1},
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def random_logits(
    rows: int, width: int = WIDE, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Tensor:
    return (
        3
        * torch.randn(
            rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
    ).to(dtype)


def grid(count: int) -> Tensor:
    """Evenly spaced over [0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def score(logits: Tensor, actions: Tensor, *, temperature: float, **kind) -> Tensor:
    return categorical(
        logits, actions, torch.full((len(logits),), temperature, dtype=torch.float64), **kind
    )[0]


def by_definition(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Probabilities of one row, in plain Python: rank, cut at top_k, then at top_p, and share what
    is left."""
    p = (logits.double() / temperature).softmax(0).tolist()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])
    ranked = ranked[: top_k or len(p)]
    mass = sum(p[i] for i in ranked)
    kept, reached = [], 0.0
    for i in ranked:
        if reached >= top_p * mass:
            break
        kept.append(i)
        reached += p[i]
    out = torch.zeros(len(p), dtype=torch.float64)
    out[kept] = torch.tensor([p[i] / reached for i in kept], dtype=torch.float64)
    return out


@pytest.mark.silent_bug(6)
@pytest.mark.silent_bug(7)
@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_drawing_and_scoring_give_the_same_log_probability_and_it_is_the_defined_one(kind, dtype):
    logits = random_logits(32, dtype=dtype)
    actions, logprobs = sample_categorical(logits, grid(32), **kind)
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 5e-6}
    )
    torch.testing.assert_close(logprobs, score(logits, actions, **kind), **tolerance)
    if dtype == torch.bfloat16:
        return  # ties, which test_ties_* decide
    defined = torch.stack([by_definition(row, **kind) for row in logits])
    torch.testing.assert_close(
        logprobs.double(),
        defined.gather(1, actions[:, None])[:, 0].log(),
        rtol=1e-6,
        atol=tolerance["atol"],
    )


@pytest.mark.silent_bug(7)
@every_kind
def test_a_grid_of_uniforms_draws_each_action_as_often_as_its_probability_says(kind):
    """The actions partition [0, 1): of n grid points, each action gets n p of them, give or take
    the one at an edge."""
    count = 4000
    logits = random_logits(1)
    actions, _ = sample_categorical(logits.expand(count, -1), grid(count), **kind)
    frequencies = actions.bincount(minlength=WIDE)
    defined = by_definition(logits[0], **kind)
    assert (frequencies - count * defined).abs().max() <= 1 + 1e-9
    assert not frequencies[defined == 0].any()


@pytest.mark.silent_bug(6)
def test_temperature_divides_logits_and_the_gradient():
    """d logprob / d logits = (one-hot - p) / T with p at temperature T; dividing log-probabilities
    is another thing."""
    logits = random_logits(6, 9).requires_grad_()
    actions = torch.tensor([0, 8, 3, 3, 1, 5])
    logprobs = score(logits, actions, temperature=0.7)
    torch.testing.assert_close(
        logprobs,
        (logits / 0.7).log_softmax(-1).gather(1, actions[:, None])[:, 0],
        rtol=1e-6,
        atol=1e-6,
    )
    slope = torch.autograd.grad(logprobs.sum(), logits)[0]
    by_hand = (torch.nn.functional.one_hot(actions, 9) - (logits / 0.7).softmax(-1)) / 0.7
    torch.testing.assert_close(slope, by_hand.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.silent_bug(6)
def test_each_row_has_its_own_temperature():
    logits, actions = random_logits(3, 11), torch.tensor([2, 5, 7])
    mixed, _ = categorical(logits, actions, torch.tensor([0.5, 1.0, 2.0]))
    alone = [
        score(logits[i : i + 1], actions[i : i + 1], temperature=t)
        for i, t in enumerate((0.5, 1.0, 2.0))
    ]
    torch.testing.assert_close(mixed, torch.cat(alone), rtol=1e-12, atol=0)


def test_temperature_zero_is_the_argmax_with_its_log_probability_at_one():
    logits = random_logits(5)
    actions, logprobs = sample_categorical(logits, grid(5), temperature=0, top_k=3, top_p=0.5)
    assert torch.equal(actions, logits.argmax(-1))
    torch.testing.assert_close(
        logprobs, score(logits, actions, temperature=1.0), rtol=1e-12, atol=0
    )


def test_bf16_logits_are_drawn_and_scored_in_float32():
    logits = random_logits(16, dtype=torch.bfloat16)
    narrow, wide = (
        sample_categorical(logits, grid(16), temperature=0.7),
        sample_categorical(logits.float(), grid(16), temperature=0.7),
    )
    assert narrow[1].dtype == torch.float32
    assert torch.equal(narrow[0], wide[0])
    assert torch.equal(narrow[1], wide[1])
    assert torch.equal(
        score(logits, wide[0], temperature=0.7), score(logits.float(), wide[0], temperature=0.7)
    )
    assert apply_temperature(logits, 1.0).dtype == torch.float32


@pytest.mark.silent_bug(7)
@pytest.mark.parametrize("shortlist", [1, 8, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if len(kind) > 1] + [{"temperature": 1.0, "top_p": 0.999}],
    ids=str,
)
def test_a_truncated_draw_is_that_of_the_whole_truncation_however_many_actions_are_ordered_first(
    kind, dtype, shortlist, monkeypatch
):
    """Rows with many actions on the edge among them: all equal, or rounded to few different
    numbers."""
    monkeypatch.setattr("gruppo.core.distributions.SHORTLIST", shortlist)
    logits = random_logits(40, dtype=dtype)
    logits[3] = 0
    logits[4:8] = logits[4:8].round()
    logits[8:12, ::3] = -INF
    choices = {name: value for name, value in kind.items() if name != "temperature"}
    whole = apply_top_k_top_p(apply_temperature(logits, kind["temperature"]), **choices)
    plain = sample_categorical(whole, grid(40), temperature=1.0)
    actions, logprobs = sample_categorical(logits, grid(40), **kind)
    assert torch.equal(actions, plain[0])
    torch.testing.assert_close(logprobs, plain[1], rtol=1e-6, atol=2e-6)


def test_rows_are_drawn_from_alike_however_many_are_worked_on_at_a_time(monkeypatch):
    logits, choices = random_logits(40, dtype=torch.float32), {"temperature": 0.7, "top_p": 0.9}
    together = sample_categorical(logits, grid(40), **choices)
    monkeypatch.setattr("gruppo.core.distributions.LOGITS_PER_PASS", 3 * WIDE)
    for got, needed in zip(sample_categorical(logits, grid(40), **choices), together, strict=True):
        assert torch.equal(got, needed)


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.silent_bug(7)
@every_kind
@pytest.mark.parametrize("width", [1, 5, CDF_BLOCK, CDF_BLOCK + 1, WIDE])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_smallest_uniform_draws_the_first_possible_action_and_the_largest_the_last(
    kind, width, dtype
):
    logits = random_logits(1, width, dtype)
    logits[:, : width // 3] = logits[:, width - width // 3 :] = -INF
    possible = by_definition(logits[0], **kind).nonzero()[:, 0]
    below_one = torch.nextafter(torch.ones(()).double(), torch.zeros(()).double())
    actions, logprobs = sample_categorical(
        logits.expand(2, -1), torch.stack([torch.zeros(()).double(), below_one]), **kind
    )
    assert actions.tolist() == [possible[0], possible[-1]]
    assert logprobs.isfinite().all()


@settings(max_examples=50)
@given(data=st.data())
def test_an_impossible_action_is_never_drawn(data):
    width = data.draw(st.integers(2, 2 * CDF_BLOCK + 3))
    possible = data.draw(st.sets(st.integers(0, width - 1), min_size=1, max_size=4))
    uniforms = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4))
    logits = torch.full((len(uniforms), width), -INF)
    for action in possible:
        logits[:, action] = data.draw(st.floats(-60, 60, width=32))
    actions, logprobs = sample_categorical(
        logits, torch.tensor(uniforms, dtype=torch.float64), temperature=1.0
    )
    assert set(actions.tolist()) <= possible
    assert logprobs.isfinite().all()


# --- truncation -----------------------------------------------------------------------------------


def kept_by(logits: list[float], **choices) -> list[bool]:
    return (
        apply_top_k_top_p(torch.tensor([logits], dtype=torch.float64), **choices)[0]
        .isfinite()
        .tolist()
    )


@pytest.mark.silent_bug(7)
def test_ties_at_the_kth_logit_are_all_kept_and_shared_out_evenly():
    assert kept_by([1, 2, 2, 2, 0], top_k=2) == [False, True, True, True, False]
    logits = torch.tensor([[1.0, 2, 2, 2, 0]]).expand(300, -1)
    actions, logprobs = sample_categorical(logits, grid(300), temperature=1.0, top_k=2)
    assert actions.bincount(minlength=5).tolist() == [0, 100, 100, 100, 0]
    torch.testing.assert_close(logprobs, torch.full((300,), 1 / 3).log())
    torch.testing.assert_close(logprobs, score(logits, actions, temperature=1.0, top_k=2))


@pytest.mark.silent_bug(7)
def test_ties_at_the_edge_of_the_nucleus_are_cut_at_the_lower_index():
    assert kept_by([0, 0, 0, 0], top_p=0.5) == [True, True, False, False]
    assert kept_by([0, 0, 0, 0], top_p=0.51) == [True, True, True, False]
    logits = torch.zeros(100, 4)
    actions, logprobs = sample_categorical(logits, grid(100), temperature=1.0, top_p=0.5)
    assert actions.bincount(minlength=4).tolist() == [50, 50, 0, 0]
    torch.testing.assert_close(logprobs, score(logits, actions, temperature=1.0, top_p=0.5))


def test_the_nucleus_by_hand():
    """Probabilities 1/2, 1/4, 1/8, 1/8: top_p 0.6 needs two of them, 0.76 three, and one stays
    however small it is."""
    logits = torch.tensor([0.125, 0.5, 0.125, 0.25]).log().tolist()
    assert kept_by(logits, top_p=0.6) == [False, True, False, True]
    assert kept_by(logits, top_p=0.76) == [True, True, False, True]
    assert kept_by(logits, top_p=1e-9) == [False, True, False, False]
    assert kept_by(logits, top_p=1.0) == [True] * 4


def test_top_p_is_taken_of_what_top_k_left():
    """Of 0.4, 0.3, 0.2, 0.1 top_k 2 leaves 4/7 and 3/7: top_p 0.5 keeps one, although 0.4 alone is
    short of 0.5."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept_by(logits, top_k=2, top_p=0.5) == [True, False, False, False]
    assert kept_by(logits, top_p=0.5) == [True, True, False, False]


@pytest.mark.silent_bug(7)
@pytest.mark.parametrize(
    "kind", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}], ids=str
)
def test_the_action_that_was_drawn_stays_when_an_update_has_moved_it_across_the_edge(kind):
    """Its log-probability is log 0.2 / (0.2 + what is kept), not -inf."""
    p = torch.tensor([[0.4, 0.35, 0.2, 0.05]], dtype=torch.float64)
    inside = by_definition(p[0].log(), temperature=1.0, **kind) > 0
    inside[2] = True
    scored = score(p.log(), torch.tensor([2]), temperature=1.0, **kind)
    assert scored.exp().item() == pytest.approx(0.2 / p[0][inside].sum().item(), rel=1e-12)


@pytest.mark.silent_bug(7)
@every_kind
def test_entropy_is_that_of_the_truncated_distribution_in_value_and_gradient(kind):
    """The gradient of an entropy with impossible actions was NaN: 0 times minus infinity."""
    logits = random_logits(4, 30).requires_grad_()
    actions, _ = sample_categorical(logits.detach(), grid(4), **kind)
    choices = {name: value for name, value in kind.items() if name != "temperature"}
    temperature = torch.full((4,), kind["temperature"], dtype=torch.float64)
    logprobs, entropy = categorical(logits, actions, temperature, **choices, entropy="gradient")
    p = torch.stack([by_definition(row, **kind) for row in logits.detach()])
    by_hand = -torch.special.xlogy(p, p).sum(-1)
    torch.testing.assert_close(entropy, by_hand, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        logprobs, categorical(logits, actions, temperature, **choices)[0], rtol=1e-10, atol=1e-12
    )

    slope = torch.autograd.grad(entropy.sum(), logits)[0]
    log_p = torch.where(p > 0, p.log(), 0)
    torch.testing.assert_close(
        slope, -p * (log_p + by_hand[:, None]) / kind["temperature"], rtol=1e-6, atol=1e-9
    )
