"""Image models on an accelerator: skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from tests.fakes_diffusion import FAKES, denoiser, sampled, whole

from gruppo.modalities.common.reference import ReferenceModel
from gruppo.modalities.diffusion import DenoisingUNet
from gruppo.modalities.diffusion.policy import DenoiserCritic, DenoiserPolicy
from gruppo.types import MicroBatch, Prompt, Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _float32_convolutions():
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("make", FAKES)
def test_the_ratio_is_1_at_other_batch_sizes_and_gradients_reach_the_weights(make) -> None:
    fake = make()
    fake.policy.module.cuda()
    rollouts = sampled(fake)
    dims = rollouts.actions[0, 0].numel()
    for budget in (1, 5, 999):
        for micro_batch in fake.policy.micro_batches(rollouts, rollouts.mask, budget):
            logprobs = fake.policy.likelihood(rollouts, micro_batch).logprobs
            difference = logprobs.detach().cpu() - micro_batch.of(rollouts.sampler_logprobs)
            assert float(difference[micro_batch.of(rollouts.mask)].abs().max()) <= 1e-5 * dims
            logprobs.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in fake.policy.module.parameters())


def test_a_batch_of_a_unet_is_scored_as_it_was_drawn_in_micro_batches_of_another_size() -> None:
    condition = denoiser().denoiser.condition
    policy = DenoiserPolicy(
        DenoisingUNet().cuda(), (1, 28, 28), condition=condition, middle="middle"
    )
    rollouts = policy.sample(
        [Request(Prompt(str(n), n, draw=n), 24) for n in range(3)], fakes_sampling(), seed=0
    )
    for rows in (torch.arange(72), torch.arange(7), torch.arange(1)):
        micro_batch = MicroBatch(rows, slice(0, rollouts.mask.shape[1]))
        difference = policy.likelihood(
            rollouts, micro_batch
        ).logprobs.detach().cpu() - micro_batch.of(rollouts.sampler_logprobs)
        assert float(difference.abs().max()) <= 1e-5 * 28**2


def fakes_sampling():
    from gruppo.modalities.diffusion import DiffusionSampling

    return DiffusionSampling(max_actions=6)


def test_reference_and_critic_are_where_the_policy_is() -> None:
    policy = denoiser()
    policy.module.cuda()
    rollouts = policy.sample([Request(Prompt("0", 0), 4)], fakes_sampling(), seed=0)
    reference, micro_batch = ReferenceModel(policy), whole(rollouts)
    ours, theirs = (
        of.likelihood(rollouts, micro_batch, outputs=("gaussian",)) for of in (policy, reference)
    )
    assert ours.gaussian is not None and theirs.gaussian is not None
    assert torch.equal(ours.gaussian.mean, theirs.gaussian.mean)
    assert DenoiserCritic(policy).values(rollouts, micro_batch).device.type == "cuda"
