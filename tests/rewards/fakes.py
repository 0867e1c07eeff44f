"""Rollouts with given outputs, for rewards to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gruppo.types import Prompt, Rollouts


def rollouts_of(
    outputs: Sequence[Any],
    *,
    group_ids: Sequence[int] | None = None,
    targets: Sequence[Any] = ("x",),
    metas: Sequence[dict[str, Any]] | None = None,
    finish: Sequence[Any] | None = None,
) -> Rollouts:
    """One group by default. Row i has i % 3 + 1 actions: the numbers 10 i, 10 i + 1, ..."""
    size = len(outputs)
    metas = [{} for _ in targets] if metas is None else metas
    lengths = torch.arange(size) % 3 + 1
    mask = torch.arange(3)[None] < lengths[:, None]
    return Rollouts(
        prompts=tuple(
            Prompt(f"p{n}", f"ask {n}", t, m)
            for n, (t, m) in enumerate(zip(targets, metas, strict=True))
        ),
        group_ids=torch.tensor([0] * size if group_ids is None else list(group_ids)),
        actions=torch.arange(size)[:, None] * 10 + torch.arange(3),
        mask=mask,
        lengths=lengths,
        completions=tuple(outputs),
        sampler_logprobs=torch.zeros(size, 3),
        policy_version=torch.zeros(size, 3, dtype=torch.long),
        temperature=torch.ones(size),
        finish=tuple(["stop"] * size if finish is None else finish),
    )
