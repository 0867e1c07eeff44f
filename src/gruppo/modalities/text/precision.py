"""Master weights in float32, compute in bfloat16 where a measurement shows that it is faster."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

PIECE = 2**17
"""Numbers of a gradient that are added at once: torch adds another dtype by way of a copy, which
then fills half a core's cache of 1 MiB. A gradient of 49,152 x 576 takes 18 ms in place of 74 ms on
one core of a Zen 4."""
_optimizer_steps = 0


def _count_optimizer_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(
    _count_optimizer_step
)  # fused optimizers do not change the versions of their tensors


class ComputeCopy:
    """A copy of a module's parameters in another dtype that follows the master.

    Frozen parameters of that dtype, such as the base of an adapter, and those in 4 bits are shared,
    not copied. Weights are cast once per update, not once per forward. Each gradient is added to
    that of the float32 master as soon as it is complete, so that micro-batches do not round each
    other's gradients away. Buffers keep their dtype: rotary frequencies in bfloat16 would change
    the model.
    """

    def __init__(self, master: nn.Module, dtype: torch.dtype) -> None:
        self.master = master
        frozen = [parameter for parameter in master.parameters() if not parameter.requires_grad]
        shared = {id(p): p for p in frozen if p.dtype == dtype or not p.is_floating_point()}
        self.module = copy.deepcopy(master, shared)
        for parameter in self.module.parameters():
            if id(parameter) not in shared:
                parameter.data = parameter.data.to(dtype)
        both = zip(master.parameters(), self.module.parameters(), strict=True)
        self.pairs = [(owner, copied) for owner, copied in both if owner is not copied]
        self.buffers = list(zip(master.buffers(), self.module.buffers(), strict=True))
        for owner, parameter in self.pairs:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_add_gradient, owner))
        self.owners = [owner for owner, _ in (*self.pairs, *self.buffers)]
        self.seen = weight_versions(self.owners)

    def refresh(self, *, force: bool = False) -> None:
        """Cast the weights again if an in-place operation or an optimizer may have changed them, or
        with ``force``."""
        versions = weight_versions(self.owners)
        if force or versions != self.seen:
            with torch.no_grad():
                for owner, copied in (*self.pairs, *self.buffers):
                    copied.copy_(owner)
            self.seen = versions


def weight_versions(tensors: Iterable[Tensor]) -> list[int]:
    """Numbers that change when an in-place operation or an optimizer may have changed one of the
    tensors."""
    return [_optimizer_steps, *(tensor._version for tensor in tensors)]


def _add_gradient(owner: nn.Parameter, parameter: Tensor) -> None:
    """Move the gradient of the copy to the master."""
    if parameter.grad is None:
        return
    if owner.grad is None:
        owner.grad = parameter.grad.to(owner.dtype)
    elif parameter.numel() <= PIECE or parameter.device.type != "cpu":
        owner.grad.add_(parameter.grad)
    else:
        rows = max(PIECE * len(parameter) // parameter.numel(), 1)
        for sums, gradient in zip(owner.grad.split(rows), parameter.grad.split(rows), strict=True):
            sums.add_(gradient)
    parameter.grad = None


def faster_dtype(width: int, *, rows: int = 256, device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 where a product of ``rows`` by ``width`` with a 4x wider layer is 1.2 times as fast,
    else float32.

    The two are timed in turn and their best times compared: other load on the machine can only slow
    them down.
    """
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    inputs = {
        d: tuple(torch.ones(size, width, dtype=d, device=device) for size in (rows, 4 * width))
        for d in best
    }
    for _ in range(12):
        for dtype, (x, layer) in inputs.items():
            start = time.perf_counter()
            float(nn.functional.linear(x, layer)[0, 0])  # reading a number waits for the device
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return torch.bfloat16 if best[torch.bfloat16] * 1.2 <= best[torch.float32] else torch.float32
