"""Servers with a fault, each refused by the check of the weights:
``python -m benchmarks.server_mutants http://127.0.0.1:8000``.

A proxy before a real vLLM server makes the faults: it loads other weights than it was told to, does
not clear the cache, or changes the log-probs. The server is started by ``gruppo serve MODEL --
--enable-prompt-tokens-details``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gruppo.engines.vllm import VllmEngine, WeightCheck, weights
from gruppo.engines.vllm.publish import Publication
from gruppo.inference import load_policy
from gruppo.types import EngineLost, Prompt, Sampling


class Proxy:
    """Forwards to a server; ``request`` and ``answer`` may change what passes."""

    def __init__(self, target: str, untrained: Path) -> None:
        self.target, self.untrained = target, untrained
        self.request: Callable[[str, Any], tuple[str, Any]] = lambda path, body: (path, body)
        self.answer: Callable[[str, Any, Any], Any] = lambda path, body, answer: answer
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.forward(None)

            def do_POST(self) -> None:
                self.forward(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def forward(self, data: bytes | None) -> None:
                body = json.loads(data) if data else None
                path, changed = proxy.request(self.path, body)
                code, reply = proxy.send(path, changed, "GET" if data is None else "POST")
                if path.endswith("generate") and code == 200:
                    reply = json.dumps(proxy.answer(path, changed, json.loads(reply))).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 128

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def send(self, path: str, body: Any, method: str = "POST") -> tuple[int, bytes]:
        data = None if method == "GET" else b"" if body is None else json.dumps(body).encode()
        call = urllib.request.Request(
            self.target + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(call, timeout=900) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def loads(proxy: Proxy, other: Callable[[Path, Path], Path]) -> None:
    """``other`` of the folder that is to be loaded and the one before, at first the untrained
    weights, is loaded."""
    before = [proxy.untrained]

    def request(path: str, body: Any) -> tuple[str, Any]:
        if path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            chosen = other(folder, before[-1])
            before.append(folder)
            body = {**body, "kwargs": {"weights_path": str(chosen)}}
        return path, body

    proxy.request = request


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: x
        for file in sorted(folder.glob("*.safetensors"))
        for name, x in load_file(file).items()
    }


def without(part: str) -> Callable[[Path, Path], Path]:
    """A folder in which the tensors with ``part`` in their name are those of the folder before."""

    def other(folder: Path, before: Path) -> Path:
        old = weights_of(before)
        return write(
            folder,
            {name: old[name] if part in name else x for name, x in weights_of(folder).items()},
        )

    return other


def another_model(folder: Path, before: Path) -> Path:
    generator = torch.Generator().manual_seed(7)
    weights = {name: x.float() for name, x in weights_of(folder).items()}
    noise = {
        name: 0.2 * x.std() * torch.randn(x.shape, generator=generator)
        for name, x in weights.items()
    }
    return write(folder, {name: (x + noise[name]).bfloat16() for name, x in weights.items()})


def write(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    made = Path(tempfile.mkdtemp(dir=folder.parent.parent))
    (made / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


def keeps_cache(proxy: Proxy) -> None:
    def request(path: str, body: Any) -> tuple[str, Any]:
        if path == "/reset_prefix_cache":
            return "/version", None
        return path.replace("clear_cache=true", "clear_cache=false"), body

    proxy.request = request
    send = proxy.send

    def faked(path: str, body: Any, method: str = "POST") -> tuple[int, bytes]:
        return (200, b'{"success": true}') if path == "/version" else send(path, body, method)

    proxy.send = faked  # type: ignore[method-assign]


def reports(proxy: Proxy, change: Callable[[list[float], Any, Any], list[float]]) -> None:
    def answer(path: str, body: Any, reply: Any) -> Any:
        if body["sampling_params"].get("prompt_logprobs") is None:
            choice = reply["choices"][0]
            content = choice["logprobs"]["content"]
            changed = change([entry["logprob"] for entry in content], body, choice["token_ids"])
            for entry, logprob in zip(content, changed, strict=True):
                entry["logprob"] = logprob
        return reply

    proxy.answer = answer


def raw(proxy: Proxy) -> Callable[[list[float], Any, Any], list[float]]:
    def change(logprobs: list[float], body: Any, tokens: Any) -> list[float]:
        ids = [*body["token_ids"], *tokens]
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        scored = json.loads(
            proxy.send("/inference/v1/generate", {"token_ids": ids, "sampling_params": params})[1]
        )
        entries = scored["prompt_logprobs"][-len(tokens) :]
        return [entry[str(token)]["logprob"] for token, entry in zip(tokens, entries, strict=True)]

    return change


FAULTS: dict[str, Callable[[Proxy], None]] = {
    "none": lambda proxy: None,
    "stale head": lambda proxy: loads(proxy, without("lm_head")),
    "one layer not loaded": lambda proxy: loads(proxy, without("layers.15.")),
    "one matrix not loaded": lambda proxy: loads(proxy, without("layers.15.mlp.down_proj")),
    "previous version": lambda proxy: loads(proxy, lambda folder, before: before),
    "another model": lambda proxy: loads(proxy, another_model),
    "swapped replicas": lambda proxy: None,
    "cache not cleared": keeps_cache,
    "raw log-probs": lambda proxy: reports(proxy, raw(proxy)),
    "log-probs off by one": lambda proxy: reports(
        proxy, lambda logprobs, body, tokens: [*logprobs[1:], logprobs[0]]
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="a server started by gruppo serve")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--probes", type=int, default=weights.PROBES)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    options = parser.parse_args(argv)
    weights.PROBES = options.probes
    policy = load_policy(options.model)
    prompts = [
        Prompt(str(n), [{"role": "user", "content": f"What is {n} + {n * n % 23}?"}])
        for n in range(64)
    ]
    for fault in options.faults:
        print(f"{fault:22} {attempt(fault, policy, prompts, options.url)}", flush=True)


def attempt(fault: str, policy: Any, prompts: Sequence[Prompt], url: str) -> str:
    """Publish to a server with a fault; what the engine says of it."""
    with tempfile.TemporaryDirectory(prefix="gruppo-mutants-") as place:
        untrained = Publication(Path(place) / "untrained").write(
            "gruppo-v", policy.served_weights(), policy.served_config()
        )
        proxies = [Proxy(url, untrained) for _ in range(2 if fault == "swapped replicas" else 1)]
        for proxy in proxies:
            FAULTS[fault](proxy)
        sampling = Sampling(temperature=1.5, top_k=12, max_actions=8)
        checker = WeightCheck(policy, prompts, sampling, max_mismatch=0.2)
        engine = VllmEngine(
            policy,
            [p.url for p in proxies],
            Path(place) / "published",
            checker=checker,
            timeout_s=600,
        )
        began = time.perf_counter()
        try:
            engine.check(64)
            engine.sync(policy, 0)
        except EngineLost as lost:
            return f"refused after {time.perf_counter() - began:.0f} s: {lost}"
        finally:
            engine.close()
        out = [replica.why for replica in engine.replicas if replica.why]
        error = engine.metrics().get("engine/error_nats", float("nan"))
        return (
            f"{'partly refused: ' + '; '.join(out) if out else f'admitted, error {error:.3f} nats'}"
        )


if __name__ == "__main__":
    main()
