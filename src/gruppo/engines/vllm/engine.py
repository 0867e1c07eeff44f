"""Samples from vLLM servers that hold published copies of the weights."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from gruppo import distributed as dist
from gruppo.engines.vllm.check import check_server
from gruppo.engines.vllm.client import CONNECT_S, Replica, SampledRow, ServerError, generated
from gruppo.engines.vllm.publish import PREFIX, Publication
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
MAX_INFLIGHT = 512
"""Rows that a server is given at a time."""
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
        checker: WeightCheck,
        is_colocated: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self.policy = policy
        self.publication = Publication(folder)
        self.checker = checker
        self.is_colocated = is_colocated
        self.timeout_s = timeout_s
        self.label = ""
        # another process's labels differ: a server that an older trainer still feeds is never taken
        # for ours
        self._name = PREFIX + dist.gather_json(secrets.token_hex(4))[0]
        is_lora = policy.base_sha256 is not None
        self.replicas = [
            Replica(url, number, is_lora=is_lora, timeout_s=timeout_s)
            for number, url in enumerate(urls)
        ]
        self.context = sys.maxsize
        """Tokens of the longest row that every server holds."""
        self.rows_left = 0
        """Rows of the present calls whose group is not complete."""
        self.repeated = 0
        self._published: Path | None = None
        self._has_published = False
        self._serial = 0
        self._is_publishing = False
        self._loading = asyncio.Lock()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="gruppo-vllm", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def check(self, tokens: int) -> None:
        """Refuse a folder that cannot be written, and servers that do not fit; ``tokens``: the
        longest row."""
        self.publication.write_folder(f"{PREFIX}probe", lambda folder: (folder / "probe").touch())
        self.publication.clear()  # of versions that an earlier process has left, too

        async def check(replica: Replica) -> None:
            context = await check_server(
                replica, self.policy, tokens=tokens, is_colocated=self.is_colocated
            )
            self.context = min(self.context, context)

        self._on_main(check, self.replicas)
        self.context = dist.gather_json(self.context)[0]
        self.checker.limit(self.context)

    # --- sampling ---

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        return self.policy.sample(requests, sampling, seed=seed, generate=self._generate)

    def continue_rollouts(
        self, rollouts: Rollouts, replies: Mapping[int, Any], sampling: Any, **how: Any
    ) -> Rollouts:
        return self.policy.continue_rollouts(
            rollouts, replies, sampling, generate=self._generate, **how
        )

    def progress(self) -> str:
        """What is being sampled, for the screen; "" if nothing is."""
        if not self.rows_left:
            return ""
        return f"sampling {self.rows_left} rows on {len(self._usable())} servers"

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call: servers in use, requests that were repeated, and the check
        of the weights."""
        metrics = {
            "engine/servers_count": float(len(self._usable())),
            "engine/repeated_count": float(self.repeated),
        }
        self.repeated = 0
        return metrics | self.checker.metrics()

    def _usable(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.label is not None]

    def _generate(self, batch: TokenBatch, sampling: Sampling, seed: int) -> Generated:
        """Sample the rows of a batch; a ``GenerateTokens`` of policies."""
        rows = self._rows(batch, sampling, seed)
        groups: dict[int, list[_Row]] = {}
        for row, owner in zip(rows, batch.owners.tolist(), strict=True):
            if row.left > 0:  # else a conversation has filled the context
                groups.setdefault(owner, []).append(row)
        self._run(self._sample(groups.values()))
        return generated([row.done for row in rows])

    def _rows(self, batch: TokenBatch, sampling: Sampling, seed: int) -> list[_Row]:
        """What is requested for each row of a batch."""
        common = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(self.policy.stop_ids),
            "logprobs": 0,
            # a stop string may name special tokens; without stop strings, nothing is decoded
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
            draw, sample = batch.addresses[number]
            start = batch.starts[number] if batch.starts else 0
            limit = min(limit, self.context - len(ids))
            rows.append(_Row(ids, common, limit, (seed, "server", draw, sample), draw, start))
        return rows

    async def _sample(self, groups: Iterable[list[_Row]]) -> None:
        """Sample the rows of each prompt on one server, which reads it once."""
        if not self.rows_left:  # a call that was interrupted has left its rows
            for replica in self.replicas:
                replica.inflight = 0
        await _all(map(self._sample_group, groups))

    async def _sample_group(self, group: list[_Row]) -> None:
        self.rows_left += len(group)
        try:
            replica = await self._choose(len(group), group[0].draw)
            await _all(self._sample_row(row, replica) for row in group)
        finally:
            self.rows_left -= len(group)

    async def _sample_row(self, row: _Row, replica: Replica) -> None:
        """Sample a row on this server, or on others if it fails there. It goes on after weights
        were published."""
        failures = 0
        while True:
            try:
                part = await self._request(row, replica)
            except ServerError as error:
                self.repeated += 1
                failures += 1
                await self._count_failure(replica, error, failures)
            else:
                replica.failures = 0
                replica.progress_at = time.monotonic()
                row.done = row.done + part
                is_cut = part.finish == "abort"
                if is_cut and row.params["stop"]:
                    # a stop string would not be found where it lies across two requests
                    row.done = _NOTHING
                if not is_cut or row.left <= 0:
                    break
            replica.inflight -= 1
            replica = await self._choose(1, row.draw)
        replica.inflight -= 1
        self._notify()

    async def _request(self, row: _Row, replica: Replica) -> SampledRow:
        """Sample what is left of a row."""
        label = replica.label
        if label is None:
            raise ServerError(replica.why)
        done = row.done.tokens
        # one generator a request: with n > 1 a repeated one would draw other samples
        seed = seed_at(*row.address, row.start + len(done))
        params = row.params | {"seed": seed, "max_tokens": row.left}
        task = asyncio.ensure_future(replica.sample(row.ids + done, params, label))
        replica.tasks.add(task)
        try:
            part = await task
        except asyncio.CancelledError:
            task.cancel()
            if (current := asyncio.current_task()) is None or current.cancelling():
                raise
            raise ServerError(replica.why) from None
        finally:
            replica.tasks.discard(task)
        # None: another row of the server has just had it left out
        is_current = replica.label in (label, None) and not self._is_publishing
        if part.finish == "abort" and is_current:
            raise ServerError("it aborted a row that no publish has interrupted")
        return part

    async def _count_failure(self, replica: Replica, error: ServerError, failures: int) -> None:
        """Eject a server that has failed several times in a row, and wait; ``failures``: of the
        row."""
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
            usable = [] if self._is_publishing else self._usable()
            if usable:
                replica = min(usable, key=lambda replica: replica.inflight)
                # a larger group starts on an idle server
                if not replica.inflight or replica.inflight + count <= MAX_INFLIGHT:
                    if not replica.inflight:  # how long it was idle is no sign that it hangs
                        replica.begin_work()
                    replica.inflight += count
                    return replica
            elif not self._is_publishing:
                await self._revive()
                continue
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
            await asyncio.gather(*(self._watch_one(one, interval_s) for one in self._usable()))

    async def _watch_one(self, replica: Replica, interval_s: float) -> None:
        # the first rank pauses the servers to publish, under the rows of all ranks
        if self._is_publishing or not replica.inflight:
            return
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
            checker.publish(policy)
            self._send_canary(filter(checker.needs_canary, self.replicas))
            self._published = self._write(self.label)
            self._on_main(self._admit, self.replicas)
            # the limits refuse a good server now and then; the canary is certain
            refused = [self.replicas[number] for number in checker.refused]
            self._on_main(self._admit, self._send_canary(refused))
            self._check_sampled()
            self._share_labels()
            self._has_published = True
        finally:
            self._is_publishing = False
            self._loop.call_soon_threadsafe(self._notify)

    def _write(self, label: str) -> Path:
        """Write the weights, or the adapter, to a folder."""
        policy = self.policy
        if policy.base_sha256 is not None:
            folder = self.publication.write_folder(label, policy.save)
        else:
            folder = self.publication.write(label, policy.served_weights(), policy.served_config())
        if self.is_colocated and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the update has left is room for the servers' cache
        return folder

    def _on_main(
        self, call: Callable[[Replica], Coroutine[Any, Any, Any]], replicas: Iterable[Replica]
    ) -> None:
        """Call servers at once, from the first rank."""

        async def call_all() -> None:  # not while a call of generate loads the weights of before
            async with self._loading:
                await _all(map(call, replicas))

        with dist.fail_together():
            if dist.is_main():
                self._run(call_all())

    def _send_canary(self, replicas: Iterable[Replica]) -> list[Replica]:
        """Have servers load weights with noise in every tensor, and compare; return the servers.
        The first rank's ``replicas`` count."""
        numbers = dist.gather_json([replica.number for replica in replicas])[0]
        chosen = [self.replicas[number] for number in numbers]
        if chosen:
            self._serial += 1
            label = f"{self._name}-canary-{self._serial}"
            with self.checker.perturbed(self.policy):
                folder = self._write(label)
                self._on_main(
                    lambda replica: self._load(replica, folder, label, is_canary=True), chosen
                )
        return chosen

    async def _admit(self, replica: Replica) -> None:
        """Load the published weights into a server, and sample from it once it was checked to hold
        them."""
        if self._published is None or not self.checker.has_passed(replica):
            replica.label = None
        elif await self._load(replica, self._published, self.label):
            if replica.why and self._has_published:
                log.info("the server %s is back", replica.url)
            replica.admit(replica.label_of(self.label))

    async def _load(
        self, replica: Replica, folder: Path, label: str, *, is_canary: bool = False
    ) -> bool:
        """Load weights into a server and judge its log-probs; return whether it holds them."""
        replica.label = None
        own_label = replica.label_of(label)
        judge = self.checker.judge_canary if is_canary else self.checker.judge
        try:
            await replica.request("GET", "/health", timeout_s=CONNECT_S)
            try:
                await replica.load(folder, own_label)
            except ServerError as error:
                # what it cannot load at first, it never can
                if error.status and not self._has_published:
                    raise GruppoError(
                        f"""the server {replica.url} cannot load the weights from {folder}: {error}.
                            It needs the run's model, and to read that folder under the same
                            path""",
                        option="engine.publish_dir",
                        advice="to one that both machines share",
                    ) from None
                raise
            judge(replica, await self.checker.ask(replica, own_label))
        except ServerError as error:
            self.checker.doubt(replica, is_canary=is_canary)
            if replica.why != str(error):
                log.warning("the server %s is left out of %s: %s", replica.url, label, error)
            replica.why = str(error)
            return False
        return True

    def _check_sampled(self) -> None:
        """Eject newly admitted servers that report log-probs of another distribution."""
        sampled, self.checker.sampled = self.checker.sampled, {}
        admitted = [(number, list(map(astuple, rows))) for number, rows in sampled.items() if rows]
        for number, rows in dist.gather_json(admitted)[0]:
            if why := self.checker.check_sampled(self.policy, [SampledRow(*row) for row in rows]):
                self._run(self._eject(self.replicas[number], why))

    def _share_labels(self) -> None:
        """Tell all ranks which servers hold the published weights; EngineLost if none does."""
        own = ["" if one.label is not None else one.why for one in self.replicas]
        reasons = dist.gather_json(own)[0]
        for replica, why in zip(self.replicas, reasons, strict=True):
            replica.loaded = replica.label_of(self.label)
            replica.admit(replica.loaded)
            if why:
                replica.label = None
                replica.why = why
        if all(reasons):
            raise self._lost()

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


_NOTHING = SampledRow([], [], "length")


@dataclass(eq=False)
class _Row:
    """A row, and what has been sampled of it."""

    ids: list[int]
    params: dict[str, Any]
    limit: int
    """Maximum tokens."""
    address: tuple[int | str, ...]
    draw: int
    start: int
    """Tokens that were sampled in the row before."""
    done: SampledRow = field(default=_NOTHING)

    @property
    def left(self) -> int:
        return self.limit - len(self.done.tokens)


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run coroutines at once; where one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
