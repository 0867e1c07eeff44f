"""One update by the trainer's own code on small true parts, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from tests.fakes import doubled, ragged, requests
from torch import Tensor

from gruppo import distributed as dist
from gruppo.config.schema import Config, OptimConfig, RolloutConfig, Stage
from gruppo.core.objective import Objective
from gruppo.modalities.common.critic import SharedCritic
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.rewards.scoring import Scores
from gruppo.trainer.advantages import Scored, assemble
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams, step_params_at
from gruppo.trainer.update import backward
from gruppo.types import Likelihood, MicroBatch, Rollouts, Sampling, Stat, TrainBatch

SAMPLING = Sampling(max_actions=10)
ALL = 10**9
STAGE = Stage(kl_coef=0.1, entropy_coef=0.05)
UNSCORED = 7
"""The row without a reward."""


@dataclass(frozen=True, eq=False)
class Case:
    """A policy, the reference it is held to, its critic, and a batch that an older policy drew."""

    policy: Any
    reference: ReferenceModel
    critic: SharedCritic | None
    batch: TrainBatch


@cache
def case_of(make: Callable[..., Any], dtype: torch.dtype = torch.float64) -> Case:
    """Nine ragged rows of three groups; ratios off 1, some beyond every clip; another sampler; one
    row unscored."""
    policy = make() if dtype == torch.float32 else doubled(make())
    rollouts = ragged(policy.sample(requests(4, 2, 3), SAMPLING, seed=3))
    reference, critic = ReferenceModel(policy), SharedCritic(policy)
    disturb(reference.module, 0.03)
    disturb(critic.module, 0.3)
    return Case(policy, reference, critic, batch_of(policy, reference, rollouts, dtype))


def batch_of(policy: Any, reference: Any, rollouts: Rollouts, dtype: torch.dtype) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    result, ref = (
        evaluated(policy, rollouts, *policy.likelihood_outputs & {"values"}),
        evaluated(reference, rollouts),
    )
    values = result.logprobs if result.values is None else result.values

    def near(x: Tensor, by: float) -> Tensor:
        return x + by * torch.randn(rollouts.mask.shape, generator=generator, dtype=torch.float64)

    rewards = near(torch.zeros(()), 1)[:, 0]
    rewards[UNSCORED] = torch.nan
    batch = TrainBatch(
        rollouts=rollouts,
        rewards=rewards,
        advantages=near(torch.zeros(()), 1),
        loss_mask=rollouts.mask & rewards.isfinite()[:, None],
        old_logprobs=near(result.logprobs, 0.4),
        ref=ref,
        old_values=near(values, 0.3),
        returns=near(values, 1),
    )
    batch = replace(
        batch, rollouts=replace(rollouts, sampler_logprobs=near(batch.old_logprobs, 0.6))
    )
    return changed(batch, lambda x: torch.where(rollouts.mask, x, 0).to(dtype))


@torch.no_grad()
def evaluated(policy: Any, rollouts: Rollouts, *outputs: str) -> Likelihood:
    return policy.likelihood(rollouts, whole(rollouts), outputs=outputs)


def whole(rollouts: Rollouts) -> MicroBatch:
    return MicroBatch(torch.arange(len(rollouts)), slice(0, rollouts.mask.shape[1]))


def disturb(module: Any, by: float) -> None:
    with torch.no_grad():
        for n, parameter in enumerate(module.parameters()):
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64
            )
            parameter.add_(by * noise)


def per_action(batch: TrainBatch) -> dict[str, Tensor]:
    """The floating entries of a batch that have one number an action."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    is_one = {
        name: isinstance(x, Tensor) and x.shape == batch.loss_mask.shape
        for name, x in values.items()
    }
    return {name: x for name, x in values.items() if is_one[name] and x.is_floating_point()}


def changed(batch: TrainBatch, change: Callable[[Tensor], Tensor], **other: Any) -> TrainBatch:
    """The batch with every floating number of an action changed: its own, its reference's, the
    sampler's."""
    assert batch.rollouts is not None and batch.ref is not None
    rollouts = other.pop("rollouts", batch.rollouts)
    return replace(
        batch,
        rollouts=replace(rollouts, sampler_logprobs=change(batch.rollouts.sampler_logprobs)),
        ref=Likelihood(change(batch.ref.logprobs)),
        **{name: change(x) for name, x in per_action(batch).items()},
        **other,
    )


# --- the trainer's road ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Variant:
    """What an update is computed from, and how it is cut."""

    batch: TrainBatch
    policy: Any
    budget: int = ALL


def whole_update(case: Case) -> Variant:
    return Variant(case.batch, case.policy)


def rewarded(case: Case, objective: Objective, variant: Variant) -> Variant:
    """With the advantages, and for a critic the returns, that the trainer makes of the rewards."""
    run, step_params = run_of(case, variant, objective)
    batch = variant.batch
    assert batch.rollouts is not None
    made = assemble(
        step_params,
        Scored(run, batch.rollouts, Scores(batch.rewards, {"reward": batch.rewards})),
    )
    return replace(variant, batch=replace(made, old_logprobs=batch.old_logprobs, ref=batch.ref))


def run_of(
    case: Case, variant: Variant, objective: Objective, stage: Stage = STAGE
) -> tuple[Run, StepParams]:
    config = Config(
        objective=objective,
        rollout=RolloutConfig(prompts=3, group_size=3, max_new_tokens=SAMPLING.max_actions),
        optim=OptimConfig(token_budget=variant.budget),
        stage=stage,
    )
    parts: dict[str, Any] = {"engine": None, "source": None, "rewards": None, "optimizer": None}
    parts |= {"reference": case.reference, "critic": case.critic if objective.has_critic else None}
    return Run(config, variant.policy, **parts), step_params_at(config, 0)


def learned(
    case: Case, objective: Objective, variant: Variant, stage: Stage = STAGE
) -> tuple[Tensor, dict[str, Stat]]:
    """The gradient in one vector, policy and critic, and the statistics; of all ranks."""
    run, step_params = run_of(case, variant, objective, stage)
    for parameter in run.parameters:
        parameter.grad = None
    stats = backward(run, variant.batch, step_params)
    dist.sum_gradients(run.parameters)
    return vector(run.parameters), dist.merge_stats(stats)


@cache
def needed(case: Case, objective: Objective) -> Tensor:
    """The gradient of the whole batch in one piece."""
    return learned(case, objective, whole_update(case))[0]


def farthest(case: Case, objective: Objective, variants: Iterable[Variant]) -> float:
    """The largest distance of a variant's gradient from that of the whole batch in one piece."""
    gradients = (learned(case, objective, variant)[0] for variant in variants)
    return max(distance(gradient, needed(case, objective)) for gradient in gradients)


def vector(parameters: Any) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([grad.flatten().double() for grad in grads])


def distance(got: Tensor, needed: Tensor) -> float:
    """||got - needed|| / ||needed||; infinite where a number is not finite."""
    assert needed.norm() > 0
    far = float((got - needed).norm() / needed.norm())
    return far if far == far else float("inf")
