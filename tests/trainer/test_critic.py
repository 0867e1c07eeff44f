"""A run with a critic: what is trained, at which rate, and what a checkpoint holds of it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import tiny
from tests.trainer.runs import Signalling, assert_same, newest

from gruppo import api
from gruppo.build import Parts, build
from gruppo.config.schema import CriticConfig
from gruppo.inference import evaluate_run
from gruppo.trainer.loop import Stopped
from gruppo.trainer.run_dir import RunFolder, boundary_state
from gruppo.trainer.stages import step_params_at
from gruppo.types import GruppoError, Request, Sampling

SHARED, SEPARATE = {}, {"critic__kind": "separate"}
KINDS = pytest.mark.parametrize("kind", [SHARED, SEPARATE], ids=["shared", "separate"])


def config_in(folder, kind, **changes):
    ppo = {"objective": "ppo"}
    return tiny.config(folder, **(ppo | kind | changes))


def built(folder, kind, parts=None, **changes):
    return build(config_in(folder, kind, **changes), parts or Parts())[0]


def step(run):
    """An update of policy and critic."""
    prompts = run.source.take(2)
    rollouts = run.policy.sample(
        [Request(prompt, 2) for prompt in prompts], Sampling(max_actions=5), seed=run.state.step
    )
    step_params = step_params_at(run.config, run.state.step)
    for group in run.optimizer.param_groups:
        group["lr"] = step_params.critic_lr if group["is_critic"] else step_params.lr
    for micro_batch in run.policy.micro_batches(rollouts, rollouts.mask, 64):
        logprobs, values = (
            run.policy.likelihood(rollouts, micro_batch).logprobs,
            run.critic.values(rollouts, micro_batch),
        )
        (logprobs.sum() + (values - 1).square().sum()).backward()
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.state.step += 1


@pytest.fixture
def opened(tmp_path):
    """Opens run folders, and closes them."""
    folders = []

    def open_folder(config):
        path = tmp_path / "runs" / f"{config.name}-{len(folders)}"
        folders.append(RunFolder(path))
        folders[-1].create(config)
        return folders[-1]

    yield open_folder
    for folder in folders:
        folder.close()


# --- what is trained ------------------------------------------------------------------------------


def test_without_a_critic_there_is_none_and_one_group(tmp_path):
    run, _ = build(tiny.config(tmp_path), Parts())
    assert run.critic is None and run.policy.value_head is None
    assert run.parameter_names == [name for name, _ in run.policy.module.named_parameters()]
    assert [group["is_critic"] for group in run.optimizer.param_groups] == [False]


@KINDS
@pytest.mark.parametrize(("lr", "scale"), [(None, 1.0), (1e-2, 1.0), (3e-2, 3.0), (0.0, 0.0)])
def test_the_critics_rate_is_a_multiple_of_the_policys(tmp_path, kind, lr, scale):
    run = built(tmp_path, kind, critic__lr=lr, optim__lr=1e-2, optim__warmup_steps=4)
    step_params = run.stage_schedule.step_params(1)
    assert step_params.lr == pytest.approx(
        0.5e-2, rel=1e-12
    ) and step_params.critic_lr == pytest.approx(scale * step_params.lr, rel=1e-12)
    assert [group["is_critic"] for group in run.optimizer.param_groups] == [False, True]


def test_the_critic_is_alone_for_its_first_steps(tmp_path):
    config = config_in(tmp_path, SHARED, critic__warmup_steps=2)
    assert [step_params_at(config, n).is_critic_alone for n in range(4)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_critic_of_another_model_is_opened_from_its_folder(tmp_path):
    other = tiny.write_model(tmp_path / "other", seed=7)
    run = built(tmp_path, SEPARATE, critic__model=other)
    saved = load_file(f"{other}/model.safetensors")
    own = dict(run.critic.trunk.named_parameters())
    assert own and all(torch.equal(own[name], saved[f"model.{name}"]) for name in own)


def reward_model(folder, **changes):
    """A tiny classifier of texts with the tiny model's tokens, and its weights."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tiny.write_model(folder)
    sizes = {"tie_word_embeddings": False, "num_labels": 1} | changes
    torch.manual_seed(3)
    module = LlamaForSequenceClassification(LlamaConfig.from_pretrained(folder, **sizes))
    module.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_a_reward_model_without_a_language_head_is_taken_for_its_trunk_and_learns(tmp_path):
    saved = reward_model(tmp_path / "other")
    assert "score.weight" in saved and "lm_head.weight" not in saved
    run = built(tmp_path, SEPARATE, critic__model=str(tmp_path / "other"))
    own = dict(run.critic.trunk.named_parameters())
    assert own and all(torch.equal(own[name], saved[f"model.{name}"]) for name in own)
    assert not run.critic.module["head"].weight.any()
    before = [p.clone() for p in run.critic.module.parameters()]
    step(run), step(run)  # the trunk's gradient begins when the head is no longer 0
    assert not any(
        torch.equal(a, b) for a, b in zip(before, run.critic.module.parameters(), strict=True)
    )
    assert len(run.optimizer.param_groups[1]["params"]) == len(own) + 2  # no language head


def test_a_model_that_lacks_more_than_its_language_head_is_no_critic(tmp_path):
    saved = reward_model(tmp_path / "other")
    del saved["model.layers.1.mlp.down_proj.weight"]
    save_file(saved, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        GruppoError, match=r"lacks \d weights that a LlamaForCausalLM has, lm_head.weight first"
    ):
        built(tmp_path, SEPARATE, critic__model=str(tmp_path / "other"))


def test_a_critic_too_short_for_the_data_is_refused(tmp_path):
    other = tiny.write_model(tmp_path / "other")
    config = (tmp_path / "other/config.json").read_text()
    (tmp_path / "other/config.json").write_text(config.replace(f": {tiny.CONTEXT}", ": 20"))
    with pytest.raises(
        GruppoError, match=r"the critic .*other is too short for these data: .* context holds 20"
    ):
        built(tmp_path, SEPARATE, critic__model=other)


# --- checkpoints ----------------------------------------------------------------------------------


@KINDS
def test_the_final_model_is_the_policy_alone(tmp_path, opened, kind):
    run = built(tmp_path, kind)
    step(run)
    folder = opened(run.config)
    final = load_file(folder.write_final(run) / "model.safetensors")
    assert set(final) == set(run.policy.checkpoint_weights())
    folder.save(run, boundary_state(run))
    saved = load_file(newest(folder.path) / "critic.safetensors")
    assert all(
        torch.equal(saved[name], tensor) for name, tensor in run.critic.checkpoint_weights().items()
    )
    assert set(saved) == set(run.critic.checkpoint_weights())


def test_a_checkpoint_of_another_critic_is_refused_in_words_and_restores_nothing(tmp_path, opened):
    none, shared, separate = {"objective": "grpo"}, SHARED, SEPARATE
    other = tiny.write_model(tmp_path / "other")
    runs = {
        name: built(tmp_path, kind)
        for name, kind in (("none", none), ("shared", shared), ("separate", separate))
    }
    expected = {
        ("none", "shared"): "step 0 in .* has no critic, unlike this run.*Resume with",
        ("shared", "none"): "has a critic, unlike this run",
        ("shared", "separate"): r"the shape of bias in its critic is \[1\], and None in this run's",
        ("separate", "shared"): "in its critic is",
    }
    for (saved, needed), says in expected.items():
        folder = opened(runs[saved].config)
        folder.save(runs[saved], boundary_state(runs[saved]))
        run = built(tmp_path, {"none": none, "shared": shared, "separate": separate}[needed])
        torch.nn.init.ones_(run.parameters[0])
        with pytest.raises(GruppoError, match=says):
            folder.restore(run)
        assert run.parameters[0].eq(1).all()
    shutil.rmtree(other)


@pytest.mark.slow
@pytest.mark.silent_bug(33)
@KINDS
def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(tmp_path, kind):
    changes = {
        "critic__warmup_steps": 1,
        "optim__epochs": 2,
        "optim__minibatches": 2,
        "stage__kl_coef": 0.1,
    }
    changes |= {"steps": 4}
    whole = api.start(config_in(tmp_path / "whole", kind, **changes)).folder
    config = replace(
        config_in(tmp_path / "parts", kind, **changes), data=str(tmp_path / "whole/data.jsonl")
    )
    with pytest.raises(Stopped):
        api.start(config, Parts(rewards=[stopping(Signalling(4))]))
    assert_same(api.start(tmp_path / "parts/runs/run").folder, whole)


def stopping(reward):
    """The reward under the name of the one that a resume goes on with."""

    def digits(completions, **columns):
        return reward(completions, **columns)

    return digits


# --- explain --------------------------------------------------------------------------------------


def test_the_critics_memory_by_hand(tmp_path):
    """The trunk of the tiny model is the whole of it, embeddings tied, and the head is 16 weights
    and a bias."""
    size = sum(p.numel() for p in built(tmp_path, SHARED).policy.module.parameters())
    assert built(tmp_path, SHARED).critic.memory_estimate(4) == {"critic, float32": 4 * 17}
    assert built(tmp_path, SEPARATE, compute="bfloat16").critic.memory_estimate(2) == {
        "critic, float32": 4 * (size + 17),
        "critic's copy": 2 * size,
    }


def test_evaluating_a_run_opens_no_critic(tmp_path, opened):
    run = built(tmp_path, SEPARATE)
    step(run)
    folder = opened(replace(run.config, critic=CriticConfig("separate", "./gone")))
    folder.write_final(run)
    evaluated, _ = evaluate_run(folder.path, prompts=3)
    assert evaluated.prompts == 3
