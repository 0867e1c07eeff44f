"""An action's grid cut into patches, one a column of the rollouts: columns are places, not times.

A column's log-prob is that of its patch of the action alone, so that a reward of the same patch can be its credit:
actions are [B, T, K, h / s, w / s] with T = s * s patches, row by row from the top left. With s = 1 all of a picture is
one action. What an action changes outside its own patch (a smooth grid, a network's field of view) is credited to
others: advantages by patch leave those cross terms out, and are without bias for pixel noise and nearest grids alone.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from gruppo.types import GruppoError


def to_columns(grid: Float[Tensor, "N K H W"], side: int) -> Float[Tensor, "N T K h w"]:
    """Each of side x side patches by itself."""
    n, k, height, width = grid.shape
    h, w = height // side, width // side
    return grid.reshape(n, k, side, h, side, w).permute(0, 2, 4, 1, 3, 5).reshape(n, side * side, k, h, w)


def from_columns(columns: Float[Tensor, "N T K h w"], side: int) -> Float[Tensor, "N K H W"]:
    """The grid that ``to_columns`` cut."""
    n, _, k, h, w = columns.shape
    return columns.reshape(n, side, side, k, h, w).permute(0, 3, 1, 4, 2, 5).reshape(n, k, side * h, side * w)


def patch_means(images: Float[Tensor, "N C H W"], side: int) -> Float[Tensor, "N T"]:
    """The mean over the channels and pixels of each patch."""
    return to_columns(images, side).flatten(2).mean(dim=-1)


def check_divides(side: int, height: int, width: int, what: str) -> None:
    """Refuse patches that are not all of one size."""
    if height % side or width % side:
        raise GruppoError(
            f"{what} of {height} x {width} cannot be cut into {side} x {side} equal patches; both sides need to be "
            f"multiples of {side}. Set patches 1, or another size."
        )
