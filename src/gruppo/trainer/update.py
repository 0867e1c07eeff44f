"""Learn: epochs, minibatches, micro-batches, losses, updates."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.loss import LossInputs, critic_loss, policy_loss
from gruppo.core.weights import Average, loss_total, loss_weights
from gruppo.trainer import gradients
from gruppo.trainer.demonstrations import consistency_term, supervised_backward
from gruppo.trainer.epochs import epoch_metrics
from gruppo.trainer.memory import Part, in_micro_batches_of
from gruppo.trainer.minibatches import at_rest, gaussian, has_gradient, likelihood_of, minibatches, wanted
from gruppo.trainer.run import Run, flatten, reduced, trained
from gruppo.trainer.stages import StepParams
from gruppo.trainer.weight_change import EVERY, Moved, warn_if_still
from gruppo.types import Batch, Gaussian, GruppoError, Likelihood, MicroBatch, NumericalStop, Stat

log = logging.getLogger("gruppo")

MAX_SKIPPED_UPDATES = 3
"""So many updates in a row with a gradient that is not finite end the run."""

LEARNED = ("ratio", "sup/nats")
"""Statistics that count what a gradient comes from: sampled actions, tokens of demonstrations."""

_METRICS = {
    "ratio": ("mean:ratio/mean", "max:ratio/max"),
    "kl/old_nats": ("mean:kl/old_nats",),
    "kl/old_k3_nats": ("mean:kl/old_k3_nats",),
    "kl/ref_nats": ("mean:kl/ref_nats",),
    "entropy/nats": ("mean:entropy/mean_nats",),
    "clip/high_frac": ("mean:clip/high_frac",),
    "clip/low_frac": ("mean:clip/low_frac",),
    "clip/kl_mask_frac": ("mean:clip/kl_mask_frac",),
    "correction/weight": ("mean:correction/mean", "min:correction/min", "max:correction/max"),
    "value/clip_frac": ("mean:value/clip_frac",),
    "mismatch/nats": ("mean:mismatch/mean_nats", "max:mismatch/max_nats"),
    "loss/policy": ("sum:loss/policy",),
    "loss/kl": ("sum:loss/kl",),
    "loss/sup": ("sum:loss/sup",),
    "loss/cons": ("sum:loss/cons",),
    "sup/nats": ("mean:sup/loss_nats",),
    "sup/tokens": ("sum:sup/tokens_count",),
    "loss/value": ("sum:loss/value",),
    "grad/norm": ("mean:grad/norm",),
    "grad/critic_norm": ("mean:grad/critic_norm",),
    "grad/action_norm": ("mean:grad/action_norm",),
    "update/taken": ("sum:update/updates_count",),
    "update/skipped": ("sum:update/skipped_count",),
    "update/changed": ("mean:update/changed_frac",),
    "update/micro_batches": ("sum:update/micro_batches_count",),
}


def learn(run: Run, batch: Batch, step_params: StepParams) -> dict[str, float]:
    """All updates of one batch, or those before the policy has moved too far."""
    began = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = step_params.critic_lr if group["is_critic"] else step_params.lr * group["lr_factor"]
        group["weight_decay"] = step_params.weight_decay
    stats = {"update/taken": Stat(), "update/skipped": Stat()}
    metrics: dict[str, float] = {}
    epochs: list[dict[str, Stat]] = [{} for _ in range(run.config.optim.epochs)]
    tried, has_moved_far = 0, False
    for minibatch in minibatches(run, batch, step_params):
        if not tried and gradients.is_due(run):
            metrics |= gradients.of_terms(run, minibatch, step_params, backward)
        of_update, has_moved_far = update(run, minibatch, step_params)
        of_epoch = epochs[tried // run.config.optim.minibatches]
        tried += 1
        for said in (stats, of_epoch):
            said |= {name: said.get(name, Stat()) + stat for name, stat in of_update.items()}
        if has_moved_far:
            break
    losses = {name: Stat(1, stat.sum / tried) for name, stat in stats.items() if name.startswith("loss/")}
    metrics |= flatten(stats | losses, _METRICS) | reduced({n: s for n, s in stats.items() if ":" in n})
    metrics |= epoch_metrics(run.config.optim, epochs, tried - has_moved_far)
    if run.config.optim.stop_kl:
        metrics["update/early_stop_frac"] = float(has_moved_far)
    if "update/changed" in stats:
        warn_if_still(run, stats["update/changed"])
    return metrics | {"optim/lr": step_params.lr, "time/update_s": time.perf_counter() - began}


def update(run: Run, batch: Batch, step_params: StepParams) -> tuple[dict[str, Stat], bool]:
    """One optimiser step over one minibatch on all ranks; none where the policy has moved too far, which it says."""
    run.optimizer.zero_grad(set_to_none=True)
    stats = backward(run, batch, step_params)
    unreached = _unreached(run)
    dist.sum_gradients(learning(run, step_params))
    for parameter in unreached:  # on one rank it has none: no momentum and no decay moves it
        parameter.grad = None
    stats = dist.merge_stats(stats)
    limit = run.config.optim.stop_kl
    has_moved_far = limit > 0 and stats.get("kl/old_k3_nats", Stat()).mean > limit  # the same number on all ranks
    if not any(stats[name].count for name in LEARNED if name in stats):
        stats |= {f"grad/{name}": Stat(1, 0.0) for name in _networks(run)}
    elif not has_moved_far:
        stats |= _step(run)
    run.optimizer.zero_grad(set_to_none=True)
    return stats, has_moved_far


def learning(run: Run, step_params: StepParams) -> list[torch.nn.Parameter]:
    """What may have a gradient on some rank: the critic's weights while it learns alone, none of them while nothing is
    sampled. The others keep no gradient at all, so that neither momentum nor decay moves them."""
    policy = list(trained(run.policy.module, None).values())
    if step_params.is_critic_alone:
        return run.parameters[len(policy) :]
    return run.parameters if step_params.samples else policy


def _unreached(run: Run) -> list[torch.nn.Parameter]:
    """What has a gradient on no rank: as an action's std, where demonstrations alone are learned from."""
    reached = dist.all_sum(torch.tensor([int(parameter.grad is not None) for parameter in run.parameters]))
    return [parameter for parameter, ranks in zip(run.parameters, reached.tolist(), strict=True) if not ranks]


def _step(run: Run) -> dict[str, Stat]:
    """Clip what each network's gradient is, and step; leave it out where a gradient is not finite."""
    limit = run.config.optim.max_grad_norm or float("inf")
    norms = {n: float(torch.nn.utils.clip_grad_norm_(own, limit)) for n, own in _networks(run).items()}
    stats = {f"grad/{name}": Stat(1, norm) for name, norm in norms.items()}
    if not all(map(math.isfinite, norms.values())):
        _count_skip(run, norms)
        return stats | {"update/skipped": Stat(1, 1.0)}
    run.state.skipped_updates = 0
    before = Moved(run.optimizer) if run.state.step % EVERY == 0 else None
    run.optimizer.step()
    stats["update/taken"] = Stat(1, 1.0)
    return stats if before is None else stats | {"update/changed": before.stat()}


def _networks(run: Run) -> dict[str, list[torch.nn.Parameter]]:
    """Parameters that share a gradient norm limit: a separate critic must not shrink the policy's gradient."""
    networks: dict[str, list[torch.nn.Parameter]] = {"norm": []}
    for group in run.optimizer.param_groups:
        networks.setdefault(group["norm"], []).extend(group["params"])
    return networks


def backward(run: Run, batch: Batch, step_params: StepParams) -> dict[str, Stat]:
    """Gradients of the whole minibatch, micro-batch by micro-batch; this rank's statistics.

    The weights are those of the whole minibatch over all ranks, so that the micro-batches' losses add up to one loss;
    of demonstrations, each token counts alike.
    """
    parts: list[Part] = []
    works: list[Callable[[list[MicroBatch]], dict[str, Stat]]] = []
    if batch.rollouts is not None:
        weights = _weights(batch.loss_mask, run.config.objective.average, step_params)
        parts.append((batch.rollouts, has_gradient(run, batch, step_params)))
        works.append(partial(_backward, run, batch, step_params, weights))
    if batch.demos is not None:
        weights = _weights(batch.demos.mask, "token", step_params)
        parts.append((batch.demos, batch.demos.mask))
        of_demos = (
            step_params if batch.rollouts is None else replace(step_params, cons_coef=0.0)
        )  # it is of what is sampled
        works.append(partial(supervised_backward, run, batch.demos, of_demos, weights))

    def attempt(cuts: list[list[MicroBatch]]) -> dict[str, Stat]:
        return added(work(micro_batches) for work, micro_batches in zip(works, cuts, strict=True))

    with dist.fail_together():
        return in_micro_batches_of(run, parts, attempt)


def _weights(loss_mask: Bool[Tensor, "B T"], average: Average, step_params: StepParams) -> Float[Tensor, "B T"]:
    """Of this rank's actions in the minibatch of all ranks."""
    total = dist.all_sum(loss_total(loss_mask, average=average, max_length=step_params.sampling.max_actions))
    return loss_weights(loss_mask, average=average, total=total)


def added(several: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Statistics of the same name as one."""
    stats: dict[str, Stat] = {}
    for one in several:
        for name, stat in one.items():
            stats[name] = stats.get(name, Stat()) + stat
    return stats


def _backward(
    run: Run, batch: Batch, step_params: StepParams, weights: Float[Tensor, "B T"], micro_batches: list[MicroBatch]
) -> dict[str, Stat]:
    """Gradients and statistics of these micro-batches; no rank asks another, so that each may begin again alone."""
    objective, rollouts = run.config.objective, batch.rollouts
    assert rollouts is not None
    stats = {name: Stat() for name in _stat_names(run, step_params)}
    for micro_batch in micro_batches:
        with at_rest(run.policy.compute_module) if step_params.is_critic_alone else nullcontext():
            likelihood = likelihood_of(run, rollouts, micro_batch, outputs=wanted(run, step_params))
        inputs = loss_inputs(run, batch, micro_batch, weights, likelihood)
        terms, micro_batch_stats = policy_loss(likelihood, inputs, objective)
        if step_params.cons_coef:
            terms["cons"] = consistency_term(run, rollouts, micro_batch, inputs.weights, likelihood)
        if not step_params.is_critic_alone or "value" in terms:
            _loss(terms, step_params).backward()
        if run.critic is not None and not run.critic.is_shared:  # after the policy's, whose activations are gone by now
            values = run.critic.values(rollouts, micro_batch)
            terms["value"], micro_batch_stats["value/clip_frac"] = critic_loss(values, inputs, objective)
            (step_params.value_coef * terms["value"]).backward()
        micro_batch_stats |= {f"loss/{name}": Stat.of(term) for name, term in terms.items() if name != "entropy"}
        micro_batch_stats["update/micro_batches"] = Stat(1, 1.0)
        micro_batch_stats |= run.policy.update_stats(batch, micro_batch, likelihood, inputs)
        micro_batch_stats["mismatch/nats"] = _mismatch(batch, micro_batch, likelihood, inputs)
        for name, stat in micro_batch_stats.items():
            stats[name] = stats.get(name, Stat()) + stat
    return stats


def _loss(terms: Mapping[str, Tensor], step_params: StepParams) -> Tensor:
    """What is descended. While the critic learns alone, the policy's part is a number without a gradient."""
    loss = terms["policy"] if step_params.rl_coef == 1 else step_params.rl_coef * terms["policy"]
    if step_params.entropy_coef:
        loss = loss - step_params.entropy_coef * terms["entropy"]
    if "kl" in terms:
        loss = loss + step_params.kl_coef * terms["kl"]
    if "cons" in terms:
        loss = loss + step_params.cons_coef * terms["cons"]
    return loss + step_params.value_coef * terms["value"] if "value" in terms else loss


def loss_inputs(
    run: Run, batch: Batch, micro_batch: MicroBatch, weights: Float[Tensor, "B T"], likelihood: Likelihood
) -> LossInputs:
    """The batch cut to the micro-batch, on the policy's device."""
    rollouts = batch.rollouts
    assert rollouts is not None
    _check_whole_rows(run, batch, micro_batch)

    device = likelihood.logprobs.device

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else micro_batch.of(x).to(device)

    def cut_gaussian(x: Gaussian | None) -> Gaussian | None:
        return None if x is None else Gaussian(micro_batch.of(x.mean).to(device), micro_batch.of(x.std).to(device))

    ref = None
    if run.reference is not None:
        ref = (
            run.reference.likelihood(rollouts, micro_batch, outputs=gaussian(run))
            if batch.ref is None
            else Likelihood(micro_batch.of(batch.ref.logprobs).to(device), gaussian=cut_gaussian(batch.ref.gaussian))
        )
    needs_sampler = run.config.objective.correction != "none"
    return LossInputs(
        advantages=micro_batch.of(batch.advantages).to(device),
        loss_mask=micro_batch.of(batch.loss_mask).to(device),
        weights=micro_batch.of(weights).to(device),
        old_logprobs=cut(batch.old_logprobs),
        old_gaussian=cut_gaussian(batch.old_gaussian),
        ref=ref,
        sampler_logprobs=cut(rollouts.sampler_logprobs) if needs_sampler else None,
        old_values=cut(batch.old_values),
        returns=cut(batch.returns),
        dims=math.prod(rollouts.actions.shape[2:]),
    )


def _check_whole_rows(run: Run, batch: Batch, micro_batch: MicroBatch) -> None:
    """Ratios and corrections of a row need all its actions in one micro-batch."""
    if not run.config.objective.needs_whole_rows:
        return
    outside = batch.loss_mask[micro_batch.rows].sum() - micro_batch.of(batch.loss_mask).sum()
    if outside > 0:
        raise GruppoError(
            f"this policy cuts rows into columns, and {int(outside)} kept actions of a micro-batch's rows are in "
            "others; ratios and corrections of a sequence need whole rows. Set --objective.ratio token and "
            "--objective.correction-level token."
        )


def _stat_names(run: Run, step_params: StepParams) -> list[str]:
    names = ["ratio", "kl/old_nats", "kl/old_k3_nats", "clip/high_frac", "clip/low_frac", "entropy/nats"]
    names += ["mismatch/nats", "loss/policy", "update/micro_batches"]
    objective = run.config.objective
    names += ["correction/weight"] if objective.correction != "none" else []
    names += ["clip/kl_mask_frac"] if objective.kl_mask else []
    names += ["loss/value", "value/clip_frac"] if run.critic is not None else []
    names += ["loss/cons"] if step_params.cons_coef else []
    if run.reference is not None:
        names += ["kl/ref_nats", *(["loss/kl"] if objective.kl_in == "loss" else [])]
    return names


def _mismatch(batch: Batch, micro_batch: MicroBatch, likelihood: Likelihood, inputs: LossInputs) -> Stat:
    """|trainer's old log-prob - sampler's| of each kept action: the mean hides what the largest shows."""
    assert batch.rollouts is not None
    old = likelihood.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    return Stat.of((old - micro_batch.of(batch.rollouts.sampler_logprobs).to(old.device)).abs(), inputs.loss_mask)


def _count_skip(run: Run, norms: Mapping[str, float]) -> None:
    run.state.skipped_updates += 1
    name = next(name for name, norm in norms.items() if not math.isfinite(norm))
    whose, option = ("critic", "--critic.lr") if name == "critic_norm" else ("policy", "--optim.lr")
    norm = norms[name]
    log.warning("step %d: the norm of the %s's gradient is %s; this update was skipped.", run.state.step, whose, norm)
    if run.state.skipped_updates >= MAX_SKIPPED_UPDATES:
        raise NumericalStop(
            f"step {run.state.step}: {MAX_SKIPPED_UPDATES} updates in a row had a gradient that is not finite, the "
            f"last one the {whose}'s; every save before this step is kept. Train again with a lower {option}, or try "
            "--compute float32."
        )
