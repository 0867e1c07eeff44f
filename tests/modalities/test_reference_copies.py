"""A reference is made of the weights as they are, however they came to be."""

from __future__ import annotations

import pytest
import torch
from tests.fakes import llama

from gruppo.modalities.common.reference import FrozenReference


@pytest.mark.silent_bug(9)
@pytest.mark.silent_bug(18)
def test_a_reference_made_after_a_change_behind_autograds_back_is_the_changed_policy():
    policy = llama(compute="bfloat16")
    policy.module.model.embed_tokens.weight.data.mul_(2)
    reference = FrozenReference(policy)
    wanted = policy.module.model.embed_tokens.weight.bfloat16()
    assert torch.equal(reference.module.model.embed_tokens.weight, wanted)
