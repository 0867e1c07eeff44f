"""Adapters: what they compute, what they leave alone, and folders that hold one."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from tests.fakes import (
    adapted,
    bpe_tokenizer,
    causal_lm,
    doubled,
    llama,
    plain,
    requests,
    with_random_adapter,
)

from gruppo.modalities.common.adapters import read_adapter
from gruppo.modalities.common.lora import (
    adapter_weights,
    has_adapter,
    inject,
    is_adapted,
    merge,
)
from gruppo.modalities.text import decoder, decoding, from_transformers
from gruppo.modalities.text.critic import SeparateCritic
from gruppo.modalities.text.load import give_adapter
from gruppo.types import GruppoError, Sampling

IDS = torch.arange(1, 15).view(2, 7)
SAMPLING = Sampling(max_actions=8)
COMPUTE = pytest.mark.parametrize("compute", ["float32", "bfloat16"])


def fresh(
    kind: str = "Llama",
    *,
    compute="float32",
    rank=3,
    alpha=6.0,
    targets=(),
    seed=0,
    base="tiny",
    **changes,
):
    """A policy below an adapter that does nothing yet."""
    adapt = partial(inject, rank=rank, alpha=alpha, targets=targets, seed=seed, base=base)
    return from_transformers(
        causal_lm(kind, **changes), bpe_tokenizer(), compute=compute, adapt=adapt
    )


def logprobs(policy, rollouts):
    (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 10**9)
    return policy.likelihood(rollouts, micro_batch).logprobs


def step(policy, rollouts, lr=0.1):
    logprobs(policy, rollouts).sum().backward()
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    torch.optim.AdamW(trained, lr=lr, fused=True).step()


# --- what it computes -----------------------------------------------------------------------------


@torch.no_grad()
def test_an_adapted_layer_is_w_x_plus_alpha_over_rank_b_a_x():
    policy = doubled(adapted(rank=3))
    layer = policy.module.model.layers[1].mlp.up_proj
    x = torch.linspace(-1, 1, 32, dtype=torch.float64)[None]
    a, b, w = (
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        layer.base_layer.weight,
    )
    by_hand = torch.stack(
        [
            (w[o] * x[0]).sum() + 2.0 * sum(b[o, r] * (a[r] * x[0]).sum() for r in range(3))
            for o in range(48)
        ]
    )
    torch.testing.assert_close(layer(x)[0], by_hand, rtol=1e-12, atol=0)


@pytest.mark.silent_bug(18)
@COMPUTE
def test_a_new_adapter_leaves_the_model_as_it_was_to_the_bit(compute):
    policy, base = fresh(compute=compute, tie_word_embeddings=True), llama(compute=compute)
    rollouts = policy.sample(requests(3, 2), SAMPLING, seed=0)
    same = base.sample(requests(3, 2), SAMPLING, seed=0)
    assert torch.equal(rollouts.actions, same.actions)
    assert torch.equal(rollouts.sampler_logprobs, same.sampler_logprobs)
    assert torch.equal(logprobs(policy, rollouts), logprobs(base, rollouts))


# --- how it begins --------------------------------------------------------------------------------


def test_an_adapter_begins_by_the_seed_and_leaves_the_global_generator_alone():
    module = causal_lm("Llama")
    state = torch.get_rng_state()
    inject(module, rank=3, alpha=6.0, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = (adapter_weights(fresh(seed=seed).module) for seed in (1, 1, 2))
    for name, weight in first.items():
        assert torch.equal(weight, again[name]) and torch.equal(
            weight, adapter_weights(module)[name]
        )
        if "lora_B" in name:
            assert not weight.any()
        else:
            bound = weight.shape[1] ** -0.5
            assert (
                not torch.equal(weight, other[name]) and 0.8 * bound < weight.abs().max() <= bound
            )
    layers = [weight for name, weight in first.items() if name.endswith("q_proj.lora_A.weight")]
    assert not torch.equal(*layers)


def test_all_linear_layers_but_the_head_have_one_or_those_that_are_named():
    def adapted_names(policy):
        return {name for name, part in policy.module.named_modules() if is_adapted(part)}

    everywhere = {
        f"model.layers.{n}.{part}_proj"
        for n in (0, 1)
        for part in (
            "self_attn.q",
            "self_attn.k",
            "self_attn.v",
            "self_attn.o",
            "mlp.gate",
            "mlp.up",
            "mlp.down",
        )
    }
    assert adapted_names(fresh(tie_word_embeddings=False)) == everywhere
    some = fresh(targets=("q_proj", "layers.1.mlp.down_proj"))
    q, down = (f"model.layers.{{}}.{part}_proj" for part in ("self_attn.q", "mlp.down"))
    assert adapted_names(some) == {q.format(0), q.format(1), down.format(1)}
    own = {p for weight in adapter_weights(some.module).values() for p in [weight]}
    assert {p for p in some.module.parameters() if p.requires_grad} == own


def test_gpt2_whose_layers_hold_their_weights_the_other_way_round_has_one_too(tmp_path):
    policy = with_random_adapter(fresh("GPT2"), scale=0.1)
    rollouts = policy.sample(requests(2, 2), SAMPLING, seed=0)
    (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 10**9)
    torch.testing.assert_close(
        logprobs(policy, rollouts), micro_batch.of(rollouts.sampler_logprobs), rtol=0, atol=1e-4
    )
    policy.save(tmp_path)
    base = causal_lm("GPT2")
    read_adapter(tmp_path).attach(base, base="tiny")
    assert torch.equal(base.eval()(IDS).logits, policy.module(IDS).logits)
    on = policy.module(IDS).logits
    merge(policy.module)
    torch.testing.assert_close(policy.module(IDS).logits, on, rtol=0, atol=1e-4)


# --- the base is held once ------------------------------------------------------------------------


def test_the_base_is_held_once_in_the_dtype_of_the_arithmetic_and_adapters_train_in_float32():
    policy = adapted(compute="bfloat16")
    masters, computing = (
        dict(policy.module.named_parameters()),
        dict(policy.compute_module.named_parameters()),
    )
    assert masters.keys() == computing.keys()
    for name, master in masters.items():
        is_adapter = "lora_" in name
        assert master.requires_grad == is_adapter
        assert master.dtype == (torch.float32 if is_adapter else torch.bfloat16)
        assert computing[name].dtype == torch.bfloat16 and (computing[name] is master) != is_adapter
    rollouts = policy.sample(requests(3), SAMPLING, seed=0)
    logprobs(policy, rollouts).sum().backward()
    assert all((master.grad is not None) == ("lora_" in name) for name, master in masters.items())
    assert all(parameter.grad is None for parameter in computing.values())


def test_a_policy_in_memory_is_given_an_adapter_in_place():
    policy = llama(compute="bfloat16")
    rollouts = policy.sample(requests(3, 2), SAMPLING, seed=0)
    before, copied = logprobs(policy, rollouts), policy.copy
    give_adapter(policy, partial(inject, rank=3, alpha=6.0, base=""))
    assert torch.equal(logprobs(policy, rollouts), before) and policy.copy is not copied
    step(policy, rollouts)
    assert (logprobs(policy, rollouts) - before).abs().mean() > 0.1
    assert sum(p.dtype == torch.float32 for p in policy.module.parameters()) == len(
        adapter_weights(policy.module)
    )


def test_a_separate_critic_has_an_adapter_of_its_own_on_the_same_base():
    policy = adapted(compute="bfloat16")
    critic = SeparateCritic(policy)
    own, policys = dict(critic.trunk.named_parameters()), dict(policy.trunk().named_parameters())
    for name, parameter in own.items():
        assert (parameter is policys[name]) != ("lora_" in name) and torch.equal(
            parameter, policys[name]
        )
    trained = {name for name, p in critic.module.named_parameters() if p.requires_grad}
    assert trained == {f"trunk.{name}" for name in own if "lora_" in name} | {
        "head.weight",
        "head.bias",
    }
    assert critic.module["head"].weight.dtype == torch.float32
    rollouts = policy.sample(requests(3), SAMPLING, seed=0)
    (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 10**9)
    with torch.no_grad():
        critic.module["head"].weight.fill_(0.1)
    critic.values(rollouts, micro_batch).sum().backward()
    assert own["layers.1.mlp.down_proj.lora_A.default.weight"].grad is not None
    assert all(p.grad is None for p in policy.module.parameters())


# --- the fast ways agree with the plain ones ------------------------------------------------------


@pytest.mark.silent_bug(9)
@COMPUTE
def test_the_sampler_follows_the_adapter(compute):
    policy = adapted(compute=compute)
    for _ in range(2):
        rollouts = policy.sample(requests(3, 2), SAMPLING, seed=0)
        (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 10**9)
        reported, result = (
            micro_batch.of(rollouts.sampler_logprobs),
            policy.likelihood(rollouts, micro_batch).logprobs.detach(),
        )
        assert (reported - result).abs().mean() < (1e-5 if compute == "float32" else 0.05)
        before = result
        step(policy, rollouts)
        assert (logprobs(policy, rollouts) - before).abs().mean() > 0.5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj", "up_proj"), ("k_proj",)], ids=str)
def test_products_of_adapted_layers_are_what_the_layers_say(dtype, targets):
    policy = adapted(targets=targets, attention_bias=True)
    layer = policy.module.to(dtype).model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for modules in (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (mlp.gate_proj, mlp.up_proj),
    ):
        product = decoding.fused(*modules)
        needed = torch.cat([module(x) for module in modules], dim=-1)
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(product(x), needed, rtol=tolerance, atol=tolerance)


def test_what_the_feed_forward_computes_again_has_the_gradient_of_what_it_keeps(monkeypatch):
    policy = doubled(adapted(mlp_bias=True))
    rollouts = policy.sample(requests(3, 2), SAMPLING, seed=0)

    def gradients():
        policy.module.zero_grad(set_to_none=True)
        result = logprobs(policy, rollouts)
        (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
        return [result, *(weight.grad for weight in adapter_weights(policy.module).values())]

    fast = gradients()
    calls = []
    monkeypatch.setattr(decoder, "low_rank", lambda module: calls.append(module))
    for got, needed in zip(fast, gradients(), strict=True):
        torch.testing.assert_close(got, needed, rtol=1e-9, atol=1e-12)
    assert len(calls) == 2  # one a layer: the plain way was taken


# --- merging --------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_merged_model_has_the_logits_of_base_and_adapter_and_no_trace_of_it():
    policy = doubled(adapted())
    on, names = policy.module(IDS).logits, set(dict(llama().module.named_parameters()))
    merge(policy.module)
    torch.testing.assert_close(policy.module(IDS).logits, on, rtol=1e-10, atol=1e-10)
    assert not has_adapter(policy.module) and not hasattr(policy.module, "gruppo_base")
    assert set(dict(policy.module.named_parameters())) == names
    assert all(p.requires_grad for p in policy.module.parameters())


# --- refusals -------------------------------------------------------------------------------------


def test_targets_that_are_no_linear_layers_are_refused_with_the_nearest_name():
    for targets, why in {
        ("q_prj",): r"no linear layers 'q_prj'. Did you mean q_proj\?",
        ("q_proj,v_proj",): r"no linear layers 'q_proj,v_proj'",
        ("xyz",): r"no linear layers 'xyz'. Set lora.targets to some of down_proj, gate_proj",
        ("mlp",): r"no linear layers 'mlp'",
        ("embed_tokens",): r"no linear layers 'embed_tokens'",
        ("lm_head",): r"'lm_head' is the head, whose weight is tied to the embedding",
    }.items():
        with pytest.raises(GruppoError, match=why):
            fresh(targets=targets, tie_word_embeddings=True)
    untied = fresh(targets=("lm_head",), tie_word_embeddings=False)
    assert sum(map(is_adapted, untied.module.modules())) == 1


def test_a_module_of_ones_own_and_a_second_adapter_are_refused():
    with pytest.raises(
        GruppoError, match=r"LoRA needs a Hugging Face causal language model, not a TinyGPT"
    ):
        give_adapter(plain(), partial(inject, rank=2, alpha=4.0))
    with pytest.raises(GruppoError, match=r"the model already has an adapter"):
        inject(adapted().module, rank=2, alpha=4.0)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(GruppoError, match=r'needs the package "peft".*pip install .*\[lora\]"'):
        fresh()
