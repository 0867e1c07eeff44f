"""Adapters on a base in 4 bits (QLoRA), and what is refused of quantized models."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import fakes, tiny
from tests.trainer.runs import FULL, Signalling, metrics, newest, tensors

from gruppo import api
from gruppo.build import Parts, build
from gruppo.config.checks import check_config
from gruppo.config.schema import Config
from gruppo.modalities.common.four_bit import four_bit_layers
from gruppo.modalities.common.lora import adapter_weights, base_weights, inject
from gruppo.modalities.text import from_pretrained
from gruppo.protocols import digest
from gruppo.trainer.loop import Stopped
from gruppo.types import GruppoError, Sampling

FOUR_BIT = {"lora__rank": 3, "lora__load_in_4bit": True}


def config_in(folder: Path, **changes: Any) -> Config:
    """A model whose rows are whole blocks of 64 weights."""
    model = tiny.write_model(folder / "wide", width=64)
    return tiny.config(folder, **FOUR_BIT | {"model": model} | changes)


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_samples_log_probs_and_gradients_are_those_of_the_dequantized_weights(
    bitsandbytes, compute
):
    policy = fakes.four_bit(compute=compute)
    dense = fakes.causal_lm("Llama", tie_word_embeddings=True, **fakes.WIDE)
    layers = four_bit_layers(policy.module)
    assert len(layers) == 14 and {layer.weight.dtype for layer in layers.values()} == {torch.uint8}
    for name, layer in layers.items():
        weight = bitsandbytes.functional.dequantize_4bit(
            layer.weight.data, layer.weight.quant_state
        )
        own = dense.get_submodule(name.replace(".base_layer", "")).weight
        assert (
            0.01 < float((weight - own.detach()).norm() / own.detach().norm()) < 0.15
        )  # quantized, and of this layer
        own.data.copy_(weight)
    adapt = partial(inject, rank=3, alpha=6.0, seed=0, base="tiny")
    expected = fakes.from_transformers(dense, fakes.bpe_tokenizer(), compute=compute, adapt=adapt)
    fakes.with_random_adapter(expected)
    rollouts = expected.sample(fakes.requests(4, 2, 3), Sampling(max_actions=6), seed=3)
    assert torch.equal(
        policy.sample(fakes.requests(4, 2, 3), Sampling(max_actions=6), seed=3).actions,
        rollouts.actions,
    )
    logprobs = []
    for one in (expected, policy):
        (micro_batch,) = one.micro_batches(rollouts, rollouts.mask, 10**6)
        likelihood = one.likelihood(rollouts, micro_batch)
        (
            likelihood.logprobs * torch.linspace(0.5, 1.5, likelihood.logprobs.shape[1])
        ).sum().backward()
        logprobs.append(likelihood.logprobs.detach())
    assert torch.equal(*logprobs)
    gradients = [adapter_weights(one.module) for one in (expected, policy)]
    for name, weight in gradients[0].items():
        assert float(weight.grad.abs().max()) > 0 and torch.equal(
            weight.grad, gradients[1][name].grad
        ), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"objective": "ppo", "critic__kind": "separate"}], ids=["grpo", "ppo"]
)
def test_a_run_resumes_to_the_bit_on_a_base_that_stays_what_it_was(bitsandbytes, tmp_path, changes):
    changes = {"steps": 4, "evaluation__prompts": 0} | FULL | changes
    config = config_in(tmp_path / "whole", **changes)
    whole = api.start(config).folder
    reward = Signalling(3)

    def noisy(completions, **_):
        reward(completions)
        return tiny.noisy(completions)

    with pytest.raises(Stopped):
        api.start(config_in(tmp_path, **changes), Parts(rewards=[noisy]))
    run = api.start(tmp_path / "runs/run").folder
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert tensors(newest(run) / name) == tensors(newest(whole) / name)
    assert metrics(run) == metrics(whole)
    base = json.loads((run / "final/base.json").read_text())
    built, _ = build(config, Parts())
    assert base["is_4bit"] and base["sha256"] == digest(base_weights(built.policy.module))


def test_the_adapter_of_a_4bit_base_opens_on_the_full_one_with_a_warning(
    bitsandbytes, tmp_path, caplog
):
    run = api.start(config_in(tmp_path, steps=1)).folder
    with caplog.at_level(logging.WARNING, "gruppo"):
        policy = from_pretrained(run)
    assert "was trained on a base of 4 bits and is put on one of full precision" in caplog.text
    assert not four_bit_layers(policy.module)
    again = config_in(tmp_path, steps=1, name="more", lora__rank=0, lora__adapter=str(run))
    assert json.loads((api.start(again).folder / "final/base.json").read_text())["is_4bit"]


def test_bases_that_differ_in_their_scales_alone_have_other_identities(bitsandbytes, tmp_path):
    adapt = partial(inject, rank=3, alpha=6.0, seed=0)
    identities = set()
    for factor in (1, 2):
        folder = tmp_path / str(factor)
        shutil.copytree(fakes.wide_folder(), folder)
        weights = load_file(folder / "model.safetensors")
        weights |= {name: factor * weight for name, weight in weights.items() if "_proj" in name}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        policy = from_pretrained(folder, compute="float32", adapt=adapt, load_in_4bit=True)
        assert policy.base_sha256 == digest(base_weights(policy.module))
        identities.add(policy.base_sha256)
        codes = {
            name: w for name, w in base_weights(policy.module).items() if not w.is_floating_point()
        }
    assert len(identities) == 2 and len(codes) == 14 * 3


# --- refused --------------------------------------------------------------------------------------


def quantized(folder: Path, **settings: object) -> str:
    """A model folder whose config says that it is quantized."""
    shutil.copytree(tiny.model(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return str(folder)


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("settings", "rank", "says"),
    [
        (BNB, 0, "is quantized, and quantized weights cannot be trained .* Set lora.rank 16"),
        (
            {"quant_method": "gptq", "bits": 4},
            0,
            "is quantized, and quantized weights cannot be trained",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            3,
            r"cannot put an adapter on \(gptq\).*lora.load_in_4bit True",
        ),
        (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, 3, r"stored as uint8"),
    ],
)
def test_a_quantized_model_that_cannot_be_trained_is_refused_before_it_is_read(
    tmp_path, settings, rank, says
):
    folder = quantized(tmp_path / "model", **settings)
    (Path(folder) / "model.safetensors").unlink()
    with pytest.raises(GruppoError, match=says):
        api.start(tiny.config(tmp_path, model=folder, lora__rank=rank))


def test_a_quantized_model_in_memory_is_refused():
    module = fakes.causal_lm("Llama")
    module.is_quantized, module.config.quantization_config = True, BNB
    with pytest.raises(
        GruppoError,
        match=r"this LlamaForCausalLM is quantized.*give the model that it was quantized",
    ):
        fakes.from_transformers(module, fakes.bpe_tokenizer())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"lora__load_in_4bit": True},
            r"lora.rank=0 trains all weights. Set lora.rank 16",
        ),
        (
            FOUR_BIT | {"engine__kind": "vllm", "engine__urls": ("http://x",)},
            "would train another model than engine.kind",
        ),
    ],
)
def test_options_that_4_bits_exclude_are_refused(tmp_path, changes, says):
    with pytest.raises(GruppoError, match=says):
        check_config(tiny.config(tmp_path, **changes))


def test_models_that_are_not_read_by_transformers_are_refused(tmp_path):
    config = tiny.config(tmp_path, **FOUR_BIT)
    with pytest.raises(
        GruppoError, match=r"'LlamaForCausalLM' is made in memory. Set lora.load_in_4bit False"
    ):
        build(config, Parts(model=from_pretrained(tiny.model())))


def test_layers_that_bitsandbytes_computes_wrongly_are_refused(bitsandbytes, tmp_path):
    with pytest.raises(
        GruppoError, match=r"has 16 inputs, and .* only where they are a multiple of 64"
    ):
        build(tiny.config(tmp_path, **FOUR_BIT), Parts())


def test_without_bitsandbytes_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(
        GruppoError, match=r'a 4-bit base .* needs the package "bitsandbytes" .*\[qlora\]'
    ):
        from_pretrained(tiny.model(), adapt=print, load_in_4bit=True)
