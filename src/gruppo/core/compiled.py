"""Functions that torch.compile fuses on CUDA. The plain path beside each one runs on a CPU, or
after one warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError

log = logging.getLogger("gruppo")

DEVICES = {"cuda"}
"""Kinds of devices on which functions are compiled. A CPU's plain path is tuned by hand, and
compiling takes longer."""
BACKEND = "inductor"


@dataclass(eq=False)
class Compiled:
    """A function that is compiled at its first call on CUDA, for tensors of any size, in one graph.

    Where compiling fails (no compiler, a GPU older than Triton supports, too many variants), one
    warning is logged, and from then on ``is_used`` is False: ``function`` itself runs, or with
    ``needs_compiling`` the caller's plain path.
    """

    function: Callable[..., Any]
    name: str
    needs_compiling: bool = False
    has_failed: bool = False

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        # fullgraph: past the limit of variants an error, where the default would run uncompiled
        # without a word
        return torch.compile(self.function, backend=BACKEND, dynamic=True, fullgraph=True)

    def is_used(self, device: torch.device) -> bool:
        return device.type in DEVICES and not self.has_failed

    def __call__(self, *args: Any) -> Any:
        if not self.is_used(next(x.device for x in args if isinstance(x, torch.Tensor))):
            return self.function(*args)
        try:
            return self._compiled(*args)
        except torch.OutOfMemoryError:  # another matter, for which micro-batches become smaller
            raise
        except _StopRecomputationError:  # how checkpointing ends a recomputation early
            raise
        except Exception as error:
            self.fail(error)
            if self.needs_compiling:
                raise NotCompiled(self.name) from error
            return self.function(*args)

    def fail(self, reason: object) -> None:
        """Run the plain path from now on."""
        if not self.has_failed:
            first = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
            message = (
                "%s: the compiled form failed, so the plain path is used, which is slower: %.200s"
            )
            log.warning(message, self.name, first)
        self.has_failed = True


class NotCompiled(Exception):
    """A function that runs only compiled could not be compiled."""
