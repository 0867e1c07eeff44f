"""Decoding in buffers of fixed sizes, so that one CUDA graph runs all layers of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gruppo.modalities.text.decoding import LayeredDecoding

log = logging.getLogger("gruppo")


class StaticDecoding(LayeredDecoding):
    """``LayeredDecoding`` whose step reads and writes the same buffers each time, all cells of the
    grid included.

    The column to write is a number on the device, and columns that are not written yet are masked.
    Buffers change their sizes when they are full, and when half of the grid is empty; the next step
    is then recorded anew.
    """

    columns = 128
    min_used_frac = 0.5
    graph: Graph | None = None

    def _resize(self, *args: Any) -> None:
        super()._resize(*args)
        self.graph = None

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        self._grow()
        if self.graph is None:
            self.graph = Graph()
            self.tokens = torch.zeros_like(self.first)
            self.column = self.first.new_zeros(1)
            self.slots = torch.arange(len(self.first), device=self.first.device)
        self.tokens[self.slot_of_row] = tokens
        self.column.fill_(self.written)  # in place: the recorded step reads this tensor
        self.logits = self.graph.run(self._step)[self.slot_of_row]
        self.written += 1

    def _step(self) -> Float[Tensor, "slots V"]:
        """Logits of all slots; nothing here depends on a number that the host knows and that
        changes."""
        width = self.suffixes[0].shape[-2]
        columns = torch.arange(width, device=self.column.device)
        hidden = (columns > self.column) | (columns < self.first[:, None])
        hidden = hidden.view(self.groups, 1, self.width, 1, 1, width)
        x = self._forward(self.tokens, self.slots, self.column, None, hidden, width)
        return self.fused.head(x)


@dataclass(eq=False)
class Graph:
    """A step as one CUDA graph: run plainly at the first call, recorded at the second, replayed
    from then on.

    The step reads and writes buffers that stay where they are. Elsewhere than on CUDA, or if
    recording fails (with one warning), each call runs it plainly. The step is not kept: it belongs
    to the decoding that owns the graph, and a cycle of references would keep all buffers until
    Python's collector runs.
    """

    has_failed: ClassVar = False
    calls: int = 0
    graph: Any = None
    out: Any = None

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == 2 and torch.cuda.is_available() and not Graph.has_failed:
            self._record(step)
        if self.graph is None:
            return step()
        self.graph.replay()
        return self.out

    def _record(self, step: Callable[[], Tensor]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, such as one that writes a checkpoint, continue with their calls
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.out = step()
            self.graph = graph
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            Graph.has_failed = True
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("decoding: no CUDA graph can be recorded, which is slower: %.200s", first)
