"""Models of random weights with the shapes of published ones, for machines that cannot fetch those.

``python -m benchmarks.random_model qwen2.5-0.5b FOLDER`` writes a Hugging Face folder: weights,
configuration, and a tokenizer of bytes and of the words of the benchmarks' prompts, which makes
about as many tokens of them as the published ones do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.workloads import FILLER, PROMPTS, prompts

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"kind": "llama", "vocab_size": 2048, "num_key_value_heads": 2, **TINY},
    "smollm2-135m": {
        "kind": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "smollm2-45m": {  # half its layers, two thirds of its width
        "kind": "llama",
        "vocab_size": 49152,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 15,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "qwen2.5-0.5b": {
        "kind": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        "kind": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
"""As in the config.json of HuggingFaceTB/SmolLM2-135M-Instruct and Qwen/Qwen2.5-*-Instruct, heads
tied."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(folder: Path, shape: str, *, context: int = 2048) -> str:
    """Write the model, unless it is there already; return the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if folder.exists():
        return str(folder)
    settings = dict(SHAPES[shape])
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(
        settings.pop("kind"),
        **settings,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    partial = folder.with_name(f".{folder.name}.new")  # an interrupted write is no model
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return str(folder)


def byte_tokenizer() -> Any:
    """BPE over bytes, trained on the prompts: a word is a token, and any text can be read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [FILLER, *(message["content"] for row in prompts(PROMPTS, 20) for message in row)]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    print(write(Path(sys.argv[2]), sys.argv[1]))
