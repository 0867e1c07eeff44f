"""The bound on staleness: simulated schedules with random timings, failures, publishes without a
step, and kills."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gruppo.trainer.slots import Group, Slots
from gruppo.types import Prompt, Request

SCHEDULES, SHARDS = 10_000, 4


@dataclass
class Simulation:
    """A trainer and a sampler with ``calls`` threads, in virtual time. Positions stand for
    samples."""

    chance: random.Random
    lag: int
    prompts: int
    steps: int
    calls: int
    chunk: int
    backs_off: float = 0.0
    version: int = 0
    step: int = 0
    now: float = 0.0
    position: int = 0
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The ledger: position to the oldest and newest version of its tokens."""
    calls_under_way: list[tuple[float, list[Group], int]] = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)
    """Step to the positions that it learned from."""
    stale: int = 0
    back_offs: int = 0
    kills: int = 0
    most_ahead: int = 0

    def __post_init__(self) -> None:
        self.slots = Slots(self.lag, self.prompts)

    def fill(self) -> None:
        while (
            self.slots.has_room and self.step + self.slots.next_index // self.prompts < self.steps
        ):
            self.draw()

    def draw(self) -> None:
        prompt = Prompt(str(self.position), "", draw=self.position)
        group = Group(self.position, prompt, {}, Request(prompt, 1), "sampling")
        group.rollouts = self.versions.get(self.position)  # type: ignore[assignment]  # a resumed run reads the ledger
        self.slots.add(group)
        self.position += 1

    def begin_calls(self) -> None:
        while self.slots.waiting and len(self.calls_under_way) < self.calls:
            batch = self.slots.start(self.chunk)
            ends_at = self.now + self.chance.choice([0.1, 1.0, 10.0]) * self.chance.random()
            self.calls_under_way.append((ends_at, batch, self.version))

    def advance(self, until: float) -> None:
        """Let calls end up to a time; a failed one gives nothing."""
        self.begin_calls()
        while self.calls_under_way and min(end for end, *_ in self.calls_under_way) <= until:
            call = min(self.calls_under_way, key=lambda call: call[0])
            self.calls_under_way.remove(call)
            self.now = max(self.now, call[0])
            fails = self.chance.random() < 0.1
            for group in call[1]:
                versions = (
                    None if fails else (call[2], self.version)
                )  # new weights arrived while it was sampled
                self.slots.finish(group, versions)  # type: ignore[arg-type]
                if versions is not None and not group.is_dropped:
                    self.versions[group.position] = versions
            self.begin_calls()
        self.now = max(self.now, until)

    def wait_for(self, groups: list[Group]) -> None:
        for _ in range(10_000):
            for group in groups:
                if group.rollouts is not None and self.slots.is_stale(
                    *group.rollouts, self.version
                ):  # type: ignore[misc]
                    self.stale += 1
                    self.slots.restart(group)
            self.begin_calls()
            if all(group.rollouts is not None for group in groups):
                return
            self.advance(min(end for end, *_ in self.calls_under_way))
        raise AssertionError("the trainer waits forever")

    def take(self) -> Group:
        if not self.slots.queue:
            self.draw()
        group = self.slots.take()
        self.fill()
        self.most_ahead = max(self.most_ahead, self.slots.next_index)
        return group

    def train_a_step(self) -> None:
        batch = [self.take() for _ in range(self.prompts)]
        self.wait_for(batch)
        for _ in range(
            self.chance.choice([0, 0, 1])
        ):  # groups without spread give way to the next draws
            replaced = [n for n in range(self.prompts) if self.chance.random() < 0.4]
            new = [self.take() for _ in replaced]
            self.wait_for(new)
            for n, group in zip(replaced, new, strict=True):
                batch[n] = group
        for group in batch:
            oldest, newest = group.rollouts  # type: ignore[misc]
            assert self.version - self.lag <= oldest <= newest <= self.version
        self.advance(self.now + self.chance.choice([0.1, 1.0]) * self.chance.random())
        self.trained[self.step] = [group.position for group in self.slots.taken]
        self.step, self.version = self.step + 1, self.version + 1
        self.slots.release()
        self.fill()
        if self.chance.random() < self.backs_off:
            self.version, self.back_offs = self.version + 1, self.back_offs + 1

    def kill_and_resume(self, step: int, version: int, position: int) -> None:
        """What is left is the ledger, and a checkpoint of this step."""
        self.step, self.version, self.position, self.kills = step, version, position, self.kills + 1
        self.slots, self.calls_under_way = Slots(self.lag, self.prompts), []


def simulate(seed: int) -> Simulation:
    chance = random.Random(seed)
    sizes = [
        chance.randint(0, 4),
        chance.randint(1, 6),
        chance.randint(1, 8),
        chance.randint(1, 4),
        chance.randint(1, 6),
    ]
    run = Simulation(chance, *sizes, backs_off=chance.choice([0.0, 0.0, 0.2]))
    saved = (0, 0, 0)
    kills = chance.choice([0, 0, 1, 3])
    while run.step < run.steps:
        if kills and chance.random() < 0.3:
            kills -= 1
            run.kill_and_resume(*saved)
        run.train_a_step()
        if chance.random() < 0.4:
            first = run.slots.queue[0].position if run.slots.queue else run.position
            saved = (run.step, run.version, first)
    return run


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_schedule_breaks_the_bound_the_order_or_the_number_of_slots(shard):
    seen: Counter[str] = Counter()
    for seed in range(shard, SCHEDULES, SHARDS):
        run = simulate(seed)
        assert run.most_ahead <= (run.lag + 1) * run.prompts
        positions = [position for step in sorted(run.trained) for position in run.trained[step]]
        assert positions == list(range(len(positions)))  # each draw once, in order
        assert run.back_offs or run.trained.keys() == {*range(run.steps)}
        if not run.back_offs and not run.kills:
            assert not run.stale  # the slots alone keep the bound
            seen["nothing but timings and failures"] += 1
        seen["sampled again"] += bool(run.stale)
        seen["lagged"] += any(newest > oldest for oldest, newest in run.versions.values())
    assert min(seen.values()) > 50, seen


def test_without_lag_nothing_is_sampled_ahead():
    slots = Slots(0, 2)
    groups = [
        Group(n, Prompt(str(n), ""), {}, Request(Prompt(str(n), ""), 1), "") for n in range(2)
    ]
    for group in groups:
        assert slots.has_room
        slots.add(group)
    assert not slots.has_room
    assert [slots.take(), slots.take()] == groups and not slots.has_room
    slots.release()
    assert slots.has_room
