"""Image models in whole runs: taught by demonstrations, rewarded, measured against a reference,
stopped and resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.collecting import collect
from tests.trainer import diffusion_runs
from tests.trainer.diffusion_runs import DIMS, built, stopped_and_resumed, trained
from tests.trainer.runs import metrics, newest, stepped, tensors, whole

from gruppo import api
from gruppo.core.kl import gaussian_kl
from gruppo.modalities.diffusion import load_denoiser
from gruppo.trainer.update import learn
from gruppo.types import Prompt

pytest.importorskip("PIL")

KL = {"stage__kl_coef": 0.1}
SEVERAL = {"optim__epochs": 2, "optim__minibatches": 2}
MIXED = KL | {
    "reference__kind": "mixed",
    "reference__update_every": 2,
    "reference__update_rate": 0.5,
}
REFERENCES = {
    "in one micro_batch": KL,
    "in small micro_batches": KL | {"optim__token_budget": 5},
    "several updates": KL | SEVERAL,
    "on the CPU": KL | {"reference__place": "cpu"},
    "several, on the CPU": KL | SEVERAL | {"reference__place": "cpu"},
    "mixed": MIXED | {"reference__update_every": 1},
    "guided": KL | SEVERAL | {"diffusion__guidance": 2.0},
    "PPO, in the reward": KL | {"objective": "ppo", "critic__kind": "separate"},
    "PPO, in the loss": KL
    | {"objective": "ppo", "objective__kl_in": "loss", "objective__kl": "exact"}
    | SEVERAL,
}


def model_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Guidance needs a network that was asked without its class."""
    return (
        {"model": diffusion_runs.denoiser(dropped=0.1)} if "diffusion__guidance" in changes else {}
    )


def assert_same(run: Path, other: Path) -> None:
    """All that two runs write, but clocks and folders: equal to the bit."""
    for place in (lambda path: path / "final", newest):
        files, others = (
            sorted(file.relative_to(place(path)) for file in place(path).rglob("*.safetensors"))
            for path in (run, other)
        )
        assert files == others and files
        for file in files:
            assert tensors(place(run) / file) == tensors(place(other) / file), file
    state, other_state = (
        json.loads((newest(path) / "state.json").read_text()) for path in (run, other)
    )
    assert state == other_state and metrics(run) == metrics(other)
    assert (run / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    sheets = sorted(sheet.name for sheet in (run / "images").iterdir())
    assert (
        sheets == sorted(sheet.name for sheet in (other / "images").iterdir()) and len(sheets) > 1
    )
    for sheet in sheets:
        assert (run / "images" / sheet).read_bytes() == (other / "images" / sheet).read_bytes()


# --- demonstrations alone -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder_of_images(tmp_path_factory):
    return diffusion_runs.write_images(tmp_path_factory.mktemp("images"))


def teaching(folder_of_images: Path) -> dict[str, Any]:
    """A new network and demonstrations, and nothing that rewards it."""
    return {
        "model": "unet",
        "data": f"images:{folder_of_images}",
        "reward": (),
        "objective": "grpo",
        "stage__rl_coef": 0.0,
        "stage__sup_coef": 1.0,
        "diffusion__width": 8,
        "supervised__batch": 8,
        "prompts__held_out_fraction": 0.3,
        "optim__lr": 1e-2,
        "steps": 24,
        "evaluation__every": 8,
    }


@pytest.fixture(scope="module")
def taught(tmp_path_factory, folder_of_images):
    """A run of demonstrations alone."""
    folder = tmp_path_factory.mktemp("taught")
    return api.start(diffusion_runs.config(folder, **teaching(folder_of_images)))


def test_demonstrations_alone_need_no_reward_and_lower_the_loss_of_others(taught, folder_of_images):
    policy = load_denoiser(taught.model)
    assert policy.denoiser.shape == (3, 8, 8) and policy.denoiser.condition.names == ("a", "b", "c")
    assert (taught.before, taught.after, taught.tokens) == (None, None, 0)
    untaught = api.start(
        diffusion_runs.config(
            taught.folder.parent, **(teaching(folder_of_images) | {"steps": 1, "name": "1"})
        )
    )
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for n in range(60):
        picture = torch.rand(3, 8, 8, generator=generator) / 4
        picture[n % 3] += 0.63
        prompts.append(Prompt(f"{n}", n % 3, picture, draw=n))
    demos = policy.demonstrations(prompts, seed=5)
    with torch.no_grad():
        loss, before = (
            float(of.supervised_loss(demos, of.likelihood(demos, whole(demos))).mean())
            for of in (policy, load_denoiser(untaught.model))
        )
    assert loss < 0.5 * before


def test_held_out_pictures_are_drawn_at_each_evaluation_though_nothing_rewards_them(taught):
    rows = [json.loads(line) for line in (taught.folder / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step for step in (0, 8, 16, 24) for _ in range(3)]
    assert all(row["held_out"] and row["reward"] is None for row in rows)
    sheets = {path.name for path in (taught.folder / "images").iterdir()}
    assert sheets == {f"eval_{step:06d}.png" for step in (0, 8, 16, 24)}
    assert not any(
        name.startswith(("eval/", "reward/")) for row in metrics(taught.folder) for name in row
    )


@pytest.mark.silent_bug(33)
@pytest.mark.parametrize(("after", "is_killed"), [(3, False), (8, True)])
def test_demonstrations_alone_are_resumed_to_the_bit(
    tmp_path, monkeypatch, folder_of_images, taught, after, is_killed
):
    """After step 8, whose evaluation is over when the run is saved, its pictures are not drawn
    again."""
    changes = teaching(folder_of_images)
    assert_same(
        stopped_and_resumed(tmp_path, monkeypatch, after=after, is_killed=is_killed, **changes),
        taught.folder,
    )


# --- the KL to a reference ------------------------------------------------------------------------


@pytest.mark.silent_bug(18)
@pytest.mark.parametrize("kind", REFERENCES)
def test_the_kl_is_exactly_zero_before_the_policy_moves(tmp_path, kind):
    changes = REFERENCES[kind]
    run = built(tmp_path, **(changes | model_of(changes) | {"optim__lr": 0.0}))
    for _ in range(2):
        _, logged = stepped(run)
        assert logged["kl/ref_nats"] == 0.0 and logged["kl/old_nats"] == 0.0
    assert run.reference.is_offloaded == ("reference__place" in changes)


@pytest.mark.silent_bug(41)
@pytest.mark.parametrize(
    "kind", ["in one micro_batch", "in small micro_batches", "on the CPU", "guided", "mixed"]
)
def test_the_kl_of_the_second_step_is_that_of_the_two_normals(tmp_path, kind):
    """The reference is opened anew from its folder, or mixed by hand."""
    changes = REFERENCES[kind] | {"optim__epochs": 1, "optim__minibatches": 1}
    run = built(tmp_path, **(changes | model_of(changes)))
    reference = load_denoiser(run.config.model)
    stepped(run)
    if run.reference.rule == "ema":
        for own, theirs in zip(
            reference.module.parameters(), run.policy.module.parameters(), strict=True
        ):
            own.data = 0.5 * theirs.detach() + 0.5 * own
    step_params = run.stage_schedule.step_params(1)
    batch = collect(run, step_params).batch
    with torch.no_grad():
        ours, theirs = (
            of.likelihood(batch.rollouts, whole(batch.rollouts), outputs=("gaussian",)).gaussian
            for of in (run.policy, reference)
        )
    by_hand = gaussian_kl(ours.mean, ours.std, theirs.mean, theirs.std)[batch.loss_mask].mean()
    assert by_hand > 1e-3
    logged = learn(run, batch, step_params)
    assert logged["kl/ref_nats"] == pytest.approx(float(by_hand), rel=1e-5)
    assert logged["loss/kl"] == pytest.approx(
        float(by_hand), rel=1e-5
    )  # each row has as many steps


@pytest.mark.silent_bug(2)
@pytest.mark.parametrize("budget", [1, 5, 999])
def test_the_first_ratio_is_one_at_other_batch_sizes_and_the_joint_error_is_reported(
    tmp_path, budget
):
    """At most 1e-5 nats per dimension, of the sampler's log-probs and of the ratio; a tenth of the
    clip."""
    run = built(tmp_path, optim__lr=0.0, optim__token_budget=budget, **SEVERAL)
    _, logged = stepped(run)
    assert 0 < logged["mismatch/max_nats"] <= 1e-5 * DIMS
    assert logged["mismatch/max_nats"] < 0.1 * run.config.objective.clip_high
    assert math.log(logged["ratio/max"]) <= 1e-5 * DIMS and logged["clip/high_frac"] == 0


def test_the_old_kl_of_several_updates_is_exact(tmp_path):
    """The second update's: that of the normals after the first one to those before it."""
    run, once = (built(tmp_path, optim__epochs=epochs) for epochs in (2, 1))
    batch, logged = stepped(run)
    before = load_denoiser(diffusion_runs.denoiser())
    stepped(once)  # the weights between the two updates
    with torch.no_grad():
        ours, theirs = (
            of.likelihood(batch.rollouts, whole(batch.rollouts), outputs=("gaussian",)).gaussian
            for of in (once.policy, before)
        )
    by_hand = gaussian_kl(ours.mean, ours.std, theirs.mean, theirs.std)[batch.loss_mask].mean()
    assert by_hand > 1e-3 and logged["kl/old_nats"] == pytest.approx(float(by_hand) / 2, rel=1e-5)
    assert logged["kl/old_k3_nats"] == logged["kl/old_nats"]


# --- stopped and resumed --------------------------------------------------------------------------


KINDS: dict[str, dict[str, Any]] = {
    "branched, guided, demonstrations beside": KL
    | {
        "diffusion__noise": "branched",
        "diffusion__guidance": 2.0,
        "stage__sup_coef": 0.5,
        "supervised__batch": 4,
    },
    "shared, a fraction, mixed on the CPU, PPO with a critic of its own": MIXED
    | {"reference__place": "cpu", "diffusion__noise": "shared", "diffusion__train_fraction": 0.5}
    | {"objective": "ppo", "critic__kind": "separate"},
    "a window of flow_sde, PPO with a shared critic": KL
    | {"objective": "ppo", "diffusion__transition": "flow_sde", "diffusion__eta": 0.7}
    | {"diffusion__train_from": 1, "diffusion__train_to": 3},
}


@pytest.mark.slow
@pytest.mark.silent_bug(33)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_stopped_in_the_middle_goes_on_to_the_bit(
    tmp_path, monkeypatch, folder_of_images, kind
):
    changes = (
        {"steps": 3, "show_samples_every": 1, "saving__every": 0}
        | KINDS[kind]
        | SEVERAL
        | model_of(KINDS[kind])
    )
    if "stage__sup_coef" in changes:
        changes["supervised__data"] = f"images:{folder_of_images}"
    one = trained(tmp_path / "whole", **changes)
    assert_same(stopped_and_resumed(tmp_path / "parts", monkeypatch, after=2, **changes), one)
    rows = [row for row in metrics(one) if "reward/mean" in row]
    assert max(row["kl/ref_nats"] for row in rows) > 1e-4 and all(
        row["update/updates_count"] == 4 for row in rows
    )
