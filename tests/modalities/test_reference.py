"""References: at a KL of exactly 0 until the policy moves, wherever their weights rest; and those
that follow it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.fakes import POLICIES, gpt2, llama, plain, requests

from gruppo.modalities.common.lora import inject, without_adapter
from gruppo.modalities.common.reference import ReferenceModel, trained
from gruppo.modalities.text.load import give_adapter
from gruppo.protocols import digest
from gruppo.types import GruppoError, Sampling

ema = partial(ReferenceModel, rule="ema", rate=0.5, every=1)
adapter_off = partial(ReferenceModel, rule="adapter_off")
COPIES = {
    "frozen": ReferenceModel,
    "frozen, cpu": partial(ReferenceModel, storage="cpu"),
    "ema": ema,
    "ema, cpu": partial(ema, storage="cpu"),
}


@pytest.fixture(
    params=[(make, compute) for make in POLICIES for compute in ("float32", "bfloat16")],
    ids=lambda p: f"{p[0].__name__}-{p[1]}",
)
def policy(request):
    make, compute = request.param
    return make(compute=compute) if make is not plain else make()


@pytest.fixture(params=COPIES)
def copied(request, tmp_path):
    make = COPIES[request.param]
    return partial(make)


def with_adapter(compute="float32", *, moved=False):
    """A tiny Llama with an adapter that adds nothing yet; or, ``moved``, something."""
    policy = llama(compute=compute)
    give_adapter(policy, partial(inject, rank=4, alpha=8, seed=1))
    if moved:
        move(policy, 0.1, seed=1)
    return policy


def move(policy, by, *, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=generator)
    policy.refresh(force=True)


def both(policy, reference, rollouts):
    pairs = [
        (
            policy.likelihood(rollouts, micro_batch).logprobs,
            reference.likelihood(rollouts, micro_batch).logprobs,
        )
        for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 60)
    ]
    return [torch.cat([pair[n].flatten() for pair in pairs]) for n in (0, 1)]


def sampled(policy, sampling=None):
    return policy.sample(
        requests(3, 2, 2), sampling or Sampling(temperature=0.8, max_actions=8), seed=0
    )


def step(policy, rollouts):
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 10**9):
        policy.likelihood(rollouts, micro_batch).logprobs.sum().backward()
    torch.optim.AdamW(
        [p for p in policy.module.parameters() if p.requires_grad], lr=0.1, fused=True
    ).step()


# --- frozen copies --------------------------------------------------------------------------------


@pytest.mark.silent_bug(18)
def test_the_kl_of_an_unchanged_policy_is_exactly_zero_and_of_a_changed_one_not(policy):
    rollouts = sampled(policy)
    reference = ReferenceModel(policy)
    now, then = both(policy, reference, rollouts)
    assert torch.equal(now, then) and now.requires_grad and not then.requires_grad
    step(policy, rollouts)
    moved, still = both(policy, reference, rollouts)
    assert torch.equal(still, then) and (moved - still).abs().mean() > 0.1


@pytest.mark.silent_bug(18)
def test_the_reference_stays_as_it_was_through_updates_and_modes(policy):
    reference = ReferenceModel(policy)
    rollouts = sampled(policy)
    before = {name: value.clone() for name, value in reference.module.state_dict().items()}
    proof = digest(reference.frozen_state_dict())
    step(policy, rollouts)
    reference.update(policy, 1)
    policy.module.train()
    assert all(
        torch.equal(value, before[name]) for name, value in reference.module.state_dict().items()
    )
    assert digest(reference.frozen_state_dict()) == proof
    assert not reference.module.training and not any(
        p.requires_grad for p in reference.module.parameters()
    )
    assert {id(p) for p in reference.module.parameters()}.isdisjoint(
        id(p) for p in policy.module.parameters()
    )


@pytest.mark.parametrize("storage", ["device", "cpu"])
def test_a_reference_of_another_architecture_that_reads_the_same_tokens_says_what_it_says(
    tmp_path, storage
):
    policy, other = llama(), gpt2(seed=3)
    rollouts = sampled(policy)
    ours, theirs = both(policy, ReferenceModel(other, storage=storage), rollouts)
    expected = [
        other.likelihood(rollouts, micro_batch).logprobs
        for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 60)
    ]
    assert (
        torch.equal(theirs, torch.cat([x.flatten() for x in expected]))
        and (ours - theirs).abs().mean() > 0.1
    )


@pytest.mark.silent_bug(9)
@pytest.mark.silent_bug(18)
def test_a_reference_made_after_a_change_behind_autograds_back_is_the_changed_policy():
    policy = llama(compute="bfloat16")
    policy.module.model.embed_tokens.weight.data.mul_(2)
    reference = ReferenceModel(policy)
    expected = policy.module.model.embed_tokens.weight.bfloat16()
    assert torch.equal(reference.module.model.embed_tokens.weight, expected)


# --- wherever the weights are kept ----------------------------------------------------------------


@pytest.mark.silent_bug(18)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_first_kl_is_exactly_zero_wherever_the_weights_are_kept(copied, compute):
    policy = llama(compute=compute)
    rollouts, reference = sampled(policy), copied(policy)
    now, then = both(policy, reference, rollouts)
    assert torch.equal(now, then)
    with reference.on_device():  # one pass of many pieces
        assert torch.equal(both(policy, reference, rollouts)[1], then)
    step(policy, rollouts)
    assert torch.equal(both(policy, reference, rollouts)[1], then)


@pytest.mark.parametrize("name", [name for name in COPIES if "," in name])
def test_offloaded_weights_are_in_the_module_during_a_pass_alone_even_when_it_fails(name, tmp_path):
    policy = llama()
    numbers = sum(p.numel() for p in policy.module.parameters())
    reference = COPIES[name](policy)

    def held():
        return sum(p.numel() for p in reference.module.parameters())

    assert reference.is_offloaded and held() == 0
    with pytest.raises(ValueError, match="in the middle"), reference.on_device():
        assert held() == numbers
        raise ValueError("in the middle")
    assert held() == 0
    both(policy, reference, sampled(policy))
    assert held() == 0


# --- mixing ---------------------------------------------------------------------------------------


def followers(compute, tmp_path):
    """Each kind that moves, with a policy that has left it."""
    for storage in ("device", "cpu", "adapter"):
        policy = (
            with_adapter(compute, moved=True) if storage == "adapter" else llama(compute=compute)
        )
        reference = ema(policy, storage="device" if storage == "adapter" else storage)
        move(policy, 0.05, seed=3)
        yield policy, reference


@pytest.mark.silent_bug(19)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_an_update_mixes_the_master_weights_exactly(tmp_path, rate, compute):
    for policy, reference in followers(compute, tmp_path):
        before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
        reference.rate = rate
        reference.update(policy, 1)
        after, now = reference.state_dict(), trained(policy.module)
        assert now and all(tensor.dtype == torch.float32 for tensor in after.values())
        for name, theirs in now.items():
            exact = (
                rate * theirs.double() + (1 - rate) * before[name].double()
            ).float()  # rounded once
            assert torch.equal(after[name], exact)


@pytest.mark.silent_bug(19)
def test_small_steps_of_a_bfloat16_run_are_not_rounded_away(tmp_path):
    policy = llama(compute="bfloat16")
    reference = ema(policy, rate=0.01)
    name, first = next(iter(trained(policy.module).items()))
    start = first.clone()
    with torch.no_grad():
        first *= 1.01
    for count in range(1, 101):
        reference.update(policy, count)
    expected = start + (first - start) * (1 - 0.99**100)
    torch.testing.assert_close(reference.state_dict()[name], expected, rtol=1e-5, atol=0)


def mixed(own, numbers, rate):
    """Numbers of a reference, whose first weights are ``own``, after one update towards
    ``numbers``."""
    policy = plain()
    weight = next(policy.module.parameters()).data.flatten()[: len(own)]
    weight.copy_(torch.tensor(own))
    reference = ema(policy, rate=rate)
    weight.copy_(torch.tensor(numbers))
    reference.update(policy, 1)
    return next(iter(reference.state_dict().values())).flatten()[: len(own)]


def test_rates_of_zero_and_one_are_exact_whatever_the_numbers_are():
    numbers = [-0.0, float("inf"), float("nan"), 1e-40]
    for rate, expected in ((0.0, [1.0] * 4), (1.0, numbers)):
        bits = mixed([1.0] * 4, numbers, rate).view(torch.int32)
        assert torch.equal(bits, torch.tensor(expected).view(torch.int32))


@pytest.mark.parametrize(
    "make", [llama, partial(with_adapter, moved=True)], ids=["copy", "adapter"]
)
def test_a_reference_is_mixed_every_so_many_steps(make):
    policy = make()
    reference = ema(policy, every=3)
    move(policy, 0.1, seed=0)
    changed = []
    for count in range(1, 8):
        before = digest(reference.state_dict())
        reference.update(policy, count)
        changed.append(digest(reference.state_dict()) != before)
    assert changed == [False, False, True, False, False, True, False]


def test_the_state_of_a_mixed_reference_is_put_back_to_the_bit(tmp_path):
    for policy, reference in followers("bfloat16", tmp_path):
        rollouts = sampled(policy)
        state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
        result = both(policy, reference, rollouts)[1]
        reference.update(policy, 1)
        assert not torch.equal(both(policy, reference, rollouts)[1], result)
        reference.load_state_dict(state)
        assert torch.equal(both(policy, reference, rollouts)[1], result)


def test_the_state_of_another_architecture_is_refused(tmp_path):
    reference = ema(llama())
    with pytest.raises(
        GruppoError, match=r"embed_tokens.weight is \[.*\] in the save, .* needs \[.*\]"
    ):
        reference.load_state_dict(ema(llama(hidden_size=16)).state_dict())
    with pytest.raises(GruppoError, match="is missing in the save"):
        reference.load_state_dict(ema(llama(num_hidden_layers=1)).state_dict())
    with pytest.raises(GruppoError, match="this run needs none"):
        ReferenceModel(llama()).load_state_dict(reference.state_dict())


def test_the_distance_is_that_of_the_weights_over_the_references_norm():
    policy = llama()
    reference = ema(policy)
    assert reference.distance(policy) == 0
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter *= 1.25
    assert reference.distance(policy) == pytest.approx(0.25, rel=1e-6)
    reference.update(policy, 1)  # 1.125 of the first weights, against 1.25
    assert reference.distance(policy) == pytest.approx(0.125 / 1.125, rel=1e-6)


def test_a_mixed_reference_answers_with_its_own_weights(tmp_path):
    greedy = Sampling(temperature=0.0, max_actions=6)
    for policy, reference in followers("float32", tmp_path):
        with reference.active() as own:
            first = own.sample(requests(3, 1), greedy, seed=0)
        reference.rate = 1.0
        move(policy, 0.5, seed=5)
        others = policy.sample(requests(3, 1), greedy, seed=0)
        assert not torch.equal(first.actions, others.actions)
        reference.update(policy, 1)
        with reference.active() as own:
            assert torch.equal(own.sample(requests(3, 1), greedy, seed=0).actions, others.actions)


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.silent_bug(18)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_with_the_adapter_off_the_policy_is_its_base_to_the_bit(compute):
    base, policy = llama(compute=compute), with_adapter(compute)
    rollouts = sampled(base)
    expected, off = both(base, adapter_off(policy), rollouts)
    assert torch.equal(off, expected)
    now, off = both(policy, adapter_off(policy), rollouts)
    assert torch.equal(now, off) and now.requires_grad and not off.requires_grad  # the KL at step 0
    for _ in range(3):
        step(policy, rollouts)
    now, off = both(policy, adapter_off(policy), rollouts)
    assert torch.equal(off, expected) and (now - off).abs().mean() > 0.1


@pytest.mark.silent_bug(18)
@pytest.mark.parametrize("make", [adapter_off, ema], ids=["off", "ema"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_base_of_an_adapter_is_the_same_after_updates(make, compute):
    policy = with_adapter(compute)
    reference = make(policy)
    names = reference.frozen_state_dict().keys()
    assert names and not any("lora" in name for name in names)
    assert len(names) + len(trained(policy.module)) == len(
        list(policy.compute_module.named_parameters())
    )
    before, rollouts = digest(reference.frozen_state_dict()), sampled(policy)
    for count in range(1, 4):
        step(policy, rollouts)
        reference.update(policy, count)
    assert digest(reference.frozen_state_dict()) == before


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [adapter_off, ema], ids=["off", "ema"])
def test_a_reference_in_the_policys_own_modules_leaves_its_gradient_to_the_bit(make, compute):
    def gradient(*, asks):
        policy = with_adapter(compute, moved=True)
        reference = make(policy)
        move(policy, 0.1, seed=7)
        rollouts = sampled(policy)
        for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 60):
            logprobs = policy.likelihood(rollouts, micro_batch).logprobs
            if asks:  # between the forward and the way back
                assert not torch.equal(
                    reference.likelihood(rollouts, micro_batch).logprobs, logprobs
                )
            logprobs.sum().backward()
        return {name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None}

    requested, alone = gradient(asks=True), gradient(asks=False)
    assert requested.keys() == alone.keys() and all(
        torch.equal(requested[name], alone[name]) for name in alone
    )
    assert all("lora" in name for name in alone)


def test_switching_the_adapter_off_lasts_for_the_pass_alone_even_when_it_fails():
    policy = with_adapter(moved=True)
    rollouts = sampled(policy)
    (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 10**9)
    before = policy.likelihood(rollouts, micro_batch).logprobs
    with pytest.raises(ValueError, match="in the middle"), without_adapter(policy.compute_module):
        assert not torch.equal(policy.likelihood(rollouts, micro_batch).logprobs, before)
        raise ValueError("in the middle")
    assert torch.equal(policy.likelihood(rollouts, micro_batch).logprobs, before)
