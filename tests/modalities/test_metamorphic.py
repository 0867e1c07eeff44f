"""What must not change the numbers, over every policy: pieces, padding, company, order, dropout;
and what must."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from tests.fakes import (
    POLICIES,
    adapted,
    doubled,
    llama,
    plain,
    prompts,
    qwen2,
    ragged,
    requests,
)

from gruppo.types import MicroBatch, Request, Rollouts, Sampling

SAMPLING = Sampling(max_actions=10)
ALL = 10**9
TRUNCATIONS = [
    {"temperature": 0.7},
    {"temperature": 1.9},
    {"top_k": 5},
    {"top_p": 0.6},
    {"temperature": 0.7, "top_k": 7, "top_p": 0.5},
]
"""They act on logits, whatever made them: most policies meet the last one alone."""
CHANGES = [
    ("in place", "float32", [plain, llama, adapted]),
    ("in place", "bfloat16", [make for make in POLICIES if make is not plain]),
    ("load_state_dict", "bfloat16", [plain, llama, adapted]),
    ("optimizer", "bfloat16", [plain, llama, adapted]),
]
"""How weights are changed, and of which policies."""


@pytest.fixture(params=POLICIES, ids=lambda make: make.__name__)
def make(request):
    return request.param


@functools.cache
def made(make):
    """The policy in float64 and its samples, once: a copy takes a tenth of the time."""
    policy = doubled(make())
    return policy, policy.sample(requests(4, 2, 3), SAMPLING, seed=3)


@pytest.fixture
def policy(make):
    return copy.deepcopy(made(make)[0])


@pytest.fixture
def sampled(make):
    return made(make)[1]


@pytest.fixture
def rollouts(sampled):
    return ragged(sampled)


def logprobs_of(policy, rollouts, micro_batches=None):
    micro_batches = (
        policy.micro_batches(rollouts, rollouts.mask, ALL)
        if micro_batches is None
        else micro_batches
    )
    logprobs = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    for micro_batch in micro_batches:
        logprobs[micro_batch.rows[:, None], torch.arange(logprobs.shape[1])[micro_batch.cols]] = (
            policy.likelihood(rollouts, micro_batch).logprobs.double()
        )
    return logprobs


def gradient_of(policy, rollouts, micro_batches):
    """Of sum(weights * log-probs), with a weight of its own for each action."""
    policy.module.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, rollouts.mask.numel(), dtype=torch.float64).reshape(
        rollouts.mask.shape
    )
    for micro_batch in micro_batches:
        (
            policy.likelihood(rollouts, micro_batch).logprobs * micro_batch.of(weights)
        ).sum().backward()
    return torch.cat(
        [p.grad.flatten().double() for p in policy.module.parameters() if p.grad is not None]
    )


def whole(rollouts, *rows):
    """One piece of the given rows."""
    rows = torch.tensor(rows)
    return MicroBatch(rows, slice(0, int(rollouts.lengths[rows].max())))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def same_gradient(a, b):
    """||a - b|| / ||b||, over all parameters."""
    assert (a - b).norm() <= 1e-10 * b.norm()


def disturb(module, by=0.1):
    with torch.no_grad():
        for n, parameter in enumerate(module.parameters()):
            parameter.add_(
                by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n))
            )


# --- one distribution -----------------------------------------------------------------------------


@pytest.mark.silent_bug(2)
@pytest.mark.parametrize("budget", [1, ALL])
def test_the_ratio_starts_at_one(make, budget):
    policy = make()
    rollouts = policy.sample(requests(4, 2, 3), SAMPLING, seed=3)
    logprobs = logprobs_of(policy, rollouts, policy.micro_batches(rollouts, rollouts.mask, budget))
    torch.testing.assert_close(
        logprobs.float(), rollouts.sampler_logprobs, rtol=0, atol=7e-6
    )  # sums in another order


@pytest.mark.silent_bug(6)
@pytest.mark.silent_bug(7)
@pytest.mark.parametrize(
    ("make", "changes"),
    [
        pytest.param(make, changes, id=f"{make.__name__}-{changes}")
        for make in POLICIES
        for changes in (TRUNCATIONS if make in (plain, llama) else TRUNCATIONS[-1:])
    ],
)
def test_temperature_and_truncation_are_in_both_sides(policy, changes):
    rollouts = policy.sample(requests(4, 2, 3), replace(SAMPLING, **changes), seed=3)
    logprobs = logprobs_of(policy, rollouts)
    torch.testing.assert_close(logprobs.float(), rollouts.sampler_logprobs, rtol=0, atol=5e-6)
    plain_logprobs = logprobs_of(policy, as_if_untouched(rollouts))
    assert (logprobs - plain_logprobs)[rollouts.mask].abs().max() > 0.05, (
        "the two differ, so the test can see it"
    )


def as_if_untouched(rollouts):
    rows = len(rollouts)
    per_row = {
        "top_k": torch.zeros(rows, dtype=torch.long),
        "top_p": torch.ones(rows, dtype=torch.float64),
    }
    return replace(rollouts, temperature=torch.ones(rows), per_row=per_row)


@pytest.mark.silent_bug(6)
def test_the_gradient_at_a_temperature_is_that_of_logits_divided_by_it(policy):
    """Two roads: the policy at T, and log-softmax(logits / T) written out over one row."""
    rollouts = policy.sample(requests(1), replace(SAMPLING, temperature=0.75), seed=3)
    got = gradient_of(policy, rollouts, [whole(rollouts, 0)])
    policy.module.zero_grad(set_to_none=True)
    prompt, n = rollouts.shared["prompt_ids"][0], int(rollouts.lengths[0])
    out = policy.module(torch.cat([prompt, rollouts.actions[0, :n]])[None])
    logits = (out if isinstance(out, torch.Tensor) else out.logits)[0, len(prompt) - 1 : -1]
    logprobs = (logits / 0.75).log_softmax(-1).gather(-1, rollouts.actions[0, :n, None])[:, 0]
    weights = torch.linspace(-1, 1, rollouts.mask.numel(), dtype=torch.float64)[:n]
    (logprobs * weights).sum().backward()
    by_hand = torch.cat(
        [p.grad.flatten().double() for p in policy.module.parameters() if p.grad is not None]
    )
    same_gradient(got, by_hand)


# --- pieces, padding, company, order --------------------------------------------------------------


@pytest.mark.silent_bug(3)
@pytest.mark.parametrize("budget", [1, 25])
def test_micro_batch_size_changes_neither_value_nor_gradient(policy, rollouts, budget):
    one, many = (policy.micro_batches(rollouts, rollouts.mask, tokens) for tokens in (ALL, budget))
    assert len(one) == 1 < len(many)
    same(logprobs_of(policy, rollouts, many), logprobs_of(policy, rollouts, one))
    same_gradient(gradient_of(policy, rollouts, many), gradient_of(policy, rollouts, one))


@pytest.mark.silent_bug(3)
@pytest.mark.silent_bug(24)
def test_the_order_of_rows_permutes_the_result(policy, rollouts):
    order = torch.tensor([5, 0, 8, 3, 1, 7, 2, 6, 4])
    same(logprobs_of(policy, rollouts.take(order)), logprobs_of(policy, rollouts)[order])
    one_micro_batch = whole(rollouts, *order.tolist())
    same(logprobs_of(policy, rollouts, [one_micro_batch]), logprobs_of(policy, rollouts))


@pytest.mark.silent_bug(4)
def test_a_row_alone_equals_the_row_among_others(policy, rollouts):
    together = whole(rollouts, *range(9))
    alone = [whole(rollouts, row) for row in range(9)]
    same(logprobs_of(policy, rollouts, alone), logprobs_of(policy, rollouts, [together]))
    same_gradient(gradient_of(policy, rollouts, alone), gradient_of(policy, rollouts, [together]))


@pytest.mark.silent_bug(4)
def test_longer_neighbours_change_neither_value_nor_gradient(policy, rollouts):
    neighbour = replace(prompts("the prompt of a long neighbour")[0], id="long")
    long = policy.sample([Request(neighbour, 2)], Sampling(max_actions=30), seed=5)
    both = Rollouts.cat([rollouts, long])
    assert both.mask.shape[1] > rollouts.mask.shape[1]
    everything, mine = whole(both, *range(11)), whole(rollouts, *range(9))
    wide = logprobs_of(policy, both, [everything])[:9, : rollouts.mask.shape[1]]
    same(wide, logprobs_of(policy, rollouts, [mine]))

    def gradient(rollouts, micro_batch):
        policy.module.zero_grad(set_to_none=True)
        policy.likelihood(rollouts, micro_batch).logprobs[:9].sum().backward()
        return torch.cat(
            [p.grad.flatten().double() for p in policy.module.parameters() if p.grad is not None]
        )

    same_gradient(gradient(both, everything), gradient(rollouts, mine))


@pytest.mark.silent_bug(5)
def test_what_stands_in_masked_slots_changes_nothing(policy, rollouts):
    """Padding holds other ids; the floating entries hold 1e6 and NaN."""
    policy_micro_batches = policy.micro_batches(rollouts, rollouts.mask, 70)
    wide = Rollouts.cat([rollouts, policy.sample(requests(1), Sampling(max_actions=25), seed=3)])
    exists = (
        torch.arange(wide.mask.shape[1]) < wide.lengths[:, None]
    )  # the environment's columns are read
    junk = replace(
        wide,
        actions=torch.where(exists, wide.actions, 7),
        sampler_logprobs=torch.where(
            wide.mask, wide.sampler_logprobs, torch.tensor([1e6, torch.nan])[wide.actions % 2]
        ),
    )
    same(
        logprobs_of(policy, junk, policy_micro_batches)[:9],
        logprobs_of(policy, wide, policy_micro_batches)[:9],
    )
    clean, dirty = (gradient_of(policy, rows, policy_micro_batches) for rows in (wide, junk))
    same_gradient(clean, dirty)
    assert logprobs_of(policy, junk)[~wide.mask].eq(0).all()


def test_an_action_of_the_environment_is_read_and_not_evaluated(policy, sampled, rollouts):
    """A column below the length whose mask is False is context: later log-probs see it, and it has
    none itself."""
    assert not rollouts.mask[0, 1] and rollouts.lengths[0] > 2
    got, whole_row = logprobs_of(policy, rollouts), logprobs_of(policy, sampled)
    n = int(rollouts.lengths[0])
    assert got[0, 1] == 0
    same(got[0, 2:n], whole_row[0, 2:n])


@pytest.mark.parametrize("budget", [1, 33, ALL])
def test_each_kept_row_is_in_exactly_one_micro_batch_and_others_in_none(policy, rollouts, budget):
    loss_mask = rollouts.mask.clone()
    loss_mask[[1, 6]] = False
    rows = torch.cat(
        [micro_batch.rows for micro_batch in policy.micro_batches(rollouts, loss_mask, budget)]
    )
    assert rows.sort().values.tolist() == [0, 2, 3, 4, 5, 7, 8]


# --- randomness by address ------------------------------------------------------------------------


@pytest.mark.silent_bug(26)
def test_a_sample_does_not_depend_on_its_batch(policy, sampled, monkeypatch):
    """Order of the requests, company, and batches of decoding."""
    turned = policy.sample(requests(4, 2, 3)[::-1], SAMPLING, seed=3)
    order = [5, 6, 7, 8, 3, 4, 0, 1, 2]  # the last group came first
    assert turned.take(order).actions.tolist() == sampled.actions.tolist()
    monkeypatch.setattr("gruppo.modalities.text.policy.BATCH_ROWS", 3)
    assert torch.equal(policy.sample(requests(4, 2, 3), SAMPLING, seed=3).actions, sampled.actions)


@pytest.mark.silent_bug(25)
def test_each_prompt_has_its_samples_in_one_group(policy, sampled):
    assert [prompt.id for prompt in sampled.prompts] == ["p0", "p1", "p2"]
    assert sampled.group_ids.tolist() == [0] * 4 + [1] * 2 + [2] * 3
    for n, prompt in enumerate(sampled.prompts):
        assert sampled.shared["prompt_ids"][n].tolist() == policy.chat.encode(prompt.inputs)


@pytest.mark.silent_bug(25)
@pytest.mark.parametrize("apart", [True, False], ids=["in two calls", "in one call"])
def test_a_group_that_grows_equals_the_larger_group_at_once(policy, sampled, apart):
    requested = prompts()
    grown = [
        [Request(requested[0], 3), Request(requested[1], 2), Request(requested[2], 3)],
        [Request(requested[0], 1, first=3)],
    ]
    calls = grown if apart else [grown[0] + grown[1]]
    got = Rollouts.cat([policy.sample(call, SAMPLING, seed=3) for call in calls])
    assert len(got.prompts) == 3
    for n in range(3):
        mine, theirs = got.actions[got.group_ids == n], sampled.actions[sampled.group_ids == n]
        assert mine.tolist() == theirs.tolist()


# --- mode, weights --------------------------------------------------------------------------------


@pytest.mark.silent_bug(27)
@pytest.mark.parametrize("make_with_dropout", [plain, llama, qwen2], ids=lambda make: make.__name__)
def test_dropout_left_on_by_the_user_is_off_in_sampling_and_scoring(make_with_dropout):
    name = "dropout" if make_with_dropout is plain else "attention_dropout"
    policy = make_with_dropout(**{name: 0.5})
    rollouts = policy.sample(requests(4, 2), SAMPLING, seed=3)
    quiet = logprobs_of(policy, rollouts)
    gradient = gradient_of(policy, rollouts, policy.micro_batches(rollouts, rollouts.mask, ALL))
    policy.module.train()
    assert torch.equal(logprobs_of(policy, rollouts), quiet)
    policy.module.train()
    assert torch.equal(
        policy.sample(requests(4, 2), SAMPLING, seed=3).sampler_logprobs, rollouts.sampler_logprobs
    )
    policy.module.train()
    learning = gradient_of(policy, rollouts, policy.micro_batches(rollouts, rollouts.mask, ALL))
    assert torch.equal(learning, gradient)


@pytest.mark.silent_bug(9)
@pytest.mark.parametrize(
    ("make", "how", "compute"),
    [
        pytest.param(make, how, compute, id=f"{make.__name__}-{how}-{compute}")
        for how, compute, makes in CHANGES
        for make in makes
    ],
)
def test_changed_weights_change_greedy_answers_and_log_probs(make, compute, how):
    policy, other = (
        make(**({} if make is plain else {"compute": compute}), seed=seed) for seed in (0, 1)
    )
    greedy = replace(SAMPLING, temperature=0.0)
    rollouts = policy.sample(requests(4, 2, 3), SAMPLING, seed=3)
    before, answers = (
        logprobs_of(policy, rollouts),
        policy.sample(requests(1, 1, 1), greedy, seed=0).actions,
    )
    change(policy, other, how)
    after = logprobs_of(policy, rollouts)
    assert (after - before)[rollouts.mask].abs().mean() > 0.1
    assert policy.sample(requests(1, 1, 1), greedy, seed=0).actions.tolist() != answers.tolist()
    if how != "optimizer":
        same_weights = logprobs_of(other, rollouts)
        torch.testing.assert_close(after, same_weights, rtol=0, atol=1e-6)


def change(policy, other, how):
    if how == "load_state_dict":
        policy.module.load_state_dict(other.module.state_dict())
    elif how == "in place":
        with torch.no_grad():
            for mine, theirs in zip(
                policy.module.parameters(), other.module.parameters(), strict=True
            ):
                mine.add_(theirs - mine)
                mine.copy_(theirs)
    else:
        rollouts = policy.sample(requests(4), SAMPLING, seed=3)
        policy.likelihood(rollouts, whole(rollouts, 0, 1, 2, 3)).logprobs.sum().backward()
        torch.optim.AdamW(policy.module.parameters(), lr=0.3, fused=True).step()


def test_entropy_is_that_of_the_sampling_distribution(policy):
    """By hand over one row: -sum p log p of the logits at the temperature; only when asked for."""
    rollouts = policy.sample(requests(1), replace(SAMPLING, temperature=0.75), seed=3)
    micro_batch = whole(rollouts, 0)
    prompt, n = rollouts.shared["prompt_ids"][0], int(rollouts.lengths[0])
    with torch.no_grad():
        out = policy.module(torch.cat([prompt, rollouts.actions[0, :n]])[None])
        logits = (out if isinstance(out, torch.Tensor) else out.logits)[0, len(prompt) - 1 : -1]
        by_hand = torch.distributions.Categorical(logits=logits / 0.75).entropy()
        got = policy.likelihood(rollouts, micro_batch, outputs=("entropy",)).entropy
        assert policy.likelihood(rollouts, micro_batch).entropy is None
    same(got[0, :n], by_hand)
