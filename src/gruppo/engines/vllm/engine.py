"""Samples from vLLM servers that hold published copies of the weights."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from gruppo import distributed as dist
from gruppo.engines.vllm.check import check_server
from gruppo.engines.vllm.client import CONNECT_S, Replica, SampledRow, ServerError, version_of
from gruppo.engines.vllm.prove import Proof
from gruppo.engines.vllm.publish import Publication
from gruppo.errors import EngineLost
from gruppo.protocols import Engine
from gruppo.seeds import seed_at
from gruppo.types import Generated, GruppoError, Request, Rollouts, Sampling, TokenBatch

log = logging.getLogger("gruppo")

T = TypeVar("T")
Ask = Callable[[Replica, Path | None], Coroutine[Any, Any, None]]
"""Gives a server the weights of a folder, or has it receive them by NCCL."""

MAX_FAILURES = 3
"""Failed requests in a row after which a server is ejected; a row may fail twice as often on
each."""
MAX_INTERVAL_S = 5.0
"""Between two looks at the tokens that a server has counted; and of each look."""
SLOW_FACTOR = 8
"""How much slower than others a server is, row by row, that is left out when all others have
nothing else to do."""
BACK_OFF_S = 0.2
"""Before a request is repeated; doubled each time."""


class VllmEngine(Engine):
    """Spreads groups over servers, and samples again elsewhere what a server does not answer.

    A server is sampled from while it has a ``label``: it was proved to hold the published weights,
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
        proof: Proof | None = None,
        is_colocated: bool = False,
        timeout_s: float = 60.0,
        max_inflight: int = 512,
    ) -> None:
        self.policy, self.timeout_s, self.max_inflight = policy, timeout_s, max_inflight
        self.publication, self.proof, self.version, self.label = Publication(folder), proof, 0, ""
        self.is_colocated = is_colocated
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
        self._serial, self._loading, self._calls, self._is_publishing = 0, asyncio.Lock(), 0, False
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
        if self.proof is not None:
            self.proof.limit(self.context)

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
        return (
            f"sampled {self.done} of {self.total} rows, {len(self._usable())} of "
            f"{len(self.replicas)} servers"
        )

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call: servers in use, requests that were repeated, and the proof
        of the weights."""
        repeated, self.repeated = self.repeated, 0
        counts = {
            "engine/servers_count": float(len(self._usable())),
            "engine/repeated_count": float(repeated),
        }
        return counts | ({} if self.proof is None else self.proof.metrics())

    def _usable(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.label is not None]

    def _generate(self, batch: TokenBatch, sampling: Sampling, seed: int) -> Generated:
        """Sample the rows of a batch; a ``GenerateTokens`` of policies."""
        parts = self._run(self._sample(batch, sampling, seed))
        columns = max(max(sum(len(part.tokens) for part in row) for row in parts), 1)
        tokens, versions = (torch.zeros(len(parts), columns, dtype=torch.long) for _ in range(2))
        logprobs, lengths = (
            torch.zeros(len(parts), columns),
            torch.zeros(len(parts), dtype=torch.long),
        )
        for number, row in enumerate(parts):
            for part in row:
                first, lengths[number] = int(lengths[number]), lengths[number] + len(part.tokens)
                span = slice(first, first + len(part.tokens))
                tokens[number, span] = torch.tensor(part.tokens, dtype=torch.long)
                logprobs[number, span] = torch.tensor(part.logprobs)
                versions[number, span] = torch.tensor(
                    [version_of(label) for label in part.versions], dtype=torch.long
                )
        finish: list[Any] = [
            row[-1].finish.replace("abort", "length") for row in parts
        ]  # paused at its last token
        return Generated(tokens, logprobs, lengths, tuple(finish), versions)

    async def _sample(
        self, batch: TokenBatch, sampling: Sampling, seed: int
    ) -> list[list[SampledRow]]:
        """Sample the rows; each comes in the parts between which new weights were published."""
        if (
            not self._calls
        ):  # else other calls are at work; one that was interrupted has left its rows
            self.done = self.total = 0
            for replica in self.replicas:
                replica.inflight, replica.rate, replica.idle_at = 0, 0.0, time.monotonic()
            self._watcher = asyncio.create_task(self._watch())
        self._calls, self.total = self._calls + 1, self.total + len(batch.owners)
        try:
            prompts = [ids.tolist() for ids in batch.prompts]
            prefixes = (
                [[]] * len(batch.owners)
                if batch.prefixes is None
                else [ids.tolist() for ids in batch.prefixes]
            )
            common = dict[str, Any](
                temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            )
            common |= {
                "stop": list(sampling.stop),
                "stop_token_ids": list(self.policy.stop_ids),
                "logprobs": 0,
            }
            # a stop text may name special tokens; without stop texts, nothing is decoded
            common |= {
                "skip_special_tokens": False,
                "detokenize": bool(sampling.stop),
                "watermarking": False,
            }
            rows, found, groups = (
                list[_Row](),
                dict[int, list[SampledRow]](),
                dict[int, list[int]](),
            )
            for row, owner in enumerate(batch.owners.tolist()):
                start, ids = (
                    batch.starts[row] if batch.starts else 0,
                    prompts[owner] + prefixes[row],
                )
                limit = sampling.max_actions if batch.limits is None else int(batch.limits[row])
                params = common | {"max_tokens": min(limit, self.context - len(ids))}
                draw, sample = batch.addresses[row]
                rows.append(_Row(ids, params, (seed, "server", draw, sample), draw, start))
                if params["max_tokens"] > 0:
                    groups.setdefault(owner, []).append(row)
                else:  # a conversation has filled the context
                    found[row] = [SampledRow([], [], "length")]

            async def sample_group(members: Sequence[int]) -> None:
                # one server for a prompt, which it reads once
                replica = await self._choose(len(members), rows[members[0]].draw)
                await _all(self._sample_row(rows[row], replica, found, row) for row in members)

            await _all(sample_group(members) for members in groups.values())
            return [found[row] for row in range(len(rows))]
        finally:
            self._calls -= 1
            if not self._calls:
                self.done = self.total
                if self._watcher is not None:
                    self._watcher.cancel()

    async def _sample_row(
        self, row: _Row, replica: Replica, found: dict[int, list[SampledRow]], number: int
    ) -> None:
        """Sample a row on this server, or on others if it fails there. It goes on after weights
        were published."""
        failures, parts = 0, list[SampledRow]()
        while True:
            if replica.label is None:
                replica.inflight -= 1
                replica = await self._choose(1, row.draw)
            began, label = time.monotonic(), replica.label
            done = [token for part in parts for token in part.tokens]
            # one generator a request: with n > 1 a repeated one would draw other samples
            own = {"seed": seed_at(*row.address, row.start + len(done))}
            params = row.params | own | {"max_tokens": row.params["max_tokens"] - len(done)}
            task = asyncio.ensure_future(replica.sample(row.ids + done, params, label or ""))
            replica.tasks.add(task)
            try:
                part = await task
                # None: another row of the server has just had it left out
                if (
                    part.finish == "abort"
                    and replica.label in (label, None)
                    and not self._is_publishing
                ):
                    raise ServerError("it aborted a row that no publish has interrupted")
            except asyncio.CancelledError:
                task.cancel()
                if (current := asyncio.current_task()) is None or current.cancelling():
                    raise
                self.repeated += 1
                continue  # the server was ejected, and its requests with it
            except ServerError as error:
                failures, self.repeated = failures + 1, self.repeated + 1
                if error.status == 400:
                    raise GruppoError(
                        f"the server {replica.url} refuses a request: {error}."
                    ) from None
                if failures == 2 * MAX_FAILURES * len(
                    self.replicas
                ):  # also after they were given the weights again
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
                continue
            finally:
                replica.tasks.discard(task)
            replica.failures, replica.progress_at = 0, time.monotonic()
            # a text that ends the row would not be found where it lies across two requests
            parts = [*parts, part] if part.finish != "abort" or not row.params["stop"] else []
            if (
                part.finish == "abort"
                and sum(len(part.tokens) for part in parts) < row.params["max_tokens"]
            ):
                replica.inflight -= 1
                replica = await self._choose(1, row.draw)
                continue
            found[number] = parts
            replica.inflight, replica.idle_at = replica.inflight - 1, time.monotonic()
            replica.rate = max(replica.rate, len(part.tokens) / (replica.idle_at - began))
            self.done += 1
            self._notify()
            return

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
                    if (
                        not replica.inflight
                    ):  # it begins to work now: how long it was idle is no sign that it hangs
                        replica.progress_at, replica.tokens = time.monotonic(), None
                    replica.inflight += count
                    return replica
            self._waiting.append((draw, len(self._waiting), future := self._loop.create_future()))
            await future

    # --- failures ---

    async def _eject(self, replica: Replica, why: str) -> None:
        """Sample nothing more from a server until weights are published to it; what it was sampling
        goes elsewhere.

        Never waits; a coroutine because the loop owns the rows and what waits.
        """
        if replica.label is None:
            return
        replica.label, replica.why = None, why
        if self.proof is not None:
            self.proof.forget(replica)
        log.warning("the server %s is left out: %s", replica.url, why)
        for task in replica.tasks:
            task.cancel()
        self._notify()

    async def _watch(self) -> None:
        """Eject servers that hang, and those that keep all others waiting."""
        interval_s = min(self.timeout_s / 4, MAX_INTERVAL_S)
        while True:
            await asyncio.sleep(interval_s)
            if (
                self._is_publishing
            ):  # the first rank has paused the servers, under the rows of all ranks
                continue
            busy = [replica for replica in self._usable() if replica.inflight]
            await asyncio.gather(*(self._watch_one(replica, interval_s) for replica in busy))

    async def _watch_one(self, replica: Replica, interval_s: float) -> None:
        before = replica.tokens
        # not /health, which answers while the engine behind it is dead
        with suppress(ServerError, ValueError):
            replica.tokens = await replica.count_tokens(timeout_s=interval_s)
        if self._is_publishing:
            return
        now, rate = time.monotonic(), 0.0
        if (
            before is not None
            and replica.tokens is not None
            and replica.tokens != before
            and replica.inflight
        ):
            replica.progress_at, rate = (
                now,
                (replica.tokens - before) / replica.inflight / interval_s,
            )
        others = [other for other in self._usable() if other is not replica]
        have_waited = others and all(
            not r.inflight and now - r.idle_at > self.timeout_s for r in others
        )
        fastest = max((other.rate for other in others), default=0.0)
        if replica.inflight and now - replica.progress_at > self.timeout_s:
            await self._eject(replica, f"no token for {self.timeout_s:g} s")
        elif replica.inflight and have_waited and rate < fastest / SLOW_FACTOR:
            # a long row of a sound server is not sampled again: alone, it is faster than rows of a
            # full batch
            await self._eject(
                replica, f"{rate:.3g} tokens per second and row, where others have {fastest:.3g}"
            )

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
                        await _all(
                            self._admit(replica, self._published) for replica in self.replicas
                        )
                except TimeoutError:
                    raise self._lost() from None
                await asyncio.sleep(min(1.0, self.timeout_s / 10))

    def _lost(self) -> EngineLost:
        reasons = "; ".join(f"{replica.url}: {replica.why}" for replica in self.replicas)
        return EngineLost(f"no vLLM server is left ({reasons}).")

    # --- weights ---

    def sync(self, policy: Any, version: int) -> None:
        """Publish the weights, and return once every server that is sampled from has proved that it
        holds them.

        Rows that are being sampled wait, and go on with the new weights.
        """
        self._is_publishing, self.policy, proof = True, policy, self.proof
        self._serial += 1  # a version may be published again, after a return to older weights
        self.label = f"{self._name}-v{version}-{self._serial}"
        try:
            if proof is not None:
                proof.publish(policy)
                self._canary(policy, proof)
            self._published = folder = self._deliver(policy, self.label, self.replicas, self._admit)
            if proof is not None:
                # the regression refuses a good server now and then; the canary is certain
                if _agreed(any(standing.is_doubted for standing in [*proof.standings.values()])):
                    self._canary(policy, proof)
                    out = [
                        self.replicas[n]
                        for n in _agreed([r.number for r in self.replicas if r.label is None])
                    ]
                    self._deliver(policy, self.label, out, self._admit, folder=folder)
                # tokens and log-probs that newly admitted servers have sampled, once
                sampled, proof.sampled = proof.sampled, {}
                admitted = [
                    (n, [(row.tokens, row.logprobs) for row in rows])
                    for n, rows in sampled.items()
                    if rows
                ]
                for number, rows in _agreed(admitted):
                    if why := proof.check_sampled(policy, rows):
                        self._run(self._eject(self.replicas[number], why))
            states = _agreed(
                [replica.why if replica.label is None else "" for replica in self.replicas]
            )
            for replica, why in zip(
                self.replicas, states, strict=True
            ):  # the first rank has asked the servers
                replica.loaded = label = replica.label_of(self.label)
                replica.admit(label)
                if why:
                    replica.label, replica.why = None, why
            if all(states):
                raise self._lost()
            self.version = version
        finally:
            self._is_publishing = False
            self._loop.call_soon_threadsafe(self._notify)

    def sleep(self) -> None:
        """Have servers on this device leave its memory to the trainer until the next ``sync``."""
        if not self.is_colocated:
            return

        async def sleep(replica: Replica) -> None:
            replica.is_asleep, level = (
                True,
                1 if replica.is_lora else 2,
            )  # the base of an adapter is kept on the CPU
            try:
                await replica.request(
                    "POST", f"/sleep?level={level}&mode=abort", timeout_s=self.timeout_s
                )
            except ServerError as error:
                await self._eject(replica, str(error))

        with dist.fail_together():
            if dist.is_main():
                self._run(_all(sleep(replica) for replica in self._usable()))

    def _deliver(
        self,
        policy: Any,
        label: str,
        replicas: Sequence[Replica],
        ask: Ask,
        *,
        folder: Path | None = None,
    ) -> Path | None:
        """Write the weights to a folder, and have ``ask`` give it to these servers; return it.

        ``folder``: where they have been written already.
        """
        if folder is None and policy.base_sha256 is not None:
            folder = self.publication.write_folder(label, policy.save)
        elif folder is None:
            folder = self.publication.write(label, policy.served_weights(), policy.served_config())
        if self.is_colocated and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the update has left is room for the servers' cache

        async def ask_all() -> None:  # not while a call of generate loads the weights of before
            async with self._loading:
                await _all(ask(replica, folder) for replica in replicas)

        with dist.fail_together():
            probes = (
                asyncio.run_coroutine_threadsafe(ask_all(), self._loop) if dist.is_main() else None
            )
            if probes is not None:
                self._wait(probes)
        return folder

    def _canary(self, policy: Any, proof: Proof) -> None:
        """Have the servers that need it load weights with noise in every tensor, and compare."""
        numbers = _agreed(
            [replica.number for replica in self.replicas if proof.needs_canary(replica)]
        )
        if not numbers:
            return
        self._serial += 1
        replicas, label = (
            [self.replicas[number] for number in numbers],
            f"{self._name}-canary-{self._serial}",
        )
        known = {replica.number: replica.why for replica in replicas}

        async def ask(replica: Replica, folder: Path | None) -> None:
            replica.label, replica.why = None, ""
            proof.forget(replica)
            proof.passed.discard(replica.number)
            try:
                await self._load(replica, folder, replica.label_of(label))
                proof.judge_canary(replica, await proof.ask(replica, replica.label_of(label)))
            except ServerError as error:
                replica.why = str(error)

        with proof.perturbed(policy):
            self._deliver(policy, label, replicas, ask)
            for number in _agreed([*proof.wrong]):
                if found := proof.isolate(policy, number):
                    self.replicas[number].why += f"; {found}"
        for replica in replicas:
            if replica.why and replica.why != known[replica.number]:
                log.warning(
                    "the server %s is left out of %s: %s", replica.url, self.label, replica.why
                )

    async def _admit(self, replica: Replica, folder: Path | None) -> None:
        """Load the published weights into a server, and sample from it once it has proved that it
        holds them."""
        was_usable, label, was_out = (
            replica.label is not None,
            replica.label_of(self.label),
            bool(replica.why),
        )
        replica.label = None
        if self.proof is not None and replica.number not in self.proof.passed:
            return
        try:
            await self._load(replica, folder, label)
            if self.proof is not None:
                self.proof.judge(replica, await self.proof.ask(replica, label))
        except ServerError as error:
            replica.why = str(error)
            if was_usable:
                log.warning(
                    "the server %s is left out of %s: %s", replica.url, self.label, replica.why
                )
            return
        if was_out and self.version:
            log.info("the server %s is back", replica.url)
        replica.admit(label)

    async def _load(self, replica: Replica, folder: Path | None, label: str) -> None:
        await replica.request("GET", "/health", timeout_s=CONNECT_S)
        try:
            if folder is not None and replica.is_lora:
                await replica.load_adapter(folder, label)
            elif folder is not None:
                await replica.load(folder, label)
        except ServerError as error:
            if (
                error.status and self._published is None and folder
            ):  # what it cannot load at first, it never can
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
        return self._wait(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _wait(self, future: Future[T]) -> T:
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


@dataclass(frozen=True)
class _Row:
    """What is requested of a server for a row."""

    ids: list[int]
    params: dict[str, Any]
    address: tuple[int | str, ...]
    draw: int
    start: int
    """Tokens that were sampled in the row before."""


def _agreed(value: T) -> T:
    """The first rank's value, on all ranks."""
    return json.loads(dist.all_gather(json.dumps(value).encode())[0])


async def _all(work: Any) -> None:
    """Run coroutines at once; where one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
