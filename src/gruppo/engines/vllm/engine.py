"""Samples from vLLM servers that hold published copies of the weights."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from gruppo import distributed as dist
from gruppo.engines.vllm.check import check_server
from gruppo.engines.vllm.client import CONNECT_S, Replica, SampledRow, ServerError, version_of
from gruppo.engines.vllm.publish import Publication
from gruppo.engines.vllm.weights import WeightCheck
from gruppo.errors import EngineLost
from gruppo.protocols import Engine
from gruppo.seeds import seed_at
from gruppo.types import Generated, GruppoError, Request, Rollouts, Sampling, TokenBatch

log = logging.getLogger("gruppo")

T = TypeVar("T")

MAX_FAILURES = 3
"""Failed requests in a row after which a server is ejected; a row may fail twice as often on
each."""
MAX_INTERVAL_S = 5.0
"""Between two counts of the tokens that a server has made; and of each count."""
BACK_OFF_S = 0.2
"""Before a request is repeated; doubled each time."""


class VllmEngine(Engine):
    """Spreads groups over servers, and samples again elsewhere what a server does not answer.

    A server is sampled from while it has a ``label``: it was checked to hold the published weights,
    and has answered since. The next ``sync`` tries all servers again.
    """

    concurrency = 32
    """With ``engine.lag``: enough calls for groups to start and to be recorded one by one."""

    def __init__(
        self,
        policy: Any,
        urls: Sequence[str],
        folder: Path,
        *,
        checker: WeightCheck | None = None,
        is_colocated: bool = False,
        timeout_s: float = 60.0,
        max_inflight: int = 512,
    ) -> None:
        self.policy = policy
        self.publication = Publication(folder)
        self.checker = checker
        self.is_colocated = is_colocated
        self.timeout_s = timeout_s
        self.max_inflight = max_inflight
        self.version = 0
        self.label = ""
        # another process's labels differ: a server that an older trainer still feeds is never taken
        # for ours
        self._name = f"gruppo-{_agreed(secrets.token_hex(4))}"
        is_lora = policy.base_sha256 is not None
        self.replicas = [
            Replica(url, number, is_lora=is_lora, timeout_s=timeout_s)
            for number, url in enumerate(urls)
        ]
        self.context = sys.maxsize
        """Tokens of the longest row that every server holds."""
        self.done = self.total = self.repeated = 0
        self._published: Path | None = None
        self._has_published = False
        self._serial = 0
        self._calls = 0
        self._is_publishing = False
        self._loading = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="gruppo-vllm", daemon=True).start()

    def check(self, tokens: int) -> None:
        """Refuse a folder that cannot be written, and servers that do not fit; ``tokens``: the
        longest row."""
        self.publication.write_folder("probe", lambda folder: (folder / "probe").touch())
        self.publication.clear()  # of versions that an earlier process has left, too
        with dist.fail_together():
            if dist.is_main():
                self.context = min(self._run(self._check(one, tokens)) for one in self.replicas)
        self.context = _agreed(self.context)
        if self.checker is not None:
            self.checker.limit(self.context)

    async def _check(self, replica: Replica, tokens: int) -> int:
        return await check_server(
            replica, self.policy, tokens=tokens, is_colocated=self.is_colocated
        )

    # --- sampling ---

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        return self.policy.sample_with(self._generate, requests, sampling, seed=seed)

    def continue_rollouts(
        self, rollouts: Rollouts, replies: Mapping[int, Any], sampling: Any, **how: Any
    ) -> Rollouts:
        return self.policy.continue_with(self._generate, rollouts, replies, sampling, **how)

    def progress(self) -> str:
        """What is being sampled, for the screen; "" if nothing is."""
        if self.done == self.total:
            return ""
        servers = f"{len(self._usable())} of {len(self.replicas)} servers"
        return f"sampled {self.done} of {self.total} rows, {servers}"

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call: servers in use, requests that were repeated, and the check
        of the weights."""
        metrics = {
            "engine/servers_count": float(len(self._usable())),
            "engine/repeated_count": float(self.repeated),
        }
        self.repeated = 0
        return metrics | ({} if self.checker is None else self.checker.metrics())

    def _usable(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.label is not None]

    def _generate(self, batch: TokenBatch, sampling: Sampling, seed: int) -> Generated:
        """Sample the rows of a batch; a ``GenerateTokens`` of policies."""
        rows = self._run(self._sample(batch, sampling, seed))
        joined = list(map(_joined, rows))
        lengths = torch.tensor([len(row.tokens) for row in joined])
        shape = len(rows), max(int(lengths.max()), 1)
        is_sampled = torch.arange(shape[1]) < lengths[:, None]  # [B, T]
        columns = {
            "tokens": (torch.long, [token for row in joined for token in row.tokens]),
            "logprobs": (torch.float32, [x for row in joined for x in row.logprobs]),
            "versions": (torch.long, [version_of(v) for row in joined for v in row.versions]),
        }
        padded = {}
        for name, (dtype, values) in columns.items():
            padded[name] = torch.zeros(shape, dtype=dtype)
            padded[name][is_sampled] = torch.tensor(values, dtype=dtype)
        finish: Any = tuple(row.finish for row in joined)
        return Generated(padded["tokens"], padded["logprobs"], lengths, finish, padded["versions"])

    async def _sample(
        self, batch: TokenBatch, sampling: Sampling, seed: int
    ) -> list[list[SampledRow]]:
        """Sample the rows; each comes in the parts between which new weights were published."""
        rows = self._rows(batch, sampling, seed)
        found: dict[int, list[SampledRow]] = {}
        groups: dict[int, list[int]] = {}
        for number, owner in enumerate(batch.owners.tolist()):
            if rows[number].params["max_tokens"] > 0:
                groups.setdefault(owner, []).append(number)
            else:  # a conversation has filled the context
                found[number] = [SampledRow([], [], "length")]

        async def sample_row(number: int, replica: Replica) -> None:
            found[number] = await self._sample_row(rows[number], replica)

        async def sample_group(members: Sequence[int]) -> None:
            # one server for a prompt, which it reads once
            replica = await self._choose(len(members), rows[members[0]].draw)
            await _all(sample_row(number, replica) for number in members)

        # else other calls are at work; one that was interrupted has left its rows
        if not self._calls:
            self.done = self.total = 0
            for replica in self.replicas:
                replica.inflight = 0
            self._watcher = asyncio.create_task(self._watch())
        self._calls += 1
        self.total += len(rows)
        try:
            await _all(sample_group(members) for members in groups.values())
            return [found[number] for number in range(len(rows))]
        finally:
            self._calls -= 1
            if not self._calls:
                self.done = self.total
                if self._watcher is not None:
                    self._watcher.cancel()

    def _rows(self, batch: TokenBatch, sampling: Sampling, seed: int) -> list[_Row]:
        """What is requested for each row of a batch."""
        common = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(self.policy.stop_ids),
            "logprobs": 0,
            # a stop text may name special tokens; without stop texts, nothing is decoded
            "skip_special_tokens": False,
            "detokenize": bool(sampling.stop),
            "watermarking": False,
        }
        rows = []
        for number, owner in enumerate(batch.owners.tolist()):
            ids = batch.prompts[owner].tolist()
            if batch.prefixes is not None:
                ids += batch.prefixes[number].tolist()
            limit = sampling.max_actions if batch.limits is None else int(batch.limits[number])
            params = common | {"max_tokens": min(limit, self.context - len(ids))}
            draw, sample = batch.addresses[number]
            start = batch.starts[number] if batch.starts else 0
            rows.append(_Row(ids, params, (seed, "server", draw, sample), draw, start))
        return rows

    async def _sample_row(self, row: _Row, replica: Replica) -> list[SampledRow]:
        """Sample a row on this server, or on others if it fails there. It goes on after weights
        were published."""
        failures = 0
        parts: list[SampledRow] = []
        while True:
            if replica.label is None:
                replica.inflight -= 1
                replica = await self._choose(1, row.draw)
            done = [token for part in parts for token in part.tokens]
            try:
                part = await self._request(row, done, replica)
            except _Ejected:
                self.repeated += 1
                continue
            except ServerError as error:
                failures += 1
                replica = await self._replica_after(error, failures, replica)
                continue
            replica.failures = 0
            replica.progress_at = time.monotonic()
            is_cut = part.finish == "abort"
            # a text that ends the row would not be found where it lies across two requests
            parts = [] if is_cut and row.params["stop"] else [*parts, part]
            if is_cut and sum(len(part.tokens) for part in parts) < row.params["max_tokens"]:
                replica.inflight -= 1
                replica = await self._choose(1, row.draw)
                continue
            replica.inflight -= 1
            self.done += 1
            self._notify()
            return parts

    async def _request(self, row: _Row, done: list[int], replica: Replica) -> SampledRow:
        """Sample what is left of a row; ``_Ejected`` where its server is left out meanwhile."""
        label = replica.label
        # one generator a request: with n > 1 a repeated one would draw other samples
        params = row.params | {
            "seed": seed_at(*row.address, row.start + len(done)),
            "max_tokens": row.params["max_tokens"] - len(done),
        }
        task = asyncio.ensure_future(replica.sample(row.ids + done, params, label or ""))
        replica.tasks.add(task)
        try:
            part = await task
        except asyncio.CancelledError:
            task.cancel()
            if (current := asyncio.current_task()) is None or current.cancelling():
                raise
            raise _Ejected from None
        finally:
            replica.tasks.discard(task)
        # None: another row of the server has just had it left out
        is_current = replica.label in (label, None) and not self._is_publishing
        if part.finish == "abort" and is_current:
            raise ServerError("it aborted a row that no publish has interrupted")
        return part

    async def _replica_after(self, error: ServerError, failures: int, replica: Replica) -> Replica:
        """The server that samples a row after it has failed ``failures`` times, at last on
        ``replica``."""
        self.repeated += 1
        if error.status == 400:
            raise GruppoError(f"the server {replica.url} refuses a request: {error}.") from None
        # also after they were given the weights again
        if failures == 2 * MAX_FAILURES * len(self.replicas):
            raise EngineLost(
                f"a request failed {failures} times, at last on {replica.url}: {error}."
            ) from None
        replica.failures += 1
        if error.is_lasting or replica.failures >= MAX_FAILURES:
            await self._eject(replica, str(error))
        await asyncio.sleep(BACK_OFF_S * 2 ** min(failures, 4))
        others = [other for other in self._usable() if other is not replica]
        if others:
            replica.inflight -= 1
            self._notify()
            replica = min(others, key=lambda other: other.inflight)
            replica.inflight += 1
        return replica

    def _notify(self) -> None:
        """Wake what waits: a server has room again, or is out, or all hold new weights.

        In the order of draws: a trainer with lag waits for the earliest. In the order of calls,
        which threads make, its first 48 prompts of 240 were whole after 125 s of 130.
        """
        waiting, self._waiting = sorted(self._waiting, key=lambda one: one[:2]), []
        for *_, future in waiting:
            if not future.done():  # cancelled
                future.set_result(None)

    async def _choose(self, count: int, draw: int) -> Replica:
        """Return the server with the fewest rows once it has room for ``count`` more, which then
        count as its own."""
        while True:
            usable = self._usable()
            if not usable and not self._is_publishing:
                await self._revive()
                continue
            if not self._is_publishing:
                replica = min(usable, key=lambda replica: replica.inflight)
                # a group that is larger than max_inflight starts on an idle server
                if not replica.inflight or replica.inflight + count <= self.max_inflight:
                    if not replica.inflight:  # how long it was idle is no sign that it hangs
                        replica.begin_work()
                    replica.inflight += count
                    return replica
            future = self._loop.create_future()
            self._waiting.append((draw, len(self._waiting), future))
            await future

    # --- failures ---

    async def _eject(self, replica: Replica, why: str) -> None:
        """Sample nothing more from a server until weights are published to it; what it was sampling
        goes elsewhere.

        Never waits; a coroutine because the loop owns the rows and what waits.
        """
        if replica.label is None:
            return
        replica.label = None
        replica.why = why
        if self.checker is not None:
            self.checker.doubt(replica)
        log.warning("the server %s is left out: %s", replica.url, why)
        for task in replica.tasks:
            task.cancel()
        self._notify()

    async def _watch(self) -> None:
        """Eject servers that hang."""
        interval_s = min(self.timeout_s / 4, MAX_INTERVAL_S)
        while True:
            await asyncio.sleep(interval_s)
            # the first rank pauses the servers to publish, under the rows of all ranks
            if not self._is_publishing:
                busy = [replica for replica in self._usable() if replica.inflight]
                await asyncio.gather(*(self._watch_one(replica, interval_s) for replica in busy))

    async def _watch_one(self, replica: Replica, interval_s: float) -> None:
        before = replica.tokens
        # not /health, which answers while the engine behind it is dead
        with suppress(ServerError, ValueError):
            replica.tokens = await replica.count_tokens(timeout_s=interval_s)
        if before is not None and replica.tokens != before:
            replica.progress_at = time.monotonic()
        is_late = time.monotonic() - replica.progress_at > self.timeout_s
        if is_late and replica.inflight and not self._is_publishing:
            await self._eject(replica, f"no token for {self.timeout_s:g} s")

    async def _revive(self) -> None:
        """Wait until a server is back, and load the published weights again; EngineLost after
        ``timeout_s``."""
        async with self._loading:
            give_up_at = time.monotonic() + self.timeout_s
            while not self._usable() and not self._is_publishing:
                if time.monotonic() > give_up_at or self._published is None:
                    raise self._lost()
                try:
                    async with asyncio.timeout(self.timeout_s):
                        await _all(map(self._admit, self.replicas))
                except TimeoutError:
                    raise self._lost() from None
                await asyncio.sleep(min(1.0, self.timeout_s / 10))

    def _lost(self) -> EngineLost:
        reasons = "; ".join(f"{replica.url}: {replica.why}" for replica in self.replicas)
        return EngineLost(f"no vLLM server is left ({reasons}).")

    # --- weights ---

    def sync(self, policy: Any, version: int) -> None:
        """Publish the weights, and return once every server that is sampled from was checked to
        hold them.

        Rows that are being sampled wait, and go on with the new weights.
        """
        self._is_publishing = True
        self.policy = policy
        self._serial += 1  # a version may be published again, after a return to older weights
        self.label = f"{self._name}-v{version}-{self._serial}"
        checker = self.checker
        try:
            if checker is not None:
                checker.publish(policy)
                self._send_canary(policy, filter(checker.needs_canary, self.replicas))
            self._published = self._write(policy, self.label)
            self._on_main(self._admit, self.replicas)
            if checker is not None:
                # the limits refuse a good server now and then; the canary is certain
                refused = [self.replicas[number] for number in checker.refused]
                self._on_main(self._admit, self._send_canary(policy, refused))
                self._check_sampled(policy, checker)
            self._share_labels()
            self._has_published = True
            self.version = version
        finally:
            self._is_publishing = False
            self._loop.call_soon_threadsafe(self._notify)

    def _share_labels(self) -> None:
        """Tell all ranks which servers hold the published weights; EngineLost if none does."""
        reasons = _agreed(["" if one.label is not None else one.why for one in self.replicas])
        for replica, why in zip(self.replicas, reasons, strict=True):
            replica.loaded = replica.label_of(self.label)
            replica.admit(replica.loaded)
            if why:
                replica.label = None
                replica.why = why
        if all(reasons):
            raise self._lost()

    def _check_sampled(self, policy: Any, checker: WeightCheck) -> None:
        """Eject newly admitted servers that report log-probs of another distribution."""
        sampled, checker.sampled = checker.sampled, {}
        admitted = [
            (number, [(row.tokens, row.logprobs) for row in rows])
            for number, rows in sampled.items()
            if rows
        ]
        for number, rows in _agreed(admitted):
            if why := checker.check_sampled(policy, rows):
                self._run(self._eject(self.replicas[number], why))

    def sleep(self) -> None:
        """Have servers on this device leave its memory to the trainer until the next ``sync``."""
        if self.is_colocated:
            self._on_main(self._sleep, self._usable())

    async def _sleep(self, replica: Replica) -> None:
        replica.is_asleep = True
        level = 1 if replica.is_lora else 2  # the base of an adapter is kept on the CPU
        try:
            await replica.control(f"/sleep?level={level}&mode=abort")
        except ServerError as error:
            await self._eject(replica, str(error))

    def _write(self, policy: Any, label: str) -> Path:
        """Write the weights, or the adapter, to a folder."""
        if policy.base_sha256 is not None:
            folder = self.publication.write_folder(label, policy.save)
        else:
            folder = self.publication.write(label, policy.served_weights(), policy.served_config())
        if self.is_colocated and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the update has left is room for the servers' cache
        return folder

    def _on_main(
        self, call: Callable[[Replica], Coroutine[Any, Any, None]], replicas: Iterable[Replica]
    ) -> None:
        """Call servers at once, from the first rank."""

        async def call_all() -> None:  # not while a call of generate loads the weights of before
            async with self._loading:
                await _all(map(call, replicas))

        with dist.fail_together():
            if dist.is_main():
                self._run(call_all())

    def _send_canary(self, policy: Any, replicas: Iterable[Replica]) -> list[Replica]:
        """Have servers load weights with noise in every tensor, and compare; return the servers.
        The first rank's ``replicas`` count."""
        assert self.checker is not None
        numbers = _agreed([replica.number for replica in replicas])
        chosen = [self.replicas[number] for number in numbers]
        if chosen:
            self._serial += 1
            label = f"{self._name}-canary-{self._serial}"
            with self.checker.perturbed(policy):
                folder = self._write(policy, label)
                self._on_main(lambda replica: self._try_canary(replica, folder, label), chosen)
        return chosen

    async def _try_canary(self, replica: Replica, folder: Path, label: str) -> None:
        assert self.checker is not None
        why_before = replica.why
        replica.label = None
        replica.why = ""
        label = replica.label_of(label)
        try:
            await self._load(replica, folder, label)
            self.checker.judge_canary(replica, await self.checker.ask(replica, label))
        except ServerError as error:
            self.checker.forget(replica)
            replica.why = str(error)
            if replica.why != why_before:
                self._warn(replica)

    async def _admit(self, replica: Replica) -> None:
        """Load the published weights into a server, and sample from it once it was checked to hold
        them."""
        assert self._published is not None
        was_usable = replica.label is not None
        was_out = bool(replica.why)
        replica.label = None
        if self.checker is not None and replica.number not in self.checker.standings:
            return
        label = replica.label_of(self.label)
        try:
            await self._load(replica, self._published, label)
            if self.checker is not None:
                self.checker.judge(replica, await self.checker.ask(replica, label))
        except ServerError as error:
            replica.why = str(error)
            if self.checker is not None:
                self.checker.doubt(replica)
            if was_usable:
                self._warn(replica)
            return
        if was_out and self._has_published:
            log.info("the server %s is back", replica.url)
        replica.admit(label)

    def _warn(self, replica: Replica) -> None:
        log.warning("the server %s is left out of %s: %s", replica.url, self.label, replica.why)

    async def _load(self, replica: Replica, folder: Path, label: str) -> None:
        await replica.request("GET", "/health", timeout_s=CONNECT_S)
        try:
            await replica.load(folder, label)
        except ServerError as error:
            # what it cannot load at first, it never can
            if error.status and not self._has_published:
                raise GruppoError(
                    f"""the server {replica.url} cannot load the weights from {folder}: {error}. It
                        needs the run's model, and to read that folder under the same path""",
                    option="engine.publish_dir",
                    advice="to one that both machines share",
                ) from None
            raise

    # --- the event loop ---

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's thread; a signal that interrupts the wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        async def close() -> None:
            calls = asyncio.all_tasks() - {asyncio.current_task()}  # of threads that sample ahead
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await asyncio.gather(*(replica.close() for replica in self.replicas))

        if self._loop.is_running():
            self._run(close())
            self._loop.call_soon_threadsafe(self._loop.stop)
        self.publication.clear()


class _Ejected(Exception):
    """The server of a request was left out."""


@dataclass(frozen=True)
class _Row:
    """What is requested of a server for a row."""

    ids: list[int]
    params: dict[str, Any]
    address: tuple[int | str, ...]
    draw: int
    start: int
    """Tokens that were sampled in the row before."""


def _joined(parts: Sequence[SampledRow]) -> SampledRow:
    """One row from the parts between which new weights were published."""
    # paused at its last token
    finish = "length" if parts[-1].finish == "abort" else parts[-1].finish
    tokens = [token for part in parts for token in part.tokens]
    logprobs = [logprob for part in parts for logprob in part.logprobs]
    versions = tuple(label for part in parts for label in part.versions)
    return SampledRow(tokens, logprobs, finish, versions=versions)


def _agreed(value: T) -> T:
    """The first rank's value, on all ranks."""
    return json.loads(dist.all_gather(json.dumps(value).encode())[0])


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once; where one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
