"""Shared by the image modalities: checks of images, and requests split into batches of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.types import Finish, GruppoError, Prompt, Request, Rollouts


def image_error(
    image: Any, role: str, channels: int, size: tuple[int, ...] | None = None
) -> str | None:
    """Return why an object is not an image [C, H, W] of floats in [0, 1], with what to do; None if
    it is one.

    ``role``: "input" or "target", for the message. ``size``: the required height and width; any by
    default.
    """
    shape = f"[{channels}, " + ("H, W]" if size is None else ", ".join(map(str, size)) + "]")
    if image is None:
        return f"has no {role}: it is None. It needs an image {shape} in [0, 1]."
    if not isinstance(image, Tensor):
        return (
            f"has a {type(image).__name__} as its {role}; it needs an image {shape} of floats "
            f"in [0, 1]."
        )
    if (
        image.ndim != 3
        or not image.is_floating_point()
        or size not in (None, tuple(image.shape[1:]))
    ):
        return (
            f"has {list(image.shape)} of {image.dtype} as its {role}; it needs floats {shape}. "
            f"Convert or resize it."
        )
    if len(image) != channels:
        return (
            f"has {len(image)} channels in its {role}, and the network reads {channels}. Set "
            f"channels or convert it."
        )
    low, high = (float(bound) for bound in torch.aminmax(image))
    if not (low >= 0 and high <= 1):  # also true of NaN
        return (
            f"has values from {low:g} to {high:g} in its {role}; they need to be in [0, 1]. "
            f"Divide by the largest."
        )
    return None


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows that are sampled together."""

    prompts: tuple[Prompt, ...]
    inputs: Tensor | None
    """Encoded inputs [P, ...]; None for a network without conditions."""
    group_ids: Int[Tensor, "B"]
    """Index into ``prompts`` of each row."""
    addresses: list[tuple[int, int]]
    """Draw and sample index of each row: with the seed, all that its noise depends on."""


def row_batches(
    requests: Sequence[Request], inputs: Tensor | None, batch_rows: int
) -> Iterator[RowBatch]:
    """Split requests into batches of at most ``batch_rows`` rows, in their order.

    Raises GruppoError if two prompts of one id and draw have different inputs: their rows would
    become one group.
    """
    known: dict[tuple[str, int], Tensor] = {}
    for n, prompt in enumerate(request.prompt for request in requests):
        if inputs is not None and not torch.equal(
            known.setdefault((prompt.id, prompt.draw), inputs[n]), inputs[n]
        ):
            raise GruppoError(f"""two different prompts have the id {prompt.id!r} and the draw
                {prompt.draw}; their rows would become one group. Give each prompt its own id or
                draw.""")
    owners = torch.tensor([p for p, request in enumerate(requests) for _ in range(request.size)])
    samples = [request.first + n for request in requests for n in range(request.size)]
    for start in range(0, len(owners), batch_rows):
        rows = slice(start, start + batch_rows)
        kept, group_ids = owners[rows].unique(return_inverse=True)
        prompts = tuple(requests[p].prompt for p in kept.tolist())
        addresses = [
            (prompts[p].draw, n) for p, n in zip(group_ids.tolist(), samples[rows], strict=True)
        ]
        yield RowBatch(prompts, None if inputs is None else inputs[kept], group_ids, addresses)


def image_rollouts(
    prompts: Sequence[Prompt],
    actions: Float[Tensor, "B T ..."],
    completions: Iterable[Tensor],
    *,
    shared: dict[str, Any],
    per_row: dict[str, Tensor],
    group_ids: Int[Tensor, "B"] | None = None,
    logprobs: Float[Tensor, "B T"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    is_finite: Bool[Tensor, "B"] | None = None,
    temperature: float = 1.0,
) -> Rollouts:
    """Rollouts whose rows have T actions each; by default demonstrations: one row per prompt, with
    log-probs of 0."""
    rows, columns = actions.shape[:2]
    are_finite = [True] * rows if is_finite is None else is_finite.tolist()
    finish: list[Finish] = ["stop" if finite else "error" for finite in are_finite]
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=torch.arange(rows) if group_ids is None else group_ids,
        actions=actions,
        mask=torch.ones(rows, columns, dtype=torch.bool) if mask is None else mask,
        lengths=torch.full((rows,), columns),
        completions=tuple(completions),
        sampler_logprobs=torch.zeros(rows, columns) if logprobs is None else logprobs,
        policy_version=torch.zeros(rows, columns, dtype=torch.long),
        temperature=torch.full((rows,), temperature),
        finish=tuple(finish),
        shared=shared,
        per_row=per_row,
    )
