"""Learn: epochs, minibatches, micro-batches, losses, optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo import distributed as dist
from gruppo import types
from gruppo.config.schema import OptimConfig
from gruppo.core.loss import LossInputs, critic_loss, policy_loss
from gruppo.core.weights import Average, loss_total, loss_weights
from gruppo.distributed.sharding import clip_grad_norm, is_sharded, is_unit
from gruppo.trainer.demonstrations import consistency_term, supervised_backward
from gruppo.trainer.forward import (
    Part,
    active_actions,
    gaussian_outputs,
    in_micro_batches,
    likelihood_of,
    minibatches,
    required_outputs,
)
from gruppo.trainer.recorder import flatten
from gruppo.trainer.run import Run, trained
from gruppo.trainer.stages import StepParams
from gruppo.trainer.weight_change import EVERY, NORMS, WeightChange, warn_if_lost
from gruppo.types import (
    Gaussian,
    GruppoError,
    Likelihood,
    MicroBatch,
    NumericalStop,
    Stat,
    TrainBatch,
)

log = logging.getLogger("gruppo")

MAX_SKIPPED_UPDATES = 3
"""Consecutive updates with a gradient that is not finite that end the run."""
LEARNED = ("ratio", "sup/nats")
"""Statistics that count what a gradient comes from: sampled actions, tokens of demonstrations."""

_MEANS = (
    "kl/old_nats",
    "kl/old_k3_nats",
    "kl/ref_nats",
    "clip/high_frac",
    "clip/low_frac",
    "clip/kl_mask_frac",
    "value/clip_frac",
    *NORMS,
)
_LOSSES = ("loss/policy", "loss/kl", "loss/sup", "loss/cons", "loss/value")
_METRICS = {
    **{name: (f"mean:{name}",) for name in (*_MEANS, *_LOSSES)},
    "ratio": ("mean:ratio/mean", "max:ratio/max"),
    "entropy/nats": ("mean:entropy/mean_nats",),
    "correction/weight": tuple(
        f"{what}:correction/{what}" for what in ("mean", "min", "max", "ess_frac")
    ),
    "mismatch/nats": ("mean:mismatch/mean_nats", "max:mismatch/max_nats"),
    "mismatch/lag_0_nats": ("mean:mismatch/lag_0_mean_nats", "count:mismatch/lag_0_count"),
    "sup/nats": ("mean:sup/loss_nats",),
    "sup/tokens": ("sum:sup/tokens_count",),
    "update/taken": ("sum:update/updates_count",),
    "update/skipped": ("sum:update/skipped_count",),
    "update/changed": ("mean:update/changed_frac",),
    "update/micro_batches": ("sum:update/micro_batches_count",),
}
"""Metrics of the statistics of a batch's updates."""
_EPOCH_METRICS = {
    "ratio": ("mean:ratio_mean", "max:ratio_max"),
    "clip": ("mean:clip_frac",),
    "kl/old_nats": ("mean:kl_old_nats",),
    "kl/old_k3_nats": ("mean:kl_old_k3_nats",),
    "update/taken": ("sum:updates_count",),
}


def learn(run: Run, batch: TrainBatch, step_params: StepParams) -> dict[str, float]:
    """Take all updates of one batch, or those before the policy has moved too far from the one that
    sampled it."""
    set_learning_rates(run, step_params)
    optim = run.config.optim
    stats = dict.fromkeys(("update/taken", "update/skipped", "update/micro_batches"), Stat())
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
    warn_if_lost(run, stats.get("update/changed", Stat()))
    # a loss is a weighted sum over its minibatch: the metric is the mean over minibatches
    for name in stats.keys() & set(_LOSSES):
        stats[name] = Stat(1, stats[name].sum / tried)
    metrics = flatten(stats, _METRICS)
    metrics |= epoch_metrics(optim, epochs, tried - has_moved_far)
    if optim.stop_kl:
        metrics["update/early_stop_frac"] = float(has_moved_far)
    return metrics | {"optim/lr": step_params.lr}


def set_learning_rates(run: Run, step_params: StepParams) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = step_params.lr * group["lr_factor"]
        if group["is_critic"]:
            group["lr"] = step_params.critic_lr
        group["weight_decay"] = step_params.weight_decay  # AdamW multiplies it by the learning rate


def epoch_metrics(
    optim: OptimConfig, epochs: Sequence[Mapping[str, Stat]], done: int
) -> dict[str, float]:
    """Return ``epoch/N/...`` of each epoch that was begun, over its minibatches; none if there is
    only one epoch.

    ``epochs``: the statistics of each, empty if it was not begun. ``done``: minibatches before
    ``stop_kl`` ended the batch; the one that it stopped at was evaluated, so it is in its epoch's
    statistics, but took no update.
    """
    metrics: dict[str, float] = {}
    for number, stats in enumerate(epochs if optim.epochs > 1 else (), start=1):
        if not stats:
            break
        own = {"update/taken": Stat(), **stats}
        if "clip/high_frac" in stats:  # no action is clipped on both sides
            high, low = stats["clip/high_frac"], stats["clip/low_frac"]
            own["clip"] = Stat(high.count, high.sum + low.sum)
        for name, value in flatten(own, _EPOCH_METRICS).items():
            metrics[f"epoch/{number}/{name}"] = value
    if optim.epochs > 1 or optim.stop_kl:
        metrics["update/epochs_count"] = done / optim.minibatches
    return metrics


def update(run: Run, batch: TrainBatch, step_params: StepParams) -> tuple[dict[str, Stat], bool]:
    """Take one optimizer step over one minibatch on all ranks; return its statistics, and whether
    the policy has moved too far to take it.

    On a GPU nothing between the first forward and the step waits for the device, unless ``stop_kl``
    or several ranks need a number first: statistics are read behind the step.
    """
    run.optimizer.zero_grad(set_to_none=True)
    stats = backward(run, batch, step_params)
    has_learned = _reduce_gradients(run, stats, step_params)
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
    taken: dict[str, Stat] = {}
    if not has_learned:
        taken = {f"grad/{name}": Stat(1, 0.0) for name in networks}
    elif not has_moved_far:
        taken = _step(run, networks)
    run.optimizer.zero_grad(set_to_none=True)
    if not limit:
        with dist.phase("statistics"):
            stats = dist.merge_stats(stats)
    return stats | taken, has_moved_far


def _reduce_gradients(run: Run, stats: Mapping[str, Stat], step_params: StepParams) -> bool:
    """Sum gradients over ranks; return whether any rank has learned from a row."""
    has_learned = any(stats[name].count or stats[name].pending for name in LEARNED if name in stats)
    has_gradient = [parameter.grad is not None for parameter in run.parameters]
    is_learned, *ranks = dist.all_sum(torch.tensor([has_learned, *has_gradient]).long()).tolist()
    # FSDP has summed those of sharded parameters
    dist.sum_gradients(p for p in learning(run, step_params) if not is_sharded(p))
    for parameter, count in zip(run.parameters, ranks, strict=True):
        if not count:  # as an action's std while only demonstrations are learned from: no momentum
            parameter.grad = None  # or decay moves it
    return bool(is_learned)


def learning(run: Run, step_params: StepParams) -> list[nn.Parameter]:
    """Return parameters that may have a gradient on some rank; the others keep none, so that no
    momentum or decay moves them.

    The critic's alone during its warmup, and none of them while nothing is sampled.
    """
    policy = list(trained(run.policy.module, None).values())
    if step_params.is_critic_alone:
        return run.parameters[len(policy) :]
    return run.parameters if step_params.samples else policy


def _step(run: Run, networks: Mapping[str, list[nn.Parameter]]) -> dict[str, Stat]:
    """Clip each network's gradient and step; skip the update if a gradient is not finite."""
    limit = run.config.optim.max_grad_norm or float("inf")
    device = run.policy.device
    of_networks = {name: clip_grad_norm(own, limit) for name, own in networks.items()}
    change = WeightChange(run.optimizer) if run.state.step % EVERY == 0 else None
    # several ranks agree on a number before the step
    has_taken = device.type not in types.AT_ONCE and dist.world_size() == 1
    if has_taken:
        # AdamW itself leaves out a step whose gradient is not finite: what GradScaler sets, without
        # waiting to know
        norms = torch.stack([norm.to(device, non_blocking=True) for norm in of_networks.values()])
        vars(run.optimizer)["found_inf"] = (~norms.isfinite()).any().float()
        run.optimizer.step()
        del vars(run.optimizer)["found_inf"]
    stats = {f"grad/{name}": Stat(1, float(norm)) for name, norm in of_networks.items()}
    broken = [name for name in of_networks if not math.isfinite(stats[f"grad/{name}"].sum)]
    with dist.phase("non-finite gradients"):
        is_finite = not dist.all_max(len(broken))
    if not is_finite:
        _skip(run, broken)
        return stats | {"update/skipped": Stat(1, 1.0)}
    run.state.skipped_updates = 0
    if not has_taken:
        run.optimizer.step()
    stats["update/taken"] = Stat(1, 1.0)
    if change is not None:
        changed = Stat.read({"update/changed": change.stat()})
        # each rank of a sharded model has its shards
        stats |= dist.merge_stats(changed) if is_unit(run.policy.module) else changed
    return stats


def _skip(run: Run, broken: Sequence[str]) -> None:
    """Count an update that was not taken; end the run after several in a row."""
    run.state.skipped_updates += 1
    is_critic = "critic_norm" in broken and "norm" not in broken
    whose, option = ("critic", "$critic.lr") if is_critic else ("policy", "$optim.lr")
    step = run.state.step
    log.warning("step %d: the %s's gradient is not finite; this update was skipped.", step, whose)
    if run.state.skipped_updates >= MAX_SKIPPED_UPDATES:
        raise NumericalStop(
            f"""step {step}: {MAX_SKIPPED_UPDATES} updates in a row had a gradient that is not
                finite, the last one the {whose}'s; every save before this step is kept""",
            advice=f"Train again with a lower {option}, or $compute float32",
        )


def backward(run: Run, batch: TrainBatch, step_params: StepParams) -> dict[str, Stat]:
    """Accumulate the gradients of the whole minibatch, micro-batch by micro-batch; return this
    rank's statistics.

    The weights are those of the whole minibatch over all ranks, so that the micro-batches' losses
    add up to one loss; each token of the demonstrations counts alike.
    """
    parts: list[Part] = []
    terms: list[Callable[[list[MicroBatch]], dict[str, Stat]]] = []
    if batch.rollouts is not None:
        average = run.config.objective.average
        weights = _weights(batch.loss_mask, average, step_params, batch.rollouts.group_ids)
        active = active_actions(run, batch.loss_mask, batch.advantages, step_params)
        parts.append((batch.rollouts, active))
        terms.append(partial(_backward, run, batch, step_params, weights))
    if batch.demos is not None:
        weights = _weights(batch.demos.mask, "token", step_params)
        # the consistency term belongs to what is sampled, if anything is
        params = step_params if batch.rollouts is None else replace(step_params, cons_coef=0.0)
        parts.append((batch.demos, batch.demos.mask))
        terms.append(partial(supervised_backward, run, batch.demos, params, weights))

    def work(micro_batches: list[list[MicroBatch]]) -> dict[str, Stat]:
        stats: dict[str, Stat] = {}
        for term, own in zip(terms, micro_batches, strict=True):
            _accumulate(stats, term(own))
        return stats

    return in_micro_batches(run, parts, work)


def _weights(
    loss_mask: Bool[Tensor, "B T"],
    average: Average,
    step_params: StepParams,
    group_ids: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return the weights of this rank's actions in the minibatch of all ranks. A group is on one
    rank, so its actions are counted here."""
    total = loss_total(
        loss_mask, average=average, max_length=step_params.sampling.max_actions, group_ids=group_ids
    )
    return loss_weights(loss_mask, average=average, total=dist.all_sum(total), group_ids=group_ids)


def _accumulate(stats: dict[str, Stat], more: Mapping[str, Stat]) -> None:
    """Add ``more`` to ``stats`` in place, name by name."""
    for name, stat in more.items():
        stats[name] = stats.get(name, Stat()) + stat


def _backward(
    run: Run,
    batch: TrainBatch,
    step_params: StepParams,
    weights: Float[Tensor, "B T"],
    micro_batches: list[MicroBatch],
) -> dict[str, Stat]:
    """Accumulate gradients and statistics of these micro-batches; no collectives, so that each rank
    may begin again alone."""
    rollouts = batch.rollouts
    assert rollouts is not None
    stats: dict[str, Stat] = {}
    outputs = required_outputs(run, step_params)
    for micro_batch in micro_batches:
        with frozen(run.policy.compute_module) if step_params.is_critic_alone else nullcontext():
            likelihood = likelihood_of(run.policy, rollouts, micro_batch, outputs=outputs)
        inputs = loss_inputs(run, batch, micro_batch, weights, likelihood)
        if micro_batch.is_repeat:
            # not skipped: FSDP gathers and reduces in each forward and backward, which other ranks
            # wait for
            nothing = torch.zeros_like(inputs.weights)
            inputs = replace(inputs, weights=nothing, loss_mask=nothing.bool())
        objective = run.config.objective
        terms, more = policy_loss(likelihood, inputs, objective, run.own_surrogate)
        if step_params.cons_coef:
            terms["cons"] = consistency_term(run, rollouts, micro_batch, inputs.weights, likelihood)
        if not step_params.is_critic_alone or "value" in terms:
            # while the critic learns alone, the policy's part is a number without a gradient
            total_loss(terms, step_params).backward()
        if run.critic is not None and not run.critic.is_shared:
            # after the policy's, whose activations are gone by now
            values = run.critic.values(rollouts, micro_batch)
            terms["value"], more["value/clip_frac"] = critic_loss(values, inputs, objective)
            (step_params.value_coef * terms["value"]).backward()
        if micro_batch.is_repeat:
            continue
        for name, term in terms.items():
            if name != "entropy":
                more[f"loss/{name}"] = Stat.of(term)
        more["update/micro_batches"] = Stat(1, 1.0)
        more |= _mismatch(run, batch, micro_batch, likelihood, inputs)
        _accumulate(stats, more)
    return stats


def total_loss(terms: Mapping[str, Tensor], step_params: StepParams) -> Float[Tensor, ""]:
    """Add the terms of a loss, each with its coefficient; the entropy is maximized."""
    loss = terms["policy"]
    if step_params.rl_coef != 1:
        loss = step_params.rl_coef * loss
    if step_params.entropy_coef:
        loss = loss - step_params.entropy_coef * terms["entropy"]
    coefficients = {
        "kl": step_params.kl_coef,
        "cons": step_params.cons_coef,
        "value": step_params.value_coef,
    }
    for name, coefficient in coefficients.items():
        if name in terms:
            loss = loss + coefficient * terms[name]
    return loss


def _mismatch(
    run: Run,
    batch: TrainBatch,
    micro_batch: MicroBatch,
    likelihood: Likelihood,
    inputs: LossInputs,
) -> dict[str, Stat]:
    """Return |trainer's old log-prob - sampler's| of each kept action: the mean hides what the
    largest shows."""
    assert batch.rollouts is not None
    old = likelihood.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    sampler = micro_batch.of(batch.rollouts.sampler_logprobs)
    mismatch = (old - sampler.to(old.device, non_blocking=True)).abs()
    stats = {"mismatch/nats": Stat.of(mismatch, inputs.loss_mask)}
    if run.config.engine.lag:  # that of older weights contains what was learned since
        is_newest = micro_batch.of(batch.rollouts.policy_version) == run.state.version
        is_newest = is_newest.to(old.device, non_blocking=True)
        stats["mismatch/lag_0_nats"] = Stat.of(mismatch, inputs.loss_mask & is_newest)
    return stats


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
    run: Run,
    batch: TrainBatch,
    micro_batch: MicroBatch,
    weights: Float[Tensor, "B T"],
    likelihood: Likelihood,
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

    def cut(x: Any) -> Any:  # without waiting for the device
        if isinstance(x, Gaussian):
            return Gaussian(cut(x.mean), cut(x.std))
        if isinstance(x, Likelihood):
            return Likelihood(cut(x.logprobs), gaussian=cut(x.gaussian))
        return None if x is None else micro_batch.of(x).to(device, non_blocking=True)

    ref = cut(batch.ref)
    if ref is None and run.reference is not None:
        ref = run.reference.likelihood(rollouts, micro_batch, outputs=gaussian_outputs(run))
    return LossInputs(
        advantages=cut(batch.advantages),
        loss_mask=cut(batch.loss_mask),
        weights=cut(weights),
        old_logprobs=cut(batch.old_logprobs),
        old_gaussian=cut(batch.old_gaussian),
        ref=ref,
        sampler_logprobs=cut(rollouts.sampler_logprobs) if objective.correction != "none" else None,
        old_values=cut(batch.old_values),
        returns=cut(batch.returns),
        dims=math.prod(rollouts.actions.shape[2:]),
    )
