"""Shared by the image modalities: the base of their policies, checks of images, and requests split
into batches of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.modalities.common.validation import refuse
from gruppo.protocols import (
    DemonstrationMixin,
    ImageDescriptionMixin,
    MemoryMixin,
    Policy,
    PromptMixin,
    ShardingMixin,
    ValueHeadMixin,
)
from gruppo.types import Finish, GruppoError, Prompt, Request, Rollouts


class ImagePolicy(
    Policy,
    DemonstrationMixin,
    ValueHeadMixin,
    ShardingMixin,
    PromptMixin,
    ImageDescriptionMixin,
    MemoryMixin,
):
    """What policies with Gaussian actions and images as completions have in common."""

    likelihood_outputs = frozenset({"entropy", "entropy_value", "gaussian", "output", "values"})


def check_requests(policy: Policy, requests: Sequence[Request], sampling: Any) -> None:
    """Raise GruppoError for prompts that cannot be sampled from, ValueError without requests."""
    if not requests or any(request.size < 1 for request in requests):
        raise ValueError("sample needs at least one request, each of size 1 or more.")
    refuse(*(policy.check_prompt(request.prompt, sampling) for request in requests))


def image_error(
    image: Any, role: str, channels: int, size: tuple[int, ...] | None = None
) -> str | None:
    """Return why an object is not an image [C, H, W] of floats in [0, 1], with what to do; None if
    it is one.

    ``role``: "input" or "target", for the message. ``size``: the required height and width; any by
    default.
    """
    shape = f"[{channels}, {', '.join(map(str, size or 'HW'))}]"
    needed = f"as its {role}; it needs floats {shape} in [0, 1]. Convert, resize or crop it."
    if not isinstance(image, Tensor):
        return f"has a {type(image).__name__} {needed}"
    fits = image.ndim == 3 and len(image) == channels and size in (None, tuple(image.shape[1:]))
    if not fits or not image.is_floating_point():
        return f"has {list(image.shape)} of {image.dtype} {needed}"
    low, high = (float(bound) for bound in torch.aminmax(image))
    if not (low >= 0 and high <= 1):  # also true of NaN
        return f"has values from {low:g} to {high:g} {needed}"
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
    for request, own in zip(requests, inputs if inputs is not None else (), strict=False):
        prompt = request.prompt
        if not torch.equal(known.setdefault((prompt.id, prompt.draw), own), own):
            raise GruppoError(f"""two different prompts have the id {prompt.id!r} and the draw
                {prompt.draw}; their rows would become one group. Give each prompt its own id or
                draw.""")
    owners = torch.tensor([p for p, request in enumerate(requests) for _ in range(request.size)])
    samples = [request.first + n for request in requests for n in range(request.size)]
    for start in range(0, len(owners), batch_rows):
        rows = slice(start, start + batch_rows)
        kept, group_ids = owners[rows].unique(return_inverse=True)
        prompts = tuple(requests[p].prompt for p in kept.tolist())
        draws = [prompts[p].draw for p in group_ids.tolist()]
        addresses = list(zip(draws, samples[rows], strict=True))
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
    finite = [True] * rows if is_finite is None else is_finite.tolist()
    finish: list[Finish] = ["stop" if one else "error" for one in finite]
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
