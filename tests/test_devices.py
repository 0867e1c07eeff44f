"""What samples and scores on another device than the CPU's, and --device cpu, without hardware."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import fakes, own_models, tiny
from tests.fakes_diffusion import flow_sde
from tests.modalities.restoration import fakes as restoration
from tests.other_device import DEVICE, other_device
from tests.test_examples import example
from tests.trainer.test_step import run_in

from gruppo import build
from gruppo.core.distributions import sample_categorical
from gruppo.modalities.functions import FUNCTION
from gruppo.modalities.text import from_pretrained, load
from gruppo.types import Prompt, Request, Rollouts, Sampling


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.9), (400, 0.8)])
def test_uniforms_of_the_cpu_sample_logits_of_a_device(top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 2000, generator=generator)
    uniforms = torch.rand(7, generator=generator, dtype=torch.float64)
    options: Any = {"temperature": 1.2, "top_k": top_k, "top_p": top_p}
    expected = sample_categorical(logits, uniforms, **options)
    with other_device():
        got = [x.cpu() for x in sample_categorical(logits.to(DEVICE), uniforms, **options)]
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def of_inputs(policy: Any, inputs: list[Any], sampling: Any) -> tuple[Any, Any]:
    requests = [Request(Prompt(str(n), x, draw=n), 3) for n, x in enumerate(inputs)]
    return policy, lambda: policy.sample(requests, sampling, seed=0)


def text() -> tuple[Any, Any]:
    policy = fakes.qwen3()  # a move of such tensors would untie tied weights
    sampling = Sampling(max_actions=9, top_p=0.9)
    return policy, lambda: policy.sample(fakes.requests(3, 2), sampling, seed=1)


def plain_module() -> tuple[Any, Any]:
    policy = fakes.plain()
    sampling = Sampling(max_actions=9, top_k=5)
    return policy, lambda: policy.sample(fakes.requests(3, 2), sampling, seed=1)


def diffusion() -> tuple[Any, Any]:
    from tests.fakes_diffusion import sampled

    fake = flow_sde()
    return fake.policy, lambda: sampled(fake)


def restoration_gains() -> tuple[Any, Any]:
    policy = restoration.band_gains()
    return policy, lambda: restoration.sampled(policy, 3, 2)


def routes() -> tuple[Any, Any]:
    cities = torch.rand(2, 20, 2, generator=torch.Generator().manual_seed(0)).tolist()
    return of_inputs(example("routes").policy(), cities, Sampling(max_actions=20))


def pendulum() -> tuple[Any, Any]:
    states = [[0.1, 0.2], [3.0, 0.0]]
    return of_inputs(example("pendulum").policy(), states, Sampling(max_actions=100))


@pytest.mark.parametrize(
    "make",
    [text, plain_module, diffusion, restoration_gains, routes, pendulum],
    ids=lambda make: make.__name__,
)
def test_a_policy_on_a_device_samples_and_scores_as_on_the_cpu(make):
    policy, sample = make()
    outputs = ("entropy",) if "entropy" in policy.likelihood_outputs else ()

    def scored(rollouts: Rollouts) -> list[torch.Tensor]:
        policy.module.zero_grad()
        (micro_batch,) = policy.micro_batches(rollouts, rollouts.mask, 99_999)
        logprobs = policy.likelihood(rollouts, micro_batch, outputs=outputs).logprobs
        logprobs.sum().backward()
        parameters = [p for p in policy.module.parameters() if p.grad is not None]
        return [logprobs.detach().cpu(), *(p.grad.cpu() for p in parameters)]

    expected_rollouts = sample()
    expected = scored(expected_rollouts)
    with other_device():
        policy.module.to(DEVICE)
        rollouts = sample()
        got = scored(rollouts)
    assert rollouts.actions.device.type == rollouts.sampler_logprobs.device.type == "cpu"
    torch.testing.assert_close(rollouts.actions, expected_rollouts.actions, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_device_cpu_leaves_the_gpu_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "usable_cuda", lambda: pytest.fail("a GPU was looked for"))
    monkeypatch.setattr(build, "usable_cuda", lambda: pytest.fail("a GPU was looked for"))
    run = run_in(tmp_path, device="cpu")
    assert run.policy.device.type == "cpu"
    assert from_pretrained(tiny.model(), device="cpu").device.type == "cpu"
    assert FUNCTION.load(own_models.own("model"), device="cpu").device.type == "cpu"
