"""Scripts of TRL's documentation and examples with one import changed, in short form: a tiny model,
data of our own.

Those that TRL installs (trl/scripts) are run as they are; the others are written here as the page
or example does it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from gruppo.types import GruppoError

pytest.importorskip("trl", reason="TRL is not installed; `make test` installs it")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SHORT: dict[str, Any] = {
    **{
        "max_completion_length": 8,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
    },
    **{"use_cpu": True, "bf16": False, "learning_rate": 1e-3},
}
FLAGS = [
    *("--max_completion_length", "8", "--max_steps", "2", "--per_device_train_batch_size", "4"),
    *("--num_generations", "2", "--use_cpu", "true", "--bf16", "false", "--learning_rate", "1e-3"),
]
"""``SHORT`` as a script of TrlParser takes it."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def conversations() -> Any:
    rows = [
        {"prompt": row["prompt"], "solution": f"${row['answer']}$", "task": "math"}
        for row in tiny.rows()
    ]
    return datasets.Dataset.from_list(rows)


def texts() -> Any:
    kinds = ("math", "code")
    rows = [
        {"prompt": f"{n} + {n} =", "ground_truth": str(2 * n), "task": kinds[n % 2]}
        for n in range(12)
    ]
    return datasets.Dataset.from_list(rows)


def check_saved(trainer: Any, folder: str) -> None:
    """What the end of most scripts writes: a folder that transformers opens, with other weights
    than at first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(folder)
    first = AutoModelForCausalLM.from_pretrained(tiny.model())
    assert any(
        not a.equal(b) for a, b in zip(trained.parameters(), first.parameters(), strict=True)
    )
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
    assert trainer.state.global_step == 2 and len(trainer.state.log_history) >= 2


def test_the_quickstart_with_a_reward_function_of_text():
    from gruppo.trl import GRPOConfig, GRPOTrainer

    def reward_function(completions: Any, **kwargs: Any) -> list[int]:
        return [len(set(completion.lower())) for completion in completions]

    trainer = GRPOTrainer(
        model=tiny.model(),
        reward_funcs=reward_function,
        train_dataset=texts(),
        args=GRPOConfig("out", **SHORT),
    )
    trainer.train()
    trainer.save_model("out")
    check_saved(trainer, "out")


def test_grpos_quick_start_with_the_accuracy_reward_of_trl():
    pytest.importorskip("math_verify")
    from trl.rewards import accuracy_reward

    from gruppo.trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=tiny.model(),
        reward_funcs=accuracy_reward,
        train_dataset=conversations(),
        args=GRPOConfig(**SHORT),
    )
    assert trainer.train().global_step == 2
    assert Path("trainer_output").is_dir()  # as in transformers, where output_dir is left out


def test_grpos_rewards_of_several_tasks_that_score_none_elsewhere():
    from gruppo.trl import GRPOConfig, GRPOTrainer

    def math_reward(
        prompts: Any, completions: Any, task: Any, ground_truth: Any, **kwargs: Any
    ) -> list[float | None]:
        of_task = zip(task, completions, ground_truth, strict=True)
        return [
            float(truth in completion) if one == "math" else None
            for one, completion, truth in of_task
        ]

    def code_reward(completions: Any, task: Any, **kwargs: Any) -> list[float | None]:
        pairs = zip(task, completions, strict=True)
        return [len(completion) / 8 if one == "code" else None for one, completion in pairs]

    args = GRPOConfig("out", reward_weights=[1.0, 0.5], **SHORT)
    trainer = GRPOTrainer(tiny.model(), [math_reward, code_reward], args, texts())
    trainer.train()
    assert {"rewards/math_reward/mean", "rewards/code_reward/mean"} <= trainer.state.log_history[
        -1
    ].keys()


def test_grpos_asynchronous_rewards_beside_others():
    from gruppo.trl import GRPOConfig, GRPOTrainer

    async def slow_reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        await asyncio.sleep(0.01)
        return [1.0 if completion else 0.0 for completion in completions]

    def length(completion_ids: Any, **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    trainer = GRPOTrainer(tiny.model(), [slow_reward, length], GRPOConfig("out", **SHORT), texts())
    trainer.train()
    assert trainer.state.log_history[-1]["rewards/slow_reward/mean"] == 1.0


def test_lora_by_a_peft_config_is_saved_as_an_adapter():
    peft = pytest.importorskip("peft")
    from gruppo.trl import GRPOConfig, GRPOTrainer

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(set(completion))) for completion in completions]

    trainer = GRPOTrainer(
        tiny.model(),
        reward,
        GRPOConfig("out", **SHORT),
        texts(),
        peft_config=peft.LoraConfig(r=4, lora_alpha=8),
    )
    trainer.train()
    trainer.save_model("adapter")
    saved = peft.PeftConfig.from_pretrained("adapter")
    assert (saved.r, saved.lora_alpha, {*saved.target_modules}) == (
        4,
        8,
        {"q_proj", "v_proj"},
    )  # peft's own choice


# --- scripts with a command line ------------------------------------------------------------------


def changed(name: str) -> str:
    """A script that TRL installs, whose trainer's import is changed."""
    import trl

    text = (
        Path(trl.__file__).with_name("scripts").joinpath(f"{name}.py").read_text(encoding="utf-8")
    )
    return text.replace(
        "from trl import GRPOTrainer", "from gruppo.trl import GRPOTrainer"
    ).replace("from trl import DatasetMixtureConfig", "from gruppo.trl import DatasetMixtureConfig")


def test_the_script_that_trl_installs(monkeypatch, capsys):
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: {"train": texts(), "test": texts()}
    )
    Path("my_rewards.py").write_text(
        "def length(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    script = Path("script.py")
    script.write_text(changed("grpo"))
    flags = [
        "--model_name_or_path",
        tiny.model(),
        "--dataset_name",
        "any/data",
        "--output_dir",
        "out",
    ]
    monkeypatch.setattr(
        sys, "argv", ["script.py", *flags, "--reward_funcs", "my_rewards.length", *FLAGS]
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(
        compile(script.read_text(), str(script), "exec"),
        {"__name__": "__main__", "__file__": str(script)},
    )
    assert "Model saved to out" in capsys.readouterr().out
    assert (
        Path("out/model.safetensors").is_file()
        and len([*Path("out").glob("run-*/final/COMPLETE")]) == 1
    )


def test_gspo_with_a_parser_lora_arguments_of_the_model_and_two_rewards(monkeypatch):
    pytest.importorskip("peft")
    from gruppo.trl import (
        GRPOConfig,
        GRPOTrainer,
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_peft_config,
        get_quantization_config,
    )

    def answers(completions: Any, solution: Any, **kwargs: Any) -> list[float]:
        pairs = zip(completions, solution, strict=True)
        return [
            float(solution.strip("$") in completion[0]["content"]) for completion, solution in pairs
        ]

    def length(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    command = [
        "gspo.py",
        "--model_name_or_path",
        tiny.model(),
        "--output_dir",
        "out",
        "--use_peft",
        *FLAGS,
    ]
    command += [
        "--lora_target_modules",
        "q_proj",
        "v_proj",
        "--lora_dropout",
        "0.0",
        "--log_completions",
    ]
    command += [
        "--importance_sampling_level",
        "sequence",
        "--epsilon",
        "3e-4",
        "--epsilon_high",
        "4e-4",
    ]
    command += ["--beta", "0.0", "--loss_type", "grpo", "--gradient_accumulation_steps", "2"]
    monkeypatch.setattr(
        sys, "argv", [*command, "--steps_per_generation", "4", "--dtype", "float32"]
    )
    _, training_args, model_args = TrlParser(
        (ScriptArguments, GRPOConfig, ModelConfig)
    ).parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[answers, length],
        train_dataset=conversations(),
        eval_dataset=conversations(),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    objective, optim = trainer.config.objective, trainer.config.optim
    assert (objective.ratio, objective.clip_low, objective.clip_high, objective.average) == (
        *("sequence", 3e-4, 4e-4, "sequence"),
    )
    assert (optim.minibatches, trainer.config.rollout.prompts, trainer.state.global_step) == (
        2,
        8,
        2,
    )
    assert Path("out/adapter_config.json").is_file()


# --- scripts that are refused, with what they need ------------------------------------------------


def test_a_tool_that_no_model_could_call_is_refused():
    from gruppo.trl import GRPOConfig, GRPOTrainer

    def query(sql: str) -> str:
        return sql

    trainer = GRPOTrainer(
        tiny.model(), length_of, GRPOConfig("out", **SHORT), conversations(), tools=[query]
    )
    with pytest.raises(
        GruppoError, match=r"tool 'query' cannot be shown to a model: .*no docstring"
    ):
        trainer.train()


def test_an_environment_without_reset_and_a_rollout_function_are_refused():
    from gruppo.trl import GRPOConfig, GRPOTrainer

    class Game:
        """Cannot begin."""

    arguments = (tiny.model(), length_of, GRPOConfig("out", **SHORT), texts())
    with pytest.raises(GruppoError, match="environment 'Game' has no method reset"):
        GRPOTrainer(*arguments, environment_factory=Game)
    with pytest.raises(
        GruppoError, match=r"GRPOTrainer\(rollout_func=...\) has no counterpart in gruppo"
    ):
        GRPOTrainer(*arguments, rollout_func=print)


def test_a_vision_language_model_is_refused_by_its_processor():
    from gruppo.trl import GRPOConfig, GRPOTrainer

    class Processor:
        """A processor has a tokenizer, and is none."""

        tokenizer = None

    with pytest.raises(
        GruppoError, match="processing_class is a Processor, of a model that reads images"
    ):
        GRPOTrainer(
            tiny.model(),
            length_of,
            GRPOConfig("out", **SHORT),
            texts(),
            processing_class=Processor(),
        )


def test_vllm_inside_the_trainer_is_answered_with_servers():
    from gruppo.trl import GRPOConfig, GRPOTrainer

    with pytest.raises(
        GruppoError, match=r"vllm_mode='colocate' of TRL has no counterpart.*gruppo serve"
    ):
        GRPOTrainer(tiny.model(), length_of, GRPOConfig("out", use_vllm=True, **SHORT), texts())


def length_of(completions: Any, **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_vllm_servers_sample_and_get_the_weights_of_each_step():
    """``vllm_mode="server"``: a server of gruppo serve in place of trl vllm-serve; here a true
    small one of ours."""
    from tests.engines.fake_vllm import FakeServer

    from gruppo.trl import GRPOConfig, GRPOTrainer

    server = FakeServer(tiny.model())
    try:
        options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
        trainer = GRPOTrainer(
            tiny.model(), length_of, GRPOConfig("out", **SHORT | options), texts()
        )
        output = trainer.train()
        trainer.end()
    finally:
        server.close()
    paths = [path for path, _ in server.log]
    assert output.global_step == 2 and len(trainer.state.log_history) == 2
    assert sum("generate" in path for path in paths) >= 2 and any(
        "collective_rpc" in path for path in paths
    )
    assert (
        trainer.config.objective.correction == "mask"
        and trainer.config.objective.correction_level == "sequence"
    )
