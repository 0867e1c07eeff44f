"""The text policy on an accelerator: skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from tests import tiny

from gruppo.modalities.text import from_transformers
from gruppo.types import Prompt, Request, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_ratio_starts_at_one_and_gradients_reach_the_masters(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny.write_model(tmp_path)
    module, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    for compute, tolerance in (("float32", 1e-4), ("bfloat16", 0.1)):
        policy = from_transformers(module, tokenizer, compute=compute)
        requests = [Request(Prompt(str(i), f"{i} + 1", draw=i), 3) for i in range(4)]
        rollouts = policy.sample(requests, Sampling(max_actions=8), seed=0)
        for micro_batch in policy.micro_batches(rollouts, rollouts.mask, 4096):
            logprobs = policy.likelihood(rollouts, micro_batch).logprobs
            difference = logprobs.detach().cpu() - micro_batch.of(rollouts.sampler_logprobs)
            assert float(difference.abs().max()) < tolerance
            logprobs.sum().backward()
        assert all(
            p.grad is not None and p.grad.isfinite().all() for p in policy.module.parameters()
        )
        policy.module.zero_grad()
