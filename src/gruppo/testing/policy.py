"""The contracts of policies and engines: well-formed rollouts, random by their address alone, and
log-probs that are those of the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo import protocols
from gruppo.protocols import Engine, Policy
from gruppo.types import COLUMN_FIELDS, Finish, GruppoError, Prompt, Request, Rollouts, Sampling

SIZES = (3, 2)
"""Samples of every other prompt: groups may differ in size."""
MIN_SHARE = 0.75
"""Share of rows whose first action must agree where only rounding differs: in bfloat16 it may turn
a draw over."""
ALL = 1 << 30
"""A budget that everything fits."""
DEFAULT = Sampling(max_actions=8)
Prompts = Sequence[Any]
"""``Prompt``, or the inputs of one."""


class ContractError(GruppoError, AssertionError):
    """A component breaks its contract."""


@dataclass(frozen=True)
class Case:
    """A sampler, and the requests that it is checked with."""

    who: str
    generate: Callable[..., Rollouts]
    """(requests, sampling, seed=) to rollouts: of a policy or of an engine."""
    requests: list[Request]
    sampling: Any
    seed: int
    tolerance: float
    """Largest difference of log-probabilities, in nats."""

    def sample(
        self, requests: Sequence[Request] | None = None, *, seed: int | None = None, **changes: Any
    ) -> Rollouts:
        """The case's samples, or those of other requests, another seed or changed sampling
        options."""
        sampling = replace(self.sampling, **changes)
        return self.generate(
            requests or self.requests, sampling, seed=self.seed if seed is None else seed
        )

    def require_close(self, rollouts: Rollouts, a: Tensor, b: Tensor, problem: str) -> None:
        """Equal log-probabilities [B, T] where the mask of the rollouts is True."""
        apart = (a.double() - b.double())[rollouts.mask].abs()
        worst = float(apart.max()) if apart.numel() else 0.0
        if not worst <= self.tolerance:  # and not >: NaN is larger than no tolerance
            raise ContractError(f"""{problem} ({worst:.3g} nats apart at most, where
                tolerance={self.tolerance:g} is allowed).""")


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
    for mixin in vars(protocols).values():
        if not getattr(mixin, "__name__", "").endswith("Mixin") or mixin.__base__ is not object:
            continue
        own = [name for name in vars(mixin) if not name.startswith("_") and hasattr(policy, name)]
        if own and not isinstance(policy, mixin):
            raise ContractError(f"""{kind} defines {own[0]}, which is only called of a
                gruppo.protocols.{mixin.__name__}; add the class to its bases.""")
    if not isinstance(module, nn.Module):
        raise ContractError(f"""policy.module is a {type(module).__name__}; it needs to be the torch
            module that is trained.""")
    requests, sampling = as_requests(prompts), sampling or DEFAULT
    case = Case("policy.sample", policy.sample, requests, sampling, seed, tolerance)
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
    requests, sampling = as_requests(prompts), sampling or DEFAULT
    case = Case("engine.generate", engine.generate, requests, sampling, seed, tolerance)
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
            problem = f"""after sync(policy, {version}) the engine's sampler_logprobs are not the
                policy's log-probs. sync may return only once the sampler holds the new weights;
                log-probs are in nats, at the sampling temperature"""
            logprobs = _logprobs(policy, rollouts)
            case.require_close(rollouts, rollouts.sampler_logprobs, logprobs, problem)


def as_requests(inputs: Sequence[Any]) -> list[Request]:
    """Return a request for each prompt; anything else becomes the input of one."""
    prompts = [
        p if isinstance(p, Prompt) else Prompt(f"check-{n}", p, draw=n)
        for n, p in enumerate(inputs)
    ]
    if not prompts or len({(prompt.id, prompt.draw) for prompt in prompts}) < len(prompts):
        raise ContractError("""there are no prompts to check with, or two have one id and draw, so
            they are one group; give two or more, of unequal length.""")
    return [Request(prompt, SIZES[n % len(SIZES)]) for n, prompt in enumerate(prompts)]


def _check_record(case: Case, rollouts: Rollouts) -> None:
    """The fields agree with each other and with the requests."""
    who, rows = case.who, sum(request.size for request in case.requests)
    if not isinstance(rollouts, Rollouts):
        raise ContractError(
            f"{who} returned a {type(rollouts).__name__}; it needs gruppo.types.Rollouts."
        )
    columns = rollouts.actions.shape[1]
    for name in ("group_ids", "lengths", "temperature", *COLUMN_FIELDS):
        needed = [rows, columns] if name in COLUMN_FIELDS else [rows]
        shape = list(getattr(rollouts, name).shape)
        # actions may have event dimensions: [B, T, *E]
        if (shape[:2] if name == "actions" else shape) != needed:
            raise ContractError(
                f"{who}: {name} has the shape {shape}; {rows} samples need {needed}."
            )
    counts = rollouts.group_ids.bincount(minlength=len(rollouts.prompts)).tolist()
    groups = [(p.id, p.draw, count) for p, count in zip(rollouts.prompts, counts, strict=False)]
    requested = [(r.prompt.id, r.prompt.draw, r.size) for r in case.requests]
    # an integer mask would select rows by number; its dtype is checked below
    mask, logprobs = rollouts.mask.bool(), rollouts.sampler_logprobs
    # A density may exceed 1; a probability, by rounding only.
    highest = float("inf") if rollouts.actions.is_floating_point() else 1e-4
    chosen, temperature = logprobs[mask], case.sampling.temperature
    is_beyond = torch.arange(columns) >= rollouts.lengths[:, None]
    problems = {
        f"{len(rollouts.completions)} completions and {len(rollouts.finish)} finish for {rows} "
        f"samples": not len(rollouts.completions) == len(rollouts.finish) == rows,
        f"""the samples of each prompt (id, draw, count) are {groups}; {requested} were requested.
            Each prompt needs one entry in prompts, and the group_ids of its rows point to it""": (
            sorted(groups) != sorted(requested)
        ),
        f"mask is {rollouts.mask.dtype}; it needs torch.bool": rollouts.mask.dtype != torch.bool,
        "mask is True at or beyond lengths, where no action is": (mask & is_beyond).any(),
        """sampler_logprobs needs finite nats where mask is True (at most 0 for discrete actions)
            and 0 elsewhere""": (
            not chosen.isfinite().all() or (chosen > highest).any() or logprobs[~mask].any()
        ),
        f"temperature is {rollouts.temperature.tolist()}, but {temperature} was requested": (
            (rollouts.temperature - temperature).abs().max() > 1e-5
        ),
        "chose no action at all; check the prompts, and max_actions": not mask.any(),
        f"finish holds {set(rollouts.finish)}; it needs {get_args(Finish)}": (
            not {*rollouts.finish} <= {*get_args(Finish)}
        ),
    }
    for problem, is_found in problems.items():
        if is_found:
            raise ContractError(f"{who}: {problem}.")


def check_sampling(case: Case) -> Rollouts:
    """The case's rollouts, after all checks of sampling: each depends on (seed, prompt.draw, sample
    number) alone."""
    who, requests, seed, rollouts = case.who, case.requests, case.seed, case.sample()
    _check_record(case, rollouts)
    without_target = [
        replace(request, prompt=replace(request.prompt, target=None)) for request in requests
    ]
    if not same_rows(rollouts, case.sample()):
        raise ContractError(f"""{who} gave other actions for the same seed; draw with
            seeds.uniforms_at(seed, draw, sample, n).""")
    # A model that is certain of every action gives the same for all seeds.
    is_deterministic = bool((rollouts.sampler_logprobs[rollouts.mask].abs() < 1e-3).all())
    if not is_deterministic and same_rows(rollouts, case.sample(seed=seed + 1)):
        raise ContractError(f"""{who} gave the same actions for the seeds {seed} and {seed + 1}; the
            seed needs to reach the draw.""")
    if not same_rows(rollouts, case.sample(without_target)):
        raise ContractError(f"""{who} gave other actions for prompts without their target; it is for
            rewards, never read in sampling.""")
    one_by_one = [
        case.sample([replace(r, size=1, first=i)]) for r in requests for i in range(r.size)
    ]
    others = {
        "in another order": case.sample(requests[::-1]),
        "without the others": case.sample(requests[-1:]),
        "one sample at a time, numbered by Request.first": Rollouts.cat(one_by_one),
    }
    for how, other in others.items():
        if (share := share_alike(rollouts, other)) < MIN_SHARE:
            raise ContractError(f"""{who}: only {share:.0%} of the rows start alike when prompts are
                sampled {how}. A sample may depend on (seed, prompt.draw, sample number) alone: draw
                with seeds.uniforms_at, counting from request.first.""")
    return rollouts


def same_rows(a: Rollouts, b: Rollouts) -> bool:
    return torch.equal(a.mask, b.mask) and torch.equal(a.actions, b.actions)


def share_alike(a: Rollouts, b: Rollouts) -> float:
    """Return the share of the rows of ``b`` whose first action is that of the same sample in
    ``a``.

    First actions alone: after one that rounding turned over, the rest of a row is another.
    """
    firsts, others = (_first_actions(rollouts) for rollouts in (a, b))
    same = [
        torch.allclose(firsts[key], x, rtol=1e-2, atol=1e-2)
        for key, x in others.items()
        if key in firsts
    ]
    return sum(same) / max(len(b), 1)


def _first_actions(rollouts: Rollouts) -> dict[tuple[str, int, int], Tensor]:
    """Return the first action of each sample, by prompt, draw and number."""
    firsts = {}
    for group, prompt in enumerate(rollouts.prompts):
        own = rollouts.actions[rollouts.group_ids == group]
        for number, actions in enumerate(own):
            firsts[prompt.id, prompt.draw, number] = actions[0].double()
    return firsts


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
            often = micro_batch.rows.bincount(minlength=len(rollouts))
            covered[:, micro_batch.cols] += often[:, None]
        kept = covered[rollouts.mask]
        if not (kept == 1).all():
            raise ContractError(f"""policy.micro_batches with a budget of {budget} leaves out
                {int((kept == 0).sum())} of {len(kept)} kept actions and repeats
                {int((kept > 1).sum())}; each needs to be in exactly one micro-batch.""")
        logprobs = policy.likelihood(rollouts, micro_batches[0]).logprobs
        needed = micro_batches[0].of(rollouts.mask).shape
        if logprobs.shape != needed:
            raise ContractError(f"""policy.likelihood gave log-probs of the shape
                {tuple(logprobs.shape)} for a micro-batch of the shape {tuple(needed)}.""")
    if logprobs.requires_grad:
        logprobs.sum().backward()
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
        problem = f"""policy.likelihood of its own samples ({how}) is not their sampler_logprobs.
            Both need the logits from just before the action, divided by the temperature and cut to
            top-k and top-p; what cannot be evaluated is refused with a GruppoError"""
        case.require_close(rollouts, rollouts.sampler_logprobs, evaluated, problem)


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
    for cause, other in others.items():
        problem = f"""log-probs depend on {cause}. Keep padding out of attention, and out of the
            positions"""
        case.require_close(rollouts, expected, other, problem)


def _check_module_state(policy: Policy, case: Case, rollouts: Rollouts) -> None:
    """Dropout is off whatever the module's mode is, and every copy of the weights follows an
    in-place change."""
    advice = "dropout is on. Call module.eval() before sampling and scoring"
    before = _logprobs(policy, rollouts)
    policy.module.train()
    problem = f"log-probs differ after module.train(): {advice}"
    case.require_close(rollouts, before, _logprobs(policy, rollouts), problem)
    policy.module.train()  # again: likelihood may have called eval()
    if (share := share_alike(rollouts, case.sample())) < MIN_SHARE:
        raise ContractError(
            f"{share:.0%} of the samples start alike after module.train(): {advice}."
        )
    policy.module.eval()
    before = _logprobs(policy, rollouts)
    _perturb(policy.module)
    if torch.equal(before[rollouts.mask], _logprobs(policy, rollouts)[rollouts.mask]):
        raise ContractError("""log-probs did not change when the weights of policy.module did: they
            are stale. Renew every copy of the weights before it is used.""")
    fresh = case.sample()
    problem = """after a change of the weights, samples and their evaluation are of different
        weights. Renew every copy of the weights before it is used"""
    case.require_close(fresh, fresh.sampler_logprobs, _logprobs(policy, fresh), problem)


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
