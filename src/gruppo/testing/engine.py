"""The contract of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gruppo.protocols import Engine, Policy
from gruppo.testing.sampling import check_sampling
from gruppo.testing.shared import Case, as_prompts, disturb, logprobs_of, put_back, require, require_methods
from gruppo.types import Rollouts, Sampling


def check_engine(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[Any],
    *,
    sampling: Any = None,
    seed: int = 0,
    tolerance: float = 1e-3,
) -> None:
    """An engine samples by address from the weights that it was last given, and says which version they are.

    The policy's weights are changed meanwhile and put back; the engine then holds them as version 3, and is not closed.
    ``tolerance`` in nats: an engine with arithmetic of its own needs about 0.1. For the rest see ``check_policy``.
    """
    require_methods(engine, ("generate", "sync", "close"), "engine")
    case = Case(
        "engine.generate", engine.generate, as_prompts(prompts), sampling or Sampling(max_actions=8), seed, tolerance
    )
    engine.sync(policy, 1)
    _check_held(policy, case, check_sampling(case), 1)
    with put_back(policy.module):
        disturb(policy.module)
        engine.sync(policy, 2)
        _check_held(policy, case, case.sample(), 2)
    engine.sync(policy, 3)
    _check_held(policy, case, case.sample(), 3)


def _check_held(policy: Policy, case: Case, rollouts: Rollouts, version: int) -> None:
    """Rows carry the version, and the weights of that version chose them."""
    got = sorted(set(rollouts.policy_version[rollouts.mask].tolist()))
    require(
        got == [version],
        f"{case.who} after sync(policy, {version}) says policy_version {got} where mask is True; it needs [{version}], "
        "the version of the weights that chose the action.",
    )
    case.require_close(
        rollouts.sampler_logprobs,
        logprobs_of(policy, rollouts),
        rollouts.mask,
        f"after sync(policy, {version}) the engine's sampler_logprobs are not the policy's log-probs",
        "sync may return only once the sampler holds the new weights; log-probs are in nats, at the sampling "
        "temperature.",
    )
