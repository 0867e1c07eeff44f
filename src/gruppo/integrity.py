"""Reads files that may be damaged or hostile: JSON within limits of size and depth, and sealed folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gruppo.loading import command_name
from gruppo.types import GruppoError

SEAL = "COMPLETE"
"""File of a sealed folder: size and SHA-256 of every other file. It is written last."""
MAX_BYTES = 1 << 28
"""Of one JSON document. The largest that gruppo writes is a checkpoint's state: tens of KB."""
MAX_DEPTH = 100
"""Levels of nesting. Functions that walk over JSON recurse; Python allows about 1000 calls."""


def read_json(path: Path) -> Any:
    """Content of a JSON file; ValueError if it is not JSON, too large or too deep."""
    with path.open("rb") as file:  # one byte more than allowed: that it is too large shows without reading it all
        return parse_json(file.read(MAX_BYTES + 1))


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` that refuses huge and deeply nested documents with a ValueError."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB of JSON")
    too_deep = f"its JSON is nested more than {MAX_DEPTH} levels deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > MAX_DEPTH:  # type: ignore[arg-type]  # else it cannot be that deep
        level, depth = [value], 0  # level by level, and not by recursion, which is what a deep document would break
        while level := [node for node in level if isinstance(node, dict | list)]:
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(too_deep)
            level = [part for node in level for part in (node.values() if isinstance(node, dict) else node)]
    return value


def json_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file that are not blank; a line beyond ``MAX_BYTES`` comes in parts, none of which is JSON."""
    with path.open("rb") as file:
        yield from (line for line in iter(lambda: file.readline(MAX_BYTES + 1), b"") if line.strip())


def check_seal(folder: Path) -> None:
    """Refuse a saved model whose files differ from its seal. A folder without one was saved by other software."""
    if not (folder / SEAL).is_file():
        return
    try:
        verify(folder)
    except (OSError, ValueError) as error:
        run, advice = folder.parent, f"Save or export it again; if you changed it yourself, delete {folder / SEAL}."
        if folder.name == "final" and (run / "config.json").is_file():
            advice = f"{command_name()} resume {run} writes it again from the last checkpoint."
        raise GruppoError(f"the model {folder} is damaged: {error}. {advice}") from None


def verify(path: Path, *, share: slice = slice(None)) -> None:
    """Raise ValueError unless every file that COMPLETE names has the size and SHA-256 given there.

    ``share``: those whose SHA-256 is compared, where each of several ranks compares some.
    """
    if not (path / SEAL).is_file():
        raise ValueError(f"it has no {SEAL}, which is written last")
    seal = read_json(path / SEAL)
    if not isinstance(seal, dict) or not seal:
        raise ValueError(f"{SEAL} is not a gruppo seal")
    compared = {*sorted(seal)[share]}
    for name, expected in seal.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:  # a seal may come from somebody else
            raise ValueError(f"{SEAL} names {name!r}, which is outside the folder")
        if not (path / name).is_file():
            raise ValueError(f"its file {name!r} is missing")
        if name in compared and fingerprint(path / name) != expected:
            raise ValueError(f"{name} has changed since it was written")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
