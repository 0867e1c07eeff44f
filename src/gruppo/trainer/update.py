"""Learn: epochs, minibatches, micro-batches, losses, optimizer steps."""

from __future__ import annotations

import logging
import math
import time
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
from gruppo.trainer.memory import Part, attempts
from gruppo.trainer.minibatches import (
    gaussian_outputs,
    has_gradient,
    likelihood_of,
    minibatches,
    required_outputs,
)
from gruppo.trainer.run import Run, flatten, reduced, trained
from gruppo.trainer.stages import StepParams
from gruppo.trainer.weight_change import EVERY, LEAST, NORMS, Moved
from gruppo.types import Batch, Gaussian, GruppoError, Likelihood, MicroBatch, NumericalStop, Stat

log = logging.getLogger("gruppo")

MAX_SKIPPED_UPDATES = 3
"""Consecutive updates with a gradient that is not finite that end the run."""

LEARNED = ("ratio", "sup/nats")
"""Statistics that count what a gradient comes from: sampled actions, tokens of demonstrations."""

_METRICS = {
    "ratio": ("mean:ratio/mean", "max:ratio/max"),
    **{name: (f"mean:{name}",) for name in ("kl/old_nats", "kl/old_k3_nats", "kl/ref_nats")},
    "entropy/nats": ("mean:entropy/mean_nats",),
    **{
        name: (f"mean:{name}",) for name in ("clip/high_frac", "clip/low_frac", "clip/kl_mask_frac")
    },
    "correction/weight": tuple(
        f"{what}:correction/{what}" for what in ("mean", "min", "max", "ess_frac")
    ),
    "value/clip_frac": ("mean:value/clip_frac",),
    "mismatch/nats": ("mean:mismatch/mean_nats", "max:mismatch/max_nats"),
    "mismatch/lag_0_nats": ("mean:mismatch/lag_0_mean_nats", "count:mismatch/lag_0_count"),
    **{name: (f"sum:{name}",) for name in ("loss/policy", "loss/kl", "loss/sup", "loss/cons")},
    "sup/nats": ("mean:sup/loss_nats",),
    "sup/tokens": ("sum:sup/tokens_count",),
    "loss/value": ("sum:loss/value",),
    **{name: (f"mean:{name}",) for name in NORMS},
    "update/taken": ("sum:update/updates_count",),
    "update/skipped": ("sum:update/skipped_count",),
    "update/changed": ("mean:update/changed_frac",),
    "update/micro_batches": ("sum:update/micro_batches_count",),
}


_EPOCH_METRICS = {
    "ratio": ("mean:ratio_mean", "max:ratio_max"),
    "clip": ("mean:clip_frac",),
    "kl/old_nats": ("mean:kl_old_nats",),
    "kl/old_k3_nats": ("mean:kl_old_k3_nats",),
    "update/taken": ("sum:updates_count",),
}


def learn(run: Run, batch: Batch, step_params: StepParams) -> dict[str, float]:
    """All updates of one batch, or those before the policy has moved too far from the one that
    sampled it."""
    began = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = (
            step_params.critic_lr if group["is_critic"] else step_params.lr * group["lr_factor"]
        )
        group["weight_decay"] = step_params.weight_decay  # AdamW multiplies it by the learning rate
    stats = {"update/taken": Stat(), "update/skipped": Stat()}
    metrics: dict[str, float] = {}
    epochs: list[dict[str, Stat]] = [{} for _ in range(run.config.optim.epochs)]
    tried, has_moved_far = 0, False
    for minibatch in minibatches(run, batch):
        update_stats, has_moved_far = update(run, minibatch, step_params)
        epoch_stats = epochs[tried // run.config.optim.minibatches]
        tried += 1
        _accumulate(stats, update_stats)
        _accumulate(epoch_stats, update_stats)
        if has_moved_far:
            break
    # a loss is a weighted sum over its minibatch: the metric is the mean over minibatches, not over
    # rows
    losses = {
        name: Stat(1, stat.sum / tried) for name, stat in stats.items() if name.startswith("loss/")
    }
    metrics |= flatten(stats | losses, _METRICS) | reduced(
        {n: s for n, s in stats.items() if ":" in n}
    )
    metrics |= epoch_metrics(run.config.optim, epochs, tried - has_moved_far)
    if run.config.optim.stop_kl:
        metrics["update/early_stop_frac"] = float(has_moved_far)
    changed = stats.get("update/changed", Stat())
    if changed.count and changed.mean < LEAST:
        dtypes = sorted(
            {str(parameter.dtype).removeprefix("torch.") for parameter in run.parameters}
        )
        text = (
            "step %d: an update changed %.1f%% of the weights that have a gradient; at "
            "--optim.lr %g the rest "
        )
        text += "is lost in rounding to %s. Raise it, or hold the weights in float32."
        log.warning(
            text, run.state.step, 100 * changed.mean, run.config.optim.lr, " and ".join(dtypes)
        )
    return metrics | {"optim/lr": step_params.lr, "time/update_s": time.perf_counter() - began}


def epoch_metrics(
    optim: OptimConfig, epochs: Sequence[Mapping[str, Stat]], done: int
) -> dict[str, float]:
    """``epoch/N/...`` of each epoch that was begun, over its minibatches; none where there is only
    one epoch.

    ``epochs``: the statistics of each, empty where it was not begun. ``done``: minibatches before
    ``stop_kl`` ended the batch; the one that it stopped at was evaluated, so it is in its epoch's
    statistics, but took no update.
    """
    metrics: dict[str, float] = {}
    if optim.epochs > 1:
        for number, stats in enumerate(filter(None, epochs), start=1):
            stats = {"update/taken": Stat(), **stats}
            ends = [stats[name] for name in ("clip/high_frac", "clip/low_frac") if name in stats]
            if ends:  # actions clipped on either side; none is clipped on both
                stats["clip"] = Stat(ends[0].count, sum(end.sum for end in ends))
            metrics |= {
                f"epoch/{number}/{name}": value
                for name, value in flatten(stats, _EPOCH_METRICS).items()
            }
    if optim.epochs > 1 or optim.stop_kl:
        metrics["update/epochs_count"] = done / optim.minibatches
    return metrics


def update(run: Run, batch: Batch, step_params: StepParams) -> tuple[dict[str, Stat], bool]:
    """One optimizer step over one minibatch on all ranks, and whether the policy has moved too far
    to take it.

    On a GPU nothing between the first forward and the step waits for the device, unless ``stop_kl``
    or several ranks need a number first: statistics are read behind the step.
    """
    run.optimizer.zero_grad(set_to_none=True)
    stats = backward(run, batch, step_params)
    has_learned = any(stats[name].count or stats[name].pending for name in LEARNED if name in stats)
    flags = torch.tensor(
        [has_learned, *(parameter.grad is not None for parameter in run.parameters)],
        dtype=torch.long,
    )
    is_learned, *reached = dist.all_sum(flags).tolist()
    dist.sum_gradients(
        p for p in learning(run, step_params) if not is_sharded(p)
    )  # FSDP has summed those
    for parameter, ranks in zip(run.parameters, reached, strict=True):
        # as an action's std while only demonstrations are learned from: no momentum or decay moves
        # it
        if not ranks:
            parameter.grad = None
    limit, has_moved_far = run.config.optim.stop_kl, False
    if limit:
        with dist.phase("early stop"):
            stats = dist.merge_stats(stats)
        has_moved_far = (
            stats.get("kl/old_k3_nats", Stat()).mean > limit
        )  # the same number on all ranks
    # Networks whose gradient norms are limited apart: a separate critic must not shrink the
    # policy's gradient.
    networks: dict[str, list[nn.Parameter]] = {"norm": []}
    for group in run.optimizer.param_groups:
        networks.setdefault(group["norm"], []).extend(group["params"])
    taken = dict[str, Stat]()
    if not is_learned:
        taken = {f"grad/{name}": Stat(1, 0.0) for name in networks}
    elif not has_moved_far:
        taken = _step(run, networks)
    run.optimizer.zero_grad(set_to_none=True)
    if not limit:
        with dist.phase("statistics"):
            stats = dist.merge_stats(stats)
    return stats | taken, has_moved_far


def learning(run: Run, step_params: StepParams) -> list[nn.Parameter]:
    """Parameters that may have a gradient on some rank; the others keep none, so that no momentum
    or decay moves them.

    The critic's alone during its warmup, and none of them while nothing is sampled.
    """
    policy = list(trained(run.policy.module, None).values())
    if step_params.is_critic_alone:
        return run.parameters[len(policy) :]
    return run.parameters if step_params.samples else policy


def _step(run: Run, networks: Mapping[str, list[nn.Parameter]]) -> dict[str, Stat]:
    """Clip each network's gradient and step; skip the update where a gradient is not finite."""
    limit = run.config.optim.max_grad_norm or float("inf")
    device = run.policy.device
    of_networks = {name: clip_grad_norm(own, limit) for name, own in networks.items()}
    step = run.state.step
    before = Moved(run.optimizer) if step % EVERY == 0 else None
    has_taken = (
        device.type not in types.AT_ONCE and dist.world_size() == 1
    )  # ranks agree on a number before the step
    if has_taken:
        # AdamW itself leaves out a step whose gradient is not finite: what GradScaler sets, without
        # waiting to know
        are_finite = torch.stack(
            [norm.to(device, non_blocking=True) for norm in of_networks.values()]
        ).isfinite()
        vars(run.optimizer)["found_inf"] = (~are_finite).any().float()
        run.optimizer.step()
        del vars(run.optimizer)["found_inf"]
    norms = {name: float(norm) for name, norm in of_networks.items()}
    stats = {f"grad/{name}": Stat(1, norm) for name, norm in norms.items()}
    with dist.phase("non-finite gradients"):
        is_finite = not dist.all_max(int(not all(map(math.isfinite, norms.values()))))
    if is_finite:
        run.state.skipped_updates = 0
        if not has_taken:
            run.optimizer.step()
        stats["update/taken"] = Stat(1, 1.0)
        if before is not None:
            changed = Stat.read({"update/changed": before.stat()})
            stats |= (
                dist.merge_stats(changed) if is_unit(run.policy.module) else changed
            )  # each rank has its shards
        return stats
    run.state.skipped_updates += 1
    # of one kind on all ranks, unless their hardware rounds otherwise
    name, norm = next(
        ((name, norm) for name, norm in norms.items() if not math.isfinite(norm)),
        ("norm", math.inf),
    )
    whose, option = ("critic", "--critic.lr") if name == "critic_norm" else ("policy", "--optim.lr")
    log.warning(
        "step %d: the norm of the %s's gradient is %s; this update was skipped.", step, whose, norm
    )
    if run.state.skipped_updates >= MAX_SKIPPED_UPDATES:
        raise NumericalStop(
            f"""step {step}: {MAX_SKIPPED_UPDATES} updates in a row had a gradient that is not
                    finite, the last one the {whose}'s; every save before this step is kept""",
            advice=f"Train again with a lower {option}, or $compute float32",
        )
    return stats | {"update/skipped": Stat(1, 1.0)}


def backward(run: Run, batch: Batch, step_params: StepParams) -> dict[str, Stat]:
    """Gradients of the whole minibatch, micro-batch by micro-batch; this rank's statistics.

    The weights are those of the whole minibatch over all ranks, so that the micro-batches' losses
    add up to one loss; each token of the demonstrations counts alike.
    """
    parts, terms = list[Part](), list[Callable[[list[MicroBatch]], dict[str, Stat]]]()
    if batch.rollouts is not None:
        weights = _weights(
            batch.loss_mask, run.config.objective.average, step_params, batch.rollouts.group_ids
        )
        parts.append((batch.rollouts, has_gradient(run, batch, step_params)))
        terms.append(partial(_backward, run, batch, step_params, weights))
    if batch.demos is not None:
        weights = _weights(batch.demos.mask, "token", step_params)
        parts.append((batch.demos, batch.demos.mask))
        # the consistency term belongs to what is sampled, where anything is
        params = step_params if batch.rollouts is None else replace(step_params, cons_coef=0.0)
        terms.append(partial(supervised_backward, run, batch.demos, params, weights))
    for attempt in attempts(run, parts):
        with attempt as micro_batches:
            stats = dict[str, Stat]()
            for term, own in zip(terms, micro_batches, strict=True):
                _accumulate(stats, term(own))
    return stats


def _weights(
    loss_mask: Bool[Tensor, "B T"],
    average: Average,
    step_params: StepParams,
    group_ids: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Of this rank's actions in the minibatch of all ranks. A group is on one rank, so its actions
    are counted here."""
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
    batch: Batch,
    step_params: StepParams,
    weights: Float[Tensor, "B T"],
    micro_batches: list[MicroBatch],
) -> dict[str, Stat]:
    """Gradients and statistics of these micro-batches; no collectives, so that each rank may begin
    again alone."""
    objective, rollouts = run.config.objective, batch.rollouts
    assert rollouts is not None
    # The names are the same on a rank without any row, as ``merge_stats`` needs them.
    names = [
        "ratio",
        "kl/old_nats",
        "kl/old_k3_nats",
        "clip/high_frac",
        "clip/low_frac",
        "entropy/nats",
    ]
    names += ["mismatch/nats", "loss/policy", "update/micro_batches"]
    names += ["mismatch/lag_0_nats"] if run.config.engine.lag else []
    names += ["correction/weight"] if objective.correction != "none" else []
    names += ["clip/kl_mask_frac"] if objective.kl_mask else []
    names += ["loss/value", "value/clip_frac"] if run.critic is not None else []
    names += ["loss/cons"] if step_params.cons_coef else []
    names += ["kl/ref_nats"] if run.reference is not None else []
    names += ["loss/kl"] if run.reference is not None and objective.kl_in == "loss" else []
    stats = dict.fromkeys(names, Stat())
    for micro_batch in micro_batches:
        with frozen(run.policy.compute_module) if step_params.is_critic_alone else nullcontext():
            likelihood = likelihood_of(
                run.policy, rollouts, micro_batch, outputs=required_outputs(run, step_params)
            )
        inputs = loss_inputs(run, batch, micro_batch, weights, likelihood)
        if micro_batch.is_repeat:
            # not skipped: FSDP gathers and reduces in each forward and backward, which other ranks
            # wait for
            nothing = torch.zeros_like(inputs.weights)
            inputs = replace(inputs, weights=nothing, loss_mask=nothing.bool())
        terms, micro_batch_stats = policy_loss(likelihood, inputs, objective, run.own_surrogate)
        if step_params.cons_coef:
            terms["cons"] = consistency_term(run, rollouts, micro_batch, inputs.weights, likelihood)
        if not step_params.is_critic_alone or "value" in terms:
            # While the critic learns alone, the policy's part is a number without a gradient.
            loss = (
                terms["policy"]
                if step_params.rl_coef == 1
                else step_params.rl_coef * terms["policy"]
            )
            if step_params.entropy_coef:
                loss = loss - step_params.entropy_coef * terms["entropy"]
            if "kl" in terms:
                loss = loss + step_params.kl_coef * terms["kl"]
            if "cons" in terms:
                loss = loss + step_params.cons_coef * terms["cons"]
            loss = loss + step_params.value_coef * terms["value"] if "value" in terms else loss
            loss.backward()
        if (
            run.critic is not None and not run.critic.is_shared
        ):  # after the policy's, whose activations are gone by now
            values = run.critic.values(rollouts, micro_batch)
            terms["value"], micro_batch_stats["value/clip_frac"] = critic_loss(
                values, inputs, objective
            )
            (step_params.value_coef * terms["value"]).backward()
        if micro_batch.is_repeat:
            continue
        micro_batch_stats |= {
            f"loss/{name}": Stat.of(term) for name, term in terms.items() if name != "entropy"
        }
        micro_batch_stats["update/micro_batches"] = Stat(1, 1.0)
        # |trainer's old log-prob - sampler's| of each kept action: the mean hides what the largest
        # shows
        old = likelihood.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        mismatch = (
            old - micro_batch.of(rollouts.sampler_logprobs).to(old.device, non_blocking=True)
        ).abs()
        micro_batch_stats["mismatch/nats"] = Stat.of(mismatch, inputs.loss_mask)
        if run.config.engine.lag:  # that of older weights contains what was learned since
            is_newest = (micro_batch.of(rollouts.policy_version) == run.state.version).to(
                old.device, non_blocking=True
            )
            micro_batch_stats["mismatch/lag_0_nats"] = Stat.of(
                mismatch, inputs.loss_mask & is_newest
            )
        _accumulate(stats, micro_batch_stats)
    return stats


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Forwards within give the module's weights no gradient."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def loss_inputs(
    run: Run,
    batch: Batch,
    micro_batch: MicroBatch,
    weights: Float[Tensor, "B T"],
    likelihood: Likelihood,
) -> LossInputs:
    """The batch cut to the micro-batch, on the policy's device."""
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
        return None if x is None else micro_batch.of(x).to(device, non_blocking=True)

    ref = None
    if batch.ref is not None:  # evaluated before the updates
        ref = Likelihood(cut(batch.ref.logprobs), gaussian=cut(batch.ref.gaussian))
    elif run.reference is not None:
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
