"""The pages of common tasks work as they stand: their files and commands, with a tiny model and one
short step."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import fake_hub, tiny

from gruppo import api
from gruppo.cli.commands import COMMANDS
from gruppo.cli.options import parse_command, parse_config
from gruppo.tracking.files import read_metrics

DOCS = Path(__file__).parents[1] / "docs"
FENCED = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {
    "start/your-own-reward.md": 1,
    "guides/math.md": 2,
    "guides/reward-models.md": 3,
    "guides/conversations.md": 5,
    "guides/lora.md": 5,
    "guides/publishing.md": 1,
    "guides/reading-a-run.md": 2,
    "guides/out-of-memory.md": 2,
    "objectives/ppo.md": 4,
    "objectives/kl.md": 4,
}
"""Number of ``gruppo train`` commands on each page."""
SHORT = {
    **{
        "steps": 1,
        "rollout__prompts": 2,
        "rollout__group_size": 2,
        "rollout__max_new_tokens": 6,
        "compute": "float32",
    },
    **{
        "evaluation__prompts": 2,
        "evaluation__every": 0,
        "optim__warmup_steps": 0,
        "critic__warmup_steps": 0,
    },
    **{"scoring__isolate": False, "track": ()},
    # for layers of 64 inputs or more: modalities/text/test_four_bit.py
    "lora__load_in_4bit": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in place of the pages' models, with a context that holds their prompts, and the
    tokens of ChatML."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny.write_model(tmp_path_factory.mktemp("model") / "tiny", context=2048)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reward_model(folder: Path, kind: str) -> None:
    """A model with one label per completion, or per token, where the page has its path/to/model."""
    from transformers import (
        LlamaConfig,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
    )

    tokenizer = tiny.character_tokenizer()
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1, **sizes
    )
    {"reward_model": LlamaForSequenceClassification, "process_reward": LlamaForTokenClassification}[
        kind
    ](config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def commands(text: str) -> Iterator[list[str]]:
    for language, _, block in FENCED.findall(text):
        if language in ("", "sh"):
            for line in block.splitlines():
                if line.startswith("gruppo "):
                    yield shlex.split(line, comments=True)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_commands_of_a_page_work(
    page: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: fake_hub.FakeHub
) -> None:
    """In their order, in one folder; training takes one step of two short groups."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text(encoding="utf-8")
    tiny.write_rows(tmp_path / "questions.jsonl", tiny.rows(6))
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    for kind in re.findall(r"(reward_model|process_reward):path/to/model", text):
        reward_model(tmp_path / kind, kind)
    for _, name, block in FENCED.findall(text):
        if name:
            (tmp_path / name).write_text(block, encoding="utf-8")
    trained = 0
    for name, *words in commands(text):
        words = [
            re.sub(r"(reward_model|process_reward):path/to/model", r"\1:\1", word) for word in words
        ]
        if name == "train" and words[0].startswith(
            "examples/tool_recipes"
        ):  # its model writes calls: trainer/test_tool_recipes.py
            parse_config("train", [str(DOCS.parent / words[0]), *words[1:]])
        elif name == "train":
            trained += 1
            config = parse_config("train", words)
            result = api.start(
                api.change(
                    config, {"model": model, "name": config.name or f"run{trained}", **SHORT}
                )
            )
            (row,) = [row for row in read_metrics(result.folder) if row["step"] == 1]
            assert row["reward/unscored_count"] == 0 and row["progress/rollouts"] == 4
        elif (
            name in ("export", "doctor") and "--gguf" not in words
        ):  # tests/test_export.py has a model of llama.cpp's
            COMMANDS[name](**parse_command(name, COMMANDS[name], words))
    assert trained == PAGES[page]
