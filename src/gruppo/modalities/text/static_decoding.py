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
    """``LayeredDecoding`` whose step reads and writes the same buffers each time, all cells of the grid included.

    The column to write is a number on the device, and columns that are not written yet are masked. Buffers change their
    sizes when they are full, and when half of the grid is empty; the next step is then recorded anew.
    """

    columns = 128
    kept_frac = 0.5

    def _new_step(self) -> None:
        """Make the buffers of a step at the present sizes; called wherever those have changed."""
        device = self.owners.device
        self.tokens = torch.zeros(self.groups * self.width, dtype=torch.long, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.before = self.lengths.repeat_interleave(self.width) - self.first  # of each cell
        self.graph = Graph()

    def _lay_out(self, owners: Int[Tensor, "N"]) -> None:
        super()._lay_out(owners)
        self._new_step()

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, "N"]) -> None:
        if self.written == self.suffixes[0].shape[2]:
            self.suffixes = self._moved(
                self.suffixes, None, self.written + self.columns, self.written
            )
            self._new_step()
        self.tokens[self.home] = tokens
        self.column.fill_(self.written)  # in place: the recorded step reads this tensor
        self.logits = self.graph.run(self._run)[self.home]
        self.written += 1

    def _run(self) -> Float[Tensor, "cells V"]:
        """Logits of all cells; nothing here depends on a number that the host knows and that changes."""
        x = self.decoder.embed(self.tokens)
        turns = self._turns(x, self.before + self.column)
        written = torch.arange(self.suffixes[0].shape[2], device=x.device) <= self.column
        if self.unused is not None:
            first = self.first.view(self.groups, 1, -1, 1, 1)
            written = written & (torch.arange(len(written), device=x.device) >= first)
        for block, prompt, suffix in zip(self.blocks, self.prompts, self.suffixes, strict=True):
            q, k, v = block.rotate(block.qkv(block.attention_norm(x)), turns)
            x = block.finish(x, self._attend_static(q, k, v, prompt, suffix, block.scale, written))
        return self.head(self.norm(x))

    def _attend_static(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prompt: Tensor,
        suffix: Tensor,
        scale: float,
        written: Tensor,
    ) -> Float[Tensor, "cells B"]:
        """``_attend`` over all columns of the buffers, of which those not written are masked."""
        g, j, kv_heads, dim = self.groups, self.width, self.decoder.kv_heads, self.decoder.head_dim
        rep, columns, width = self.decoder.heads // kv_heads, prompt.shape[2], suffix.shape[2]
        for kept, new in zip(suffix.view(2, g, kv_heads, j, width, dim), (k, v), strict=True):
            kept.index_copy_(
                3, self.column, new.view(g, j, kv_heads, 1, dim).transpose(1, 2).to(suffix.dtype)
            )
        queries = (q * scale).view(g, j, kv_heads, rep, dim).transpose(1, 2)  # [g, K, j, rep, D]
        to_prompt = queries.reshape(g * kv_heads, j * rep, dim).to(prompt.dtype) @ prompt[0].mT
        to_suffix = queries.reshape(-1, rep, dim).to(suffix.dtype) @ suffix[0].mT
        of_prompt = to_prompt.view(g, kv_heads, j, rep, columns).to(self.exact)
        of_suffix = (
            to_suffix.view(g, kv_heads, j, rep, width)
            .to(self.exact)
            .masked_fill(~written, -torch.inf)
        )
        if self.padding is not None:
            of_prompt = of_prompt.masked_fill(self.padding, -torch.inf)
        weights = torch.cat([of_prompt, of_suffix], dim=-1).softmax(dim=-1)  # one softmax over both
        of_prompt, of_suffix = weights.split([columns, width], dim=-1)
        first = of_prompt.reshape(g * kv_heads, j * rep, columns).to(prompt.dtype) @ prompt[1]
        second = of_suffix.reshape(-1, rep, width).to(suffix.dtype) @ suffix[1]
        first, second = (
            part.view(g, kv_heads, j, rep, dim).transpose(1, 2) for part in (first, second)
        )
        return (first + second).to(self.dtype).reshape(g * j, -1)


@dataclass(eq=False)
class Graph:
    """A step as one CUDA graph: run plainly at the first call, recorded at the second, replayed from then on.

    The step reads and writes buffers that stay where they are. Elsewhere than on CUDA, or where recording fails (with
    one warning), each call runs it plainly. The step is not kept: it belongs to the decoding that owns the graph, and a
    cycle of references would keep all buffers until Python's collector runs.
    """

    has_failed: ClassVar = False
    calls: int = 0
    graph: Any = None
    out: Any = None

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        self.calls += 1
        if (
            self.graph is None
            and self.calls == 2
            and torch.cuda.is_available()
            and not Graph.has_failed
        ):
            graph = torch.cuda.CUDAGraph()
            try:
                # other threads, such as one that writes a checkpoint, go on with their calls
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.out = step()
                self.graph = graph
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                Graph.has_failed = True
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                log.warning(
                    "decoding: a CUDA graph cannot be recorded, so each step is run without: %.200s",
                    first,
                )
        if self.graph is None:
            return step()
        self.graph.replay()
        return self.out
