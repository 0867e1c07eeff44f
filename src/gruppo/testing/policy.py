"""The contracts of policies and engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.protocols import (
    AdapterMixin,
    ConversationMixin,
    DemonstrationMixin,
    DescriptionMixin,
    Engine,
    MemoryMixin,
    Policy,
    PromptMixin,
    RestorationMixin,
    ServingMixin,
    StatisticsMixin,
    ValueHeadMixin,
)
from gruppo.testing.sampling import (
    MIN_SHARE,
    Case,
    ContractError,
    as_requests,
    check_sampling,
    same_rows,
    share_alike,
)
from gruppo.types import GruppoError, Rollouts, Sampling

ALL = 1 << 30
"""A budget that everything fits."""
DEFAULT = Sampling(max_actions=8)
MIXINS = (
    ConversationMixin,
    ServingMixin,
    ValueHeadMixin,
    DemonstrationMixin,
    RestorationMixin,
    AdapterMixin,
    PromptMixin,
    DescriptionMixin,
    StatisticsMixin,
    MemoryMixin,
)
"""What some policies can do as well. Without ``ShardingMixin``, as a module may be called shard."""
Prompts = Sequence[Any]
"""``Prompt``, or the inputs of one."""


def check_policy(
    policy: Policy,
    prompts: Prompts,
    *,
    sampling: Any = None,
    seed: int = 0,
    tolerance: float = 1e-3,
) -> None:
    """Check that a policy samples by address and evaluates its samples to the same log-probs in any
    batch.

    ``prompts``: ``Prompt`` or the inputs of one; two or more, of unequal length. ``sampling``:
    ``Sampling`` with eight actions by default. ``tolerance`` in nats: 1e-3 suits float32, 0.1
    bfloat16. The module's weights, gradients and mode are restored afterwards.
    """
    _require_methods(policy, ("sample", "micro_batches", "likelihood"), "policy")
    kind, module = type(policy).__name__, getattr(policy, "module", None)
    for name in ("sample", "likelihood"):  # the base class has both, which raise
        if getattr(type(policy), name, None) is getattr(Policy, name):
            raise ContractError(
                f"{kind} does not define {name}; see gruppo.Policy for what it returns."
            )
    for mixin in MIXINS:
        own = [name for name in vars(mixin) if not name.startswith("_") and hasattr(policy, name)]
        if own and not isinstance(policy, mixin):
            raise ContractError(f"""{kind} defines {own[0]}, which is only called of a
                gruppo.protocols.{mixin.__name__}; add the class to its bases.""")
    if not isinstance(module, nn.Module):
        raise ContractError(f"""policy.module is a {type(module).__name__}; it needs to be the torch
            module that is trained.""")
    case = Case(
        "policy.sample", policy.sample, as_requests(prompts), sampling or DEFAULT, seed, tolerance
    )
    with _restored(policy.module):
        policy.module.eval()
        rollouts = check_sampling(case)
        _check_greedy(case)
        _check_micro_batches(policy, rollouts)
        _check_same_distribution(policy, case)
        _check_batch_invariance(policy, case, rollouts)
        _check_module_state(policy, case, rollouts)


def check_engine(
    engine: Engine,
    policy: Policy,
    prompts: Prompts,
    *,
    sampling: Any = None,
    seed: int = 0,
    tolerance: float = 1e-3,
) -> None:
    """Check that an engine samples by address from the weights of its last sync, and reports their
    version.

    The policy's weights are changed meanwhile and restored; the engine then holds them as version
    3, and is not closed. ``tolerance`` in nats: an engine with arithmetic of its own needs about
    0.1. For the rest see ``check_policy``.
    """
    methods = ("generate", "continue_rollouts", "sync", "sleep", "metrics", "progress", "close")
    _require_methods(engine, methods, "engine")
    case = Case(
        "engine.generate",
        engine.generate,
        as_requests(prompts),
        sampling or DEFAULT,
        seed,
        tolerance,
    )
    for version in (1, 2, 3):
        with _restored(policy.module):
            if version == 2:
                _perturb(policy.module)
            engine.sync(policy, version)
            rollouts = check_sampling(case) if version == 1 else case.sample()
            reported = sorted(set(rollouts.policy_version[rollouts.mask].tolist()))
            if reported != [version]:
                raise ContractError(f"""{case.who} after sync(policy, {version}) reports
                    policy_version {reported} where mask is True; it needs [{version}], the version
                    of the weights that chose the action.""")
            problem = (
                f"after sync(policy, {version}) the engine's sampler_logprobs are not the "
                f"policy's log-probs"
            )
            advice = """sync may return only once the sampler holds the new weights; log-probs
                are in nats, at the sampling temperature."""
            case.require_close(
                rollouts.sampler_logprobs,
                _logprobs(policy, rollouts),
                rollouts.mask,
                problem,
                advice,
            )


def _require_methods(part: Any, names: Sequence[str], kind: str) -> None:
    for name in names:
        if not callable(getattr(part, name, None)):
            raise ContractError(f"""the {kind}, a {type(part).__name__}, has no method {name}; it
                needs {", ".join(names)} (see gruppo.protocols).""")


def _check_greedy(case: Case) -> None:
    greedy = case.sample(temperature=0.0)
    if not same_rows(greedy, case.sample(temperature=0.0, seed=case.seed + 1)):
        raise ContractError(f"""{case.who} at temperature 0 gave other actions for another seed; 0
            means the most likely ones.""")
    try:
        share = share_alike(greedy, case.sample(top_k=1))
    except GruppoError:  # refused
        return
    if share < MIN_SHARE:
        raise ContractError(f"""{case.who} with top_k=1 starts as at temperature 0 in {share:.0%} of
            the rows: it is ignored.""")


def _check_micro_batches(policy: Policy, rollouts: Rollouts) -> None:
    """Micro-batches cover each kept action once; their log-probs have its shape and a gradient."""
    for budget in (1, ALL):  # one row at a time, and all at once
        micro_batches = policy.micro_batches(rollouts, rollouts.mask, budget)
        covered = torch.zeros(rollouts.mask.shape, dtype=torch.long)  # how often, per action
        for micro_batch in micro_batches:
            covered[:, micro_batch.cols] += torch.bincount(
                micro_batch.rows, minlength=len(rollouts)
            )[:, None]
        kept = covered[rollouts.mask]
        likelihood = policy.likelihood(rollouts, micro_batches[0])
        shape, needed = (
            tuple(likelihood.logprobs.shape),
            tuple(micro_batches[0].of(rollouts.mask).shape),
        )
        if not (kept == 1).all():
            raise ContractError(f"""policy.micro_batches with a budget of {budget} leaves out
                {int((kept == 0).sum())} of {len(kept)} kept actions and repeats
                {int((kept > 1).sum())}; each needs to be in exactly one micro-batch.""")
        if shape != needed:
            raise ContractError(f"""policy.likelihood gave log-probs of the shape {shape} for a
                micro-batch of the shape {needed}.""")
    if likelihood.logprobs.requires_grad:
        likelihood.logprobs.sum().backward()
    if not any(p.grad is not None and p.grad.any() for p in policy.module.parameters()):
        raise ContractError("""policy.likelihood sends no gradient to the parameters of
            policy.module; compute it without no_grad or detach.""")


def _check_same_distribution(policy: Policy, case: Case) -> None:
    """Sampling and evaluation apply temperature, top-k and top-p alike, or refuse them."""
    # Without changes a refusal is an error: nothing could be trained.
    options: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.7}]
    for changes in options:
        try:
            rollouts = case.sample(**changes)
            evaluated = _logprobs(policy, rollouts)
        except GruppoError:
            if not changes:
                raise
            continue
        how = ", ".join(f"{name}={value}" for name, value in changes.items()) or "as they are"
        problem = f"policy.likelihood of its own samples ({how}) is not their sampler_logprobs"
        advice = """Both need the logits from just before the action, divided by the temperature
            and cut to top-k and top-p; what cannot be evaluated is refused with a GruppoError."""
        case.require_close(rollouts.sampler_logprobs, evaluated, rollouts.mask, problem, advice)


def _check_batch_invariance(policy: Policy, case: Case, rollouts: Rollouts) -> None:
    """Log-probs depend neither on other rows nor on padding nor on the order of rows."""
    expected, order = _logprobs(policy, rollouts), torch.arange(len(rollouts)).flip(0)
    exists = torch.arange(rollouts.mask.shape[1]) < rollouts.lengths[:, None]
    exists = exists.reshape(*exists.shape, *[1] * (rollouts.actions.ndim - 2))
    # Other actions, which exist in every vocabulary: 0 becomes 1, and anything else 0.
    junk = torch.where(exists, rollouts.actions, (rollouts.actions == 0).to(rollouts.actions.dtype))
    others = {
        "which rows share a micro-batch": _logprobs(policy, rollouts, budget=1),
        "the order of the rows": _logprobs(policy, rollouts.take(order))[order],
        "actions beyond lengths": _logprobs(policy, replace(rollouts, actions=junk)),
    }
    advice = "Keep padding out of attention, and out of the positions."
    for cause, other in others.items():
        case.require_close(expected, other, rollouts.mask, f"log-probs depend on {cause}", advice)


def _check_module_state(policy: Policy, case: Case, rollouts: Rollouts) -> None:
    """Dropout is off whatever the module's mode is, and every copy of the weights follows an
    in-place change."""
    before, mask, advice = (
        _logprobs(policy, rollouts),
        rollouts.mask,
        "Call module.eval() before sampling and scoring.",
    )
    policy.module.train()
    after = _logprobs(policy, rollouts)
    case.require_close(
        before, after, mask, "log-probs differ after module.train(): dropout is on", advice
    )
    policy.module.train()  # again: likelihood may have called eval()
    if (share := share_alike(rollouts, case.sample())) < MIN_SHARE:
        raise ContractError(
            f"{share:.0%} of the samples start alike after module.train(): dropout is on. {advice}"
        )
    policy.module.eval()

    advice = "Renew every copy of the weights before it is used."
    before = _logprobs(policy, rollouts)
    _perturb(policy.module)
    if torch.equal(before[mask], _logprobs(policy, rollouts)[mask]):
        raise ContractError(
            f"log-probs did not change when the weights of policy.module did: they are stale. "
            f"{advice}"
        )
    fresh = case.sample()
    problem = "after a change of the weights, samples and their evaluation are of different weights"
    case.require_close(
        fresh.sampler_logprobs, _logprobs(policy, fresh), fresh.mask, problem, advice
    )


@torch.no_grad()
def _logprobs(policy: Policy, rollouts: Rollouts, budget: int = ALL) -> Float[Tensor, "B T"]:
    """The policy's evaluation, in float64 on the CPU; 0 where nothing was evaluated."""
    logprobs = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, budget):
        place = (micro_batch.rows[:, None], torch.arange(logprobs.shape[1])[micro_batch.cols][None])
        logprobs[place] = policy.likelihood(rollouts, micro_batch).logprobs.double().cpu()
    return logprobs


@torch.no_grad()
def _perturb(module: nn.Module) -> None:
    """Change the weights, in place, by about a fifth of their size."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        # 1e-3 for parameters that start at 0, such as those of an adapter.
        parameter.add_(noise * (0.2 * parameter.abs().mean() + 1e-3))


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore weights, gradients and mode afterwards."""
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    gradients = [parameter.grad for parameter in module.parameters()]
    modes = [(part, part.training) for part in module.modules()]
    module.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        module.load_state_dict(weights)
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for part, training in modes:
            part.training = training
