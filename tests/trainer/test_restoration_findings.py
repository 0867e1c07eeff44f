"""What a review of restoration runs found: limits on gradients, what is evaluated, references that
rewards alone read, stages that are typed over a recipe of stages."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.trainer import restoration_runs
from tests.trainer.restoration_runs import built, here, trained
from tests.trainer.runs import metrics, stepped
from torch import nn

from gruppo.cli.options import parse_config
from gruppo.config.schema import Stage
from gruppo.config.stages import planned
from gruppo.core.images import psnr, quantize
from gruppo.modalities.restoration import Equivariance, load_restorer
from gruppo.trainer.evaluate import held_out
from gruppo.types import GruppoError, Likelihood, MicroBatch, Prompt

pytest.importorskip("PIL")
BOTH = {"stage__sup_coef": 1.0, "stage__kl_coef": 0.0}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 3, 1, bias=False)
        self.conv_out.weight = self.conv_in.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.conv_out(torch.tanh(self.conv_in(x)))


def test_the_actions_gradient_takes_nothing_of_the_networks_limit(tmp_path):
    """With one limit for both, a policy gradient of tens of nats left supervision a hundredth of
    its step."""
    changes = BOTH | {
        "restoration__supervises": "base",
        "optim__max_grad_norm": 1e-3,
    }
    run = built(
        tmp_path, is_disturbed=True, **changes, restoration__action="band_gains:grid=2,std=0.1"
    )
    taken = {}
    run.optimizer.step = lambda *_, **__: taken.update(  # type: ignore[method-assign]
        {n: p.grad.clone() for n, p in run.policy.module.named_parameters() if p.grad is not None}
    )
    _, logged = stepped(run)
    of = {
        what: [g for n, g in taken.items() if n.startswith(what)]
        for what in ("network.", "action.")
    }
    lengths = {
        what: math.sqrt(sum(float(g.square().sum()) for g in own)) for what, own in of.items()
    }
    assert lengths["network."] == pytest.approx(1e-3, rel=1e-3) == lengths["action."]
    assert logged["grad/norm"] > 1e-3 and logged["grad/action_norm"] > 1e-3


def test_a_network_with_tied_weights_is_saved_and_opens_again(tmp_path):
    run = trained(tmp_path, model=f"restore:{Path(__file__).resolve()}:Tied", steps=1)
    policy = load_restorer(run / "final")
    assert policy.module.network.conv_in.weight is policy.module.network.conv_out.weight


def test_psnr_is_evaluated_whatever_is_rewarded(tmp_path):
    run = trained(tmp_path, reward=[here("bright")], evaluation__prompts=3, steps=1)
    first = metrics(run)[0]
    source = built(
        tmp_path / "again", evaluation__prompts=3, data=restoration_runs.degraded(tmp_path)
    )
    prompts = held_out(source, 3)
    shown = source.policy.restore(torch.stack([p.inputs for p in prompts]))
    expected = float(psnr(shown, quantize(torch.stack([p.target for p in prompts]))).mean())
    assert first["eval/psnr"] == pytest.approx(expected, rel=1e-5)
    assert first["eval/reward_mean"] == pytest.approx(first["eval/bright"])


def test_a_reference_that_rewards_alone_read_can_be_renewed(tmp_path):
    stages = (Stage(steps=2, rl_coef=0.0, sup_coef=1.0, lr=0.1), Stage(new_reference=True, lr=0.0))
    run = trained(
        tmp_path,
        stages=stages,
        reward=["psnr:delta=reference"],
        evaluation__prompts=3,
        evaluation__every=1,
    )
    gains = [row["eval/psnr_gain"] for row in metrics(run) if "eval/psnr_gain" in row]
    assert (
        gains[0] == gains[3] == gains[4] == 0 and gains[1] != 0
    )  # against the first policy, then against itself
    with pytest.raises(
        GruppoError, match=r"stages.1.new_reference was set, but no stage's kl_coef"
    ):
        built(tmp_path, stages=stages, name="plain")


@pytest.mark.parametrize("supervises", ["base", "told", "output"])
def test_an_equivariant_network_has_no_equivariance_loss_whatever_its_clean_pictures_teach(
    supervises,
):
    """f(x) = x (1 - noise / 100): the same function of each pixel."""

    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
            return self.scale * x * (1 - told[:, :, None, None] / 100)

    from gruppo.modalities.restoration import Control, Controls, RestorationPolicy

    action = Controls([Control("noise", 0, 50, 25)], channels=1)
    policy = RestorationPolicy(Pointwise(), action, channels=1, supervises=supervises)
    with torch.no_grad():  # a head that says something else than what is told
        policy.module.action.head.conv_out.bias.fill_(0.3)
    prompts = [
        Prompt(str(n), torch.rand(1, 8, 8), torch.rand(1, 8, 8), {"noise": 50.0}, draw=n)
        for n in range(3)
    ]
    demos = policy.demonstrations(prompts, seed=0)
    likelihood = policy.likelihood(demos, MicroBatch(torch.arange(3), slice(0, 1)))
    apart = Equivariance("l1")(policy, demos, likelihood, Likelihood(likelihood.logprobs))
    assert float(apart.abs().max()) < 1e-6


def test_a_gate_of_a_loss_that_is_to_fall_cannot_be_flat(tmp_path):
    stages = (Stage(steps=2, rl_coef=0.0, sup_coef=1.0, until="sup/loss_nats flat 1"), Stage())
    with pytest.raises(
        GruppoError,
        match=r"stages.0.until='sup/loss_nats flat 1' is not understood.*that is to rise",
    ):
        trained(tmp_path, stages=stages)


def test_stages_that_are_typed_over_a_recipe_of_stages_are_made_of_its_last_one():
    recipe = parse_config("train", ["restore"])
    supervised, ramp, full = planned("supervised:5,ramp:3,full", recipe).stages
    assert full == replace(recipe.stages[-1], steps=0, new_reference=False)
    assert (ramp.kl_coef, ramp.lr, ramp.new_reference) == (full.kl_coef, full.lr, True)
    assert (supervised.lr, supervised.new_reference, supervised.rl_coef) == (full.lr, False, 0)
    assert planned("supervised:5,full", recipe).stages[1].new_reference
    assert not planned("full", recipe).stages[0].new_reference


def test_a_gain_of_0_throughout_is_no_share_of_successes(tmp_path):
    run = trained(tmp_path, reward=["psnr:delta=reference"], evaluation__prompts=3, steps=1)
    import json

    first = json.loads((run / "evaluations.json").read_text())[0]
    assert first["mean"] == first["low"] == first["high"] == 0


def test_the_function_of_a_consistency_is_named_from_the_root(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def again(pictures, prompts):\n    return pictures\n")
    monkeypatch.chdir(tmp_path)
    changes = {"stage__cons_coef": 0.1, "restoration__consistency": "mine.py:again"}
    run = trained(tmp_path, **changes, steps=1)
    saved = (run / "config.json").read_text()
    assert str(tmp_path / "mine.py") in saved
