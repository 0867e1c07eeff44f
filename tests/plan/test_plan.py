"""Formulas, fitted constants and the command: numbers of known models, two routes to one number, and bad input."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks import flops, plan_published
from benchmarks import plan as benchmark
from tests import tiny
from transformers import AutoConfig

from gruppo.cli import commands
from gruppo.cli.options import parse_command, parse_config
from gruppo.config import schema
from gruppo.config.schema import Config
from gruppo.core.objective import PRESETS
from gruppo.plan import capacity, fit, formulas
from gruppo.plan.fit import Constants, Measured
from gruppo.plan.formulas import ModelShape, Rates, decode_step_s, train_s
from gruppo.plan.hardware import GPUS, find_gpu, recognized
from gruppo.types import GruppoError

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
RATES = Rates(3e11, 2e11, 2e10, 8e9, 3e9, 4e-3, 2e-3)


def shape_of(settings: dict[str, Any]) -> ModelShape:
    return ModelShape.of(AutoConfig.for_model(**settings))


@pytest.fixture(scope="module")
def small() -> ModelShape:
    return formulas.open_shape(tiny.model())


def constants(**changes: Any) -> Constants:
    machine = {"gpu": None, "cpu": "a processor", "threads": 1}
    values = {
        "machine": machine,
        "model": "m",
        "width": 2,
        "memory": 2e10,
        "rates": RATES,
        "prompt_tokens": 30.0,
    }
    values |= {
        "survival": (1.0, 0.9, 0.5),
        "errors": {"generate": 0.1, "train": 0.1, "step": 0.12},
        "steps": [],
    }
    return Constants(**values | changes)


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_published_models_have_their_published_numbers_of_weights():
    dense, sparse = shape_of(QWEN_7B), shape_of(QWEN_235B)
    assert dense.counts.total == 7_615_616_512  # the model card: 7.61B, 6.53B without embeddings
    assert dense.trunk == pytest.approx(6.53e9, rel=2e-3)
    assert dense.kv_numbers == 2 * 28 * 4 * 128
    assert sparse.counts.total == pytest.approx(235.09e9, rel=1e-3)
    assert sparse.trunk + 2 * sparse.head == pytest.approx(22.19e9, rel=1e-3)  # 22B activated


def test_the_operations_of_a_group_are_those_that_the_benchmarks_count_by_hand():
    shape = shape_of(QWEN_7B)
    work = flops.forward(flops.Shape.of(shape.settings), [(2000, [5000, 900])])
    # they count pairs of tokens exactly and no norms; the plan halves squares and takes all weights of the layers
    assert shape.forward_flops(2000, [5000, 900]) == pytest.approx(work.total, rel=1e-3)


def test_a_decode_step_reads_its_weights_or_computes_its_rows():
    dense, sparse = shape_of(QWEN_7B), shape_of(QWEN_235B)
    rates = Rates(1e14, 1e14, 1e12, 1e12, 1e11)
    few, many = (decode_step_s(dense, rates, rows, 0.0, width=2) for rows in (1, 1000))
    assert few == pytest.approx(2 * (dense.trunk + dense.head) / 1e12)
    assert many == pytest.approx(2 * (dense.trunk + dense.head) * 1000 / 1e14)
    assert decode_step_s(dense, rates, 1, 0.0, width=2, gpus=4) == pytest.approx(few / 4)
    cached = decode_step_s(dense, rates, 1, 1e5, width=2)
    assert cached - few == pytest.approx(2 * dense.kv_numbers * 1e5 / 1e12)
    # a row is sent to 8 of 128 experts, many rows to all of them
    assert sparse.bytes_read(1, 2) == pytest.approx(2 * (sparse.trunk + sparse.head))
    assert sparse.bytes_read(10_000, 2) == pytest.approx(2 * (sparse.counts.total - sparse.head))


def test_the_slowest_rank_decides_how_long_training_takes(small):
    rates = replace(RATES, update_bytes=math.inf)
    groups = [[40.0], [1.0], [1.0], [1.0]]
    alone = train_s(small, rates, groups[:1], 10.0)
    assert train_s(small, rates, groups, 10.0, gpus=4) == alone
    assert train_s(small, rates, groups, 10.0, gpus=2) == train_s(
        small, rates, [[40.0], [1.0]], 10.0
    )
    assert train_s(small, rates, groups[:1], 10.0, passes=8.0) == pytest.approx(alone * 8 / 3)
    # two rows in two minibatches are in one of them half the time: the prompt is read 1.5 times
    pair, prompt = [[40.0, 40.0]], small.forward_flops(10.0, ())
    more = train_s(small, rates, pair, 10.0, minibatches=2) - train_s(small, rates, pair, 10.0)
    assert more == pytest.approx(3 * 0.5 * prompt / RATES.train_flops)
    optimizer = train_s(
        small, replace(RATES, train_flops=math.inf), groups, 10.0, gpus=2, updates=3
    )
    assert optimizer == pytest.approx(3 * 28 * small.counts.trained / 2 / RATES.update_bytes)


@pytest.mark.parametrize(
    ("options", "passes", "of_critic"),
    [
        ([], 3, 0),
        (["--optim.epochs", "2"], 7, 0),
        (["--stage.kl-coef", "0.01", "--optim.recompute", "layer"], 5, 0),
        (["--stage.kl-coef", "0.01", "--objective.kl-in", "reward", "--objective.kl", "k1"], 5, 0),
        (["--engine", "vllm", "--engine.urls", "http://a:1", "--engine.lag", "1"], 3, 0),
        (["--lora.rank", "4"], 2, 0),
        (["--objective", "ppo", "--optim.epochs", "1", "--optim.minibatches", "1"], 4, 0),
        (
            [
                "--objective",
                "ppo",
                "--critic.kind",
                "separate",
                "--optim.epochs",
                "2",
                "--optim.minibatches",
                "1",
            ],
            7,
            7,
        ),
    ],
)
def test_training_is_counted_in_forwards_of_the_policy_and_of_a_separate_critic(
    small, options, passes, of_critic
):
    config = parse_config("plan", ["plain", *options])
    rates, groups = replace(RATES, update_bytes=math.inf), [[40.0, 8.0], [1.0, 3.0]]
    policy, critic = (
        sum(shape.forward_flops(10.0, rows) for rows in groups)
        for shape in (small, replace(small, head=0))
    )
    expected = (passes * policy + of_critic * critic) / rates.train_flops
    assert formulas.learn_s(small, rates, config, groups, 10.0) == pytest.approx(expected)


def test_memory_of_a_trainer_is_that_of_its_shards_and_of_an_adapter_far_less():
    shape, config = shape_of(QWEN_7B), Config()
    one, eight = (formulas.trainer_bytes(shape, config, 1000, gpus=n) for n in (1, 8))
    states = ("weights, float32", "gradients, float32", "AdamW state, float32")
    assert (
        sum(one[name] for name in states)
        == 16 * shape.counts.total
        == 8 * sum(eight[name] for name in states)
    )
    lora = formulas.trainer_bytes(
        shape, replace(config, lora=schema.LoraConfig(rank=16)), 1000, gpus=1
    )
    assert lora["base"] == 2 * shape.counts.total
    ppo = replace(config, lora=schema.LoraConfig(rank=16), objective=PRESETS["ppo"])
    ppo = formulas.trainer_bytes(
        shape, replace(ppo, critic=schema.CriticConfig("separate")), 1000, gpus=1
    )
    own = {name: size for name, size in ppo.items() if name.startswith("critic, ")}
    assert own == {f"critic, {name}": size for name, size in lora.items() if "float32" in name}
    # peft counts 40,370,176 weights of rank 16 on all linear layers of this model
    assert lora["AdamW state, float32"] == 8 * 40_370_176


# --- constants --------------------------------------------------------------------------------------------------------


def test_known_rates_are_found_again_from_the_seconds_that_they_make(small):
    chance = np.random.default_rng(0)
    big = replace(small, trunk=10**8, head=10**7, counts=replace(small.counts, trained=10**8))
    steps = []
    for prompts, size, tokens in fit.FITTED:
        lengths = chance.integers(1, tokens + 1, (prompts, size)).tolist()
        found = fit.predict(big, RATES, Config(), 30.0, lengths, lengths, width=2)
        parts = [found[part] for part in ("generate", "train", "publish", "step")]
        steps.append(Measured(prompts, size, lengths, lengths, *parts))
    rates = fit.fit_rates(big, Config(), 30.0, steps, width=2)
    held_out = chance.integers(1, 31, (6, 5)).tolist()
    true, again = (
        fit.predict(big, one, Config(), 30.0, held_out, held_out, width=2) for one in (RATES, rates)
    )
    assert again == pytest.approx(true, rel=0.02)


def test_rows_that_were_cut_count_as_longer_and_not_as_ended():
    """Kaplan and Meier by hand: at 1, one of 4 ends; at 2, one of 3 is cut; at 3, one of 2 ends; then 1 is left."""
    assert fit.survival([(1, False), (2, True), (3, False), (4, True)]) == pytest.approx(
        [1, 0.75, 0.75, 0.375, 0.375]
    )


def test_lengths_follow_their_distribution_and_go_on_at_the_mean_rate_beyond_it():
    known = capacity.sampled_lengths([1.0, 0.9, 0.5, 0.5, 0.0], 10, 100_000)
    assert [float((known > n).mean()) for n in range(5)] == pytest.approx(
        [1.0, 0.9, 0.5, 0.5, 0.0], abs=0.01
    )
    # one of five tokens ended a row: those after the second do too
    beyond = capacity.sampled_lengths([1.0, 0.8, 0.64], 6, 100_000)
    assert [float((beyond > n).mean()) for n in range(6)] == pytest.approx(
        [0.8**n for n in range(6)], abs=0.01
    )
    assert beyond.max() == 6


def test_a_given_mean_length_is_the_mean_of_the_lengths():
    survival = capacity.geometric_survival(300.0, 1000)
    assert sum(survival[:-1]) == pytest.approx(300.0, rel=1e-3)
    assert capacity.sampled_lengths(survival, 1000, 100_000).mean() == pytest.approx(300, rel=0.02)
    with pytest.raises(GruppoError, match="--mean-tokens is 2000, and rows have 1 to 1000 tokens"):
        capacity.geometric_survival(2000, 1000)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA L4", "l4"),
        ("AMD EPYC", ""),
    ],
)
def test_devices_are_recognized_by_the_names_that_torch_gives_them(device, name):
    assert recognized(device) == name


def test_rates_are_the_machines_own_or_scaled_or_published(small):
    own = capacity.machine_for("this", constants(), small)
    assert own.rates == RATES and own.error == 0.12 and own.memory == 2e10
    measured = constants(machine={"gpu": "NVIDIA H100 80GB HBM3", "cpu": "c", "threads": 1})
    scaled = capacity.machine_for("h200", measured, small)
    assert scaled.rates.read_bytes == pytest.approx(RATES.read_bytes * 4.8 / 3.35)
    assert scaled.rates.train_flops == RATES.train_flops and "scaled" in scaled.source
    published = capacity.machine_for("h200", constants(), small)
    assert published.rates.train_flops == capacity.PUBLISHED[0] * GPUS["h200"].flops
    sparse = capacity.machine_for("h200", constants(), shape_of(QWEN_235B))
    assert sparse.rates.read_bytes == capacity.PUBLISHED[2] * published.rates.read_bytes
    assert published.error == capacity.PUBLISHED_ERROR and "published" in published.source


# --- splits -----------------------------------------------------------------------------------------------------------


def work(gpu: str = "h200", **changes: Any) -> capacity.Work:
    rollout = schema.RolloutConfig(prompts=32, group_size=8, max_new_tokens=512)
    config = replace(
        Config(rollout=rollout, engine=schema.EngineConfig(kind="vllm", lag=1)), **changes
    )
    shape = shape_of(QWEN_7B)
    machine = capacity.machine_for(gpu, constants(), shape)
    return capacity.Work(config, shape, machine, 100.0, capacity.geometric_survival(200, 512))


def test_the_best_split_is_the_fastest_of_all_splits():
    """The search against every number of trainers."""
    best = capacity.splits(work(), 16)[0]
    every = [capacity.simulated(work(), 16, n, 1, is_shared=False).step_s for n in range(2, 16)]
    assert best.step_s == pytest.approx(min(every), rel=0.02)
    assert best.trainers + best.servers * best.tensor_parallel <= 16 and best.lag_max <= 1


def test_an_adapter_alone_is_updated_and_published():
    full = work(engine=schema.EngineConfig(kind="vllm"))  # in turns
    full = replace(
        full, machine=replace(full.machine, rates=replace(full.machine.rates, train_flops=math.inf))
    )
    lora = replace(full, config=replace(full.config, lora=schema.LoraConfig(rank=16)))
    saved = full.shape.counts.trained - 16 * full.shape.adaptable
    rates, width = full.machine.rates, full.machine.width
    seconds = [capacity.simulated(one, 2, 1, 1, is_shared=False).step_s for one in (full, lora)]
    expected = saved * (formulas.ADAM_BYTES / rates.update_bytes + width / rates.publish_bytes)
    assert seconds[0] - seconds[1] == pytest.approx(expected)


def test_without_lag_trainers_and_servers_may_share_their_gpus():
    lag_0 = capacity.splits(work(engine=schema.EngineConfig(kind="vllm")), 16)
    assert any(split.is_shared for split in lag_0) and all(split.lag_max == 0 for split in lag_0)
    assert not any(split.is_shared for split in capacity.splits(work(), 16))


def test_more_gpus_than_groups_are_said_to_have_nothing_to_do():
    split = capacity.splits(work(), 1000)[0]
    assert split.trainers <= 32 and split.servers <= 64 and split.gpus < 1000


# --- the command ------------------------------------------------------------------------------------------------------


def plan(folder: Path, *words: str, **changes: Any) -> None:
    (folder / "plan.json").write_text(json.dumps(asdict(constants(**changes))))
    words = (
        "plain",
        "--constants",
        str(folder / "plan.json"),
        "--model-config",
        tiny.model(),
        *words,
    )
    commands.plan(**parse_command("plan", commands.plan, words))


def test_the_plan_fits_100_columns_and_names_the_error_of_its_figures(tmp_path, capsys):
    plan(
        tmp_path,
        "--gpus",
        "1000",
        "--gpu",
        "h200",
        "--price",
        "2.5",
        "--",
        "--engine",
        "vllm",
        "--engine.urls",
        "http://a:1",
    )
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert len(re.findall(rf"± {capacity.PUBLISHED_ERROR:.0%}", text)) == 4 and "$" in text
    plan(tmp_path)
    text = capsys.readouterr().out
    assert "no price was given" in text and "$" not in text and "± 12%" in text
    assert "Lengths beyond 2 tokens were not sampled" in text


def test_json_has_all_figures(tmp_path, capsys):
    plan(tmp_path, "--gpus", "4", "--price", "2", "--json")
    found = json.loads(capsys.readouterr().out)
    best = found["splits"][0]
    assert found["hours"] == pytest.approx(best["step_s"] * 200 / 3600)
    assert (
        found["cost"] == pytest.approx(2 * found["gpu_hours"])
        and found["gpu_hours"] == found["hours"] * best["gpus"]
    )
    assert (
        best["step_s"] == min(split["step_s"] for split in found["splits"])
        and found["error"] == 0.12
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "0"), "--gpus is 0; it needs at least 1"),
        (("--gpus", "-4"), "--gpus is -4; it needs at least 1"),
        (("--gpu", "h20O"), "--gpu h20O: unknown; .* Did you mean h200?"),
        (("--price", "-1"), "--price is -1; it needs at least 0 dollars"),
        (("--price", "nan"), "--price is nan; it needs at least 0 dollars"),
        (("--prompt-tokens", "inf"), "--prompt-tokens is inf; it needs at least 1"),
        (("--prompt-tokens", "0"), "--prompt-tokens is 0; it needs at least 1"),
        (("--model-config", "nowhere"), "the sizes of the model 'nowhere' are unknown"),
        (("--", "--engine.lag", "2"), "--gpus 1 leaves no server beside the trainer"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, words, message):
    (tmp_path / "plan.json").write_text(json.dumps(asdict(constants())))
    given = ["plain", "--constants", str(tmp_path / "plan.json")]
    given += [] if "--model-config" in words else ["--model-config", tiny.model()]
    with pytest.raises(GruppoError, match=message):
        commands.plan(**parse_command("plan", commands.plan, [*given, *words]))


def test_a_model_that_fits_no_split_is_told_what_memory_is_lacking():
    # 16 bytes of each weight over 2 GPUs are 57 GiB
    with pytest.raises(
        GruppoError, match=r"each of 2 trainers lacks \d+\.\d GiB of memory on 4090 \(22 GiB\)"
    ):
        capacity.splits(work("4090"), 3)
    # a server over 2 GPUs beside the trainers: one GPU more than these is one too few
    small, messages = replace(work(), machine=replace(work().machine, memory=16e9)), []
    for gpus in range(8, 64):
        try:
            found = capacity.splits(small, gpus)
            break
        except GruppoError as error:
            messages.append(str(error))
    assert all("trainers lacks" in message for message in messages[:-1])
    assert (
        f"{gpus - 2} GPUs for trainers and 2 for a server are more than {gpus - 1}, which lack 15 GiB"
        in messages[-1]
    )
    assert f"Give --gpus {gpus}." in messages[-1] and found[0].gpus == gpus


def test_without_constants_it_says_how_to_fit_them(tmp_path):
    for content in (None, "{}", "no json"):
        if content is not None:
            (tmp_path / "plan.json").write_text(content)
        with pytest.raises(GruppoError, match="gruppo plan RECIPE --fit"):
            commands.plan("plain", constants=str(tmp_path / "plan.json"))
    with pytest.raises(GruppoError, match="RECIPE is missing"):
        commands.plan()


@pytest.mark.parametrize(
    "damage",
    [
        {"rates": None},
        {"rates": {"train_flops": 1e9}},
        {"rates": vars(RATES) | {"read_bytes": -1.0}},
        {"rates": vars(RATES) | {"token_s": "fast"}},
        {"machine": []},
        {"machine": {}},
        {"survival": []},
        {"survival": [1.0, 1.5]},
        {"prompt_tokens": 0},
        {"width": "2"},
        {"errors": {}},
        {"errors": {"step": "small"}},
        {"memory": math.nan},
    ],
)
def test_constants_of_a_damaged_file_are_refused_in_one_line(tmp_path, damage):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(asdict(constants())))
    assert Constants.load(file).rates == RATES
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(
        GruppoError, match=r"plan\.json has no constants of gruppo plan .*gruppo plan RECIPE --fit"
    ):
        Constants.load(file)


def test_a_model_without_a_formula_is_refused():
    settings = SimpleNamespace(**QWEN_7B)
    with pytest.raises(GruppoError, match=r"there is no config\.json of a causal language model"):
        formulas.open_shape(str(settings.model_type))
    assert find_gpu("RTX 4090") == GPUS["4090"]


@pytest.mark.parametrize("name", ["nowhere/plan.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch, name
):
    monkeypatch.setattr("gruppo.plan.report.fit", None)
    words = ["--fit", "--constants", str(tmp_path / name)]
    with pytest.raises(GruppoError, match="it needs a file in a folder that exists"):
        commands.plan(**parse_command("plan", commands.plan, words))


def test_fit_measures_a_recipe_and_the_plan_of_this_machine_follows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fit, "FITTED", ((2, 2, 4), (2, 4, 8)))
    monkeypatch.setattr(fit, "HELD_OUT", ((2, 3, 6),))
    config = tiny.config(tmp_path)
    found = fit.fit(config, lambda line: None)
    assert (
        len(found.steps) == 3
        and found.width == 4
        and all(rate > 0 for rate in vars(found.rates).values())
    )
    assert found.survival[0] == 1 and len(found.survival) <= 9
    machine = capacity.machine_for("this", found, formulas.open_shape(config.model))
    planned = capacity.Work(
        config, formulas.open_shape(config.model), machine, found.prompt_tokens, found.survival
    )
    split = capacity.splits(planned, 1)[0]
    assert split.is_shared and 0 < split.step_s < 60
    assert not list(tmp_path.glob("runs/*"))  # it trains, and keeps nothing


# --- the benchmark ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lag", "mean", "step_s"), [(0, 1060, 97.7), (1, 1129, 74.6)])
def test_a_published_run_is_predicted_with_the_fractions_of_the_plan(
    monkeypatch, lag, mean, step_s
):
    """Llama 8B on 16 H100 (NeMo RL v0.4): within the error that the plan prints."""
    monkeypatch.setattr(capacity, "STEPS", 1)
    job = plan_published.Job("llama-8b", "h100", 16, 2048, mean - 150, 4096 - 150, 1, lag)
    predicted = plan_published.run(job, capacity.PUBLISHED)["step"]
    assert abs(math.log(predicted / step_s)) < math.log(1 + capacity.PUBLISHED_ERROR)


def test_the_benchmark_tells_the_error_of_each_setting_that_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark.random_model, "write", lambda folder, shape: tiny.model())
    found = [
        benchmark.predict(setting, tmp_path, constants()) for setting in benchmark.SETTINGS[:2]
    ]
    for setting, one in zip(benchmark.SETTINGS, found, strict=False):
        (tmp_path / f"{setting.name}.json").write_text(
            json.dumps({part: 1.25 * s for part, s in one.items()})
        )
    text, errors = benchmark.table(tmp_path, constants())
    assert (
        errors == pytest.approx({"generate": 0.2, "learn": 0.2, "step": 0.2})
        and text.count("-20%") == 6
    )


def test_a_measurement_of_the_benchmark_leaves_no_weights(tmp_path, monkeypatch):
    """2 GB each, 27 GB for all settings."""

    def train(words: list[str], **_: Any) -> None:
        run = tmp_path / "runs" / words[-1]
        (run / "final").mkdir(parents=True)
        rows = [{"time/rollout_s": 1.0, "time/step_s": step_s} for step_s in (9.0, 4.0, 3.0)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))

    monkeypatch.setattr(benchmark.random_model, "write", lambda folder, shape: tiny.model())
    monkeypatch.setattr(benchmark.subprocess, "run", train)
    found = benchmark.measure(benchmark.SETTINGS[0], tmp_path)
    assert found == {"generate": 1.0, "learn": 2.0, "step": 3.0} and not list(
        (tmp_path / "runs").iterdir()
    )
