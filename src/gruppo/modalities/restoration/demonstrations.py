"""Degraded pictures with their clean ones: nothing is drawn, and the deterministic picture is what is compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.modalities.restoration.patches import from_columns, to_columns
from gruppo.modalities.restoration.restorer import one_size
from gruppo.modalities.restoration.sampling import finish_of
from gruppo.types import Prompt, Rollouts


def demonstrated(prompts: Sequence[Prompt], patches: int) -> Rollouts:
    """One row of each prompt, its clean picture cut into patches as actions; log-probs are 0. Marked in ``per_row``."""
    rows, columns = len(prompts), patches**2
    targets = one_size([prompt.target for prompt in prompts])
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=torch.arange(rows),
        actions=to_columns(targets, patches),  # [B, T, C, h, w]
        mask=torch.ones(rows, columns, dtype=torch.bool),
        lengths=torch.full((rows,), columns),
        completions=tuple(prompt.target for prompt in prompts),
        sampler_logprobs=torch.zeros(rows, columns),
        policy_version=torch.zeros(rows, columns, dtype=torch.long),
        temperature=torch.ones(rows),
        finish=(finish_of(True),) * rows,
        shared={"degraded": one_size([prompt.inputs for prompt in prompts])},
        per_row={"demonstration": torch.ones(rows, dtype=torch.bool)},
    )


def clean_pictures(rollouts: Rollouts, patches: int) -> Float[Tensor, "B C H W"]:
    """Of demonstrations their actions, of other rollouts the targets of their prompts."""
    if "demonstration" in rollouts.per_row:
        return from_columns(rollouts.actions, patches)
    return one_size([prompt.target for prompt in rollouts.prompts])[rollouts.group_ids]
