"""The contract of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gruppo.protocols import Policy
from gruppo.testing.sampling import ALIKE, check_sampling
from gruppo.testing.shared import (
    ALL,
    Case,
    as_prompts,
    disturb,
    logprobs_of,
    put_back,
    require,
    require_methods,
    same_actions,
    share_alike,
    what,
)
from gruppo.types import GruppoError, Rollouts, Sampling


def check_policy(
    policy: Policy,
    prompts: Sequence[Any],
    *,
    sampling: Any = None,
    seed: int = 0,
    tolerance: float = 1e-3,
) -> None:
    """A policy samples by address, and evaluates what it sampled to the same numbers in whatever company.

    ``prompts``: ``Prompt`` or what stands in one; two or more, of unequal length. ``sampling``: ``Sampling`` with eight
    actions by default. ``tolerance`` in nats: 1e-3 suits float32, 0.1 bfloat16. The module's weights, gradients and
    mode are put back afterwards.
    """
    require_methods(policy, ("sample", "micro_batches", "likelihood"), "policy")
    for name in ("sample", "likelihood"):
        defined = getattr(type(policy), name, None) is not getattr(Policy, name)
        require(defined, f"{type(policy).__name__} does not define {name}; see gruppo.Policy for what it returns.")
    module = getattr(policy, "module", None)
    require(isinstance(module, nn.Module), f"policy.module is {what(module)}; it needs to be the one that is trained.")
    case = Case(
        "policy.sample", policy.sample, as_prompts(prompts), sampling or Sampling(max_actions=8), seed, tolerance
    )
    with put_back(policy.module):
        policy.module.eval()
        rollouts = check_sampling(case)
        _check_mode(case)
        _check_micro_batches(policy, rollouts)
        _check_same_distribution(policy, case)
        _check_gradient(policy, rollouts)
        _check_company(policy, case, rollouts)
        _check_dropout(policy, case, rollouts)
        _check_freshness(policy, case, rollouts)


def _check_mode(case: Case) -> None:
    mode = case.sample(temperature=0.0)
    require(
        same_actions(mode, case.sample(temperature=0.0, seed=case.seed + 1)),
        f"{case.who} at temperature 0 gave other actions for another seed; 0 means the most likely ones, not a draw.",
    )
    try:
        share = share_alike(mode, case.sample(top_k=1))
    except GruppoError:  # refused
        return
    require(
        share >= ALIKE, f"{case.who} with top_k=1 starts as at temperature 0 in {share:.0%} of the rows: it is ignored."
    )


def _check_micro_batches(policy: Policy, rollouts: Rollouts) -> None:
    for budget in (1, ALL):
        micro_batches = policy.micro_batches(rollouts, rollouts.mask, budget)
        times = torch.zeros(rollouts.mask.shape, dtype=torch.long)  # each action is covered
        for micro_batch in micro_batches:
            rows = torch.zeros(len(rollouts), dtype=torch.long).index_add(
                0, micro_batch.rows, torch.ones_like(micro_batch.rows)
            )
            times[:, micro_batch.cols] += rows[:, None]
        kept = times[rollouts.mask]
        require(
            bool((kept == 1).all()),
            f"policy.micro_batches with a budget of {budget} leaves out {int((kept == 0).sum())} of {len(kept)} kept "
            f"actions and repeats {int((kept > 1).sum())}; each needs to be in exactly one micro-batch.",
        )
        got = tuple(policy.likelihood(rollouts, micro_batches[0]).logprobs.shape)
        need = tuple(micro_batches[0].of(rollouts.mask).shape)
        require(
            got == need, f"policy.likelihood gave log-probs of the shape {got} for a micro-batch of the shape {need}."
        )


def _check_same_distribution(policy: Policy, case: Case) -> None:
    """Temperature, top-k and top-p are in sampling and evaluation alike, or refused."""
    changed: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.7}]
    for changes in changed:
        try:
            rollouts = case.sample(**changes)
            evaluated = logprobs_of(policy, rollouts)
        except GruppoError:
            if not changes:
                raise
            continue
        how = ", ".join(f"{name}={value}" for name, value in changes.items()) or "as they are"
        case.require_close(
            rollouts.sampler_logprobs,
            evaluated,
            rollouts.mask,
            f"policy.likelihood of its own samples ({how}) is not their sampler_logprobs",
            "Both need the logits from just before the action, divided by the temperature and cut to top-k and top-p; "
            "what cannot be evaluated is refused with a GruppoError.",
        )


def _check_gradient(policy: Policy, rollouts: Rollouts) -> None:
    logprobs = policy.likelihood(rollouts, policy.micro_batches(rollouts, rollouts.mask, ALL)[0]).logprobs
    if logprobs.requires_grad:
        logprobs.sum().backward()
    gradients = [parameter.grad for parameter in policy.module.parameters()]
    require(
        any(gradient is not None and bool(gradient.any()) for gradient in gradients),
        "policy.likelihood sends no gradient to the parameters of policy.module; compute it without no_grad or detach.",
    )


def _check_company(policy: Policy, case: Case, rollouts: Rollouts) -> None:
    """Neither the rows beside it nor padding nor the order of rows reach a log-probability."""
    together, order = logprobs_of(policy, rollouts), torch.arange(len(rollouts)).flip(0)
    exists = torch.arange(rollouts.mask.shape[1]) < rollouts.lengths[:, None]
    exists = exists.reshape(*exists.shape, *[1] * (rollouts.actions.ndim - 2))
    junk = torch.where(exists, rollouts.actions, (rollouts.actions == 0).to(rollouts.actions.dtype))
    others = {
        "which rows share a micro-batch": logprobs_of(policy, rollouts, budget=1),
        "the order of the rows": logprobs_of(policy, rollouts.take(order))[order],
        "actions beyond lengths": logprobs_of(policy, replace(rollouts, actions=junk)),
    }
    for what_on, other in others.items():
        mend = "Keep padding out of attention, and out of the positions."
        case.require_close(together, other, rollouts.mask, f"log-probs depend on {what_on}", mend)


def _check_dropout(policy: Policy, case: Case, rollouts: Rollouts) -> None:
    quiet, mend = logprobs_of(policy, rollouts), "Call module.eval() before sampling and before scoring."
    policy.module.train()
    noisy = logprobs_of(policy, rollouts)
    case.require_close(quiet, noisy, rollouts.mask, "log-probs are others after module.train(): dropout is on", mend)
    policy.module.train()
    share = share_alike(rollouts, case.sample())
    require(share >= ALIKE, f"{share:.0%} of the samples start alike after module.train(): dropout is on. {mend}")
    policy.module.eval()


def _check_freshness(policy: Policy, case: Case, rollouts: Rollouts) -> None:
    """Whoever holds a copy of the weights follows an in-place change."""
    before, mend = logprobs_of(policy, rollouts), "Renew every copy of the weights before it is used."
    disturb(policy.module)
    moved = not torch.equal(before[rollouts.mask], logprobs_of(policy, rollouts)[rollouts.mask])
    require(moved, f"log-probs did not move when the weights of policy.module did: they are stale. {mend}")
    fresh = case.sample()
    behind = "after a change of the weights, samples and their evaluation are of different weights"
    case.require_close(fresh.sampler_logprobs, logprobs_of(policy, fresh), fresh.mask, behind, mend)
