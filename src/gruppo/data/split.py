"""Which prompts are kept for evaluation: decided by what a prompt says, so every run and machine agrees."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def prompt_key(inputs: Any) -> str:
    """The content of a prompt as canonical JSON: equal prompts have equal keys, whatever the order of their fields."""
    return json.dumps(inputs, sort_keys=True, separators=(",", ":"))


def hash_unit(key: str) -> float:
    """A number in [0, 1) that depends on the key alone (BLAKE2b)."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def is_held_out(key: str, fraction: float) -> bool:
    """True for the given share of all keys. A smaller fraction holds out a subset of what a larger one does."""
    return hash_unit(key) < fraction
