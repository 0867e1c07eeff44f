"""Adapters as folders: gruppo's and peft's, on their base and refused on another."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial

import pytest
import torch
from tests import tiny
from tests.fakes import causal_lm, llama, requests, with_random_adapter

from gruppo.modalities.common.adapters import adapt_from, is_adapter, read_adapter
from gruppo.modalities.common.lora import has_adapter, inject
from gruppo.modalities.text import from_pretrained
from gruppo.trainer import checkpoint
from gruppo.types import GruppoError, Sampling

IDS = torch.arange(1, 15).view(2, 7)
SAMPLING = Sampling(max_actions=8)


def logprobs(policy, rollouts):
    (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 10**9)
    return policy.likelihood(rollouts, micro_batch).logprobs


@pytest.fixture
def folder(tmp_path):
    """An adapter of the tiny chat model, by its name as a folder."""
    adapt = partial(inject, rank=3, alpha=6.0, base=tiny.model())
    policy = with_random_adapter(from_pretrained(tiny.model(), compute="float32", adapt=adapt))
    policy.save(tmp_path / "adapter")
    return tmp_path / "adapter", policy


def test_a_saved_adapter_opens_in_gruppo_and_in_peft_with_the_same_logits(folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path, policy = folder
    assert {file.name for file in path.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
    }
    assert not (path / "model.safetensors").exists()
    opened = from_pretrained(path, compute="float32")
    needed = policy.module(IDS).logits
    assert torch.equal(opened.module(IDS).logits, needed)
    assert {n for n, p in opened.module.named_parameters() if p.requires_grad} == {
        n for n, p in policy.module.named_parameters() if p.requires_grad}  # fmt: skip
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny.model()), path
    ).eval()
    torch.testing.assert_close(theirs(IDS).logits, needed, rtol=0, atol=1e-6)


def test_a_saved_adapter_opens_merged_and_not_below_a_new_one(folder):
    path, policy = folder
    needed = policy.module(IDS).logits
    merged = from_pretrained(path, compute="float32", is_merged=True).module
    assert not has_adapter(merged)
    torch.testing.assert_close(merged(IDS).logits, needed, rtol=0, atol=1e-5)
    with pytest.raises(
        GruppoError, match=r"is an adapter, and another one is requested.*gruppo export"
    ):
        from_pretrained(path, adapt=partial(inject, rank=2, alpha=4.0))


def change_config(path, **changes):
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def attach(path, module=None, base=""):
    adapt_from(path, base=base)(llama().module if module is None else module)


def test_an_adapter_of_another_base_is_refused_with_the_reason(folder, tmp_path):
    path, _ = folder
    with pytest.raises(
        GruppoError,
        match=r"base: its model.layers.0.* is \[3, 32\], and .* is \[3, 48\].* '.*tiny'",
    ):
        attach(path)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shallower = causal_lm(
        "Llama", num_hidden_layers=1, hidden_size=16, intermediate_size=32, **heads
    )
    with pytest.raises(GruppoError, match=r"model.layers.*that of the model is"):
        attach(path, shallower)
    other = from_pretrained(tiny.write_model(tmp_path / "other", seed=1), compute="float32").module
    with pytest.raises(
        GruppoError, match=r"trained on weights with SHA-256 [0-9a-f]{16}\.\.\., these have"
    ):
        attach(path, other)


def test_a_base_of_another_name_that_no_digest_identifies_is_warned_of(folder, caplog):
    path, policy = folder
    (path / "base.json").unlink()
    with caplog.at_level(logging.WARNING):
        module = from_pretrained(tiny.model(), compute="float32").module
        attach(path, module, base="a/copy")
    assert "is put on a/copy, whose layers have the same shapes" in caplog.text
    assert torch.equal(module(IDS).logits, policy.module(IDS).logits)


ODD = {
    "modules_to_save": (
        {"modules_to_save": ["lm_head"]},
        r"modules_to_save=\['lm_head'\], which is more than",
    ),
    "dora": ({"use_dora": True}, r"use_dora=True.*merge_and_unload"),
    "pissa": ({"init_lora_weights": "pissa"}, r"init_lora_weights=pissa"),
    "bias": ({"bias": "all"}, r"bias=all"),
    "another kind": ({"peft_type": "IA3"}, r"peft_type=PeftType.IA3, which is more than a LoRA"),
}


@pytest.mark.parametrize("what", ODD)
def test_an_adapter_that_is_more_than_a_and_b_is_refused(folder, what):
    path, _ = folder
    changes, why = ODD[what]
    change_config(path, **changes)
    with pytest.raises(GruppoError, match=why):
        read_adapter(path)


def test_dropout_of_an_adapter_is_off_while_sampling_and_scoring(folder):
    path, policy = folder
    change_config(path, lora_dropout=0.5)
    opened = from_pretrained(path, compute="float32")
    opened.module.train()
    rollouts = opened.sample(requests(2), SAMPLING, seed=0)
    assert torch.equal(logprobs(opened, rollouts), logprobs(policy, rollouts))


def test_what_is_no_adapter_says_what_is_wrong(folder, tmp_path):
    path, _ = folder
    with pytest.raises(GruppoError, match=r"nowhere' does not exist"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(GruppoError, match=r"has no adapter_config.json"):
        read_adapter(tmp_path)
    change_config(path, target_modules=["q_proj"])
    with pytest.raises(
        GruppoError, match=r"belongs to another base: its model.layers.0.* is missing"
    ):
        from_pretrained(path)
    (path / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(
        GruppoError,
        match=r"cannot be read.*needs adapter_config.json and adapter_model.safetensors",
    ):
        read_adapter(path)


def sealed_copy(source, target):
    with checkpoint.replacing(target) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)


def test_a_runs_folder_stands_for_the_adapter_in_it(folder, tmp_path):
    path, policy = folder
    run = tmp_path / "run"
    sealed_copy(path, run / "final")
    assert is_adapter(run) and read_adapter(run).folder == run / "final"
    assert torch.equal(
        from_pretrained(run, compute="float32").module(IDS).logits, policy.module(IDS).logits
    )
    sealed_copy(tiny.model(), tmp_path / "whole/final")
    with pytest.raises(GruppoError, match=r"whole/final' has no adapter_config.json"):
        read_adapter(tmp_path / "whole")


def test_an_adapter_whose_base_is_a_runs_folder_finds_its_model(folder, tmp_path):
    path, policy = folder
    sealed_copy(tiny.model(), tmp_path / "run/final")
    base = json.loads((path / "base.json").read_text())
    (path / "base.json").write_text(json.dumps(base | {"base": str(tmp_path / "run")}))
    assert torch.equal(
        from_pretrained(path, compute="float32").module(IDS).logits, policy.module(IDS).logits
    )


def test_an_adapter_whose_base_is_not_here_says_so(folder):
    path, _ = folder
    (path / "base.json").unlink()
    change_config(path, base_model_name_or_path="/no/where")
    with pytest.raises(
        GruppoError, match=r"the base of the adapter .* is '/no/where', which is not here"
    ):
        from_pretrained(path)
    change_config(path, base_model_name_or_path=None)
    with pytest.raises(GruppoError, match=r"the base of the adapter .* is not named"):
        from_pretrained(path)
