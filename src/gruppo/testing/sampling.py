"""Well-formed rollouts whose randomness hangs on their address alone: the promise of policies and of engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch

from gruppo.testing.shared import Case, require, same_actions, share_alike, what
from gruppo.types import Finish, Rollouts

ALIKE = 0.75
"""Share of rows whose first action must agree where only rounding differs: in bfloat16 it may turn a draw over."""


def check_sampling(case: Case) -> Rollouts:
    """The case's rollouts, which keep every promise of sampling."""
    rollouts = case.sample()
    check_record(case, rollouts)
    _check_seeds(case, rollouts)
    _check_addresses(case, rollouts)
    return rollouts


def check_record(case: Case, rollouts: Any) -> None:
    """The fields agree with each other and with what was asked for."""
    require(isinstance(rollouts, Rollouts), f"{case.who} returned {what(rollouts)}; it needs gruppo.types.Rollouts.")
    _check_shapes(case, rollouts)
    _check_groups(case, rollouts)
    _check_values(case, rollouts)


def _check_shapes(case: Case, rollouts: Rollouts) -> None:
    rows, columns = sum(request.size for request in case.requests), rollouts.actions.shape[1]
    for name in ("group_ids", "lengths", "temperature"):
        got = tuple(getattr(rollouts, name).shape)
        require(got == (rows,), f"{case.who}: {name} has the shape {got}; {rows} samples need [{rows}].")
    for name in ("actions", "mask", "sampler_logprobs", "policy_version"):
        got = tuple(getattr(rollouts, name).shape[:2])
        need = f"{rows} samples of {columns} actions need [{rows}, {columns}]"
        require(got == (rows, columns), f"{case.who}: {name} has the shape {got}; {need}.")
    for name in ("completions", "finish"):
        count = len(getattr(rollouts, name))
        require(count == rows, f"{case.who}: {count} {name} for {rows} samples; it needs one for each.")


def _check_groups(case: Case, rollouts: Rollouts) -> None:
    got = [(p.id, p.draw, int((rollouts.group_ids == n).sum())) for n, p in enumerate(rollouts.prompts)]
    need = [(r.prompt.id, r.prompt.draw, r.size) for r in case.requests]
    require(
        sorted(got) == sorted(need),
        f"{case.who}: the samples of each prompt (id, draw, count) are {got}; {need} were asked for. Each prompt needs "
        "one entry in prompts, and the group_ids of its rows point to it.",
    )


def _check_values(case: Case, rollouts: Rollouts) -> None:
    require(rollouts.mask.dtype == torch.bool, f"{case.who}: mask is {rollouts.mask.dtype}; it needs torch.bool.")
    exists = torch.arange(rollouts.mask.shape[1]) < rollouts.lengths[:, None]
    require(
        not bool((rollouts.mask & ~exists).any()),
        f"{case.who}: mask is True at or beyond lengths, where no action is. Make both from the number of actions.",
    )
    chosen, others = rollouts.sampler_logprobs[rollouts.mask], rollouts.sampler_logprobs[~rollouts.mask]
    highest = float("inf") if rollouts.actions.is_floating_point() else 1e-4
    require(
        bool(chosen.isfinite().all()) and bool((chosen <= highest).all()) and not bool(others.any()),
        f"{case.who}: sampler_logprobs needs finite nats where mask is True (at most 0 for discrete actions) and 0 "
        "elsewhere.",
    )
    wanted = torch.full(rollouts.temperature.shape, float(case.sampling.temperature))
    require(
        torch.allclose(rollouts.temperature.cpu().float(), wanted),
        f"{case.who}: temperature is {rollouts.temperature.tolist()}, but {case.sampling.temperature} was asked for.",
    )
    require(bool(rollouts.mask.any()), f"{case.who} chose no action at all; check the prompts, and max_actions.")
    strange, known = set(rollouts.finish) - set(get_args(Finish)), ", ".join(map(repr, get_args(Finish)))
    require(not strange, f"{case.who}: finish holds {strange}; it needs to be one of {known}.")


def _check_seeds(case: Case, rollouts: Rollouts) -> None:
    require(
        same_actions(rollouts, case.sample()),
        f"{case.who} gave other actions for the same seed; draw with seeds.uniforms_at(seed, draw, sample, n).",
    )
    is_certain = bool((rollouts.sampler_logprobs[rollouts.mask].abs() < 1e-3).all())
    require(
        is_certain or not same_actions(rollouts, case.sample(seed=case.seed + 1)),
        f"{case.who} gave the same actions for the seeds {case.seed} and {case.seed + 1}; the seed needs to reach the "
        "draw.",
    )


def _check_addresses(case: Case, rollouts: Rollouts) -> None:
    requests = case.requests
    blind = [replace(request, prompt=replace(request.prompt, target=None)) for request in requests]
    require(
        same_actions(rollouts, case.sample(blind)),
        f"{case.who} gave other actions for prompts without their target; it is for rewards, never read in sampling.",
    )
    one_by_one = [case.sample([replace(r, size=1, first=i)]) for r in requests for i in range(r.size)]
    others = {
        "in another order": case.sample(requests[::-1]),
        "without the others": case.sample(requests[-1:]),
        "one sample at a time, numbered by Request.first": Rollouts.cat(one_by_one),
    }
    for how, other in others.items():
        share = share_alike(rollouts, other)
        require(
            share >= ALIKE,
            f"{case.who}: only {share:.0%} of the rows start alike when prompts are sampled {how}. A sample may depend "
            "on (seed, prompt.draw, sample number) alone: draw with seeds.uniforms_at, counting from request.first.",
        )
