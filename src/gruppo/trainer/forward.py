"""Forwards of a batch: minibatches, micro-batches that fit into memory, and what is evaluated
before the updates."""

from __future__ import annotations

import gc
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gruppo import distributed as dist
from gruppo.distributed.sharding import forward, gathered, is_sharded, is_unit, local
from gruppo.platforms import free_bytes
from gruppo.protocols import Outputs, Policy, check_values
from gruppo.seeds import generator_at
from gruppo.trainer.demonstrations import demo_parts
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import (
    Before,
    Gaussian,
    GruppoError,
    Likelihood,
    MicroBatch,
    Rollouts,
    TrainBatch,
)

log = logging.getLogger("gruppo")

T = TypeVar("T")

USABLE_FRAC = 0.5
"""Share for activations of what gradients and optimizer state leave free. Logits and scores need
some too."""
GIB = 2**30

Mask = Bool[Tensor, "B T"]
Part = tuple[Rollouts, Mask]
"""Rollouts, and which of their actions are evaluated."""


# --- minibatches ----------------------------------------------------------------------------------


def minibatches(run: Run, batch: TrainBatch) -> Iterator[TrainBatch]:
    """Split the batch into ``optim.minibatches`` parts, in a new order each epoch."""
    for epoch in range(run.config.optim.epochs):
        demos = demo_parts(run, batch.demos, epoch)
        if batch.rollouts is None:
            yield from (replace(batch, demos=own) for own in demos if own is not None)
            continue
        for rows, own in zip(minibatch_rows(run, batch.rollouts, epoch), demos, strict=True):
            rows, is_dummy = _or_dummy(run, rows)
            minibatch = batch if len(rows) == len(batch.rollouts) else batch.take(rows)
            if is_dummy:
                minibatch = replace(minibatch, loss_mask=torch.zeros_like(minibatch.loss_mask))
            yield replace(minibatch, demos=own)


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


def _or_dummy(run: Run, rows: Int[Tensor, "b"]) -> tuple[Int[Tensor, "b"], bool]:
    """Return the rows, or one without a loss for the forwards that all ranks of sharded weights
    need."""
    is_dummy = not len(rows) and is_unit(run.policy.module)
    return torch.zeros(1, dtype=torch.long) if is_dummy else rows, is_dummy


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
    update, as far as they are needed.

    They come from the very micro-batches that the first epoch's updates use: in bfloat16 another
    cut rounds differently and the first ratio would not be 1 (after memory has run out in an
    update, it is not). Numbers are stored in their own precision, float32 at least: the joint
    log-prob of many dimensions is in the thousands.
    """
    # Old log-probs if advantages are made of them or several updates share them, else the update's
    # own are the old. The reference's with them, and if its weights are kept elsewhere than where
    # an update computes.
    needed = []
    if has_kl_in_reward(run, step_params) or run.config.updates_per_batch > 1:
        needed.append("old")
    reference = run.reference
    if reference is not None and not needed and not reference.is_offloaded:
        reference = None
    if reference is not None:
        needed.append("ref")
    if run.critic is not None:
        needed.append("values")
    stored: dict[str, Tensor] = {}
    with dist.fail_together(), nullcontext() if reference is None else reference.on_device():
        for rows in minibatch_rows(run, rollouts, epoch=0):
            rows, is_dummy = _or_dummy(run, rows)
            own = rollouts.take(rows)
            evaluated = in_micro_batches(
                run,
                [(own, mask[rows] & (not is_dummy))],
                lambda cuts, own=own: [  # type: ignore[misc]
                    (micro_batch, _evaluate(run, own, micro_batch, needed, step_params))
                    for micro_batch in cuts[0]
                ],
            )
            for micro_batch, outputs in evaluated:
                if not micro_batch.is_repeat:
                    _store(stored, outputs, mask.shape, rows[micro_batch.rows], micro_batch.cols)
    found = {name: stored.get(name, torch.zeros(mask.shape)) for name in needed}
    gaussians: dict[str, Gaussian | None] = dict.fromkeys(needed)
    for name in needed:
        if f"{name}:mean" in stored:
            gaussians[name] = Gaussian(stored[f"{name}:mean"], stored[f"{name}:std"])
    ref = Likelihood(found["ref"], gaussian=gaussians["ref"]) if "ref" in found else None
    return Before(found.get("old"), gaussians.get("old"), ref, found.get("values"))


def _evaluate(
    run: Run,
    rollouts: Rollouts,
    micro_batch: MicroBatch,
    needed: Sequence[str],
    step_params: StepParams,
) -> dict[str, Tensor]:
    """Evaluate one micro-batch; a shared critic's values come from the policy's forward, if there
    is one."""
    outputs: dict[str, Tensor] = {}
    if "old" in needed:
        requested = required_outputs(run, step_params, with_stats=False)
        likelihood = likelihood_of(run.policy, rollouts, micro_batch, outputs=requested)
        outputs |= _tensors("old", likelihood)
        if likelihood.values is not None:
            outputs["values"] = likelihood.values
    if "ref" in needed and run.reference is not None:
        likelihood = run.reference.likelihood(rollouts, micro_batch, outputs=gaussian_outputs(run))
        outputs |= _tensors("ref", likelihood)
    if run.critic is not None and "values" not in outputs:
        outputs["values"] = run.critic.values(rollouts, micro_batch)
    return outputs


def _tensors(name: str, likelihood: Likelihood) -> dict[str, Tensor]:
    tensors = {name: likelihood.logprobs}
    if likelihood.gaussian is not None:
        tensors[f"{name}:mean"] = likelihood.gaussian.mean
        tensors[f"{name}:std"] = likelihood.gaussian.std
    return tensors


def _store(
    stored: dict[str, Tensor],
    outputs: dict[str, Tensor],
    shape: Sequence[int],
    rows: Int[Tensor, "b"],
    cols: slice,
) -> None:
    """Copy the outputs of a micro-batch to their rows and columns of ``stored``."""
    columns = torch.arange(cols.start or 0, cols.stop)
    for name, x in outputs.items():  # [b, t, ...]
        x = x.detach().to(torch.promote_types(x.dtype, torch.float32)).cpu()
        if name not in stored:
            fill = float(name.endswith(":std"))
            stored[name] = torch.full((*shape, *x.shape[2:]), fill, dtype=x.dtype)
        stored[name][rows[:, None], columns[None]] = x


# --- micro-batches --------------------------------------------------------------------------------


class MemoryRanOut(GruppoError):
    """Memory ran out on a rank in a step of sharded weights, which it cannot try again alone."""

    exit_code = 75
    budget = 0
    """Tokens of a micro-batch with which a resumed run continues."""


def in_micro_batches(
    run: Run, parts: Sequence[Part], work: Callable[[list[list[MicroBatch]]], T]
) -> T:
    """Return ``work`` of the micro-batches of each part, repeated with smaller ones until memory
    does not run out; a collective.

    ``parts``: several rollouts whose gradients add up. Gradients are set to zero before the next
    attempt, so that no micro-batch counts twice. The smaller budget stays for the rest of the run,
    on all ranks: where memory runs out on one rank, it has for all; where one fails, all do.
    """
    is_sharded_model = is_unit(run.policy.module)
    while True:
        with dist.phase("micro-batches"), dist.fail_together():
            cuts, budget, longest = _micro_batches(run, parts)
        if is_sharded_model:
            with dist.phase("micro-batches"):
                cuts = [
                    equally_many(run.policy, rollouts, cut)
                    for (rollouts, _), cut in zip(parts, cuts, strict=True)
                ]
        result: Any = None
        request: str | None = None
        failure: Exception | None = None
        try:
            with dist.waiting() if is_sharded_model else nullcontext():
                result = work(cuts)
        except Exception as error:
            if not is_out_of_memory(error):
                failure = error
            elif is_sharded_model:
                failure = _sharded_failure(budget)
            else:
                request = str(error)
        with dist.phase("memory back-off"):
            # a rank that is in the forward of a sharded model cannot leave it and try again
            is_short = int(request is not None)
            if not dist.share_failure(failure, is_short, in_step=is_sharded_model):
                return result
        # Here and not in the ``except`` block, whose traceback holds the failed activations.
        _free_memory(run)
        finer = 0
        with dist.phase("memory back-off"), dist.fail_together():
            if request is not None:
                finer = finer_budget(run.policy, parts, budget, sum(map(len, cuts)))
                if not finer:
                    found = re.search(r"tried to allocate ([\d.]+ ?\w+)", request, re.IGNORECASE)
                    what = f"the last request was for {found[1]}" if found else request
                    raise _does_not_fit(run, longest, what)
        run.state.token_budget = -dist.all_max(-(finer or budget))  # the smallest
        log.warning(
            "step %d: memory ran out in micro-batches of %d tokens; going on with %d. Set "
            "--optim.token-budget %d to begin there.",
            *(run.state.step, budget, run.state.token_budget, run.state.token_budget),
        )


def _micro_batches(run: Run, parts: Sequence[Part]) -> tuple[list[list[MicroBatch]], int, int]:
    """Return the micro-batches of each part, their budget, and the units of the longest row."""
    cuts = []
    largest = longest = 0
    for rollouts, mask in parts:
        budget = budget_for(run, run.memory.longest_prompt(rollouts))
        largest = max(largest, budget)
        cuts.append(run.policy.micro_batches(rollouts, mask, budget))
        if cuts[-1]:
            rows = torch.cat([micro_batch.rows for micro_batch in cuts[-1]])
            longest = max(longest, run.memory.longest_row(rollouts, rows))
    # If a row alone needs more than is free, Linux would kill the process without a message.
    free = free_bytes(run.policy.device)
    needed = longest * run.memory.bytes_per_unit(least=True)
    if free is not None and needed > free and run.policy.device.type == "cpu":
        raise _does_not_fit(
            run, longest, f"its activations alone need about {needed / GIB:.2f} GiB"
        )
    return cuts, largest, longest


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


def finer_budget(policy: Policy, parts: Sequence[Part], budget: int, count: int) -> int:
    """Return the largest halving of the budget that gives more micro-batches than ``count``; 0 if
    none does."""
    while budget > 1:
        budget //= 2
        if sum(len(policy.micro_batches(*part, budget)) for part in parts) > count:
            return budget
    return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: on a CPU, torch raises a plain RuntimeError, known by its
    text."""
    texts = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED")
    has_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return has_text or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _free_memory(run: Run) -> None:
    """Release what a failed attempt has left."""
    run.state.has_run_out = True
    run.optimizer.zero_grad(set_to_none=True)
    run.policy.compute_module.zero_grad(set_to_none=True)
    if run.critic is not None:
        run.critic.zero_grad()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _sharded_failure(budget: int) -> MemoryRanOut:
    smaller = max(budget // 2, 1)
    error = MemoryRanOut(f"""memory ran out on rank {dist.rank()} in micro-batches of {budget}
        tokens; with sharded weights, a step cannot be repeated by one rank. Resume the run: it
        continues with {smaller}.""")
    error.budget = smaller
    return error


def _does_not_fit(run: Run, units: int, reason: str) -> GruppoError:
    free = free_bytes(run.policy.device)
    room = "" if free is None else f", {free / GIB:.2f} GiB are free"
    what, remedy = run.memory.out_of_memory_hint
    return GruppoError(
        f"{what.format(units=units)} does not fit into memory: {reason}{room}, optim.token_budget "
        f"is {run.state.token_budget}. {remedy}"
    )


# --- memory ---------------------------------------------------------------------------------------


@contextmanager
def whole_weights(policy: Policy, *, engine: str = "") -> Iterator[None]:
    """Hold sharded weights whole on each rank within, for sampling; refused if they do not fit. A
    collective.

    ``engine``: its kind; servers have weights of their own.
    """
    if engine == "vllm" or not is_unit(policy.module):
        yield
        return
    sharded = sum(p.numel() for p in policy.module.parameters() if is_sharded(p))
    needed = policy.compute_dtype.itemsize * sharded
    free = free_bytes(policy.device)
    if dist.all_max(int(free is not None and needed > free)):
        raise GruppoError(
            f"""sampling with the model itself needs its weights whole on each rank,
                {needed / GIB:.2f} GiB, and {0 if free is None else free / GIB:.2f} GiB are free on
                rank {dist.rank()}""",
            advice="Sample on servers with $engine vllm, or train a smaller $model",
        )
    with gathered(policy.module):
        yield


def token_budget(run: Run) -> int:
    """Return the units of a micro-batch: as configured or chosen at the first call, fewer if memory
    has run out since.

    Chosen is the policy's default, or the largest power of two below it that free memory holds:
    wherever memory is not short the choice is the same, and a run repeats to the bit.
    """
    if not run.state.token_budget:
        run.state.token_budget = run.config.optim.token_budget or _fitting_budget(run)
    return run.state.token_budget


def _fitting_budget(run: Run) -> int:
    default = default_budget(run)
    per_unit = bytes_per_unit(run)
    usable = usable_bytes(run)
    if not per_unit or usable == math.inf:
        return default
    budget = 2 ** (max(int(usable / per_unit), 1).bit_length() - 1)
    if budget >= default:
        return default
    log.warning("memory is short: micro-batches have %d tokens in place of %d.", budget, default)
    return budget


def default_budget(run: Run) -> int:
    """Return the budget of micro-batches if memory is not short."""
    return run.memory.default_budgets[run.policy.device.type != "cpu"]


def budget_for(run: Run, longest: int) -> int:
    """Return ``token_budget``, or four times the longest prompt's length: each micro-batch of a
    group reads the prompt.

    Twice if memory does not hold that. Not if the budget was configured or memory has run out.
    """
    budget = token_budget(run)
    if run.config.optim.token_budget or run.state.has_run_out or budget < default_budget(run):
        return budget
    for wider in (4 * longest, 2 * longest):
        if wider > budget and wider * bytes_per_unit(run) <= usable_bytes(run):
            return wider
    return budget


def usable_bytes(run: Run) -> float:
    """Return the memory for activations, without float32 gradients and AdamW's state as far as they
    are not there yet."""
    free = free_bytes(run.policy.device)
    if free is None:
        return math.inf
    numbers = sum(local(parameter).numel() for parameter in run.parameters)
    if run.config.distributed.offload_params and run.policy.device.type != "cpu":
        numbers = 0
    return USABLE_FRAC * (free - 4 * numbers - (0 if run.optimizer.state else 8 * numbers))


def bytes_per_unit(run: Run) -> int:
    """Return the activation memory of one unit of the budget, of the larger of policy and critic; 0
    if unknown."""
    critic = 0 if run.critic is None else run.critic.bytes_per_unit()
    return max(run.memory.bytes_per_unit(), critic)
