"""What each term of an update does, and what is said of it: directions, rates, frozen weights, and
metrics by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.collecting import collect
from tests.trainer.runs import metrics
from tests.trainer.test_step import run_in, step, vector

from gruppo import api
from gruppo.build import Parts, build
from gruppo.modalities.text import from_pretrained
from gruppo.trainer.forward import minibatches
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import backward, learn, update
from gruppo.types import Rollouts

ALIKE = Parts(rewards=[lambda completions, **_: [1.0] * len(completions)])


@pytest.mark.silent_bug(1)
def test_where_nothing_but_the_kl_pulls_the_policy_comes_nearer_to_its_reference(tmp_path):
    run = run_in(tmp_path, ALIKE, stage__kl_coef=1.0, rollout__group_size=16)
    with torch.no_grad():
        for n, parameter in enumerate(run.policy.module.parameters()):
            parameter += 0.03 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(n)
            )
    logged = [step(run)[1]["kl/ref_nats"] for _ in range(4)]
    assert logged[0] > 1e-3 and logged[-1] < 0.9 * logged[0]


@pytest.mark.silent_bug(1)
def test_where_nothing_but_the_entropy_pulls_it_rises(tmp_path):
    run = run_in(tmp_path, ALIKE, stage__entropy_coef=1.0, rollout__group_size=16)
    logged = [step(run)[1]["entropy/mean_nats"] for _ in range(4)]
    assert logged[-1] > logged[0] + 0.01


def test_an_update_is_made_at_the_rate_of_its_step_and_not_at_the_peak(tmp_path):
    def after(**changes: Any) -> torch.Tensor:
        run = run_in(tmp_path, **changes)
        step(run)
        return vector(run.policy.module)

    warming, low, peak = (
        after(optim__lr=0.04, optim__warmup_steps=4),
        after(optim__lr=0.01),
        after(optim__lr=0.04),
    )
    assert torch.equal(warming, low) and not torch.equal(low, peak)


@pytest.mark.silent_bug(40)
def test_a_frozen_parameter_stays_to_the_bit_and_is_not_handed_to_the_optimiser(tmp_path):
    policy = from_pretrained(tiny.model(), compute="float32")
    frozen = dict(policy.module.named_parameters())[
        "model.layers.0.mlp.up_proj.weight"
    ].requires_grad_(False)
    run = run_in(tmp_path, Parts(model=policy), optim__weight_decay=0.1)
    before, others = frozen.clone(), vector(run.policy.module)
    step(run)
    assert torch.equal(frozen, before) and frozen.grad is None and not frozen.requires_grad
    assert not torch.equal(vector(run.policy.module), others)
    assert id(frozen) not in {
        id(p) for group in run.optimizer.param_groups for p in group["params"]
    }


@pytest.mark.silent_bug(9)
def test_rollouts_carry_the_count_of_publishes_before_them(tmp_path):
    class Watches:
        name = "watches"
        versions: list[int]

        def __call__(self, rollouts: Rollouts) -> torch.Tensor:
            self.versions.append(int(rollouts.policy_version[rollouts.mask].unique()))
            return torch.tensor(tiny.digits(rollouts.completions))

    watches = Watches()
    watches.versions = []
    api.start(tiny.config(tmp_path, steps=3, evaluation__prompts=0), Parts(rewards=[watches]))
    assert watches.versions == [0, 1, 2]


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.silent_bug(8)
@pytest.mark.silent_bug(41)
def test_the_mismatch_is_the_mean_and_the_largest_distance_from_the_sampler_whatever_its_sign(
    tmp_path,
):
    run = run_in(tmp_path, rollout__group_size=6)
    step_params = step_params_at(run.config, 0)
    batch = collect(run, step_params).batch
    off = (
        torch.tensor([-0.3, 0.2, 0.1])
        .repeat(batch.loss_mask.shape[1])[: batch.loss_mask.shape[1]]
        .expand(batch.loss_mask.shape)
    )
    sampled = replace(batch.rollouts, sampler_logprobs=batch.rollouts.sampler_logprobs + off)
    logged = learn(run, replace(batch, rollouts=sampled), step_params)
    learned = batch.loss_mask & (batch.advantages != 0).any(dim=1, keepdim=True)
    assert logged["mismatch/mean_nats"] == pytest.approx(float(off[learned].abs().mean()), rel=1e-4)
    assert logged["mismatch/max_nats"] == pytest.approx(0.3, rel=1e-4)


@pytest.mark.silent_bug(41)
def test_the_losses_of_a_step_are_means_over_its_updates_of_sums_over_their_micro_batches(tmp_path):
    several = {
        "optim__epochs": 2,
        "optim__minibatches": 2,
        "optim__token_budget": 60,
        "stage__kl_coef": 0.1,
    }
    run, other = (run_in(tmp_path, rollout__group_size=4, **several) for _ in range(2))
    step_params = step_params_at(run.config, 0)
    logged = learn(run, collect(run, step_params).batch, step_params)
    assert logged["update/micro_batches_count"] > 4
    for group in other.optimizer.param_groups:
        group["lr"] = step_params.critic_lr if group["is_critic"] else step_params.lr
    updates = [
        update(other, part, step_params)[0]
        for part in minibatches(other, collect(other, step_params).batch)
    ]
    for name in ("loss/policy", "loss/kl"):
        assert logged[name] == pytest.approx(
            sum(stats[name].sum for stats in updates) / 4, rel=1e-6
        )


@pytest.mark.silent_bug(41)
def test_the_progress_counts_each_token_and_rollout_once(tmp_path):
    seen: list[int] = []

    def counts(completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        seen.append(sum(map(len, completion_ids)))
        return tiny.digits(completions)

    config = tiny.config(tmp_path, steps=3, evaluation__prompts=0)
    rows = metrics(api.start(config, Parts(rewards=[counts])).folder)
    assert [row["progress/tokens"] for row in rows] == [seen[0], sum(seen[:2]), sum(seen)]
    assert [row["progress/rollouts"] for row in rows] == [12, 24, 36]


def test_the_constant_average_divides_by_the_longest_row_that_may_be(tmp_path):
    """Twice the length that is allowed is half the gradient, whatever the rows' own lengths are."""
    run, _ = build(tiny.config(tmp_path, objective="dr_grpo", optim__max_grad_norm=0.0), Parts())
    step_params, found = step_params_at(run.config, 0), []
    batch = collect(run, step_params).batch
    for length in (8, 16):
        run.optimizer.zero_grad(set_to_none=True)
        backward(
            run,
            batch,
            replace(step_params, sampling=replace(step_params.sampling, max_actions=length)),
        )
        found.append(torch.cat([p.grad.flatten() for p in run.parameters]))
    torch.testing.assert_close(found[1], 0.5 * found[0], rtol=1e-5, atol=1e-9)
    assert found[0].abs().max() > 1e-4
