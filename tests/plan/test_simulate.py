"""The simulated loop: cases with a formula, the bound on staleness, and the slots of the trainer itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gruppo.plan.simulate import Loop, Timeline, simulate
from gruppo.trainer.slots import Group, Slots
from gruppo.types import Prompt, Request

TRAIN_S, PUBLISH_S, TOKEN_S = 7.0, 2.0, 0.5
LOOP = Loop(
    prompts=4,
    lag=0,
    servers=4,
    max_rows=64,
    decode_step_s=lambda rows, cached: TOKEN_S,
    prefill_s=lambda tokens: 0.0,
    train_s=lambda groups: TRAIN_S,
    publish_s=PUBLISH_S,
    prompt_tokens=10.0,
)


def random_lengths(seed: int, groups: int, size: int = 3, longest: int = 40) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randint(1, longest) for _ in range(size)] for _ in range(groups)]


def test_a_synchronous_step_is_its_longest_row_then_training_then_a_publish():
    lengths = random_lengths(0, 20)
    ends, before = simulate(LOOP, lengths).published, 0.0
    for step in range(5):
        longest = max(max(rows) for rows in lengths[4 * step : 4 * step + 4])
        before += TOKEN_S * longest + TRAIN_S + PUBLISH_S
        assert ends[step] == pytest.approx(before)


@pytest.mark.parametrize("length", [4, 40])
def test_an_asynchronous_step_is_the_longer_of_the_two_sides_and_a_publish(length):
    """Rows of one length on servers enough for two steps: sampling takes L decode steps, but for the pause."""
    loop = replace(LOOP, lag=1, servers=8)
    timeline = simulate(loop, [[length] * 3] * 40)
    # the groups of step k start after publish k - 2: a turn of two steps has L decode steps, the other step's pause,
    # and then the training and the publish of their own
    turn = TOKEN_S * length + PUBLISH_S
    assert timeline.step_s(4) == pytest.approx(
        max(TRAIN_S + PUBLISH_S, (turn + TRAIN_S + PUBLISH_S) / 2)
    )


def test_rows_that_share_a_server_slow_each_other_down_until_they_end():
    """Two rows at 2 s a token and one at 1 s: the short one ends after 2 x 3, the long one 5 tokens later."""
    loop = replace(LOOP, prompts=1, servers=1, decode_step_s=lambda rows, cached: float(rows))
    assert simulate(loop, [[3, 8]]).published == [pytest.approx(2 * 3 + 5 + TRAIN_S + PUBLISH_S)]


def test_the_cache_grows_with_each_token():
    """A step of a row with c tokens takes c: 5 tokens after a prompt of 10 take 10.5 + ... + 14.5, each half-way."""
    loop = replace(LOOP, prompts=1, servers=1, decode_step_s=lambda rows, cached: cached)
    assert simulate(loop, [[5]]).waited_s == [pytest.approx(5 * 12.5)]


def test_groups_beyond_the_rows_of_a_server_wait_for_it():
    loop = replace(LOOP, servers=1, max_rows=6)
    for refills, expected in ((True, 10 + 4 + 2), (False, 10 + 4)):
        lengths = [[10, 10, 10], [2, 2, 2], [4, 4, 4], [2, 2, 2]]
        # taken one by one as there is room: 2 then 4 then 2 beside 10; in batches: max(10, 2), then max(4, 2)
        waited = simulate(replace(loop, refills=refills), lengths).waited_s[0]
        assert waited == pytest.approx(TOKEN_S * (10 if refills else expected))


def test_more_servers_are_never_slower_and_their_idle_time_is_counted():
    lengths = random_lengths(1, 24)
    seconds = [
        simulate(replace(LOOP, servers=n, decode_step_s=lambda rows, _: 0.1 * rows), lengths)
        for n in (1, 2, 4)
    ]
    assert [t.published[-1] for t in seconds] == sorted(
        (t.published[-1] for t in seconds), reverse=True
    )
    timeline = simulate(replace(LOOP, servers=5), lengths)  # one has never a group
    assert timeline.idle_s > timeline.published[-1]


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_on_staleness_holds_for_each_group_of_random_loops(seed):
    chance = random.Random(seed)
    lag, prompts, steps = chance.randint(0, 4), chance.randint(1, 6), 8
    loop = replace(
        LOOP,
        prompts=prompts,
        lag=lag,
        servers=chance.randint(1, 5),
        max_rows=chance.randint(1, 30),
        decode_step_s=lambda rows, cached: 0.01 * rows + 1e-4 * cached,
        prefill_s=lambda tokens: 0.001 * tokens,
        train_s=lambda groups: 0.02 * sum(map(sum, groups)) * chance.random(),
        publish_s=chance.random(),
    )
    timeline = simulate(loop, random_lengths(seed, prompts * steps))
    assert len(timeline.published) == steps and timeline.published == sorted(timeline.published)
    assert len(timeline.started) == prompts * steps
    lags = timeline.lags(prompts)
    assert min(lags) >= 0 and max(lags) <= lag
    assert timeline.most_held == min(lag + 1, steps) * prompts
    replay_in_slots(timeline, lag, prompts, steps)


def replay_in_slots(timeline: Timeline, lag: int, prompts: int, steps: int) -> None:
    """The trainer's own slots allow each start at the version at which the simulation has it."""
    slots, position = Slots(lag, prompts), 0

    def draw() -> None:
        nonlocal position
        while slots.has_room and position < prompts * steps:
            prompt = Prompt(str(position), "", draw=position)
            slots.add(Group(position, prompt, {}, Request(prompt, 1), "sampling"))
            position += 1

    for version in range(steps):
        draw()
        for group, started in enumerate(timeline.started):
            if started == version:
                assert slots.start(1)[0].position == group
        for _ in range(prompts):
            slots.take()
        slots.release()


def test_a_longer_lag_never_makes_the_simulated_run_slower():
    lengths: Sequence[Sequence[int]] = random_lengths(3, 48)
    ends = [simulate(replace(LOOP, lag=lag, servers=2), lengths).published[-1] for lag in (0, 1, 2)]
    assert ends[0] > ends[1] >= ends[2]
