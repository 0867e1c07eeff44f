"""Loading and saving: the same logits after a round trip, and one clear line for what cannot be
loaded."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from tests.fakes import (
    END,
    HUGGING_FACE,
    ByteTokenizer,
    TinyGPT,
    bpe_tokenizer,
    causal_lm,
    llama,
    plain,
    prompts,
    requests,
)

from gruppo.modalities.text import from_module, from_pretrained, from_transformers
from gruppo.trainer import checkpoint
from gruppo.types import GruppoError, Sampling

IDS = torch.arange(1, 20)[None]


@pytest.fixture
def folder(tmp_path):
    """A saved model and its tokenizer."""
    llama().save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("make", HUGGING_FACE, ids=lambda make: make.__name__)
def test_a_saved_model_opens_in_transformers_with_the_same_logits(make, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = make(compute="bfloat16", seed=3)
    policy.save(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    with torch.no_grad():
        assert torch.equal(module(IDS).logits, policy.module(IDS).logits)
    assert next(module.parameters()).dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path).encode("abc") == policy.chat.tokenizer.encode(
        "abc"
    )
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors", ".jinja"}


def test_a_saved_policy_opens_again_and_samples_the_same(folder):
    first, second = llama(), from_pretrained(folder, compute="float32")
    assert second.chat.eos_ids == first.chat.eos_ids and second.context == first.context == 128
    rollouts = [
        policy.sample(requests(3, 2, 2), Sampling(max_actions=8), seed=0)
        for policy in (first, second)
    ]
    assert torch.equal(rollouts[0].actions, rollouts[1].actions)


def test_a_model_is_saved_though_its_generation_config_is_one_that_transformers_refuses_to_save(
    tmp_path,
):
    policy = llama()
    policy.module.generation_config.update(temperature=0.6, top_p=0.9, do_sample=False)
    with pytest.raises(ValueError, match="do_sample"):
        policy.module.save_pretrained(tmp_path)
    policy.save(tmp_path)
    again = from_pretrained(tmp_path, compute="float32")
    assert again.module.generation_config.temperature == 0.6
    assert torch.equal(again.module(IDS).logits, policy.module(IDS).logits)


def test_a_plain_module_is_saved_as_safetensors_that_load_again(tmp_path):
    policy, other = plain(), TinyGPT()
    policy.save(tmp_path)
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other.eval()(IDS), policy.module(IDS))


@pytest.mark.silent_bug(28)
def test_half_precision_weights_become_float32_masters():
    assert (
        from_transformers(causal_lm("Llama").bfloat16(), bpe_tokenizer()).module.dtype
        == torch.float32
    )
    module = TinyGPT().bfloat16()
    policy = from_module(module, ByteTokenizer(), eos_ids=[END])
    assert policy.module is module and {p.dtype for p in module.parameters()} == {torch.float32}
    assert policy.copy is None
    rollouts = policy.sample(requests(2, of=prompts("a")), Sampling(max_actions=3), seed=0)
    assert rollouts.sampler_logprobs.isfinite().all()


# --- what cannot be loaded ------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/no/such/folder", "./no-such-folder", "~/no-such-folder"])
def test_a_missing_folder_is_named(path):
    with pytest.raises(GruppoError, match=r"(no-such-folder|/no/such/folder).* does not exist"):
        from_pretrained(path)


def test_a_tilde_means_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert from_pretrained(f"~/{folder.name}", compute="float32").context == 128


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(GruppoError, match=r"has no config\.json"):
        from_pretrained(tmp_path)


def test_a_hub_id_that_cannot_be_reached_is_one_line():
    with pytest.raises(GruppoError, match="nobody/no-such-model") as caught:
        from_pretrained("nobody/no-such-model")
    assert "\n" not in str(caught.value)


def without_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def with_cut_weights(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def with_garbage_for_weights(folder):
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")


def with_broken_config(folder):
    (folder / "config.json").write_text("{")


def with_another_architecture(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))


def with_other_sizes(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))


def lacking_a_layer(folder):
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage",
    [
        without_tokenizer,
        without_weights,
        with_cut_weights,
        with_garbage_for_weights,
        with_broken_config,
        with_another_architecture,
        with_other_sizes,
        lacking_a_layer,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_model_is_refused_in_one_line_that_names_it(folder, damage):
    damage(folder)
    with pytest.raises(GruppoError) as caught:
        from_pretrained(folder, compute="float32")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_runs_folder_opens_as_its_final_model(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    shutil.copytree(folder, run / "final")
    (run / "manifest.json").write_text("{}")
    with pytest.raises(
        GruppoError, match=r"the run .* has no final model yet\. Finish it with .* resume"
    ):
        from_pretrained(run)
    with checkpoint.replacing(run / "final") as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)
    assert (
        from_pretrained(run, compute="float32").context
        == from_pretrained(folder, compute="float32").context
    )


def test_weights_that_would_be_random_are_counted(folder):
    lacking_a_layer(folder)
    with pytest.raises(
        GruppoError, match=r"lacks 3 weights .*layers\.1\.mlp\.down_proj\.weight first"
    ):
        from_pretrained(folder, compute="float32")


def test_one_end_token_given_as_a_number_is_refused():
    with pytest.raises(GruppoError, match=r"\[256\]"):
        from_module(TinyGPT(), ByteTokenizer(), eos_ids=END)


def test_an_unknown_compute_dtype_is_refused():
    with pytest.raises(GruppoError, match=r"compute='bf16'.*bfloat16"):
        from_module(TinyGPT(), ByteTokenizer(), eos_ids=[END], compute="bf16")
