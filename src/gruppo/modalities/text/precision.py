"""Master weights in float32, arithmetic in bfloat16 where that is faster: measured, not assumed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_optimizer_steps = 0


def _count_optimizer_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)  # fused optimisers do not count versions of what they change


class ComputeCopy:
    """A copy of a module's parameters in another dtype, kept in step with the master.

    What is frozen and in that dtype already, the base of an adapter, is not copied: both modules hold the same.
    The weights are cast once per update, not once per forward. Each gradient goes to the float32 master as soon as it
    is complete and is added there, so that pieces do not round each other's gradients away. Buffers keep their dtype:
    rotary frequencies in bfloat16 would be another model.
    """

    def __init__(self, master: nn.Module, dtype: torch.dtype) -> None:
        self.master = master
        self.module = copy.deepcopy(master, {id(p): p for p in master.parameters() if _is_shared(p, dtype)})
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(dtype)
        both = zip(master.parameters(), self.module.parameters(), strict=True)
        self.pairs = [(owner, copied) for owner, copied in both if owner is not copied]
        self.buffers = list(zip(master.buffers(), self.module.buffers(), strict=True))
        for owner, parameter in self.pairs:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_hand_gradient_to(owner))
        self.seen = self._versions()

    def refresh(self, *, force: bool = False) -> None:
        """Cast the weights again if an in-place operation or an optimiser may have changed them, or with ``force``."""
        versions = self._versions()
        if force or versions != self.seen:
            with torch.no_grad():
                for owner, copied in (*self.pairs, *self.buffers):
                    copied.copy_(owner)
            self.seen = versions

    def _versions(self) -> list[int]:
        return [_optimizer_steps, *(owner._version for owner, _ in (*self.pairs, *self.buffers))]


def _is_shared(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    return not parameter.requires_grad and parameter.dtype == dtype


def _hand_gradient_to(owner: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if owner.grad is None:
            owner.grad = parameter.grad.to(owner.dtype)
        else:
            owner.grad.add_(parameter.grad)
        parameter.grad = None

    return hand_over


def faster_dtype(width: int, *, rows: int = 256, device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 where a product of ``rows`` by ``width`` with a 4x wider layer is 1.2 times as fast, else float32.

    The two are timed in turn and their best times compared: what else the machine does can only slow them down.
    """
    dtypes = (torch.float32, torch.bfloat16)
    inputs = {dtype: _inputs(width, rows, dtype, device) for dtype in dtypes}
    best = dict.fromkeys(dtypes, float("inf"))
    for _ in range(12):
        for dtype in dtypes:
            best[dtype] = min(best[dtype], _time_product(*inputs[dtype]))
    return torch.bfloat16 if best[torch.bfloat16] * 1.2 <= best[torch.float32] else torch.float32


def _inputs(width: int, rows: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, width, dtype=dtype, device=device), torch.ones(4 * width, width, dtype=dtype, device=device)


def _time_product(x: Tensor, layer: Tensor) -> float:
    began = time.perf_counter()
    float(nn.functional.linear(x, layer)[0, 0])  # reading a number waits for the device
    return time.perf_counter() - began
