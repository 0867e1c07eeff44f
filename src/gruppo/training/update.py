"""Learn: epochs, minibatches, pieces, losses, updates."""

from __future__ import annotations

import logging
import time

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo import dist
from gruppo.core.objective import LossInputs, policy_loss
from gruppo.core.weights import loss_total, loss_weights
from gruppo.training.minibatches import has_gradient, minibatches, wanted
from gruppo.training.run import Knobs, Run, flatten
from gruppo.types import Batch, Likelihood, NumericalStop, Piece, Stat

log = logging.getLogger("gruppo")

MAX_SKIPPED_UPDATES = 3
"""So many updates in a row with a gradient that is not finite end the run."""

_METRICS = {
    "ratio": ("mean:ratio/mean", "max:ratio/max"),
    "kl/old_nats": ("mean:kl/old_nats",),
    "kl/ref_nats": ("mean:kl/ref_nats",),
    "entropy/nats": ("mean:entropy/mean_nats",),
    "clip/high_frac": ("mean:clip/high_frac",),
    "clip/low_frac": ("mean:clip/low_frac",),
    "mismatch/nats": ("mean:mismatch/mean_nats", "max:mismatch/max_nats"),
    "loss/policy": ("sum:loss/policy",),
    "loss/kl": ("sum:loss/kl",),
    "grad/norm": ("mean:grad/norm",),
    "update/skipped": ("sum:update/skipped_count",),
    "update/pieces": ("sum:update/pieces_count",),
}


def learn(run: Run, batch: Batch, knobs: Knobs) -> dict[str, float]:
    """All updates of one batch."""
    began = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = knobs.lr
    stats: dict[str, Stat] = {}
    updates = 0
    for minibatch in minibatches(run, batch, knobs):
        updates += 1
        for name, stat in update(run, minibatch, knobs).items():
            stats[name] = stats.get(name, Stat()) + stat
    losses = {name: Stat(1, stat.sum / max(updates, 1)) for name, stat in stats.items() if name.startswith("loss/")}
    metrics = flatten(stats | losses, _METRICS)
    return metrics | {"optim/lr": knobs.lr, "time/update_s": time.perf_counter() - began}


def update(run: Run, batch: Batch, knobs: Knobs) -> dict[str, Stat]:
    """One optimiser step over one minibatch on all ranks."""
    run.optimizer.zero_grad(set_to_none=True)
    stats = backward(run, batch, knobs)
    dist.sum_gradients(run.parameters)
    stats = dist.merge_stats(stats)
    limit = run.config.optim.max_grad_norm or float("inf")
    norm = float(torch.nn.utils.clip_grad_norm_(run.parameters, limit)) if stats["ratio"].count else 0.0
    finite = norm == norm and norm != float("inf")
    stats["grad/norm"] = Stat(1, norm)
    stats["update/skipped"] = Stat(1, 0.0 if finite else 1.0)
    if not finite:
        _count_skip(run, norm)
    elif stats["ratio"].count:
        run.skipped_updates = 0
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return stats


def backward(run: Run, batch: Batch, knobs: Knobs) -> dict[str, Stat]:
    """Gradients of the whole minibatch, piece by piece; this rank's statistics.

    The weights are those of the whole minibatch over all ranks, so that the pieces' losses add up to one loss.
    """
    objective, rollouts = run.config.objective, batch.rollouts
    assert rollouts is not None
    total = dist.all_sum(loss_total(batch.keep, average=objective.average, max_length=knobs.sampling.max_actions))
    weights = loss_weights(batch.keep, average=objective.average, total=total)
    stats = {name: Stat() for name in _stat_names(run)}
    for piece in run.policy.pieces(rollouts, has_gradient(batch, knobs), run.config.optim.token_budget):
        likelihood = run.policy.likelihood(rollouts, piece, want=wanted(knobs))
        inputs = loss_inputs(run, batch, piece, weights, likelihood)
        terms, piece_stats = policy_loss(likelihood, inputs, objective)
        loss = terms["policy"]
        if knobs.entropy_coef:
            loss = loss - knobs.entropy_coef * terms["entropy"]
        if "kl" in terms:
            loss = loss + knobs.kl_coef * terms["kl"]
        loss.backward()
        piece_stats |= {f"loss/{name}": Stat.of(term) for name, term in terms.items() if name != "entropy"}
        piece_stats["update/pieces"] = Stat(1, 1.0)
        piece_stats["mismatch/nats"] = _mismatch(batch, piece, likelihood, inputs)
        for name, stat in piece_stats.items():
            stats[name] = stats[name] + stat
    return stats


def loss_inputs(
    run: Run, batch: Batch, piece: Piece, weights: Float[Tensor, "B T"], likelihood: Likelihood
) -> LossInputs:
    """The batch cut to the piece, on the policy's device."""
    device = likelihood.logprobs.device
    ref = None
    if run.reference is not None:
        assert batch.rollouts is not None
        stored = None if batch.ref is None else Likelihood(piece.of(batch.ref.logprobs).to(device))
        ref = stored or run.reference.likelihood(batch.rollouts, piece)
    return LossInputs(
        advantages=piece.of(batch.advantages).to(device),
        keep=piece.of(batch.keep).to(device),
        weights=piece.of(weights).to(device),
        old_logprobs=None if batch.old_logprobs is None else piece.of(batch.old_logprobs).to(device),
        ref=ref,
    )


def _stat_names(run: Run) -> list[str]:
    names = ["ratio", "kl/old_nats", "clip/high_frac", "clip/low_frac", "entropy/nats", "mismatch/nats"]
    names += ["loss/policy", "update/pieces"]
    return names if run.reference is None else [*names, "loss/kl", "kl/ref_nats"]


def _mismatch(batch: Batch, piece: Piece, likelihood: Likelihood, inputs: LossInputs) -> Stat:
    """|trainer's old log-prob - sampler's| of each kept action: the mean hides what the largest shows."""
    assert batch.rollouts is not None
    old = likelihood.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    return Stat.of((old - piece.of(batch.rollouts.sampler_logprobs).to(old.device)).abs(), inputs.keep)


def _count_skip(run: Run, norm: float) -> None:
    run.skipped_updates += 1
    log.warning("step %d: the gradient's norm is %s; this update was skipped.", run.step, norm)
    if run.skipped_updates >= MAX_SKIPPED_UPDATES:
        raise NumericalStop(
            f"step {run.step}: {MAX_SKIPPED_UPDATES} updates in a row had a gradient that is not finite; "
            "every save before this step is kept. Train again with a lower --optim.lr, or try --compute float32."
        )
