"""Requests to a judge's endpoint, with a cache, a limit of calls and retries."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import math
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
from gruppo.timeouts import CallError, FailureKind
from gruppo.trust import state_folder
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

COUNTS = ("calls", "retries", "cache_hits", "input_tokens", "output_tokens", "failed")
"""Counters of a run, for metrics; failed: questions without a verdict."""
MAX_COUNT = 1 << 40
"""Larger counts, in an answer or a file, are ignored: they may not fit in a float."""
_ODD = (KeyError, IndexError, TypeError, AttributeError)  # of an answer of another form


class JudgeClient:
    """Verdicts of one endpoint, each kept on disk under the SHA-256 of its request.

    ``counts`` continue those of the run that it is attached to.
    """

    def __init__(self, config: JudgeConfig, file: Path) -> None:
        self.config, self.name = config, file.stem
        self._url = config.endpoint.rstrip("/")
        self._key = read_key(config.key_env) if config.key_env else ""
        if config.key_env and not self._key:
            raise GruppoError(f"""{file}: the endpoint {config.endpoint} needs the key in the
                environment variable {config.key_env}, which is not set. Set it, or remove key_env
                for a server without a key.""")
        self.counts = dict.fromkeys(COUNTS, 0)
        self._max_calls = math.inf if config.max_calls is None else config.max_calls
        """Of this rank."""
        self._usage_file: Path | None = None
        self._unanswered = 0
        """Questions in a row without an answer, in this batch."""
        self._verdicts = dict[str, Any]()
        self._cache_file: Path | None = None
        try:
            self._read_cache()
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            log.warning("judge %s: its cache cannot be used (%s).", self.name, error)

    def _read_cache(self) -> None:
        folder = state_folder() / "judges"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{_sha256(f'{self._url} {self.config.model}')[:16]}.jsonl"
        for line in json_lines(path) if path.exists() else ():
            with suppress(ValueError, KeyError, TypeError):  # cut off when a process was killed
                entry = parse_json(line)
                self._verdicts.setdefault(entry["key"], entry["verdict"])
        self._cache_file = path

    def attach(self, folder: Path) -> None:
        """Continue the counts of the run in ``folder``, and save them there after each answer. A
        collective.

        What a killed run has paid for is not in its checkpoint. Each rank continues the counts of
        its own file, and of ranks that are no more. The remaining calls are divided among the
        ranks.
        """
        rank, world = dist.rank(), dist.world_size()
        self._usage_file = folder / f"{rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            with suppress(OSError, ValueError, AttributeError):
                if int(path.stem) % world == rank:
                    saved = read_json(path)
                    for name in COUNTS:
                        self.counts[name] += _count(saved.get(name))
                    if path != self._usage_file:
                        path.unlink()
        self._save_usage()
        own = self.counts["calls"]
        total = int(dist.all_sum(torch.tensor([own], dtype=torch.float64)))
        if self.config.max_calls is not None:
            left = max(self.config.max_calls - total, 0)
            self._max_calls = own + left // world + (rank < left % world)

    def _save_usage(self) -> None:
        if self._usage_file is not None:
            with suppress(GruppoError):  # a full disk ends the run elsewhere, with a message
                replace_file(self._usage_file, json.dumps(self.counts), is_synced=False)

    async def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the verdict of each request, or a ``CallError``. Equal requests are sent once."""
        keys = [_sha256(json.dumps([self._url, body], sort_keys=True)) for body in bodies]
        unique = dict(zip(keys, bodies, strict=True))
        slots = asyncio.Semaphore(self.config.concurrency)
        self._unanswered = 0
        async with open_client(self._url, key=self._key) as client:
            requests = (self._answer(client, slots, key, body) for key, body in unique.items())
            verdicts = dict(zip(unique, await asyncio.gather(*requests), strict=True))
        return [verdicts[key] for key in keys]

    async def _answer(
        self, client: Any, slots: asyncio.Semaphore, key: str, body: Mapping[str, Any]
    ) -> Any:
        schema = body["response_format"]["json_schema"]["schema"]
        if fits(self._verdicts.get(key), schema):
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
        self._verdicts[key] = verdict
        if self._cache_file is not None:
            # Appended whole, so that processes can share the file.
            with suppress(OSError), self._cache_file.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"key": key, "verdict": verdict}))
        return verdict

    async def _post(self, client: Any, body: Mapping[str, Any]) -> Any:
        """Send a request, several times if that may help; CallError if there is no answer."""
        route, timeout_s = "/chat/completions", self.config.timeout_s
        for attempt in itertools.count():
            self._check_limits()
            self.counts["calls"] += 1
            self.counts["retries"] += attempt > 0
            try:
                reply = await request_json(client, "POST", route, body, timeout_s=timeout_s)
            except ServerError as error:
                wait_s = retry_wait_s(error, attempt)
                if wait_s is None or attempt == self.config.retries:
                    raise self._unanswered_question(error) from None
                await asyncio.sleep(wait_s)
            else:
                self._unanswered = 0
                return reply

    def _check_limits(self) -> None:
        """Raise CallError if all calls are used up, or the endpoint does not answer."""
        if self.counts["calls"] >= self._max_calls:
            reason = f"the judge's {self.config.max_calls:,} calls are used up"
            advice = f"raise max_calls in {self.name}.toml"
            raise CallError("exception", f"{reason}; {advice}", "budget")
        if self._unanswered >= self.config.concurrency:  # or each row would cost its retries
            reason = f"not asked: {self._unanswered} questions in a row had no answer"
            raise CallError("exception", f"{reason} from {self._url}", "unanswered")

    def _unanswered_question(self, error: ServerError) -> CallError:
        self._unanswered += 1
        text = visible(str(error))
        if self._key:  # a server may quote the key
            text = text.replace(self._key, "***")
        kind: FailureKind = "timeout" if error.is_timeout else "exception"
        return CallError(kind, f"the judge {self._url}{text}", error.status)

    def _read(self, reply: Any, schema: Mapping[str, Any]) -> Any:
        """Return the verdict in a reply; CallError unless it is JSON of the schema and nothing
        else.

        JSON within prose is not looked for: the judge may quote what the policy wrote.
        """
        with suppress(*_ODD):
            self.counts["input_tokens"] += _count(reply["usage"].get("prompt_tokens"))
            self.counts["output_tokens"] += _count(reply["usage"].get("completion_tokens"))
        text = finish = None
        with suppress(*_ODD):
            text = reply["choices"][0]["message"]["content"]
            finish = reply["choices"][0].get("finish_reason")
        with suppress(ValueError, TypeError):
            verdict = parse_json(text)  # type: ignore[arg-type]
            if fits(verdict, schema):
                return verdict
        cut = ", cut off at max_tokens: raise request.max_tokens" if finish == "length" else ""
        problem = f"the judge's answer is not the JSON asked for{cut}: {visible(str(text))[:120]!r}"
        raise CallError("exception", problem)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _count(value: Any) -> int:
    """A number of calls or tokens that somebody else wrote; 0 for anything else."""
    return value if type(value) is int and 0 < value <= MAX_COUNT else 0


def fits(verdict: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a verdict has the schema's properties and no others, each a string or one of its
    choices."""
    rules = schema["properties"]
    if not isinstance(verdict, dict) or verdict.keys() != rules.keys():
        return False
    for name, rule in rules.items():
        # As JSON: True equals 1, and so does 1.0.
        choices = map(json.dumps, rule.get("enum", ()))
        is_text = "enum" not in rule and isinstance(verdict[name], str)
        if not is_text and json.dumps(verdict[name]) not in choices:
            return False
    return True
