"""One vLLM server over HTTP: sampling, scoring, and loading weights. Plain routes of vLLM; nothing
imports it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gruppo.http import ServerError, open_client, read_key, request_json
from gruppo.types import Generated

KEY = "GRUPPO_ENGINE_KEY"
"""Environment variable with the servers' key; never in a config, which is saved."""
CONNECT_S, CONTROL_S = 5.0, 600.0
"""Limits of a first answer, and of a control request before the first step."""
IDLE_S = 2.0
"""How long an unused connection is kept. vLLM closes one after 5 s, the default of httpx too: a
request that is sent at that moment is lost, and the server was left out for it."""
LABELS_KEPT = 32
"""Labels of a server that a row may still carry."""
LOADED_PER_S = 50e6
"""Bytes that a server must load in a second, besides the engine's timeout: slow network storage
reads several times it.
"""
CLAMPED = -9000.0
"""vLLM sends -9999 in place of a log-prob that is no number, which JSON cannot hold."""
GENERATE = "/inference/v1/generate"
TEXT_ROUTES = ("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Whose answers are not JSON."""
MISSING = (404, 405, 501)
"""Statuses of a route that a server does not have."""


@dataclass(frozen=True)
class SampledRow:
    """One sampled row."""

    tokens: list[int]
    logprobs: list[float]
    finish: Any
    """abort: the server was paused, and the row can be continued."""
    versions: tuple[str, ...] = ()
    """Label of the weights behind each token."""
    cached_tokens: int = 0
    """Prompt tokens read from the prefix cache, as far as the server says."""

    def __add__(self, other: SampledRow) -> SampledRow:
        """A row and its continuation."""
        return SampledRow(
            self.tokens + other.tokens,
            self.logprobs + other.logprobs,
            other.finish,
            self.versions + other.versions,
        )


def generated(rows: Sequence[SampledRow]) -> Generated:
    """The tokens of rows, padded to the longest."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros(len(rows), max(int(lengths.max()), 1), dtype=torch.long)  # [B, T]
    logprobs = torch.zeros(tokens.shape)
    versions = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        columns = slice(len(row.tokens))
        tokens[number, columns] = torch.tensor(row.tokens)
        logprobs[number, columns] = torch.tensor(row.logprobs)
        versions[number, columns] = torch.tensor([version_of(label) for label in row.versions])
    # a row may have been paused at its last token
    finish: Any = tuple("length" if row.finish == "abort" else row.finish for row in rows)
    return Generated(tokens, logprobs, lengths, finish, versions)


class Replica:
    """A server, what it holds, and how much it has to do."""

    def __init__(
        self, url: str, number: int = 0, *, is_lora: bool = False, timeout_s: float = CONTROL_S
    ) -> None:
        self.url = url.rstrip("/")
        self.number = number
        self.is_lora = is_lora
        self.timeout_s = timeout_s
        self.label: str | None = None
        """Version of the weights that the server was checked to hold; None: nothing is sampled from
        it."""
        self.why = "it has not been asked for anything yet"
        """Why there is no label."""
        self.loaded: str | None = None
        """Label of the weights that were loaded last, checked or not."""
        self.labels: dict[str, int] = {}
        """Versions of the newest labels that it was checked to hold."""
        self.is_asleep = False
        """Whether it has given up the device's memory to the trainer."""
        self.can_reset = not is_lora
        """Whether its parameters can be zeroed before a load."""
        self.inflight = 0
        """Rows being sampled."""
        self.tasks: set[asyncio.Task[SampledRow]] = set()
        self.failures = 0
        """Failed requests since the last one that succeeded."""
        self.tokens: float | None = None
        """Tokens that the server has counted; None before the first count."""
        self.progress_at = 0.0
        """Time of the last sign of progress."""
        # a proxy for the internet cannot reach servers of a private network
        self._client = open_client(self.url, key=read_key(KEY), uses_proxy=False, idle_s=IDLE_S)

    def label_of(self, version: str) -> str:
        """The label of a version on this server, by which two servers behind one address are told
        apart."""
        return f"{version}-r{self.number}"

    def admit(self, label: str) -> None:
        """Sample from the weights ``label``. Rows that were requested of older ones may come from
        these."""
        self.labels = dict([*self.labels.items(), (label, version_of(label))][-LABELS_KEPT:])
        self.label = label
        self.why = ""
        self.failures = 0
        self.begin_work()  # it was paused: its rows begin to move only now

    def begin_work(self) -> None:
        """Measure progress from now on."""
        self.progress_at = time.monotonic()
        self.tokens = None

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

    async def control(self, path: str, body: Any = None) -> Any:
        return await self.request("POST", path, body, timeout_s=self.timeout_s)

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
        if self.is_lora:
            body["model"] = label
        answer = await self.request("POST", GENERATE, body, timeout_s=None)
        with _expected("tokens, log-probs and versions"):
            row = _read_row(answer, int(params["max_tokens"]), is_lora=self.is_lora)
        oldest = self.labels.get(label, math.inf)
        if any(name != label and self.labels.get(name, -1) <= oldest for name in row.versions):
            held = sorted(set(row.versions))
            raise ServerError(
                f"it samples from the weights {held}, and {label!r} was published", is_lasting=True
            )
        return row

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
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
        answers = await asyncio.gather(*(self.request("POST", GENERATE, body) for body in bodies))
        scores = []
        with _expected("log-probs of a prompt"):
            for ids, answer in zip(rows, answers, strict=True):
                pairs = zip(ids, answer["prompt_logprobs"], strict=True)
                scores.append([float(entry[str(t)]["logprob"]) for t, entry in pairs if entry])
        return scores

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

    async def load(self, folder: Path, label: str) -> None:
        """Load new weights and name them. Where it fails, the server stays paused: it may hold half
        of them."""
        load_s = self.timeout_s + sum(f.stat().st_size for f in folder.iterdir()) / LOADED_PER_S
        was_asleep = self.is_asleep
        # its cache wakes last; before the pause, which it ends where nothing was asleep
        await self._wake("" if self.is_lora else "?tags=weights")
        # rows of any rank may be under way, with lag
        await self.control("/pause?mode=abort&clear_cache=true")
        if self.is_lora:
            await self._load_adapter(folder, label, load_s)
        else:
            if not was_asleep:
                await self._reset()
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self.request("POST", "/collective_rpc", call, timeout_s=load_s)
            # a reload does not clear it; blocks of older weights were read for 17 versions
            # (NeMo-RL#4018)
            cleared = await self.control("/reset_prefix_cache")
            if not cleared.get("success"):
                raise ServerError("/reset_prefix_cache did not clear the prefix cache")
            # after the load, never before it
            await self.control("/update_weight_version", {"new_version": label})
            await self._wake("?tags=kv_cache")
        self.is_asleep = False
        await self.control("/resume")
        self.loaded = label

    async def _load_adapter(self, folder: Path, label: str, load_s: float) -> None:
        """Load an adapter under a name of its own, and forget the one before."""
        adapter = {"lora_name": label, "lora_path": str(folder)}
        await self.request("POST", "/v1/load_lora_adapter", adapter, timeout_s=load_s)
        before, self.loaded = self.loaded, label
        if before is not None:
            try:
                await self.control("/v1/unload_lora_adapter", {"lora_name": before})
            except ServerError as error:
                if not error.status:  # a server that was started again does not know it
                    raise

    async def _reset(self) -> None:
        """Zero all parameters (vLLM 0.32 and newer), so that what a load leaves out shows."""
        if not self.can_reset:
            return
        try:
            await self.control("/weight_checker", {"action": "reset"})
        except ServerError as error:
            if error.status not in MISSING:
                raise
            self.can_reset = False

    async def _wake(self, tags: str) -> None:
        if self.is_asleep:
            await self.control(f"/wake_up{tags}")


@contextmanager
def _expected(what: str) -> Iterator[None]:
    """Raise ServerError for an answer that cannot be read."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"{GENERATE} sent an answer without {what} ({type(error).__name__}: {error})"
        ) from None


def _read_row(answer: Any, limit: int, *, is_lora: bool) -> SampledRow:
    """A sampled row of at most ``limit`` tokens; ServerError unless it is whole."""
    choice = answer["choices"][0]
    tokens = list(choice["token_ids"] or ())
    content = (choice["logprobs"] or {}).get("content") or ()
    logprobs = [float(entry["logprob"]) for entry in content]
    reason = choice["finish_reason"]
    versions: list[str] = []
    for span in choice["weight_versions"] or ():
        count = int(span["end"]) - int(span["start"])
        versions += [str(span["version"])] * min(count, limit + 1)
    if is_lora:  # an adapter is chosen by its name; the version is that of the base
        versions = [str(answer.get("model"))] * len(tokens)
    highest = max(logprobs, default=0.0)
    is_ended = reason == "abort" or (tokens and reason in ("stop", "length"))
    is_named = [int(entry["token_id"]) for entry in content] == tokens
    if not (is_ended and is_named and len(tokens) <= limit and highest <= 1e-3):
        raise ServerError(
            f"{GENERATE} sent {len(tokens)} tokens of at most {limit}, {len(logprobs)} log-probs, "
            f"the highest {highest:.3g}, finish {reason!r}"
        )
    if len(versions) != len(tokens):
        held = f"{len(versions)} of {len(tokens)} tokens"
        raise ServerError(f"{GENERATE} sent the versions of {held}", is_lasting=True)
    # logits that are not finite: vLLM sends CLAMPED and less, the row ends before
    finite = [math.isfinite(logprob) and logprob > CLAMPED for logprob in logprobs]
    if not all(finite):
        length = finite.index(False)
        tokens, logprobs, versions = tokens[:length], logprobs[:length], versions[:length]
        reason = "error"
    logprobs = [min(logprob, 0.0) for logprob in logprobs]  # rounding exceeds 0
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return SampledRow(tokens, logprobs, reason, tuple(versions), details.get("cached_tokens") or 0)


def version_of(label: str) -> int:
    """The version in a label of ``VllmEngine``."""
    return int(label.split("-v")[1].split("-")[0])
