"""Steps of PPO and REINFORCE++ against the same steps written out in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.collecting import collect
from tests.trainer import by_hand
from tests.trainer.test_step import none_for_even, run_in, step

from gruppo.build import Parts
from gruppo.protocols import Engine
from gruppo.trainer.forward import minibatches
from gruppo.trainer.run import Run
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import update
from gruppo.types import Rollouts

SHARED: dict[str, Any] = {"objective": "ppo"}
SEPARATE: dict[str, Any] = {"objective": "ppo", "critic__kind": "separate"}
REINFORCE_PP: dict[str, Any] = {"objective": "reinforce_pp"}
KINDS = pytest.mark.parametrize("kind", [SHARED, SEPARATE], ids=["shared", "separate"])
SIZES = {
    "rollout__group_size": 5,
    "rollout__max_new_tokens": 24,
    "rollout__stop": ["a", "3"],
    "stage__kl_coef": 0.2,
    "optim__lr": 0.05,
}
SLOW = {"optim__lr": 0.01}
SEVERAL = {"optim__epochs": 2, "optim__minibatches": 2}


def begun(folder: Any, kind: dict[str, Any], parts: Parts | None = None, **changes: Any) -> Run:
    """A run whose policy has left its reference, and whose critic says something."""
    run = run_in(folder, parts or Parts(rewards=[none_for_even]), **(SIZES | kind | changes))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in run.parameters:
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return run


def both(run: Run) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """The weights after a step of the trainer, those after the step by hand, and the trainer's
    metrics."""
    networks = by_hand.Networks.of(run)
    collected, logged = step(run)
    rollouts, rewards = collected.batch.rollouts, collected.batch.rewards.double().tolist()
    assert len(rollouts.lengths.unique()) > 4 and 0 < rollouts.finish.count("length") < len(
        rewards
    )  # ragged
    rows = by_hand.credited(run, networks, rollouts, rewards)
    count = by_hand.learned(run, networks, rollouts, rows)
    assert logged["update/updates_count"] == count
    logged = collected.metrics | logged
    return (
        by_hand.flat(run.parameters),
        by_hand.flat([*networks.of_policy, *networks.of_critic]),
        logged,
    )


@pytest.mark.silent_bug(30)
@pytest.mark.silent_bug(32)
@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        pytest.param({}, SHARED, id="preset-shared"),
        pytest.param({}, SEPARATE, id="preset-separate"),
        pytest.param(
            {"critic__lr": 0.2, "stage__value_coef": 3.0, "optim__weight_decay": 0.1},
            SEPARATE,
            id="a rate and a weight of its own-separate",
        ),
        pytest.param(
            {"objective__gamma": 0.9, "objective__lam": 0.7, "optim__max_grad_norm": 0.05},
            SHARED,
            id="discount and a low limit-shared",
        ),
        pytest.param(
            {"objective__whiten": False, "objective__value_clip": 0.0, "optim__max_grad_norm": 0.0},
            SEPARATE,
            id="no whitening, no clip-separate",
        ),
        pytest.param({"objective__mask_truncated": True}, SHARED, id="masked-shared"),
    ],
)
def test_a_ppo_step_of_two_epochs_and_two_minibatches_is_the_step_by_hand(tmp_path, kind, changes):
    tight = {
        "objective__value_clip": 0.02,
        "objective__clip_low": 0.05,
        "objective__clip_high": 0.05,
    }
    run = begun(tmp_path, kind, **(SEVERAL | tight | changes))
    before = by_hand.flat(run.parameters)
    after, expected, result = both(run)
    assert (expected - before).abs().max() > 5e-3
    if not changes:  # so that both clips are tested
        assert (
            result["clip/high_frac"] + result["clip/low_frac"] > 0.05
            and result["value/clip_frac"] > 0.2
        )
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        SEVERAL,
        {"objective__gamma": 0.8, "objective__whiten": False},
        {"objective__mask_truncated": True},
    ],
)
def test_a_reinforce_pp_step_is_the_step_by_hand(tmp_path, changes):
    run = begun(tmp_path, REINFORCE_PP, **changes)
    before = by_hand.flat(run.parameters)
    after, expected, result = both(run)
    assert result["kl/ref_nats"] > 1e-3
    assert (expected - before).abs().max() > 5e-3
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)


class WithTools(Engine):
    """An engine whose third and fourth token of every other row a tool has written."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
        rollouts = self.real.generate(*args, **kwargs)
        mask = rollouts.mask.clone()
        mask[::2, 2:4] = False
        return replace(
            rollouts, mask=mask, sampler_logprobs=rollouts.sampler_logprobs.where(mask, 0)
        )


@pytest.mark.silent_bug(30)
@pytest.mark.parametrize(
    "kind", [SHARED, SEPARATE, REINFORCE_PP], ids=["shared", "separate", "reinforce_pp"]
)
def test_what_a_tool_wrote_is_no_action_neither_discounted_nor_learned_from(tmp_path, kind):
    run = begun(tmp_path, kind, objective__gamma=0.9, **SEVERAL)
    run.engine = WithTools(run.engine)
    before = by_hand.flat(run.parameters)
    after, expected, _ = both(run)
    assert (expected - before).abs().max() > 5e-3
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_under_outcome_credit_the_kl_of_a_row_is_summed_and_taken_off_its_reward(
    tmp_path, mask_truncated
):
    run = begun(
        tmp_path,
        {"objective": {"kl": "k1", "kl_in": "reward", "mask_truncated": mask_truncated}},
        rollout__group_size=16,
        rollout__max_new_tokens=24,
    )
    networks = by_hand.Networks.of(run)
    batch = collect(run, step_params_at(run.config, 0)).batch
    rollouts, rewards = batch.rollouts, batch.rewards.double()
    for row in range(len(rollouts)):
        if mask_truncated and rollouts.finish[row] == "length":
            continue  # it is not evaluated, and compared by its score alone
        with torch.no_grad():
            ours, theirs = (
                networks.logprobs(m, rollouts, row) for m in (networks.policy, networks.ref)
            )
        rewards[row] -= 0.2 * (ours - theirs).sum()
    for g in range(len(rollouts.prompts)):
        group = [row for row in range(16 * g, 16 * g + 16) if rewards[row].isfinite()]
        expected = (rewards[group] - rewards[group].mean()) / (rewards[group].std() + 1e-4)
        torch.testing.assert_close(
            batch.advantages[group, 0].double(), expected, rtol=1e-4, atol=1e-5
        )
    is_cut = torch.tensor([finish == "length" for finish in rollouts.finish])
    assert is_cut.any() and not is_cut.all() and batch.loss_mask[is_cut].any() != mask_truncated


@pytest.mark.parametrize("credit", ["outcome", "return_to_go"])
def test_a_kl_that_is_not_finite_skips_the_update_and_is_no_missing_reward(tmp_path, credit):
    objective = {
        "kl": "k1",
        "kl_in": "reward",
        "credit": credit,
        "whiten": credit == "return_to_go",
    }
    run = begun(tmp_path, {"objective": objective})
    of_policy = run.reference.likelihood

    def broken(rollouts, micro_batch, **wanted):
        likelihood = of_policy(rollouts, micro_batch, **wanted)
        likelihood.logprobs[0, 0] = torch.nan
        return likelihood

    run.reference.likelihood = broken
    before = by_hand.flat(run.policy.module.parameters())
    collected, logged = step(run)
    assert logged["update/skipped_count"] == 1
    assert collected.metrics["reward/unscored_count"] == int(collected.batch.rewards.isnan().sum())
    assert torch.equal(by_hand.flat(run.policy.module.parameters()), before)


# --- the critic -----------------------------------------------------------------------------------


@pytest.mark.silent_bug(40)
@KINDS
def test_while_the_critic_learns_alone_the_policy_stays_to_the_bit(tmp_path, kind):
    run = begun(
        tmp_path,
        kind,
        **SEVERAL,
        critic__warmup_steps=2,
        optim__weight_decay=0.1,
        optim__max_grad_norm=1e-3,
    )
    policy, critic = (
        by_hand.flat(run.policy.module.parameters()),
        by_hand.flat(run.critic.module.parameters()),
    )
    for n in range(3):
        _, logged = step(run)
        run.state.step += 1
        is_alone = n < 2
        assert torch.equal(by_hand.flat(run.policy.module.parameters()), policy) == is_alone
        assert not torch.equal(by_hand.flat(run.critic.module.parameters()), critic)
        assert not is_alone or logged["kl/old_k3_nats"] < 1e-9  # other pieces round otherwise
        critic = by_hand.flat(run.critic.module.parameters())


@KINDS
def test_the_critics_gradient_is_limited_with_the_policys_only_where_they_are_one_network(
    tmp_path, kind
):
    def after(value_coef: float) -> tuple[torch.Tensor, dict[str, float]]:
        run = begun(tmp_path, kind, optim__max_grad_norm=0.1, stage__value_coef=value_coef)
        _, logged = step(run)
        return by_hand.flat(run.policy.module.parameters()), logged

    (weak, said_weakly), (strong, said_strongly) = after(0.5), after(500.0)
    if kind is SEPARATE:
        assert torch.equal(weak, strong) and said_weakly["grad/norm"] == said_strongly["grad/norm"]
        assert said_strongly["grad/critic_norm"] == pytest.approx(
            1000 * said_weakly["grad/critic_norm"], rel=1e-4
        )
    else:
        assert not torch.equal(weak, strong) and "grad/critic_norm" not in said_weakly


@KINDS
def test_where_all_rewards_are_equal_ppo_still_trains_the_critic(tmp_path, kind):
    run = begun(
        tmp_path,
        kind,
        Parts(rewards=[lambda completions, **_: [0.35] * len(completions)]),
        stage__kl_coef=0,
    )
    head = by_hand.flat(run.critic.module.parameters())
    collected, logged = step(run)
    assert torch.allclose(
        collected.batch.returns[collected.batch.loss_mask], torch.tensor(0.35), atol=0.5
    )
    assert logged["update/updates_count"] == 1
    assert not torch.equal(by_hand.flat(run.critic.module.parameters()), head)


def test_rewards_that_are_not_numbers_leave_their_rows_out_of_ppo(tmp_path):
    def reward(completions: Any, **_: Any) -> list[float]:
        values = tiny.digits(completions)
        return [[math.nan, math.inf, -math.inf, value][n % 4] for n, value in enumerate(values)]

    run = begun(tmp_path, SHARED, Parts(rewards=[reward]), **SEVERAL)
    before = by_hand.flat(run.parameters)
    after, expected, result = both(run)
    assert result["reward/not_finite_count"] == 15 and result["reward/unscored_count"] == 15
    assert (expected - before).abs().max() > 5e-3
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", ["ppo", "reinforce", "reinforce_pp"])
def test_a_group_of_one_is_enough(tmp_path, preset):
    run = run_in(
        tmp_path,
        objective=preset,
        rollout__group_size=1,
        rollout__prompts=8,
        rollout__max_new_tokens=12,
    )
    before = by_hand.flat(run.parameters)
    _, logged = step(run)
    assert (by_hand.flat(run.parameters) - before).abs().max() > 1e-3
    assert logged["update/updates_count"] == 1


# --- stopping early -------------------------------------------------------------------------------


def kls(folder: Any, kind: dict[str, Any], count: int) -> list[float]:
    """Each update's mean KL to the old policy, in nats a token, before it is taken."""
    run = begun(folder, kind | SLOW, optim__epochs=count)
    step_params, result = step_params_at(run.config, 0), []
    for group in run.optimizer.param_groups:
        group["lr"] = step_params.critic_lr if group["is_critic"] else step_params.lr
    for part in minibatches(run, collect(run, step_params).batch):
        stats, _ = update(run, part, step_params)
        result.append(stats["kl/old_k3_nats"].mean)
    return result


@pytest.mark.parametrize("kind", [SHARED, REINFORCE_PP], ids=["ppo", "reinforce_pp"])
def test_the_update_before_which_the_policy_has_moved_too_far_is_not_taken(tmp_path, kind):
    result = kls(tmp_path, kind, 5)
    assert result[0] == 0 and sorted(result) == result and len(set(result)) == 5
    for n in (1, 4):
        limit = (result[n - 1] + result[n]) / 2  # n updates are taken, and the next is one too many
        run = begun(tmp_path, kind | SLOW, optim__epochs=5, optim__stop_kl=limit)
        short = begun(tmp_path, kind | SLOW, optim__epochs=n)
        _, stopped = step(run)
        step(short)
        assert stopped["update/updates_count"] == n and stopped["update/early_stop_frac"] == 1
        assert torch.equal(by_hand.flat(run.parameters), by_hand.flat(short.parameters))
    run = begun(tmp_path, kind | SLOW, optim__epochs=5, optim__stop_kl=2 * result[-1])
    _, whole = step(run)
    assert whole["update/updates_count"] == 5 and whole["update/early_stop_frac"] == 0


def test_the_gradient_of_an_update_that_was_not_taken_is_not_in_the_mean_norm(tmp_path):
    limit = sum(kls(tmp_path, SHARED, 2)) / 2
    _, one = step(begun(tmp_path, SHARED | SLOW, optim__epochs=1))
    _, stopped = step(begun(tmp_path, SHARED | SLOW, optim__epochs=2, optim__stop_kl=limit))
    assert stopped["update/updates_count"] == 1
    assert stopped["grad/norm"] == pytest.approx(one["grad/norm"], rel=1e-5)
