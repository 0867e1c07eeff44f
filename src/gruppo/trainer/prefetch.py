"""An engine that samples ahead of the trainer, for runs with ``engine.lag`` above 0 and for
replays.

The trainer takes prompts and asks for their samples as in a synchronous run. Behind that, threads
sample the groups of later steps with the weights that the engine holds, as far as ``Slots`` allows,
and the ledger keeps what they sampled.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gruppo import distributed as dist
from gruppo.data.source import SourceWrapper
from gruppo.protocols import Engine
from gruppo.trainer.ledger import Ledger, split
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import check_is_run
from gruppo.trainer.slots import Group, Slots
from gruppo.trainer.stages import StepParams
from gruppo.types import DataError, EngineLost, GruppoError, Prompt, Request, Rollouts, Stat

log = logging.getLogger("gruppo")

JOIN_S = 10.0
"""Limit for the calls that are under way when a run ends."""
MAX_UNUSABLE = 100
"""Prompts in a row that cannot be used, after which no more are drawn ahead: the step that needs
one ends the run."""


class PrefetchedPrompts(SourceWrapper):
    """The prompts of a ``PrefetchEngine``, whose groups are sampled before they are taken.

    The position is that of the first draw that no complete step has learned from.
    """

    def __init__(self, engine: PrefetchEngine, source: Any) -> None:
        super().__init__(source)
        self.engine = engine
        self.position = 0
        """Position of the next prompt that is drawn."""

    def take(self, n: int) -> list[Prompt]:
        return self.engine.take(n)

    def state_dict(self) -> dict[str, Any]:
        queue = self.engine.slots.queue
        if queue:  # what was drawn ahead is drawn again, and read from the ledger
            return {"source": queue[0].source, "position": queue[0].position}
        return {"source": self.source.state_dict(), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.position = int(state["position"])


class PrefetchEngine(Engine):
    """Samples with another engine, most groups before the trainer asks for them.

    Only the trainer's thread draws prompts and asks for samples. The first ``sync`` reads the
    ledger and starts the threads; one after a step frees the slots of its groups.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        config = run.config
        self.run = run
        self.engine = run.engine
        self.prompts = PrefetchedPrompts(self, run.source)
        self.slots = Slots(config.engine.lag, config.rollout.prompts)
        self.ledger: Ledger | None = None
        self._folder = folder
        self._steps_done = 0
        """Complete steps whose slots are free."""
        self._changed = threading.Condition()
        self._calls = threading.BoundedSemaphore(max(run.engine.concurrency, 1))
        self._chunk = 0
        """Groups that a call samples."""
        self._error: BaseException | None = None
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._lags: list[Tensor] = []
        """Publishes between the weights that chose each action and those of the step."""
        self._stale = 0
        """Groups that were sampled again since they were beyond the bound."""

    @classmethod
    def attach(cls, run: Run, folder: Path) -> None:
        """Put the engine and its prompts in place of a run's own; ``folder``: of the run."""
        run.engine = cls(run, folder)
        run.source = run.engine.prompts

    # --- prompts ---

    def take(self, n: int) -> list[Prompt]:
        """Hand the next prompts to the step under way."""
        with self._changed:
            prompts = []
            for _ in range(n):
                if not self.slots.queue:
                    self._draw()
                prompts.append(self.slots.take().prompt)
            self._fill()
            return prompts

    def _draw(self) -> None:
        """Draw the next prompt, and have its group sampled, or read from the ledger, if it is this
        rank's."""
        run, source, index = self.run, self.prompts.source, self.slots.next_index
        state = source.state_dict()
        try:
            prompt = source.take(1)[0]
            group = Group(self.prompts.position, prompt, state)
            group.is_counted = run.policy.check_prompt(prompt, run.sampling) is None
            planned = self._planned(index)
            is_own = index % self.slots.prompts % dist.world_size() == dist.rank()
            if group.is_counted and is_own and planned is not None:
                size = run.config.rollout.first_samples or planned.group_size
                group.request = Request(prompt, size)
                group.sampling = planned.sampling
                group.rollouts = self._recorded(group)
        except BaseException:  # the next attempt, or a resumed run, draws the same prompt again
            source.load_state_dict(state)
            raise
        self.prompts.position += 1
        self.slots.add(group)

    def _fill(self) -> None:
        """Draw prompts while there is a slot for another one, and a step that will use it."""
        unusable = 0
        while unusable < MAX_UNUSABLE and self.slots.has_room:
            if self._planned(self.slots.next_index) is None:
                break
            try:
                self._draw()
            except Exception:  # take raises it again where a step needs the prompt
                break
            unusable = 0 if self.slots.queue[-1].is_counted else unusable + 1
        self._changed.notify_all()

    def _planned(self, index: int) -> StepParams | None:
        """Parameters of the step that uses the group of this number, as far as known; None after
        the last step."""
        steps = range(self.run.state.step, self.run.config.steps)
        planned = map(self.run.stage_schedule.step_params, steps)
        sampling = (step_params for step_params in planned if step_params.samples)
        return next(islice(sampling, index // self.slots.prompts, None), None)

    def _recorded(self, group: Group) -> Rollouts | None:
        assert self.ledger is not None and group.request is not None
        return self.ledger.find(group.position, group.request, group.sampling)

    # --- the contract of an engine ---

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        """Samples of prompts that were taken, at most ``engine.lag`` publishes old; new ones of
        other prompts."""
        with self._changed:
            taken = {id(group.prompt) for group in self.slots.taken}
        if any(id(request.prompt) not in taken for request in requests):  # of an evaluation
            with self._calls:
                return self.engine.generate(requests, sampling, seed=seed)
        with self._changed:
            groups = [self._requested(request, sampling) for request in requests]
            self._changed.notify_all()
            while not self._are_ready(groups):
                if self._error is not None:
                    raise self._error
                self._changed.wait(1.0)
        rollouts = Rollouts.cat([one.rollouts for one in groups if one.rollouts is not None])
        versions = rollouts.policy_version[rollouts.mask]  # [chosen actions]
        self._lags.append(self.run.state.version - versions)
        return rollouts

    def sync(self, policy: Any, version: int) -> None:
        """Load new weights; after a step, free the slots of its groups, and draw for later
        steps."""
        self.engine.sync(policy, version)
        with self._changed:
            if isinstance(self._error, EngineLost):  # the engine is back
                self._error = None
            if self.ledger is None:
                self._open()
            elif self.run.state.step > self._steps_done:
                self._release(self.ledger)

    def close(self) -> None:
        """Begin nothing more, write what was finished, and wait for the threads: one that computes
        while Python exits may crash it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self.ledger is not None:
                self.ledger.write(self.run.state.step + 1)
        self.engine.close()
        until = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))

    def sleep(self) -> None:
        self.engine.sleep()

    def progress(self) -> str:
        return self.engine.progress()

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call: lags, and groups that were sampled again."""
        metrics = dict(self.engine.metrics())
        if not self._lags:  # on no rank was anything sampled
            return metrics
        with self._changed:
            stats = {"lag": Stat.of(torch.cat(self._lags))}
            stats["stale"] = Stat.of(torch.tensor([float(self._stale)]))
            self._lags = []
            self._stale = 0
        stats = dist.merge_stats(stats)
        metrics["lag/mean"] = stats["lag"].mean
        # rows of errors have no action
        metrics["lag/max"] = stats["lag"].max if stats["lag"].count else math.nan
        metrics["lag/stale_groups_count"] = stats["stale"].sum
        return metrics

    # --- samples of a step ---

    def _requested(self, request: Request, sampling: Any) -> Group:
        """The group of a request: the one sampled ahead if it is for the same parameters, or a new
        one."""
        taken = self.slots.taken
        found = next(group for group in taken if group.prompt is request.prompt)
        own = found.request
        is_same = own is not None and (own.size, own.first) == (request.size, request.first)
        group = found
        if not is_same or found.sampling != sampling:
            group = replace(found, request=request, sampling=sampling, rollouts=None)
            group.is_started = group.is_dropped = False
            if request.first:  # a group that grows keeps its first samples
                group.is_counted = False
                taken.append(group)
            else:
                self.slots.drop(found)
                taken[taken.index(found)] = group
            group.rollouts = self._recorded(group)
        replay = self.run.config.engine.replay
        if replay and group.rollouts is None:  # nothing would sample it
            raise GruppoError(f"""the ledger of {replay} has no samples of prompt
                {group.prompt.id!r} (position {group.position}) as step {self.run.state.step + 1}
                needs them. Replay with the options of the run that decide what is sampled, and with
                its whole ledger.""")
        if group is not found and group.rollouts is None:
            self.slots.restart(group)
        return group

    def _are_ready(self, groups: Sequence[Group]) -> bool:
        """Whether all groups are there; those beyond the bound are sampled again from the same
        draw."""
        version = self.run.state.version
        for group in groups:
            if group.rollouts is None:
                continue
            versions = group.rollouts.policy_version[group.rollouts.mask].tolist() or [version]
            if not self.slots.is_stale(min(versions), max(versions), version):
                continue
            if self.run.config.engine.replay:
                raise GruppoError(
                    f"""the samples at position {group.position} are of version {min(versions)}, and
                        the replay trains version {version}""",
                    advice="Replay with the run's own $engine.lag and steps",
                )
            self._stale += 1
            self.slots.restart(group)
            self._changed.notify_all()
        return all(group.rollouts is not None for group in groups)

    # --- sampling ahead ---

    def _open(self) -> None:
        """Read the ledger and begin to sample."""
        run, config = self.run, self.run.config
        self._steps_done = run.state.step
        if config.engine.replay:
            source = Path(config.engine.replay)
            check_is_run(source)
            self.ledger = Ledger(source, is_replayed=True)
            if not self.ledger.steps:
                raise GruppoError(
                    f"{source} has no complete step in its ledger; it needs a run with engine.lag "
                    f"above 0",
                    advice="Give another RUN",
                )
            run.is_stopped = run.state.step >= max(self.ledger.steps)
            return
        self.ledger = Ledger(self._folder)
        self.ledger.resume(run.state.step, run.state.version)
        if config.objective.correction == "none":
            log.warning(
                "engine.lag=%d without a correction: samples of older weights are learned from as "
                "if they were of the newest. Set objective.correction=truncate, unless that is "
                "what you measure.",
                config.engine.lag,
            )
        concurrency = self.engine.concurrency  # ``build`` has checked it
        capacity = (config.engine.lag + 1) * config.rollout.prompts
        self._chunk = min(math.ceil(capacity / concurrency), config.rollout.prompts)
        for number in range(min(math.ceil(capacity / self._chunk), concurrency)):
            name = f"gruppo-sampler-{number}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _release(self, ledger: Ledger) -> None:
        state = self.run.state
        self._steps_done = state.step
        positions = [group.position for group in self.slots.release()]
        if positions:  # else a step without samples
            ledger.write(state.step, positions)
        if ledger.is_replayed:
            self.run.is_stopped |= state.step >= max(ledger.steps)
        self._fill()

    def _work(self) -> None:
        """Sample waiting groups, in a thread of its own; after an error, none until ``sync`` clears
        it."""
        while True:
            with self._changed:
                while (self._error is not None or not self.slots.waiting) and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                groups = self.slots.start(self._chunk)
            found: Mapping[tuple[str, int], Rollouts] = {}
            problem: BaseException | None = None
            try:
                found = self._sample(groups)
            except BaseException as error:  # else the trainer would wait forever
                problem = error
            with self._changed:
                for group in groups:
                    one = found.get((group.prompt.id, group.prompt.draw))
                    own = None if one is None else replace(one, prompts=(group.prompt,))
                    self.slots.finish(group, own)
                try:  # only after all have ended: what cannot be recorded leaves none running
                    self._record(groups)
                except BaseException as error:
                    problem = error
                if self._error is None or isinstance(self._error, EngineLost):
                    self._error = problem or self._error
                self._changed.notify_all()

    def _sample(self, groups: Sequence[Group]) -> dict[tuple[str, int], Rollouts]:
        """The samples of groups, by id and draw of their prompts, in one call of the engine."""
        requests = [group.request for group in groups if group.request is not None]
        with self._calls:
            rollouts = self.engine.generate(requests, groups[0].sampling, seed=self.run.config.seed)
        found = {(one.prompts[0].id, one.prompts[0].draw): one for one in split(rollouts)}
        if len(found) < len(groups):
            raise DataError("""two prompts that are sampled at a time have the same id and draw, so
                their samples are one group. Let the data source number its draws: Prompt(...,
                draw=n).""")
        return found

    def _record(self, groups: Sequence[Group]) -> None:
        ledger = self.ledger
        for group in groups:
            is_needed = not group.is_dropped and not self._is_closed
            if is_needed and group.rollouts is not None and group.request is not None and ledger:
                ledger.append(group.position, group.request, group.sampling, group.rollouts)
