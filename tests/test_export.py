"""Models for other software: the hub, with a model card, and llama.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file
from tests import fake_hub, processes, tiny
from tests.trainer.test_modules import one_line

from gruppo import api, export
from gruppo.config.schema import Config
from gruppo.config.serialization import to_dict
from gruppo.tracking import model_card
from gruppo.tracking.files import replace_file

ROOT = Path(__file__).parents[1]
LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", "llama.cpp"))
needs_converter = pytest.mark.skipif(
    not (LLAMA_CPP / "convert_hf_to_gguf.py").is_file(),
    reason="LLAMA_CPP names no folder of llama.cpp",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rewards with a picture, as ``gruppo train`` leaves it."""
    rewards = [tiny.reward("digits"), "length_target:4"]
    config = tiny.config(
        tmp_path_factory.mktemp("export"), reward=rewards, scoring__weights=(1.0, 0.25)
    )
    folder = api.start(config).folder
    replace_file(folder / "plots" / "overview.png", b"a picture")
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return api.start(tiny.config(tmp_path_factory.mktemp("adapter"), steps=1, lora__rank=2)).folder


# --- the hub --------------------------------------------------------------------------------------


def test_a_run_is_pushed_with_its_weights_card_and_picture(run, hub, capsys):
    assert processes.exit_code(["export", str(run), "--push", "someone/sums", "--private"]) == 0
    assert f"written to {hub.url}/someone/sums/commit/" in capsys.readouterr().out
    files = hub.repositories["someone/sums"]
    assert files["model.safetensors"] == (run / "final" / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "README.md"} < files.keys() and files[
        "metrics.png"
    ] == b"a picture"
    assert hub.private == {"someone/sums"}
    assert "library_name: transformers" in hub.metadata[0]  # the hub has read the card's header
    card = files["README.md"].decode()
    assert "![Metrics of training](metrics.png)" in card and "# sums" in card
    assert not (run / "final" / "README.md").exists()


@pytest.mark.slow
def test_the_environment_names_the_hub(run, hub, tmp_path):
    """As users set it; the library reads it when it is imported."""
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": fake_hub.TOKEN,
    }
    command = [
        sys.executable,
        "-m",
        "gruppo",
        "export",
        str(run),
        str(tmp_path / "kept"),
        "--push",
        "someone/named",
    ]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"written to {tmp_path / 'kept'} and {hub.url}/someone/named" in done.stdout
    files = hub.repositories["someone/named"]
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()
    }.items() <= files.items()


@pytest.mark.slow
def test_a_merged_model_replaces_an_adapter_and_what_the_user_added_stays(adapter, hub):
    export.export(adapter, None, push="someone/both", is_adapter_kept=True)
    files = hub.repositories["someone/both"]
    assert {"adapter_config.json", "adapter_model.safetensors"} < files.keys()
    assert "library_name: peft" in files["README.md"].decode()
    files["LICENSE"] = b"mine"
    export.export(adapter, None, push="someone/both")
    assert "adapter_config.json" not in files and "adapter_model.safetensors" not in files
    assert "model.safetensors" in files and files["LICENSE"] == b"mine"
    assert "library_name: transformers" in files["README.md"].decode()


def test_a_missing_token_is_one_line_before_anything_is_written(run, hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    message = one_line(lambda: export.export(run, tmp_path / "out", push="someone/new"))
    assert (
        message == "pushing to the hub needs a token, and there is none. Run hf auth login, or set "
        "HF_TOKEN."
    )
    assert not (tmp_path / "out").exists() and not hub.repositories


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("other/new", fake_hub.TOKEN, "You don't have the rights"),
        ("someone/new", "hf_wrong", "Invalid username or password"),
        ("not a name", fake_hub.TOKEN, "not a name was not pushed: HFValidationError"),
    ],
)
def test_what_the_hub_refuses_is_one_line_before_anything_is_written(
    run, hub, tmp_path, monkeypatch, name, token, expected
):
    monkeypatch.setenv("HF_TOKEN", token)
    message = one_line(lambda: export.export(run, tmp_path / "out", push=name))
    assert expected in message and hub.url in message
    assert not (tmp_path / "out").exists()


def test_a_private_push_never_reaches_a_public_repository(run, hub):
    export.export(run, None, push="someone/open")
    before = dict(hub.repositories["someone/open"])
    message = one_line(lambda: export.export(run, None, push="someone/open", private=True))
    assert "exists and is public" in message and hub.repositories["someone/open"] == before


def test_without_a_folder_and_a_repository_there_is_nothing_to_write(run):
    assert "no folder was given" in one_line(lambda: export.export(run, None))


# --- the card -------------------------------------------------------------------------------------


def test_the_card_has_objective_data_rewards_evaluation_and_license(run, tmp_path):
    export.export(run, tmp_path / "out", license="mit")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert card.startswith(
        "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n"
    )
    for row in (
        "| data | data.jsonl |",
        "| rewards | ",
    ):
        assert row in card
    assert "| license | mit |" in card
    assert "advantage   A = (reward - mean of the group)" in card
    first, *_, last = api.json.loads((run / "evaluations.json").read_text())
    for each in (first, last):
        assert (
            f"| {each['step']} | {model_card.number(each['mean'])} | "
            f"{model_card.number(each['low'])} to" in card
        )
    assert (tmp_path / "out" / "metrics.png").read_bytes() == b"a picture"


def test_a_card_names_no_folder_of_the_machine(run, tmp_path):
    export.export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert str(Path.home()) not in card and str(run.parent) not in card and str(ROOT) not in card
    assert "tiny.py:digits" in card


def test_a_card_holds_hostile_names_as_text(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    settings = to_dict(Config()) | {"data": "x|y `z` <script>\n---\n```", "model": "a/[b](c)"}
    (copied / "config.json").write_text(api.json.dumps(settings))
    text = model_card.model_card(copied, run / "final")
    assert r"| data | x\|y \`z\` \<script\> --- \`\`\` |" in text
    assert text.count("```") == 2 and text.count("\n---\n") == 1


def test_an_edited_card_leaves_the_model_whole(run, tmp_path):
    export.export(run, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    export.export(tmp_path / "out", tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys()


# --- GGUF -----------------------------------------------------------------------------------------


def gguf_model(folder: Path) -> Path:
    """A tiny Llama whose tokenizer llama.cpp knows: a token is a byte."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(
        {text: n for n, text in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(tokens[:3])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokens), bos_token_id=1, eos_token_id=2, max_position_embeddings=64, **sizes
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@needs_converter
def test_a_gguf_file_holds_the_models_weights_and_vocabulary(tmp_path, monkeypatch):
    """Written by llama.cpp's own converter, and read by the gguf package."""
    from gguf import GGUFReader, dequantize

    monkeypatch.setenv("LLAMA_CPP", str(LLAMA_CPP))
    source = gguf_model(tmp_path / "model")
    export.export(source, tmp_path / "out", gguf=True)
    (file,) = (tmp_path / "out").glob("out-*.gguf")
    reader = GGUFReader(file)
    assert reader.fields["general.architecture"].contents() == "llama"
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 259
    ours = load_file(source / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    (theirs,) = [tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight"]
    stored = torch.from_numpy(dequantize(theirs.data, theirs.tensor_type)).reshape(ours.shape)
    assert theirs.tensor_type.name == "F16" and torch.equal(stored, ours.half().float())


@needs_converter
def test_a_model_that_the_converter_does_not_know_is_one_line_and_leaves_no_folder(
    run, tmp_path, monkeypatch
):
    monkeypatch.setenv("LLAMA_CPP", str(LLAMA_CPP))
    message = one_line(lambda: export.export(run, tmp_path / "out", gguf=True))
    assert "converter" in message and "BPE pre-tokenizer was not recognized" in message
    assert not (tmp_path / "out").exists()


SCRIPT = """
import json, sys
from pathlib import Path
folder, option, file, *rest = sys.argv[1:]
assert option == "--outfile" and (Path(folder) / "adapter_model.safetensors").is_file()
Path(file.format(FTYPE="F32")).write_text(json.dumps(rest))
"""


def test_an_adapter_is_converted_with_the_config_of_its_base(adapter, tmp_path, monkeypatch):
    """By a script with the arguments of llama.cpp's convert_lora_to_gguf.py, which is in no
    package."""
    (tmp_path / "convert_lora_to_gguf.py").write_text(SCRIPT)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    export.export(adapter, tmp_path / "out", is_adapter_kept=True, gguf=True)
    assert api.json.loads((tmp_path / "out" / "out-F32.gguf").read_text()) == [
        "--base",
        tiny.model(),
    ]


def test_a_missing_converter_is_one_line_before_anything_is_written(run, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    message = one_line(lambda: export.export(run, tmp_path / "out", gguf=True))
    assert "convert_hf_to_gguf.py was not found" in message and "Set LLAMA_CPP" in message
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    assert "has no convert_hf_to_gguf.py" in one_line(
        lambda: export.export(run, tmp_path / "out", gguf=True)
    )
    assert not (tmp_path / "out").exists()
