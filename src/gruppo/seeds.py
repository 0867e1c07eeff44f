"""Addressed randomness: each random number has an address, so none depends on batch order, worker
or rank."""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float
from torch import Tensor


def seed_at(*address: int | str) -> int:
    """63-bit seed for an address such as ``(run_seed, "sample", draw, sample_index)``.

    Equal addresses give equal seeds on every machine; different addresses give independent ones
    (BLAKE2b).
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in address)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator_at(*address: int | str) -> torch.Generator:
    """CPU generator seeded by the address."""
    return torch.Generator().manual_seed(seed_at(*address))


def uniforms_at(seed: int, draw: int, sample: int, n: int) -> Float[Tensor, "n"]:
    """``n`` uniforms in [0, 1) for sample ``sample`` of draw ``draw``, one per action. float64, on
    the CPU.

    A prefix is stable: a larger ``n`` only appends.
    """
    return torch.rand(n, generator=generator_at(seed, "sample", draw, sample), dtype=torch.float64)
