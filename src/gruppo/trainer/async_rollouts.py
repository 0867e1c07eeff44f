"""Asynchronous rollouts: the prompt source and the sampler of a run with ``engine.lag`` above 0, or of a replay.

The trainer takes prompts and asks for their samples as in a synchronous run. Behind that, threads sample the groups of
later steps with the weights that the engine holds, as far as ``Slots`` allows, and the ledger keeps what they sampled.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from gruppo import distributed as dist
from gruppo.config import serialization
from gruppo.data.source import SourceWrapper
from gruppo.integrity import read_json
from gruppo.trainer import checkpoint
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
"""Prompts in a row that cannot be used, after which no more are drawn ahead: the step that needs one ends the run."""


class AsyncRollouts(SourceWrapper):
    """Prompts in the order of draws, and their samples, most of which exist before they are asked for.

    Only the trainer's thread draws prompts and asks for samples. Its position is that of the first draw that no
    complete step has learned from.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.source)
        self.run, config = run, run.config
        self.slots = Slots(config.engine.lag, config.rollout.prompts)
        self.ledger: Ledger = None  # type: ignore[assignment]  # ``open`` reads it, once the run has a folder
        self.needed: Mapping[str, int] = {}
        """Segments of the ledger that the checkpoint needs from which the run is resumed."""
        self.position = 0
        """Position of the next prompt that is drawn."""
        self._saved_position: int | None = None
        """Position in the newest checkpoint, which may still be on its way to the disk."""
        self.wait_s = self.idle_s = 0.0
        """Seconds in which the trainer waited for samples, and in which nothing was being sampled."""
        self.stale = self.discarded = 0
        """Groups that were sampled again: beyond the bound, or for other parameters than the step's."""
        self._idle_since: float | None = time.perf_counter()
        self._changed = threading.Condition()
        self._calls = threading.BoundedSemaphore(max(getattr(run.engine, "concurrency", 0), 1))
        self._error: BaseException | None = None
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    def open(self, folder: Path) -> None:
        """Read the ledger and begin to sample; ``folder``: of the run."""
        config = self.run.config
        if config.engine.replay:
            source = Path(config.engine.replay)
            check_is_run(source)
            self.ledger = Ledger(source, read_json(source / "config.json"), is_replayed=True)
            newest = checkpoint.steps(source / "checkpoints")[-1:]
            states = [
                read_json(source / "checkpoints" / checkpoint.name_of(step) / "state.json")
                for step in newest
            ]
            # a run that was trained without lag has no ledger, which ``check`` refuses
            self.ledger.check(states[0].get("ledger", {}) if states else {})
            self.run.is_stopped = self.run.state.step >= max(self.ledger.steps)
            return
        settings = json.loads(json.dumps(serialization.to_dict(config)))
        self.ledger = Ledger(folder, settings, max_bytes=1e9 * config.saving.ledger_gb)
        self.ledger.check(self.needed)
        if config.objective.correction == "none":
            text = f"engine.lag={config.engine.lag} without a correction: samples of older weights are learned from as "
            text += "if they were of the newest. Set --objective.correction truncate, unless that is what you measure."
            log.warning("%s", text)
        concurrency = getattr(
            self.run.engine, "concurrency", 0
        )  # above 0: ``build`` has checked it
        capacity = (config.engine.lag + 1) * config.rollout.prompts
        self._chunk = min(math.ceil(capacity / concurrency), config.rollout.prompts)
        for number in range(min(math.ceil(capacity / self._chunk), concurrency)):
            self._threads.append(
                threading.Thread(target=self._work, name=f"gruppo-sampler-{number}", daemon=True)
            )
            self._threads[-1].start()

    # --- a source of prompts ---

    def take(self, n: int) -> list[Prompt]:
        with self._changed:
            prompts = []
            for _ in range(n):
                if not self.slots.queue:
                    self._draw()
                prompts.append(self.slots.take().prompt)
            self._fill()
            return prompts

    def state_dict(self) -> dict[str, Any]:
        first = self.slots.queue[0] if self.slots.queue else None
        if first is not None:  # what was drawn ahead is drawn again, and read from the ledger
            return {"source": first.source, "position": first.position}
        return {"source": self.source.state_dict(), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        self.position = int(state["position"])

    def _draw(self) -> None:
        """Draw the next prompt, and have its group sampled, or read from the ledger, if it is this rank's."""
        run, index, state = self.run, self.slots.next_index, self.source.state_dict()
        try:
            prompt = self.source.take(1)[0]
            group = Group(self.position, prompt, state)
            group.is_counted = run.policy.check_prompt(prompt, run.sampling) is None
            step_params = self._planned(index)
            is_own = index % self.slots.prompts % dist.world_size() == dist.rank()
            if group.is_counted and is_own and step_params is not None:
                size = run.config.rollout.first_samples or step_params.group_size
                group.request, group.sampling = Request(prompt, size), step_params.sampling
                group.rollouts = self._recorded(group)
        except (
            BaseException
        ):  # the same prompt is drawn again, by the next attempt or by a resumed run
            self.source.load_state_dict(state)
            raise
        self.position += 1
        self.slots.add(group)

    def _fill(self) -> None:
        """Draw prompts while there is a slot for another one, and a step that will use it."""
        unusable = 0
        while (
            unusable < MAX_UNUSABLE
            and self.slots.has_room
            and self._planned(self.slots.next_index) is not None
        ):
            try:
                self._draw()
            except Exception:  # take raises it again where a step needs the prompt
                break
            unusable = 0 if self.slots.queue[-1].is_counted else unusable + 1
        self._changed.notify_all()

    def _planned(self, index: int) -> StepParams | None:
        """The parameters of the step that uses the group of this number, as far as known; None after the last step."""
        steps = range(self.run.state.step, self.run.config.steps)
        sampling = (
            params for params in map(self.run.stage_schedule.step_params, steps) if params.samples
        )
        return next(islice(sampling, index // self.slots.prompts, None), None)

    def _recorded(self, group: Group) -> Rollouts | None:
        assert group.request is not None
        found = self.ledger.find(group.position, group.request, group.sampling)
        if found is None or self.run.config.engine.replay:
            return found
        # versions that this run has not reached are of a killed process, which may have learned otherwise
        versions = found.policy_version[found.mask]  # [chosen actions]
        return None if len(versions) and int(versions.max()) > self.run.state.version else found

    def call_engine(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        """``generate`` of the engine, once one of its calls that may run at a time is free."""
        with self._calls:
            return self.run.engine.generate(requests, sampling, seed=seed)

    # --- samples ---

    def generate(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        """The samples of prompts that were taken; none is more than ``engine.lag`` publishes old."""
        began = time.perf_counter()
        with self._changed:
            groups = [self._requested(request, sampling) for request in requests]
            self._changed.notify_all()
            while not self._are_ready(groups):
                if self._error is not None:
                    raise self._error
                self._changed.wait(1.0)
        self.wait_s += time.perf_counter() - began
        return Rollouts.cat([group.rollouts for group in groups if group.rollouts is not None])

    def _requested(self, request: Request, sampling: Any) -> Group:
        """The group of a request: the one that was sampled ahead if it is for the same parameters, or a new one."""
        taken, replay = self.slots.taken, self.run.config.engine.replay
        index = next(n for n, group in enumerate(taken) if group.prompt is request.prompt)
        group = found = taken[index]
        own = found.request
        if own is None or (own.size, own.first, found.sampling) != (
            request.size,
            request.first,
            sampling,
        ):
            group = Group(
                found.position,
                found.prompt,
                found.source,
                request,
                sampling,
                is_counted=found.is_counted,
            )
            if request.first:  # a group that grows keeps its first samples
                group.is_counted = False
                taken.append(group)
            else:
                self.discarded += found.is_started or found.rollouts is not None
                self.slots.drop(found)
                taken[index] = group
            group.rollouts = self._recorded(group)
        if replay and group.rollouts is None:  # nothing would sample it
            raise GruppoError(f"""the ledger of {replay} has no samples of prompt {group.prompt.id!r} (position
                {group.position}) as step {self.run.state.step + 1} needs them. Replay with the options of the run that
                decide what is sampled.""")
        if group is not found and group.rollouts is None:
            self.slots.restart(group)
        return group

    def _are_ready(self, groups: Sequence[Group]) -> bool:
        """Whether all groups are there; those beyond the bound are sampled again from the same draw."""
        version = self.run.state.version
        for group in groups:
            if group.rollouts is None:
                continue
            versions = group.rollouts.policy_version[group.rollouts.mask]
            if len(versions) and self.slots.is_stale(
                int(versions.min()), int(versions.max()), version
            ):
                if self.run.config.engine.replay:
                    raise GruppoError(
                        f"""the samples at position {group.position} are of version {int(versions.min())}, and
                    the replay trains version {version}""",
                        advice="Replay with the run's own $engine.lag and steps",
                    )
                self.stale += 1
                self.slots.restart(group)
                self._changed.notify_all()
        return all(group.rollouts is not None for group in groups)

    def release(self) -> None:
        """After a step was trained on and its weights were published: free its slots, and draw for later steps."""
        state = self.run.state
        with self._changed:
            if isinstance(self._error, EngineLost):  # the publish has brought the engine back
                self._error = None
            if positions := [group.position for group in self.slots.release()]:
                step = {
                    "event": "step",
                    "step": state.step,
                    "version": state.version,
                    "positions": positions,
                }
                self.ledger.append(step)
            if self.ledger.is_replayed:
                self.run.is_stopped |= state.step >= max(self.ledger.steps)
            if self.ledger.size > self.ledger.max_bytes and not self.ledger.is_replayed:
                self._prune()
            self._fill()

    def _work(self) -> None:
        """Sample waiting groups, in a thread of its own; after an error, none until ``release`` clears it."""
        while True:
            with self._changed:
                while (self._error is not None or not self.slots.waiting) and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                groups = self.slots.start(self._chunk)
                if self._idle_since is not None:
                    self.idle_s, self._idle_since = (
                        self.idle_s + time.perf_counter() - self._idle_since,
                        None,
                    )
            found: dict[tuple[str, int], Rollouts] = {}
            problem: BaseException | None = None
            try:
                requests = [group.request for group in groups if group.request is not None]
                rollouts = self.call_engine(requests, groups[0].sampling, seed=self.run.config.seed)
                found = {(one.prompts[0].id, one.prompts[0].draw): one for one in split(rollouts)}
                if len(found) < len(groups):
                    raise DataError("""two prompts that are sampled at a time have the same id and draw, so their
                        samples are one group. Let the data source number its draws: Prompt(..., draw=n).""")
            except BaseException as error:
                problem = error
            with self._changed:
                try:
                    for group in groups:
                        one = found.get((group.prompt.id, group.prompt.draw))
                        self.slots.finish(
                            group, None if one is None else replace(one, prompts=(group.prompt,))
                        )
                    # only after all have ended: a record that cannot be written must leave none of them running
                    for group in groups if not self._is_closed else ():
                        if (
                            group.rollouts is not None
                            and group.request is not None
                            and not group.is_dropped
                        ):
                            self.ledger.append_group(
                                group.position, group.request, group.sampling, group.rollouts
                            )
                except (
                    BaseException
                ) as error:  # whatever it is: without it the trainer would wait forever
                    problem = problem or error
                if not self.slots.running:
                    self._idle_since = time.perf_counter()
                if self._error is None or isinstance(self._error, EngineLost):
                    self._error = problem or self._error
                self._changed.notify_all()

    # --- metrics and saving ---

    def metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Metrics of a step: the lag of its samples, groups that were sampled again, and how long each side waited."""
        lags = self.run.state.version - rollouts.policy_version[rollouts.mask]
        with self._changed:
            now = time.perf_counter()
            idle_s = self.idle_s + (0.0 if self._idle_since is None else now - self._idle_since)
            values = {
                "trainer": self.wait_s,
                "sampler": idle_s,
                "stale": self.stale,
                "discarded": self.discarded,
            }
            self.wait_s, self.idle_s, self.stale, self.discarded = 0.0, 0.0, 0, 0
            self._idle_since = (
                None if self._idle_since is None else now
            )  # from here on it is of the next step
        stats = {"lag": Stat.of(lags)} | {
            name: Stat(1, float(value)) for name, value in values.items()
        }
        stats |= {str(n): Stat.of((lags == n).double()) for n in range(self.slots.lag + 1)}
        stats = dist.merge_stats(stats)
        return {
            "lag/mean": stats["lag"].mean,
            "lag/max": stats["lag"].max,
            **{f"lag/{n}_frac": stats[str(n)].mean for n in range(self.slots.lag + 1)},
            "lag/stale_groups_count": stats["stale"].sum,
            "lag/discarded_groups_count": stats["discarded"].sum,
            "time/trainer_wait_s": stats["trainer"].mean,
            "time/sampler_wait_s": stats["sampler"].mean,
        }

    def ledger_state(self) -> dict[str, int]:
        """Segments of all ranks that a run needs which is resumed from here. A collective."""
        with self._changed:
            own = self.ledger.state(self.state_dict()["position"])
        parts = map(
            json.loads, dist.all_gather(json.dumps(own).encode())
        )  # no two ranks write to one segment
        return {name: size for part in parts for name, size in part.items()}

    def sync(self, position: int | None = None) -> None:
        """Wait until the ledger has reached the disk; ``position``: of a checkpoint that is about to be written."""
        with self._changed:
            self._saved_position = self._saved_position if position is None else position
            self.ledger.sync()

    def _prune(self) -> None:
        """Delete what no checkpoint needs from a ledger that has grown beyond its limit."""
        folder, own = self.ledger.folder.parent / "checkpoints", [self.state_dict()["position"]]
        own += [] if self._saved_position is None else [self._saved_position]
        states = (
            folder / checkpoint.name_of(step) / "state.json" for step in checkpoint.steps(folder)
        )
        try:
            saved = [read_json(state)["source"]["position"] for state in states]
        except (OSError, ValueError, KeyError, TypeError):  # damaged: what it needs is unknown
            return
        self.ledger.prune(min(own + saved))

    def close(self) -> None:
        """Begin nothing more. What is being sampled ends with the engine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self.ledger is not None:
                self.ledger.close()

    def join(self) -> None:
        """Wait for the threads, after the engine was closed: one that computes while Python exits may crash it."""
        until = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
