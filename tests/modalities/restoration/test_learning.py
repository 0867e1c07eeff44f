"""Supervised and consistency terms by hand, and restoration policies in the trainer's own steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.collecting import collect
from tests.modalities import variants
from tests.modalities.restoration.fakes import (
    POLICIES,
    SAMPLING,
    band_gains,
    disturb,
    doubled,
    low_resolution,
    picture,
    pixels,
    policy_of,
    prompts,
    sampled,
    whole,
)
from tests.modalities.updates import (
    Case,
    Variant,
    batch_of,
    distance,
    farthest,
    learned,
    whole_update,
)

from gruppo.build import adamw
from gruppo.config.schema import Config, OptimConfig, RolloutConfig, Stage
from gruppo.core.images import apply_symmetry, gaussian_blur
from gruppo.core.objective import GRPO, PRESETS
from gruppo.data.source import SourceWrapper
from gruppo.engines import LocalEngine
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.restoration import (
    BandGains,
    LowResolution,
)
from gruppo.modalities.restoration.consistency import equivariance, to_degraded
from gruppo.rewards.scoring import RewardSet
from gruppo.trainer.run import Run
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import learn
from gruppo.types import GruppoError, Likelihood, Prompt, Request

LIMIT = 1e-10

# --- demonstrations -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", POLICIES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("loss", ["charbonnier", "l1", "mse"])
def test_the_supervised_loss_is_that_of_the_deterministic_picture(make, loss):
    """By hand; nothing of it is drawn."""
    policy = doubled(make(loss=loss))
    demos = policy.demonstrations(prompts(3), seed=0)
    likelihood = policy.likelihood(demos, whole(demos))
    x, clean = (
        torch.stack(of).double()
        for of in zip(*((p.inputs, p.target) for p in prompts(3)), strict=True)
    )
    apart = policy.output_of(x) - clean
    by_hand = {"charbonnier": (apart**2 + 1e-6).sqrt(), "l1": apart.abs(), "mse": apart**2}[loss]
    got = policy.supervised_loss(demos, likelihood)
    assert got.shape == demos.mask.shape
    torch.testing.assert_close(got[:, 0], by_hand.mean((1, 2, 3)), rtol=1e-9, atol=1e-12)


def test_the_supervised_loss_of_the_base_leaves_the_action_alone():
    policy = low_resolution(supervises="base", loss="mse")
    demos = policy.demonstrations(prompts(2), seed=0)
    loss = policy.supervised_loss(demos, policy.likelihood(demos, whole(demos)))
    loss.sum().backward()
    assert all(p.grad is None for p in policy.module.action.parameters())
    x, clean = demos.shared["degraded"], torch.stack(demos.completions)
    torch.testing.assert_close(
        loss[:, 0], (policy.module.network(x) - clean).square().mean(dim=(1, 2, 3))
    )


@pytest.mark.parametrize(
    "action", [LowResolution(grid=2), BandGains(grid=2)], ids=lambda a: type(a).__name__
)
def test_with_a_detached_action_rewards_and_clean_pictures_teach_apart(action):
    policy = policy_of(action, supervises="base")
    rollouts = sampled(policy)
    policy.likelihood(rollouts, whole(rollouts)).logprobs.sum().backward()
    assert all(p.grad is None for p in policy.module.network.parameters())
    assert action.head.conv_out.weight.grad.abs().sum() > 0
    policy.module.zero_grad(set_to_none=True)
    demos = policy.demonstrations(prompts(2), seed=0)
    policy.supervised_loss(demos, policy.likelihood(demos, whole(demos))).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in policy.module.network.parameters())
    assert all(p.grad is None for p in action.parameters())


# --- consistency ----------------------------------------------------------------------------------


def consistency_of(policy, rollouts, ref=None):
    likelihood = policy.likelihood(rollouts, whole(rollouts), outputs=("output",))
    if ref is None:
        nothing = Likelihood(likelihood.logprobs)
        return policy.consistency_loss(rollouts, likelihood, nothing)
    return policy.consistency_loss(
        rollouts, likelihood, ref.likelihood(rollouts, whole(rollouts), outputs=("output",))
    )


def test_consistency_to_a_reference_is_to_its_picture_and_not_to_the_own():
    policy = doubled(pixels(loss="mse"))
    rollouts, reference = sampled(policy), ReferenceModel(policy)
    assert consistency_of(policy, rollouts, reference).eq(0).all()
    disturb(policy.module)
    loss = consistency_of(policy, rollouts, reference)
    x = rollouts.shared["degraded"].double()
    with torch.no_grad():
        apart = (policy.module.network(x) - reference.module.network(x)).square()[
            rollouts.group_ids
        ]
    torch.testing.assert_close(loss[:, 0].detach(), apart.mean((1, 2, 3)), rtol=1e-9, atol=1e-12)
    loss.sum().backward()
    assert any(p.grad.abs().sum() > 0 for p in policy.module.network.parameters())


def test_equivariance_compares_the_picture_of_a_turned_one_with_the_turned_picture():
    """By hand: the loss of each row is that of one of the seven symmetries other than none, and all
    seven come; an oblong image is only mirrored or turned by 180 degrees. A network without a
    direction has none."""
    policy = doubled(pixels(consistency=equivariance, loss="l1"))
    for size, fitting in ((8, {1, 2, 3, 4, 5, 6, 7}), (6, {2, 4, 6})):
        x = picture(0)[:, :size]
        one = [Request(Prompt("a", x, draw=draw), 1) for draw in range(40)]
        loss = consistency_of(policy, policy.sample(one, SAMPLING, seed=0)).detach()[:, 0]
        by_hand = {}
        with torch.no_grad():
            for turn in fitting:
                of_turned = policy.module.network(apply_symmetry(x.double(), turn)[None])[0]
                turned = apply_symmetry(policy.module.network(x.double()[None])[0], turn)
                by_hand[turn] = float((of_turned - turned).abs().mean())
        seen = {
            min(fitting, key=lambda turn: abs(by_hand[turn] - value)) for value in loss.tolist()
        }
        nearest = [min(abs(value - hand) for hand in by_hand.values()) for value in loss.tolist()]
        assert seen == fitting and max(nearest) <= 1e-9
    for layer in (policy.module.network.conv_in, policy.module.network.conv_out):
        layer.weight.data = (
            layer.weight.data.mean(dim=(-1, -2), keepdim=True).expand_as(layer.weight).contiguous()
        )
    assert consistency_of(policy, sampled(policy, 1, 1, 1)).max() <= 1e-12


def test_a_picture_degraded_again_is_compared_with_what_was_given():
    strengths = {prompt.id: 0.5 + n for n, prompt in enumerate(prompts(3))}

    def degrade(pictures, asked):
        return torch.cat(
            [
                gaussian_blur(p[None], strengths[prompt.id])
                for p, prompt in zip(pictures, asked, strict=True)
            ]
        )

    policy = doubled(low_resolution(consistency=to_degraded(degrade), loss="mse"))
    rollouts = sampled(policy)
    x = rollouts.shared["degraded"].double()
    with torch.no_grad():
        again = torch.cat(
            [gaussian_blur(y[None], 0.5 + n) for n, y in enumerate(policy.output_of(x))]
        )
    by_hand = (again - x).square().mean(dim=(1, 2, 3))[rollouts.group_ids]
    torch.testing.assert_close(
        consistency_of(policy, rollouts)[:, 0].detach(), by_hand, rtol=1e-9, atol=1e-12
    )
    policy.consistency = to_degraded(lambda pictures, asked: pictures[..., ::2, ::2])
    with pytest.raises(GruppoError, match=r"\[9, 3, 8, 8\] became \[9, 3, 4, 4\].*keeps the size"):
        consistency_of(policy, rollouts)


# --- one gradient, however it is computed ---------------------------------------------------------


@cache
def case_of(make) -> Case:
    """Nine rows of three groups in float64; ratios off 1, some beyond every clip; one row
    unscored."""
    policy = doubled(make())
    rollouts = sampled(policy)
    reference = ReferenceModel(policy)
    disturb(reference.module, 0.01)
    return Case(policy, reference, None, batch_of(policy, reference, rollouts, torch.float64))


PAIRS = [(pixels, name) for name, preset in PRESETS.items() if not preset.has_critic]
PAIRS += [(make, "grpo") for make in (low_resolution, band_gains)]


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0].__name__}-{pair[1]}")
def pair(request):
    """Every preset over one policy, two over each of the others."""
    return case_of(request.param[0]), PRESETS[request.param[1]]


@pytest.mark.silent_bug(3)
@pytest.mark.silent_bug(5)
@pytest.mark.silent_bug(11)
@pytest.mark.silent_bug(24)
def test_neither_micro_batches_nor_order_nor_junk_nor_company_change_the_gradient_of_an_update(
    pair,
):
    case, objective = pair
    fresh, filled = replace(case.batch, ref=None), variants.spoiled(case.batch)
    turned = case.batch.take(torch.tensor([5, 0, 8, 3, 1, 7, 2, 6, 4]))
    both = case.batch.take(torch.cat([torch.arange(9), torch.arange(4)]))
    loss_mask = both.loss_mask.clone()
    loss_mask[9:] = False
    company = variants.spoiled(replace(both, loss_mask=loss_mask))
    varied = [
        Variant(case.batch, case.policy, 1),
        Variant(fresh, case.policy, 4),
        Variant(turned, case.policy, 3),
    ]
    varied += [Variant(filled, case.policy, 5), Variant(company, variants.undivided(case.policy))]
    assert farthest(case, objective, varied) <= LIMIT


@pytest.mark.silent_bug(2)
def test_on_the_policy_s_own_samples_every_surrogate_has_the_gradient_of_reinforce(pair):
    case, objective = pair
    advantages = torch.linspace(-1, 1.1, 9, dtype=torch.float64)[:, None].expand_as(
        case.batch.advantages
    )
    batch = replace(case.batch, advantages=advantages, old_logprobs=None, returns=None)
    plainly = replace(objective, surrogate="reinforce", ratio="token", dual_clip=0.0)
    alone = Stage(kl_coef=0.0, entropy_coef=0.0)
    got, stats = learned(case, objective, Variant(batch, case.policy), alone)
    assert stats["ratio"].min == stats["ratio"].max == 1
    assert distance(got, learned(case, plainly, Variant(batch, case.policy), alone)[0]) <= LIMIT


def test_actions_that_are_not_learned_from_may_hold_anything():
    for make in (pixels, band_gains):
        case = case_of(make)
        rollouts, loss_mask = case.batch.rollouts, case.batch.loss_mask.clone()
        loss_mask[2] = loss_mask[4] = False
        batch = replace(case.batch, loss_mask=loss_mask)
        expected = learned(case, GRPO, Variant(batch, case.policy))[0]
        hole = loss_mask.reshape(*loss_mask.shape, 1, 1, 1)
        junk = replace(
            rollouts, actions=torch.where(hole, rollouts.actions, torch.nan), mask=loss_mask
        )
        assert (
            distance(
                learned(case, GRPO, Variant(replace(batch, rollouts=junk), case.policy))[0],
                expected,
            )
            <= LIMIT
        )


@pytest.mark.parametrize("make", [pixels, band_gains], ids=lambda make: make.__name__)
def test_the_batch_reaches_both_sides_of_the_clip(make):
    case = case_of(make)
    _, stats = learned(case, GRPO, whole_update(case))
    assert 0 < stats["clip/high_frac"].mean < 1 and 0 < stats["clip/low_frac"].mean < 1


# --- a run ----------------------------------------------------------------------------------------


class Pictures:
    """Three pictures in turn."""

    def __init__(self) -> None:
        self.drawn = 0

    def take(self, n: int) -> list[Prompt]:
        self.drawn += n
        return [
            Prompt(f"p{d % 3}", picture(d % 3), picture(d % 3 + 50), draw=d)
            for d in range(self.drawn - n, self.drawn)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["drawn"]


def plain(images, **_):
    """Minus the mean difference of neighbours."""
    return [-float((image[..., 1:] - image[..., :-1]).abs().mean()) for image in images]


@pytest.mark.silent_bug(40)
def test_gains_of_detail_learn_a_reward_without_a_gradient_and_the_network_rests():
    torch.manual_seed(0)
    action = BandGains(grid=2, std=0.15)
    policy = policy_of(action)
    policy.module.network.requires_grad_(False)
    before = {name: value.clone() for name, value in policy.module.network.state_dict().items()}
    config = Config(
        objective=replace(GRPO, clip_unit="nats", clip_low=1.0, clip_high=1.0),
        rollout=RolloutConfig(prompts=6, group_size=8, max_new_tokens=1),
        optim=OptimConfig(lr=3e-3, token_budget=64),
        stage=Stage(kl_coef=1e-3),
    )
    rewards = RewardSet([plain], None, 10.0)
    optimizer = adamw(policy, None, config)
    source = SourceWrapper(Pictures())
    run = Run(
        config,
        policy,
        LocalEngine(policy),
        source,
        rewards,
        optimizer,
        reference=ReferenceModel(policy),
        critic=None,
    )
    metrics = []
    for _ in range(6):
        step_params = replace(step_params_at(config, run.state.step), sampling=SAMPLING)
        collected = collect(run, step_params)
        metrics.append(collected.metrics | learn(run, collected.batch, step_params))
        run.state.step += 1
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.02
    assert all(step["ratio/max"] == pytest.approx(1, abs=1e-3) for step in metrics)
    assert all(
        torch.equal(value, before[name])
        for name, value in policy.module.network.state_dict().items()
    )
    assert metrics[-1]["kl/ref_nats"] > 0
