"""Learn: epochs, minibatches, micro-batches, losses, optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo import distributed as dist
from gruppo import types
from gruppo.core.loss import LossInputs, critic_loss, policy_loss
from gruppo.core.weights import Average, loss_total, loss_weights
from gruppo.distributed.sharding import clip_grad_norm, forward, is_sharded, is_unit
from gruppo.protocols import DemonstrationMixin, RestorationMixin, part
from gruppo.trainer.forward import (
    Part,
    active_actions,
    gaussian_outputs,
    in_micro_batches,
    likelihood_of,
    minibatches,
    required_outputs,
)
from gruppo.trainer.recorder import reduced
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.trainer.weight_change import EVERY, WeightChange, warn_if_lost
from gruppo.types import (
    GruppoError,
    Likelihood,
    MicroBatch,
    NumericalStop,
    Rollouts,
    Stat,
    TrainBatch,
    map_tensors,
)

log = logging.getLogger("gruppo")

MAX_SKIPPED_UPDATES = 3
"""Consecutive updates with a gradient that is not finite that end the run."""
LEARNED = ("ratio", "sup/loss_nats")
"""Statistics that count what a gradient comes from: sampled actions, tokens of demonstrations."""
_REDUCTIONS = {
    "ratio": "mean,max:ratio/{}",
    "entropy/nats": "mean:entropy/mean_nats",
    "correction/weight": "mean,min,max,ess_frac:correction/{}",
    "mismatch/nats": "mean,max:mismatch/{}_nats",
    "mismatch/lag_0_count": "count:mismatch/lag_0_count",
}
"""Metrics of a statistic (see ``reduced``), if not its mean, or the sum of a ``_count``."""


def learn(run: Run, batch: TrainBatch, step_params: StepParams) -> dict[str, float]:
    """Take all updates of one batch, or those before the policy has moved too far from the one that
    sampled it."""
    set_learning_rates(run, step_params)
    optim = run.config.optim
    counts = ("update/updates_count", "update/skipped_count", "update/micro_batches_count")
    stats = dict.fromkeys(counts, Stat())
    if batch.rollouts is not None:
        stats["loss/policy"] = Stat()
    epochs: list[dict[str, Stat]] = [{} for _ in range(optim.epochs)]
    tried = 0
    has_moved_far = False
    for minibatch in minibatches(run, batch):
        update_stats, has_moved_far = update(run, minibatch, step_params)
        _accumulate(stats, update_stats)
        _accumulate(epochs[tried // optim.minibatches], update_stats)
        tried += 1
        if has_moved_far:
            break
    warn_if_lost(run, stats.get("update/changed_frac", Stat()))
    for name in stats:
        if name.startswith("loss/"):
            # a loss is a weighted sum over its minibatch: the metric is the mean over minibatches
            stats[name] = Stat(1, stats[name].sum / tried)
    keyed = {}
    for name, stat in stats.items():
        default = "sum" if name.endswith("_count") else "mean"
        keyed[_REDUCTIONS.get(name, f"{default}:{name}")] = stat
    metrics = reduced(keyed, keep_empty=True)
    if optim.epochs > 1:
        for number, epoch_stats in enumerate(epochs, start=1):
            metrics |= epoch_metrics(number, epoch_stats)
    if optim.epochs > 1 or optim.stop_kl:
        # the minibatch that ended the batch took no update
        metrics["update/epochs_count"] = (tried - has_moved_far) / optim.minibatches
    if optim.stop_kl:
        metrics["update/early_stop_frac"] = float(has_moved_far)
    return metrics | {"optim/lr": step_params.lr}


def set_learning_rates(run: Run, step_params: StepParams) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = step_params.lr * group["lr_factor"]
        if group["is_critic"]:
            group["lr"] = step_params.critic_lr
        group["weight_decay"] = step_params.weight_decay  # AdamW multiplies it by the learning rate


def epoch_metrics(number: int, stats: Mapping[str, Stat]) -> dict[str, float]:
    """Return ``epoch/N/...`` of an epoch's minibatches, each before its update, the one that ended
    the batch included; none of an epoch that was not begun."""
    if "ratio" not in stats:
        return {}
    high, low = stats["clip/high_frac"], stats["clip/low_frac"]
    own = {
        "max:ratio_max": stats["ratio"],
        "mean:kl_old_k3_nats": stats["kl/old_k3_nats"],
        # no action is clipped on both sides
        "mean:clip_frac": Stat(high.count, high.sum + low.sum),
    }
    return {f"epoch/{number}/{name}": value for name, value in reduced(own).items()}


def update(run: Run, batch: TrainBatch, step_params: StepParams) -> tuple[dict[str, Stat], bool]:
    """Take one optimizer step over one minibatch on all ranks; return its statistics, and whether
    the policy has moved too far to take it.

    On a GPU nothing between the first forward and the step waits for the device, unless ``stop_kl``
    or several ranks need a number first: statistics are read behind the step.
    """
    run.optimizer.zero_grad(set_to_none=True)
    stats = backward(run, batch, step_params)
    has_learned = _reduce_gradients(run, stats)
    limit, has_moved_far = run.config.optim.stop_kl, False
    if limit:
        with dist.phase("early stop"):
            stats = dist.merge_stats(stats)
        # the same number on all ranks
        has_moved_far = stats.get("kl/old_k3_nats", Stat()).mean > limit
    # Networks whose gradient norms are limited apart: a separate critic must not shrink the
    # policy's gradient.
    networks: dict[str, list[nn.Parameter]] = {"norm": []}
    for group in run.optimizer.param_groups:
        networks.setdefault(group["norm"], []).extend(group["params"])
    step_stats: dict[str, Stat] = {}
    if not has_learned:
        step_stats = {f"grad/{name}": Stat(1, 0.0) for name in networks}
    elif not has_moved_far:
        step_stats = _step(run, networks)
    run.optimizer.zero_grad(set_to_none=True)
    if not limit:
        with dist.phase("statistics"):
            stats = dist.merge_stats(stats)
    return stats | step_stats, has_moved_far


def _reduce_gradients(run: Run, stats: Mapping[str, Stat]) -> bool:
    """Sum gradients over ranks; return whether any rank has learned from a row.

    What has a gradient on no rank keeps none, so that no momentum or decay moves it: the policy
    during the critic's warmup, an action's std while only demonstrations are learned from.
    """
    has_learned = any(stats[name].count or stats[name].pending for name in LEARNED if name in stats)
    has_gradient = [parameter.grad is not None for parameter in run.parameters]
    is_learned, *ranks = dist.all_sum(torch.tensor([has_learned, *has_gradient]).long()).tolist()
    learning = [p for p, count in zip(run.parameters, ranks, strict=True) if count]
    # FSDP has summed those of sharded parameters
    dist.sum_gradients(p for p in learning if not is_sharded(p))
    return bool(is_learned)


def _step(run: Run, networks: Mapping[str, list[nn.Parameter]]) -> dict[str, Stat]:
    """Clip each network's gradient and step; skip the update if a gradient is not finite."""
    limit = run.config.optim.max_grad_norm or float("inf")
    device = run.policy.device
    norms = {name: clip_grad_norm(own, limit) for name, own in networks.items()}
    change = WeightChange(run.optimizer) if run.state.step % EVERY == 0 else None
    # several ranks agree on a number before the step
    has_stepped = device.type not in types.AT_ONCE and dist.world_size() == 1
    if has_stepped:
        # AdamW itself leaves out a step whose gradient is not finite: what GradScaler sets, without
        # waiting to know
        queued = torch.stack([norm.to(device, non_blocking=True) for norm in norms.values()])
        vars(run.optimizer)["found_inf"] = (~queued.isfinite()).any().float()
        run.optimizer.step()
        del vars(run.optimizer)["found_inf"]
    stats = {f"grad/{name}": Stat(1, float(norm)) for name, norm in norms.items()}
    broken = [name for name in norms if not math.isfinite(stats[f"grad/{name}"].sum)]
    with dist.phase("non-finite gradients"):
        is_finite = not dist.all_max(len(broken))
    if not is_finite:
        _skip(run, broken)
        return stats | {"update/skipped_count": Stat(1, 1.0)}
    run.state.skipped_updates = 0
    if not has_stepped:
        run.optimizer.step()
    stats["update/updates_count"] = Stat(1, 1.0)
    if change is not None:
        changed = Stat.read({"update/changed_frac": change.stat()})
        # each rank of a sharded model has its shards
        stats |= dist.merge_stats(changed) if is_unit(run.policy.module) else changed
    return stats


def _skip(run: Run, broken: Sequence[str]) -> None:
    """Count an update that was not taken; end the run after several in a row."""
    run.state.skipped_updates += 1
    is_critic = "critic_norm" in broken and "norm" not in broken
    problem = f"step {run.state.step}: grad/{'critic_norm' if is_critic else 'norm'} is not finite"
    log.warning("%s; this update was skipped.", problem)
    if run.state.skipped_updates >= MAX_SKIPPED_UPDATES:
        option = "$critic.lr" if is_critic else "$optim.lr"
        raise NumericalStop(
            f"{problem}, {MAX_SKIPPED_UPDATES} updates in a row; every save before it is kept",
            advice=f"Train again with a lower {option}, or $compute float32",
        )


# --- gradients ------------------------------------------------------------------------------------


def backward(run: Run, batch: TrainBatch, step_params: StepParams) -> dict[str, Stat]:
    """Accumulate the gradients of the whole minibatch, micro-batch by micro-batch; return this
    rank's statistics.

    The weights are those of the whole minibatch over all ranks, so that the micro-batches' losses
    add up to one loss; each token of the demonstrations has the same weight.
    """
    parts: list[Part] = []
    rollouts, demos, longest = batch.rollouts, batch.demos, step_params.sampling.max_actions
    if rollouts is not None:
        average = run.config.objective.average
        weights = _weights(batch.loss_mask, average, longest, rollouts.group_ids)
        active = active_actions(run, batch.loss_mask, batch.advantages, step_params)
        work = partial(policy_backward, run, replace(batch, weights=weights), step_params)
        parts.append(Part(rollouts, active, work))
    if demos is not None:
        weights = _weights(demos.mask, "token", longest)
        # the consistency term belongs to what is sampled, if anything is
        params = step_params if rollouts is None else replace(step_params, cons_coef=0.0)
        work = partial(supervised_backward, run, demos, weights, params)
        parts.append(Part(demos, demos.mask, work))
    stats: dict[str, Stat] = {}
    for _, more in in_micro_batches(run, parts):
        _accumulate(stats, more | {"update/micro_batches_count": Stat(1, 1.0)})
    return stats


def _weights(
    loss_mask: Bool[Tensor, "B T"],
    average: Average,
    max_length: int,
    group_ids: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return the weights of this rank's actions in the minibatch of all ranks. A group is on one
    rank, so its actions are counted here."""
    total = loss_total(loss_mask, average=average, max_length=max_length, group_ids=group_ids)
    return loss_weights(loss_mask, average=average, total=dist.all_sum(total), group_ids=group_ids)


def _accumulate(stats: dict[str, Stat], more: Mapping[str, Stat]) -> None:
    """Add ``more`` to ``stats`` in place, name by name."""
    for name, stat in more.items():
        stats[name] = stats.get(name, Stat()) + stat


def policy_backward(
    run: Run, batch: TrainBatch, step_params: StepParams, micro_batch: MicroBatch
) -> dict[str, Stat]:
    """Accumulate the gradient of the sampled actions of a micro-batch; return its statistics."""
    rollouts, objective = batch.rollouts, run.config.objective
    assert rollouts is not None
    outputs = required_outputs(run, step_params)
    with frozen(run.policy.compute_module) if step_params.is_critic_alone else nullcontext():
        likelihood = likelihood_of(run.policy, rollouts, micro_batch, outputs=outputs)
    inputs = loss_inputs(run, batch, micro_batch, likelihood)
    terms, stats = policy_loss(likelihood, inputs, objective, run.own_surrogate)
    if step_params.cons_coef:
        terms["cons"] = consistency_term(run, rollouts, micro_batch, inputs.weights, likelihood)
    if not step_params.is_critic_alone or "value" in terms:
        # while the critic learns alone, the policy's part is a number without a gradient
        total_loss(terms, step_params).backward()
    if run.critic is not None and not run.critic.is_shared:
        # after the policy's, whose activations are gone by now
        values = run.critic.values(rollouts, micro_batch)
        terms["value"], stats["value/clip_frac"] = critic_loss(values, inputs, objective)
        (step_params.value_coef * terms["value"]).backward()
    terms.pop("entropy", None)  # a statistic already
    stats |= {f"loss/{name}": Stat.of(term) for name, term in terms.items()}

    # how far the sampler's log-probs are from the trainer's: the mean hides what the largest shows
    device = likelihood.logprobs.device
    old = likelihood.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    sampler = micro_batch.of(rollouts.sampler_logprobs).to(device, non_blocking=True)
    mismatch = (old - sampler).abs()
    stats["mismatch/nats"] = Stat.of(mismatch, inputs.loss_mask)
    if run.config.engine.lag:  # that of older weights contains what was learned since
        is_newest = micro_batch.of(rollouts.policy_version) == run.state.version
        is_newest = is_newest.to(device, non_blocking=True)
        newest = Stat.of(mismatch, inputs.loss_mask & is_newest)
        stats |= dict.fromkeys(("mismatch/lag_0_mean_nats", "mismatch/lag_0_count"), newest)
    return stats


def supervised_backward(
    run: Run,
    demos: Rollouts,
    weights: Float[Tensor, "B T"],
    step_params: StepParams,
    micro_batch: MicroBatch,
) -> dict[str, Stat]:
    """Accumulate the gradient of the demonstrations of a micro-batch; return its statistics."""
    policy = part(run.policy, DemonstrationMixin)
    likelihood = forward(run.policy.module, run.policy.likelihood, demos, micro_batch)
    loss = policy.supervised_loss(demos.take(micro_batch.rows), likelihood)  # [b, t]
    loss_mask = micro_batch.of(demos.mask).to(loss.device, non_blocking=True)
    own_weights = micro_batch.of(weights) * (not micro_batch.is_repeat)
    own_weights = own_weights.to(loss, non_blocking=True)
    terms = {"sup": (own_weights * torch.where(loss_mask, loss, 0)).sum()}
    if step_params.cons_coef:
        terms["cons"] = consistency_term(run, demos, micro_batch, own_weights, likelihood)
    total_loss(terms, step_params).backward()
    stats = {f"loss/{name}": Stat.of(term) for name, term in terms.items()}
    tokens = Stat(1, float(micro_batch.of(demos.mask).sum()))
    return stats | {"sup/loss_nats": Stat.of(loss, loss_mask), "sup/tokens_count": tokens}


def consistency_term(
    run: Run,
    rollouts: Rollouts,
    micro_batch: MicroBatch,
    weights: Float[Tensor, "b t"],
    likelihood: Likelihood,
) -> Float[Tensor, ""]:
    """Consistency loss, weighted and summed over the actions of a micro-batch; ``likelihood`` has
    its "output"."""
    ref = Likelihood(likelihood.logprobs.detach())
    if run.reference is not None and run.policy.modality.consistency_reads_reference(run.config):
        ref = run.reference.likelihood(rollouts, micro_batch, outputs=("output",))
    consistency_loss = part(run.policy, RestorationMixin).consistency_loss
    rows = rollouts.take(micro_batch.rows)
    # [b, T]; may call the module again
    loss = forward(run.policy.module, consistency_loss, rows, likelihood, ref)
    loss = loss[:, micro_batch.cols]  # [b, t]
    mask = micro_batch.of(rollouts.mask).to(loss.device)
    return (weights.to(loss) * torch.where(mask, loss, 0)).sum()


def total_loss(terms: Mapping[str, Tensor], step_params: StepParams) -> Tensor:
    """Add the terms of a loss, each with its coefficient; the entropy is maximized."""
    coefficients = {
        "policy": step_params.rl_coef,
        "entropy": -step_params.entropy_coef,
        "kl": step_params.kl_coef,
        "sup": step_params.sup_coef,
        "cons": step_params.cons_coef,
        "value": step_params.value_coef,
    }
    return sum((coefficients[name] * term for name, term in terms.items()), torch.zeros(()))


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Compute no gradient of the module's weights in forwards within."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def loss_inputs(
    run: Run, batch: TrainBatch, micro_batch: MicroBatch, likelihood: Likelihood
) -> LossInputs:
    """Cut the batch to the micro-batch, on the policy's device."""
    rollouts, objective, device = batch.rollouts, run.config.objective, likelihood.logprobs.device
    assert rollouts is not None
    if objective.needs_whole_rows:
        outside = batch.loss_mask[micro_batch.rows].sum() - micro_batch.of(batch.loss_mask).sum()
        if outside > 0:
            raise GruppoError(
                f"""this policy cuts rows into columns, and {int(outside)} kept actions of a
                    micro-batch's rows are in others; ratios and corrections of a sequence need
                    whole rows""",
                option="objective.ratio",
                advice="token and $objective.correction_level token",
            )

    def cut(x: Any) -> Any:  # of a tensor or a record, without waiting for the device
        return map_tensors(x, lambda own: micro_batch.of(own).to(device, non_blocking=True))

    ref = cut(batch.ref)
    if ref is None and run.reference is not None:
        ref = run.reference.likelihood(rollouts, micro_batch, outputs=gaussian_outputs(run))
    has_loss = not micro_batch.is_repeat
    return LossInputs(
        advantages=cut(batch.advantages),
        loss_mask=cut(batch.loss_mask) & has_loss,
        weights=cut(batch.weights) * has_loss,
        old_logprobs=cut(batch.old_logprobs),
        old_gaussian=cut(batch.old_gaussian),
        ref=ref,
        sampler_logprobs=cut(rollouts.sampler_logprobs) if objective.correction != "none" else None,
        old_values=cut(batch.old_values),
        returns=cut(batch.returns),
        dims=math.prod(rollouts.actions.shape[2:]),
    )
