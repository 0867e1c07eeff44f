"""The sampling contract of policies and engines: well-formed rollouts, random by their address
alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.types import Finish, GruppoError, Prompt, Request, Rollouts

SIZES = (3, 2)
"""Samples of every other prompt: groups may differ in size."""
MIN_SHARE = 0.75
"""Share of rows whose first action must agree where only rounding differs: in bfloat16 it may turn
a draw over."""


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

    def require_close(
        self,
        a: Float[Tensor, "B T"],
        b: Float[Tensor, "B T"],
        mask: Tensor,
        problem: str,
        advice: str,
    ) -> None:
        """Equal log-probabilities where mask is True."""
        apart = (a.double() - b.double())[mask].abs()
        worst = float(apart.max()) if apart.numel() else 0.0
        if not worst <= self.tolerance:  # and not >: NaN is larger than no tolerance
            raise ContractError(f"""{problem}: {worst:.3g} nats apart at most, where
                tolerance={self.tolerance:g} is allowed. {advice}""")


def as_requests(inputs: Sequence[Any]) -> list[Request]:
    """A request for each prompt; anything else becomes the input of one."""
    prompts = [
        p if isinstance(p, Prompt) else Prompt(f"check-{n}", p, draw=n)
        for n, p in enumerate(inputs)
    ]
    if not prompts:
        raise ContractError(
            "there are no prompts to check with; give two or more, of unequal length."
        )
    if len({(prompt.id, prompt.draw) for prompt in prompts}) < len(prompts):
        raise ContractError(
            "two of the prompts have one id and draw, so they are one group; number them."
        )
    return [Request(prompt, SIZES[n % len(SIZES)]) for n, prompt in enumerate(prompts)]


def _check_record(case: Case, rollouts: Rollouts) -> None:
    """The fields agree with each other and with the requests."""
    who, rows = case.who, sum(request.size for request in case.requests)
    if not isinstance(rollouts, Rollouts):
        raise ContractError(
            f"{who} returned a {type(rollouts).__name__}; it needs gruppo.types.Rollouts."
        )
    columns = rollouts.actions.shape[1]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("group_ids", "lengths", "temperature"), (rows,)
    )
    shapes |= dict.fromkeys(
        ("actions", "mask", "sampler_logprobs", "policy_version"), (rows, columns)
    )
    for name, needed in shapes.items():
        shape = tuple(getattr(rollouts, name).shape)
        # actions may have event dimensions: [B, T, *E]
        if (shape[:2] if name == "actions" else shape) != needed:
            raise ContractError(
                f"{who}: {name} has the shape {shape}; {rows} samples need {list(needed)}."
            )
    groups = [
        (p.id, p.draw, int((rollouts.group_ids == n).sum())) for n, p in enumerate(rollouts.prompts)
    ]
    requested = [(r.prompt.id, r.prompt.draw, r.size) for r in case.requests]
    # an integer mask would select rows by number; its dtype is checked below
    mask = rollouts.mask.bool()
    logprobs, temperature = rollouts.sampler_logprobs, rollouts.temperature
    # A density may exceed 1; a probability, by rounding only.
    highest = float("inf") if rollouts.actions.is_floating_point() else 1e-4
    chosen = logprobs[mask]
    expected = torch.full((rows,), float(case.sampling.temperature))
    problems = {
        f"{len(rollouts.completions)} completions for {rows} samples": len(rollouts.completions)
        != rows,
        f"{len(rollouts.finish)} finish for {rows} samples": len(rollouts.finish) != rows,
        f"""the samples of each prompt (id, draw, count) are {groups}; {requested} were requested.
            Each prompt needs one entry in prompts, and the group_ids of its rows point to it""": (
            sorted(groups) != sorted(requested)
        ),
        f"mask is {rollouts.mask.dtype}; it needs torch.bool": rollouts.mask.dtype != torch.bool,
        "mask is True at or beyond lengths, where no action is": (
            mask & (torch.arange(columns) >= rollouts.lengths[:, None])
        ).any(),
        """sampler_logprobs needs finite nats where mask is True (at most 0 for discrete actions)
            and 0 elsewhere""": (
            not chosen.isfinite().all() or (chosen > highest).any() or logprobs[~mask].any()
        ),
        f"temperature is {temperature.tolist()}, but {case.sampling.temperature} was requested": (
            not torch.allclose(temperature.cpu().float(), expected)
        ),
        "chose no action at all; check the prompts, and max_actions": not mask.any(),
        f"finish holds { ({*rollouts.finish}) }; it needs {get_args(Finish)}": (
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
    """Share of the rows of ``b`` whose first action is that of the same sample in ``a``."""
    rows_of_a, rows_of_b = (
        {
            (p.id, p.draw): (r.group_ids == n).nonzero()[:, 0].tolist()
            for n, p in enumerate(r.prompts)
        }
        for r in (a, b)
    )
    pairs = [
        pair
        for key, rows in rows_of_b.items()
        for pair in zip(rows_of_a.get(key, ()), rows, strict=False)
    ]
    # First actions alone: after one that rounding turned over, the rest of a row is another text.
    firsts = ((a.actions[row, 0].double(), b.actions[other, 0].double()) for row, other in pairs)
    return sum(torch.allclose(x, y, rtol=1e-2, atol=1e-2) for x, y in firsts) / max(len(b), 1)
