"""The sides of ``benchmarks.generate``, each a process that writes a workload's rows whenever it is
its turn.

``python -m benchmarks.writers gruppo|hf-fp32|hf-bf16|vllm SPEC``. Each turn has prompts that no
turn had before, so a cache of prompts saves what it can within a group and nothing more. Ends are
switched off.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.turns import say, wait_for_turn
from benchmarks.workloads import prompts

Write = Callable[[list[Any]], tuple[list[int], list[int]]]
"""Conversations to the number of tokens of each prompt and of each completion."""


def gruppo_writer(spec: dict[str, Any]) -> Write:
    """``policy.sample``, which returns texts and log-probs too."""
    from gruppo.modalities.text.load import from_pretrained
    from gruppo.types import Prompt, Request, Sampling

    policy = from_pretrained(spec["model"], compute=spec["compute"])
    policy.chat.eos_ids = ()
    sampling = Sampling(max_actions=spec["new_tokens"])
    turn = iter(range(10**9))

    def write(conversations: list[Any]) -> tuple[list[int], list[int]]:
        draw = next(turn)
        requests = [
            Request(Prompt(id=str(i), inputs=conversation, draw=draw), spec["group_size"])
            for i, conversation in enumerate(conversations)
        ]
        rollouts = policy.sample(requests, sampling, seed=0)
        return [len(ids) for ids in rollouts.shared["prompt_ids"]], rollouts.lengths.tolist()

    return write


def hugging_face_writer(spec: dict[str, Any]) -> Write:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if spec["side"] == "hf-fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    asked = {"do_sample": True, "top_k": 0, "max_new_tokens": spec["new_tokens"]}
    asked |= {"num_return_sequences": spec["group_size"]}

    def write(conversations: list[Any]) -> tuple[list[int], list[int]]:
        ids = [encoded(tokenizer, conversation) for conversation in conversations]
        inputs = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(model.device)
        rows = model.generate(**inputs, **asked)
        new = rows.shape[1] - inputs["input_ids"].shape[1]
        return [len(one) for one in ids], [new] * len(rows)

    return write


def vllm_writer(spec: dict[str, Any]) -> Write:
    """bfloat16, one request a prompt, neither texts nor log-probs: what is fastest for it."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        spec["model"],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(spec["prompts"] * spec["group_size"], 16),
        enforce_eager=spec["vllm_eager"],
        seed=0,
    )
    tokenizer = llm.get_tokenizer()
    asked = SamplingParams(
        n=spec["group_size"],
        temperature=1.0,
        max_tokens=spec["new_tokens"],
        ignore_eos=True,
        detokenize=False,
    )

    def write(conversations: list[Any]) -> tuple[list[int], list[int]]:
        ids = [encoded(tokenizer, conversation) for conversation in conversations]
        written = llm.generate([{"prompt_token_ids": one} for one in ids], asked, use_tqdm=False)
        return [len(one) for one in ids], [
            len(row.token_ids) for prompt in written for row in prompt.completions
        ]

    return write


def encoded(tokenizer: Any, conversation: Any) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            conversation, tokenize=True, return_dict=False, add_generation_prompt=True
        )
    )


WRITERS = {
    "gruppo": gruppo_writer,
    "hf-fp32": hugging_face_writer,
    "hf-bf16": hugging_face_writer,
    "vllm": vllm_writer,
}


def take_turns(spec: dict[str, Any]) -> None:
    write = WRITERS[spec["side"]](spec)
    say()
    for turn in range(10**9):
        wait_for_turn()
        conversations = prompts(spec["prompts"], spec["words"], first=turn * spec["prompts"])
        began = time.perf_counter()
        prompt_tokens, lengths = write(conversations)
        say(seconds=time.perf_counter() - began, prompt_tokens=prompt_tokens, lengths=lengths)


if __name__ == "__main__":
    take_turns({"side": sys.argv[1], **json.loads(sys.argv[2])})
