"""Writing rows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gruppo.core.distributions import draw
from gruppo.modalities.text.backbones import Decoding
from gruppo.types import Finish, Sampling


@dataclass(frozen=True, eq=False)
class Written:
    """What was sampled for N rows."""

    tokens: Int[Tensor, "N T"]
    logprobs: Float[Tensor, "N T"]
    lengths: Int[Tensor, "N"]
    finish: tuple[Finish, ...]


@torch.no_grad()
def write(
    decoding: Decoding,
    uniforms: Float[Tensor, "N T"],
    sampling: Sampling,
    *,
    eos_ids: Sequence[int],
    text: Callable[[Sequence[int]], str],
    limits: Int[Tensor, "N"] | None = None,
) -> Written:
    """Sample until each row has drawn an end token, written a stop text, or used up its uniforms.

    ``limits``: tokens of each row at most, 1 or more; without them, all columns. No row is then read beyond its own
    limit, where the model's context may end: what is finished leaves at once.

    A row whose logits are not finite ends as "error", with what it had. Finished rows leave the batch once they are an
    eighth of it: each leave copies the cache, so a few wait for company. ``text`` shows special tokens, which a stop
    text may name.
    """
    rows, columns = uniforms.shape
    tokens = torch.zeros(rows, columns, dtype=torch.long)
    logprobs = torch.zeros(rows, columns)
    lengths = torch.zeros(rows, dtype=torch.long)
    finish: list[Finish] = ["length"] * rows
    ends = torch.tensor(list(eos_ids), dtype=torch.long)
    slots = torch.arange(rows)  # which row each decoding slot writes
    open_slots = torch.ones(rows, dtype=torch.bool)

    for t in range(columns):
        drawn, logprob = draw(
            decoding.logits,
            uniforms[slots, t],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        drawn, logprob = drawn.cpu(), logprob.float().cpu()
        broken = open_slots & ~logprob.isfinite()
        good = open_slots & ~broken
        tokens[slots[good], t], logprobs[slots[good], t] = drawn[good], logprob[good]
        lengths[slots[good]] += 1
        stopped = good & torch.isin(drawn, ends)
        stopped |= _wrote_stop(tokens, lengths, slots, good & ~stopped, sampling.stop, text)
        for row in slots[stopped].tolist():
            finish[row] = "stop"
        for row in slots[broken].tolist():
            finish[row] = "error"
        open_slots = good & ~stopped
        if limits is not None:
            open_slots &= lengths[slots] < limits[slots]
        still = int(open_slots.sum())
        if still == 0 or t + 1 == columns:
            break
        if len(slots) - still >= (max(1, len(slots) // 8) if limits is None else 1):
            kept = open_slots.nonzero()[:, 0]
            decoding.select(kept.to(decoding.logits.device))
            slots, open_slots, drawn = slots[kept], open_slots[kept], drawn[kept]
        decoding.advance(torch.where(open_slots, drawn, 0).to(decoding.logits.device))
    return Written(tokens, logprobs, lengths, tuple(finish))


def _wrote_stop(
    tokens: Tensor, lengths: Tensor, slots: Tensor, good: Tensor, stop: Sequence[str], text: Callable
) -> Tensor:
    wrote = torch.zeros_like(good)
    if stop:
        for slot in good.nonzero()[:, 0].tolist():
            row = int(slots[slot])
            written = text(tokens[row, : int(lengths[row])].tolist())
            wrote[slot] = any(s in written for s in stop)
    return wrote


def cut_at_stop(written: str, stop: Sequence[str]) -> str:
    """The text up to the first stop text."""
    ends = [at for s in stop if (at := written.find(s)) >= 0]
    return written[: min(ends)] if ends else written
