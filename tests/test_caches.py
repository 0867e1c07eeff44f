"""Sizes of the processor's caches, as Linux and macOS tell them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gruppo import platforms
from gruppo.core import linear_head

KIB, MIB = 2**10, 2**20
L1 = [("1", "Data", "48K"), ("1", "Instruction", "64K")]


def sysfs(root: Path, *caches: tuple[str, str, str]) -> Path:
    for number, cache in enumerate(caches):
        folder = root / "sys/devices/system/cpu/cpu0/cache" / f"index{number}"
        folder.mkdir(parents=True)
        for name, text in zip(("level", "type", "size"), cache, strict=True):
            (folder / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("caches", "sizes"),
    [
        ([*L1, ("2", "Unified", "1024K"), ("3", "Unified", "32768K")], (MIB, 32 * MIB)),
        ([*L1, ("2", "Unified", "512K"), ("3", "Unified", "16M")], (512 * KIB, 16 * MIB)),
        (
            [*L1, ("2", "Unified", "2048K")],
            (2 * MIB, 2 * MIB),
        ),  # a small board: its second level is the last
        (
            [*L1, ("2", "Unified", "0K"), ("3", "Unified", "unknown")],
            (MIB, 8 * MIB),
        ),  # some virtual machines
        ([], (MIB, 8 * MIB)),
    ],
)
def test_caches_are_those_that_linux_tells(tmp_path, monkeypatch, caches, sizes):
    monkeypatch.setattr(sys, "platform", "linux")
    assert platforms.cache_bytes(sysfs(tmp_path, *caches)) == sizes


@pytest.mark.parametrize(("last_mib", "rows"), [(32, 256), (20, 256), (16, 128), (8, 64), (1, 64)])
def test_a_tile_of_logits_fits_into_half_of_the_last_cache_unless_products_would_be_slow(
    monkeypatch, last_mib, rows
):
    monkeypatch.setattr(linear_head, "cache_bytes", lambda: (MIB, last_mib * MIB))
    assert linear_head._tile_shape(torch.device("cpu")) == (rows, 4096)
    assert linear_head._tile_shape(torch.device("cuda")) == linear_head.TILE
