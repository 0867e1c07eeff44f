"""Dynamic sampling: groups without spread give way to new prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import processes, tiny
from tests.collecting import collect
from tests.trainer import by_hand
from tests.trainer.runs import Signalling, assert_same, metrics, newest
from tests.trainer.test_step import run_in, step

from gruppo import api
from gruppo.build import Parts, build
from gruppo.config import serialization
from gruppo.rewards.scoring import Scores
from gruppo.trainer.collect import Collected, Round, join_rounds
from gruppo.trainer.loop import Stopped
from gruppo.trainer.run import Run
from gruppo.trainer.stages import step_params_at
from gruppo.types import Prompt, Rollouts


def number_of(prompt: Any) -> int:
    return int(prompt[0]["content"].split(" ")[0])


def dull_odd(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
    """Every completion of an odd number's prompt gets 1."""
    values = tiny.digits(completions)
    return [1.0 if number_of(p) % 2 else value for p, value in zip(prompts, values, strict=True)]


def lengths(completions: Sequence[Any], **_: Any) -> list[float]:
    return [len(tiny.said(completion)) / 10 for completion in completions]


def run_with(folder: Path, *rewards: Any, **changes: Any) -> Run:
    sizes = {"rollout__group_size": 4, "rollout__max_new_tokens": 12, "rollout__refill_rounds": 8}
    return run_in(folder, Parts(rewards=list(rewards)), **(sizes | changes))


def collected_by(run: Run) -> Collected:
    return collect(run, step_params_at(run.config, run.state.step))


def numbers(rollouts: Any) -> list[int]:
    """The number in each row's prompt."""
    return [number_of(rollouts.prompts[g].inputs) for g in rollouts.group_ids.tolist()]


def test_groups_without_spread_are_replaced_by_the_next_prompts_of_the_stream_within_the_rounds(
    tmp_path,
):
    run, stream = run_with(tmp_path, dull_odd), run_with(tmp_path, dull_odd).source
    collected = collected_by(run)
    slots = [number_of(prompt.inputs) for prompt in stream.take(4)]
    rounds, thrown = 0, 0
    while any(n % 2 for n in slots) and rounds < 8:
        thrown += sum(n % 2 for n in slots)
        slots = [number_of(stream.take(1)[0].inputs) if n % 2 else n for n in slots]
        rounds += 1
    assert rounds and thrown and not any(n % 2 for n in slots)
    batch = collected.batch
    assert numbers(batch.rollouts) == [n for n in slots for _ in range(4)]  # a slot keeps its place
    assert batch.loss_mask.any(dim=1).all() and (batch.advantages != 0).any(dim=1).all()
    assert collected.metrics["refill/rounds_count"] == rounds
    assert collected.metrics["refill/thrown_groups_count"] == thrown
    assert run.source.state_dict() == stream.state_dict()


def test_all_that_was_sampled_is_counted_and_scored_in_the_metrics(tmp_path):
    run = run_with(tmp_path, dull_odd)
    collected = collected_by(run)
    everything, logged = collected.rollouts, collected.metrics
    odd = torch.tensor([n % 2 == 1 for n in numbers(everything)])
    assert 0 < odd.sum() < len(everything) and len(everything) > 16
    rewards = torch.tensor(
        dull_odd(
            everything.completions, [everything.prompts[g].inputs for g in everything.group_ids]
        )
    )
    assert logged["reward/mean"] == pytest.approx(float(rewards.double().mean()), rel=1e-6)
    assert logged["refill/thrown_tokens_count"] == int(everything.lengths[odd].sum())
    assert logged["progress/tokens"] == logged["tokens"] == int(everything.lengths.sum())
    assert logged["progress/rollouts"] == logged["rollouts"] == len(everything)
    assert logged["group/zero_spread_frac"] == int(odd.sum()) / len(everything)


@pytest.mark.silent_bug(13)
def test_a_slot_left_unfilled_keeps_its_last_group_and_enters_no_denominator_and_no_statistic(
    tmp_path,
):
    """The step is the one of a batch without that group: here with all baselines and scales over
    the batch."""
    always = {"objective": {"baseline": "batch_mean", "scale": "batch", "average": "token"}}
    run = run_with(tmp_path, dull_odd, rollout__refill_rounds=1, **always)
    collected = collected_by(run)
    batch = collected.batch
    odd = torch.tensor([n % 2 == 1 for n in numbers(batch.rollouts)])
    assert 0 < int(odd.sum()) < len(odd) == 16
    assert torch.equal(batch.loss_mask.any(dim=1), ~odd)
    good = torch.tensor(tiny.digits(batch.rollouts.completions), dtype=torch.float64)[~odd]
    expected = (good - good.mean()) / (good.std() + 1e-4)
    torch.testing.assert_close(batch.advantages[~odd, 0].double(), expected, rtol=1e-4, atol=1e-5)
    thrown = int(collected.metrics["refill/thrown_groups_count"])
    assert thrown == len(set(collected.rollouts.group_ids.tolist())) - int((~odd).sum()) // 4
    tokens = int(collected.rollouts.lengths.sum()) - int(batch.rollouts.lengths[~odd].sum())
    assert collected.metrics["refill/thrown_tokens_count"] == tokens


def dull(completions: Sequence[Any], **_: Any) -> list[float]:
    return [0.5] * len(completions)


def fails_on_odd(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float]:
    if any(number_of(p) % 2 for p in prompts):
        raise ValueError("odd")
    return tiny.digits(completions)


@pytest.mark.parametrize(("preset", "kl_coef"), [("ppo", 0.1), ("grpo", 0.1)])
def test_where_all_groups_are_alike_for_all_rounds_no_update_is_taken(tmp_path, preset, kl_coef):
    several = {"optim__epochs": 2, "optim__minibatches": 2, "rollout__refill_rounds": 3}
    run = run_with(tmp_path, dull, objective=preset, stage__kl_coef=kl_coef, **several)
    before = by_hand.flat(run.parameters)
    collected, logged = step(run)
    assert torch.equal(by_hand.flat(run.parameters), before)
    assert logged["update/updates_count"] == 0 and not collected.batch.loss_mask.any()
    assert collected.metrics["refill/thrown_groups_count"] == 16 and len(collected.rollouts) == 64
    assert collected.metrics["refill/thrown_tokens_count"] == collected.metrics["tokens"]
    assert collected.metrics["reward/mean"] == 0.5
    assert len(collected.batch.rollouts) == 16


def test_a_penalty_for_length_is_no_spread(tmp_path):
    changes = {"objective": "dapo", "objective__overlong": 6}
    collected = collected_by(run_with(tmp_path, dull, **changes))
    assert collected.metrics["refill/rounds_count"] == 8 and not collected.batch.loss_mask.any()


# --- by which reward ------------------------------------------------------------------------------


# --- joining --------------------------------------------------------------------------------------


def round_of(slots: list[int], size: int, seed: int, draw: int) -> Round:
    """A group of each slot, rows in any order, each third group alike."""
    generator = torch.Generator().manual_seed(seed)
    group_ids = torch.arange(len(slots)).repeat_interleave(size)
    group_ids = group_ids[torch.randperm(len(group_ids), generator=generator)]
    rewards = torch.rand(len(group_ids), generator=generator)
    rewards[group_ids % 3 == 0] = 0.5
    mask = torch.ones(len(group_ids), 1, dtype=torch.bool)
    rollouts = Rollouts(
        prompts=tuple(Prompt(str(slot), "", draw=draw) for slot in slots),
        group_ids=group_ids,
        actions=mask.long(),
        mask=mask,
        lengths=mask[:, 0].long(),
        completions=("",) * len(group_ids),
        sampler_logprobs=mask.float(),
        policy_version=mask.long(),
        temperature=mask[:, 0].float(),
        finish=("stop",) * len(group_ids),
    )
    return Round(rollouts, Scores(rewards, {}), slots)


def test_rounds_are_joined_as_row_by_row():
    rounds = [
        round_of(list(range(7)), 4, 0, 0),
        round_of([0, 3, 6], 4, 1, 1),
        round_of([0], 4, 2, 2),
    ]
    sampled = join_rounds(rounds, None, [1.0], refills=True)
    place, expected, filled = 0, {}, {}
    for one in rounds:
        for group, slot in enumerate(one.slots):
            expected[slot] = [
                place + row for row, g in enumerate(one.rollouts.group_ids.tolist()) if g == group
            ]
            filled[slot] = group % 3 != 0
        place += len(one.rollouts)
    assert sampled.rows == [row for slot in range(7) for row in expected[slot]]
    assert sampled.is_filled.tolist() == [filled[slot] for slot in range(7) for _ in range(4)]
    assert sampled.batch()[0].group_ids.bincount().tolist() == [4] * 7


def test_failures_of_rows_that_are_thrown_away_are_counted_and_shown(tmp_path):
    changes = {
        "rollout__refill_rounds": 8,
        "rollout__group_size": 4,
        "steps": 1,
        "evaluation__prompts": 0,
    }
    run = api.start(tiny.config(tmp_path, **changes), Parts(rewards=[fails_on_odd])).folder
    logged = metrics(run)[0]
    assert logged["reward/exception_count"] == logged["reward/unscored_count"] > 0
    assert logged["refill/thrown_groups_count"] * 4 == logged["reward/exception_count"]
    assert (
        logged["progress/rollouts"] == logged["reward/exception_count"] + 16
    )  # none of them is in the batch
    failed = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    failed = [row for row in failed if "failures" in row]
    assert len(failed) == min(logged["reward/exception_count"], 20)
    assert all(number_of(row["prompt"]) % 2 for row in failed)
    assert "ValueError: odd" in (run / "log.txt").read_text()


def test_prompts_that_score_nothing_at_first_are_no_reason_to_end_where_others_do(tmp_path):
    """All prompts of the first round are without a score; those that replace them are not."""
    calls: list[int] = []

    def late(completions: Sequence[Any], **_: Any) -> list[float | None]:
        calls.append(len(completions))
        return [None] * len(completions) if len(calls) == 1 else tiny.digits(completions)

    run = run_with(tmp_path, late)
    step(run)
    assert len(calls) > 1 and run.state.unscored_steps == 0


# --- failures -------------------------------------------------------------------------------------


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.silent_bug(33)
@pytest.mark.parametrize("preset", ["dapo", "ppo"])
def test_a_run_that_was_stopped_while_it_refilled_is_the_run_that_was_not(tmp_path, preset):
    sizes = {
        "objective": preset,
        "rollout__refill_rounds": 2,
        "rollout__group_size": 2,
        "stage__kl_coef": 0.1,
    }
    several = {
        "optim__epochs": 2,
        "optim__minibatches": 2,
        "reward": [f"{Path(__file__).resolve()}:dull_odd"],
    }
    config = tiny.config(tmp_path, **sizes, **several, steps=4)
    whole = api.start(config).folder
    cursors = json.loads((newest(whole) / "state.json").read_text())["source"]["cursor"]
    assert cursors > 4 * 4  # prompts were replaced
    stop = Signalling(6)  # the evaluation, and three rounds of the first step

    def stopping(completions: Sequence[Any], **columns: Any) -> list[float]:
        stop(completions)
        return dull_odd(completions, **columns)

    stopping.__name__ = "dull_odd"
    with pytest.raises(Stopped):
        api.start(replace(config, runs_dir=str(tmp_path / "parts")), Parts(rewards=[stopping]))
    assert_same(api.start(tmp_path / "parts/run").folder, whole)


# --- ranks ----------------------------------------------------------------------------------------


def collected_rows(config: dict[str, Any], out: str) -> None:
    """What each rank has of the first step's batch, and the rows of each of its minibatches."""
    from gruppo import distributed as dist
    from gruppo.trainer.forward import minibatch_rows

    dist.init()
    run, _ = build(serialization.from_dict(config), Parts())
    step_params = step_params_at(run.config, 0)
    collected = collect(run, step_params)
    batch = collected.batch
    names = [
        f"{n} {tiny.said(o)}"
        for n, o in zip(numbers(batch.rollouts), batch.rollouts.completions, strict=True)
    ]
    kept = batch.loss_mask.any(dim=1).tolist()
    cuts = [[names[row] for row in rows] for rows in minibatch_rows(run, batch.rollouts, 0)]
    logged = {
        name: value for name, value in collected.metrics.items() if not name.startswith("time/")
    }
    Path(out, f"{dist.world_size()}-{dist.rank()}.json").write_text(
        json.dumps([names, kept, cuts, logged])
    )


def test_batch_and_minibatches_do_not_depend_on_the_number_of_ranks(tmp_path):
    sizes = {
        "rollout__prompts": 5,
        "rollout__group_size": 3,
        "rollout__refill_rounds": 1,
        "optim__minibatches": 3,
    }
    config = serialization.to_dict(
        tiny.config(tmp_path, **sizes, reward=[f"{Path(__file__).resolve()}:dull_odd"])
    )
    for count in (1, 3):
        processes.run_ranks(
            count, collected_rows, config, str(tmp_path), folder=tmp_path / f"of-{count}"
        )
    read = {
        n: [json.loads((tmp_path / f"{n}-{rank}.json").read_text()) for rank in range(n)]
        for n in (1, 3)
    }
    [[names, kept, cuts, result]] = read[1]
    assert 0 < kept.count(False) < 15 and result["refill/rounds_count"] == 1
    for rank, (own, own_kept, own_cuts, own_said) in enumerate(read[3]):
        slots = [slot for slot in range(5) if slot % 3 == rank]
        assert own == [names[3 * slot + n] for slot in slots for n in range(3)]
        assert own_kept == [kept[3 * slot + n] for slot in slots for n in range(3)]
        for part, whole in zip(own_cuts, cuts, strict=True):
            assert part == [name for name in whole if name in own]
        assert own_said == pytest.approx(result, rel=1e-6)
