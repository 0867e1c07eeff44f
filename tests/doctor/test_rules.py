"""Each rule fires on the run where its problem is planted, alone, with changes that can be typed;
healthy runs pass."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from tests.doctor.planted import HEALTHY, STEPS, Fault, early, line, plant, thirds

from gruppo.api import change
from gruppo.cli.help import all_options
from gruppo.cli.options import apply_options
from gruppo.config.options import options
from gruppo.config.schema import Config, Stage
from gruppo.doctor.record import Record
from gruppo.doctor.report import diagnose
from gruppo.doctor.rules import RULES
from gruppo.errors import as_flag
from gruppo.modalities import find_modality
from gruppo.recipes import RECIPES
from gruppo.trainer import checks

FLAT = thirds(0.4, 0.4, 0.4, noise=0.01)
STOPS = thirds(0.1, 0.4, 0.4, noise=0.01)
"""Rewards: one that stays, and one that has risen and stands still."""
SEVERAL = {"optim__epochs": 2, "optim__minibatches": 1}
TWO_REWARDS = {"reward": ("exact_match", "length_target:5")}


OF_PICTURES = {
    "model": "unet",
    "data": "digits",
    "reward": ("jpeg_compressibility",),
    "objective__kl": "exact",
}
OF_PICTURES |= {"rollout__temperature": 1.0, "rollout__top_k": 0, "rollout__max_new_tokens": 128}


def reward_of(name: str, mean: Any, spread: float) -> dict[str, Any]:
    return {f"reward/{name}/mean": mean, f"reward/{name}/std_within_group": spread}


def held_out(*means: float) -> dict[str, Any]:
    return {"eval/reward_mean": early(dict(zip((1, 10, 20, 30), means, strict=True)), None)}


FAILED = [
    {
        "step": 3,
        "prompt": "p",
        "failures": [{"reward": "f", "kind": "exception", "message": "division by zero"}],
    }
]
STAGES = (
    Stage(name="supervised", steps=12, rl_coef=0.0, sup_coef=1.0, lr=1e-4, warmup_steps=20),
    Stage(name="full"),
)

FAULTS = {
    "another temperature in the sampler": Fault(
        {"mismatch/mean_nats": 0.3, "mismatch/max_nats": 4.0},
        ("mismatch",),
        ("--objective.correction truncate --objective.correction-high 2",),
        "from the first step on",
    ),
    "a sampler that keeps its first weights": Fault(
        {"mismatch/mean_nats": line(0.0, 0.3), "mismatch/max_nats": line(0.0, 3.0)},
        ("mismatch",),
        meaning="the sampler has older weights",
    ),
    "a reward that raises": Fault(
        {"reward/exception_count": 20.0, "reward/unscored_count": 20.0},
        ("reward-failures",),
        meaning="5.2% of the sampled rows have no reward and are not used. Most frequent failure: "
        "f: division",
        files={"samples.jsonl": "".join(str(row).replace("'", '"') + "\n" for row in FAILED)},
    ),
    "a reward that is too slow": Fault(
        {"reward/timeout_count": 96.0, "reward/unscored_count": 96.0},
        ("reward-failures",),
        ("--scoring.timeout-s 90",),
        "25.0%",
        config={"scoring__timeout_s": 45.0},
    ),
    "a reward that returns None for a quarter of the rows": Fault(
        {"reward/unscored_count": 96.0},
        ("reward-failures",),
        meaning="the reward function returned None",
    ),
    "a warm-up longer than the run": Fault(
        {"optim/lr": lambda step: 1.2e-5 * step / 60},
        ("warmup-too-long",),
        ("--optim.warmup-steps 3",),
        "the warm-up takes 60 steps and its stage has 30",
        config={"optim__warmup_steps": 60},
    ),
    "a warm-up longer than its stage": Fault(
        {
            "stage/number": lambda step: 1.0 if step <= 12 else 2.0,
            "optim/lr": lambda step: 1e-4 * step / 20 if step <= 12 else 1.2e-5,
        },
        ("warmup-too-long",),
        ("--stages.0.warmup-steps 1",),
        "the warm-up takes 20 steps and its stage has 12",
        config={"stages": STAGES, "stage__kl_coef": 0.0, "optim__warmup_steps": 0},
    ),
    "one reward for every sample": Fault(
        {
            "group/zero_spread_frac": 1.0,
            "reward/mean": 0.0,
            "reward/max": 0.0,
            "reward/std_within_group": 0.0,
            **held_out(0, 0, 0, 0),
        },
        ("zero-spread",),
        (),
        "Give partial credit, or start with demonstrations",
        config={"stage__kl_coef": 0.0, "reward": ("exact_match",)},
    ),
    "completions that are all truncated and masked": Fault(
        {"finish/truncated_frac": 1.0, "grad/norm": 0.0, "advantage/mean_abs": None},
        ("no-gradient", "truncation"),
        ("--rollout.max-new-tokens 16",),
        config={
            "objective__mask_truncated": True,
            "rollout__max_new_tokens": 8,
            "stage__kl_coef": 0.0,
        },
    ),
    "weights that are ruined, with completions that are truncated": Fault(
        {"grad/norm": early({1: 3.0, 2: 3.0}, 0.0), "finish/truncated_frac": 0.8},
        ("no-gradient", "truncation"),
        config={"optim__lr": 1e6},
    ),
    "groups that are alike while the reward stands still": Fault(
        {
            "group/zero_spread_frac": 0.8,
            "reward/mean": thirds(0.05, 0.05, 0.05, noise=0.001),
            **held_out(0, 0, 0, 0),
        },
        ("zero-spread",),
        ("--rollout.group-size 16", "--rollout.refill-rounds 3"),
    ),
    "prompts that are too easy": Fault(
        {"group/zero_spread_frac": 0.95, "reward/mean": thirds(0.97, 0.97, 0.97, noise=0.001)},
        ("zero-spread",),
        ("--rollout.refill-rounds 3",),
        "too easy",
    ),
    "a held-out reward that falls while the training reward rises": Fault(
        held_out(0.2, 0.6, 0.5, 0.3),
        ("reward-hacking",),
        ("--stage.kl-coef 0.1",),
        "has dropped from its best value",
    ),
    "a held-out reward that stays while the training reward rises": Fault(
        held_out(0.2, 0.19, 0.21, 0.2),
        ("reward-hacking",),
        meaning="does not: sampling has only",
    ),
    "a watched reward that falls": Fault(
        reward_of("exact_match", line(0.1, 0.8), 0.2)
        | reward_of("judge", line(0.9, 0.2), 0.2)
        | {"eval/judge": early({1: 0.9, 10: 0.7, 20: 0.5, 30: 0.2}, None)},
        ("reward-hacking",),
        meaning="judge, which has weight 0 and is only monitored, falls",
        config={"reward": ("exact_match", "judge.py:judge"), "scoring__weights": (1.0, 0.0)},
    ),
    "two rewards against each other": Fault(
        reward_of("exact_match", line(0.1, 0.9), 0.2)
        | reward_of("length_target", line(0.5, 0.4), 0.2)
        | {"reward_corr_within_group/exact_match/length_target": -0.6},
        ("conflicting-rewards",),
        ("--scoring.weights 1 0.5",),
        "exact_match is low where length_target is high",
        config=TWO_REWARDS,
    ),
    "a reward that drowns the other": Fault(
        reward_of("exact_match", line(0.1, 0.9), 0.01)
        | reward_of("length_target", line(0.1, 0.4), 0.5)
        | {"reward_corr_within_group/exact_match/length_target": 0.1},
        ("dominated-reward",),
        ("--objective.combine normalize_then_sum",),
        "50 times as much",
        config=TWO_REWARDS,
    ),
    "a collapse of the entropy": Fault(
        {"entropy/mean_nats": thirds(1.0, 0.05, 0.02), "reward/mean": STOPS},
        ("entropy-collapse",),
        ("--stage.entropy-coef adaptive:0,target=0.5,delta=0.005",),
        "98% of the entropy is lost",
    ),
    "a KL that runs away": Fault(
        {"kl/ref_nats": thirds(0.01, 0.2, 2.0), "reward/mean": STOPS},
        ("kl-blow-up",),
        (
            "--stage.kl-coef 0.1",
            "--optim.lr 6e-06",
        ),
        "the reward does not rise with it",
    ),
    "a KL beyond all measure": Fault(
        {"kl/ref_nats": thirds(5.0, 6.0, 8.0)}, ("kl-blow-up",), meaning="its reference."
    ),
    "a clip that stops half of a batch": Fault(
        {"clip/high_frac": 0.3, "clip/low_frac": 0.2, "ratio/max": 4.0, "kl/old_k3_nats": 0.08},
        ("over-clipping",),
        ("--optim.lr 6e-06", "--optim.epochs 1"),
        "the gradient of 50% of the actions",
        config=SEVERAL,
    ),
    "a clip that nothing comes near": Fault(
        {"ratio/max": 1.001, "epoch/1/ratio_max": 1.0, "epoch/1/ratio_mean": 1.0},
        ("inert-clip",),
        ("--optim.lr 3.6e-05",),
        "no ratio differs from 1 by more than 0.001, while the clip starts at 0.2",
        config=SEVERAL,
    ),
    "answers that are cut off": Fault(
        {"finish/truncated_frac": line(0.1, 0.8)},
        ("truncation",),
        ("--rollout.max-new-tokens 256",),
        config={"rollout__max_new_tokens": 128},
    ),
    "a policy loss below a running baseline": Fault(
        {
            "loss/policy": thirds(0.05, 0.3, 0.5),
            "advantage/mean": thirds(-0.05, -0.3, -0.5),
            "reward/mean": thirds(0.5, 0.4, 0.3, noise=0.05),
            **held_out(0.4, 0.4, 0.4, 0.4),
        },
        ("policy-loss",),
        ("--objective.baseline mean",),
        "rewards fall below the baseline (running)",
        config={"objective__baseline": "running", "objective__scale": "none"},
    ),
    "a policy loss of a policy that moves too far": Fault(
        {"loss/policy": thirds(0.0, 0.1, 0.3), "ratio/max": 1.6, "clip/high_frac": 0.2},
        ("policy-loss",),
        (
            "--optim.lr 6e-06",
            "--objective.clip-low 0.1 --objective.clip-high 0.1",
        ),
        "a positive loss comes from the ratios",
        config={"optim__epochs": 2, "optim__minibatches": 2},
    ),
    "a supervised loss that stays beside rewards": Fault(
        {"loss/sup": thirds(1.0, 1.0, 1.0, noise=0.01), "sup/loss_nats": 1.0},
        ("supervised-loss",),
        ("--stage.sup-coef 1", "--stage.rl-coef 0.5"),
        "whose gradient outweighs or undoes it",
        config={"stage__sup_coef": 0.5},
    ),
    "a supervised loss that stays by itself": Fault(
        {
            "loss/sup": early(dict.fromkeys(range(1, 13), 1.0), None),
            "loss/policy": early(dict.fromkeys(range(13, 31), 0.0), None),
            "optim/lr": 1e-4,
        },
        ("supervised-loss",),
        ("--stages.0.lr 0.0003",),
        "the steps are too small",
        config={
            "stages": (
                Stage(name="a", steps=12, rl_coef=0.0, sup_coef=1.0, lr=1e-4),
                Stage(name="b"),
            )
        }
        | {"stage__kl_coef": 0.0},
    ),
    "a consistency loss that goes on rising": Fault(
        {"loss/cons": thirds(0.01, 0.04, 0.08), "reward/mean": STOPS},
        ("consistency-loss",),
        (
            "--stage.kl-coef 0.1",
            "--optim.lr 6e-06",
        ),
        "while the reward does not rise",
    ),
    "gradients far above the limit": Fault(
        {"grad/norm": 50.0},
        ("gradient-clipping",),
        ("--optim.max-grad-norm 50",),
        "by a median factor of 50",
    ),
}

HEALTHY_ALL_THE_SAME = {
    "nothing": Fault({}, ()),
    "entropy that falls while the reward rises": Fault(
        {"entropy/mean_nats": thirds(1.0, 0.05, 0.02)}, ()
    ),
    "entropies of continuous actions, which may be negative": Fault(
        {"entropy/mean_nats": thirds(3.0, 1.0, -9.0), "reward/mean": STOPS}, ()
    ),
    "groups that are alike while the reward rises": Fault({"group/zero_spread_frac": 0.8}, ()),
    "a KL that grows with the reward": Fault({"kl/ref_nats": thirds(0.01, 0.2, 2.0)}, ()),
    "a KL of pictures": Fault(
        {"kl/ref_nats": thirds(5.0, 20.0, 30.0)},
        (),
        config=OF_PICTURES,
    ),
    "rounding between sampler and trainer": Fault(
        {"mismatch/mean_nats": 0.06, "mismatch/max_nats": 1.9}, (), config={"compute": "bfloat16"}
    ),
    "rounding over the dimensions of a picture": Fault(
        {"mismatch/mean_nats": 0.008, "mismatch/max_nats": 0.03},
        (),
        config=OF_PICTURES,
    ),
    "gradients seven times the limit": Fault({"grad/norm": 7.0}, ()),
    "a held-out reward whose fall is noise": Fault(
        held_out(0.2, 0.6, 0.65, 0.6),
        (),
    ),
    "a held-out reward that is at the top from the first step": Fault(
        held_out(0.95, 0.95, 0.95, 0.95),
        (),
    ),
    "two rewards that rise against each other": Fault(
        reward_of("exact_match", line(0.1, 0.9), 0.2)
        | reward_of("length_target", line(0.2, 0.4), 0.2)
        | {"reward_corr_within_group/exact_match/length_target": -0.4},
        (),
        config=TWO_REWARDS,
    ),
    "a correlation with a reward of weight 0": Fault(
        reward_of("exact_match", line(0.1, 0.9), 0.2)
        | reward_of("length_target", line(0.5, 0.4), 0.2)
        | {"reward_corr_within_group/exact_match/length_target": -0.6},
        (),
        config=TWO_REWARDS | {"scoring__weights": (1.0, 0.0)},
    ),
    "a supervised loss that is learned": Fault(
        {"loss/sup": 0.05, "sup/loss_nats": 0.05}, (), config={"stage__sup_coef": 0.5}
    ),
    "a consistency loss along a line, with the reward": Fault({"loss/cons": line(0.0, 0.1)}, ()),
    "a policy loss that is a residue": Fault({"loss/policy": thirds(0.0, 0.005, 0.02)}, ()),
    "a run that is still in its warm-up": Fault(
        {"optim/lr": lambda step: 1.2e-5 * step / 40},
        (),
        config={"optim__warmup_steps": 40, "steps": 400},
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """The run with a planted fault, written once."""
    folder = tmp_path_factory.mktemp("faults")
    return cache(lambda name: plant(folder / name, FAULTS[name]))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(runs, name):
    fault, findings = FAULTS[name], diagnose(runs(name)).findings
    assert tuple(finding.rule for finding in findings) == fault.found
    assert tuple(map(str, findings[-1].changes))[: len(fault.changes)] == fault.changes
    assert fault.meaning.lower() in findings[-1].meaning.lower()
    assert all(finding.measured and finding.meaning.endswith((".", ".)")) for finding in findings)


@pytest.mark.parametrize("fault", HEALTHY_ALL_THE_SAME.values(), ids=HEALTHY_ALL_THE_SAME)
def test_what_is_healthy_gives_no_finding(tmp_path, fault):
    assert diagnose(plant(tmp_path / "run", fault)).findings == []


def test_each_change_gives_a_config_that_can_be_trained(runs):
    for name in FAULTS:
        for finding in diagnose(runs(name)).findings:
            for proposed in finding.changes:
                config = applied(runs(name).config, settings_of(proposed))
                checks.check(config, find_modality(config.model))


def settings_of(proposed: str) -> dict[str, str]:
    """Options of a change with their values."""
    found = re.findall(r"(--[a-z0-9.-]+) ([^-].*?|-[\d.]+)(?= --|$)", proposed)
    return dict(found)


def applied(config: Config, settings: dict[str, str]) -> Config:
    """The config with a change, by its fields."""
    leaves = {
        o.removeprefix("--").replace(".", "__").replace("-", "_"): v for o, v in settings.items()
    }
    in_stages = {leaf: value for leaf, value in leaves.items() if leaf.startswith("stages__")}
    stages = list(config.stages)
    for leaf, value in in_stages.items():
        _, place, name = leaf.split("__")
        stages[int(place)] = replace(stages[int(place)], **{name: typed(value)})
    rest = {leaf: typed(value) for leaf, value in leaves.items() if leaf not in in_stages}
    return change(replace(config, stages=tuple(stages)), rest)


def typed(value: str) -> Any:
    if " " in value:
        return tuple(map(float, value.split()))
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def test_the_shell_takes_the_options(runs):
    """All names; and the texts of those that one command can hold together."""
    proposed: dict[str, str] = {}
    for name in FAULTS:
        for finding in diagnose(runs(name)).findings:
            for one in finding.changes:
                proposed |= settings_of(one)
    staged = Config(stages=(Stage(), Stage()))
    assert proposed.keys() <= {*map(as_flag, options(staged)), *map(as_flag, all_options())}
    together = ("--rollout.", "--optim.", "--stage.", "--evaluation.", "--scoring.timeout")
    words = [w for o, v in proposed.items() if o.startswith(together) for w in (o, *v.split())]
    config = apply_options(RECIPES["arithmetic"](), words, "train")
    assert (
        config.rollout.group_size == 16
        and config.optim.max_grad_norm == 50
        and config.stage.sup_coef == 1.0
    )


def test_every_rule_is_planted():
    names = [rule.name for rule in RULES]
    assert {name for fault in FAULTS.values() for name in fault.found} == set(names) and len(
        set(names)
    ) == len(names)


def test_a_metric_that_was_never_logged_is_named_and_not_guessed(tmp_path):
    report = diagnose(
        plant(tmp_path / "run", Fault({name: None for name in HEALTHY if name != "optim/lr"}, ()))
    )
    assert report.findings == []
    assert report.skipped["entropy-collapse"] == "no entropy/mean_nats was logged"
    assert set(report.skipped) == {rule.name for rule in RULES if rule.metrics[0] != "optim/lr"}


def test_no_gap_in_the_metrics_is_an_error(runs):
    """Each fifth of the columns left out, or never finite."""
    for run in map(runs, FAULTS):
        columns = [column for column in run.metrics if column != "step"]
        for start, value in product(range(5), (None, math.nan)):
            gone = set(columns[start::5])
            rows = [
                {n: v if n not in gone else value for n, v in row.items() if value or n not in gone}
                for row in run.rows
            ]
            json.dumps(diagnose(replace(run, rows=rows)).to_dict(), allow_nan=False)


def test_a_trend_needs_three_steps_in_each_third(tmp_path):
    fault = FAULTS["a KL that runs away"]
    short = [
        value if step <= 8 else None
        for step, value in enumerate([0.01, 0.01, 0.2, 0.2, 0.2, 2, 2, 2] * 4, 1)
    ]
    run = plant(tmp_path / "run", Fault({**fault.columns, "kl/ref_nats": short[:STEPS]}, ()))
    assert diagnose(run).skipped["kl-blow-up"] == "kl/ref_nats was logged in 8 steps; 9 are needed"
