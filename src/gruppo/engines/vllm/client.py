"""One vLLM server over HTTP: sampling, scoring, and loading weights. Plain routes of vLLM; nothing
imports it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gruppo.http import ServerError, read_key, request_json
from gruppo.types import Finish

KEY = "GRUPPO_ENGINE_KEY"
"""Environment variable with the servers' key; never in a config, which is saved."""
CONNECT_S, CONTROL_S = 5.0, 600.0
"""Limits of a connection, and of a control request before the first step."""
IDLE_S = 2.0
"""How long an unused connection is kept. vLLM closes one after 5 s, the default of httpx too: a
request that is sent at that moment is lost, and the server was left out for it."""
LABELS_KEPT = 32
"""Labels of a server that a row may still carry."""
LOADED_PER_S = 50e6
"""Bytes that a server must load in a second, beside the engine's timeout: slow network storage
reads several times it.
"""
CLAMPED = -9000.0
"""vLLM sends -9999 in place of a log-prob that is no number, which JSON cannot hold."""
GENERATE = "/inference/v1/generate"
TEXT_ROUTES = ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Whose answers are not JSON."""


@dataclass(frozen=True)
class SampledRow:
    """One sampled row."""

    tokens: list[int]
    logprobs: list[float]
    finish: Finish | Literal["abort"]
    """abort: the server was paused, and the row can be continued."""
    cached_tokens: int | None = None
    """Prompt tokens read from the prefix cache; None if the server does not say."""
    versions: tuple[str, ...] = ()
    """Label of the weights behind each token."""


class Replica:
    """A server, what it holds, and how much it has to do."""

    def __init__(
        self, url: str, number: int = 0, *, is_lora: bool = False, timeout_s: float = CONTROL_S
    ) -> None:
        self.url, self.number, self.is_lora, self.timeout_s = (
            url.rstrip("/"),
            number,
            is_lora,
            timeout_s,
        )
        self.label: str | None = None
        """Version of the weights that the server was proved to hold; None: nothing is sampled from
        it."""
        self.why = "it has not been asked for anything yet"
        """Why there is no label."""
        self.loaded: str | None = None
        """Label of the weights that were loaded last, proved or not."""
        self.is_asleep = False
        """Whether it has given up the device's memory to the trainer."""
        self.inflight = self.failures = 0
        """Rows being sampled; failed requests since the last one that succeeded."""
        self.tokens: float | None = None
        """Tokens that the server has counted; None before the first count."""
        self.rate, self.progress_at, self.idle_at = 0.0, 0.0, 0.0
        """Tokens per second of its fastest row; times of the last sign of progress and of the last
        row."""
        self.labels: dict[str, int] = {}
        """Versions of the newest labels that it was proved to hold."""
        self.tasks: set[asyncio.Task[SampledRow]] = set()
        import httpx2 as httpx

        key = read_key(KEY)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # each request has its own deadline, and the engine decides how many are in flight
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S
            ),
            trust_env=False,  # a proxy for the internet cannot reach servers of a private network
        )

    def label_of(self, version: str) -> str:
        """The label of a version on this server, by which two servers behind one address are told
        apart."""
        return f"{version}-r{self.number}"

    def admit(self, label: str) -> None:
        """Sample from the weights ``label``. Rows that were requested of older ones may come from
        these."""
        self.labels = dict([*self.labels.items(), (label, version_of(label))][-LABELS_KEPT:])
        self.label, self.why, self.failures = label, "", 0
        self.progress_at, self.tokens = (
            time.monotonic(),
            None,
        )  # it was paused: its rows begin to move only now

    # --- HTTP ---

    async def close(self) -> None:
        await self._client.aclose()

    async def request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = CONTROL_S
    ) -> Any:
        """Return the JSON of an answer, {} for an empty one, or the text of ``TEXT_ROUTES``; else
        ServerError."""
        return await request_json(
            self._client, method, path, body, timeout_s=timeout_s, is_text=path in TEXT_ROUTES
        )

    # --- sampling and scoring ---

    async def sample(
        self, ids: Sequence[int], params: Mapping[str, Any], label: str, *, salt: str = ""
    ) -> SampledRow:
        """Sample one row after ``ids`` from the weights ``label``; ServerError unless each token is
        from them.

        Where newer weights arrived before the request was begun, it may be from those, if the
        server holds them. Prefixes are shared with requests of the same ``salt``, by default those
        of the same weights.
        """
        body = {
            "token_ids": list(ids),
            "sampling_params": dict(params),
            "cache_salt": salt or label,
        }
        answer = await self.request(
            "POST", GENERATE, body | ({"model": label} if self.is_lora else {}), timeout_s=None
        )
        try:
            choice = answer["choices"][0]
            tokens, content = (
                list(choice["token_ids"] or ()),
                (choice["logprobs"] or {}).get("content") or (),
            )
            logprobs = [float(entry["logprob"]) for entry in content]
            named, reason = [int(entry["token_id"]) for entry in content], choice["finish_reason"]
            versions = choice["weight_versions"] or ()
            spans = [(span["version"], int(span["end"]) - int(span["start"])) for span in versions]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ServerError(
                f"{GENERATE} sent an answer without tokens, log-probs and versions ({what})"
            ) from None
        if self.is_lora:  # an adapter is chosen by its name; the version is that of the base
            spans = [(answer.get("model"), len(tokens))]
        oldest = self.labels.get(label, math.inf)
        covered = sum(n for name, n in spans if name == label or self.labels.get(name, -1) > oldest)
        if covered != len(tokens):
            held = sorted({str(version) for version, _ in spans})
            raise ServerError(
                f"it samples from the weights {held}, and {label!r} was published", is_lasting=True
            )
        limit = int(params["max_tokens"])
        is_ended = reason == "abort" or (tokens and reason in ("stop", "length"))
        is_whole = named == tokens and len(tokens) <= limit and is_ended
        if not is_whole or max(logprobs, default=0.0) > 1e-3:
            text = (
                f"{GENERATE} sent {len(tokens)} tokens of at most {limit}, {len(named)} "
                f"log-probs, the highest"
            )
            raise ServerError(f"{text} {max(logprobs, default=math.nan):.3g}, finish {reason!r}")
        cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get(
            "cached_tokens"
        )
        broken = next(
            (n for n, x in enumerate(logprobs) if not (math.isfinite(x) and x > CLAMPED)), None
        )
        if broken is not None:  # logits that are not finite
            tokens, logprobs, reason = tokens[:broken], logprobs[:broken], "error"
        labels = tuple(str(version) for version, count in spans for _ in range(count))[
            : len(tokens)
        ]
        return SampledRow(
            tokens, [min(x, 0.0) for x in logprobs], reason, cached, labels
        )  # rounding exceeds 0

    async def score(
        self, rows: Sequence[Sequence[int]], *, timeout_s: float = CONTROL_S
    ) -> list[list[float]]:
        """Return the log-probs, at temperature 1, of the tokens after the first of each row. No
        cache is read."""
        params = {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "detokenize": False,
            "watermarking": False,
        }
        model = {"model": self.loaded} if self.is_lora else {}
        bodies = [{"token_ids": list(ids), "sampling_params": params, **model} for ids in rows]
        answers = await asyncio.gather(
            *(self.request("POST", GENERATE, b, timeout_s=timeout_s) for b in bodies)
        )
        try:
            return [
                [
                    float(entry[str(token)]["logprob"])
                    for token, entry in zip(ids, found, strict=True)
                    if entry
                ]
                for ids, found in zip(
                    rows, (answer["prompt_logprobs"] for answer in answers), strict=True
                )
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{GENERATE} sent no log-probs of a prompt ({type(error).__name__}: {error})"
            ) from None

    async def count_tokens(self, *, timeout_s: float) -> float:
        """Return the tokens that the server has generated since it was started."""
        text = await self.request("GET", "/metrics", timeout_s=timeout_s)
        counts = re.findall(
            r"^vllm:generation_tokens_total(?:\{.*\})? (\S+)$", str(text), re.MULTILINE
        )
        if not counts:
            raise ServerError("/metrics does not count generated tokens")
        return sum(map(float, counts))

    # --- weights ---

    async def load_adapter(self, folder: Path, label: str) -> None:
        """Load an adapter under a name of its own, and forget the one before."""
        self.label, before = None, self.loaded
        await self._wake("")
        # rows of any rank may be under way, with lag; an adapter must not be unloaded under them
        # either
        await self.request("POST", "/pause?mode=abort&clear_cache=true", timeout_s=self.timeout_s)
        adapter = {"lora_name": label, "lora_path": str(folder)}
        await self.request("POST", "/v1/load_lora_adapter", adapter, timeout_s=self._load_s(folder))
        self.loaded = label
        if before is not None:
            try:
                await self.request(
                    "POST",
                    "/v1/unload_lora_adapter",
                    {"lora_name": before},
                    timeout_s=self.timeout_s,
                )
            except ServerError as error:
                if not error.status:  # a server that was started again does not know it
                    raise
        await self.request("POST", "/resume", timeout_s=self.timeout_s)

    async def load(self, folder: Path, label: str) -> None:
        """Load new weights and name them. Where it fails, the server stays paused: it may hold half
        of them."""
        self.label, control_s = None, self.timeout_s
        if (
            self.is_asleep
        ):  # its cache wakes last; before the pause, which it ends where nothing was asleep
            await self.request("POST", "/wake_up?tags=weights", timeout_s=control_s)
        await self.request("POST", "/pause?mode=abort&clear_cache=true", timeout_s=control_s)
        await self.reload(folder)
        # a reload does not clear it; blocks of older weights were read for 17 versions
        # (NeMo-RL#4018)
        cleared = await self.request("POST", "/reset_prefix_cache", timeout_s=control_s)
        if not cleared.get("success"):
            raise ServerError("/reset_prefix_cache did not clear the prefix cache")
        # after the load, never before it
        await self.request(
            "POST", "/update_weight_version", {"new_version": label}, timeout_s=control_s
        )
        await self._wake("?tags=kv_cache")
        await self.request("POST", "/resume", timeout_s=control_s)
        self.loaded = label

    async def reload(self, folder: Path) -> None:
        """Load the weights of a folder."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.request("POST", "/collective_rpc", call, timeout_s=self._load_s(folder))

    async def _wake(self, tags: str) -> None:
        if self.is_asleep:
            await self.request("POST", f"/wake_up{tags}", timeout_s=self.timeout_s)
            self.is_asleep = False

    def _load_s(self, folder: Path) -> float:
        return self.timeout_s + sum(file.stat().st_size for file in folder.iterdir()) / LOADED_PER_S


def version_of(label: str) -> int:
    """The version in a label of ``VllmEngine``."""
    return int(label.split("-v")[1].split("-")[0])
