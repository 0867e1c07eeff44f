"""The supervised side: noise by its address, the loss by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.fakes_diffusion import FAKES, SHAPE, ddpm_schedule, denoiser, prompts, whole

from gruppo.modalities.diffusion import FlowSchedule
from gruppo.protocols import DemonstrationMixin
from gruppo.seeds import generator_at
from gruppo.types import GruppoError, Prompt


def demonstrations_of(n=3):
    pictures = torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(0))
    return [
        replace(prompt, target=picture)
        for prompt, picture in zip(prompts(*range(n)), pictures, strict=True)
    ]


def doubled(**changes):
    policy = denoiser(**changes)
    policy.module.double()
    return policy


def loss_of(policy, demos):
    return policy.supervised_loss(demos, policy.likelihood(demos, whole(demos)))


@pytest.mark.parametrize("make", FAKES, ids=lambda make: make.__name__)
def test_a_demonstration_is_a_picture_and_nothing_that_was_sampled(make):
    policy = make().policy
    assert isinstance(policy, DemonstrationMixin)
    demos = policy.demonstrations(demonstrations_of(), seed=0)
    torch.testing.assert_close(
        demos.actions[:, 0], 2 * torch.stack([p.target for p in demonstrations_of()]) - 1
    )
    assert demos.mask.tolist() == [[True]] * 3 and demos.lengths.tolist() == [1] * 3
    assert not demos.sampler_logprobs.any() and demos.group_ids.tolist() == [0, 1, 2]
    micro_batches = policy.micro_batches(demos, demos.mask, 2)
    assert [micro_batch.rows.tolist() for micro_batch in micro_batches] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("predicts", "schedule"),
    [
        ("x0", FlowSchedule()),
        ("velocity", FlowSchedule(2.0)),
        ("v", ddpm_schedule("squaredcos_cap_v2")),
        ("noise", ddpm_schedule()),
        ("v", FlowSchedule()),
    ],
    ids=("flow-x0", "shifted-velocity", "cosine-v", "linear-noise", "flow-v"),
)
def test_the_loss_by_hand_from_the_raw_network(predicts, schedule):
    """mean (network(alpha x0 + sigma e) - truth)^2 over the dimensions, at the drawn level with the
    drawn noise."""
    policy = doubled(predicts=predicts, schedule=schedule)
    demos = policy.demonstrations(demonstrations_of(), seed=0)
    got = loss_of(policy, demos)
    for n, prompt in enumerate(demonstrations_of()):
        x0, e = 2 * prompt.target.double() - 1, demos.per_row["first"][n].double()
        alpha, sigma = schedule.level(demos.per_row["level"][n : n + 1])
        x = (alpha * x0 + sigma * e).float().double()
        prediction = policy.module(x[None], demos.per_row["level"][n : n + 1], torch.tensor([n]))[0]
        truth = {"noise": e, "x0": x0, "v": alpha * e - sigma * x0, "velocity": e - x0}[predicts]
        torch.testing.assert_close(
            got[n, 0], (prediction - truth).square().mean(), rtol=1e-9, atol=1e-12
        )


def test_the_clean_weighting_is_1_over_sigma_squared_and_a_twentieth():
    plain, weighted = (doubled(weighting=name) for name in ("uniform", "clean"))
    demos = plain.demonstrations(demonstrations_of(), seed=0)
    sigma = demos.per_row["level"]
    torch.testing.assert_close(
        loss_of(weighted, demos), loss_of(plain, demos) / (sigma[:, None] ** 2 + 0.05)
    )


@pytest.mark.silent_bug(34)
def test_level_and_noise_hang_on_seed_and_draw_alone():
    policy = denoiser()
    demos = policy.demonstrations(demonstrations_of(), seed=5)
    turned = policy.demonstrations(demonstrations_of()[::-1], seed=5)
    for name in ("first", "level"):
        assert torch.equal(demos.per_row[name], turned.per_row[name].flip(0))
        assert not torch.equal(
            demos.per_row[name], policy.demonstrations(demonstrations_of(), seed=6).per_row[name]
        )
    generator = generator_at(5, "demonstration", 11)
    uniform = torch.rand(2, generator=generator, dtype=torch.float64)[0]
    assert float(demos.per_row["level"][1]) == 1 - float(uniform)
    assert torch.equal(demos.per_row["first"][1], torch.randn(SHAPE, generator=generator))


@pytest.mark.silent_bug(36)
def test_a_share_of_the_demonstrations_is_asked_for_nothing():
    policy = doubled(dropped=0.3)
    many = [Prompt("a", 1, torch.zeros(SHAPE), draw=n) for n in range(400)]
    demos = policy.demonstrations(many, seed=0)
    dropped = demos.per_row["dropped"]
    assert 90 <= int(dropped.sum()) <= 150
    assert not denoiser().demonstrations(many, seed=0).per_row["dropped"].any()
    t = demos.per_row["level"]
    at = t.reshape(-1, 1, 1, 1)
    x = (
        ((1 - at) * demos.actions[:, 0].double() + at * demos.per_row["first"].double())
        .float()
        .double()
    )
    prediction = policy.module(x, t, torch.where(dropped, 3, 1))
    by_hand = (prediction + 1).square().flatten(1).mean(1)
    torch.testing.assert_close(loss_of(policy, demos)[:, 0], by_hand, rtol=1e-9, atol=1e-9)


def test_micro_batches_and_company_change_no_loss_and_no_gradient():
    policy = doubled(dropped=0.1)
    demos = policy.demonstrations(demonstrations_of(), seed=0)
    gradients = []
    for budget in (1, 2, 99):
        policy.module.zero_grad()
        for micro_batch in policy.micro_batches(demos, demos.mask, budget):
            policy.supervised_loss(
                demos.take(micro_batch.rows), policy.likelihood(demos, micro_batch)
            ).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.module.parameters()]))
    assert gradients[0].norm() > 0
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() <= 1e-10 * gradients[0].norm()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (None, r"prompt 'a' has a NoneType as its target"),
        (torch.zeros(4, 4), r"has \[4, 4\] of torch.float32 as its target; it needs"),
        (torch.zeros(SHAPE, dtype=torch.uint8), r"of torch.uint8 as its target; it needs floats"),
        (torch.full(SHAPE, 255.0), r"values from 255 to 255 as its target; it needs"),
        (torch.full(SHAPE, torch.nan), r"values from nan to nan"),
    ],
)
def test_targets_that_are_no_pictures_are_refused(target, says):
    policy = denoiser()
    with pytest.raises(GruppoError, match=says):
        policy.demonstrations([Prompt("a", 0, target)], seed=0)
    assert policy.check_demonstration(Prompt("a", 0, torch.zeros(SHAPE))) is None
    assert "9 is no class" in policy.check_demonstration(Prompt("a", 9, torch.zeros(SHAPE)))
