"""Micro-batches that fit into memory: how much is free, and how many units one forward and backward
may cover."""

from __future__ import annotations

import gc
import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import starmap
from types import TracebackType
from weakref import WeakSet

import torch
from jaxtyping import Bool
from torch import Tensor

from gruppo import distributed as dist
from gruppo.distributed.sharding import gathered, is_sharded, is_unit, local
from gruppo.platforms import free_bytes
from gruppo.protocols import MemoryMixin, Policy, part
from gruppo.trainer.run import Run
from gruppo.types import GruppoError, MicroBatch, Rollouts

log = logging.getLogger("gruppo")

USABLE_FRAC = 0.5
"""Share for activations of what gradients and optimizer state leave free. Logits and scores need
some too."""
GIB = 2**30
_logged: WeakSet[Policy] = WeakSet()
"""Policies whose gathered weights have been logged."""

Part = tuple[Rollouts, Bool[Tensor, "B T"]]
"""Rollouts, and which of their actions are evaluated."""


# --- micro-batches --------------------------------------------------------------------------------


class MemoryRanOut(GruppoError):
    """Memory ran out on a rank in a step of sharded weights, which it cannot try again alone."""

    exit_code = 75
    budget = 0
    """Tokens of a micro-batch with which a resumed run continues."""


@dataclass
class Attempt:
    """A context in which memory may run out: it gives the micro-batches of each part, and
    suppresses that error.

    Its end is a collective: where memory runs out on one rank, it has for all; where one fails, all
    do.
    """

    micro_batches: list[list[MicroBatch]]
    budget: int
    in_step: bool = False
    """Whether each forward is a collective, as with sharded weights: a rank cannot leave it and try
    again."""
    error: str | None = None
    """On this rank."""
    has_run_out: bool = False
    """On any rank."""

    def __enter__(self) -> list[list[MicroBatch]]:
        self._waits = ExitStack()
        self._waits.enter_context(dist.waiting() if self.in_step else nullcontext())
        return self.micro_batches

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None and is_out_of_memory(error):
            self.error = str(error)
            error = None
            if self.in_step:
                budget = max(self.budget // 2, 1)
                error = MemoryRanOut(f"""memory ran out on rank {dist.rank()} in micro-batches of {self.budget} tokens;
                    with sharded weights, a step cannot be repeated by one rank. Resume the run: it continues with
                    {budget}.""")
                error.budget = budget
        elif error is not None:
            try:
                self._waits.__exit__(kind, error, traceback)
            except GruppoError as lost:
                error = lost
        self._waits.close()
        if error is not None and not isinstance(error, Exception):
            return False
        with dist.phase("memory back-off"):
            self.has_run_out = (
                dist.share_failure(error, int(self.error is not None), in_step=self.in_step) > 0
            )
        return True


def attempts(run: Run, parts: Sequence[Part]) -> Iterator[Attempt]:
    """Attempts at one piece of work, until memory does not run out in one; a collective.

    ``parts``: several rollouts whose gradients add up; an attempt covers all of them. Gradients are
    set to zero before the next attempt, so that no micro-batch counts twice. The smaller budget
    stays for the rest of the run, on all ranks.
    """
    while True:
        with dist.phase("micro-batches"), dist.fail_together():
            is_chosen = run.state.token_budget or run.config.optim.token_budget
            if (
                not is_chosen
                and run.policy.device.type == "cuda"
                and not is_unit(run.policy.module)
            ):
                token_budget(run, measured_bytes(run.policy, *parts[0]))
            budgets = [
                budget_for(run, run.memory.longest_prompt(rollouts)) for rollouts, _ in parts
            ]
            cuts = [
                run.policy.micro_batches(*part, budget)
                for part, budget in zip(parts, budgets, strict=True)
            ]
            # units of the longest row in the micro-batches, its prompt included
            own = (
                (part[0], torch.cat([mb.rows for mb in cut]))
                for part, cut in zip(parts, cuts, strict=True)
                if cut
            )
            longest = max(starmap(run.memory.longest_row, own), default=0)
            # Where a row alone needs more than is free, Linux would kill the process without a
            # message.
            free, needed = (
                free_bytes(run.policy.device),
                longest * run.memory.bytes_per_unit(least=True),
            )
            if free is not None and needed > free and run.policy.device.type == "cpu":
                raise _does_not_fit(
                    run, longest, f"its activations alone need about {needed / GIB:.2f} GiB"
                )
        in_step = is_unit(run.policy.module)
        if in_step:
            with dist.phase("micro-batches"):
                cuts = [
                    equally_many(run.policy, part[0], cut)
                    for part, cut in zip(parts, cuts, strict=True)
                ]
        attempt = Attempt(cuts, max(budgets), in_step)
        yield attempt
        if not attempt.has_run_out:
            return
        run.state.has_run_out = True
        # Here and not in an ``except`` block, whose traceback would hold the activations of the
        # failed attempt.
        run.optimizer.zero_grad(set_to_none=True)
        run.policy.compute_module.zero_grad(set_to_none=True)
        if run.critic is not None:
            run.critic.zero_grad()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        finer = 0
        with dist.phase("memory back-off"), dist.fail_together():
            if attempt.error is not None:
                finer = finer_budget(run.policy, parts, attempt.budget, sum(map(len, cuts)))
                if not finer:
                    request = re.search(
                        r"tried to allocate ([\d.]+ ?\w+)", attempt.error, re.IGNORECASE
                    )
                    raise _does_not_fit(
                        run, longest, f"the last request was for {request[1]}" if request else ""
                    )
        budget = run.state.token_budget = -dist.all_max(-(finer or attempt.budget))  # the least
        text = (
            "step %d: memory ran out in micro-batches of %d tokens; going on with %d. Set "
            "--optim.token-budget %d "
        )
        log.warning(text + "to begin there.", run.state.step, attempt.budget, budget, budget)


def equally_many(
    policy: Policy, rollouts: Rollouts, micro_batches: list[MicroBatch]
) -> list[MicroBatch]:
    """As many micro-batches as the rank with most has: further ones repeat the smallest, at zero
    weight. A collective.

    Sharded weights are gathered, and gradients reduced, in each forward and backward of all ranks.
    A repeat has actions that the policy chose, so that its gradients, all zero, are of the same
    weights as those of other ranks.
    """
    missing = dist.all_max(len(micro_batches)) - len(micro_batches)
    spare = min(micro_batches, key=lambda micro_batch: len(micro_batch.rows), default=None)
    if spare is None and rollouts.mask.any():  # no row of this rank has a loss
        has_action = rollouts.mask.any(dim=1)
        first = torch.arange(len(has_action)) == int(has_action.int().argmax())
        spare = policy.micro_batches(rollouts, rollouts.mask & first[:, None], 1)[0]
    if dist.all_max(int(missing > 0 and spare is None)):
        raise GruppoError(
            "a rank has no row of a minibatch to run, which sharded weights need on all ranks",
            option="optim.minibatches",
            advice="""1, and $supervised.batch to a multiple of the ranks where demonstrations are
                learned from""",
        )
    return (
        micro_batches
        if spare is None
        else [*micro_batches, *[replace(spare, is_repeat=True)] * missing]
    )


def finer_budget(policy: Policy, parts: Sequence[Part], budget: int, count: int) -> int:
    """The largest halving of the budget that gives more micro-batches than ``count``; 0 where none
    does."""
    while budget > 1:
        budget //= 2
        if sum(len(policy.micro_batches(*part, budget)) for part in parts) > count:
            return budget
    return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: on a CPU, torch raises a plain RuntimeError, known by its text."""
    texts = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED")
    has_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return has_text or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _does_not_fit(run: Run, units: int, reason: str) -> GruppoError:
    free = free_bytes(run.policy.device)
    numbers = [reason] if reason else []
    numbers += [] if free is None else [f"{free / GIB:.2f} GiB are free"]
    numbers += [f"optim.token_budget is {run.state.token_budget}"]
    what, remedy = run.memory.out_of_memory_hint
    return GruppoError(
        f"{what.format(units=units)} does not fit into memory: {', '.join(numbers)}. {remedy}"
    )


# --- the budget -----------------------------------------------------------------------------------


@contextmanager
def whole_weights(policy: Policy, *, engine: str = "") -> Iterator[None]:
    """Hold sharded weights whole on each rank within, for sampling; refused where they do not fit.
    A collective.

    ``engine``: its kind; servers have weights of their own.
    """
    if engine == "vllm" or not is_unit(policy.module):
        yield
        return
    needed = policy.compute_dtype.itemsize * sum(
        p.numel() for p in policy.module.parameters() if is_sharded(p)
    )
    free = free_bytes(policy.device)
    if dist.all_max(int(free is not None and needed > free)):
        raise GruppoError(
            f"""sampling with the model itself needs its weights whole on each rank,
                {needed / GIB:.2f} GiB, and {0 if free is None else free / GIB:.2f} GiB are free on
                rank {dist.rank()}""",
            advice="Sample on servers with $engine vllm, or train a smaller $model",
        )
    if policy not in _logged:
        _logged.add(policy)
        log.info(
            "sampling gathers the sharded weights: %.2f GiB on each rank, while it samples.",
            needed / GIB,
        )
    with gathered(policy.module):
        yield


def measured_bytes(policy: Policy, rollouts: Rollouts, mask: Bool[Tensor, "B T"]) -> int:
    """Bytes of one unit that a forward on CUDA needs at its peak, measured on the longest row; 0
    without a row."""
    rows = mask.any(dim=1).nonzero()[:, 0].tolist()
    row = max(
        rows,
        key=lambda row: part(policy, MemoryMixin).longest_row(rollouts, torch.tensor([row])),
        default=None,
    )
    if row is None:
        return 0
    (micro_batch, *_) = policy.micro_batches(
        rollouts, mask & (torch.arange(len(mask)) == row)[:, None], 1
    )
    # with a gradient, as in an update: what the backward needs is kept, and the peak is that of the
    # forward
    peaks = []
    for _ in range(2):  # the first call compiles, and takes workspaces that stay
        torch.cuda.reset_peak_memory_stats(policy.device)
        before = torch.cuda.memory_allocated(policy.device)
        with torch.enable_grad():
            likelihood = policy.likelihood(rollouts, micro_batch)
        peaks.append(torch.cuda.max_memory_allocated(policy.device) - before)
        del likelihood
    return math.ceil(
        peaks[-1] / part(policy, MemoryMixin).longest_row(rollouts, torch.tensor([row]))
    )


def token_budget(run: Run, measured: int = 0) -> int:
    """Units of a micro-batch: as configured or chosen at the first call, fewer where memory has run
    out since.

    ``measured``: bytes of a unit, where they were measured; else they are estimated from the
    model's shape.

    Chosen is the policy's default, or the largest power of two below it that free memory holds:
    wherever memory is not short the choice is the same, and a run repeats to the bit.
    """
    if run.state.token_budget:
        return run.state.token_budget
    budget, free, per_unit = (
        default_budget(run),
        free_bytes(run.policy.device),
        bytes_per_unit(run, measured),
    )
    if run.config.optim.token_budget:
        budget = run.config.optim.token_budget
    elif free is not None and per_unit:
        fits = max(int(USABLE_FRAC * (free - still_to_come(run)) / per_unit), 1)
        chosen = min(budget, 2 ** (fits.bit_length() - 1))
        if chosen < budget:
            log.warning(
                "%.2f GiB are free: micro-batches have %d tokens in place of %d.",
                free / GIB,
                chosen,
                budget,
            )
        budget = chosen
    run.state.token_budget = budget
    return budget


def default_budget(run: Run) -> int:
    """Return the budget of micro-batches if memory is not short."""
    return run.memory.default_budgets[run.policy.device.type != "cpu"]


def budget_for(run: Run, longest: int) -> int:
    """``token_budget``, or four times the longest prompt's length: each micro-batch of a group
    reads the prompt.

    Twice where memory does not hold that. Not where the budget was configured or memory has run
    out.
    """
    budget = token_budget(run)
    if run.config.optim.token_budget or run.state.has_run_out or budget < default_budget(run):
        return budget
    free = free_bytes(run.policy.device)
    room = math.inf if free is None else USABLE_FRAC * (free - still_to_come(run))
    wider = (times * longest for times in (4, 2))
    return next((w for w in wider if w > budget and w * bytes_per_unit(run) <= room), budget)


def still_to_come(run: Run) -> int:
    """Bytes of float32 gradients and of AdamW's state, as far as they are not there yet."""
    numbers = sum(local(p).numel() for p in run.parameters)
    is_on_cpu = run.policy.device.type == "cpu"
    if run.config.distributed.offload_params and not is_on_cpu:
        return 0
    return 4 * numbers + (0 if run.optimizer.state else 8 * numbers)


def bytes_per_unit(run: Run, measured: int = 0) -> int:
    """Activation memory of one unit of the budget, of the larger of policy and critic; 0 if
    unknown.

    ``measured``: the policy's, where it was.
    """
    return max(
        measured or run.memory.bytes_per_unit(),
        0 if run.critic is None else run.critic.bytes_per_unit(),
    )
