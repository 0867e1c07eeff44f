"""Diagonal normals as actions: log-density and entropy, in nats, summed over event dimensions in float64."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

LOG_2_PI = math.log(2 * math.pi)


def gaussian_logprob(x: Float[Tensor, "b t ..."], mean: Float[Tensor, "b t ..."], std: Tensor) -> Float[Tensor, "b t"]:
    """log N(x; mean, std^2 I) = -|x - mean|^2 / (2 std^2) - d log std - (d / 2) log 2 pi.

    ``std`` has the shape of ``mean``, or its first two dimensions: [b, t]. In float64: of 16 384 dimensions at a std
    of 0.02, float32 loses 8e-3 nats.
    """
    x, mean = x.double(), mean.double()
    std = _like(std, mean)
    nats = -((x - mean) / std).square() / 2 - std.log() - LOG_2_PI / 2
    return _summed(nats.expand_as(mean))


def gaussian_entropy(mean: Float[Tensor, "b t ..."], std: Tensor) -> Float[Tensor, "b t"]:
    """d log std + (d / 2) (1 + log 2 pi): of the mean it asks for the number of dimensions alone."""
    return _summed((_like(std, mean).log() + (1 + LOG_2_PI) / 2).expand(mean.shape))


def _like(std: Tensor, mean: Tensor) -> Tensor:
    return std.double().reshape(*std.shape, *[1] * (mean.ndim - std.ndim))


def _summed(nats: Tensor) -> Float[Tensor, "b t"]:
    return nats.flatten(2).sum(dim=-1, dtype=torch.float64) if nats.ndim > 2 else nats
