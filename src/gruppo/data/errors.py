"""What the sources share in telling a user what went wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from gruppo.types import GruppoError


def nearest(word: str, words: Iterable[str]) -> str:
    """``"; the nearest is 'x'"``, or nothing when no word is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; the nearest is {close[0]!r}" if close else ""


def check_fraction(fraction: float) -> None:
    """Refuse a held-out fraction that is not a share below one."""
    if not 0 <= fraction < 1:
        raise GruppoError(
            f"held_out_fraction={fraction} is outside [0, 1); set --prompts.held-out-fraction 0.1 to keep a "
            "tenth of the prompts for evaluation."
        )
