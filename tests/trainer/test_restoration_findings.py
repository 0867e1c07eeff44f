"""What a review of restoration runs found: limits on gradients, what is evaluated, references that
rewards alone read, stages that are typed over a recipe of stages."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.trainer.restoration_runs import built, trained
from tests.trainer.runs import stepped
from torch import nn

from gruppo.modalities.restoration import BandGains, RestorationPolicy, load_restorer
from gruppo.modalities.restoration.consistency import equivariance
from gruppo.types import Likelihood, MicroBatch, Prompt

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


@pytest.mark.parametrize("supervises", ["base", "output"])
def test_an_equivariant_network_has_no_equivariance_loss_whatever_its_clean_pictures_teach(
    supervises,
):
    """f(x) = s x, the same function of each pixel, with a gain of 0.3 of each cell if it is
    asked for."""

    class Pointwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x

    action = BandGains(channels=1, grid=1)
    policy = RestorationPolicy(
        Pointwise(), action, channels=1, supervises=supervises, consistency=equivariance, loss="l1"
    )
    with torch.no_grad():
        policy.module.action.head.conv_out.bias.fill_(0.3)
    prompts = [Prompt(str(n), torch.rand(1, 8, 8), torch.rand(1, 8, 8), draw=n) for n in range(3)]
    demos = policy.demonstrations(prompts, seed=0)
    likelihood = policy.likelihood(demos, MicroBatch(torch.arange(3), slice(0, 1)))
    apart = policy.consistency_loss(demos, likelihood, Likelihood(likelihood.logprobs))
    assert float(apart.abs().max()) < 1e-6
