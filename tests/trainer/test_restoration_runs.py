"""Networks that restore images in whole runs: terms by hand, stages, references, saves, sheets,
commands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.collecting import collect
from tests.modalities.restoration import fakes
from tests.trainer import restoration_runs
from tests.trainer.restoration_runs import (
    NETWORK,
    built,
    gradient,
    here,
    in_double,
    trained,
    vector,
)
from tests.trainer.runs import assert_same, metrics, newest, stepped
from torch import Tensor

from gruppo import api, inference
from gruppo.build import Parts
from gruppo.cli.app import main
from gruppo.config import serialization
from gruppo.config.schema import Stage
from gruppo.core.images import apply_symmetry
from gruppo.modalities.restoration import load_restorer
from gruppo.seeds import generator_at
from gruppo.trainer import checkpoint
from gruppo.trainer.run import Run
from gruppo.trainer.update import backward
from gruppo.types import Rollouts, TrainBatch

pytest.importorskip("PIL")

COEFS = {
    "stage__rl_coef": 0.7,
    "stage__kl_coef": 0.3,
    "stage__sup_coef": 0.6,
    "stage__cons_coef": 0.4,
}


# --- a step by hand -------------------------------------------------------------------------------


def charbonnier(x: Tensor, y: Tensor) -> Tensor:
    return ((x - y) ** 2 + 1e-6).sqrt()


def normal(run: Run, module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [K, h, w] and std [K, 1, 1] of one picture's action, and its deterministic picture: one
    forward each."""
    means, base = module(x[None].double())
    std = module.action.std.double()
    share = ((torch.arange(8) - 1.5) / 4).clamp(0, 1)  # of the second of two cells of 4 pixels
    weights = torch.stack([1 - share, share]).double()
    up = torch.einsum("kij,ih,jw->khw", means[0], weights, weights)
    return means[0], std, base[0] + up


def losses_by_hand(run: Run, batch: TrainBatch) -> dict[str, Tensor]:
    """Policy and KL of each row, averaged over rows; the supervised loss over
    demonstrations."""
    rollouts, module = batch.rollouts, run.policy.module
    assert rollouts is not None and batch.demos is not None
    rewards, ids = batch.rewards.double(), rollouts.group_ids
    found: dict[str, list[Tensor]] = {"policy": [], "kl": [], "sup": []}
    for row in range(len(rollouts)):
        x, group = rollouts.shared["degraded"][ids[row]], rewards[ids == ids[row]]
        advantage = (rewards[row] - group.mean()) / (group.std() + 1e-4)
        mean, std, _ = normal(run, module, x)
        sampled = rollouts.actions[row, 0].double()
        logprob = (
            -((sampled - mean) ** 2) / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
        ).sum()
        with torch.no_grad():
            theirs, their_std, _ = normal(run, run.reference.module, x)
        apart = (their_std / std).log() + (std**2 + (mean - theirs) ** 2) / (2 * their_std**2) - 0.5
        found["policy"].append(-advantage * logprob)
        found["kl"].append(apart.sum())
    for n, prompt in enumerate(batch.demos.prompts):
        assert torch.equal(batch.demos.shared["degraded"][n], prompt.inputs)
        picture = normal(run, module, prompt.inputs)[2]
        found["sup"].append(charbonnier(picture, prompt.target.double()).mean())
    return {name: torch.stack(several).mean() for name, several in found.items()}


def held(run: Run, rollouts: Rollouts) -> Tensor:
    """The consistency, of each row alone, averaged."""
    name, several = run.config.modality.consistency, []
    for row in range(len(rollouts)):
        prompt = rollouts.prompts[int(rollouts.group_ids[row])]
        x = rollouts.shared["degraded"][rollouts.group_ids[row]].double()
        picture = normal(run, run.policy.module, x)[2]
        if name == "reference":
            with torch.no_grad():
                other = normal(run, run.reference.module, x)[2]
            loss = charbonnier(picture, other)
        elif name == "equivariance":
            generator = generator_at(0, "equivariance", prompt.draw)
            choice = 1 + int(torch.randint(7, (), generator=generator))
            loss = charbonnier(
                normal(run, run.policy.module, apply_symmetry(x, choice))[2],
                apply_symmetry(picture, choice),
            )
        else:
            loss = charbonnier(0.5 * picture, x)
        several.append(loss.mean())
    return torch.stack(several).mean()


HELD_TO = ["reference", "equivariance", here("half")]


@pytest.mark.parametrize("consistency", HELD_TO, ids=["reference", "equivariance", "a function"])
def test_a_gradient_of_all_terms_is_the_one_by_hand(tmp_path, consistency):
    """Among several pieces, with a policy that is not its reference."""
    data = restoration_runs.degraded(tmp_path, "blur=0.5-1.5,noise=25,crop=8")
    several = {"data": data, "restoration__consistency": consistency, "optim__token_budget": 3}
    run = in_double(built(tmp_path, is_disturbed=True, **(COEFS | several)))
    step_params = run.stage_schedule.step_params(0)
    batch = collect(run, step_params).batch
    run.optimizer.zero_grad()
    stats = backward(run, batch, step_params)
    found = gradient(run)
    by_hand = losses_by_hand(run, batch) | {"cons": held(run, batch.rollouts)}
    total = (
        0.7 * by_hand["policy"] + 0.3 * by_hand["kl"] + 0.6 * by_hand["sup"] + 0.4 * by_hand["cons"]
    )
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, run.parameters)])
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-7
    )  # advantages and weights are float32
    assert stats["update/micro_batches_count"].sum > 3 and expected.norm() > 0.1
    for name in ("kl", "sup", "cons"):
        assert stats[f"loss/{name}"].sum == pytest.approx(by_hand[name].item(), rel=1e-6), name
        assert by_hand[name].item() > 1e-3


@pytest.mark.parametrize("consistency", HELD_TO, ids=["reference", "equivariance", "a function"])
def test_where_nothing_is_sampled_the_consistency_is_of_the_demonstrations(tmp_path, consistency):
    data = restoration_runs.degraded(tmp_path, "blur=0.5-1.5,noise=25,crop=8")
    alone = {"stage__rl_coef": 0.0, "stage__sup_coef": 0.6, "stage__cons_coef": 0.4}
    changes = alone | {
        "data": data,
        "restoration__consistency": consistency,
        "optim__token_budget": 2,
    }
    run = in_double(built(tmp_path, is_disturbed=True, **changes))
    step_params = run.stage_schedule.step_params(0)
    batch = collect(run, step_params).batch
    assert batch.rollouts is None and batch.demos is not None
    stats = backward(run, batch, step_params)
    pictures = [
        (normal(run, run.policy.module, prompt.inputs)[2], prompt.target)
        for prompt in batch.demos.prompts
    ]
    sup = torch.stack(
        [charbonnier(picture, clean.double()).mean() for picture, clean in pictures]
    ).mean()
    cons = held(run, batch.demos)
    expected = torch.autograd.grad(
        0.6 * sup + 0.4 * cons, run.parameters, allow_unused=True, materialize_grads=True
    )
    torch.testing.assert_close(
        gradient(run), torch.cat([g.flatten() for g in expected]), rtol=1e-6, atol=1e-9
    )
    assert stats["loss/cons"].sum == pytest.approx(cons.item(), rel=1e-6)


# --- whole runs, resumed --------------------------------------------------------------------------

WARM = Stage(name="warm", steps=2, rl_coef=0.0, sup_coef=1.0, weight_decay=0.1)
RAMP = Stage(
    name="ramp",
    steps=3,
    rl_coef="linear:0,1",
    sup_coef="linear:1,0",
    kl_coef=0.05,
    new_reference=True,
)
FULL = Stage(name="full", kl_coef=0.05, cons_coef="linear:0.1,0.3", lr="linear:0.002,0.001")
STAGED: dict[str, Any] = {
    "stages": (WARM, RAMP, FULL),
    "steps": 7,
    "evaluation__prompts": 2,
    "evaluation__every": 2,
    "restoration__action_lr_factor": 5.0,
    "show_samples_every": 2,
    "saving__keep": 1,
}
MIXED = {"reference": {"kind": "mixed", "update_every": 2, "update_rate": 0.5, "watch_prompts": 2}}
RUNS: dict[str, dict[str, Any]] = {
    "new reference": {"reference": {"place": "device"}},
    "mixed": MIXED | {"restoration__consistency": "equivariance"},
    "base, frozen": {
        "stages": (WARM, replace(RAMP, new_reference=False), FULL),
        "restoration__supervises": "base",
        "reward": ["psnr", "jpeg_compressibility:quality=90"],
    },
}


@pytest.mark.slow
@pytest.mark.silent_bug(33)
@pytest.mark.parametrize("what", RUNS)
def test_a_run_that_is_stopped_in_the_ramp_goes_on_to_the_bit(tmp_path, monkeypatch, what):
    changes = STAGED | RUNS[what]
    one = trained(tmp_path / "one", **changes, data=restoration_runs.degraded(tmp_path))
    other = restoration_runs.stopped_and_resumed(
        tmp_path / "two", monkeypatch, after=4, **changes, data=restoration_runs.degraded(tmp_path)
    )
    assert_same(one, other)
    assert [row["stage/number"] for row in metrics(one) if "stage/number" in row] == [
        1,
        1,
        2,
        2,
        2,
        3,
        3,
    ]


@pytest.mark.parametrize("what", ["new reference", "base, frozen"])
def test_the_saved_model_restores_the_same_pictures_and_can_be_trained_further(tmp_path, what):
    changes = STAGED | RUNS[what]
    path = trained(tmp_path, **changes)
    opened = load_restorer(path / "final")
    saved = load_file(newest(path) / "model.safetensors")
    for name, parameter in opened.module.named_parameters():
        assert name not in saved or torch.equal(parameter, saved[name]), name
    first = built(tmp_path, **changes)
    pictures = torch.stack([prompt.inputs for prompt in first.source.take(3)])
    run = built(tmp_path, model=str(path), reward=["psnr"])
    assert torch.equal(run.policy.restore(pictures), opened.restore(pictures))
    assert not torch.equal(first.policy.restore(pictures), opened.restore(pictures))
    for name in ("supervises", "loss"):
        assert getattr(run.policy, name) == getattr(first.policy, name)
    further = trained(tmp_path, model=str(path), reward=["psnr"], name="further", steps=1)
    assert [row["ratio/mean"] for row in metrics(further) if "ratio/mean" in row] == [1.0]


def test_what_is_chosen_again_of_a_saved_model_leaves_its_weights_alone(tmp_path):
    path = trained(tmp_path, steps=2)
    saved = load_restorer(path / "final")
    run = built(tmp_path, model=str(path), restoration__loss="l1")
    assert run.policy.loss == "l1" and run.policy.spec == saved.spec
    assert torch.equal(vector(run.policy.module), vector(saved.module))


def test_what_a_caller_froze_stays_frozen_where_the_loss_is_chosen_again(tmp_path):
    policy = fakes.low_resolution()
    policy.module.network.conv_in.requires_grad_(False)
    run = built(
        tmp_path,
        parts=Parts(policy),
        model="<in memory>",
        restoration__loss="l1",
        restoration__supervises="base",
    )
    assert run.policy.loss == "l1" and run.policy.supervises == "base"
    assert (
        not any("network.conv_in" in name for name in run.parameter_names)
        and len(run.parameter_names) > 4
    )


# --- optimiser ------------------------------------------------------------------------------------


def test_the_actions_rate_is_its_factor_of_the_networks_in_every_stage(tmp_path):
    stages = (
        Stage(steps=1, lr=0.002, weight_decay=0.3),
        Stage(lr="linear:0.004,0.001", weight_decay="linear:0.2,0.1"),
    )
    changes = {
        "restoration__action_lr_factor": 20.0,
        "optim__weight_decay": 0.05,
        "optim__lr": 0.01,
        "stages": stages,
    }
    run = built(tmp_path, **changes, steps=3)
    names, at = [], 0
    for group in run.optimizer.param_groups:
        names.append(
            {name.split(".")[0] for name in run.parameter_names[at : at + len(group["params"])]}
        )
        at += len(group["params"])
    assert [{name.split(":")[0] for name in several} for several in names] == [
        {"network"},
        {"action"},
    ]
    found = []
    for step in range(3):
        step_params = run.stage_schedule.step_params(step)
        stepped(run)
        found.append([(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups])
        assert step_params.lr == found[-1][0][0]
        run.stage_schedule.advance(run.state.step)
    lrs = [[lr for lr, _ in groups] for groups in found]
    assert lrs[0] == pytest.approx([0.002, 0.04])
    assert lrs[1] == pytest.approx([0.004, 0.08])
    assert lrs[2] == pytest.approx([0.0025, 0.05])
    assert [{round(decay, 9) for _, decay in groups} for groups in found] == [{0.3}, {0.2}, {0.15}]


# --- references that are renewed ------------------------------------------------------------------


def test_the_new_reference_is_the_policy_of_the_stages_first_step_and_is_saved(tmp_path):
    stages = (
        Stage(steps=2, kl_coef=0.1),
        Stage(steps=2, kl_coef=0.1, new_reference=True),
        Stage(kl_coef=0.1),
    )
    changes = {"stages": stages, "saving__every": 1, "saving__keep": 10, "steps": 6}
    path = trained(tmp_path, **changes)
    saved = {step: checkpoint.load(path / f"checkpoints/step_{step:06d}") for step in range(1, 7)}
    names, first = list(saved[1].reference), built(tmp_path).policy.module.state_dict()
    assert len(names) > 8 and all(
        torch.equal(saved[1].reference[name], first[name]) for name in names
    )
    for step in range(2, 7):
        for name in names:
            assert torch.equal(saved[step].reference[name], saved[2].weights[name]), (step, name)
    assert any(
        not torch.equal(saved[1].reference[name], saved[2].reference[name]) for name in names
    )


# --- sheets and commands --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    changes = {
        "evaluation__prompts": 3,
        "evaluation__every": 2,
        "show_samples_every": 2,
        "rollout__group_size": 3,
    }
    return trained(folder, **changes, optim__lr=0.01)


def shell(*args: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    assert left.value.code == code


def test_a_run_leaves_sheets_with_what_was_given_the_samples_and_the_clean_picture(finished):
    from PIL import Image

    names = sorted(path.name for path in (finished / "images").glob("*.png"))
    assert {
        "step_000001.png",
        "step_000003.png",
        "eval_000000.png",
        "eval_000004.png",
    } <= {*names}
    rows = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    first = [row for row in rows if row["step"] == 1 and not row.get("held_out")]
    run = built(finished.parents[1], rollout__group_size=3, name="looked")
    prompts = run.source.take(2)
    with Image.open(finished / "images/step_000001.png") as sheet:
        for row in first:
            for name, picture in (
                ("prompt", prompts[row["group"]].inputs),
                ("target", prompts[row["group"]].target),
            ):
                shown = as_tensor(sheet, row[name]["box"])
                assert (shown - picture).abs().mean() < 0.02, name
    assert len(first) == 6 and {row["group"] for row in first} == {0, 1}


def as_tensor(sheet: Any, box: list[int]) -> Tensor:
    """What is in a box, at 8 x 8."""
    small = sheet.convert("RGB").crop(box).resize((8, 8), 4)
    return (
        torch.tensor(list(small.get_flattened_data()), dtype=torch.float32)
        .reshape(8, 8, 3)
        .permute(2, 0, 1)
        / 255
    )


def test_sample_writes_the_restored_picture_of_a_file(finished, tmp_path, capsys):
    from PIL import Image

    file = finished.parents[1] / "images/0.png"
    shell("sample", str(finished), str(file), "--folder", str(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"0-0-0.png", "sheet.png"}
    with Image.open(file) as given, Image.open(tmp_path / "out/0-0-0.png") as restored:
        assert restored.size == given.size
        picture, shown = (
            torch.tensor(list(one.get_flattened_data()), dtype=torch.float32)
            .reshape(24, 24, 3)
            .permute(2, 0, 1)
            / 255
            for one in (given, restored)
        )
    expected = load_restorer(finished / "final").restore(picture[None])[0]
    assert (shown - expected).abs().max() < 1e-6 and not torch.equal(shown, picture)
    inference.sample(finished, [str(file)], tmp_path / "drawn", n=2, temperature=1.0)
    sampled = [(tmp_path / f"drawn/0-0-{n}.png").read_bytes() for n in range(2)]
    assert len({*sampled, (tmp_path / "out/0-0-0.png").read_bytes()}) == 3


def test_a_name_means_the_same_from_another_folder(tmp_path, monkeypatch):
    """The config of a run holds the file of its network, its weights and its data from the root."""
    path = trained(tmp_path, steps=1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text((Path(fakes.__file__)).read_text())
    relative = {
        "model": "restore:mine.py:TinyNetwork",
        "data": "degrade:images:noise=25,crop=8",
        "runs_dir": "runs",
    }
    weights = {"restoration__weights": str(path.relative_to(tmp_path) / "final")}
    again = trained(tmp_path, name="again", steps=1, **relative, **weights)
    monkeypatch.chdir("/")
    result = serialization.load(tmp_path / "runs/again/config.json")
    assert result.model == f"restore:{tmp_path}/mine.py:TinyNetwork" and result.data.startswith(
        f"degrade:{tmp_path}/"
    )
    assert result.modality.weights == str(path / "final")
    assert inference.evaluate_run(tmp_path / again, prompts=2)[0].scored == 2
    assert api.start(tmp_path / "runs/again").folder.name == "again"
    assert NETWORK.startswith("restore:/")
