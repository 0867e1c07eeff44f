"""Operations on the disk that are counted, and of which one fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Broken(Exception):
    pass


def raise_broken() -> None:
    raise Broken


NAMES = ("write_text", "mkdir", "rename", "replace")


def operations(
    monkeypatch: pytest.MonkeyPatch,
    writer: Any,
    at: int,
    act: Callable[[], None] | None,
    names: tuple[str, ...] = NAMES,
) -> list[str]:
    """``act`` runs before the ``at``-th operation on the disk; the operations, in order.

    ``writer``: the module whose ``save_file`` writes the tensors. ``names``: of methods of paths.
    """
    calls: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if act is not None and len(calls) - 1 == at:
                act()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    wrap(writer, "save_file")
    for name in names:
        wrap(Path, name)
    wrap(os, "fsync")
    return calls
