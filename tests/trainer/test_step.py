"""One step of the loop against numbers from another road, and against itself cut in other ways."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.collecting import collect
from tests.trainer.runs import assert_same, metrics, newest, weights
from torch import nn

from gruppo import api
from gruppo.build import Parts, build
from gruppo.modalities.text import from_pretrained
from gruppo.rewards.answers import TrainerState
from gruppo.trainer.forward import minibatches
from gruppo.trainer.run import Run
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import backward, learn
from gruppo.types import DataError, NumericalStop

SMOOTH = {"optim__eps": 0.1, "evaluation__prompts": 0}
"""An eps that keeps AdamW's first step from being a sign, which would turn rounding into whole
steps."""


def run_in(folder: Path, parts: Parts | None = None, **changes: Any) -> Run:
    return build(tiny.config(folder, **(SMOOTH | changes)), parts or Parts())[0]


def step(run: Run) -> tuple[Any, dict[str, float]]:
    """What was collected, and what learning from it said."""
    step_params = step_params_at(run.config, run.state.step)
    collected = collect(run, step_params)
    return collected, learn(run, collected.batch, step_params)


def vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


# --- by hand --------------------------------------------------------------------------------------


def none_for_even(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """Some rows are not scored."""
    return [None if n % 4 == 1 else value for n, value in enumerate(tiny.digits(completions))]


def step_by_hand(run: Run, collected: Any) -> torch.Tensor:
    """The GRPO step in float64 from the sampled tokens and rewards alone: plain forwards, autograd,
    AdamW's formula."""
    rollouts, rewards = collected.batch.rollouts, collected.batch.rewards.double()
    module = from_pretrained(tiny.model(), compute="float32").module.double()
    usable = [
        bool(rewards[row].isfinite())
        and not (run.config.objective.mask_truncated and rollouts.finish[row] == "length")
        for row in range(len(rollouts))
    ]
    losses = []
    for row in range(len(rollouts)):
        if not usable[row]:
            continue
        group = rewards[rollouts.group_ids == rollouts.group_ids[row]]
        group = group[group.isfinite()]
        advantage = (
            (rewards[row] - group.mean()) / (group.std() + 1e-4)
            if len(group) > 1 and group.std() > 0
            else 0.0
        )
        prompt = rollouts.shared["prompt_ids"][int(rollouts.group_ids[row])]
        actions = rollouts.actions[row, : int(rollouts.lengths[row])]
        logits = module(torch.cat([prompt, actions])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
        losses.append(-(advantage * logprobs)[rollouts.mask[row, : len(actions)]].mean())
    torch.stack(losses).mean().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    gradient = gradient * min(1.0, run.config.optim.max_grad_norm / (float(gradient.norm()) + 1e-6))
    return vector(module) - run.config.optim.lr * gradient / (gradient.abs() + run.config.optim.eps)


@pytest.mark.silent_bug(13)
@pytest.mark.silent_bug(22)
@pytest.mark.parametrize("reward", [tiny.digits, none_for_even])
@pytest.mark.parametrize(
    "mask_truncated", [False, pytest.param(True, marks=pytest.mark.silent_bug(15))]
)
def test_a_step_is_the_step_computed_by_hand(tmp_path, reward, mask_truncated):
    run = run_in(
        tmp_path,
        Parts(rewards=[reward]),
        objective__mask_truncated=mask_truncated,
        rollout__group_size=8,
        rollout__max_new_tokens=24,
        rollout__temperature=1.0,
    )
    before = vector(run.policy.module)
    collected, _ = step(run)
    finish = collected.batch.rollouts.finish
    assert 0 < finish.count("length") < len(finish)  # both kinds are there
    expected = step_by_hand(run, collected)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(vector(run.policy.module).double(), expected, rtol=0, atol=1e-6)


def test_metrics_of_a_step_are_those_of_its_rows(tmp_path):
    run = run_in(tmp_path, Parts(rewards=[none_for_even]), rollout__group_size=4)
    collected, learned = step(run)
    rollouts, rewards = collected.batch.rollouts, collected.batch.rewards.double()
    scored = rewards[rewards.isfinite()]
    logged = collected.metrics | learned
    assert logged["reward/mean"] == pytest.approx(float(scored.mean()), rel=1e-6)
    assert logged["reward/std"] == pytest.approx(float(scored.std(correction=0)), rel=1e-6)
    assert logged["reward/unscored_count"] == 4 and logged["progress/rollouts"] == 16
    spreads = [rewards[g : g + 4][rewards[g : g + 4].isfinite()].std() for g in range(0, 16, 4)]
    assert logged["reward/std_within_group"] == pytest.approx(
        float(torch.stack(spreads).mean()), rel=1e-6
    )
    assert logged["len/mean_actions"] == pytest.approx(float(rollouts.lengths.double().mean()))
    assert logged["finish/truncated_frac"] == rollouts.finish.count("length") / 16
    assert logged["tokens"] == int(rollouts.lengths.sum())


# --- cut in other ways ----------------------------------------------------------------------------


def after_one_step(folder: Path, *, is_padded: bool = False, **changes: Any) -> torch.Tensor:
    run = run_in(folder, **changes)
    run.policy.backbone.runs_layers = not is_padded
    before = vector(run.policy.module)
    step(run)
    after = vector(run.policy.module)
    assert (after - before).abs().max() > 1e-3
    return after


@pytest.mark.silent_bug(3)
@pytest.mark.silent_bug(11)
@pytest.mark.parametrize(
    ("preset", "prompts", "size"),
    [
        *((preset, 3, 3) for preset in ("dr_grpo", "dapo", "reinforce_pp", "ppo")),
        ("grpo", 1, 5),
        ("gspo", 4, 2),
    ],
)
def test_token_budget_and_layout_do_not_change_the_step(tmp_path, preset, prompts, size):
    sizes = {
        "rollout__prompts": prompts,
        "rollout__group_size": size,
        "objective": preset,
        "stage__kl_coef": 0.1,
    }
    expected = after_one_step(tmp_path, **sizes)
    for budget, is_padded in ((1, False), (120, True)):
        got = after_one_step(tmp_path, is_padded=is_padded, optim__token_budget=budget, **sizes)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.silent_bug(11)
def test_token_budget_does_not_change_several_updates_of_a_batch(tmp_path):
    several = {
        "optim__epochs": 2,
        "optim__minibatches": 3,
        "stage__kl_coef": 0.1,
        "rollout__group_size": 5,
    }
    expected = after_one_step(tmp_path, **several)
    got = after_one_step(tmp_path, optim__token_budget=1, **several)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("prompts", "size", "count"), [(1, 5, 2), (3, 3, 4), (2, 3, 6)])
def test_minibatches_of_an_epoch_hold_each_row_once_in_an_order_of_their_own(
    tmp_path, prompts, size, count
):
    run = run_in(
        tmp_path,
        rollout__prompts=prompts,
        rollout__group_size=size,
        optim__minibatches=count,
        optim__epochs=2,
    )
    step_params = step_params_at(run.config, 0)
    batch = collect(run, step_params).batch
    rows = torch.arange(prompts * size)
    numbered = dataclasses.replace(batch, rewards=rows.double())
    parts = [part.rewards.long() for part in minibatches(run, numbered)]
    assert len(parts) == 2 * count and all(len(part) for part in parts)
    for epoch in (parts[:count], parts[count:]):
        assert torch.equal(torch.cat(epoch).sort().values, rows)
    assert not all(torch.equal(a, b) for a, b in zip(parts[:count], parts[count:], strict=True))


@pytest.mark.silent_bug(2)
def test_the_ratio_is_one_where_a_batch_is_used_once_and_moves_where_it_is_used_again(tmp_path):
    _, once = step(run_in(tmp_path))
    assert once["ratio/mean"] == once["ratio/max"] == 1.0
    assert once["clip/high_frac"] == once["clip/low_frac"] == once["kl/old_nats"] == 0.0
    assert once["mismatch/max_nats"] < 2e-6
    _, twice = step(run_in(tmp_path, optim__epochs=2))
    assert abs(twice["ratio/max"] - 1) > 1e-3


@pytest.mark.silent_bug(2)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_the_first_update_of_several_has_a_ratio_of_exactly_one_in_bfloat16(tmp_path, entropy_coef):
    def first_group_alike(completions: Sequence[Any], **_: Any) -> list[float]:
        values = tiny.digits(completions)
        return [
            1.0 if row < 8 else value for row, value in enumerate(values)
        ]  # a group without a gradient

    run = run_in(
        tmp_path,
        Parts(rewards=[first_group_alike]),
        compute="bfloat16",
        rollout__group_size=8,
        rollout__max_new_tokens=24,
        optim__minibatches=2,
        optim__epochs=2,
        optim__token_budget=150,
        stage__entropy_coef=entropy_coef,
    )
    assert run.policy.copy is not None
    seen: list[list[list[int]]] = []
    likelihood = run.policy.likelihood

    def watched(rollouts: Any, micro_batch: Any, **wanted: Any) -> Any:
        seen.append(rollouts.actions[micro_batch.rows, micro_batch.cols].tolist())
        return likelihood(rollouts, micro_batch, **wanted)

    run.policy.likelihood = watched
    step_params = step_params_at(run.config, 0)
    parts = minibatches(run, collect(run, step_params).batch)
    before, seen[:] = list(seen), []
    for _ in range(2):  # the first epoch, with no step in between
        stats = backward(run, next(parts), step_params)
        assert stats["ratio"].count > 50 and stats["update/micro_batches_count"].count > 1
        assert stats["ratio"].min == stats["ratio"].max == 1.0
    assert before == seen


@pytest.mark.silent_bug(18)
def test_the_reference_is_the_first_policy_and_stays_it(tmp_path):
    run = run_in(tmp_path, stage__kl_coef=0.1, optim__epochs=2)
    first = vector(run.policy.module)
    _, logged = step(run_in(tmp_path, stage__kl_coef=0.1))
    assert logged["kl/ref_nats"] < 1e-12  # at equal weights: the square of a rounding
    for _ in range(3):
        _, logged = step(run)
    assert logged["kl/ref_nats"] > 1e-3
    assert run.reference is not None and not run.reference.module.training
    assert torch.equal(vector(run.reference.module), first) and not torch.equal(
        vector(run.policy.module), first
    )


# --- the seed -------------------------------------------------------------------------------------


@pytest.mark.silent_bug(34)
def test_the_seed_determines_the_run_and_another_seed_differs(tmp_path):
    changes = {
        "optim__epochs": 2,
        "optim__minibatches": 2,
        "reward": [tiny.reward("noisy")],
        "steps": 2,
    }
    one, two, other = (
        api.start(tiny.config(tmp_path, name=name, seed=seed, **changes)).folder
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert_same(one, two)
    samples = [
        json.loads((run / "samples.jsonl").read_text().splitlines()[0]) for run in (one, other)
    ]
    assert samples[0]["completion"] != samples[1]["completion"]
    assert (weights(one) - weights(other)).abs().max() > 1e-3
    assert metrics(one)[1]["reward/mean"] != metrics(other)[1]["reward/mean"]


@pytest.mark.silent_bug(26)
@pytest.mark.silent_bug(34)
def test_the_seed_also_determines_the_samples_of_the_same_prompt(tmp_path):
    data = tiny.write_rows(tmp_path / "one.jsonl", tiny.rows(1))

    def texts(seed: int) -> list[str]:
        run = run_in(
            tmp_path, data=data, prompts__held_out_fraction=0.0, rollout__prompts=3, seed=seed
        )
        return [
            tiny.said(output)
            for output in collect(run, step_params_at(run.config, 0)).batch.rollouts.completions
        ]

    assert texts(1) == texts(1)
    assert not set(texts(1)) & set(texts(2))
    assert len(set(texts(1))) == 9  # the same prompt drawn again, and each sample of it, differ


# --- rewards that fail, or say nothing ------------------------------------------------------------


def no_e(completions: Sequence[Any], **_: Any) -> list[float]:
    """Raises on rows whose completion has an e, alone or in company."""
    if any("e" in tiny.said(completion) for completion in completions):
        raise RuntimeError("no e, please")
    return [
        value + 1.0 for value in tiny.digits(completions)
    ]  # a row scored 0 by accident would stand out


@pytest.mark.silent_bug(22)
def test_a_reward_that_raises_on_some_rows_costs_those_rows_alone_and_never_scores_them_zero(
    tmp_path,
):
    run = run_in(tmp_path, Parts(rewards=[no_e]), rollout__prompts=8, rollout__group_size=6)
    collected, _ = step(run)
    rewards, texts = (
        collected.batch.rewards,
        [tiny.said(output) for output in collected.batch.rollouts.completions],
    )
    has_e = torch.tensor(["e" in text for text in texts])
    assert 0 < int(has_e.sum()) < len(texts)
    assert torch.equal(rewards.isnan(), has_e)
    assert (rewards[~has_e] >= 1).all()
    assert (collected.batch.advantages[has_e] == 0).all() and not collected.batch.loss_mask[
        has_e
    ].any()
    assert (
        collected.metrics["reward/exception_count"]
        == int(has_e.sum())
        == collected.metrics["reward/unscored_count"]
    )


def test_failed_rows_and_logged_columns_are_kept_with_the_samples(tmp_path):
    def reward(completions: Sequence[Any], log_extra: Any, **_: Any) -> list[float]:
        values = no_e(completions)
        log_extra("length", [len(tiny.said(completion)) for completion in completions])
        return values

    config = tiny.config(tmp_path, **SMOOTH, steps=1, rollout__prompts=8, rollout__group_size=6)
    run = api.start(config, Parts(rewards=[reward])).folder
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    failed = [row for row in rows if "failures" in row]
    assert 0 < len(failed) == min(metrics(run)[0]["reward/exception_count"], 20)
    for row in failed:
        assert "e" in tiny.said(row["completion"]) and row["reward"] is None and row["prompt"]
        [failure] = row["failures"]
        assert failure["kind"] == "exception" and "no e, please" in failure["message"]
    shown = [row for row in rows if "failures" not in row]
    assert shown and all(
        row["extra"]["length"] in (None, len(tiny.said(row["completion"]))) for row in shown
    )
    assert any(row["extra"]["length"] is not None for row in shown)


@pytest.mark.silent_bug(22)
def test_a_run_goes_on_through_rewards_that_raise_and_a_step_without_any_score(tmp_path):
    calls: list[int] = []

    def reward(completions: Sequence[Any], trainer_state: Any, **_: Any) -> list[float | None]:
        calls.append(trainer_state.global_step)
        if trainer_state.global_step == 2:
            return [None for _ in completions]
        if trainer_state.global_step == 3:
            raise OSError("the judge is away")
        return tiny.digits(completions)

    run = api.start(
        tiny.config(tmp_path, **SMOOTH, saving__every=1, saving__keep=9), Parts(rewards=[reward])
    ).folder
    logged = {row["step"]: row for row in metrics(run)}
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    assert [logged[n]["reward/unscored_count"] for n in (2, 3, 4, 5)] == [0, 12, 12, 0]
    assert logged[3]["reward/exception_count"] == 0 and logged[4]["reward/exception_count"] == 12
    assert logged[3]["reward/mean"] is None and "ratio/max" not in logged[3]
    kept = [
        (run / f"checkpoints/step_{n:06d}/model.safetensors").read_bytes() for n in (1, 2, 3, 4, 5)
    ]
    assert kept[1] == kept[2] == kept[3] and kept[0] != kept[1] and kept[3] != kept[4]


def test_rewards_are_told_the_step_and_the_epoch(tmp_path):
    run = run_in(tmp_path)
    run.state.step = 3
    before = run.source.position
    run.source.take(3 * run.config.rollout.prompts)
    epoch = (run.source.position - before) / run.source.epoch_size
    assert run.trainer_state == TrainerState(global_step=3, max_steps=run.config.steps, epoch=epoch)


@pytest.mark.silent_bug(20)
def test_an_update_in_which_no_row_has_a_gradient_is_no_step_for_momentum_and_decay_either(
    tmp_path,
):
    values = iter([None, 1.0])

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        value = next(values)
        return tiny.digits(completions) if value is None else [value] * len(completions)

    run = run_in(tmp_path, Parts(rewards=[reward]), optim__weight_decay=0.5)
    step(run)
    before, moments = (
        vector(run.policy.module),
        run.optimizer.state_dict()["state"][0]["exp_avg"].clone(),
    )
    assert moments.abs().max() > 0
    step(run)
    assert torch.equal(vector(run.policy.module), before)
    assert torch.equal(run.optimizer.state_dict()["state"][0]["exp_avg"], moments)


@pytest.mark.parametrize("name", ["raises", "nothing", "too_many"])
def test_a_reward_that_never_scores_ends_the_run_at_its_first_step(tmp_path, name):
    with pytest.raises(
        DataError, match=r"step 0: the reward scored none of 12 completions.*Fix the reward"
    ) as error:
        api.start(tiny.config(tmp_path, reward=[tiny.reward(name)], evaluation__prompts=0))
    assert error.value.exit_code == 3
    expected = {
        "raises": "ValueError: boom",
        "nothing": "every reward was None",
        "too_many": "rewards for",
    }[name]
    assert expected in str(error.value)


def test_a_reward_that_stops_scoring_ends_the_run_after_ten_steps_with_the_boundary_saved(tmp_path):
    def reward(completions: Sequence[Any], trainer_state: Any, **_: Any) -> list[float | None]:
        is_away = trainer_state.global_step >= 2
        return [None if is_away else value for value in tiny.digits(completions)]

    config = tiny.config(tmp_path, **SMOOTH, steps=13, saving__every=0)
    with pytest.raises(DataError, match="10 steps in a row"):
        api.start(config, Parts(rewards=[reward]))
    run = tmp_path / "runs/run"
    assert newest(run).name == "step_000011"
    finished = api.start(run)  # with the config's own reward, which scores
    assert finished.tokens > 0 and metrics(run)[-1]["step"] == 13


# --- numbers that are no longer usable ------------------------------------------------------------


def poison(module: nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).fill_(math.nan)


def test_a_model_of_nan_is_a_numerical_stop(tmp_path):
    policy = from_pretrained(tiny.model(), compute="float32")
    poison(policy.module)
    with pytest.raises(
        NumericalStop, match="every rollout ended in logits that are not finite"
    ) as error:
        api.start(tiny.config(tmp_path), Parts(model=policy))
    assert error.value.exit_code == 4
    evaluations = (tmp_path / "runs/run/evaluations.json").read_text()
    assert json.loads(evaluations)[0]["mean"] is None and "NaN" not in evaluations


def test_weights_that_turn_to_nan_never_replace_the_last_good_save(tmp_path):
    policy = from_pretrained(tiny.model(), compute="float32")

    def reward(completions: Sequence[Any], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 3:
            poison(policy.module)  # after this step's samples; its gradient is then not finite
        return tiny.digits(completions)

    with pytest.raises(NumericalStop):
        api.start(
            tiny.config(tmp_path, **SMOOTH, saving__every=3), Parts(model=policy, rewards=[reward])
        )
    run = tmp_path / "runs/run"
    assert newest(run).name == "step_000003"
    from safetensors.torch import load_file

    assert all(
        tensor.isfinite().all() for tensor in load_file(newest(run) / "model.safetensors").values()
    )


class Breaks:
    """A policy's likelihood that is NaN at the given calls."""

    def __init__(self, policy: Any, calls: set[int]) -> None:
        self.real, self.calls, self.count = policy.likelihood, calls, 0
        policy.likelihood = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        likelihood = self.real(*args, **kwargs)
        factor = math.nan if self.count in self.calls else 1.0
        return dataclasses.replace(likelihood, logprobs=likelihood.logprobs * factor)


def test_an_update_whose_gradient_is_not_finite_is_skipped_and_counted(tmp_path):
    run = run_in(tmp_path)
    Breaks(run.policy, {1, 2, 4})
    before = vector(run.policy.module)
    assert [step(run)[1]["update/skipped_count"] for _ in range(2)] == [1.0, 1.0]
    assert torch.equal(vector(run.policy.module), before)
    assert step(run)[1]["update/skipped_count"] == 0.0
    assert not torch.equal(vector(run.policy.module), before)
    assert step(run)[1]["update/skipped_count"] == 1.0 and run.state.skipped_updates == 1


def test_three_such_updates_in_a_row_are_a_numerical_stop(tmp_path):
    run = run_in(tmp_path)
    Breaks(run.policy, {1, 2, 3})
    step(run), step(run)
    with pytest.raises(NumericalStop, match="3 updates in a row"):
        step(run)
