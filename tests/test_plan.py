"""``gruppo plan``: numbers of known models, two routes to one number, and bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks import flops
from tests import tiny
from transformers import AutoConfig

from gruppo.cli.commands import plan
from gruppo.config.schema import (
    Config,
    CriticConfig,
    EngineConfig,
    LoraConfig,
    PlanOptions,
    RolloutConfig,
    Stage,
)
from gruppo.core.objective import PPO
from gruppo.errors import GruppoError
from gruppo.plan import ModelShape, Split, estimate, splits

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN_235B = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "tie_word_embeddings": False,
}
OPTIONS = PlanOptions(gpus=16, mean_tokens=500)
"""H100s."""
CONFIG = Config(rollout=RolloutConfig(prompts=64, group_size=16, max_new_tokens=1000))


def shape_of(settings: dict[str, Any]) -> ModelShape:
    return ModelShape.of(AutoConfig.for_model(**settings))


@pytest.fixture(scope="module")
def dense() -> ModelShape:
    return shape_of(QWEN_7B)


def test_published_models_have_their_published_numbers_of_weights(dense):
    sparse = shape_of(QWEN_235B)
    assert dense.counts.total == 7_615_616_512  # the model card: 7.61B
    assert dense.cache_bytes == 2 * 2 * 28 * 4 * 128
    assert sparse.counts.total == pytest.approx(235.09e9, rel=1e-3)
    assert sparse.active == pytest.approx(22.19e9 - 151936 * 4096, rel=1e-3)  # 22B activated


def test_training_takes_the_operations_that_the_benchmarks_count_by_hand(dense):
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, prompts=1, group_size=2))
    rows = flops.forward(flops.Shape.of(dense.settings), [(200, [500, 500])]).total
    one = estimate(config, dense, replace(OPTIONS, gpus=1, bandwidth=1e18), 1)
    # the plan leaves out attention scores and counts the head for prompts too
    assert one.train_s == pytest.approx(3 * rows / (0.33 * 989e12), rel=0.1)


def test_decoding_is_bound_by_bandwidth_for_few_rows_and_by_operations_for_many(dense):
    alone = replace(CONFIG, rollout=replace(CONFIG.rollout, prompts=1, group_size=1))
    few = estimate(alone, dense, replace(OPTIONS, gpus=1), 1)
    steps = 500 * 0.58
    rows = 500 / steps
    read = 2 * dense.active + rows * (200 + 250) * dense.cache_bytes
    prefill = 2 * dense.active * 200 / (0.33 * 989e12)
    assert few.sample_s == pytest.approx(steps * read / (0.4 * 3.35e12) + prefill)
    slow = estimate(CONFIG, dense, replace(OPTIONS, gpus=1, tflops=1.0), 1)
    tokens = 64 * 16 * 500 + 64 * 200
    assert slow.sample_s == pytest.approx(2 * dense.active * tokens / 0.33e12)


def test_each_part_of_a_step_takes_longer_where_it_does_more(dense):
    def of_four(config: Config) -> Split:
        return estimate(config, dense, OPTIONS, 4)

    plain = of_four(CONFIG)
    for config in (
        replace(CONFIG, stage=Stage(kl_coef=0.1)),
        replace(CONFIG, optim=replace(CONFIG.optim, epochs=2)),
        replace(CONFIG, optim=replace(CONFIG.optim, recompute="layer")),
    ):
        assert of_four(config).train_s > plain.train_s
    adapter = of_four(replace(CONFIG, lora=LoraConfig(rank=8)))
    assert adapter.train_s < plain.train_s and adapter.trainer_gib < plain.trainer_gib / 2


def test_a_separate_critic_is_one_more_network_to_train(dense):
    ppo = replace(CONFIG, objective=PPO)
    shared = estimate(ppo, dense, OPTIONS, 4)
    separate = estimate(replace(ppo, critic=CriticConfig("separate")), dense, OPTIONS, 4)
    adam_s = 28 * dense.counts.trained / (0.4 * 3.35e12) / 4
    assert separate.train_s - adam_s == pytest.approx(2 * (shared.train_s - adam_s))
    assert separate.trainer_gib - shared.trainer_gib == pytest.approx(
        16 * dense.counts.total / 4 / 2**30
    )


def test_with_lag_the_slower_side_is_the_step_and_in_turns_their_sum(dense):
    [turns] = [split for split in splits(CONFIG, dense, OPTIONS) if not split.servers]
    assert turns.step_s == pytest.approx(turns.sample_s + turns.train_s)
    lag = replace(CONFIG, engine=EngineConfig(kind="vllm", urls=("http://a",), lag=1))
    found = splits(lag, dense, OPTIONS)
    assert found and all(split.servers for split in found)
    assert found[0].step_s == min(split.step_s for split in found)
    for split in found:
        assert split.step_s >= max(split.sample_s, split.train_s)


def test_the_command_prints_the_splits(capsys):
    plan(["arithmetic", "--gpus", "4", "--model-config", tiny.model()])
    lines = capsys.readouterr().out.splitlines()
    assert "384 rows a step" in lines[0] and "shared" in lines[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], r"gpus"),
        (["--memory", "1e-6"], "the model does not fit"),
        (["--model-config", "no/such"], "the sizes of the model 'no/such' are unknown"),
        (
            ["--engine", "vllm", "--engine.urls", "http://a", "--engine.lag", "1"],
            "leaves no server",
        ),
    ],
)
def test_bad_input_is_one_message(options, message):
    folder = [] if "--model-config" in options else ["--model-config", tiny.model()]
    with pytest.raises(GruppoError, match=message):
        plan(["arithmetic", *folder, *options])
