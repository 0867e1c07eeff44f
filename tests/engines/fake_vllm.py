"""A small HTTP server with the routes of vLLM that gruppo uses. It samples from a tiny model of
ours: log-probs are true. Faults are attributes, so that a test can switch them on while a client is
at work."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file
from tests.loopback import LoopbackHandler, LoopbackServer
from torch import nn

from gruppo.core.distributions import chunked_categorical
from gruppo.engines.vllm import VllmEngine
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.modalities.text.generation import generate
from gruppo.types import Generated, Sampling

LOADING = threading.Lock()
"""transformers loads one model of a process at a time: it patches torch meanwhile."""
SAMPLED: dict[Any, Generated] = {}
SCORED: dict[Any, list[float]] = {}
"""Of this process, by weights, tokens and parameters: servers and tests ask for the same rows of
the same weights."""


class Unchecked:
    """In place of a ``WeightCheck``: every server passes, so that only the requests of an engine
    itself are made."""

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.sampled: dict[int, Any] = {}

    def limit(self, context: int) -> None: ...
    def publish(self, policy: Any) -> None: ...
    def doubt(self, replica: Any, *, is_canary: bool = False) -> None: ...
    def judge(self, replica: Any, server: Any) -> None: ...
    async def ask(self, replica: Any, label: str) -> None: ...

    def needs_canary(self, replica: Any) -> bool:
        return False

    def has_passed(self, replica: Any) -> bool:
        return True

    def metrics(self) -> dict[str, float]:
        return {}


def engine_of(policy: Any, servers: Any, folder: Path, **options: Any) -> VllmEngine:
    """An engine over servers, whose weights are not checked."""
    urls = [getattr(server, "url", server) for server in servers]
    checker: Any = Unchecked()
    return VllmEngine(policy, urls, folder / "published", checker=checker, **options)


class FakeServer:
    """``url`` answers from construction to ``close``. ``model``: the folder that the server was
    started with."""

    def __init__(
        self, model: str, *, key: str = "", host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.model, self.policy = model, copied(opened(model))
        self.key, self.version, self.is_paused, self.pauses = key, "default", False, 0
        self.adapters: dict[str, Any] = {}
        self.cache: dict[Any, TextPolicy] = {}  # prompt to the weights that read it
        self.tokens, self.is_closed = 0, False
        self.lock = threading.Lock()
        self.log: list[tuple[str, Any]] = []
        """Paths and bodies of all requests."""
        # what a test may change
        self.dev_mode = self.scale_out = True
        self.logprobs_mode, self.max_model_len = "processed_logprobs", 128
        self.seconds_per_row = 0.0
        self.before: Callable[[str, Any], None] = lambda path, body: None
        """Called before each request is answered; may raise ``Fault``."""
        self.answer: Callable[[str, Any, Any], Any] = lambda path, body, answer: answer
        """Changes the answer of a request."""
        self.load: Callable[[TextPolicy, dict[str, torch.Tensor]], None] = load_weights
        """Puts published weights into a copy of the policy."""
        self.clears_cache = self.reports_cache = self.has_weight_checker = True

        server = self

        class Handler(LoopbackHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(
                    json.loads(
                        self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null"
                    )
                )

            def reply(self, body: Any) -> None:
                try:
                    code, answer = server.handle(
                        self.command, self.path, body, self.headers.get("Authorization", "")
                    )
                except Fault as fault:
                    code, answer = fault.code, {"error": {"message": fault.message}}
                    if code in BROKEN:
                        return self.break_off(code)
                if server.is_closed:  # on connections that are open too
                    return self.break_off(RESET)
                self.send(code, answer)

            def break_off(self, how: int) -> None:
                self.close_connection = True
                if how == RESET:
                    self.connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
                    )
                    self.connection.close()
                    return
                self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"choices": [{')
                while how == SLOW and not server.is_closed:
                    time.sleep(0.02)
                    self.wfile.write(b" ")

        self.http = LoopbackServer(Handler, host, port)
        self.url = self.http.url

    def close(self) -> None:
        self.is_closed = True
        self.http.close()

    # --- routes ---

    def handle(self, method: str, path: str, body: Any, authorization: str) -> tuple[int, Any]:
        if self.is_closed:  # connections that were kept alive end too
            raise Fault(RESET)
        url = urlsplit(path)
        self.log.append((url.path, body))
        self.before(url.path, body)
        # as with gruppo serve, whose guard is on every other route
        if self.key and url.path != "/health" and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        name = f"{method.lower()}_{url.path.strip('/').replace('/', '_').replace('-', '_')}"
        route = getattr(self, name, None)
        if route is None or (not self.dev_mode and url.path in DEV_ROUTES):
            return 404, {"detail": "Not Found"}
        answer = route(body or {}, {k: v[0] for k, v in parse_qs(url.query).items()})
        code, answer = answer if isinstance(answer, tuple) else (200, answer)
        return code, self.answer(url.path, body, answer)

    def get_health(self, body: Any, query: Any) -> Any:
        return ""

    def get_v1_models(self, body: Any, query: Any) -> Any:
        names = ["tiny", *self.adapters]
        return {
            "data": [
                {"id": name, "root": "tiny", "max_model_len": self.max_model_len} for name in names
            ]
        }

    def get_server_info(self, body: Any, query: Any) -> Any:
        config = self.policy.module.config
        model = {
            "logprobs_mode": self.logprobs_mode,
            "max_model_len": self.max_model_len,
            "hf_config": str(config),
        }
        return {"vllm_config": {"model_config": model}}

    def get_metrics(self, body: Any, query: Any) -> Any:
        return (
            f'# TYPE\nvllm:generation_tokens_total{{engine="0",model_name="tiny"}} '
            f"{float(self.tokens)}\n"
        )

    def get_weight_info(self, body: Any, query: Any) -> Any:
        return {"weight_version": self.version}

    def post_tokenize(self, body: Any, query: Any) -> Any:
        ids = self.policy.chat.encode_text(body["prompt"])
        return {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}

    def post_pause(self, body: Any, query: Any) -> Any:
        self.is_paused, self.pauses = True, self.pauses + 1
        return {"status": "paused"}

    def post_resume(self, body: Any, query: Any) -> Any:
        self.is_paused = False
        return {"status": "resumed"}

    def post_reset_prefix_cache(self, body: Any, query: Any) -> Any:
        if self.clears_cache:
            self.cache.clear()
        return {"success": True}

    def post_update_weight_version(self, body: Any, query: Any) -> Any:
        self.version = body["new_version"]
        return {"success": True, "new_version": self.version}

    def post_collective_rpc(self, body: Any, query: Any) -> Any:
        assert body["method"] == "reload_weights" and self.is_paused
        folder = Path(body["kwargs"]["weights_path"])
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return 500, {
                "error": {"message": f"Cannot find any model weights with `{folder}`", "code": 500}
            }
        policy = copied(self.policy)
        try:
            self.load(policy, {name: x for file in files for name, x in load_file(file).items()})
        except RuntimeError as error:  # of another model
            return 500, {"error": {"message": str(error), "code": 500}}
        self.policy = policy
        return {"results": [None]}

    def post_weight_checker(self, body: Any, query: Any) -> Any:
        if not self.has_weight_checker:
            return 404, {"detail": "Not Found"}
        assert body == {"action": "reset"} and self.is_paused
        self.policy = copied(self.policy)
        with torch.no_grad():
            for parameter in self.policy.module.parameters():
                parameter.zero_()
        return {"status": "reset"}

    def post_v1_load_lora_adapter(self, body: Any, query: Any) -> Any:
        from gruppo.modalities.common.adapters import adapt_from

        adapt = adapt_from(body["lora_path"], base=self.model)
        with LOADING:
            self.adapters[body["lora_name"]] = from_pretrained(
                self.model, compute="float32", adapt=adapt
            )
        return f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def post_v1_unload_lora_adapter(self, body: Any, query: Any) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, {
                "error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}
            }
        return "Success"

    def post_inference_v1_generate(self, body: Any, query: Any) -> Any:
        if not self.scale_out:
            return 403, {
                "error": {
                    "message": "Scale-out endpoints are disabled. Restart with --enable-scale-out"
                }
            }
        ids, params, name = body["token_ids"], body["sampling_params"], body.get("model") or "tiny"
        if name not in ("tiny", *self.adapters):
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        if len(ids) + params["max_tokens"] > self.max_model_len:
            return 400, {
                "error": {"message": f"maximum context length is {self.max_model_len} tokens"}
            }
        while self.is_paused:
            time.sleep(0.005)
        policy, version, pauses = self.adapters.get(name, self.policy), self.version, self.pauses
        time.sleep(self.seconds_per_row)
        with self.lock:
            if pauses == self.pauses:
                policy, version = self.adapters.get(name, self.policy), self.version
            key = (
                name,
                body.get("cache_salt"),
                *ids,
            )  # vLLM's hash of a block has the adapter's name
            usage = {
                "prompt_tokens_details": {"cached_tokens": len(ids) - 1 if key in self.cache else 0}
            }
            choice = self.sampled(policy, version, ids, params, key)
            if pauses != self.pauses:  # aborted: half of its tokens were there
                choice = cut(choice, len(choice["token_ids"]) // 2)
            answer = {"choices": [choice], "model": name}
            if self.reports_cache:
                answer["usage"] = usage
            if params.get("prompt_logprobs") is not None:
                scored = score(policy, ids)
                answer["prompt_logprobs"] = [
                    None,
                    *({str(t): {"logprob": x}} for t, x in zip(ids[1:], scored, strict=True)),
                ]
        return answer

    def sampled(
        self, policy: TextPolicy, version: str, ids: list[int], params: Any, key: Any
    ) -> Any:
        scores = params.get("prompt_logprobs") is not None  # which reads no cache
        first = policy if scores else self.cache.setdefault(key, policy)
        sampling = Sampling(
            params["temperature"],
            params.get("top_k", 0),
            params.get("top_p", 1.0),
            params["max_tokens"],
            tuple(params.get("stop", ())),
        )
        seed = params.get("seed", 0)
        adapter = (
            None if policy.base_sha256 is None else id(policy)
        )  # whose scale the digest leaves out
        address = digest(policy), digest(first), adapter, tuple(ids), sampling, seed
        row = SAMPLED.get(address)
        if row is None:
            generator = torch.Generator().manual_seed(seed)
            uniforms = torch.rand(1, params["max_tokens"], generator=generator, dtype=torch.float64)
            with torch.no_grad():
                decoding = policy.backbone.start([torch.tensor(ids)], torch.tensor([0]))
                if first is not policy:  # the prompt was read by older weights
                    decoding.logits = first.backbone.start(
                        [torch.tensor(ids)], torch.tensor([0])
                    ).logits
                row = SAMPLED[address] = generate(decoding, uniforms, sampling, policy.chat)
        length = int(row.lengths[0])
        tokens, logprobs = row.tokens[0, :length].tolist(), row.logprobs[0, :length].tolist()
        self.tokens += length
        return {
            "index": 0,
            "token_ids": tokens,
            "logprobs": {
                "content": [
                    {"token_id": t, "logprob": x} for t, x in zip(tokens, logprobs, strict=True)
                ]
            },
            "finish_reason": row.finish[0],
            "weight_versions": [{"version": version, "start": 0, "end": length}],
        }


def digest(policy: TextPolicy) -> bytes:
    """Of the weights as they are now, which tests change in place too."""
    hashed = hashlib.blake2b(digest_size=16)
    for tensor in policy.module.state_dict().values():
        hashed.update(tensor.numpy().tobytes())
    return hashed.digest()


def cut(choice: dict[str, Any], length: int) -> dict[str, Any]:
    """What vLLM returns of a row that a pause aborts."""
    span = {**choice["weight_versions"][0], "end": length}
    return choice | {
        "token_ids": choice["token_ids"][:length],
        "logprobs": {"content": choice["logprobs"]["content"][:length]},
        "finish_reason": "abort",
        "weight_versions": [span],
    }


DEV_ROUTES = (
    "/server_info",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/weight_checker",
    "/weight_info",
)


RESET, TRUNCATED, SLOW = BROKEN = (0, -1, -2)
"""The connection is reset; the answer ends in its middle; it comes a byte at a time."""


class Fault(Exception):
    """What a server does in place of answering: an HTTP code, or one of ``BROKEN``."""

    def __init__(self, code: int, message: str = "Internal Server Error") -> None:
        super().__init__(message)
        self.code, self.message = code, message


@functools.cache
def opened(model: str) -> TextPolicy:
    return untied(from_pretrained(model, compute="float32"))


def copied(policy: TextPolicy) -> TextPolicy:
    """A policy with weights of its own, and the same tokenizer, whose copy would take longer."""
    return untied(policy.at(copy.deepcopy(policy.module)))


def untied(policy: TextPolicy) -> TextPolicy:
    """A policy whose head is a parameter of its own."""
    head = policy.module.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return policy


def load_weights(policy: TextPolicy, weights: dict[str, torch.Tensor]) -> None:
    policy.module.load_state_dict(weights)


@torch.no_grad()
def score(policy: TextPolicy, ids: list[int]) -> list[float]:
    """Log-probs of the tokens after the first, at temperature 1."""
    address = digest(policy), None if policy.base_sha256 is None else id(policy), tuple(ids)
    if address not in SCORED:
        features = policy.backbone.features(torch.tensor([ids]))[0, :-1]
        targets = torch.tensor(ids[1:])
        logprobs, _ = chunked_categorical(
            features, policy.backbone.head, targets, torch.ones(len(targets))
        )
        SCORED[address] = logprobs.tolist()
    return SCORED[address]


if __name__ == "__main__":  # MODEL HOST PORT
    FakeServer(
        sys.argv[1],
        host=sys.argv[2],
        port=int(sys.argv[3]),
        key=os.environ.get("GRUPPO_ENGINE_KEY", ""),
    )
    threading.Event().wait()
