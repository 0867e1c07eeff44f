"""Learn: epochs, minibatches, pieces, losses, updates."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo import dist
from gruppo.core.loss import LossInputs, critic_loss, policy_loss
from gruppo.core.weights import loss_total, loss_weights
from gruppo.training.memory import in_pieces
from gruppo.training.minibatches import at_rest, has_gradient, likelihood_of, minibatches, wanted
from gruppo.training.moved import EVERY, Moved, warn_if_still
from gruppo.training.run import Knobs, Run, flatten
from gruppo.types import Batch, GruppoError, Likelihood, NumericalStop, Piece, Stat

log = logging.getLogger("gruppo")

MAX_SKIPPED_UPDATES = 3
"""So many updates in a row with a gradient that is not finite end the run."""

_METRICS = {
    "ratio": ("mean:ratio/mean", "max:ratio/max"),
    "kl/old_nats": ("mean:kl/old_nats",),
    "kl/old_k3_nats": ("mean:kl/old_k3_nats",),
    "kl/ref_nats": ("mean:kl/ref_nats",),
    "entropy/nats": ("mean:entropy/mean_nats",),
    "clip/high_frac": ("mean:clip/high_frac",),
    "clip/low_frac": ("mean:clip/low_frac",),
    "correction/weight": ("mean:correction/mean", "min:correction/min", "max:correction/max"),
    "value/clip_frac": ("mean:value/clip_frac",),
    "mismatch/nats": ("mean:mismatch/mean_nats", "max:mismatch/max_nats"),
    "loss/policy": ("sum:loss/policy",),
    "loss/kl": ("sum:loss/kl",),
    "loss/value": ("sum:loss/value",),
    "grad/norm": ("mean:grad/norm",),
    "grad/critic_norm": ("mean:grad/critic_norm",),
    "update/taken": ("sum:update/updates_count",),
    "update/skipped": ("sum:update/skipped_count",),
    "update/changed": ("mean:update/changed_frac",),
    "update/pieces": ("sum:update/pieces_count",),
}


def learn(run: Run, batch: Batch, knobs: Knobs) -> dict[str, float]:
    """All updates of one batch, or those before the policy has moved too far."""
    began = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = knobs.lr * group["lr_scale"]
    stats = {"update/taken": Stat(), "update/skipped": Stat()}
    tried, has_moved_far = 0, False
    for minibatch in minibatches(run, batch, knobs):
        of_update, has_moved_far = update(run, minibatch, knobs)
        tried += 1
        for name, stat in of_update.items():
            stats[name] = stats.get(name, Stat()) + stat
        if has_moved_far:
            break
    losses = {name: Stat(1, stat.sum / tried) for name, stat in stats.items() if name.startswith("loss/")}
    metrics = flatten(stats | losses, _METRICS)
    if run.config.optim.stop_kl:
        metrics["update/early_stop_frac"] = float(has_moved_far)
    if "update/changed" in stats:
        warn_if_still(run, stats["update/changed"])
    return metrics | {"optim/lr": knobs.lr, "time/update_s": time.perf_counter() - began}


def update(run: Run, batch: Batch, knobs: Knobs) -> tuple[dict[str, Stat], bool]:
    """One optimiser step over one minibatch on all ranks; none where the policy has moved too far, which it says."""
    run.optimizer.zero_grad(set_to_none=True)
    stats = backward(run, batch, knobs)
    critic = run.critic.module.parameters() if run.critic is not None else ()
    dist.sum_gradients(critic if knobs.is_critic_alone else run.parameters)
    stats = dist.merge_stats(stats)
    limit = run.config.optim.stop_kl
    has_moved_far = limit > 0 and stats["kl/old_k3_nats"].mean > limit  # the same number on all ranks
    if not stats["ratio"].count:
        stats |= {f"grad/{name}": Stat(1, 0.0) for name in _networks(run)}
    elif not has_moved_far:
        stats |= _step(run)
    run.optimizer.zero_grad(set_to_none=True)
    return stats, has_moved_far


def _step(run: Run) -> dict[str, Stat]:
    """Clip what each network's gradient is, and step; leave it out where a gradient is not finite."""
    limit = run.config.optim.max_grad_norm or float("inf")
    norms = {n: float(torch.nn.utils.clip_grad_norm_(own, limit)) for n, own in _networks(run).items()}
    stats = {f"grad/{name}": Stat(1, norm) for name, norm in norms.items()}
    if not all(map(math.isfinite, norms.values())):
        _count_skip(run, norms)
        return stats | {"update/skipped": Stat(1, 1.0)}
    run.skipped_updates = 0
    before = Moved(run.optimizer) if run.step % EVERY == 0 else None
    run.optimizer.step()
    stats["update/taken"] = Stat(1, 1.0)
    return stats if before is None else stats | {"update/changed": before.stat()}


def _networks(run: Run) -> dict[str, list[torch.nn.Parameter]]:
    """What shares one limit on its norm: a critic of its own must not shrink the policy's gradient."""
    if run.critic is None or run.critic.is_shared:
        return {"norm": run.parameters}
    critic = list(run.critic.module.parameters())
    own = set(map(id, critic))
    return {"norm": [parameter for parameter in run.parameters if id(parameter) not in own], "critic_norm": critic}


def backward(run: Run, batch: Batch, knobs: Knobs) -> dict[str, Stat]:
    """Gradients of the whole minibatch, piece by piece; this rank's statistics.

    The weights are those of the whole minibatch over all ranks, so that the pieces' losses add up to one loss.
    """
    objective, rollouts = run.config.objective, batch.rollouts
    assert rollouts is not None
    total = dist.all_sum(loss_total(batch.keep, average=objective.average, max_length=knobs.sampling.max_actions))
    weights = loss_weights(batch.keep, average=objective.average, total=total)
    with dist.together():
        return in_pieces(run, rollouts, has_gradient(run, batch, knobs), partial(_backward, run, batch, knobs, weights))


def _backward(
    run: Run, batch: Batch, knobs: Knobs, weights: Float[Tensor, "B T"], pieces: list[Piece]
) -> dict[str, Stat]:
    """Gradients and statistics of these pieces; no rank asks another, so that each may begin again alone."""
    objective, rollouts = run.config.objective, batch.rollouts
    assert rollouts is not None
    stats = {name: Stat() for name in _stat_names(run)}
    for piece in pieces:
        with at_rest(run.policy.sampler) if knobs.is_critic_alone else nullcontext():
            likelihood = likelihood_of(run, rollouts, piece, want=wanted(run, knobs))
        inputs = loss_inputs(run, batch, piece, weights, likelihood)
        terms, piece_stats = policy_loss(likelihood, inputs, objective)
        if not knobs.is_critic_alone or "value" in terms:
            _loss(terms, knobs).backward()
        if run.critic is not None and not run.critic.is_shared:  # after the policy's, whose activations are gone by now
            values = run.critic.values(rollouts, piece)
            terms["value"], piece_stats["value/clip_frac"] = critic_loss(values, inputs, objective)
            (knobs.value_coef * terms["value"]).backward()
        piece_stats |= {f"loss/{name}": Stat.of(term) for name, term in terms.items() if name != "entropy"}
        piece_stats["update/pieces"] = Stat(1, 1.0)
        piece_stats["mismatch/nats"] = _mismatch(batch, piece, likelihood, inputs)
        for name, stat in piece_stats.items():
            stats[name] = stats[name] + stat
    return stats


def _loss(terms: Mapping[str, Tensor], knobs: Knobs) -> Tensor:
    """What is descended. While the critic learns alone, the policy's part is a number without a gradient."""
    loss = terms["policy"]
    if knobs.entropy_coef:
        loss = loss - knobs.entropy_coef * terms["entropy"]
    if "kl" in terms:
        loss = loss + knobs.kl_coef * terms["kl"]
    return loss + knobs.value_coef * terms["value"] if "value" in terms else loss


def loss_inputs(
    run: Run, batch: Batch, piece: Piece, weights: Float[Tensor, "B T"], likelihood: Likelihood
) -> LossInputs:
    """The batch cut to the piece, on the policy's device."""
    rollouts = batch.rollouts
    assert rollouts is not None
    _check_whole_rows(run, batch, piece)

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else piece.of(x).to(likelihood.logprobs.device)

    ref = None
    if run.reference is not None:
        stored = None if batch.ref is None else cut(batch.ref.logprobs)
        ref = run.reference.likelihood(rollouts, piece) if stored is None else Likelihood(stored)
    needs_sampler = run.config.objective.correction != "none"
    return LossInputs(
        advantages=piece.of(batch.advantages).to(likelihood.logprobs.device),
        keep=piece.of(batch.keep).to(likelihood.logprobs.device),
        weights=piece.of(weights).to(likelihood.logprobs.device),
        old_logprobs=cut(batch.old_logprobs),
        ref=ref,
        sampler_logprobs=cut(rollouts.sampler_logprobs) if needs_sampler else None,
        old_values=cut(batch.old_values),
        returns=cut(batch.returns),
        dims=math.prod(rollouts.actions.shape[2:]),
    )


def _check_whole_rows(run: Run, batch: Batch, piece: Piece) -> None:
    """Ratios and corrections of a row need all its actions in one piece."""
    if not run.config.objective.needs_whole_rows:
        return
    outside = batch.keep[piece.rows].sum() - piece.of(batch.keep).sum()
    if outside > 0:
        raise GruppoError(
            f"this policy cuts rows into columns, and {int(outside)} kept actions of a piece's rows are in others; "
            "ratios and corrections of a sequence need whole rows. Set --objective.ratio token and "
            "--objective.correction-level token."
        )


def _stat_names(run: Run) -> list[str]:
    names = ["ratio", "kl/old_nats", "kl/old_k3_nats", "clip/high_frac", "clip/low_frac", "entropy/nats"]
    names += ["mismatch/nats", "loss/policy", "update/pieces"]
    objective = run.config.objective
    names += ["correction/weight"] if objective.correction != "none" else []
    names += ["loss/value", "value/clip_frac"] if run.critic is not None else []
    if run.reference is not None:
        names += ["kl/ref_nats", *(["loss/kl"] if objective.kl_in == "loss" else [])]
    return names


def _mismatch(batch: Batch, piece: Piece, likelihood: Likelihood, inputs: LossInputs) -> Stat:
    """|trainer's old log-prob - sampler's| of each kept action: the mean hides what the largest shows."""
    assert batch.rollouts is not None
    old = likelihood.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    return Stat.of((old - piece.of(batch.rollouts.sampler_logprobs).to(old.device)).abs(), inputs.keep)


def _count_skip(run: Run, norms: Mapping[str, float]) -> None:
    run.skipped_updates += 1
    is_policy = not math.isfinite(norms["norm"])
    whose, option = ("policy", "--optim.lr") if is_policy else ("critic", "--critic.lr")
    norm = norms["norm" if is_policy else "critic_norm"]
    log.warning("step %d: the norm of the %s's gradient is %s; this update was skipped.", run.step, whose, norm)
    if run.skipped_updates >= MAX_SKIPPED_UPDATES:
        raise NumericalStop(
            f"step {run.step}: {MAX_SKIPPED_UPDATES} updates in a row had a gradient that is not finite, the last one "
            f"the {whose}'s; every save before this step is kept. Train again with a lower {option}, or try --compute "
            "float32."
        )
