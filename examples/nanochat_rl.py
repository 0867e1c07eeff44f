"""nanochat's chat model on GSM8K, with gruppo in place of nanochat's scripts/chat_rl.py.

Run it in nanochat's folder, in an environment that has both, after nanochat's own training up to
"sft":

    E=PATH/nanochat_rl.py
    PYTHONPATH=. gruppo train examples/documents.py:chat \\
        --model $E:model --data $E:problems --reward $E:is_right \\
        --objective nanochat --stage.kl-coef 0 --rollout.prompts 16 --rollout.max-new-tokens 256
"""

from functools import cache

import torch

import gruppo


def model():
    """Return the policy of nanochat's newest "sft" checkpoint."""
    from nanochat.checkpoint_manager import load_model

    module, tokenizer, _ = load_model(
        "sft", torch.device("cpu"), phase="eval"
    )  # gruppo moves it to the GPU

    def render(messages):
        # render_for_completion drops the assistant's last message and refuses a conversation
        # without one
        begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else None
        messages = (
            messages if begun is not None else [*messages, {"role": "assistant", "content": ""}]
        )
        return tokenizer.render_for_completion({"messages": list(messages)}) + tokenizer.encode(
            begun or ""
        )

    ends = [tokenizer.encode_special("<|assistant_end|>"), tokenizer.get_bos_token_id()]
    return gruppo.from_module(
        module, tokenizer, eos_ids=ends, context=module.config.sequence_len, render=render
    )


@cache
def gsm8k():
    """Return nanochat's task."""
    from tasks.gsm8k import GSM8K

    return GSM8K(subset="main", split="train")


def problems():
    """Return rows: a question as the prompt, and nanochat's whole conversation for its reward."""
    conversations = [gsm8k()[i] for i in range(len(gsm8k()))]
    return [{"prompt": one["messages"][:-1], "conversation": one} for one in conversations]


def is_right(completions, conversation, **kwargs):
    """Return nanochat's own reward of each answer."""
    texts = [completion[-1]["content"] for completion in completions]
    return [gsm8k().reward(one, text) for one, text in zip(conversation, texts, strict=True)]
