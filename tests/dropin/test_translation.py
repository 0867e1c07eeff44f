"""TRL's arguments: each is translated, without effect or refused; names and defaults are those of
TRL."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests import fake_hub, tiny

from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.trl import GRPOConfig, GRPOTrainer, translation
from gruppo.types import GruppoError

ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(24)]
SHORT: dict[str, Any] = {
    **{
        "max_completion_length": 8,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "use_cpu": True,
    },
    **{"bf16": False, "learning_rate": 1e-3, "max_steps": 2},
}


def length(completions: Any, **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def trainer(**changes: Any) -> GRPOTrainer:
    return GRPOTrainer(tiny.model(), length, GRPOConfig("out", **SHORT | changes), ROWS)


def settings(**changes: Any) -> dict[str, Any]:
    args = GRPOConfig(**changes)
    return translation.Translation(args, rows=24, has_evaluation=True).settings


def test_names_and_defaults_are_trls():
    trl = pytest.importorskip("trl")
    there = {f.name: f for f in dataclasses.fields(trl.GRPOConfig) if f.init}
    here = {f.name: f for f in dataclasses.fields(GRPOConfig)}
    assert here.keys() == there.keys()
    odd = [
        n
        for n, f in there.items()
        if f.default is not dataclasses.MISSING and f.default != here[n].default
    ]
    assert odd == []


def test_an_argument_is_translated_or_without_effect_and_not_both():
    known = {f.name for f in dataclasses.fields(GRPOConfig)}
    translated = translation.TRANSLATED | {name for name in translation.DIRECT if name in known}
    assert known >= translation.WITHOUT_EFFECT | translation.TRANSLATED
    assert translated & translation.WITHOUT_EFFECT == set()


REFUSED: dict[str, Any] = {
    **{
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "generation_kwargs": {"num_beams": 2},
        "top_entropy_quantile": 0.2,
    },
    **{
        "off_policy_mask_threshold": 0.5,
        "router_aux_loss_coef": 0.01,
        "use_adaptive_entropy": True,
        "vespo_k_pos": 1.0,
        "fp16": True,
    },
    **{
        "entropy_coef_min": 0.1,
        "max_tool_calling_iterations": 3,
        "log_completions_hub_repo": "a/b",
    },
    **{
        "auto_find_batch_size": True,
        "deepspeed": "zero3.json",
        "fsdp": "full_shard",
        "neftune_noise_alpha": 5.0,
    },
    **{
        "load_best_model_at_end": True,
        "data_seed": 3,
        "shuffle_dataset": False,
        "optim": "adafactor",
    },
    **{
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"power": 2},
        "save_strategy": "best",
    },
    **{
        "report_to": "mlflow",
        "loss_type": "nope",
        "scale_rewards": "nope",
        "label_smoothing_factor": 0.1,
    },
    **{"use_vllm": True, "parallelism_config": {"cp": 2}, "metric_for_best_model": "reward"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_its_name_in_one_line(name):
    with pytest.raises(GruppoError) as error:
        trainer(**{name: REFUSED[name]})
    text = str(error.value)
    named = {"use_vllm": "vllm_mode"}.get(name, name)
    assert text.startswith(f"{named}=") and "of TRL has no counterpart in gruppo" in text
    assert "\n" not in text and text.endswith(f"Leave {named} out.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_prompt_length": 64}, r"GRPOConfig of TRL 1.16 has no argument 'max_prompt_length'"),
        (
            {"num_generation": 4},
            r"has no argument 'num_generation'\. Did you mean num_generations\?",
        ),
        (
            {"per_device_train_batch_size": 3},
            "a generation batch of 3 rows is not a multiple of num_generations=2",
        ),
        ({"generation_batch_size": 6}, "generation_batch_size=6 is not a multiple of the 4 rows"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "mix two generations"),
        (
            {"loss_type": "cispo"},
            r"caps the ratio at epsilon_high, which is 0\.2.*Set epsilon_high=5\.0",
        ),
        ({"loss_type": "luspo"}, "with importance_sampling_level='sequence'"),
        (
            {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
            "loss_type='bnpo' of TRL has no counterpart",
        ),
    ],
)
def test_arguments_that_contradict_each_other_are_one_line(arguments, message):
    with pytest.raises(GruppoError, match=message):
        trainer(**arguments)


def test_batches_steps_and_rates_are_trls():
    found = settings(
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
        },
        **{
            "num_generations": 8,
            "num_iterations": 2,
            "num_train_epochs": 2,
            "warmup_steps": 8,
            "save_steps": 10,
        },
        **{
            "eval_strategy": "epoch",
            "adam_beta2": 0.95,
            "save_total_limit": 3,
            "lr_scheduler_type": "cosine",
        },
    )
    # 16 rows a generation are 2 prompts of 24: 12 generations an epoch, of 2 x 2 optimizer steps
    # each
    assert (found["rollout.prompts"], found["rollout.group_size"], found["steps"]) == (2, 8, 24)
    assert (found["optim.minibatches"], found["optim.epochs"], found["optim.warmup_steps"]) == (
        2,
        2,
        2,
    )
    assert (found["saving.every"], found["saving.keep"], found["evaluation.every"]) == (3, 3, 12)
    assert (found["optim.betas"], found["optim.decay"]) == ((0.9, 0.95), "cosine")
    assert settings(max_steps=9, num_iterations=2)["steps"] == 5


def test_gradient_checkpointing_is_recomputation():
    """On by default in TRL."""
    assert settings()["optim.recompute"] == "layer"
    assert settings(gradient_checkpointing=False)["optim.recompute"] == "none"
    assert (
        settings(activation_checkpointing=False)["optim.recompute"] == "none"
    )  # the new name is preferred


def test_the_objective_is_trls():
    found = settings(
        loss_type="cispo",
        epsilon_high=5.0,
        beta=0.1,
        use_bias_correction_kl=False,
        scale_rewards=False,
    )
    names = ("surrogate", "clip_low", "clip_high", "average", "kl_gradient", "scale")
    assert [found[f"objective.{name}"] for name in names] == [
        "cispo",
        1.0,
        4.0,
        "token",
        "naive",
        "none",
    ]
    assert found["stage.kl_coef"] == 0.1
    found = settings(
        entropy_coef=0.01,
        delta=1.5,
        reward_weights=[1, 2],
    )
    assert found["stage.entropy_coef"] == 0.01
    assert (found["objective.dual_clip"], found["scoring.weights"]) == (1.5, [1, 2])
    found = settings(use_vllm=True, vllm_mode="server", vllm_server_port=9000)
    assert (found["engine.kind"], found["engine.urls"]) == ("vllm", ("http://127.0.0.1:9000",))
    assert (found["objective.correction"], found["objective.correction_level"]) == (
        "mask",
        "sequence",
    )


def test_a_correction_that_is_switched_off_stays_off():
    """With servers, a config that does not choose a correction would get one."""
    found = settings(use_vllm=True, vllm_mode="server", vllm_importance_sampling_correction=False)
    assert serialization.change(Config(), found).objective.correction == "none"


def test_what_means_something_else_is_reported_once(caplog):
    with caplog.at_level("WARNING", "gruppo"):
        trainer(steps_per_generation=2, warmup_steps=1, top_p=0.9)
    text = caplog.text
    assert text.count("a step here is a generation and its 2 optimizer steps") == 1
    assert text.count("top_p: applied when scoring too") == 1
    assert text.count("the warmup ends at the full learning rate") == 1
    caplog.clear()
    trainer()
    assert not caplog.text


def test_a_config_of_trl_itself_is_read_too(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    args = trl.GRPOConfig(output_dir="theirs", report_to=[], **SHORT)
    made = GRPOTrainer(tiny.model(), length, args, ROWS)
    assert dataclasses.replace(made.config, runs_dir="") == dataclasses.replace(
        trainer().config, runs_dir=""
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_funcs": None}, "reward_funcs is missing; it needs a function"),
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"eval_dataset": {"a": ROWS}}, "eval_dataset is a dict of data sets"),
        ({"optimizers": (object(), None)}, r"GRPOTrainer\(optimizers=...\) has no counterpart"),
        (
            {"quantization_config": object()},
            r"GRPOTrainer\(quantization_config=...\) has no counterpart",
        ),
        ({"callbacks": [object()]}, "is no TrainerCallback of transformers"),
        ({"peft_config": object()}, "peft_config is a object; gruppo trains LoRA"),
    ],
)
def test_arguments_of_the_trainer_that_cannot_be_used_are_one_line(arguments, message):
    given = {"reward_funcs": length, "train_dataset": ROWS} | arguments
    with pytest.raises(GruppoError, match=message):
        GRPOTrainer(tiny.model(), args=GRPOConfig("out", **SHORT), **given)


def test_other_trainers_are_answered_at_the_import():
    with pytest.raises(
        ImportError, match=r"gruppo.trl has GRPOConfig, .*, and no PPOTrainer\. TRL 1.16 has no PPO"
    ):
        from gruppo.trl import PPOTrainer  # noqa: F401
    with pytest.raises(ImportError, match=r"no SFTTrainer\. Here demonstrations are a stage"):
        from gruppo.trl import SFTTrainer  # noqa: F401


# --- the trainer's methods ------------------------------------------------------------------------


def test_a_run_is_stopped_by_a_callback_resumed_evaluated_and_saved(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, TrainerCallback

    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    class Stops(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(("begin", args.output_dir))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append((state.global_step, logs["reward"] > 0, "model" in _))

        def on_evaluate(
            self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
        ) -> None:
            seen.append(("evaluated", state.global_step, "eval_reward" in metrics))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2 and len(seen) < 8

    args = GRPOConfig("out", eval_strategy="steps", eval_steps=4, **SHORT | {"max_steps": 4})
    given = {"args": args, "train_dataset": ROWS, "eval_dataset": ROWS[:3], "callbacks": [Stops()]}
    stopped = GRPOTrainer(tiny.model(), length, **given)
    output = stopped.train()
    assert output.global_step == 2 and output.training_loss == output.metrics["train_loss"]
    stopped.end()
    assert seen == [
        *[
            ("begin", "out"),
            ("evaluated", 0, True),
            (1, True, True),
            (2, True, True),
            ("evaluated", 2, True),
        ],
    ]
    seen.extend([None] * 8)
    again = GRPOTrainer(tiny.model(), length, **given)
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert again.run.folder == stopped.run.folder and len([*Path("out").glob("run-*")]) == 1
    assert [row["step"] for row in again.state.log_history if "reward" in row] == [1, 2, 3, 4]
    assert again.evaluate() == again.evaluate()
    with pytest.raises(GruppoError, match="evaluate takes the eval_dataset of the trainer"):
        again.evaluate(ROWS[:2])
    again.save_model()
    assert AutoModelForCausalLM.from_pretrained("out").num_parameters() > 0
    with pytest.raises(GruppoError, match="add_callback comes after the run was opened"):
        again.add_callback(Stops)


def test_a_method_of_a_callback_that_would_never_be_called_is_refused():
    from transformers import TrainerCallback

    class Never(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None: ...

    with pytest.raises(GruppoError, match=r"Never\.on_optimizer_step would never be called"):
        GRPOTrainer(tiny.model(), length, GRPOConfig("out", **SHORT), ROWS, callbacks=[Never()])


@pytest.mark.slow
def test_the_model_is_pushed_with_its_card_under_the_name_of_its_folder(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    args = GRPOConfig("mine", hub_token=fake_hub.TOKEN, hub_private_repo=True, **SHORT)
    made = GRPOTrainer(tiny.model(), length, args, ROWS)
    made.train()
    assert made.push_to_hub().startswith(f"{hub.url}/someone/mine/commit/")
    made.save_model()
    files = hub.repositories["someone/mine"]
    assert hub.private == {"someone/mine"} and hub.commits == ["End of training"]
    assert files["model.safetensors"] == Path("mine/model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "# mine" in card and "test_translation:length\n" in card
    assert [path.name for path in Path("mine").iterdir() if path.name.startswith("tmp")] == []
    files["older.json"] = b"{}"  # which a push to main would remove
    before = dict(files)
    made.push_to_hub("a trial", token=fake_hub.TOKEN, revision="trial")
    assert hub.commits[-1] == "a trial" and files == before, "main is as it was"
    assert (
        hub.repositories["someone/mine@trial"]["model.safetensors"] == before["model.safetensors"]
    )
