"""The two sides of ``benchmarks.step``, each a process that does one GRPO step whenever it reads a line.

``python -m benchmarks.sides gruppo|trl SPEC`` with SPEC the JSON of a workload. Prints one JSON object a step.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

FILLER = (
    "Think about what you know of rivers, mountains, trade and the seasons, then answer in full sentences, as you "
    "would to a friend who asks while walking along the coast on a windy day in spring."
)


def prompts(count: int, words: int) -> list[list[dict[str, str]]]:
    """Conversations of about 25 tokens and ``words`` words more, all different."""
    filler = " ".join((FILLER.split() * (words // 20 + 1))[:words])
    return [[{"role": "user", "content": f"Question {i}: tell me about number {i}. {filler}"}] for i in range(count)]


def share_of_e(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between any two samples."""
    texts = [completion[0]["content"] for completion in completions]
    return [text.count("e") / max(len(text), 1) for text in texts]


def report(**numbers: Any) -> None:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    print(json.dumps({**numbers, "peak_gib": peak}), flush=True)


def wait_for_turn() -> None:
    if not sys.stdin.readline():
        sys.exit(0)


def gruppo_side(spec: dict[str, Any]) -> None:
    from gruppo.training.api import Parts, build
    from gruppo.training.collect import collect
    from gruppo.training.config import Config, Optim, Rollout
    from gruppo.training.run import knobs_at
    from gruppo.training.update import learn

    config = Config(
        model=spec["model"],
        data="given",
        reward=("given",),
        steps=10_000,
        compute=spec["compute"],
        rollout=Rollout(prompts=spec["prompts"], group_size=spec["group_size"], max_new_tokens=spec["new_tokens"]),
        optim=Optim(lr=1e-6, token_budget=spec["token_budget"]),
    )
    rows = [{"prompt": prompt} for prompt in prompts(64, spec["words"])]
    run, _ = build(config, Parts(data=rows, rewards=[share_of_e]))
    run.policy.chat.eos_ids = ()  # every row to its full length, as on the other side
    report(ready=True)
    while True:
        wait_for_turn()
        began = time.perf_counter()
        collected = collect(run, knobs_at(config, run.step))
        metrics = collected.metrics | learn(run, collected.batch, knobs_at(config, run.step))
        run.step += 1
        run.engine.sync(run.policy, run.step)
        seconds = time.perf_counter() - began
        report(
            seconds=seconds,
            rollout_s=metrics["time/rollout_s"],
            update_s=metrics["time/update_s"],
            tokens=metrics["tokens"],
        )


def trl_side(spec: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows, batch = spec["prompts"] * spec["group_size"], spec["trl_batch"]
    arguments = GRPOConfig(
        output_dir="/tmp/gruppo-bench-trl",
        use_cpu=not torch.cuda.is_available(),
        bf16=spec["compute"] != "float32",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=rows // batch,
        num_generations=spec["group_size"],
        max_completion_length=spec["new_tokens"],
        generation_kwargs={"min_new_tokens": spec["new_tokens"]},
        max_steps=10_000,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        loss_type="grpo",
        report_to=[],
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
        gradient_checkpointing=spec["trl_checkpointing"],
    )

    class Turns(TrainerCallback):
        """A step whenever the parent says so."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            report(ready=True) if not hasattr(self, "began") else None
            wait_for_turn()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            report(seconds=time.perf_counter() - self.began, tokens=rows * spec["new_tokens"])

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        reward_funcs=share_of_e,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts(64, spec["words"])]),
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    {"gruppo": gruppo_side, "trl": trl_side}[sys.argv[1]](json.loads(sys.argv[2]))
