"""An action's grid cut into patches, one per column of the rollouts: columns are places, not times.

A column's log-prob is that of its patch of the action, so that a reward of the same patch can be its credit: actions
are [B, T, K, h / s, w / s] with T = s * s patches, row by row from the top left. With s = 1 the whole image is one
action. What an action changes outside its own patch (a smooth grid, a network's receptive field) is credited to other
patches: advantages by patch omit those cross terms, and are unbiased only for pixel noise and nearest grids.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def to_columns(grid: Float[Tensor, "N K H W"], side: int) -> Float[Tensor, "N T K h w"]:
    """Cut a grid into side x side patches."""
    n, k, height, width = grid.shape
    h, w = height // side, width // side
    return grid.reshape(n, k, side, h, side, w).permute(0, 2, 4, 1, 3, 5).reshape(n, side * side, k, h, w)


def from_columns(columns: Float[Tensor, "N T K h w"], side: int) -> Float[Tensor, "N K H W"]:
    """Join the patches that ``to_columns`` cut."""
    n, _, k, h, w = columns.shape
    return columns.reshape(n, side, side, k, h, w).permute(0, 3, 1, 4, 2, 5).reshape(n, k, side * h, side * w)


def patch_means(images: Float[Tensor, "N C H W"], side: int) -> Float[Tensor, "N T"]:
    """Mean over the channels and pixels of each patch."""
    return to_columns(images, side).flatten(2).mean(dim=-1)
