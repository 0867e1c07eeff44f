"""Slots of asynchronous rollouts: which groups are sampled ahead of the step that learns from them.

A group takes a slot when its prompt is drawn, and gives it back after it was trained on and the new
weights were published. With (S + 1) x prompts slots, every step using ``prompts`` of them in the
order of draws, a group starts at most S publishes before its step: the bound on staleness holds for
each group, not on average. Pure Python, without threads and clocks; ``PrefetchEngine`` calls it
under its lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gruppo.types import Prompt, Request, Rollouts


@dataclass(eq=False)
class Group:
    """A prompt that was drawn, and its samples."""

    position: int
    """Position of the prompt in the stream of draws."""
    prompt: Prompt
    source: dict[str, Any]
    """Position of the prompt source before the draw, from which a resumed run draws it again."""
    request: Request | None = None
    """None: nothing is sampled, on this rank or at all."""
    sampling: Any = None
    rollouts: Rollouts | None = None
    is_counted: bool = True
    """Whether it is one of a step's prompts, on this or another rank; False for a prompt that
    cannot be used."""
    is_started: bool = False
    is_dropped: bool = False
    """Whether its samples are not needed any more."""


@dataclass(eq=False)
class Slots:
    """Groups in the order of draws: queued (waiting, being sampled, or done), then taken by a step,
    then released."""

    lag: int
    prompts: int
    queue: deque[Group] = field(default_factory=deque)
    taken: list[Group] = field(default_factory=list)
    """Groups of the step that is under way."""
    waiting: list[Group] = field(default_factory=list)
    """Groups to be sampled, in this order."""
    running: int = 0
    """Groups that are being sampled."""

    @property
    def next_index(self) -> int:
        """Number of the next group to draw, counted from the first of the step under way, or of the
        next step."""
        # a prompt that replaces another one of the step under way uses its slot
        held = min(sum(group.is_counted for group in self.taken), self.prompts)
        return held + sum(group.is_counted for group in self.queue)

    @property
    def has_room(self) -> bool:
        return self.next_index < (self.lag + 1) * self.prompts

    def add(self, group: Group) -> None:
        """Add a group that was drawn; one without samples is to be sampled."""
        self.queue.append(group)
        if group.request is not None and group.rollouts is None:
            self.waiting.append(group)

    def take(self) -> Group:
        """Hand the next group to the step."""
        group = self.queue.popleft()
        self.taken.append(group)
        return group

    def start(self, count: int) -> list[Group]:
        """Start up to ``count`` groups that one call can sample."""
        batch = [group for group in self.waiting if group.sampling == self.waiting[0].sampling][
            :count
        ]
        for group in batch:
            self.waiting.remove(group)
            group.is_started = True
        self.running += len(batch)
        return batch

    def finish(self, group: Group, rollouts: Rollouts | None) -> None:
        """A call has ended; ``rollouts`` is None where it failed, and the group is sampled again
        before all others."""
        self.running -= 1
        group.is_started = False
        group.rollouts = rollouts
        if rollouts is None and not group.is_dropped:
            self.waiting.insert(0, group)

    def drop(self, group: Group) -> None:
        """Throw away the samples of a group, whether they are there or not."""
        group.is_dropped = True
        if group in self.waiting:
            self.waiting.remove(group)

    def restart(self, group: Group) -> None:
        """Sample a group again, before all others."""
        group.rollouts = None
        self.waiting.insert(0, group)

    def release(self) -> list[Group]:
        """After the step was trained on and its weights were published: its groups give their slots
        back."""
        released, self.taken = self.taken, []
        for group in released:
            self.drop(group)  # of a step that failed to ask for it
        return released

    def is_stale(self, oldest: int, newest: int, version: int) -> bool:
        """Whether samples of these versions are beyond the bound in a step that trains weights
        ``version``.

        A return to the best weights publishes without a step. Versions of the future are those of a
        trainer that was killed, and learned otherwise than the resumed one.
        """
        return version - oldest > self.lag or newest > version
