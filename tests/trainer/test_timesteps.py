"""What is said of each denoising step, by hand, on one rank and on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import processes
from tests.trainer import diffusion_runs
from tests.trainer.diffusion_runs import built
from tests.trainer.runs import metrics, stepped, weights, whole

from gruppo import api
from gruppo.config import serialization
from gruppo.modalities.diffusion import load_denoiser
from gruppo.trainer.collect import collect
from gruppo.trainer.evaluate import evaluate, evaluate_steps, held_out
from gruppo.types import Request

FRACTION = {"diffusion__steps": 6, "diffusion__train_fraction": 0.4, "rollout__prompts": 4}
"""Two of five steps, drawn for each group."""


def of_steps(said: dict[str, float], name: str) -> dict[int, float]:
    """A metric by step."""
    return {
        int(key.rpartition("/")[2]): value
        for key, value in said.items()
        if key.startswith(f"timestep/{name}/")
    }


@pytest.mark.silent_bug(41)
def test_steps_that_are_learned_from_are_counted_each_with_its_advantages(tmp_path):
    run = built(tmp_path, optim__lr=0.0, optim__token_budget=1, **FRACTION)
    batch, logged = stepped(run)
    counts = batch.loss_mask.sum(dim=0).tolist()
    assert batch.loss_mask.sum() == 4 * 4 * 2 and len({*counts}) > 2, "groups differ in their steps"
    assert of_steps(logged, "trained_count") == {
        step: count for step, count in enumerate(counts) if count
    }
    sizes = (batch.advantages.abs() * batch.loss_mask).sum(dim=0) / batch.loss_mask.sum(dim=0)
    by_hand = {
        step: pytest.approx(float(sizes[step]), rel=1e-6)
        for step, count in enumerate(counts)
        if count
    }
    assert of_steps(logged, "advantage_abs_mean") == by_hand
    assert not any(of_steps(logged, "ratio_abs_nats").values()) and not of_steps(
        logged, "kl_ref_nats"
    )


def test_ratios_of_steps_are_those_of_all_updates(tmp_path):
    """Of two updates: 0 in the first, and what the first has moved in the second."""
    run, once = (built(tmp_path, optim__epochs=epochs, **FRACTION) for epochs in (2, 1))
    batch, logged = stepped(run)
    stepped(once)
    with torch.no_grad():
        old, new = (
            of.likelihood(batch.rollouts, whole(batch.rollouts)).logprobs
            for of in (load_denoiser(diffusion_runs.denoiser()), once.policy)
        )
    counts = batch.loss_mask.sum(dim=0)
    moved = (new - old).abs().where(batch.loss_mask, 0).sum(dim=0) / counts / 2
    by_hand = {
        step: pytest.approx(float(moved[step]), rel=1e-5) for step in range(5) if counts[step]
    }
    assert of_steps(logged, "ratio_abs_nats") == by_hand and max(moved.nan_to_num()) > 1e-3
    assert of_steps(logged, "trained_count") == {
        step: 2 * int(counts[step]) for step in range(5) if counts[step]
    }


@pytest.mark.silent_bug(41)
def test_kls_of_steps_average_to_the_kl(tmp_path):
    run = built(tmp_path, stage__kl_coef=0.1, optim__epochs=2, optim__minibatches=2, **FRACTION)
    stepped(run)
    _, logged = stepped(run)
    kls, counts = of_steps(logged, "kl_ref_nats"), of_steps(logged, "trained_count")
    assert kls.keys() == counts.keys() and len({*kls.values()}) == len(kls) > 2
    mean = sum(kls[step] * counts[step] for step in kls) / sum(counts.values())
    assert logged["kl/ref_nats"] == pytest.approx(mean, rel=1e-9) and mean > 1e-4


@pytest.mark.silent_bug(41)
def test_the_spread_of_branches_is_told_of_the_step_at_which_they_part(tmp_path):
    run = built(tmp_path, diffusion__steps=4, diffusion__noise="branched", rollout__prompts=6)
    step_params = run.stage_schedule.step_params(0)
    collected = collect(run, step_params)
    parts_at = [
        int(collected.rollouts.mask[collected.rollouts.group_ids == g][0].nonzero())
        for g in range(6)
    ]
    spread = [
        float(collected.scores.rewards[collected.rollouts.group_ids == g].std()) for g in range(6)
    ]
    assert len({*parts_at}) > 1
    by_hand = {
        step: pytest.approx(
            torch.tensor([s for s, at in zip(spread, parts_at, strict=True) if at == step])
            .mean()
            .item()
        )
        for step in {*parts_at}
    }
    assert of_steps(collected.metrics, "reward_std_within_group") == by_hand


@pytest.mark.parametrize("noise", ["independent", "branched"])
def test_rewards_along_the_steps_are_of_what_the_network_expects_and_at_last_of_the_picture(
    tmp_path, noise
):
    run = built(tmp_path, diffusion__noise=noise, optim__token_budget=5)
    requested = held_out(run, 3)
    result = of_steps(evaluate_steps(run, requested), "reward")
    sampled = run.policy.sample(
        [Request(prompt, 1) for prompt in requested], run.sampling, seed=run.config.seed
    )
    if noise == "independent":
        assert result[3] == pytest.approx(
            sum(float(picture.mean()) for picture in sampled.completions) / 3, rel=1e-6
        )
        states = [sampled.per_row["first"], *sampled.actions.unbind(1)[:2]]
        labels = torch.tensor([prompt.inputs for prompt in requested])
        times = run.policy.denoiser.schedule.times(4)[:3].float()
        with torch.no_grad():  # the network says x0; a picture of -1 to 1
            for step, (x, time) in enumerate(zip(states, times, strict=True)):
                expected = run.policy.module(x, time.expand(3), labels)
                pictured = run.policy.denoiser.codec.decode(expected)
                assert result[step] == pytest.approx(
                    float(pictured.mean(dim=(1, 2, 3)).mean()), rel=1e-4
                )
    assert sorted(result) == [0, 1, 2, 3] and len({*result.values()}) == 4


@pytest.mark.silent_bug(36)
def test_an_evaluation_follows_the_ode(tmp_path):
    """In steps of its own, from latents that no seed has a part in: the reward of those
    pictures."""
    run = built(tmp_path, diffusion__eval_steps=5)
    requested = held_out(run, 3)
    mode = replace(run.sampling, temperature=0.0, ode_steps=5)
    pictured = run.policy.sample([Request(prompt, 1) for prompt in requested], mode, seed=99)
    assert pictured.actions.shape[1] == 5 and not pictured.mask.any()
    mean = sum(float(picture.mean()) for picture in pictured.completions) / 3
    assert evaluate(run, requested)[0].mean == pytest.approx(mean, rel=1e-6)


def test_one_step_that_is_not_finite_hides_no_branch(tmp_path):
    """A row that is an error has no step to learn from; those of its group have theirs."""
    run = built(tmp_path, diffusion__noise="branched", rollout__prompts=2)
    sample = run.policy.sample

    def broken(*arguments: Any, **named: Any) -> Any:
        rollouts = sample(*arguments, **named)
        rollouts.mask[3] = False  # the last of the first group
        return rollouts

    run.policy.sample = broken
    logged = collect(run, run.stage_schedule.step_params(0)).metrics
    reported = of_steps(logged, "reward_std_within_group")
    rollouts = sample(
        [Request(p, 4) for p in diffusion_runs.labelled().take(2)],
        run.sampling,
        seed=run.config.seed,
    )
    assert reported.keys() == {int(rollouts.mask[row].nonzero()) for row in (0, 4)}


# --- ranks ----------------------------------------------------------------------------------------


def train(config: dict[str, Any]) -> None:
    api.start(serialization.from_dict(config))


@pytest.mark.silent_bug(12)
@pytest.mark.silent_bug(24)
def test_two_ranks_give_the_weights_and_metrics_of_one(tmp_path):
    """Branched groups, several updates, one of them without a row on some rank, an exact KL,
    evaluations."""
    pytest.importorskip("PIL")
    changes = {
        "data": f"images:{diffusion_runs.write_images(tmp_path / 'images')}",
        "diffusion__noise": "branched",
        "optim__eps": 0.1,
        "optim__lr": 0.01,
        "optim__epochs": 2,
        "optim__minibatches": 3,
        "stage__kl_coef": 0.1,
        "objective__kl_mask": 1e-5,
        "prompts__held_out_fraction": 0.3,
        "steps": 2,
    }
    for name, count in (("one", 1), ("two", 2)):
        config = serialization.to_dict(diffusion_runs.config(tmp_path, name=name, **changes))
        processes.run_ranks(count, train, config, folder=tmp_path / name)
    one, two = tmp_path / "runs/one", tmp_path / "runs/two"
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-5)
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() - {"update/micro_batches_count", "update/changed_frac"}:
            expected = None if mine[name] is None else pytest.approx(mine[name], rel=1e-3, abs=1e-5)
            assert theirs[name] == expected, name
    last = metrics(one)[-1]
    assert of_steps(last, "reward").keys() == {0, 1, 2, 3} and of_steps(last, "kl_ref_nats")
    assert any(row.get("clip/kl_mask_frac", 0) > 0 for row in metrics(one))
