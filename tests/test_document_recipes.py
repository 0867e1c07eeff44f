"""The scripts of source documents 000 to 002 as recipes: their numbers, and a short form of each on
a CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from tests.test_examples import EXAMPLES, example
from tests.trainer import diffusion_runs
from tests.trainer.runs import metrics, weights

from gruppo import api
from gruppo.api import explain
from gruppo.cli.options import parse_config
from gruppo.config.schema import Config
from gruppo.core.objective import NANOCHAT
from gruppo.loading import load_object
from gruppo.modalities import modalities
from gruppo.modalities.text import from_pretrained
from gruppo.recipes.open import recipe_config
from gruppo.rewards.registry import resolve_reward
from gruppo.trainer import checks
from gruppo.types import GruppoError

DOCUMENTS = EXAMPLES / "documents.py"
SHORT: dict[str, Any] = {
    "steps": 2,
    "name": "run",
    "compute": "float32",
    # a process that imports a test file, and torch with it, takes 3 s of CPU time
    "scoring__isolate": False,
    "rollout__prompts": 2,
    "rollout__group_size": 4,
    "evaluation__prompts": 2,
    "evaluation__every": 0,
    "optim__lr": 1e-2,
}


def recipe(name: str) -> Config:
    return recipe_config(f"{DOCUMENTS}:{name}")


def short(name: str, folder: Path, **changes: Any) -> Config:
    return api.change(recipe(name), {**SHORT, "runs_dir": str(folder / "runs"), **changes})


# --- 000, diffusion -------------------------------------------------------------------------------


def test_ddpo_has_the_documents_numbers_and_what_they_need_to_mean_something() -> None:
    """beta 0.04 and epsilon 0.2 are those of its loss; a mixed reference; several updates, or
    nothing is clipped."""
    config = recipe("ddpo")
    assert (config.stage.kl_coef, config.rollout.group_size, config.objective.scale) == (
        0.04,
        8,
        "group",
    )
    assert (config.objective.clip_low, config.objective.clip_high, config.objective.clip_unit) == (
        0.2,
        0.2,
        "nats",
    )
    assert (
        config.objective.kl == "exact"
        and config.reference.kind == "mixed"
        and config.updates_per_batch > 1
    )
    assert config.reference.update_every < config.steps, "or the reference would never be mixed"
    checks.check(config, modalities()["diffusion"])


def test_ddpo_trains_a_denoiser_against_a_reference_that_follows_it(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    config = short(
        "ddpo",
        tmp_path,
        model=diffusion_runs.denoiser(),
        data=f"images:{diffusion_runs.write_images(tmp_path / 'images')}",
        diffusion__steps=4,
        reference__update_every=1,
        reference__watch_prompts=2,
        optim__lr=1e-3,
    )
    rows = metrics(api.start(config).folder)
    steps = [row for row in rows if "reward/mean" in row]
    assert all(row["kl/ref_nats"] > 0.0 and row["ratio/max"] > 1.0 for row in steps), (
        "the second update has moved"
    )
    first, last = (
        row["reference/distance_frac"] for row in rows if "reference/distance_frac" in row
    )
    assert first == 0.0 < last
    assert all(row["reward/jpeg_compressibility/mean"] < 0 for row in steps)


@pytest.mark.slow
def test_ddpo_trains_an_adapter_of_a_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    image = pytest.importorskip("PIL.Image")
    from tests.modalities.diffusion.test_pipelines import made, sd15

    made(sd15).policy.save(tmp_path / "sd15")
    (tmp_path / "images").mkdir()
    captions = []
    for n, caption in enumerate(
        ("a seven", "a dot", "two lines", "a cross", "7", "a line", "an eight", "a three")
    ):
        image.new("RGB", (16, 16), (30 * n, 0, 0)).save(tmp_path / f"images/{n}.png")
        captions.append(json.dumps({"file_name": f"{n}.png", "caption": caption}))
    (tmp_path / "images/captions.jsonl").write_text("\n".join(captions))
    typed = (
        f"{DOCUMENTS}:ddpo --model {tmp_path / 'sd15'} --data images:{tmp_path / 'images'} "
        f"--lora.rank 2 --diffusion.steps 4"
    )
    config = parse_config(
        "train", [*typed.split(), "--diffusion.guidance", "5", "--prompts.held-out-fraction", "0.3"]
    )
    config = api.change(
        config,
        {
            **SHORT,
            "runs_dir": str(tmp_path / "runs"),
            "optim__lr": 1e-3,
            "reference__update_every": 2,
        },
    )
    run = api.start(config).folder
    rows = [row for row in metrics(run) if "reward/mean" in row]
    assert (
        rows[1]["kl/ref_nats"] > rows[0]["kl/ref_nats"] > 0.0
        and (run / "final/model_index.json").is_file()
    )


def test_ddpo_without_its_model_says_which_to_train_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        GruppoError, match=r"no folder 'runs/digits-pretrain'.*train digits-pretrain"
    ) as error:
        api.start(replace(recipe("ddpo"), name="run"))
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


# --- 001, Qwen ------------------------------------------------------------------------------------


def test_qwen_has_the_documents_numbers() -> None:
    config = recipe("qwen")
    assert config.model == "Qwen/Qwen2.5-0.5B"
    assert (config.rollout.group_size, config.rollout.temperature) == (8, 0.8)
    assert (config.stage.kl_coef, config.stage.entropy_coef) == (0.1, 0.01)
    assert (config.optim.lr, config.optim.max_grad_norm) == (1e-5, 0.5)
    assert (config.objective.clip_low, config.objective.clip_high, config.objective.has_critic) == (
        0.2,
        0.2,
        False,
    )
    checks.check(config)


def test_qwens_rewards_are_the_documents_with_length_in_characters() -> None:
    """Two of its four words, and 25 characters of 50; split at spaces, every Chinese answer would
    be one word."""
    length, words = (resolve_reward(spec) for spec in recipe("qwen").reward)
    text = "因为水往低处流，所以河水最后都流进了大海里面去了啊"
    assert len(text) == 25
    assert length(completions=[text], completion_ids=[[1]]) == [0.5]
    assert words(completions=[text]) == [0.4]


def test_the_prompts_of_qwen_are_conversations_and_no_two_are_the_same() -> None:
    rows = [
        json.loads(line)
        for line in (EXAMPLES / "qwen_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    requested = {
        message["content"] for row in rows for message in row["prompt"] if message["role"] == "user"
    }
    assert len(rows) == len(requested) == 30


def test_qwen_trains_any_chat_model_that_is_named(tmp_path: Path) -> None:
    config = short("qwen", tmp_path, model=tiny.model(), rollout__max_new_tokens=8)
    run = api.start(config).folder
    rows = [row for row in metrics(run) if "reward/mean" in row]
    assert len(rows) == 2 and rows[0]["kl/ref_nats"] == 0.0 < rows[1]["kl/ref_nats"]
    untrained = api.start(
        replace(config, name="untrained", optim=replace(config.optim, lr=0.0))
    ).folder
    assert not torch.equal(weights(run), weights(untrained))


def test_qwen_without_hub_and_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        GruppoError, match=r"'Qwen/Qwen2.5-0.5B' could not be loaded.*Give a local folder"
    ) as error:
        api.start(api.change(recipe("qwen"), {"runs_dir": str(tmp_path / "runs"), "name": "run"}))
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


# --- 002, the chat script -------------------------------------------------------------------------


def test_chat_has_the_documents_numbers_and_goes_back_to_the_script_as_it_was() -> None:
    config = recipe("chat")
    assert (config.rollout.group_size, config.stage.kl_coef, config.updates_per_batch) == (
        16,
        0.04,
        1,
    )
    assert (config.objective.clip_low, config.objective.clip_high, config.objective.scale) == (
        0.2,
        0.2,
        "group",
    )
    assert config.objective.scale_eps == 1e-4
    before = parse_config(
        "train", [f"{DOCUMENTS}:chat", "--objective", "nanochat", "--stage.kl-coef", "0"]
    )
    assert before.objective == NANOCHAT and before.stage.kl_coef == 0.0
    for chosen in (config, before):
        checks.check(chosen)


@pytest.mark.parametrize("options", [(), ("--objective", "nanochat", "--stage.kl-coef", "0")])
def test_chat_trains_a_chat_model(tmp_path: Path, options: tuple[str, ...]) -> None:
    data = tiny.write_rows(tmp_path / "data.jsonl")
    config = parse_config(
        "train", [f"{DOCUMENTS}:chat", "--model", tiny.model(), "--data", data, *options]
    )
    changes = {**SHORT, "runs_dir": str(tmp_path / "runs"), "reward": [tiny.reward("digits")]}
    rows = [
        row
        for row in metrics(api.start(api.change(config, changes)).folder)
        if "reward/mean" in row
    ]
    assert len(rows) == 2 and ("kl/ref_nats" in rows[1]) == (not options)


def test_the_plain_module_of_the_chat_script_is_causal_and_reads_what_it_writes() -> None:
    script = example("chat_rl")
    torch.manual_seed(0)
    module, tokenizer = script.GPT(), script.Pieces()
    with torch.no_grad():
        for block in module.blocks:  # they begin at zero
            block.out.weight.normal_(std=0.1)
            block.down.weight.normal_(std=0.1)
    ids = torch.randint(script.VOCABULARY, (2, 9))
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % script.VOCABULARY
    assert torch.equal(module(ids)[:, :6], module(changed)[:, :6])
    assert not torch.equal(module(ids)[:, 6:], module(changed)[:, 6:])
    swapped = ids[:, [1, 0, *range(2, 9)]]
    assert not torch.allclose(module(ids)[:, 5], module(swapped)[:, 5]), "places are told apart"
    begun = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "What is 7 + 15?"},
        {"role": "assistant", "content": "7 + 15 ="},
    ]
    result = "<|user|>What is 7 + 15?<|assistant|>7 + 15 ="
    assert tokenizer.decode(tokenizer.render_for_completion(begun)) == result
    reported = [*begun, {"role": "user", "content": "9"}]
    assert (
        tokenizer.decode(tokenizer.render_for_completion(reported))
        == result + "<|end|><|user|>9<|assistant|>"
    )
    with pytest.raises(GruppoError, match="has characters beside sums and differences"):
        tokenizer.encode("7 times 5")


def test_the_recipe_trains_the_plain_module_of_the_chat_script_by_its_name(tmp_path: Path) -> None:
    """With the recipe's own data and reward: nothing but the model is named. Taught less than in
    the script."""
    file = tmp_path / "chat_rl.py"
    text = (EXAMPLES / "chat_rl.py").read_text()
    assert text.count("taught_steps=1000") == 2
    file.write_text(text.replace("taught_steps=1000", "taught_steps=30"))
    config = parse_config(
        "train", [f"{DOCUMENTS}:chat", "--model", f"{file}:model", "--optim.lr", "5e-4"]
    )
    run = api.start(
        api.change(config, {"steps": 2, "name": "run", "runs_dir": str(tmp_path / "runs")})
    ).folder
    steps = [row for row in metrics(run) if "reward/mean" in row]
    assert len(steps) == 2 and steps[0]["kl/ref_nats"] == 0.0 < steps[1]["kl/ref_nats"]
    assert json.loads((run / "final/module.json").read_text())["made_by"] == f"{file}:model"
    opened = from_pretrained(run)
    trained = load_file(run / "final/model.safetensors")
    assert all(
        torch.equal(value, trained[name]) for name, value in opened.module.state_dict().items()
    )
    assert opened.chat.can_chat and opened.context == 128


@pytest.mark.slow
def test_the_chat_script_learns_what_its_teacher_seldom_says(tmp_path: Path) -> None:
    """Taught less and for a smaller range than the script itself: half a minute of it would be too
    long here."""
    script = example("chat_rl")
    script.HIGHEST = 6
    result = script.main(
        150, 8, show=False, runs_dir=str(tmp_path), rollout__prompts=8, evaluation__prompts=24
    )
    assert result.before["mean"] < 0.3 and result.after["mean"] > 0.5


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat", "qwen", "ddpo"])
def test_explain_says_what_a_recipe_of_a_document_would_do(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = {"model": tiny.model(), "compute": "float32"}
    if name == "ddpo":
        pytest.importorskip("PIL")
        images = diffusion_runs.write_images(tmp_path / "images")
        changes = {
            "model": diffusion_runs.denoiser(),
            "data": f"images:{images}",
            "diffusion__steps": 4,
        }
    else:
        changes["rollout__max_new_tokens"] = 8
    output = "\n".join(explain(api.change(recipe(name), changes)))
    coefficient = {"chat": "0.04", "qwen": "0.1", "ddpo": "0.04"}[name]
    assert coefficient in output and ("a copy that follows the policy" in output) == (
        name == "ddpo"
    )


@pytest.mark.parametrize("name", ["ddpo", "qwen", "chat"])
def test_recipes_are_described_with_their_time_and_hardware(name: str) -> None:
    out = " ".join(load_object(f"{DOCUMENTS}:{name}").__doc__.split())
    assert "CPU" in out and re.search(r"minutes|hours|\bs a step", out)
