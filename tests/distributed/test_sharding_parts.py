"""What is sharded by itself, what is refused, and where the optimizer's state is kept; no ranks are
started."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests import fakes, tiny

from gruppo.config.checks import check_config
from gruppo.config.schema import DistributedConfig, ReferenceConfig, Stage
from gruppo.distributed.sharding import blocks_of
from gruppo.trainer.forward import equally_many
from gruppo.types import GruppoError, Sampling


def test_layers_are_sharded_by_themselves_and_an_embedding_that_is_not_tied():
    tied, untied = (
        fakes.causal_lm("Llama", tie_word_embeddings=True),
        fakes.causal_lm("Qwen2", tie_word_embeddings=False),
    )
    assert blocks_of(tied) == [*tied.model.layers]
    assert blocks_of(untied) == [*untied.model.layers, untied.model.embed_tokens]
    assert blocks_of(fakes.TinyGPT()) != []


def test_a_layer_that_shares_a_weight_with_the_rest_belongs_to_the_root():
    model = fakes.TinyGPT()
    first, second = model.blocks
    second.mlp[1].weight = first.mlp[1].weight
    assert blocks_of(model) == []
    model = fakes.TinyGPT()
    model.blocks.append(model.blocks[0])  # one layer, run twice
    assert blocks_of(model) == [model.blocks[0], model.blocks[1]]


@pytest.mark.parametrize("place", ["cpu"])
def test_a_reference_kept_elsewhere_and_sharded_weights_are_refused(tmp_path, place):
    config = tiny.config(tmp_path, stage=Stage(kl_coef=0.1))
    config = replace(
        config, distributed=DistributedConfig(shard="fsdp"), reference=ReferenceConfig(place=place)
    )
    with pytest.raises(
        GruppoError, match=rf"reference\.place='{place}' .* distributed\.shard='fsdp' .* Leave one"
    ):
        check_config(config)


def test_a_rank_without_any_action_is_refused_on_all_ranks(monkeypatch):
    """The other ranks would wait for its forwards."""
    policy = fakes.plain()
    rollouts = policy.sample(fakes.requests(2), Sampling(max_actions=3), seed=0)
    cut = policy.micro_batches(rollouts, rollouts.mask, 100)
    asked = []
    monkeypatch.setattr(
        "gruppo.distributed.all_max",
        lambda x: asked.append(x) or max(x, 2 if len(asked) == 1 else 0),
    )
    assert [one.is_repeat for one in equally_many(policy, rollouts, cut)] == [False, True]
    asked.clear()
    with pytest.raises(
        GruppoError, match=r"no row of a minibatch to run.*Set optim\.minibatches 1"
    ):
        equally_many(policy, rollouts.take(torch.zeros(0, dtype=torch.long)), [])
