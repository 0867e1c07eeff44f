"""Models for other software: the hub, with a model card, and llama.cpp."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from safetensors.torch import load_file
from tests import fake_hub, processes, tiny
from tests.trainer.test_modules import one_line

from gruppo import api, export
from gruppo.config.schema import Config
from gruppo.config.serialization import to_dict
from gruppo.integrity import replace_file
from gruppo.tracking import model_card
from gruppo.tracking.formatting import number

ROOT = Path(__file__).parents[1]


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


def test_a_failed_upload_keeps_the_folder_and_says_how_to_go_on(run, hub, tmp_path):
    hub.problem = "/api/models/someone/later/commit"
    message = one_line(lambda: export.export(run, tmp_path / "out", push="someone/later"))
    assert (
        "storage limit reached" in message
        and f"hf upload someone/later {tmp_path / 'out'}" in message
    )
    assert (tmp_path / "out" / "model.safetensors").is_file() and (
        tmp_path / "out" / "README.md"
    ).is_file()


def test_without_a_folder_and_a_repository_there_is_nothing_to_write(run):
    assert "no folder was given" in one_line(lambda: export.export(run, None))


# --- the card -------------------------------------------------------------------------------------


def test_the_card_has_objective_data_rewards_evaluation_and_license(run, tmp_path):
    export.export(run, tmp_path / "out", license="mit")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert card.startswith(
        "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n"
    )
    lines = dict(re.findall(r"^([\w -]+?)  +(.*)$", card, re.MULTILINE))
    assert lines["data"] == "data.jsonl" and lines["license"] == "mit" and lines["rewards"]
    assert "advantage   A = (reward - mean of the group)" in card
    first, *_, last = json.loads((run / "evaluations.json").read_text())
    for each in (first, last):
        shown = lines[f"held-out at step {each['step']}"]
        assert shown.startswith(f"{number(each['mean'])} [{number(each['low'])}, ")
    assert (tmp_path / "out" / "metrics.png").read_bytes() == b"a picture"


def test_a_card_names_no_folder_of_the_machine(run, tmp_path):
    export.export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert str(Path.home()) not in card and str(run.parent) not in card and str(ROOT) not in card
    assert "tiny.py:digits" in card


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/home/me/rewards.py:score", "rewards.py:score"),
        ("images:/home/me/my pictures/cats:32", "images:cats:32"),
        (r"C:\Users\me\rewards.py:score", "rewards.py:score"),
        ("~/data/mine.jsonl", "mine.jsonl"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("/a/one.py:f /b/two.py:g", "one.py:f two.py:g"),
    ],
)
def test_folders_of_absolute_paths_are_cut(text, public):
    assert model_card._public(text) == public


def test_a_card_holds_hostile_names_as_text(run, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    settings = to_dict(Config()) | {"data": "x|y `z` <script>\n---\n```", "model": "a/[b](c)"}
    (copied / "config.json").write_text(json.dumps(settings))
    text = model_card.model_card(copied, run / "final")
    assert r"  x|y 'z' <script>\n---\n'''" in text
    assert text.count("```") == 2 and text.count("\n---\n") == 1


def test_an_edited_card_leaves_the_model_whole(run, tmp_path):
    export.export(run, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    export.export(tmp_path / "out", tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys()
