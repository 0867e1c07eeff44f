"""How a batch is cut: into minibatches, and of those the rows that need a forward; and what is asked of a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo import dist
from gruppo.policies.critic import check_values
from gruppo.seeds import generator_at
from gruppo.training.memory import in_pieces
from gruppo.training.run import Knobs, Run
from gruppo.types import Batch, Likelihood, Piece, Rollouts, Want


def minibatches(run: Run, batch: Batch, knobs: Knobs) -> Iterator[Batch]:
    """The batch cut into ``minibatches`` parts, in a new order each epoch."""
    for epoch in range(run.config.optim.epochs):
        for rows in minibatch_rows(run, len(batch.rewards), knobs, epoch):
            yield _part(batch, rows)


def minibatch_rows(run: Run, count: int, knobs: Knobs, epoch: int) -> Iterator[Int[Tensor, "b"]]:
    """This rank's rows of each minibatch of an epoch.

    The cut is made over the rows of all ranks, numbered as one rank would hold them, so that the number of ranks
    changes no minibatch. A rank may have no row in one.
    """
    own = torch.arange(count)
    if run.config.optim.minibatches == 1:
        yield own
        return
    place = own // knobs.group_size * dist.world() + dist.rank()  # of the row's prompt
    rows = place * knobs.group_size + own % knobs.group_size
    generator = generator_at(run.config.seed, "minibatches", run.step, epoch)
    order = torch.randperm(run.config.rollout.prompts * knobs.group_size, generator=generator)
    for part in order.tensor_split(run.config.optim.minibatches):
        yield torch.isin(rows, part).nonzero()[:, 0]


def _part(batch: Batch, rows: Int[Tensor, "b"]) -> Batch:
    return batch if len(rows) == len(batch.rewards) else batch.take(rows)


def has_gradient(run: Run, batch: Batch, knobs: Knobs) -> Bool[Tensor, "B T"]:
    """Kept actions of rows that can move the weights: those without an advantage cannot, where nothing else pulls.

    They stay in the weights' denominator, so that leaving out their forward changes no gradient. A minibatch without
    any such row takes no optimiser step at all: AdamW's momentum and weight decay, which a gradient of zero would let
    go on, rest as well. Where advantages are made from log-probs or values, all rows were evaluated for that; the same
    pieces then serve the update, whose first ratio would not be 1 otherwise.
    """
    if knobs.kl_coef or knobs.entropy_coef or run.critic is not None:
        return batch.keep
    return batch.keep & (batch.advantages != 0).any(dim=1, keepdim=True)


def wanted(run: Run, knobs: Knobs, *, with_stats: bool = True) -> Want:
    """What a forward gives beside log-probs; ``with_stats``, the entropy also where nothing but a metric needs it.

    The entropy with a gradient is asked for before the updates too: the log-probs beside it round otherwise than those
    of the faster way, and the first ratio would not be 1. The entropy as a number changes no bit of them.
    """
    entropy: Want = ("entropy",) if knobs.entropy_coef else ("entropy_value",) if with_stats else ()
    return (*entropy, "values") if run.critic is not None and run.critic.is_shared else entropy


def likelihood_of(run: Run, rollouts: Rollouts, piece: Piece, *, want: Want) -> Likelihood:
    """The policy's likelihood; its values are one of each action."""
    likelihood = run.policy.likelihood(rollouts, piece, want=want)
    if "values" in want:
        assert likelihood.values is not None
        check_values(likelihood.values, piece)
    return likelihood


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """No gradient reaches the weights through a forward that is made within."""
    resting = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in resting:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in resting:
            parameter.requires_grad_(True)


@torch.no_grad()
def evaluated(run: Run, batch: Batch, knobs: Knobs) -> Batch:
    """The batch with what policy, reference and critic say of it before any update, as far as it is needed then.

    They come from the very pieces that the first epoch's updates use: in bfloat16 another cut rounds otherwise, and
    the first ratio would not be 1 (after memory has run out in an update, it is not). Rows without a gradient have
    none, and are asked for none.
    """
    stored = {name: torch.zeros(batch.keep.shape) for name in _needed(run, knobs)}
    with dist.together():
        for rows in minibatch_rows(run, len(batch.rewards), knobs, epoch=0):
            part = _part(batch, rows)
            assert part.rollouts is not None
            ask = partial(_said_of, run, knobs, part.rollouts)
            for piece, said in in_pieces(run, part.rollouts, has_gradient(run, part, knobs), ask):
                place = (rows[piece.rows][:, None], torch.arange(piece.cols.start or 0, piece.cols.stop)[None])
                for name, numbers in stored.items():
                    numbers[place] = said[name].float().cpu()
    old, ref, values = map(stored.get, ("old_logprobs", "ref", "old_values"))
    return replace(batch, old_logprobs=old, ref=None if ref is None else Likelihood(ref), old_values=values)


def has_kl_in_reward(run: Run, knobs: Knobs) -> bool:
    return run.config.objective.kl_in == "reward" and knobs.kl_coef > 0


def _needed(run: Run, knobs: Knobs) -> list[str]:
    """Log-probs where advantages are made of them or several updates share them; else the update's own are the old."""
    names = ["old_logprobs"] if has_kl_in_reward(run, knobs) or run.config.updates_per_batch > 1 else []
    names += ["ref"] if names and run.reference is not None else []
    return names + (["old_values"] if run.critic is not None else [])


def _said_of(run: Run, knobs: Knobs, rollouts: Rollouts, pieces: list[Piece]) -> list[tuple[Piece, dict[str, Tensor]]]:
    return [(piece, _said(run, rollouts, piece, knobs)) for piece in pieces]


def _said(run: Run, rollouts: Rollouts, piece: Piece, knobs: Knobs) -> dict[str, Float[Tensor, "b t"]]:
    """Of one piece, what is needed; the values of a shared critic from the policy's forward, where there is one."""
    said, needed = {}, _needed(run, knobs)
    if "old_logprobs" in needed:
        likelihood = likelihood_of(run, rollouts, piece, want=wanted(run, knobs, with_stats=False))
        said["old_logprobs"] = likelihood.logprobs
        if likelihood.values is not None:
            said["old_values"] = likelihood.values
    if "ref" in needed and run.reference is not None:
        said["ref"] = run.reference.likelihood(rollouts, piece).logprobs
    if run.critic is not None and "old_values" not in said:
        said["old_values"] = run.critic.values(rollouts, piece)
    return said
