"""A discrete-event simulation of the loop: servers that decode, a trainer, and the slots between them.

Events are ends of rows, of a training step and of a publish; between them, the rows of a server go on at one rate.
Groups start in the order of draws, at most (S + 1) x prompts in flight or waiting, as in ``trainer.slots``. Pure
Python without clocks and threads.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Groups = Sequence[Sequence[int]]
"""Tokens of each row of each group."""


@dataclass(frozen=True)
class Loop:
    """What the two sides of a loop take."""

    prompts: int
    lag: int
    servers: int
    max_rows: int
    """Rows that a server decodes at a time; a larger group is alone on it."""
    decode_step_s: Callable[[int, float], float]
    """Seconds of a decode step of so many rows, whose caches hold so many tokens."""
    prefill_s: Callable[[float], float]
    """Seconds to read so many tokens."""
    train_s: Callable[[Groups], float]
    publish_s: float
    prompt_tokens: float
    refills: bool = True
    """Whether a server takes further groups while it decodes, as vLLM does; the policy itself decodes batches."""


@dataclass
class Timeline:
    """What happened, in seconds and by group."""

    published: list[float] = field(default_factory=list)
    """When each step's weights had been published."""
    waited_s: list[float] = field(default_factory=list)
    """What the trainer waited for the samples of each step."""
    idle_s: float = 0.0
    """Server-seconds without a row."""
    started: list[int] = field(default_factory=list)
    """The version of the weights as each group started: its step minus that is its lag."""
    most_held: int = 0
    """Slots that were taken at a time, at most."""
    most_cached: float = 0.0
    """Tokens in the caches of one server, at most."""

    def lags(self, prompts: int) -> list[int]:
        return [group // prompts - version for group, version in enumerate(self.started)]

    def step_s(self, first: int) -> float:
        """Mean seconds of a step, from step ``first`` on."""
        return (self.published[-1] - self.published[first - 1]) / (len(self.published) - first)


class SimulatedServer:
    """Rows that decode together, on a clock of tokens that all of them share."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.rows: list[tuple[float, float, int]] = []
        """Heap of the values of ``tokens`` at which a row ends and began, and its group."""
        self.tokens = self.begun = 0.0
        """Decode steps since the server was empty, and their sum over the rows as each began."""
        self.at = self.free_at = self.opened_at = self.idle_s = self.token_s = 0.0
        self.stamp = 0
        """Number of its newest event; earlier ones do not apply any more."""

    @property
    def cached(self) -> float:
        """Tokens in the caches of all rows."""
        return len(self.rows) * (self.loop.prompt_tokens + self.tokens) - self.begun

    def advance(self, now: float) -> None:
        if not self.rows:
            self.idle_s += now - self.at
        elif (seconds := now - max(self.at, self.free_at)) > 0:
            self.tokens += seconds / self.token_s
        self.at = now

    def next_end(self) -> float:
        """When the next row ends if nothing else happens. Its time per token is that of half the tokens to come."""
        left = self.rows[0][0] - self.tokens
        self.token_s = self.loop.decode_step_s(
            len(self.rows), self.cached + len(self.rows) * left / 2
        )
        return max(self.at, self.free_at) + left * self.token_s

    def add(self, group: int, lengths: Sequence[int]) -> None:
        if not self.rows:
            self.tokens, self.begun, self.opened_at = 0.0, 0.0, self.at
        for length in lengths:
            heapq.heappush(self.rows, (self.tokens + length, self.tokens, group))
        self.begun += self.tokens * len(lengths)
        self.free_at = max(self.at, self.free_at) + self.loop.prefill_s(self.loop.prompt_tokens)


START, ROW, TRAINED, PUBLISHED = range(4)


def simulate(loop: Loop, lengths: Groups) -> Timeline:
    """Steps of ``loop.prompts`` groups each, in order; ``lengths``: tokens of each row of each group."""
    steps = len(lengths) // loop.prompts
    batches = [lengths[step * loop.prompts : (step + 1) * loop.prompts] for step in range(steps)]
    missing = [sum(map(len, batch)) for batch in batches]  # rows of each step that have not ended
    servers = [SimulatedServer(loop) for _ in range(loop.servers)]
    least = [(0, number) for number in range(loop.servers)]  # heap of servers by their rows
    timeline, queue = Timeline(), deque[int]()
    version, next_group, is_training, idle_since = 0, 0, False, 0.0
    events: list[tuple[float, int, int, int]] = [(0.0, START, 0, 0)]
    while version < steps:
        now, kind, number, stamp = heapq.heappop(events)
        changed = set[int]()
        if kind == ROW:
            if stamp != servers[number].stamp:
                continue
            server, changed = servers[number], {number}
            server.advance(now)
            while (
                server.rows and server.rows[0][0] <= server.tokens + 1e-6
            ):  # of a token: rounding of the clock
                _, begun, group = heapq.heappop(server.rows)
                server.begun -= begun
                missing[group // loop.prompts] -= 1
        elif (
            kind == TRAINED
        ):  # the servers load the new weights, and read what their rows have again
            heapq.heappush(events, (now + loop.publish_s, PUBLISHED, 0, 0))
            for server in servers:
                server.advance(now)
                reading_s = loop.prefill_s(server.cached) if server.rows else 0.0
                server.free_at = max(now, server.free_at) + (loop.publish_s + reading_s)
            changed = {*range(len(servers))}
        elif kind == PUBLISHED:
            timeline.published.append(now)
            version, is_training, idle_since = version + 1, False, now
        while next_group < min(steps, version + loop.lag + 1) * loop.prompts:
            queue.append(next_group)
            next_group += 1
        timeline.most_held = max(timeline.most_held, next_group - version * loop.prompts)
        # a server's entry in the heap is not changed but repeated; the outdated ones are dropped as they come up
        for number in changed:
            heapq.heappush(least, (len(servers[number].rows), number))
        while queue:
            while least[0][0] != len(servers[least[0][1]].rows):
                heapq.heappop(least)
            number = least[0][1]
            server, rows = servers[number], lengths[queue[0]]
            is_open = loop.refills or server.opened_at == now
            if server.rows and (not is_open or len(server.rows) + len(rows) > loop.max_rows):
                break
            server.advance(now)
            server.add(queue.popleft(), rows)
            timeline.started.append(version)
            heapq.heappush(least, (len(server.rows), number))
            changed.add(number)
        for number in changed:
            server = servers[number]
            server.stamp += 1
            timeline.most_cached = max(timeline.most_cached, server.cached)
            if server.rows:
                heapq.heappush(events, (server.next_end(), ROW, number, server.stamp))
        if not is_training and version < steps and not missing[version]:
            is_training = True
            timeline.waited_s.append(now - idle_since)
            heapq.heappush(events, (now + loop.train_s(batches[version]), TRAINED, 0, 0))
    for server in servers:
        server.advance(timeline.published[-1])
    timeline.idle_s = sum(server.idle_s for server in servers)
    return timeline
