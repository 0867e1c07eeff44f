"""How a batch is cut into minibatches, which actions need a forward, and what is evaluated before
the updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gruppo import distributed as dist
from gruppo.distributed.sharding import forward, is_unit
from gruppo.protocols import Outputs, Policy, check_values
from gruppo.seeds import generator_at
from gruppo.trainer.demonstrations import demo_parts
from gruppo.trainer.memory import attempts
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import Batch, Gaussian, Likelihood, MicroBatch, Rollouts


def minibatches(run: Run, batch: Batch) -> Iterator[Batch]:
    """The batch cut into ``optim.minibatches`` parts, in a new order each epoch."""
    for epoch in range(run.config.optim.epochs):
        demos = demo_parts(run, batch.demos, epoch)
        if batch.rollouts is None:
            yield from (replace(batch, demos=part) for part in demos if part is not None)
            continue
        for rows, part in zip(minibatch_rows(run, batch.rollouts, epoch), demos, strict=True):
            yield replace(_part(run, batch, rows), demos=part)


def minibatch_rows(run: Run, rollouts: Rollouts, epoch: int) -> Iterator[Int[Tensor, "b"]]:
    """This rank's rows of each minibatch of an epoch.

    The cut is made over the rows of all ranks, numbered as one rank would hold them (a slot's group
    after the other), so that the number of ranks changes no minibatch. A rank may have no row in
    one.
    """
    if run.config.optim.minibatches == 1:
        yield torch.arange(len(rollouts))
        return
    sizes = rollouts.group_ids.unique_consecutive(return_counts=True)[1]
    held = (
        torch.arange(len(sizes)) * dist.world_size() + dist.rank()
    )  # slots of this rank: every world-th
    of_slots = torch.zeros(run.config.rollout.prompts, dtype=torch.long)
    of_slots[held] = sizes
    of_slots = dist.all_sum(of_slots)  # a slot is on one rank: the others add 0
    first = (of_slots.cumsum(0) - of_slots)[held]  # number of each group's first row
    # A row's number is that of its group's first row, and its place within the group.
    within = torch.arange(len(rollouts)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    numbers = first.repeat_interleave(sizes) + within
    generator = generator_at(
        run.config.seed, "minibatches", run.state.step, epoch
    )  # the same on all ranks
    for part in torch.randperm(int(of_slots.sum()), generator=generator).tensor_split(
        run.config.optim.minibatches
    ):
        yield torch.isin(numbers, part).nonzero()[:, 0]


def _part(run: Run, batch: Batch, rows: Int[Tensor, "b"]) -> Batch:
    if not len(rows) and is_unit(
        run.policy.module
    ):  # a row without a loss, for the forwards that all ranks need
        part = batch.take(torch.zeros(1, dtype=torch.long))
        return replace(part, loss_mask=torch.zeros_like(part.loss_mask))
    return batch if len(rows) == len(batch.rewards) else batch.take(rows)


def has_gradient(run: Run, batch: Batch, step_params: StepParams) -> Bool[Tensor, "B T"]:
    """Kept actions of rows that can move the weights: those without an advantage cannot, where
    nothing else pulls.

    They stay in the weights' denominator, so that leaving out their forward changes no gradient. A
    minibatch without any such row takes no optimizer step: neither AdamW's momentum nor its decay
    acts, as they would with a gradient of zero. Where advantages come from log-probs or values, all
    rows were evaluated for that, and the update uses the same micro-batches: its first ratio would
    not be 1 otherwise.
    """
    if (
        step_params.kl_coef
        or step_params.cons_coef
        or step_params.entropy_coef
        or run.critic is not None
    ):
        return batch.loss_mask
    return batch.loss_mask & (batch.advantages != 0).any(dim=1, keepdim=True)


# --- what a forward returns -----------------------------------------------------------------------


def required_outputs(run: Run, step_params: StepParams, *, with_stats: bool = True) -> Outputs:
    """Outputs of a forward beside log-probs; ``with_stats``, the entropy also where only a metric
    needs it.

    An entropy with a gradient is computed before the updates too: the log-probs beside it round
    differently from those of the faster kernel, and the first ratio would not be 1. The entropy as
    a number changes no bit of them.
    """
    outputs: Outputs = (
        ("entropy",) if step_params.entropy_coef else ("entropy_value",) if with_stats else ()
    )
    outputs = (*outputs, *gaussian_outputs(run), *(("output",) if step_params.cons_coef else ()))
    return (*outputs, "values") if run.critic is not None and run.critic.is_shared else outputs


def gaussian_outputs(run: Run) -> Outputs:
    """Outputs of a policy whose KLs have a closed form; none where no KL is measured."""
    is_measured = run.reference is not None or run.config.updates_per_batch > 1
    return ("gaussian",) if "gaussian" in run.policy.likelihood_outputs and is_measured else ()


def likelihood_of(
    policy: Policy, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs
) -> Likelihood:
    """The policy's likelihood; refused where its values are not one per action."""
    likelihood = forward(policy.module, policy.likelihood, rollouts, micro_batch, outputs=outputs)
    if "values" in outputs:
        assert likelihood.values is not None
        check_values(likelihood.values, micro_batch)
    return likelihood


# --- before the updates ---------------------------------------------------------------------------


def has_kl_in_reward(run: Run, step_params: StepParams) -> bool:
    return run.config.objective.kl_in == "reward" and step_params.kl_coef > 0


@torch.no_grad()
def evaluated(run: Run, batch: Batch, step_params: StepParams) -> Batch:
    """The batch with old log-probs, reference log-probs and values from before any update, as far
    as they are needed.

    They come from the very micro-batches that the first epoch's updates use: in bfloat16 another
    cut rounds differently and the first ratio would not be 1 (after memory has run out in an
    update, it is not). Rows without a gradient are not evaluated. Numbers are stored in their own
    precision, float32 at least: the joint log-prob of many dimensions is in the thousands.
    """
    # Old log-probs where advantages are made of them or several updates share them, else the
    # update's own are the old. The reference's beside them, and where its weights are kept
    # elsewhere than where an update computes.
    needed = (
        ["old_logprobs"]
        if has_kl_in_reward(run, step_params) or run.config.updates_per_batch > 1
        else []
    )
    needed += (
        ["ref"] if run.reference is not None and (needed or run.reference.is_offloaded) else []
    )
    needed += ["old_values"] if run.critic is not None else []
    stored = {name: torch.zeros(batch.loss_mask.shape) for name in needed}
    reference = run.reference if "ref" in needed else None
    with dist.fail_together(), nullcontext() if reference is None else reference.on_device():
        assert batch.rollouts is not None
        for rows in minibatch_rows(run, batch.rollouts, epoch=0):
            part = _part(run, batch, rows)
            assert part.rollouts is not None
            for attempt in attempts(run, [(part.rollouts, has_gradient(run, part, step_params))]):
                with attempt as (micro_batches,):
                    values = [
                        _evaluate(run, part.rollouts, one, needed, step_params)
                        for one in micro_batches
                    ]
            for micro_batch, by_name in zip(micro_batches, values, strict=True):
                if micro_batch.is_repeat:
                    continue
                cols = torch.arange(micro_batch.cols.start or 0, micro_batch.cols.stop)
                for name, numbers in by_name.items():  # [b, t, ...]
                    numbers = (
                        numbers.detach().to(torch.promote_types(numbers.dtype, torch.float32)).cpu()
                    )
                    if name not in stored or stored[name].dtype != numbers.dtype:
                        shape = (*batch.loss_mask.shape, *numbers.shape[2:])
                        stored[name] = torch.full(
                            shape, float(name.endswith(":std")), dtype=numbers.dtype
                        )
                    stored[name][rows[micro_batch.rows][:, None], cols[None]] = numbers
    has_normal = [name for name in needed if f"{name}:mean" in stored]
    normals = {name: Gaussian(stored[f"{name}:mean"], stored[f"{name}:std"]) for name in has_normal}
    ref = Likelihood(stored["ref"], gaussian=normals.get("ref")) if "ref" in stored else None
    old_logprobs, old_values = stored.get("old_logprobs"), stored.get("old_values")
    old_gaussian = normals.get("old_logprobs")
    return replace(
        batch, old_logprobs=old_logprobs, old_gaussian=old_gaussian, ref=ref, old_values=old_values
    )


def _evaluate(
    run: Run,
    rollouts: Rollouts,
    micro_batch: MicroBatch,
    needed: list[str],
    step_params: StepParams,
) -> dict[str, Tensor]:
    """What is needed of one micro-batch; a shared critic's values come from the policy's forward,
    if there is one."""
    values, likelihoods = dict[str, Tensor](), dict[str, Likelihood]()
    if "old_logprobs" in needed:
        outputs = required_outputs(run, step_params, with_stats=False)
        likelihoods["old_logprobs"] = likelihood = likelihood_of(
            run.policy, rollouts, micro_batch, outputs=outputs
        )
        if likelihood.values is not None:
            values["old_values"] = likelihood.values
    if "ref" in needed and run.reference is not None:
        likelihoods["ref"] = run.reference.likelihood(
            rollouts, micro_batch, outputs=gaussian_outputs(run)
        )
    if run.critic is not None and "old_values" not in values:
        values["old_values"] = run.critic.values(rollouts, micro_batch)
    for name, likelihood in likelihoods.items():
        values[name] = likelihood.logprobs
        if likelihood.gaussian is not None:
            values |= {
                f"{name}:mean": likelihood.gaussian.mean,
                f"{name}:std": likelihood.gaussian.std,
            }
    return values
