"""How pictures are drawn: what may be asked for, whose noise is whose, and rows that went wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.seeds import generator_at
from gruppo.types import Finish, GruppoError, Request, Sampling


def checked_sampling(sampling: Sampling, columns: int) -> Sampling:
    """The sampling of pictures with so many actions, or the refusal of what a normal has no part in."""
    if sampling.top_k or sampling.top_p != 1 or sampling.stop:
        raise GruppoError(
            f"top_k={sampling.top_k}, top_p={sampling.top_p:g} and stop={sampling.stop!r} are of tokens; pictures have "
            "none. Leave them out."
        )
    if sampling.max_actions < columns:
        raise GruppoError(
            f"max_actions={sampling.max_actions} is less than the {columns} patches of a picture. Set it to {columns}."
        )
    return sampling


def noise_at(seed: int, where: Sequence[tuple[int, int]], shape: Sequence[int]) -> Float[Tensor, "B K h w"]:
    """Standard normal numbers of rows, each by its draw and sample index."""
    drawn = [torch.randn(tuple(shape), generator=generator_at(seed, "restoration", *at)) for at in where]
    return torch.stack(drawn)


def finish_of(is_finite: bool) -> Finish:
    return "stop" if is_finite else "error"


def refuse_namesakes(requests: Sequence[Request], pictures: Tensor) -> None:
    """Rows of equal prompt id and draw become one group, so one id and draw must mean one picture."""
    asked: dict[tuple[str, int], Tensor] = {}
    for prompt, picture in zip((request.prompt for request in requests), pictures, strict=True):
        if not torch.equal(asked.setdefault((prompt.id, prompt.draw), picture), picture):
            raise GruppoError(
                f"two different pictures have the id {prompt.id!r} and the draw {prompt.draw}; their rows would become "
                "one group. Give each prompt an id or a draw of its own."
            )
