"""Groups that grow where their first rewards differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.collecting import collect
from tests.trainer import by_hand
from tests.trainer.runs import Signalling, assert_same, metrics
from tests.trainer.test_resampling import collected_by, dull_odd, number_of, numbers
from tests.trainer.test_step import run_in, step

from gruppo import api
from gruppo import distributed as dist
from gruppo.build import Parts, build
from gruppo.config import serialization
from gruppo.rewards.scoring import Scores
from gruppo.trainer import checks
from gruppo.trainer.collect import Collected, rescore_whole_groups
from gruppo.trainer.forward import minibatch_rows
from gruppo.trainer.loop import Stopped
from gruppo.trainer.run import Run
from gruppo.types import DataError, GruppoError, Prompt

SIZES = {"rollout__group_size": 4, "rollout__first_samples": 2, "rollout__max_new_tokens": 12}


def places(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
    """Of an even number's prompt 0 and 1 in turn, or 0 and 3 where four divides it; of an odd
    number's always 1."""
    seen: dict[int, int] = {}
    values = []
    for number in map(number_of, prompts):
        seen[number] = seen.get(number, -1) + 1
        values.append(1.0 if number % 2 else (seen[number] % 2) * (1.0 if number % 4 else 3.0))
    return values


def run_with(folder: Path, *rewards: Any, **changes: Any) -> Run:
    return run_in(folder, Parts(rewards=list(rewards)), **(SIZES | changes))


def sizes_by_prompt(collected: Collected) -> list[tuple[int, int]]:
    """Number in the prompt and size of the group, in order of the batch."""
    rollouts = collected.batch.rollouts
    assert rollouts is not None
    found, counts = rollouts.group_ids.unique_consecutive(return_counts=True)
    return [
        (number_of(rollouts.prompts[g].inputs), n)
        for g, n in zip(found.tolist(), counts.tolist(), strict=True)
    ]


def shares_by_hand(slots: Sequence[int], budget: int, cap: int) -> list[int]:
    """Each next sample to the largest s^2 / (n (n + 1)), the spreads of (0, 1) and (0, 3) being 1
    to 3."""
    spread, sizes = [0 if n % 2 else 1 if n % 4 else 3 for n in slots], [2] * len(slots)
    for _ in range(budget):
        gains = [s**2 / (n * (n + 1)) if n < cap else 0 for s, n in zip(spread, sizes, strict=True)]
        if max(gains) > 0:
            sizes[gains.index(max(gains))] += 1
    return sizes


@pytest.mark.parametrize("prompts", [8, 12])
def test_groups_with_spread_grow_by_hand_within_the_budget_and_the_cap(tmp_path, prompts):
    changes = {"rollout__prompts": prompts}
    run, stream = run_with(tmp_path, places, **changes), run_with(tmp_path, places).source
    slots = [number_of(prompt.inputs) for prompt in stream.take(prompts)]
    kinds = {1 if n % 2 else 2 if n % 4 else 4 for n in slots}
    assert kinds == {1, 2, 4}
    collected = collected_by(run)
    expected = shares_by_hand(slots, budget=2 * prompts, cap=8)
    assert sizes_by_prompt(collected) == list(zip(slots, expected, strict=True))
    assert len(collected.batch.rewards) == sum(expected) <= 4 * prompts
    assert collected.metrics["group/zero_spread_frac"] == sum(n % 2 for n in slots) / prompts


def test_a_group_that_grew_has_the_samples_of_one_that_was_sampled_whole(tmp_path):
    grown = collected_by(run_with(tmp_path, dull_odd)).batch.rollouts
    whole = collected_by(
        run_with(tmp_path, dull_odd, rollout__group_size=8, rollout__first_samples=0)
    ).batch.rollouts
    assert grown is not None and whole is not None
    ids, sizes = grown.group_ids.unique_consecutive(return_counts=True)
    assert len(set(sizes.tolist())) > 1
    for place, (group, size) in enumerate(zip(ids.tolist(), sizes.tolist(), strict=True)):
        mine = (grown.group_ids == group).nonzero()[:, 0].tolist()
        assert mine == list(range(mine[0], mine[0] + size))  # the rows of a slot follow each other
        theirs = (whole.group_ids == whole.group_ids[8 * place]).nonzero()[:size, 0].tolist()
        for a, b in zip(mine, theirs, strict=True):
            n = int(grown.lengths[a])
            assert torch.equal(grown.actions[a, :n], whole.actions[b, :n]) and n == int(
                whole.lengths[b]
            )
            assert grown.prompts[group].id == whole.prompts[int(whole.group_ids[b])].id


def test_what_growing_did_is_counted_and_its_tokens_too(tmp_path):
    collected = collected_by(run_with(tmp_path, dull_odd))
    logged, rollouts, scores = collected.metrics, collected.rollouts, collected.scores
    assert rollouts is not None and scores is not None
    sizes = torch.tensor([size for _, size in sizes_by_prompt(collected)])
    assert 0 < int((sizes > 2).sum()) < 4
    assert logged["growth/grown_groups_count"] == int((sizes > 2).sum())
    assert logged["growth/grown_rows_count"] == int(sizes.sum()) - 8
    assert logged["progress/tokens"] == logged["tokens"] == int(rollouts.lengths.sum())
    assert logged["progress/rollouts"] == logged["rollouts"] == int(sizes.sum())
    assert (logged["group/size_min"], logged["group/size_max"]) == (2, int(sizes.max()))
    first = torch.cat([scores.rewards[rollouts.group_ids == g][:2] for g in range(4)])
    assert logged["growth/first_reward_mean"] == pytest.approx(
        float(first.double().mean()), rel=1e-6
    )
    assert logged["growth/first_reward_mean"] != pytest.approx(logged["reward/mean"], rel=1e-3)


@pytest.mark.parametrize("refill", [0, 2])
def test_a_step_of_several_updates_with_unequal_groups_is_the_step_by_hand(tmp_path, refill):
    changes = {
        "objective": "ppo",
        "stage__kl_coef": 0.2,
        "optim__lr": 0.05,
        "optim__epochs": 2,
        "optim__minibatches": 2,
        "rollout__refill_rounds": refill,
        "rollout__group_size": 4 + refill,
    }
    run = run_with(tmp_path, dull_odd, **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in run.parameters:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    networks = by_hand.Networks.of(run)
    collected, logged = step(run)
    rollouts = collected.batch.rollouts
    rewards = dull_odd(
        rollouts.completions, [rollouts.prompts[g].inputs for g in rollouts.group_ids.tolist()]
    )
    is_out = [
        bool(refill) and n % 2 == 1 for n in numbers(rollouts)
    ]  # refilled, but still without spread
    rewards = [float("nan") if out else value for out, value in zip(is_out, rewards, strict=True)]
    assert len({size for _, size in sizes_by_prompt(collected)}) > 1
    rows = by_hand.credited(run, networks, rollouts, rewards)
    assert by_hand.learned(run, networks, rollouts, rows) == logged["update/updates_count"] == 4
    expected = by_hand.flat([*networks.of_policy, *networks.of_critic])
    torch.testing.assert_close(by_hand.flat(run.parameters), expected, rtol=0, atol=1e-5)


def test_empty_slots_are_refilled_first_and_what_that_cost_is_of_the_budget(tmp_path):
    run = run_with(tmp_path, places, rollout__refill_rounds=2, rollout__prompts=8)
    stream = run_with(tmp_path, places).source
    slots, thrown, rounds = [number_of(prompt.inputs) for prompt in stream.take(8)], 0, 0
    while rounds < 2 and any(n % 2 for n in slots):
        thrown += sum(n % 2 for n in slots)
        slots = [number_of(stream.take(1)[0].inputs) if n % 2 else n for n in slots]
        rounds += 1
    collected = collected_by(run)
    sizes = sizes_by_prompt(collected)
    assert thrown and [number for number, _ in sizes] == slots
    assert all(size == 2 for number, size in sizes if number % 2)
    assert any(size > 2 for number, size in sizes if not number % 2)
    assert collected.metrics["rollouts"] == 8 * 4 == sum(size for _, size in sizes) + 2 * thrown
    left = sum(n % 2 for n in slots)
    assert collected.metrics["refill/thrown_groups_count"] == thrown + left
    assert collected.metrics["refill/rounds_count"] == rounds
    assert collected.batch.loss_mask.any(dim=1).tolist() == [
        n % 2 == 0 for n, size in sizes for _ in range(size)
    ]


def test_resamplinging_beyond_the_budget_leaves_nothing_to_grow_by(tmp_path):
    run = run_with(
        tmp_path, dull_odd, rollout__refill_rounds=8, rollout__prompts=8, rollout__group_size=3
    )
    collected = collected_by(run)
    assert collected.metrics["rollouts"] > 24 and collected.metrics["growth/grown_rows_count"] == 0


def rising(completions: Sequence[Any], **_: Any) -> list[float]:
    """No two rows alike."""
    return [float(place) for place in range(len(completions))]


# --- the size of all groups on a schedule ---


def test_a_scheduled_group_size_may_exceed_the_rollouts_and_is_the_budget(tmp_path):
    several = {
        "optim__minibatches": 2,
        "stage__group_size": "steps:2,1=7",
        "rollout__first_samples": 0,
    }
    run = run_with(tmp_path, tiny.digits, **several)
    for step_, size in ((0, 2), (1, 7)):
        batch = collect(run, run.stage_schedule.step_params(step_)).batch
        assert (
            batch.rollouts is not None
            and batch.rollouts.group_ids.bincount().tolist() == [size] * 4
        )
        parts = list(minibatch_rows(run, batch.rollouts, 0))
        assert (
            sorted(torch.cat(parts).tolist()) == list(range(4 * size)) and len(parts[0]) == 2 * size
        )
    run = run_with(tmp_path, rising, stage__group_size="steps:3,1=9", rollout__group_size=2)
    sizes = [
        len(collect(run, run.stage_schedule.step_params(step_)).batch.rewards) for step_ in (0, 1)
    ]
    assert sizes == [12, 36]


# --- rewards that are asked twice ---


def test_a_part_that_applies_to_some_rows_of_a_grown_group_applies_to_all_of_it():
    nan = float("nan")
    parts = {"a": torch.tensor([1.0, 1, 1, 1, 1]), "b": torch.tensor([nan, nan, 2, nan, nan])}
    scores = Scores(torch.tensor([1.0, 1, 3, nan, 1]), parts)
    group_ids = torch.tensor([0, 0, 0, 0, 1])
    whole = rescore_whole_groups(scores, group_ids, (1.0, 1.0))
    assert whole.rewards.isnan().tolist() == [True, True, False, True, False]
    assert whole.rewards[[2, 4]].tolist() == [3.0, 1.0]
    assert torch.equal(
        rescore_whole_groups(scores, group_ids, (1.0, 0.0)).rewards.isnan(), scores.rewards.isnan()
    )


class Undrawn:
    """A source of one's own that numbers no draw and asks the same at all times."""

    def take(self, n: int) -> list[Prompt]:
        return [Prompt("0", [{"role": "user", "content": "2 + 2 = ?"}]) for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@pytest.mark.parametrize("kind", [{}, {"rollout__first_samples": 0, "rollout__refill_rounds": 1}])
def test_prompts_that_cannot_be_told_apart_are_refused_where_groups_are_refilled_or_grown(
    tmp_path, kind
):
    run = build(
        tiny.config(tmp_path, **(SIZES | kind)), Parts(data=Undrawn(), rewards=[tiny.digits])
    )[0]
    with pytest.raises(DataError, match=r"the same id and draw.*Prompt\(\.\.\., draw=n\)"):
        collected_by(run)


# --- resuming, several ranks ---

GROWING = {
    **SIZES,
    "optim__minibatches": 2,
}


@pytest.mark.silent_bug(33)
def test_a_run_with_growing_groups_resumes_to_the_bit(tmp_path):
    whole = api.start(tiny.config(tmp_path, steps=5, **GROWING), Parts(rewards=[dull_odd])).folder
    stops = Signalling(5)

    def stopping(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
        stops(completions)
        return dull_odd(completions, prompts)

    stopping.__name__ = "dull_odd"
    config = replace(serialization.load(whole / "config.json"), name="parts")
    with pytest.raises(Stopped):
        api.start(config, Parts(rewards=[stopping]))
    assert_same(api.start(tmp_path / "runs/parts", Parts(rewards=[dull_odd])).folder, whole)
    assert sum(row.get("growth/grown_rows_count", 0) for row in metrics(whole)) > 0


def collected_rows(config: dict[str, Any], out: str) -> None:
    """What each rank has of the first step's batch, the rows of each of its minibatches, and the
    metrics."""
    dist.init()
    run, _ = build(serialization.from_dict(config), Parts())
    collected = collected_by(run)
    rollouts = collected.batch.rollouts
    assert rollouts is not None
    names = [
        f"{n} {tiny.said(o)}" for n, o in zip(numbers(rollouts), rollouts.completions, strict=True)
    ]
    cuts = [[names[row] for row in rows] for rows in minibatch_rows(run, rollouts, 0)]
    logged = {
        name: value for name, value in collected.metrics.items() if not name.startswith("time/")
    }
    Path(out, f"{dist.world_size()}-{dist.rank()}.json").write_text(
        json.dumps([names, cuts, logged])
    )


@pytest.mark.silent_bug(12)
@pytest.mark.silent_bug(25)
@pytest.mark.parametrize("refill", [0, 1])
def test_growing_does_not_depend_on_the_number_of_ranks(tmp_path, refill):
    sizes = SIZES | {
        "rollout__prompts": 5,
        "optim__minibatches": 3,
        "rollout__refill_rounds": refill,
    }
    config = serialization.to_dict(
        tiny.config(tmp_path, **sizes, reward=[f"{Path(__file__).resolve()}:dull_odd"])
    )
    for count in (1, 2):
        processes.run_ranks(
            count, collected_rows, config, str(tmp_path), folder=tmp_path / f"of-{count}"
        )
    read = {
        n: [json.loads((tmp_path / f"{n}-{rank}.json").read_text()) for rank in range(n)]
        for n in (1, 2)
    }
    [[names, cuts, result]] = read[1]
    assert result["growth/grown_rows_count"] > 0
    assert (
        sorted(chain.from_iterable(cuts)) == sorted(names)
        and max(map(len, cuts)) - min(map(len, cuts)) <= 1
    )
    assert sorted(chain.from_iterable(own for own, _, _ in read[2])) == sorted(names)
    for number, cut in enumerate(cuts):
        assert sorted(chain.from_iterable(own[number] for _, own, _ in read[2])) == sorted(cut)
    for _, _, own_said in read[2]:
        assert own_said == {
            name: pytest.approx(value, rel=1e-6, nan_ok=True) for name, value in result.items()
        }


# --- refusals ---

REFUSED = {
    "one first sample": (
        {"rollout__first_samples": 1},
        r"first_samples=1 is out of range; it needs at least 2",
    ),
    "none left to grow by": (
        {"rollout__first_samples": 4},
        r"first_samples=4 is out of range; .* fewer than the 4 samples of rollout.group_size",
    ),
    "a schedule below the first samples": (
        {"rollout__first_samples": 3, "stage__group_size": "linear:8,3"},
        r"first_samples=3 .* fewer than the 3 samples",
    ),
    "a group of one on a schedule": (
        {"rollout__first_samples": 0, "stage__group_size": "linear:4,1"},
        r"group_size=1 gives no",
    ),
    "an endless schedule": (
        {"stage__group_size": "linear:4,inf"},
        r"stage.group_size='linear:4,inf'.* out of range",
    ),
    "more minibatches than rows": (
        {"optim__minibatches": 9},
        r"optim.minibatches=9 is more than the 8 rows of a step",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_grow_is_refused_with_the_way_out(tmp_path, what):
    changes, why = REFUSED[what]
    with pytest.raises(GruppoError, match=why):
        checks.check(tiny.config(tmp_path, **(SIZES | changes)))
