"""Forwards of a batch: minibatches, micro-batches that fit into memory, and what is evaluated
before the updates."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gruppo import distributed as dist
from gruppo.distributed.sharding import forward, gathered, is_unit
from gruppo.protocols import Outputs, Policy, Reference, check_values
from gruppo.seeds import generator_at
from gruppo.trainer.demonstrations import demo_parts
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import (
    Before,
    GruppoError,
    Likelihood,
    MicroBatch,
    Rollouts,
    TrainBatch,
    map_tensors,
)

log = logging.getLogger("gruppo")

T = TypeVar("T")


Mask = Bool[Tensor, "B T"]


@dataclass(frozen=True, eq=False)
class Part(Generic[T]):
    """Rows that are evaluated in micro-batches."""

    rollouts: Rollouts
    mask: Mask
    """Which of their actions are evaluated."""
    work: Callable[[MicroBatch], T]


# --- minibatches ----------------------------------------------------------------------------------


def minibatches(run: Run, batch: TrainBatch) -> Iterator[TrainBatch]:
    """Split the batch into ``optim.minibatches`` parts, in a new order each epoch."""
    for epoch in range(run.config.optim.epochs):
        demos = demo_parts(run, batch.demos, epoch)
        if batch.rollouts is None:
            yield from (replace(batch, demos=own) for own in demos if own is not None)
            continue
        for rows, own in zip(minibatch_rows(run, batch.rollouts, epoch), demos, strict=True):
            rows, loss_mask = _or_dummy(run, rows, batch.loss_mask)
            minibatch = batch if len(rows) == len(batch.rollouts) else batch.take(rows)
            yield replace(minibatch, loss_mask=loss_mask, demos=own)


def minibatch_rows(run: Run, rollouts: Rollouts, epoch: int) -> Iterator[Int[Tensor, "b"]]:
    """Yield this rank's rows of each minibatch of an epoch.

    The cut is made over the rows of all ranks, numbered as one rank would hold them (a slot's group
    after the other), so that the number of ranks changes no minibatch. A rank may have no row in
    one.
    """
    if run.config.optim.minibatches == 1:
        yield torch.arange(len(rollouts))
        return
    sizes = rollouts.group_ids.unique_consecutive(return_counts=True)[1]
    # every world_size-th slot is this rank's
    held = torch.arange(len(sizes)) * dist.world_size() + dist.rank()
    of_slots = torch.zeros(run.config.rollout.prompts, dtype=torch.long)
    of_slots[held] = sizes
    of_slots = dist.all_sum(of_slots)
    first = (of_slots.cumsum(0) - of_slots)[held]  # number of each group's first row
    within = torch.arange(len(rollouts)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    numbers = first.repeat_interleave(sizes) + within
    # the same order on all ranks
    generator = generator_at(run.config.seed, "minibatches", run.state.step, epoch)
    order = torch.randperm(int(of_slots.sum()), generator=generator)
    for own in order.tensor_split(run.config.optim.minibatches):
        yield torch.isin(numbers, own).nonzero()[:, 0]


def _or_dummy(run: Run, rows: Int[Tensor, "b"], mask: Mask) -> tuple[Int[Tensor, "b"], Mask]:
    """Return the rows and their mask; in place of no rows, one without a loss for the forwards that
    all ranks of sharded weights need."""
    if len(rows) or not is_unit(run.policy.module):
        return rows, mask[rows]
    return torch.zeros(1, dtype=torch.long), torch.zeros_like(mask[:1])


def active_actions(run: Run, loss_mask: Mask, advantages: Tensor, step_params: StepParams) -> Mask:
    """Return the kept actions of rows that can move the weights: those without an advantage cannot,
    if nothing else has a gradient.

    They stay in the weights' denominator, so that leaving out their forward changes no gradient. A
    minibatch without any such row takes no optimizer step: neither AdamW's momentum nor its decay
    acts, as they would with a gradient of zero. Where advantages come from log-probs or values, all
    rows were evaluated for that, and the update uses the same micro-batches: its first ratio would
    not be 1 otherwise.
    """
    pulls = step_params.kl_coef or step_params.cons_coef or step_params.entropy_coef
    if pulls or run.critic is not None:
        return loss_mask
    return loss_mask & (advantages != 0).any(dim=1, keepdim=True)


# --- what a forward returns -----------------------------------------------------------------------


def required_outputs(run: Run, step_params: StepParams, *, with_stats: bool = True) -> Outputs:
    """Return the outputs of a forward besides log-probs; ``with_stats``, the entropy also if only a
    metric needs it.

    An entropy with a gradient is computed before the updates too: the log-probs computed with it
    round differently from those of the faster kernel, and the first ratio would not be 1. The
    entropy as a number changes no bit of them.
    """
    outputs = list(gaussian_outputs(run))
    if step_params.entropy_coef:
        outputs.append("entropy")
    elif with_stats:
        outputs.append("entropy_value")
    if step_params.cons_coef:
        outputs.append("output")
    if run.critic is not None and run.critic.is_shared:
        outputs.append("values")
    return outputs


def gaussian_outputs(run: Run) -> Outputs:
    """Return the outputs of a policy whose KLs have a closed form; none if no KL is measured."""
    is_measured = run.reference is not None or run.config.updates_per_batch > 1
    return ("gaussian",) if "gaussian" in run.policy.likelihood_outputs and is_measured else ()


def likelihood_of(
    policy: Policy, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs
) -> Likelihood:
    """Return the policy's likelihood, whose values must be one per action."""
    likelihood = forward(policy.module, policy.likelihood, rollouts, micro_batch, outputs=outputs)
    if "values" in outputs:
        assert likelihood.values is not None
        check_values(likelihood.values, micro_batch)
    return likelihood


# --- before the updates ---------------------------------------------------------------------------


def has_kl_in_reward(run: Run, step_params: StepParams) -> bool:
    return run.config.objective.kl_in == "reward" and step_params.kl_coef > 0


@torch.no_grad()
def evaluate_before_update(
    run: Run, rollouts: Rollouts, mask: Mask, step_params: StepParams
) -> Before:
    """Return old log-probs, reference log-probs and values of the masked actions from before any
    update, if they are needed.

    They come from the very micro-batches that the first epoch's updates use: in bfloat16 another
    cut rounds differently and the first ratio would not be 1 (after memory has run out in an
    update, it is not).
    """
    # Old log-probs if advantages are made of them or several updates share them, else the update's
    # own are the old. The reference's with them, and if its weights are kept elsewhere than where
    # an update computes.
    needs_old = has_kl_in_reward(run, step_params) or run.config.updates_per_batch > 1
    reference = run.reference
    if reference is not None and not needs_old and not reference.is_offloaded:
        reference = None
    pieces: list[tuple[Any, Before]] = []
    with dist.fail_together(), nullcontext() if reference is None else reference.on_device():
        for rows in minibatch_rows(run, rollouts, epoch=0):
            rows, own_mask = _or_dummy(run, rows, mask)
            own = rollouts.take(rows)
            work = partial(_evaluate, run, step_params, needs_old, reference, own)
            for micro_batch, outputs in in_micro_batches(run, [Part(own, own_mask, work)]):
                columns = torch.arange(mask.shape[1])[micro_batch.cols]
                pieces.append(((rows[micro_batch.rows][:, None], columns), outputs))
    if pieces:
        return _joined(pieces, mask.shape)
    nothing = torch.zeros(mask.shape)  # no row of this rank is evaluated
    return Before(
        old_logprobs=nothing if needs_old else None,
        ref=None if reference is None else Likelihood(nothing),
        old_values=None if run.critic is None else nothing,
    )


def _evaluate(
    run: Run,
    step_params: StepParams,
    needs_old: bool,
    reference: Reference | None,
    rollouts: Rollouts,
    micro_batch: MicroBatch,
) -> Before:
    """Evaluate one micro-batch; a shared critic's values come from the policy's forward, if there
    is one."""
    old, ref, values = Before(), None, None
    if needs_old:
        requested = required_outputs(run, step_params, with_stats=False)
        likelihood = likelihood_of(run.policy, rollouts, micro_batch, outputs=requested)
        old = Before(likelihood.logprobs, likelihood.gaussian)
        values = likelihood.values
    if reference is not None:
        found = reference.likelihood(rollouts, micro_batch, outputs=gaussian_outputs(run))
        ref = Likelihood(found.logprobs, gaussian=found.gaussian)
    if run.critic is not None and values is None:
        values = run.critic.values(rollouts, micro_batch)
    # in their own precision, float32 at least: the joint log-prob of many dimensions is in the
    # thousands
    return map_tensors(
        replace(old, ref=ref, old_values=values),
        lambda x: x.to(torch.promote_types(x.dtype, torch.float32)).cpu(),
    )


def _joined(pieces: Sequence[tuple[Any, Any]], shape: torch.Size) -> Any:
    """Join the tensors of records, or None, of micro-batches, each at its rows and columns; 0
    elsewhere."""
    first = pieces[0][1]
    if first is None:
        return None
    if isinstance(first, Tensor):
        whole = first.new_zeros(*shape, *first.shape[2:])
        for place, x in pieces:
            whole[place] = x
        return whole
    fields = {
        name: _joined([(place, getattr(own, name)) for place, own in pieces], shape)
        for name in vars(first)
    }
    return replace(first, **fields)


# --- micro-batches --------------------------------------------------------------------------------


def in_micro_batches(run: Run, parts: Sequence[Part[T]]) -> list[tuple[MicroBatch, T]]:
    """Return the micro-batches of all parts with the results of their work, repeated with smaller
    ones until memory does not run out; a collective.

    Gradients are set to zero before the next attempt, so that no micro-batch counts twice. The
    smaller budget stays for the rest of the run, on all ranks: where memory runs out on one rank,
    it has for all; where one fails, all do.
    """
    is_sharded_model = is_unit(run.policy.module)
    while True:
        with dist.phase("micro-batches"), dist.fail_together():
            budgets = [budget_for(run, run.memory.longest_prompt(p.rollouts)) for p in parts]
            cuts = [_cut(run, part, own) for part, own in zip(parts, budgets, strict=True)]
            budget = max(budgets, default=0)
        if is_sharded_model:
            with dist.phase("micro-batches"):
                pairs = zip(parts, cuts, strict=True)
                cuts = [equally_many(run.policy, part.rollouts, cut) for part, cut in pairs]
        results: list[tuple[MicroBatch, T]] = []
        shortage = ""
        failure: Exception | None = None
        try:
            with dist.waiting() if is_sharded_model else nullcontext():
                for part, cut in zip(parts, cuts, strict=True):
                    results += [(micro_batch, part.work(micro_batch)) for micro_batch in cut]
        except Exception as error:
            failure = error
            if is_out_of_memory(error):
                failure, shortage = None, str(error) or "MemoryError"
        if shortage and is_sharded_model:
            # a rank that is in the forward of a sharded model cannot leave it and try again
            failure = GruppoError(
                f"memory ran out on rank {dist.rank()} in micro-batches of {budget} tokens",
                option="optim.token_budget",
                advice=str(max(budget // 2, 1)),
            )
        with dist.phase("memory back-off"):
            if not dist.share_failure(failure, int(bool(shortage)), in_step=is_sharded_model):
                return [(own, result) for own, result in results if not own.is_repeat]
        # Here and not in the ``except`` block, whose traceback holds the failed activations.
        _free_memory(run)
        with dist.phase("memory back-off"), dist.fail_together():
            finer = finer_budget(run, parts, budget, sum(map(len, cuts))) if shortage else budget
            if not finer:
                raise GruppoError(
                    f"one row does not fit into memory: {shortage} {run.memory.out_of_memory_hint}"
                )
        run.state.token_budget = -dist.all_max(-finer)  # the smallest
        log.warning(
            "step %d: memory ran out in micro-batches of %d tokens; going on with %d. Set "
            "--optim.token-budget %d to begin there.",
            *(run.state.step, budget, run.state.token_budget, run.state.token_budget),
        )


def equally_many(
    policy: Policy, rollouts: Rollouts, micro_batches: list[MicroBatch]
) -> list[MicroBatch]:
    """Return as many micro-batches as the rank with most has: the smallest is repeated at zero
    weight. A collective.

    Sharded weights are gathered, and gradients reduced, in each forward and backward of all ranks.
    A repeat has actions that the policy chose, so that its gradients, all zero, are of the same
    weights as those of other ranks.
    """
    missing = dist.all_max(len(micro_batches)) - len(micro_batches)
    spare = min(micro_batches, key=lambda micro_batch: len(micro_batch.rows), default=None)
    has_action = rollouts.mask.any(dim=1)
    if spare is None and has_action.any():  # no row of this rank has a loss
        first = torch.arange(len(has_action)) == int(has_action.int().argmax())
        spare = policy.micro_batches(rollouts, rollouts.mask & first[:, None], 1)[0]
    if dist.all_max(int(missing > 0 and spare is None)):
        raise GruppoError(
            "a rank has no row of a minibatch to run, which sharded weights need on all ranks",
            option="optim.minibatches",
            advice="""1, and $supervised.batch to a multiple of the ranks where demonstrations are
                learned from""",
        )
    if spare is None:
        return micro_batches
    return [*micro_batches, *[replace(spare, is_repeat=True)] * missing]


def finer_budget(run: Run, parts: Sequence[Part], budget: int, count: int) -> int:
    """Return the largest halving of the budget that gives more micro-batches than ``count``; 0 if
    none does."""
    while budget > 1:
        budget //= 2
        if sum(len(_cut(run, part, budget)) for part in parts) > count:
            return budget
    return 0


def _cut(run: Run, part: Part, budget: int) -> list[MicroBatch]:
    return run.policy.micro_batches(part.rollouts, part.mask, budget)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: on a CPU, torch raises a plain RuntimeError, known by its
    text."""
    texts = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED")
    has_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return has_text or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _free_memory(run: Run) -> None:
    """Release what a failed attempt has left."""
    run.optimizer.zero_grad(set_to_none=True)
    run.policy.compute_module.zero_grad(set_to_none=True)
    if run.critic is not None:
        run.critic.zero_grad()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- memory ---------------------------------------------------------------------------------------


@contextmanager
def whole_weights(policy: Policy, *, engine: str = "") -> Iterator[None]:
    """Hold sharded weights whole on each rank within, for sampling. A collective.

    ``engine``: its kind; servers have weights of their own.
    """
    if engine == "vllm" or not is_unit(policy.module):
        yield
        return
    with gathered(policy.module):
        yield


def token_budget(run: Run) -> int:
    """Return the units of a micro-batch: those left since memory ran out, as configured, or the
    policy's default."""
    return run.state.token_budget or run.config.optim.token_budget or default_budget(run)


def default_budget(run: Run) -> int:
    return run.memory.default_budgets[run.policy.device.type != "cpu"]


def budget_for(run: Run, longest: int) -> int:
    """Return ``token_budget``; of the default, at least four times the longest prompt's length:
    each micro-batch of a group reads the prompt."""
    if run.state.token_budget or run.config.optim.token_budget:
        return token_budget(run)
    return max(default_budget(run), 4 * longest)
