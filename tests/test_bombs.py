"""Files and models that are small and ask for endless work: each is one line, soon, within little
memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from tests import tiny
from tests.fakes import bpe_tokenizer, llama
from tests.test_trust import BARE, gives

from gruppo import api
from gruppo.config import serialization
from gruppo.data.rows import read_jsonl
from gruppo.integrity import read_json
from gruppo.modalities.text import chat, from_pretrained
from gruppo.modalities.text.chat import Chat
from gruppo.modalities.text.chat_template import read_template
from gruppo.rewards.models import RewardModel
from gruppo.types import GruppoError

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs FIFOs and limits of memory"
)


@pytest.fixture(autouse=True)
def bounded():
    """Within a test, 30 s and a GiB more of memory."""

    def stop(*_):
        raise AssertionError("it takes more than 30 s")

    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limits, before = resource.getrlimit(resource.RLIMIT_DATA), signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 30)
    resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- documents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (
            "lists.json",
            '{"seed": ' + "[" * 150 + "]" * 150 + "}",
            "nested more than 100 levels deep",
        ),
        ("lists.toml", "seed = " + "[" * 150 + "]" * 150, "nested more than 100 levels deep"),
        ("dots.toml", ".".join(["a"] * 200_000) + " = 1", "a line has more than 256 dots"),
    ],
)
def test_documents_that_are_nested_too_deep_are_one_line(tmp_path, name, text, problem):
    (tmp_path / name).write_text(text)
    with pytest.raises(GruppoError, match=problem):
        serialization.load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps({"seed": 10**400})),
        ("b.json", json.dumps({"optim": {"lr": 10**400}})),
        ("a.toml", "[optim]\nlr = " + "9" * 400),
    ],
)
def test_numbers_that_no_option_can_have_are_one_line(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(GruppoError, match="a whole number of more than 64 bits"):
        serialization.load(tmp_path / name)


# --- files that are none --------------------------------------------------------------------------


def make(kind: str, path: Path) -> Path:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("mine.toml", serialization.load),
        ("config.json", serialization.load),
        ("state.json", read_json),
        ("rows.jsonl", read_jsonl),
        ("chat.jinja", lambda path: read_template(str(path))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_regular_file_is_not_read(tmp_path, kind, name, read):
    with pytest.raises((GruppoError, OSError), match="not a regular file"):
        read(make(kind, tmp_path / name))


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    return api.start(
        tiny.config(tmp_path_factory.mktemp("clean"), **BARE, reward=["exact_match"])
    ).folder


PARTS = [
    "config.json",
    "manifest.json",
    "evaluations.json",
    "metrics.jsonl",
    "samples.jsonl",
    "checkpoints/latest",
]


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("command", ["doctor", "report", "resume", "train"])
def test_a_run_with_a_part_that_is_no_regular_file_is_one_line_or_is_opened_without_it(
    tmp_path, capsys, clean, command, kind
):
    for part in PARTS:
        run = shutil.copytree(clean, tmp_path / part.replace("/", "-"))
        make(kind, run / part)
        options = ["--out", str(tmp_path / "report.html")] if command == "report" else []
        gives(capsys, command, str(run / "config.json" if command == "train" else run), *options)
        if part == "config.json" and command == "train":
            return  # with another part, its config is as good as any


# --- models ---------------------------------------------------------------------------------------

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"


def test_a_chat_template_that_loops_is_stopped_and_not_waited_for_again(monkeypatch):
    monkeypatch.setattr(chat, "RENDER_S", 1.0, raising=False)
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = LOOP
    looping = Chat(tokenizer, [tokenizer.eos_token_id])
    for limit in (1.0, 1000.0):
        monkeypatch.setattr(chat, "RENDER_S", limit, raising=False)
        with pytest.raises(GruppoError, match="template cannot write a conversation of user: "):
            looping.encode([{"role": "user", "content": "Hello."}])


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_local_experts"])
def test_a_model_with_more_layers_or_experts_than_any_has_is_one_line(tmp_path, name):
    llama().save(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {name: 10**8}))
    with pytest.raises(GruppoError, match=f"has {name} above 10,000"):
        from_pretrained(tmp_path)
    with pytest.raises(GruppoError, match=f"has {name} above 10,000"):
        RewardModel(str(tmp_path))
