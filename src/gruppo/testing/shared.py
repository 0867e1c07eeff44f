"""What the checks share: one case of sampling, comparison in nats, and a module that is put back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.protocols import Policy
from gruppo.types import GruppoError, Prompt, Request, Rollouts

SIZES = (3, 2)
"""Samples of every other prompt: groups may differ in size."""
ALL = 1 << 30
"""A budget that everything fits."""


class ContractError(GruppoError, AssertionError):
    """A part breaks its contract."""


@dataclass(frozen=True)
class Case:
    """Who is asked for what."""

    who: str
    generate: Callable[..., Rollouts]
    """(requests, sampling, seed=) to rollouts: of a policy or of an engine."""
    prompts: list[Prompt]
    sampling: Any
    seed: int
    tolerance: float
    """Largest difference of log-probabilities, in nats."""

    @property
    def requests(self) -> list[Request]:
        return [Request(prompt, SIZES[n % len(SIZES)]) for n, prompt in enumerate(self.prompts)]

    def sample(self, requests: Sequence[Request] | None = None, *, seed: int | None = None, **changes: Any) -> Rollouts:
        """The case's samples, or others."""
        sampling = replace(self.sampling, **changes)
        return self.generate(requests or self.requests, sampling, seed=self.seed if seed is None else seed)

    def require_close(
        self, a: Float[Tensor, "B T"], b: Float[Tensor, "B T"], mask: Tensor, what: str, mend: str
    ) -> None:
        """Equal log-probabilities where mask is True."""
        apart = (a.double() - b.double())[mask].abs()
        worst = float(apart.nan_to_num(nan=float("inf")).max()) if apart.numel() else 0.0
        wide = f"{worst:.3g} nats apart at most, where tolerance={self.tolerance:g} is allowed"
        require(worst <= self.tolerance, f"{what}: {wide}. {mend}")


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractError(otherwise)


def require_methods(part: Any, names: Sequence[str], kind: str) -> None:
    for name in names:
        wanted = f"it needs {', '.join(names)} (see gruppo.protocols)"
        require(callable(getattr(part, name, None)), f"the {kind}, {what(part)}, has no method {name}; {wanted}.")


def what(value: Any) -> str:
    return f"a {type(value).__name__}"


def as_prompts(prompts: Sequence[Any]) -> list[Prompt]:
    """Prompts as they are; anything else becomes the input of one."""
    asked = [p if isinstance(p, Prompt) else Prompt(f"check-{n}", p, draw=n) for n, p in enumerate(prompts)]
    require(bool(asked), "there are no prompts to check with; give two or more, of unequal length.")
    names = {(prompt.id, prompt.draw) for prompt in asked}
    require(len(names) == len(asked), "two of the prompts have one id and draw, so they are one group; number them.")
    return asked


@torch.no_grad()
def logprobs_of(policy: Policy, rollouts: Rollouts, budget: int = ALL) -> Float[Tensor, "B T"]:
    """The policy's evaluation, in float64 on the CPU; 0 where nothing was evaluated."""
    logprobs = torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    columns = torch.arange(logprobs.shape[1])
    for micro_batch in policy.micro_batches(rollouts, rollouts.mask, budget):
        place = (micro_batch.rows[:, None], columns[micro_batch.cols][None])
        logprobs[place] = policy.likelihood(rollouts, micro_batch).logprobs.double().cpu()
    return logprobs


def same_actions(a: Rollouts, b: Rollouts) -> bool:
    return a.actions.shape == b.actions.shape and torch.equal(a.mask, b.mask) and torch.equal(a.actions, b.actions)


def share_alike(a: Rollouts, b: Rollouts) -> float:
    """Share of the rows of ``b`` whose first action is that of the same sample in ``a``."""
    mine, same = _rows_by_prompt(a), []
    for key, rows in _rows_by_prompt(b).items():
        for row, other in zip(mine.get(key, []), rows, strict=False):
            first, second = a.actions[row, 0].double(), b.actions[other, 0].double()
            same.append(torch.allclose(first, second, rtol=1e-2, atol=1e-2))
    return sum(same) / max(len(b), 1)


def _rows_by_prompt(rollouts: Rollouts) -> dict[tuple[str, int], list[int]]:
    groups = [(prompt.id, prompt.draw) for prompt in rollouts.prompts]
    ids = rollouts.group_ids.tolist()
    return {key: [row for row, group in enumerate(ids) if group == n] for n, key in enumerate(groups)}


@torch.no_grad()
def disturb(module: nn.Module) -> None:
    """Move the weights, in place, by about a fifth of their size."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(noise * (0.2 * parameter.abs().mean() + 1e-3))


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """The module as it was before: weights, gradients, mode."""
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
