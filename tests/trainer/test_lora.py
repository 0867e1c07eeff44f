"""Runs that train an adapter: what they save, how they go on, and what becomes of them."""

from __future__ import annotations

import json
import logging
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from tests import processes, tiny
from tests.fakes import ByteTokenizer, TinyGPT
from tests.trainer.runs import FULL, Signalling, metrics, newest, tensors
from tests.trainer.test_ranks import both

import gruppo
from gruppo import api, inference
from gruppo.build import Parts, build
from gruppo.config import serialization
from gruppo.config.schema import IN_MEMORY
from gruppo.modalities.common.adapters import read_adapter
from gruppo.modalities.common.lora import adapter_weights, base_weights, has_adapter
from gruppo.modalities.text import from_module, from_pretrained
from gruppo.protocols import digest
from gruppo.trainer.loop import Stopped
from gruppo.types import GruppoError

LORA = {"lora__rank": 3, "lora__alpha": 6.0}
IDS = torch.arange(6, 26)[None]


def config_in(folder, **changes):
    return tiny.config(folder, **(LORA | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing stops, by the dtype of their arithmetic."""

    @cache
    def run(compute):
        return api.start(
            config_in(tmp_path_factory.mktemp(compute), **FULL, compute=compute)
        ).folder

    return run


def assert_same(run, other):
    last, other_last = newest(run), newest(other)
    assert last.name == other_last.name
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert tensors(last / name) == tensors(other_last / name)
    assert tensors(run / "final/adapter_model.safetensors") == tensors(
        other / "final/adapter_model.safetensors"
    )
    assert json.loads((last / "state.json").read_text()) == json.loads(
        (other_last / "state.json").read_text()
    )
    assert metrics(run) == metrics(other)


@pytest.mark.slow
@pytest.mark.silent_bug(33)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_an_adapter_resumes_to_the_bit(tmp_path, whole, compute):
    reward = Signalling(4)

    def noisy(completions, **_):
        reward(completions)
        return tiny.noisy(completions)

    config = serialization.to_dict(serialization.load(whole(compute) / "config.json")) | {
        "runs_dir": str(tmp_path)
    }
    with pytest.raises(Stopped):
        api.start(serialization.from_dict(config), Parts(rewards=[noisy]))
    assert_same(api.start(tmp_path / "run").folder, whole(compute))


@pytest.mark.silent_bug(2)
@pytest.mark.silent_bug(18)
def test_the_first_update_has_a_ratio_of_one_and_no_kl(tmp_path):
    done = api.start(config_in(tmp_path, steps=2, compute="bfloat16", stage__kl_coef=0.1))
    first, second = (row for row in metrics(done.folder) if "kl/ref_nats" in row)
    assert first["kl/ref_nats"] == 0 and first["ratio/max"] == 1
    assert second["kl/ref_nats"] > 0


def test_a_checkpoint_holds_the_adapter_alone_and_the_hash_of_its_base(whole):
    saved = load_file(newest(whole("bfloat16")) / "model.safetensors")
    assert saved and all(".lora_A." in name or ".lora_B." in name for name in saved)
    assert all(weight.dtype == torch.float32 for weight in saved.values())
    moments = load_file(newest(whole("bfloat16")) / "optimizer.safetensors")
    assert {name.split(".", 1)[1] for name in moments} == saved.keys()
    state = json.loads((newest(whole("bfloat16")) / "state.json").read_text())
    manifest = json.loads((whole("bfloat16") / "manifest.json").read_text())
    reported = json.loads((whole("bfloat16") / "final/base.json").read_text())
    assert (
        state["base_sha256"] == manifest["base_sha256"] == reported["sha256"]
        and reported["base"] == tiny.model()
    )


@pytest.mark.parametrize("kept", [True, False], ids=["with its manifest", "without"])
def test_another_base_is_refused_on_resume(tmp_path, whole, kept):
    run = tmp_path / "run"
    shutil.copytree(whole("float32"), run)
    config = json.loads((run / "config.json").read_text())
    config["model"] = tiny.write_model(tmp_path / "other", seed=1)
    (run / "config.json").write_text(json.dumps(config))
    if not kept:
        (run / "manifest.json").unlink()
    with pytest.raises(
        GruppoError, match=r"its weights have changed" if kept else r"it holds an adapter of \w+"
    ):
        api.start(run)


def test_a_checkpoint_of_all_weights_is_refused_by_a_run_with_an_adapter(tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole("float32"), run)
    (run / "manifest.json").unlink()
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"lora": {}}))
    with pytest.raises(
        GruppoError, match=r"holds an adapter of \w+\.\.\., and this run trains all weights"
    ):
        api.start(run)


@pytest.mark.slow
@pytest.mark.silent_bug(12)
def test_two_ranks_train_the_adapter_of_one(tmp_path):
    changes = {
        "rollout__prompts": 3,
        "optim__epochs": 2,
        "stage__kl_coef": 0.1,
        "reference__kind": "mixed",
    }
    one, two, *_ = both(tmp_path, 2, **(LORA | changes), reference__update_every=1)
    mine, theirs = (load_file(run / "final/adapter_model.safetensors") for run in (one, two))
    assert (
        max(float(weight.abs().max()) for name, weight in mine.items() if "lora_B" in name) > 1e-2
    )
    for name, weight in mine.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-6)


# --- what becomes of it ---------------------------------------------------------------------------


def test_a_run_is_evaluated_and_sampled_through_its_adapter(whole, capsys):
    run = whole("bfloat16")
    done, rows = inference.evaluate_run(run, prompts=4)
    assert done.prompts == 4 and len(rows) == 4
    base = inference.sample(tiny.model(), [row["prompt"] for row in rows], max_new_tokens=8)
    assert [row["completion"] for row in rows] != [texts[0] for texts in base]
    warm = {"prompts": ["3 + 4 = ?"], "max_new_tokens": 8, "temperature": 1.0}
    assert inference.sample(run, **warm) != inference.sample(tiny.model(), **warm)
    with_adapter = inference.sample(run, ["3 + 4 = ?"], max_new_tokens=8)
    assert processes.exit_code(["sample", str(run), "3 + 4 = ?", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip() == with_adapter[0][0].strip()


def test_an_exported_run_opens_in_transformers_without_peft_and_says_the_same(
    tmp_path, whole, capsys
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, folder = whole("float32"), tmp_path / "merged"
    policy = from_pretrained(run / "final", compute="float32")
    assert processes.exit_code(["export", str(run), str(folder)]) == 0
    assert f"written to {folder}" in capsys.readouterr().out
    module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        torch.testing.assert_close(module(IDS).logits, policy.module(IDS).logits, rtol=0, atol=1e-5)
        assert (
            module(IDS).logits - from_pretrained(tiny.model()).module(IDS).logits
        ).abs().max() > 0.1
    assert not has_adapter(module) and not list(folder.glob("adapter*"))
    assert AutoTokenizer.from_pretrained(folder).encode("3 + 4") == policy.chat.tokenizer.encode(
        "3 + 4"
    )
    assert processes.exit_code(["export", str(run), str(folder)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_an_exported_adapter_is_the_adapter(tmp_path, whole, capsys):
    run, folder = whole("float32"), tmp_path / "adapter"
    assert processes.exit_code(["export", str(run), str(folder), "--adapter"]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json", "base.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (run / "final" / name).read_bytes()
    assert processes.exit_code(["export", tiny.model(), str(tmp_path / "no"), "--adapter"]) == 2
    assert "has no adapter: its weights themselves were trained" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


# --- beginning from one ---------------------------------------------------------------------------


def test_a_run_goes_on_with_an_adapter(tmp_path, whole):
    run, _ = build(tiny.config(tmp_path, lora__adapter=str(whole("float32") / "final")), Parts())
    saved = read_adapter(whole("float32") / "final").weights
    assert all(
        torch.equal(weight, saved[name])
        for name, weight in adapter_weights(run.policy.module).items()
    )
    assert run.parameters == list(adapter_weights(run.policy.module).values())


def test_an_adapter_as_the_model_is_merged_before_all_weights_are_trained(tmp_path, whole, caplog):
    final = whole("float32") / "final"
    with caplog.at_level(logging.WARNING):
        run, _ = build(tiny.config(tmp_path, model=str(final)), Parts())
    needed = from_pretrained(final, compute="float32").module(IDS).logits
    torch.testing.assert_close(run.policy.module(IDS).logits, needed, rtol=0, atol=1e-5)
    assert not has_adapter(run.policy.module) and all(
        p.requires_grad for p in run.policy.module.parameters()
    )
    assert "it is merged into its base, and all weights are trained" in caplog.text
    with pytest.raises(GruppoError, match=r"is an adapter, and another one is requested"):
        build(config_in(tmp_path, model=str(final)), Parts())


def test_a_policy_with_an_adapter_trains_it_alone(tmp_path, whole):
    policy = from_pretrained(whole("float32") / "final", compute="float32")
    base = digest(base_weights(policy.module))
    api.start(tiny.config(tmp_path, steps=1, model=IN_MEMORY), Parts(model=policy))
    assert digest(base_weights(policy.module)) == base
    saved = read_adapter(whole("float32") / "final").weights
    assert not all(
        torch.equal(weight, saved[name]) for name, weight in adapter_weights(policy.module).items()
    )


# --- parts beside it ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_critic_stands_beside_an_adapter_and_is_saved(tmp_path, kind):
    done = api.start(
        config_in(tmp_path, steps=2, objective="ppo", critic__kind=kind, compute="bfloat16")
    )
    saved = load_file(newest(done.folder) / "critic.safetensors")
    names = {name for name in saved if "lora_" not in name}
    assert names == ({"weight", "bias"} if kind == "shared" else {"head.weight", "head.bias"})
    assert bool(len(saved) - len(names)) == (kind == "separate")
    assert all(weight.dtype == torch.float32 for weight in saved.values())
    assert metrics(done.folder)[-1]["step"] == 2


REFUSED = {
    "a negative rank": (
        {"lora__rank": -1},
        r"lora.rank=-1 is out of range; it needs to be at least 0",
    ),
    "alpha 0": (
        {"lora__rank": 4, "lora__alpha": 0.0},
        r"lora.alpha=0.0 is out of range",
    ),
    "an unknown target": (
        {"lora__rank": 4, "lora__targets": ["q_prj"]},
        r"no linear layers 'q_prj'. Did you mean q_proj\?",
    ),
    "no folder": ({"lora__adapter": "nowhere"}, r"the adapter folder 'nowhere' does not exist"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_adapter_is_refused_before_anything_is_written(tmp_path, what):
    changes, why = REFUSED[what]
    with pytest.raises(GruppoError, match=why):
        gruppo.train(tiny.config(tmp_path, **changes), show=False)
    assert not (tmp_path / "runs").exists()


def test_a_module_of_ones_own_is_refused(tmp_path):
    torch.manual_seed(0)
    policy = from_module(TinyGPT(), ByteTokenizer(), eos_ids=[256], context=64)
    with pytest.raises(
        GruppoError, match=r"language model, not a TinyGPT. Train all weights with lora__rank 0"
    ):
        gruppo.train(config_in(tmp_path), model=policy, data=["a"] * 20, show=False)
