"""What outlives a batch: moving statistics of the rewards, followed by hand through a run, and
resumed to the bit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.trainer.runs import Signalling, assert_same, newest
from tests.trainer.test_step import none_for_even, run_in, step

from gruppo import api
from gruppo.build import Parts
from gruppo.trainer import advantages
from gruppo.trainer.loop import Stopped
from gruppo.trainer.run_dir import boundary_state


@pytest.fixture(autouse=True)
def half_per_step(monkeypatch):
    """Moving statistics that forget half in each step, so that few steps show how they move."""
    monkeypatch.setattr(
        advantages, "step_advantages", partial(advantages.step_advantages, decay=0.5)
    )


OWN: dict[str, Any] = {"combine": "normalize_then_sum", "scale": "running"}
SETS: dict[str, dict[str, Any]] = {
    "scale running": {"objective": {"scale": "running"}},
    "scale prompt": {"objective": {"scale": "prompt"}},
    "baseline running": {"objective": {"baseline": "running", "scale": "none"}},
    "each of two": {"objective": OWN, "two": True},
    "ppo": {
        "objective": "ppo",
        "optim__stop_kl": 0.02,
        "optim__lr": 0.1,
        "optim__epochs": 3,
        "stage__kl_coef": 0.1,
    },
}


def counted(completions: Sequence[Any], **_: Any) -> list[float]:
    return [100.0 * tiny.said(completion).count("a") for completion in completions]


@pytest.mark.slow
@pytest.mark.silent_bug(33)
@pytest.mark.parametrize("kind", ["scale running", "each of two", "ppo"])
def test_moving_statistics_are_saved_and_resumed_to_the_bit(tmp_path, kind):
    changes = {"rollout__group_size": 4, "optim__minibatches": 2} | SETS[kind]
    here = Path(__file__).resolve()
    names = [tiny.reward("digits")] + [f"{here}:counted"] * changes.pop("two", False)
    config = tiny.config(tmp_path, reward=names, steps=5, **changes)
    whole = api.start(config).folder
    running = json.loads((newest(whole) / "state.json").read_text())["running"]
    assert set(running) == (
        {"digits", "counted"} if len(names) > 1 else set() if kind == "ppo" else {"sum"}
    )
    stop = Signalling(5)

    def stopping(completions: Sequence[Any], **_: Any) -> list[float]:
        return stop(completions)

    stopping.__name__ = "digits"
    with pytest.raises(Stopped):
        parts = Parts(rewards=[stopping, counted][: len(names)])
        api.start(replace(config, runs_dir=str(tmp_path / "parts")), parts)
    assert_same(api.start(tmp_path / "parts/run").folder, whole)


def rewards_of(run: Any, count: int) -> list[tuple[torch.Tensor, Any]]:
    """Rewards and advantages of some steps, and whose they are."""
    batches = []
    for _ in range(count):
        collected, _ = step(run)
        run.state.step += 1
        batches.append((collected.batch.rewards.double(), collected.batch))
    return batches


def test_a_running_baseline_is_followed_by_hand(tmp_path):
    run = run_in(tmp_path, Parts(rewards=[none_for_even]), **SETS["baseline running"])
    total = weight = 0.0
    for rewards, batch in rewards_of(run, 3):
        scored = rewards.isfinite()
        total, weight = 0.5 * total + 0.5 * float(rewards[scored].mean()), 0.5 * weight + 0.5
        expected = torch.where(scored, rewards - total / weight, 0)
        torch.testing.assert_close(batch.advantages[:, 0].double(), expected, rtol=1e-5, atol=1e-6)
    assert run.state.running == {"sum": {"mean": pytest.approx([total, weight], rel=1e-12)}}


def test_a_running_scale_is_followed_by_hand(tmp_path):
    run = run_in(tmp_path, rollout__group_size=4, **SETS["scale running"])
    total = weight = 0.0
    for rewards, batch in rewards_of(run, 3):
        groups = rewards.reshape(4, 4)
        centred = groups - groups.mean(dim=1, keepdim=True)
        total, weight = 0.5 * total + 0.5 * float(centred.square().sum() / 12), 0.5 * weight + 0.5
        expected = centred.flatten() / ((total / weight) ** 0.5 + 1e-4)
        torch.testing.assert_close(batch.advantages[:, 0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["scale running", "baseline running", "each of two"])
def test_a_run_tells_its_moving_statistics(tmp_path, kind):
    rewards = [tiny.digits, counted] if "two" in SETS[kind] else [tiny.digits]
    changes = {name: value for name, value in SETS[kind].items() if name != "two"}
    run = run_in(tmp_path, Parts(rewards=rewards), rollout__group_size=4, **changes)
    total: dict[str, list[float]] = {}
    for _ in range(2):
        collected, _ = step(run)
        run.state.step += 1
        parts = collected.scores.parts if len(rewards) > 1 else {"": collected.scores.rewards}
        for name, part in parts.items():
            area = f"reward/{name}/" if name else "reward/"
            groups = part.double().reshape(4, 4)
            spread = float((groups - groups.mean(dim=1, keepdim=True)).square().sum() / 12)
            now = float(groups.mean()) if kind == "baseline running" else spread
            total.setdefault(area, []).append(now)
    for area, (first, second) in total.items():
        moving = (0.25 * first + 0.5 * second) / 0.75
        expected = (
            {f"{area}running_mean": moving}
            if kind == "baseline running"
            else {f"{area}running_std_within_group": moving**0.5}
        )
        measured = {
            name: value
            for name, value in collected.metrics.items()
            if name.startswith(f"{area}running")
        }
        assert measured == pytest.approx(expected, rel=1e-6)


def test_the_scale_of_a_prompt_is_that_of_its_last_rewards(tmp_path):
    data = tiny.write_rows(tmp_path / "three.jsonl", tiny.rows(3))
    run = run_in(
        tmp_path,
        data=data,
        prompts__held_out_fraction=0.0,
        rollout__prompts=3,
        **SETS["scale prompt"],
    )
    history: dict[str, list[float]] = {}
    for rewards, batch in rewards_of(run, 3):
        for row, group in enumerate(batch.rollouts.group_ids.tolist()):
            history.setdefault(batch.rollouts.prompts[group].id, []).append(float(rewards[row]))
        for group, prompt in enumerate(batch.rollouts.prompts):
            own = rewards[3 * group : 3 * group + 3]
            expected = (own - own.mean()) / (statistics.stdev(history[prompt.id]) + 1e-4)
            got = batch.advantages[3 * group : 3 * group + 3, 0].double()
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert (
        all(len(past) == 9 for past in history.values())
        and run.state.running["sum"]["prompts"] == history
    )


def test_each_of_several_rewards_has_moving_statistics_of_its_own(tmp_path):
    run = run_in(
        tmp_path, Parts(rewards=[tiny.digits, counted]), rollout__group_size=4, objective=OWN
    )
    moving = [[0.0, 0.0], [0.0, 0.0]]
    for _ in range(3):
        collected, _ = step(run)
        run.state.step += 1
        total = torch.zeros(16, dtype=torch.float64)
        for mean, name in zip(moving, ("digits", "counted"), strict=True):
            groups = collected.scores.parts[name].double().reshape(4, 4)
            centred = groups - groups.mean(dim=1, keepdim=True)
            mean[:] = 0.5 * mean[0] + 0.5 * float(centred.square().sum() / 12), 0.5 * mean[1] + 0.5
            total += centred.flatten() / ((mean[0] / mean[1]) ** 0.5 + 1e-4)
        expected = (total - total.mean()) / (total.std() + 1e-4)
        torch.testing.assert_close(
            collected.batch.advantages[:, 0].double(), expected, rtol=1e-4, atol=1e-5
        )
    assert run.state.running["digits"]["within_var"] == pytest.approx(moving[0])


@pytest.mark.silent_bug(33)
def test_a_boundary_keeps_the_statistics_from_before_the_step(tmp_path):
    """A failure late in a step saves it, after the statistics have moved on."""
    run = run_in(tmp_path, **SETS["baseline running"])
    step(run)
    run.state.step, boundary = 1, boundary_state(run)
    before = json.dumps(boundary["running"])
    step(run)
    assert json.dumps(boundary["running"]) == before != json.dumps(run.state.running)


# --- several rewards ------------------------------------------------------------------------------


def thousands(completions: Sequence[Any], prompts: Sequence[Any], **_: Any) -> list[float | None]:
    """Of a scale 10,000 times that of the other; it does not apply to the first prompt, and is flat
    for the second."""
    order = list(dict.fromkeys(str(p) for p in prompts))
    scores = [10_000.0 * len(tiny.said(c)) for c in completions]
    which = [order.index(str(p)) for p in prompts]
    return [
        None if w == 0 else 5e4 if w == 1 else value for w, value in zip(which, scores, strict=True)
    ]


def test_two_rewards_of_very_different_scales_weigh_what_their_weights_say(tmp_path):
    run = run_in(
        tmp_path,
        Parts(rewards=[tiny.digits, thousands]),
        rollout__group_size=6,
        objective={"combine": "normalize_then_sum"},
        scoring__weights=(1.0, 0.5),
    )
    collected, _ = step(run)
    digits, other = (
        collected.scores.parts[name].double().reshape(4, 6) for name in ("digits", "thousands")
    )
    assert other[0].isnan().all() and other[1].eq(5e4).all() and other[2].std() > 1e3

    def normal(rewards: torch.Tensor) -> torch.Tensor:
        return (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    zero = torch.zeros(6, dtype=torch.float64)
    total = torch.cat(
        [normal(digits[g]) + 0.5 * (normal(other[g]) if g > 1 else zero) for g in range(4)]
    )
    expected = normal(total)
    torch.testing.assert_close(
        collected.batch.advantages[:, 0].double(), expected, rtol=1e-4, atol=1e-5
    )
    summed = run_in(
        tmp_path,
        Parts(rewards=[tiny.digits, thousands]),
        rollout__group_size=6,
        scoring__weights=(1.0, 0.5),
    )
    plain = step(summed)[0].batch.advantages[12:, 0].double()  # there, the larger one alone decides
    assert (plain - torch.cat([normal(other[2]), normal(other[3])])).abs().max() < 1e-3
    assert (plain - expected[12:]).abs().max() > 0.1


def test_an_overlong_penalty_is_one_reward_more_and_its_statistics_are_nobody_elses(tmp_path):
    def overlong(completions: Sequence[Any], **_: Any) -> list[float]:
        return tiny.digits(completions)

    objective = {"combine": "normalize_then_sum", "overlong": 5, "scale": "running"}
    run = run_in(tmp_path, Parts(rewards=[overlong]), rollout__group_size=6, objective=objective)
    collected, _ = step(run)
    rewards, lengths = collected.batch.rewards.double(), collected.batch.rollouts.lengths.double()
    parts = [rewards.reshape(4, 6), -((lengths - 3) / 5).clamp(0, 1).reshape(4, 6)]
    centred = [part - part.mean(dim=1, keepdim=True) for part in parts]
    total = sum(part / ((part.square().sum() / 20).sqrt() + 1e-4) for part in centred).flatten()
    expected = (total - total.mean()) / (total.std() + 1e-4)
    torch.testing.assert_close(
        collected.batch.advantages[:, 0].double(), expected, rtol=1e-4, atol=1e-5
    )
    assert len(run.state.running) == 2


def test_advantages_are_kept_within_their_clip(tmp_path):
    free, clipped = (
        step(run_in(tmp_path, rollout__group_size=6, objective__adv_clip=limit))[0].batch
        for limit in (0.0, 0.7)
    )
    assert free.advantages.abs().max() > 0.7
    assert torch.equal(clipped.advantages, free.advantages.clamp(-0.7, 0.7))
