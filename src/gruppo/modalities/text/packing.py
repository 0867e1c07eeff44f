"""A group as one row: the prompt once, its completions after it, none of which sees another.

P + G R tokens instead of G (P + R). Positions restart at the prompt's end, so that each completion is where it would be
alone, and a block mask keeps completions apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gruppo.modalities.text.backbones import pad_right


@dataclass(frozen=True, eq=False)
class Packed:
    """g packed rows of L tokens."""

    ids: Int[Tensor, "g L"]
    positions: Int[Tensor, "g L"]
    visible: Bool[Tensor, "g L L"]
    """[query, key]: which tokens each token attends to."""
    row: Int[Tensor, "b"]
    """The packed row of each completion."""
    start: Int[Tensor, "b"]
    """Where each completion starts in it."""
    prompt_length: Int[Tensor, "b"]

    def before(self, completion: Int[Tensor, "N"], column: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        """The position whose features predict the action: that of the token before it, at first the prompt's last."""
        return torch.where(column == 0, self.prompt_length[completion] - 1, self.start[completion] + column - 1)


def pack(
    prompts: Sequence[Int[Tensor, "P"]], completions: Sequence[Int[Tensor, "R"]], owners: Int[Tensor, "b"]
) -> Packed:
    """Lay out completions behind the prompt that owns them; ``owners`` are indices into ``prompts``."""
    texts = [[prompt] for prompt in prompts]
    positions = [[torch.arange(len(prompt))] for prompt in prompts]
    segments = [[torch.zeros(len(prompt), dtype=torch.long)] for prompt in prompts]
    ends = [len(prompt) for prompt in prompts]
    start = []
    for completion, owner in zip(completions, owners.tolist(), strict=True):
        start.append(ends[owner])
        ends[owner] += len(completion)
        texts[owner].append(completion)
        positions[owner].append(len(prompts[owner]) + torch.arange(len(completion)))
        segments[owner].append(torch.full((len(completion),), len(segments[owner])))
    ids, lengths = pad_right([torch.cat(parts) for parts in texts])
    padded_positions, _ = pad_right([torch.cat(parts) for parts in positions])
    segment, _ = pad_right([torch.cat(parts) for parts in segments])
    return Packed(
        ids=ids,
        positions=padded_positions,
        visible=visibility(segment, torch.arange(ids.shape[1]) < lengths[:, None]),
        row=owners,
        start=torch.tensor(start),
        prompt_length=torch.tensor([len(prompt) for prompt in prompts])[owners],
    )


def visibility(segment: Int[Tensor, "g L"], real: Bool[Tensor, "g L"]) -> Bool[Tensor, "g L L"]:
    """Causal, within the own segment or the prompt (segment 0). Padding is seen by itself alone."""
    place = torch.arange(segment.shape[1])
    causal = place[:, None] >= place[None, :]
    own = segment[:, :, None] == segment[:, None, :]
    shared = (segment == 0)[:, None, :]
    visible = causal & (own | shared) & real[:, None, :]
    return visible | (place[:, None] == place[None, :])
