"""Values: V(s_t) of the position that predicts action t, whatever the piece, the padding and the
company."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from tests.fakes import (
    POLICIES,
    bpe_tokenizer,
    causal_lm,
    doubled,
    gpt2,
    llama,
    of,
    plain,
    prompts,
    qwen2,
    requests,
)

from gruppo.modalities.common.critic import SharedCritic
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.text import from_transformers
from gruppo.modalities.text.critic import SeparateCritic, check_same_tokens
from gruppo.protocols import check_values
from gruppo.types import GruppoError, MicroBatch, Request, Rollouts, Sampling

SAMPLING = Sampling(max_actions=10)
ALL = 10**9
KINDS = [SharedCritic, SeparateCritic]
SPLITTING = [llama, gpt2, qwen2]


@pytest.fixture(params=POLICIES, ids=lambda make: make.__name__)
def make(request):
    return request.param


@functools.cache
def made(make):
    """The policy in float64 and its samples, once: a copy takes a tenth of the time."""
    policy = doubled(make())
    return policy, ragged(policy)


@pytest.fixture
def policy(make):
    return copy.deepcopy(made(make)[0])


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def critic(request, policy):
    return with_opinions(request.param(policy))


@pytest.fixture
def rollouts(make):
    return made(make)[1]


def ragged(policy):
    """Nine rows of three prompts; the last three are shorter, and one holds an action of the
    environment."""
    short = policy.sample([Request(prompts()[2], 3)], Sampling(max_actions=6), seed=3)
    rollouts = Rollouts.cat([policy.sample(requests(4, 2), SAMPLING, seed=3), short])
    mask = rollouts.mask.clone()
    mask[1, 2] = False
    assert not mask[6:, 6:].any()
    return replace(rollouts, mask=mask)


def head_of(critic):
    return critic.module if critic.is_shared else critic.module["head"]


def with_opinions(critic):
    """The critic with a head that is not zero."""
    head = head_of(critic)
    with torch.no_grad():
        head.weight.copy_(
            torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0))
        )
        head.bias.fill_(0.3)
    return critic


def values_of(critic, rollouts, micro_batches):
    values = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    for micro_batch in micro_batches:
        place = micro_batch.rows[:, None], torch.arange(values.shape[1])[micro_batch.cols]
        values[place] = critic.values(rollouts, micro_batch).detach().double()
    return values


def trained_by(critic, policy):
    return [
        *(policy if critic.is_shared else critic).module.parameters(),
        *head_of(critic).parameters(),
    ]


def gradient_of(critic, policy, rollouts, micro_batches):
    """Of sum(weights * values), with a weight of its own for each action; trunk and head."""
    parameters = trained_by(critic, policy)
    for parameter in parameters:
        parameter.grad = None
    weights = torch.linspace(-1, 2, rollouts.mask.numel(), dtype=torch.float64).reshape(
        rollouts.mask.shape
    )
    for micro_batch in micro_batches:
        (critic.values(rollouts, micro_batch) * micro_batch.of(weights)).sum().backward()
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


def whole(rollouts, *rows):
    """One piece of the given rows."""
    rows = torch.tensor(rows)
    return MicroBatch(rows, slice(0, int(rollouts.lengths[rows].max())))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9 * max(float(b.abs().max()), 1.0))


def features_by_hand(policy, row, rollouts):
    """Of one row alone, unpadded, at the positions before its actions: [t, F]."""
    prompt = rollouts.shared["prompt_ids"][int(rollouts.group_ids[row])]
    ids = torch.cat([prompt, rollouts.actions[row, : int(rollouts.lengths[row])]])[None]
    if not getattr(policy.backbone, "splits", False):
        out = policy.module(ids)
        return (out if isinstance(out, torch.Tensor) else out.logits)[0, len(prompt) - 1 : -1]
    return policy.module.base_model(ids).last_hidden_state[0, len(prompt) - 1 : -1]


# --- the numbers ----------------------------------------------------------------------------------


def test_values_are_the_head_of_the_features_before_each_action(policy, critic, rollouts):
    head, got = (
        head_of(critic),
        values_of(critic, rollouts, policy.micro_batches(rollouts, rollouts.mask, ALL)),
    )
    for row in range(len(rollouts)):
        features = features_by_hand(policy, row, rollouts)
        by_hand = (features * head.weight[0]).sum(dim=-1) + 0.3
        chosen = rollouts.mask[row, : len(by_hand)]
        same(got[row, : len(by_hand)], torch.where(chosen, by_hand.detach(), 0))
    assert got[~rollouts.mask].eq(0).all()


def test_values_of_the_likelihood_are_those_of_the_critic_and_leave_it_as_it_was(policy, rollouts):
    critic = with_opinions(SharedCritic(policy))
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 70):
        both = policy.likelihood(rollouts, micro_batch, outputs=("values", "entropy"))
        without = policy.likelihood(rollouts, micro_batch, outputs=("entropy",))
        assert (
            torch.equal(both.values, critic.values(rollouts, micro_batch))
            and without.values is None
        )
        assert torch.equal(both.logprobs, without.logprobs) and torch.equal(
            both.entropy, without.entropy
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_values_are_zero_and_draw_nothing(kind):
    policy = llama()
    rollouts = policy.sample(requests(2), SAMPLING, seed=3)
    before = torch.get_rng_state()
    values = kind(policy).values(rollouts, whole(rollouts, 0, 1))
    assert values.eq(0).all() and values.requires_grad
    assert torch.equal(torch.get_rng_state(), before)


# --- pieces, padding, company, order --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.silent_bug(3)
def test_micro_batch_size_changes_neither_value_nor_gradient(policy, critic, rollouts):
    budget = 1 if critic.is_shared else 25
    one, many = (policy.micro_batches(rollouts, rollouts.mask, tokens) for tokens in (ALL, budget))
    assert len(one) == 1 < len(many)
    same(values_of(critic, rollouts, many), values_of(critic, rollouts, one))
    same(gradient_of(critic, policy, rollouts, many), gradient_of(critic, policy, rollouts, one))


@pytest.mark.silent_bug(27)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [plain, llama, qwen2], ids=lambda make: make.__name__)
def test_dropout_left_on_by_the_user_is_off_in_values(make, kind):
    policy = make(**{"dropout" if make is plain else "attention_dropout": 0.5})
    critic = with_opinions(kind(policy))
    rollouts = policy.sample(requests(4, 2), SAMPLING, seed=3)
    quiet = critic.values(rollouts, whole(rollouts, *range(6)))
    (policy if critic.is_shared else critic).module.train()
    assert torch.equal(critic.values(rollouts, whole(rollouts, *range(6))), quiet)


# --- what is trained ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*SPLITTING, plain], ids=lambda make: make.__name__)
def test_a_separate_critic_trains_all_of_its_own_and_nothing_of_the_policy(make):
    """Every parameter has a gradient: one that is never used would be decayed, summed over ranks
    and saved."""
    policy = make()
    critic = with_opinions(SeparateCritic(policy))
    rollouts = policy.sample(requests(4, 2, 3), SAMPLING, seed=3)
    gradient_of(critic, policy, rollouts, policy.micro_batches(rollouts, rollouts.mask, 60))
    assert all(p.grad is not None and p.grad.ne(0).any() for p in critic.module.parameters())
    assert all(p.grad is None for p in policy.module.parameters())
    assert {p.data_ptr() for p in critic.module.parameters()}.isdisjoint(
        p.data_ptr() for p in policy.module.parameters()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_language_head_is_neither_run_nor_trained_by_values(kind):
    policy = qwen2()  # its embeddings are not tied to the head
    critic = with_opinions(kind(policy))
    rollouts = policy.sample(requests(4), SAMPLING, seed=3)
    calls = []
    policy.module.lm_head.register_forward_hook(lambda *_: calls.append(1))
    gradient_of(critic, policy, rollouts, policy.micro_batches(rollouts, rollouts.mask, ALL))
    assert not calls and policy.module.lm_head.weight.grad is None
    assert not any("lm_head" in name for name, _ in critic.module.named_parameters())


def test_a_shared_head_is_no_part_of_the_policys_module_nor_of_its_reference():
    policy = llama()
    names = set(policy.module.state_dict())
    critic = SharedCritic(policy)
    assert set(policy.module.state_dict()) == names and policy.value_head is critic.module
    rollouts = policy.sample(requests(2), SAMPLING, seed=3)
    with pytest.raises(GruppoError, match="without a value head"):
        ReferenceModel(policy).likelihood(rollouts, whole(rollouts, 0, 1), outputs=("values",))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", SPLITTING, ids=lambda make: make.__name__)
def test_a_copy_of_the_policy_sees_at_first_what_the_policy_sees_and_stays_when_it_moves(
    make, compute
):
    policy = make(compute=compute)
    shared, separate = with_opinions(SharedCritic(policy)), with_opinions(SeparateCritic(policy))
    rollouts = policy.sample(requests(4, 2, 3), SAMPLING, seed=3)
    (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, ALL)
    first = separate.values(rollouts, micro_batch)
    assert torch.equal(first, shared.values(rollouts, micro_batch)) and first.dtype == torch.float32
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(1.5)
    assert torch.equal(separate.values(rollouts, micro_batch), first)
    assert not torch.equal(shared.values(rollouts, micro_batch), first)


# --- bfloat16 -------------------------------------------------------------------------------------


@pytest.mark.silent_bug(28)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", SPLITTING, ids=lambda make: make.__name__)
def test_a_loss_through_a_bfloat16_copy_reaches_master_and_head_in_float32(make, kind):
    policy = make(compute="bfloat16")
    critic = with_opinions(kind(policy))
    rollouts = policy.sample(requests(4, 2, 3), SAMPLING, seed=3)
    micro_batches = policy.micro_batches(rollouts, rollouts.mask, ALL)
    gradient_of(critic, policy, rollouts, micro_batches)
    trunk = policy.trunk() if critic.is_shared else critic.trunk
    got = {
        name: p.grad for name, p in [*trunk.named_parameters(), *head_of(critic).named_parameters()]
    }
    assert {g.dtype for g in got.values()} == {torch.float32}
    copied = policy.copy.module if critic.is_shared else critic.compute_copy
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in copied.parameters())
    exact_policy = make()
    exact = with_opinions(kind(exact_policy))
    gradient_of(exact, exact_policy, rollouts, micro_batches)
    exact_trunk = exact_policy.trunk() if exact.is_shared else exact.trunk
    for name, p in [*exact_trunk.named_parameters(), *head_of(exact).named_parameters()]:
        assert (
            torch.nn.functional.cosine_similarity(got[name].flatten(), p.grad.flatten(), dim=0)
            > 0.98
        ), name


@pytest.mark.silent_bug(9)
@pytest.mark.parametrize("kind", KINDS)
def test_values_follow_an_optimizer_step_without_being_told(kind):
    policy = llama(compute="bfloat16")
    critic = with_opinions(kind(policy))
    rollouts = policy.sample(requests(4), SAMPLING, seed=3)
    micro_batch = whole(rollouts, 0, 1, 2, 3)
    before = critic.values(rollouts, micro_batch)
    before.sum().backward()
    trunk = policy.trunk() if critic.is_shared else critic.trunk
    torch.optim.AdamW(trunk.parameters(), lr=0.1, fused=True).step()
    assert (critic.values(rollouts, micro_batch) - before)[rollouts.mask].abs().mean() > 0.1


# --- another model, and what is refused -----------------------------------------------------------


def test_a_critic_of_another_size_with_the_same_tokens_is_welcome():
    policy = llama()
    small = of("Qwen2", hidden_size=16, num_attention_heads=2, seed=5)
    critic = with_opinions(SeparateCritic(policy, small))
    rollouts = policy.sample(requests(2, 2), SAMPLING, seed=3)
    values = critic.values(rollouts, whole(rollouts, *range(4)))
    head = head_of(critic)
    by_hand = (features_by_hand(small, 1, rollouts) * head.weight[0]).sum(dim=-1) + 0.3
    torch.testing.assert_close(values[1, : len(by_hand)], by_hand, rtol=1e-4, atol=1e-5)


def test_a_critic_with_other_tokens_is_refused_with_the_first_that_differs():
    other = from_transformers(
        causal_lm("Llama"), bpe_tokenizer(merges=[("a", "c"), ("ac", "b"), ("1", "2")])
    )
    with pytest.raises(
        GruppoError,
        match=r"tokens \[\('ab', 256\).*critic\.model",
    ):
        SeparateCritic(llama(), other)


def test_a_critic_that_knows_fewer_ids_is_refused():
    other = from_transformers(causal_lm("Llama", vocab_size=300), bpe_tokenizer())
    with pytest.raises(GruppoError, match=rf"token ids \[{len(bpe_tokenizer())}, 300\]"):
        SeparateCritic(llama(), other)


def test_tokenizers_of_ones_own_cannot_be_compared_and_a_copy_needs_no_comparison():
    with pytest.raises(GruppoError, match="without a vocabulary, which cannot be compared"):
        check_same_tokens(plain(), plain(seed=1))
    assert SeparateCritic(plain()).module["head"].weight.shape == (1, 257)


@pytest.mark.parametrize("shape", [(2, 1), (2,), (3, 2), (2, 3, 1), (1, 3), ()])
def test_values_that_would_be_broadcast_are_refused(shape):
    micro_batch = MicroBatch(torch.tensor([4, 1]), slice(0, 3))
    assert check_values(torch.zeros(2, 3), micro_batch).shape == (2, 3)
    with pytest.raises(GruppoError, match=r"for a micro-batch of \[2, 3\]") as error:
        check_values(torch.zeros(shape), micro_batch)
    assert f"shape {list(shape)}" in str(error.value)
