"""How rows are laid out for the network that scores them (a stream, packed rows, or padded), and cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gruppo.modalities.text.backbones import Backbone, pad_right
from gruppo.modalities.text.packing import pack
from gruppo.modalities.text.stream import stream


def features_before(
    backbone: Backbone,
    prompts: Sequence[Int[Tensor, "P"]],
    completions: Sequence[Int[Tensor, "R"]],
    owners: Int[Tensor, "b"],
    row: Int[Tensor, "n"],
    column: Int[Tensor, "n"],
) -> Float[Tensor, "n F"]:
    """Features at the token before each action, the one that predicts it; an action is a completion and its column."""
    device = next(backbone.module.parameters()).device
    layout = backbone.layout
    if layout == "stream":
        tokens = stream(prompts, completions, owners)
        return backbone.stream_features(tokens)[tokens.before(row, column).to(device)]
    if layout == "packed":
        packed = pack(prompts, completions, owners)
        features = backbone.packed_features(
            packed.ids.to(device), packed.positions.to(device), packed.visible.to(device)
        )
        return features[packed.row[row].to(device), packed.before(row, column).to(device)]
    ids, _ = pad_right([torch.cat([prompts[o], c]) for o, c in zip(owners.tolist(), completions, strict=True)])
    before = torch.tensor([len(prompt) - 1 for prompt in prompts])[owners][row] + column
    return backbone.features(ids.to(device))[row.to(device), before.to(device)]


def micro_batches_by_group(
    prompt_lengths: Int[Tensor, "B"],
    lengths: Int[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    rows: Sequence[int],
    budget: int,
    *,
    padded: bool,
) -> list[list[int]]:
    """Rows cut into pieces of at most ``budget`` tokens, group-mates together where they fit.

    A group over the budget is cut into parts of like size, each of which reads the prompt again. ``padded``: the parts
    of a piece are rows of one tensor, as long as the longest of them; otherwise they follow each other.
    """
    by_group: dict[int, list[int]] = {}
    for row in rows:
        by_group.setdefault(int(group_ids[row]), []).append(row)
    parts: list[tuple[int, list[int]]] = []  # tokens, rows
    for members in by_group.values():
        parts += _parts(int(prompt_lengths[members[0]]), {row: int(lengths[row]) for row in members}, budget)
    parts.sort(key=lambda part: -part[0])
    micro_batches: list[list[int]] = []
    sizes: list[int] = []
    for tokens, members in parts:
        if not micro_batches or (max(sizes) * (len(sizes) + 1) if padded else sum(sizes) + tokens) > budget:
            micro_batches.append([])
            sizes = []
        micro_batches[-1] += members
        sizes.append(tokens)
    return micro_batches


def _parts(prompt: int, lengths: dict[int, int], budget: int) -> list[tuple[int, list[int]]]:
    """One group's rows in as few parts of like size as the budget allows, and the tokens of each."""
    total, longest = sum(lengths.values()), max(lengths.values())
    count = -(-total // max(budget - prompt, 1)) or 1
    limit = min(budget - prompt, -(-total // count) + longest - 1)
    parts: list[tuple[int, list[int]]] = []
    tokens: int = 0
    members: list[int] = []
    for row, length in lengths.items():
        if members and tokens + length > limit:
            parts.append((prompt + tokens, members))
            tokens, members = 0, []
        tokens += length
        members.append(row)
    return [*parts, (prompt + tokens, members)]


def micro_batches_by_length(totals: Int[Tensor, "B"], wanted: Int[Tensor, "n"], budget: int) -> list[list[int]]:
    """Rows of like length together, so that little is padding."""
    micro_batches: list[list[int]] = []
    for row in wanted[totals[wanted].argsort(descending=True, stable=True)].tolist():
        if not micro_batches or (len(micro_batches[-1]) + 1) * int(totals[micro_batches[-1][0]]) > budget:
            micro_batches.append([])
        micro_batches[-1].append(row)
    return micro_batches
