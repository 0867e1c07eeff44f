"""Free memory, and how many tokens one forward and backward may cover in it."""

from __future__ import annotations

import gc
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from gruppo.trainer.run import Run
from gruppo.types import GruppoError, MicroBatch, Rollouts

log = logging.getLogger("gruppo")

USABLE_FRAC = 0.5
"""Of what gradients and the optimiser's state leave free, for activations. Logits and scores need some too."""
GIB = 2**30

T = TypeVar("T")
Part = tuple[Rollouts, Bool[Tensor, "B T"]]
"""Rollouts, and which of their actions are wanted."""


# --- micro-batches that fit -------------------------------------------------------------------------------------------


def in_micro_batches(
    run: Run, rollouts: Rollouts, wanted: Bool[Tensor, "B T"], work: Callable[[list[MicroBatch]], T]
) -> T:
    """``work`` on micro-batches that cover ``wanted``; where memory runs out, all of it again on smaller ones.

    Gradients are set to zero before another attempt, so that no micro-batch counts twice. The smaller budget
    stays for the rest of the run. No rank asks another here.
    """
    return in_micro_batches_of(run, [(rollouts, wanted)], lambda cuts: work(cuts[0]))


def in_micro_batches_of(run: Run, parts: Sequence[Part], work: Callable[[list[list[MicroBatch]]], T]) -> T:
    """``in_pieces`` of several rollouts whose gradients add up: a second attempt begins again with all of them."""
    while True:
        budgets = [budget_for(run, run.policy.longest_prompt(rollouts)) for rollouts, _ in parts]
        cuts = [run.policy.micro_batches(*part, budget) for part, budget in zip(parts, budgets, strict=True)]
        longest, budget = max(_longest(run, part[0], cut) for part, cut in zip(parts, cuts, strict=True)), max(budgets)
        _refuse_hopeless(run, longest)
        try:
            return work(cuts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = str(error)
        run.state.has_run_out = True
        _release(run)  # here, where the traceback no longer holds what the failed attempt had made
        run.state.token_budget = _finer(run, parts, budget, sum(map(len, cuts))) or _give_up(run, longest, said)
        log.warning(
            "step %d: memory ran out in micro-batches of %d tokens; going on with %d. Set --optim.token-budget %d "
            "to begin there.",
            run.state.step,
            budget,
            run.state.token_budget,
            run.state.token_budget,
        )


def _finer(run: Run, parts: Sequence[Part], budget: int, count: int) -> int:
    """The largest halving of the budget that gives more micro-batches than ``count``; 0 where none does."""
    while budget > 1:
        budget //= 2
        if sum(len(run.policy.micro_batches(*part, budget)) for part in parts) > count:
            return budget
    return 0


def _release(run: Run) -> None:
    """No gradient of a half-done pass, and no memory that it leaves in caches."""
    run.optimizer.zero_grad(set_to_none=True)
    run.policy.compute_module.zero_grad(set_to_none=True)
    if run.critic is not None:
        run.critic.zero_grad()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """On a CPU torch raises a plain RuntimeError, known by its text."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _give_up(run: Run, longest: int, said: str) -> int:
    asked = re.search(r"tried to allocate ([\d.]+ ?\w+)", said, re.IGNORECASE)
    raise _does_not_fit(run, longest, f"the last request was for {asked[1]}" if asked else "")


def _refuse_hopeless(run: Run, longest: int) -> None:
    """Where the longest row alone needs more than is free, Linux would end the process without a word."""
    free = free_bytes(run.policy.device)
    needs = longest * run.policy.bytes_per_unit(least=True)  # the least that any layout keeps
    if free is not None and needs > free and run.policy.device.type == "cpu":
        raise _does_not_fit(run, longest, f"its activations alone need about {needs / GIB:.2f} GiB")


def _does_not_fit(run: Run, tokens: int, why: str) -> GruppoError:
    free = free_bytes(run.policy.device)
    numbers = [why] if why else []
    numbers += [] if free is None else [f"{free / GIB:.2f} GiB are free"]
    numbers += [f"optim.token_budget is {run.state.token_budget}"]
    what, remedy = run.policy.out_of_memory_hint
    return GruppoError(f"{what.format(units=tokens)} does not fit into memory: {', '.join(numbers)}. {remedy}")


def _longest(run: Run, rollouts: Rollouts, micro_batches: list[MicroBatch]) -> int:
    """Units of the longest row in the micro-batches, its prompt included."""
    if not micro_batches:
        return 0
    return run.policy.longest_row(rollouts, torch.cat([micro_batch.rows for micro_batch in micro_batches]))


# --- the budget -------------------------------------------------------------------------------------------------------


def token_budget(run: Run) -> int:
    """Tokens of a micro-batch: what was set, or chosen at the first call; less where memory has run out since."""
    if not run.state.token_budget:
        run.state.token_budget = run.config.optim.token_budget or choose(run)
    return run.state.token_budget


def budget_for(run: Run, longest: int) -> int:
    """``token_budget``, or four times the longest prompt's: each micro-batch of a group reads the prompt.

    Twice where memory does not hold that. Not where the budget was set or memory has run out.
    """
    budget, device = token_budget(run), run.policy.device
    if run.config.optim.token_budget or run.state.has_run_out or budget < run.policy.default_budget:
        return budget
    free = free_bytes(device)
    room = math.inf if free is None else USABLE_FRAC * (free - still_to_come(run))
    wider = (times * longest for times in (4, 2))
    return next((w for w in wider if w > budget and w * bytes_per_unit(run) <= room), budget)


def choose(run: Run) -> int:
    """A fixed number of the device's kind, or the largest power of two below it that free memory holds.

    Wherever memory is not short the choice is the same, and a run repeats to the bit.
    """
    device, per_token = run.policy.device, bytes_per_unit(run)
    usual, free = run.policy.default_budget, free_bytes(device)
    if free is None or not per_token:
        return usual
    fits = max(int(USABLE_FRAC * (free - still_to_come(run)) / per_token), 1)
    chosen = min(usual, 2 ** (fits.bit_length() - 1))
    if chosen < usual:
        log.warning("%.2f GiB are free: micro-batches have %d tokens in place of %d.", free / GIB, chosen, usual)
    return chosen


def still_to_come(run: Run) -> int:
    """Bytes of float32 gradients and of AdamW's state, as far as they are not there yet."""
    numbers = sum(p.numel() for p in run.parameters)
    return 4 * numbers + (0 if run.optimizer.state else 8 * numbers)


def bytes_per_unit(run: Run) -> int:
    """Activation memory of one unit of the budget, of the larger of policy and critic; 0 if unknown."""
    return max(run.policy.bytes_per_unit(), 0 if run.critic is None else run.critic.bytes_per_unit())


# --- what is free -----------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Memory that can still be had: of the accelerator, or of this machine and this process's control groups."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min((*_left_on_machine(root), *_left_in_groups(root)), default=None)


def _left_on_machine(root: Path) -> Iterator[int]:
    numbers = _numbers(root / "proc/meminfo")
    if "MemAvailable:" in numbers:
        yield 1024 * (numbers["MemAvailable:"] + numbers.get("SwapFree:", 0))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Limit less use of each group that this process is in, versions 2 and 1. Pages of files can be dropped: free."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            names, pages, top = ("memory.max", "memory.current"), "", base
        elif "memory" in kinds.split(","):
            names, pages, top = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_", base / "memory"
        else:
            continue
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():  # "max" is no limit
                stat = _numbers(folder / "memory.stat")
                files = stat.get(f"{pages}inactive_file", 0) + stat.get(f"{pages}active_file", 0)
                yield max(int(limit) - int(used) + files, 0)
            if folder == top:
                break


def _numbers(path: Path) -> dict[str, int]:
    """First word to second, of lines such as ``MemFree: 17 kB``."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
