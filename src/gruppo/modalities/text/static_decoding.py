"""Decoding in buffers of fixed sizes, so that one CUDA graph runs all layers of a step."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gruppo.modalities.text.decoding import LayeredDecoding

log = logging.getLogger("gruppo")


class StaticDecoding(LayeredDecoding):
    """``LayeredDecoding`` whose step reads and writes the same buffers each time, all slots of the
    grid included.

    The column to write is a number on the device, and columns that are not written yet are masked.
    Buffers change their sizes when they are full, and when half of the grid is empty; the first
    step after that is run plainly, the second is recorded, and further ones replay it. Elsewhere
    than on CUDA, or if recording fails (with one warning), each step is run plainly.
    """

    columns = 128
    min_used_frac = 0.5
    can_record: ClassVar[bool] = True
    steps = 0
    """Steps since the buffers have their sizes."""
    graph: Any = None

    def _resize(self, *args: Any) -> None:
        super()._resize(*args)
        self.steps, self.graph = 0, None

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        self._grow()
        if self.steps == 0:
            self.tokens = torch.zeros_like(self.first)
            self.column = self.first.new_zeros(1)
            self.slots = torch.arange(len(self.first), device=self.first.device)
        self.tokens[self.slot_of_row] = tokens
        self.column.fill_(self.written)  # in place: the recorded step reads this tensor
        if self.steps == 1 and torch.cuda.is_available() and StaticDecoding.can_record:
            self._record()
        if self.graph is None:
            self.out = self._step()
        else:
            self.graph.replay()
        self.logits = self.out[self.slot_of_row]
        self.steps += 1
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

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, such as one that writes a checkpoint, continue with their calls
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.out = self._step()
            self.graph = graph
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            StaticDecoding.can_record = False
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("decoding: no CUDA graph can be recorded, which is slower: %.200s", first)
