"""Restoration policies: what they draw, how it is scored, and that both are one function."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.modalities.restoration.fakes import (
    POLICIES,
    SAMPLING,
    TinyNetwork,
    disturb,
    doubled,
    picture,
    pixels,
    policy_of,
    prompts,
    requests,
    sampled,
    whole,
)
from torch import nn

from gruppo.core.images import quantize
from gruppo.core.kl import gaussian_kl
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.restoration import BandGains, LowResolution, PixelNoise, RestorationPolicy
from gruppo.testing import check_policy
from gruppo.types import GruppoError, Prompt, Request, Rollouts

ALL = 10**9


@pytest.fixture(params=POLICIES, ids=lambda make: make.__name__)
def make(request):
    return request.param


@pytest.fixture
def policy(make):
    return doubled(make())


@torch.no_grad()
def logprobs_of(policy, rollouts, budget=ALL):
    logprobs = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, budget):
        logprobs[micro_batch.rows] = policy.likelihood(rollouts, micro_batch).logprobs
    return logprobs


def gradient_of(policy, rollouts, micro_batches):
    """Of sum(weights * log-probs), with a weight of its own for each action."""
    policy.module.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, rollouts.mask.numel(), dtype=torch.float64).reshape(
        rollouts.mask.shape
    )
    for micro_batch in micro_batches:
        (
            policy.likelihood(rollouts, micro_batch).logprobs * micro_batch.of(weights)
        ).sum().backward()
    return torch.cat(
        [p.grad.flatten().double() for p in policy.module.parameters() if p.grad is not None]
    )


def likelihood_of(policy, rollouts, *outputs):
    return policy.likelihood(rollouts, whole(rollouts), outputs=outputs)


# --- one distribution -----------------------------------------------------------------------------


def test_it_keeps_the_contract_of_a_policy(make):
    check_policy(make(), [picture(n) for n in range(3)])


@pytest.mark.silent_bug(2)
@pytest.mark.parametrize("budget", [1, 3, ALL])
def test_the_ratio_starts_at_one_whatever_shares_a_micro_batch(make, budget):
    """At most 1e-5 nats per dimension, in float32."""
    policy = make()
    rollouts = sampled(policy)
    apart = (logprobs_of(policy, rollouts, budget) - rollouts.sampler_logprobs).abs()
    assert apart.max() <= 1e-5 * policy.action_dims(prompts(1)[0])
    assert rollouts.sampler_logprobs.abs().min() > 0.001


@pytest.mark.silent_bug(35)
def test_a_log_prob_is_that_of_torch_s_normal_of_the_action_as_it_is_stored(make):
    policy = make()
    rollouts = sampled(policy)
    likelihood = likelihood_of(policy, rollouts, "gaussian", "entropy")
    assert rollouts.actions.dtype == torch.float32 and likelihood.logprobs.dtype == torch.float64
    assert not rollouts.actions.requires_grad
    normal = torch.distributions.Normal(likelihood.gaussian.mean.double(), likelihood.gaussian.std)
    by_hand = normal.log_prob(rollouts.actions.double()).flatten(2).sum(-1)
    torch.testing.assert_close(likelihood.logprobs, by_hand, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(
        likelihood.entropy, normal.entropy().flatten(2).sum(-1), rtol=1e-12, atol=1e-9
    )


@pytest.mark.silent_bug(17)
def test_the_kl_is_that_of_torch_s_normals_and_of_monte_carlo(make):
    policy = make()
    rollouts = sampled(policy, 1)
    reference = ReferenceModel(policy)
    disturb(policy.module, 0.02)
    ours, theirs = (
        of.likelihood(rollouts, whole(rollouts), outputs=("gaussian",)).gaussian
        for of in (policy, reference)
    )
    exact = gaussian_kl(ours.mean, ours.std, theirs.mean, theirs.std).detach()
    p, q = (
        torch.distributions.Normal(of.mean.detach().double(), of.std.detach())
        for of in (ours, theirs)
    )
    by_torch = torch.distributions.kl_divergence(p, q).flatten(2).sum(-1)
    torch.testing.assert_close(exact, by_torch, rtol=1e-9, atol=1e-12)
    noise = torch.randn(
        4000, *p.loc.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    x = p.loc + p.scale * noise
    samples = (p.log_prob(x) - q.log_prob(x)).flatten(3).sum(-1)[:, 0]  # [draws, T]
    error = samples.std(dim=0) / math.sqrt(len(samples))
    assert ((samples.mean(dim=0) - exact[0]).abs() <= 4 * error).all()


# --- what is shown --------------------------------------------------------------------------------


@pytest.mark.silent_bug(38)
def test_pixels_are_shown_as_they_are_drawn_and_saved():
    policy = pixels()
    rollouts = sampled(policy)
    for row, action in zip(rollouts.completions, rollouts.actions[:, 0], strict=True):
        assert torch.equal(row, quantize(action))
    assert rollouts.actions.min() < 0 or rollouts.actions.max() > 1, (
        "the action itself is not clamped"
    )


def test_a_coarse_residual_is_added_to_the_network_s_picture():
    """By hand: 2 x 2 numbers a channel at the centers of 4 x 4 pixels, linear between them."""
    policy = policy_of(LowResolution(grid=2, std=0.1))
    rollouts = sampled(policy, 2)
    with torch.no_grad():
        base = policy.module.network(rollouts.shared["degraded"])[0]
    z = rollouts.actions[:, 0]
    share = ((torch.arange(8) - 1.5) / 4).clamp(0, 1)  # of the second cell
    weights = torch.stack([1 - share, share])
    by_hand = base + torch.einsum("bkij,ih,jw->bkhw", z, weights, weights)
    torch.testing.assert_close(
        torch.stack(rollouts.completions), quantize(by_hand), rtol=0, atol=1 / 255 + 1e-6
    )
    assert (torch.stack(rollouts.completions) - quantize(by_hand)).abs().gt(
        1e-6
    ).float().mean() < 0.01


def blurred_by_hand(image, std):
    """Reflecting nothing: a plain double sum with the edge continued."""
    r = math.ceil(3 * std)
    weights = [math.exp(-(n**2) / (2 * std**2)) for n in range(-r, r + 1)]
    weights = [w / sum(weights) for w in weights]
    height, width = image.shape[-2:]
    out = torch.zeros_like(image)
    for dy, wy in zip(range(-r, r + 1), weights, strict=True):
        for dx, wx in zip(range(-r, r + 1), weights, strict=True):
            rows = (torch.arange(height) + dy).clamp(0, height - 1)
            columns = (torch.arange(width) + dx).clamp(0, width - 1)
            out += wy * wx * image[..., rows, :][..., columns]
    return out


def test_gains_multiply_bands_of_luma_and_chroma():
    """One gain at a time, by plain loops: y = f + g band; and a gain of -1 on both bands of luma
    leaves a blur's."""
    policy = doubled(policy_of(BandGains(grid=1, std=0.15)))
    x = picture(0)[None].double()
    base = policy.module.network(x)
    first, second = blurred_by_hand(base, 1.0), blurred_by_hand(base, 2.0)
    fine, mid = base - first, first - second
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64).reshape(3, 1, 1)
    luma = [(weights * band).sum(dim=1, keepdim=True) for band in (fine, mid)]
    by_hand = [luma[0].expand_as(base), luma[1].expand_as(base), fine - luma[0], mid - luma[1]]
    for k, band in enumerate(by_hand):
        gains = torch.zeros(1, 4, 1, 1, dtype=torch.float64)
        gains[0, k] = 0.5
        torch.testing.assert_close(
            policy.module.action.render(base, gains), base + 0.5 * band, rtol=0, atol=1e-6
        )
    off = policy.module.action.render(base, torch.full((1, 4, 1, 1), -1.0, dtype=torch.float64))
    torch.testing.assert_close(off, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "action", [LowResolution(grid=2), BandGains(grid=2)], ids=lambda a: type(a).__name__
)
def test_a_new_head_changes_nothing_at_temperature_0(action):
    torch.manual_seed(0)
    policy = RestorationPolicy(TinyNetwork(), action)
    x = torch.stack([picture(0), picture(1)])
    with torch.no_grad():
        torch.testing.assert_close(
            policy.restore(x), quantize(policy.module.network(x)), rtol=0, atol=1e-6
        )


def test_a_network_that_rests_gets_no_gradient_and_the_head_does():
    """Also where the head's gradient would reach it."""
    policy = policy_of(BandGains(grid=4, detached=False))
    policy.module.network.requires_grad_(False)
    rollouts = sampled(policy)
    likelihood_of(policy, rollouts).logprobs.pow(2).sum().backward()
    assert all(p.grad is None for p in policy.module.network.parameters())
    assert all(p.grad.abs().sum() > 0 for p in policy.module.action.head.parameters())


def test_a_picture_that_is_not_finite_is_an_error_and_is_not_learned_from():
    policy = policy_of(PixelNoise(std=0.1))
    policy.module.network = Nanny(policy.module.network)
    rollouts = sampled(policy, 2, 2)
    assert rollouts.finish == ("stop", "stop", "error", "error")
    assert rollouts.mask.tolist() == [[True]] * 2 + [[False]] * 2
    assert torch.stack(rollouts.completions).isfinite().all()
    likelihood = likelihood_of(policy, rollouts, "entropy")
    assert likelihood.logprobs[2:].eq(0).all() and likelihood.entropy[2:].eq(0).all()
    likelihood.logprobs.sum().backward()
    assert all(p.grad.isfinite().all() for p in policy.module.parameters() if p.grad is not None)


class Nanny(nn.Module):
    """NaN of the picture number 1 of the tests, and of no other."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x):
        is_it = (x - picture(1).to(x)).flatten(1).abs().amax(dim=1) == 0
        return torch.where(is_it[:, None, None, None], torch.nan, self.network(x))


# --- pieces, company, order, addresses ------------------------------------------------------------


def test_micro_batches_hold_each_kept_row_once_within_the_budget_of_squares(policy):
    rollouts = sampled(policy)
    loss_mask = rollouts.mask.clone()
    loss_mask[[1, 6]] = False
    for budget in (1, 3, ALL):
        micro_batches = policy.micro_batches(rollouts, loss_mask, budget)
        assert torch.cat(
            [micro_batch.rows for micro_batch in micro_batches]
        ).sort().values.tolist() == [
            0,
            2,
            3,
            4,
            5,
            7,
            8,
        ]
        assert all(len(micro_batch.rows) <= budget for micro_batch in micro_batches)
    large = sampled_at(policy, 32)  # 2 x 2 squares of 16 pixels
    assert [
        len(micro_batch.rows) for micro_batch in policy.micro_batches(large, large.mask, 9)
    ] == [2, 2, 1]
    assert policy.micro_batches(rollouts, torch.zeros_like(loss_mask), ALL) == []


def sampled_at(policy, side):
    requested = [Request(Prompt("large", picture(0, side)), 5)]
    return policy.sample(requested, SAMPLING, seed=0)


def test_the_network_is_asked_once_for_the_rows_of_a_group(policy):
    seen = []
    rollouts = sampled(policy)
    policy.module.network.register_forward_hook(
        lambda module, inputs, output: seen.append(len(inputs[0]))
    )
    likelihood_of(policy, rollouts)
    assert sum(seen) == 3


@pytest.mark.silent_bug(25)
@pytest.mark.silent_bug(26)
@pytest.mark.parametrize("apart", [True, False], ids=["in two calls", "in one call"])
def test_a_group_that_grows_equals_the_larger_group_at_once(policy, apart):
    requested = prompts(3)
    grown = [
        [Request(requested[0], 3), Request(requested[1], 2), Request(requested[2], 3)],
        [Request(requested[0], 1, first=3)],
    ]
    calls = grown if apart else [grown[0] + grown[1]]
    got = Rollouts.cat([policy.sample(call, SAMPLING, seed=3) for call in calls])
    whole_group = sampled(policy)
    for n in range(3):
        mine, theirs = (
            got.actions[got.group_ids == n],
            whole_group.actions[whole_group.group_ids == n],
        )
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.silent_bug(26)
def test_noise_hangs_on_seed_draw_and_sample_alone(policy, monkeypatch):
    prompt = prompts(1)[0]
    twice = [Request(prompt, 4), Request(replace(prompt, draw=prompt.draw + 1), 4)]
    rollouts = policy.sample(twice, SAMPLING, seed=3)
    assert len({tuple(row.flatten().tolist()) for row in rollouts.actions}) == 8
    other = policy.sample(twice, SAMPLING, seed=4)
    assert (rollouts.actions != other.actions).float().mean() > 0.9
    monkeypatch.setattr(RestorationPolicy, "batch_rows", 3)
    again = policy.sample(twice, SAMPLING, seed=3)
    torch.testing.assert_close(again.actions, rollouts.actions, rtol=0, atol=1e-6)
    assert [p.draw for p in again.prompts] == [10, 11] and again.group_ids.tolist() == [0] * 4 + [
        1
    ] * 4


@pytest.mark.silent_bug(27)
@pytest.mark.silent_bug(40)
def test_dropout_and_moving_statistics_are_off():
    policy = pixels(module={"dropout": 0.5, "norm": True})
    policy.module.eval()
    quiet = sampled(policy)
    policy.module.train()
    rollouts = sampled(policy)
    assert torch.equal(rollouts.actions, quiet.actions)
    policy.module.train()
    torch.testing.assert_close(
        logprobs_of(policy, rollouts).float(), quiet.sampler_logprobs, rtol=0, atol=2e-3
    )
    assert policy.module.network.norm.num_batches_tracked == 0


# --- bad input ------------------------------------------------------------------------------------


class Doubles(nn.Module):
    """An upscaling."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.weight * x.repeat_interleave(2, dim=-1).repeat_interleave(2, dim=-2)


def test_a_network_that_changes_the_size_or_reads_other_channels_is_refused_when_it_is_given():
    with pytest.raises(
        GruppoError,
        match=r"Doubles returned \[1, 3, 128, 128\] for images \[1, 3, 64, 64\]; it needs",
    ):
        RestorationPolicy(Doubles(), PixelNoise())
    with pytest.raises(
        GruppoError, match=r"TinyNetwork cannot restore images \[1, 3, 64, 64\]: .*channels"
    ):
        RestorationPolicy(TinyNetwork(1), PixelNoise())
    with pytest.raises(GruppoError, match="action is for 1 channels and the network for 3"):
        RestorationPolicy(TinyNetwork(), PixelNoise(1))


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (None, "has a NoneType as its input"),
        (
            torch.zeros(3, 8, 8, dtype=torch.uint8),
            r"\[3, 8, 8\] of torch.uint8 as its input; it needs floats",
        ),
        (torch.zeros(1, 8, 8), r"has \[1, 8, 8\] of torch.float32 as its input; it needs floats"),
        (torch.full((3, 8, 8), 255.0), "values from 255 to 255 as its input; it needs"),
        (torch.full((3, 8, 8), math.nan), "from nan to nan"),
    ],
    ids=["none", "bytes", "grey", "levels", "nan"],
)
def test_a_prompt_that_is_no_such_picture_is_refused_in_one_line(inputs, why):
    policy = pixels()
    error = policy.check_prompt(Prompt("x", inputs), SAMPLING)
    with pytest.raises(GruppoError, match=why):
        policy.sample([Request(Prompt("x", inputs), 1)], SAMPLING, seed=0)
    assert error.startswith("prompt 'x' ") and "\n" not in error


def test_targets_are_refused_in_one_line():
    policy = pixels()
    assert policy.check_demonstration(Prompt("x", picture(0), picture(1))) is None
    small = policy.check_demonstration(Prompt("x", picture(0), picture(1, 4)))
    assert "has [3, 4, 4] of torch.float32 as its target; it needs floats [3, 8, 8]" in small
    with pytest.raises(GruppoError, match="has a str as its target"):
        policy.demonstrations([Prompt("x", picture(0), "clean")], seed=0)


def test_pictures_of_two_sizes_or_two_under_one_name_are_refused():
    policy = pixels()
    with pytest.raises(GruppoError, match=r"images of 2 sizes \(4 x 4, 8 x 8\)"):
        policy.sample(
            requests(1, 1, of=[Prompt("a", picture(0)), Prompt("b", picture(1, 4))]),
            SAMPLING,
            seed=0,
        )
    with pytest.raises(GruppoError, match="two different prompts have the id 'a'"):
        policy.sample(
            requests(1, 1, of=[Prompt("a", picture(0)), Prompt("a", picture(1))]), SAMPLING, seed=0
        )


def test_an_action_without_noise_and_a_temperature_of_its_own_are_refused():
    with pytest.raises(GruppoError, match="std=0 of an action; it needs to be above 0"):
        PixelNoise(std=0)
    with pytest.raises(GruppoError, match=r"temperature=0.5: images are sampled at 1"):
        pixels().sample(requests(1), replace(SAMPLING, temperature=0.5), seed=0)
