"""How a batch is cut: into minibatches, and of those the rows that need a forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo import dist
from gruppo.seeds import generator_at
from gruppo.training.run import Knobs, Run
from gruppo.types import Batch, Critic, Likelihood, Piece, Rollouts, Want


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


def wanted(run: Run, knobs: Knobs) -> Want:
    """What an update's forward gives beside log-probs."""
    entropy = "entropy" if knobs.entropy_coef else "entropy_value"
    return (entropy, "values") if run.critic is not None and run.critic.is_shared else (entropy,)


@torch.no_grad()
def evaluated(run: Run, batch: Batch, knobs: Knobs) -> Batch:
    """The batch with what policy, reference and critic say of it before any update.

    They come from the very pieces that the first epoch's updates use: in bfloat16 another cut rounds otherwise, and
    the first ratio would not be 1. Rows without a gradient have none, and are asked for none.
    """
    old, ref, values = (torch.zeros(batch.keep.shape) for _ in range(3))
    for rows in minibatch_rows(run, len(batch.rewards), knobs, epoch=0):
        part = _part(batch, rows)
        assert part.rollouts is not None
        for piece in run.policy.pieces(part.rollouts, has_gradient(run, part, knobs), run.config.optim.token_budget):
            place = (rows[piece.rows][:, None], torch.arange(piece.cols.start or 0, piece.cols.stop)[None])
            likelihood = run.policy.likelihood(part.rollouts, piece, want=wanted(run, knobs))
            old[place] = likelihood.logprobs.float().cpu()
            if run.reference is not None:
                ref[place] = run.reference.likelihood(part.rollouts, piece).logprobs.float().cpu()
            if run.critic is not None:
                values[place] = _values(run.critic, part.rollouts, piece, likelihood).float().cpu()
    return replace(
        batch,
        old_logprobs=old,
        ref=None if run.reference is None else Likelihood(ref),
        old_values=None if run.critic is None else values,
    )


def _values(critic: Critic, rollouts: Rollouts, piece: Piece, likelihood: Likelihood) -> Float[Tensor, "b t"]:
    values = likelihood.values if critic.is_shared else critic.values(rollouts, piece)
    assert values is not None
    return values
