"""Asks a judge's endpoint: cache, budget, retries, and counts of all that happened."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.http import ServerError, open_client, read_key, request_json, retry_wait_s
from gruppo.integrity import json_lines, parse_json, read_json, replace_file
from gruppo.loading import visible
from gruppo.rewards.judge_file import JudgeConfig
from gruppo.timeouts import CallError
from gruppo.trust import state_folder
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

COUNTS = ["calls", "retries", "cache_hits", "input_tokens", "output_tokens"]
COUNTS += ["failed", "timeouts", "rate_limited", "errors", "invalid", "over_budget"]
"""Counters, for metrics; failed: questions without a verdict."""
MAX_COUNT = 1 << 40
"""Of tokens in one answer, or of a run. What is beyond it is no count, and may not fit in a
float."""


class JudgeClient:
    """Answers of one endpoint to requests with a JSON schema.

    A verdict is kept on disk under the SHA-256 of its request. ``counts`` begin with what the run
    has used before.
    """

    def __init__(self, config: JudgeConfig, file: Path) -> None:
        self.config, self.name = config, file.stem
        self._key = read_key(config.key_env) if config.key_env else ""
        if config.key_env and not self._key:
            raise GruppoError(f"""{file}: the endpoint {config.endpoint} needs the key in the
                environment variable {config.key_env}, which is not set. Set it, or remove key_env
                for a server without a key.""")
        self.counts = dict.fromkeys(COUNTS, 0)
        self._limits = {"calls": config.budget.calls, "tokens": config.budget.tokens}
        self._usage_file: Path | None = None
        self._not_before = 0.0
        """When a rate limit ends, for all requests."""
        self._unanswered = 0
        """Questions in a row that the endpoint has not answered, within a batch."""
        self._has_warned = False
        self._jitter = random.Random(
            0
        )  # a generator of its own: rewards do not change the run's random numbers
        self._verdicts = dict[str, Any]()
        self._cache_file: Path | None = None
        if config.cache is not None:
            try:
                self._read_cache(file.absolute().parent)
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
                problem = "its cache cannot be used (%s). Every answer is asked for again."
                log.warning(f"judge %s: {problem}", self.name, error)

    def _read_cache(self, beside: Path) -> None:
        """Read one file for each endpoint and model; rubric and seed are in the keys, SHA-256 of
        requests."""
        config = self.config
        own = beside / Path(config.cache).expanduser() if config.cache else None
        folder = own or state_folder() / "judges"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = f"{config.endpoint.rstrip('/')} {config.model}"
        path = folder / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.jsonl"
        for line in json_lines(path) if path.exists() else ():
            with suppress(ValueError, KeyError, TypeError):  # cut off when a process was killed
                entry = parse_json(line)
                self._verdicts.setdefault(entry["key"], entry["verdict"])
        self._cache_file = path

    def _keep(self, key: str, verdict: Any) -> None:
        self._verdicts[key] = verdict
        if self._cache_file is None:
            return
        try:  # appended whole, so that processes can share it
            with self._cache_file.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"key": key, "verdict": verdict}))
        except OSError as error:
            problem = "its cache cannot be written (%s); it is kept in memory."
            log.warning(f"judge %s: {problem}", self.name, error)
            self._cache_file = None

    # --- what a run has used ---

    def attach(self, folder: Path) -> None:
        """Count on from what the run in ``folder`` has used, and record there what is used. A
        collective.

        Each answer is recorded at once: what a killed run has paid for is not in its checkpoint.
        The budget that is left is divided among the ranks.
        """
        rank, world = dist.rank(), dist.world_size()
        mine = [
            path
            for path in folder.glob("*.json")
            if path.stem.isdecimal() and int(path.stem) % world == rank
        ]
        for path in mine:  # those of more ranks, if there were more before
            with suppress(OSError, ValueError):
                self.counts = {
                    name: count + _count(read_json(path).get(name))
                    for name, count in self.counts.items()
                }
        folder.mkdir(parents=True, exist_ok=True)
        self._usage_file = folder / f"{rank}.json"
        self._save_usage()
        for path in {*mine} - {self._usage_file}:
            path.unlink(missing_ok=True)
        spent = self._spent()
        total = dist.all_sum(torch.tensor([*spent.values()], dtype=torch.float64)).tolist()
        for name, used in zip(spent, map(int, total), strict=True):
            if (limit := getattr(self.config.budget, name)) is not None:
                left = max(limit - used, 0)
                self._limits[name] = spent[name] + left // world + (rank < left % world)

    def _spent(self) -> dict[str, int]:
        return {
            "calls": self.counts["calls"],
            "tokens": self.counts["input_tokens"] + self.counts["output_tokens"],
        }

    def _save_usage(self) -> None:
        if self._usage_file is not None:
            with suppress(GruppoError):  # a full disk ends the run elsewhere, with a message
                replace_file(self._usage_file, json.dumps(self.counts), is_synced=False)

    # --- requests ---

    async def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the verdict of each request, or the ``CallError`` why there is none. Equal
        requests are sent once."""
        place = self.config.endpoint.rstrip("/")
        keys = [
            hashlib.sha256(json.dumps([place, body], sort_keys=True).encode()).hexdigest()
            for body in bodies
        ]
        unique = dict(zip(keys, bodies, strict=True))
        slots = asyncio.Semaphore(self.config.concurrency)
        self._unanswered = 0
        async with open_client(place, key=self._key) as client:
            requests = (self._answer(client, slots, key, body) for key, body in unique.items())
            found = dict(zip(unique, await asyncio.gather(*requests), strict=True))
        return [found[key] for key in keys]

    async def _answer(
        self, client: Any, slots: asyncio.Semaphore, key: str, body: Mapping[str, Any]
    ) -> Any:
        schema = body["response_format"]["json_schema"]["schema"]
        if key in self._verdicts and fits(self._verdicts[key], schema):
            self.counts["cache_hits"] += 1
            return self._verdicts[key]
        async with slots:
            try:
                verdict = self._read(await self._post(client, body), schema)
            except CallError as error:
                self.counts["failed"] += 1
                return error
            finally:
                self._save_usage()
        self._keep(key, verdict)
        return verdict

    async def _post(self, client: Any, body: Mapping[str, Any]) -> Any:
        """Send a request, again where that may help; ``CallError`` where there is no answer."""
        attempt = 0
        while True:
            while (wait_s := self._not_before - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            self._refuse_to_ask()
            self.counts["calls"] += 1
            self.counts["retries"] += attempt > 0
            try:
                reply = await request_json(
                    client, "POST", "/chat/completions", body, timeout_s=self.config.timeout_s
                )
            except ServerError as error:
                await asyncio.sleep(self._wait_after(error, attempt))
                attempt += 1
            else:
                self._unanswered = 0
                return reply

    def _refuse_to_ask(self) -> None:
        """Raise CallError if the budget is spent, or the endpoint answers nothing."""
        for name, spent in self._spent().items():
            limit = self._limits[name]
            if limit is not None and spent >= limit:
                self.counts["over_budget"] += 1
                total = f"{getattr(self.config.budget, name):,} {name}"
                advice = f"raise budget.{name} in {self.name}.toml"
                reason = f"the judge's budget of {total} is spent; {advice}"
                raise CallError("exception", reason, "budget")
        if self._unanswered >= self.config.concurrency:  # or each row would cost its retries
            reason = f"not asked: {self._unanswered} questions in a row had no answer"
            raise CallError("exception", f"{reason} from {self.config.endpoint}", "unanswered")

    def _wait_after(self, error: ServerError, attempt: int) -> float:
        """Seconds to wait before the next attempt; raises CallError if there is none."""
        is_limit = error.status == 429
        kind = "timeouts" if error.is_timeout else "rate_limited" if is_limit else "errors"
        self.counts[kind] += 1
        wait_s = retry_wait_s(error, attempt, self._jitter.uniform(0.5, 1.0))
        if wait_s is None or attempt == self.config.retries:
            self._unanswered += 1
            # a server may quote the key
            text = str(error).replace(self._key, "***") if self._key else str(error)
            reason = f"the judge {self.config.endpoint}{visible(text)}"
            raise CallError("timeout" if error.is_timeout else "exception", reason, error.status)
        if error.retry_after_s is not None:
            self._not_before = time.monotonic() + wait_s
        return wait_s

    def _read(self, reply: Any, schema: Mapping[str, Any]) -> Any:
        """Return the verdict in a reply; ``CallError`` unless it is JSON of the schema and nothing
        else.

        JSON within prose is not looked for: the judge may quote what the policy wrote.
        """
        usage = reply.get("usage") if isinstance(reply, dict) else None
        usage = usage if isinstance(usage, dict) else {}
        for name, field in (
            ("input_tokens", "prompt_tokens"),
            ("output_tokens", "completion_tokens"),
        ):
            count = usage.get(field)
            self.counts[name] += _count(count)
            if _count(count) != count and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "judge %s: the endpoint reports no usable number of %s, so tokens and cost are "
                    "not counted right, "
                    "and a budget of tokens has no effect. Set budget.calls.",
                    *(self.name, field),
                )
        try:
            choice = reply["choices"][0]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            text, finish = None, None
        with suppress(ValueError, TypeError):
            if fits(verdict := parse_json(text), schema):
                return verdict
        self.counts["invalid"] += 1
        cut = ", cut off at max_tokens: raise request.max_tokens" if finish == "length" else ""
        raise CallError(
            "exception",
            f"the judge's answer is not the JSON asked for{cut}: {visible(str(text))[:120]!r}",
        )


def _count(value: Any) -> int:
    """A number of calls or tokens that somebody else wrote; 0 for anything that is none."""
    return value if isinstance(value, int) and 0 < value <= MAX_COUNT else 0


def fits(verdict: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a verdict has the schema's properties and no others, each a text or one of its
    choices."""
    properties = schema["properties"]
    if not isinstance(verdict, dict) or verdict.keys() != properties.keys():
        return False
    pairs = ((verdict[name], rule.get("enum")) for name, rule in properties.items())
    # The type too: True is in a list of points, and so is 3.0.
    return all(
        isinstance(x, str) if enum is None else type(x) is type(enum[0]) and x in enum
        for x, enum in pairs
    )
