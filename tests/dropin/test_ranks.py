"""Trainers on two ranks over gloo: the same run as on one, with callbacks, evaluation and saving on
each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import fake_hub, processes, tiny

import gruppo
from gruppo import distributed as dist
from gruppo.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(8)]
ARGUMENTS: dict[str, Any] = {
    **{
        "max_completion_length": 8,
        "num_generations": 2,
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 1e-3,
    },
    **{"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "hub_token": fake_hub.TOKEN},
}


def digits(completions: Any, **_: Any) -> list[float]:
    return [float(sum(map(str.isdigit, completion))) for completion in completions]


def train_as_trl(folder: Path, model: str, rows: int, hub: str) -> None:
    """A script of TRL, as torchrun starts it: ``rows`` on each device; the result of each rank is
    written."""
    import huggingface_hub.constants as hubs

    hubs.ENDPOINT, hubs.HF_HUB_OFFLINE, hubs.HF_HUB_DISABLE_XET = hub, False, True
    os.chdir(folder)
    args = GRPOConfig("out", per_device_train_batch_size=rows, **ARGUMENTS)
    trainer = GRPOTrainer(model, digits, args, ROWS, ROWS[:3])
    output = trainer.train()
    evaluated = trainer.evaluate()["eval_reward"]
    trainer.save_model("saved")
    address = trainer.push_to_hub() if hub else ""
    history = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    found = {
        "loss": output.training_loss,
        "step": output.global_step,
        "evaluated": [*history, evaluated],
    }
    rank = dist.rank()
    is_main = trainer.is_world_process_zero()
    trainer.end()
    Path(f"{rank}.json").write_text(json.dumps(found | {"main": is_main, "address": address}))


def train_stepwise(folder: Path, model: str) -> None:
    """``gruppo.Trainer`` with a callback that changes a step parameter and stops the run."""

    class Watch(gruppo.Callback):
        def on_step(self, trainer: Any, step: Any) -> None:
            trainer.set(lr=1e-3 / step.step)
            if step.step == 3:
                trainer.stop()

    config = tiny.config(folder, steps=9, evaluation__prompts=0, model=model)
    with gruppo.Trainer(config, callbacks=[Watch()]) as trainer:
        rates = [step.metrics["optim/lr"] for step in trainer]
    (folder / f"{dist.rank()}.json").write_text(json.dumps(rates))


def read(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
def test_a_script_of_trl_on_two_ranks_trains_evaluates_saves_and_pushes_as_on_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    with fake_hub.serving() as hub:
        for folder, count, rows in ((one, 1, 4), (two, 2, 2)):
            folder.mkdir()
            arguments = (folder, tiny.model(), rows, hub.url if count == 2 else "")
            children = processes.ranks(count, train_as_trl, *arguments, folder=folder)
            codes = [child.wait() for child in children]
            assert not any(codes), "\n".join(child.err for child in children)
        assert hub.commits == ["End of training"]  # by one of the ranks
        pushed = hub.repositories["someone/out"]
    (alone,), (first, second) = read(one, 1), read(two, 2)
    assert first == second | {"main": True} and not second["main"]
    assert first["address"].startswith(f"{hub.url}/someone/out/commit/")
    torch.testing.assert_close(first["loss"], alone["loss"], rtol=1e-4, atol=1e-6)
    assert first["step"] == alone["step"] == 3 and first["evaluated"] == alone["evaluated"]
    assert len(first["evaluated"]) == 5  # before, after each step, and by hand
    expected = load_file(one / "saved" / "model.safetensors")
    for name, weight in load_file(two / "saved" / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)
    assert pushed["model.safetensors"] == (two / "saved" / "model.safetensors").read_bytes()
    assert "README.md" in pushed


def test_callbacks_change_and_stop_a_run_on_two_ranks(tmp_path):
    tiny.write_rows(tmp_path / "data.jsonl", tiny.rows())
    processes.run_ranks(2, train_stepwise, tmp_path, tiny.model(), folder=tmp_path)
    first, second = read(tmp_path, 2)
    assert first == second and len(first) == 3 and first[1:] == [1e-3, 5e-4]
