"""The two sides of ``benchmarks.step``, each a process that does one GRPO step whenever it is its
turn.

``python -m benchmarks.sides gruppo|trl SPEC`` with SPEC the JSON of a workload.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from benchmarks import memory
from benchmarks.turns import say, wait_for_turn
from benchmarks.workloads import PROMPTS, alternating, prompts, row_lengths


def gruppo_side(spec: dict[str, Any]) -> None:
    import gruppo  # noqa: F401, I001  # before torch, as in its command line: it chooses how torch's threads wait
    import transformers.models.llama.modeling_llama  # noqa: F401  # part of the imports, not of the model

    from benchmarks.ends import ScriptedEnds
    from benchmarks.runs import one_step, started

    after_imports = memory.begin()
    run = started(spec)
    ends = ScriptedEnds(run.policy)
    parameters = sum(parameter.numel() for parameter in run.parameters)
    say(parameters=parameters, compute=run.config.compute)
    while True:
        wait_for_turn()
        ends.script(spec, run.state.step)
        say(**one_step(run), peak_bytes=memory.most(after_imports))


def trl_side(spec: dict[str, Any]) -> None:
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  # part of the imports, not of the model
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LogitsProcessorList,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.ends import force_ends

    rows, batch = spec["prompts"] * spec["group_size"], spec["trl_batch"]
    arguments = GRPOConfig(
        output_dir="/tmp/gruppo-bench-trl",
        use_cpu=not torch.cuda.is_available(),
        bf16=spec["compute"] != "float32",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=rows // batch,
        num_generations=spec["group_size"],
        max_completion_length=spec["new_tokens"],
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
    after_imports = memory.begin()
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    seen: dict[str, Any] = {}
    steps = itertools.count()

    def rewarded(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen["lengths"] = [len(ids) for ids in completion_ids]
        return alternating(completions)

    class EndsAt:
        """Where rows end; made anew for each batch of rows."""

        def __init__(self, prompt_tokens: int) -> None:
            lengths = row_lengths(
                rows, next(steps), most=spec["new_tokens"], mean=spec["mean_tokens"]
            )
            self.lengths, self.prompt_tokens = (
                torch.tensor(lengths, device=model.device),
                prompt_tokens,
            )

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            force_ends(
                scores, self.lengths, input_ids.shape[1] - self.prompt_tokens, trainer.eos_token_ids
            )
            return scores

    class Turns(TrainerCallback):
        """A step whenever it is this side's turn."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not seen:
                say(parameters=sum(parameter.numel() for parameter in model.parameters()))
            wait_for_turn()
            seen["began"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - seen.pop("began")
            phases = {"rollout_s": seen["rollout_s"], "update_s": seconds - seen["rollout_s"]}
            work = {"lengths": seen["lengths"], "prompt_tokens": seen["prompt_tokens"]}
            say(seconds=seconds, **phases, **work, peak_bytes=memory.most(after_imports))

    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        reward_funcs=rewarded,
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt} for prompt in prompts(PROMPTS, spec["words"])]
        ),
        callbacks=[Turns()],
    )
    generate = model.generate

    def scripted(*args: Any, **inputs: Any) -> Any:
        began = time.perf_counter()
        ends = LogitsProcessorList([EndsAt(inputs["input_ids"].shape[1])])
        written = generate(*args, **inputs, logits_processor=ends)
        seen["rollout_s"] = time.perf_counter() - began
        seen["prompt_tokens"] = inputs["attention_mask"].sum(dim=1).tolist()
        return written

    model.generate = scripted
    trainer.train()


if __name__ == "__main__":
    {"gruppo": gruppo_side, "trl": trl_side}[sys.argv[1]](json.loads(sys.argv[2]))
