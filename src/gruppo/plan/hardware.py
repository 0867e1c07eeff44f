"""Peak rates and memory of GPUs, from their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gruppo.errors import GruppoError
from gruppo.loading import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One GPU. Rates are peaks that nothing reaches: the fractions reached are fitted."""

    flops: float
    """Dense bfloat16 operations per second, accumulated in float32."""
    bytes_per_s: float
    """Bandwidth of its memory."""
    memory: float
    """Bytes."""


GPUS = {
    # NVIDIA's data sheets give tensor rates with sparsity, twice the dense ones that are here.
    "b200": Gpu(2250e12, 8.0e12, 180e9),  # HGX B200 data sheet, an eighth
    "h200": Gpu(989e12, 4.8e12, 141e9),  # H200 SXM data sheet
    "h100": Gpu(989e12, 3.35e12, 80e9),  # H100 SXM data sheet
    "h100-pcie": Gpu(756e12, 2.0e12, 80e9),  # H100 PCIe data sheet
    "h20": Gpu(
        148e12, 4.0e12, 96e9
    ),  # H20 as listed by server vendors; NVIDIA publishes no data sheet
    "a100": Gpu(312e12, 2.039e12, 80e9),  # A100 80 GB SXM data sheet
    "a100-40gb": Gpu(312e12, 1.555e12, 40e9),  # A100 40 GB data sheet
    "l40s": Gpu(362e12, 0.864e12, 48e9),  # L40S data sheet
    "l4": Gpu(121e12, 0.3e12, 24e9),  # L4 data sheet
    "a10": Gpu(125e12, 0.6e12, 24e9),  # A10 data sheet
    "5090": Gpu(209.5e12, 1.792e12, 32e9),  # RTX Blackwell whitepaper, table 2
    "4090": Gpu(165.2e12, 1.008e12, 24e9),  # Ada whitepaper, table 2
    "3090": Gpu(71e12, 0.936e12, 24e9),  # Ampere GA102 whitepaper, table 2
    "mi300x": Gpu(1307e12, 5.3e12, 192e9),  # AMD Instinct MI300X data sheet
}
THIS = "this"
"""In place of a GPU's name: the machine that the constants were measured on."""


def find_gpu(name: str) -> Gpu:
    key = name.lower().removeprefix("nvidia").removeprefix("rtx").strip(" -")
    if key not in GPUS:
        known = (*GPUS, THIS)
        raise GruppoError(
            f"--gpu {name}: unknown; known are {', '.join(known)}.{did_you_mean(key, known)}"
        )
    return GPUS[key]


def recognized(device: str) -> str:
    """The name here of a device as torch names it ("NVIDIA A100-SXM4-40GB"); "" if it is none of these."""
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    return max((name for name in GPUS if words.issuperset(name.split("-"))), key=len, default="")
