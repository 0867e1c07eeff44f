"""Free memory, and how many tokens one forward and backward may cover in it."""

from __future__ import annotations

import gc
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

from gruppo.modalities.common.critic import SeparateCritic
from gruppo.modalities.diffusion import DiffusersPolicy
from gruppo.modalities.text import TextPolicy
from gruppo.trainer.run import Run
from gruppo.types import GruppoError, MicroBatch, Rollouts

log = logging.getLogger("gruppo")

TOKENS_ON_CPU, TOKENS = 640, 16384
"""Where memory is not short. A CPU's products are nearly as fast at 600 rows as at more; an accelerator's are not."""
EVALUATIONS_ON_CPU, EVALUATIONS, EVALUATIONS_OF_PIPELINES = 128, 1024, 8
"""Of a denoising network: a small one on a CPU and on an accelerator, and one of a pipeline."""
SQUARES_ON_CPU, SQUARES = 4096, 65536
"""Of a network that restores images: squares of 16 x 16 pixels."""
USABLE_FRAC = 0.5
"""Of what gradients and the optimiser's state leave free, for activations. Logits and scores need some too."""
GIB = 2**30

T = TypeVar("T")
Part = tuple[Rollouts, Bool[Tensor, "B T"]]
"""Rollouts, and which of their actions are wanted."""


# --- pieces that fit --------------------------------------------------------------------------------------------------


def in_micro_batches(
    run: Run, rollouts: Rollouts, wanted: Bool[Tensor, "B T"], work: Callable[[list[MicroBatch]], T]
) -> T:
    """``work`` on pieces that cover ``wanted``; where memory runs out, all of it again on smaller ones.

    Gradients are set to zero before another attempt, so that no piece counts twice. The smaller budget stays for the
    rest of the run. No rank asks another here.
    """
    return in_micro_batches_of(run, [(rollouts, wanted)], lambda cuts: work(cuts[0]))


def in_micro_batches_of(run: Run, parts: Sequence[Part], work: Callable[[list[list[MicroBatch]]], T]) -> T:
    """``in_pieces`` of several rollouts whose gradients add up: a second attempt begins again with all of them."""
    while True:
        budgets = [budget_for(run, _longest_prompt(rollouts)) for rollouts, _ in parts]
        cuts = [run.policy.micro_batches(*part, budget) for part, budget in zip(parts, budgets, strict=True)]
        longest, budget = max(_longest(part[0], cut) for part, cut in zip(parts, cuts, strict=True)), max(budgets)
        _refuse_hopeless(run, longest)
        try:
            return work(cuts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            said = str(error)
        run.has_run_out = True
        _release(run)  # here, where the traceback no longer holds what the failed attempt had made
        run.token_budget = _finer(run, parts, budget, sum(map(len, cuts))) or _give_up(run, longest, said)
        log.warning(
            "step %d: memory ran out in pieces of %d tokens; going on with %d. Set --optim.token-budget %d to begin "
            "there.",
            run.step,
            budget,
            run.token_budget,
            run.token_budget,
        )


def _finer(run: Run, parts: Sequence[Part], budget: int, count: int) -> int:
    """The largest halving of the budget that gives more pieces than ``count``; 0 where none does."""
    while budget > 1:
        budget //= 2
        if sum(len(run.policy.micro_batches(*part, budget)) for part in parts) > count:
            return budget
    return 0


def _release(run: Run) -> None:
    """No gradient of a half-done pass, and no memory that it leaves in caches."""
    run.optimizer.zero_grad(set_to_none=True)
    run.policy.compute_module.zero_grad(set_to_none=True)
    if isinstance(run.critic, SeparateCritic) and run.critic.compute_copy is not None:
        run.critic.compute_copy.zero_grad(set_to_none=True)
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
    free = free_bytes(device_of(run))
    needs = longest * bytes_per_token(run, "stream")  # the least that any layout keeps
    if free is not None and needs > free and device_of(run).type == "cpu":
        raise _does_not_fit(run, longest, f"its activations alone need about {needs / GIB:.2f} GiB")


def _does_not_fit(run: Run, tokens: int, why: str) -> GruppoError:
    free = free_bytes(device_of(run))
    numbers = [why] if why else []
    numbers += [] if free is None else [f"{free / GIB:.2f} GiB are free"]
    numbers += [f"optim.token_budget is {run.token_budget}"]
    if run.restores:
        return GruppoError(
            f"one picture does not fit into memory: {', '.join(numbers)}. Crop the data smaller (crop=64), or train a "
            "smaller network."
        )
    if run.is_gaussian:
        return GruppoError(
            f"one evaluation of the network does not fit into memory: {', '.join(numbers)}. Train smaller pictures "
            "(--diffusion.size), a --lora.rank in place of all weights, or a smaller --model."
        )
    return GruppoError(
        f"one row of {tokens} tokens does not fit into memory: {', '.join(numbers)}. Set a lower "
        "--rollout.max-new-tokens, shorten the prompts, or train a smaller --model; --optim.token-budget cannot cut a "
        "row."
    )


def _longest(rollouts: Rollouts, micro_batches: list[MicroBatch]) -> int:
    """Tokens of the longest row in the pieces, its prompt included."""
    if not micro_batches:
        return 0
    rows = torch.cat([micro_batch.rows for micro_batch in micro_batches])
    prompts = rollouts.shared.get("prompt_ids")
    before = torch.tensor([len(ids) for ids in prompts])[rollouts.group_ids[rows]] if prompts is not None else 0
    return int((rollouts.lengths[rows] + before).max())


# --- the budget -------------------------------------------------------------------------------------------------------


def token_budget(run: Run) -> int:
    """Tokens of a piece: what was set, or chosen at the first call; less where memory has run out since."""
    if not run.token_budget:
        run.token_budget = run.config.optim.token_budget or choose(run)
    return run.token_budget


def budget_for(run: Run, longest: int) -> int:
    """``token_budget``, or four times the longest prompt's: each piece of a group reads the prompt, short ones often.

    Twice where memory does not hold that. Not where the budget was set or memory has run out.
    """
    budget, device = token_budget(run), device_of(run)
    if run.config.optim.token_budget or run.has_run_out or budget < _usual(run, device):
        return budget
    free = free_bytes(device)
    room = math.inf if free is None else USABLE_FRAC * (free - still_to_come(run))
    wider = (times * longest for times in (4, 2))
    return next((w for w in wider if w > budget and w * bytes_per_token(run) <= room), budget)


def _longest_prompt(rollouts: Rollouts) -> int:
    return max((len(ids) for ids in rollouts.shared.get("prompt_ids", ())), default=0)


def _usual(run: Run, device: torch.device) -> int:
    if isinstance(run.policy, DiffusersPolicy):
        return EVALUATIONS_OF_PIPELINES
    if run.restores:
        return SQUARES_ON_CPU if device.type == "cpu" else SQUARES
    is_text = isinstance(run.policy, TextPolicy)
    on_cpu, elsewhere = (TOKENS_ON_CPU, TOKENS) if is_text else (EVALUATIONS_ON_CPU, EVALUATIONS)
    return on_cpu if device.type == "cpu" else elsewhere


def choose(run: Run) -> int:
    """A fixed number of the device's kind, or the largest power of two below it that free memory holds.

    Wherever memory is not short the choice is the same, and a run repeats to the bit.
    """
    device, per_token = device_of(run), bytes_per_token(run)
    usual, free = _usual(run, device), free_bytes(device)
    if free is None or not per_token:
        return usual
    fits = max(int(USABLE_FRAC * (free - still_to_come(run)) / per_token), 1)
    chosen = min(usual, 2 ** (fits.bit_length() - 1))
    if chosen < usual:
        log.warning("%.2f GiB are free: pieces have %d tokens in place of %d.", free / GIB, chosen, usual)
    return chosen


def still_to_come(run: Run) -> int:
    """Bytes of float32 gradients and of AdamW's state, as far as they are not there yet."""
    numbers = sum(p.numel() for p in run.parameters)
    return 4 * numbers + (0 if run.optimizer.state else 8 * numbers)


def bytes_per_token(run: Run, layout: str | None = None) -> int:
    """Activations of the larger of policy and critic; 0 where a module does not say its sizes."""
    if not isinstance(run.policy, TextPolicy):
        return 0
    layout = layout or run.policy.backbone.layout
    width = 2 if run.policy.compute_dtype == torch.bfloat16 else 4
    modules = [run.policy.module, *([run.critic.trunk] if isinstance(run.critic, SeparateCritic) else [])]
    return max(_activations_of_token(getattr(module, "config", None), width, layout) for module in modules)


def _activations_of_token(config: Any, width: int, layout: str) -> int:
    """0 where a config does not say what it would take, as those of recurrent models."""
    try:
        return activations(config, 1, width, layout)
    except (AttributeError, TypeError):
        return 0


def activations(config: Any, tokens: int, width: int, layout: str) -> int:
    """T layers (6 H + 2 K + 2 F) width of our own layers, ("stream"), T layers (16 H + 4 F) width of a model's.

    H numbers of a feature, K of a key, F of the feed-forward; ours are inputs, norms, q, k, v, what attention gives,
    gate and up. Counted for the Llama layout, whose own norms and rotations keep float32; it has 0.4 and 0.95 MB a
    token at 135M weights in bfloat16.
    """
    model = config.get_text_config()
    feed_forward = getattr(model, "intermediate_size", None) or 4 * model.hidden_size
    numbers = 16 * model.hidden_size + 4 * feed_forward
    if layout == "stream":
        numbers = 6 * model.hidden_size + 2 * key_numbers(model) + 2 * feed_forward
    return width * tokens * model.num_hidden_layers * numbers


def key_numbers(model: Any) -> int:
    """Of one token in one layer; a value has as many."""
    heads = model.num_attention_heads
    size_of_head = getattr(model, "head_dim", None) or model.hidden_size // heads
    return size_of_head * (getattr(model, "num_key_value_heads", None) or heads)


def device_of(run: Run) -> torch.device:
    return next(run.policy.module.parameters()).device


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
