"""Files that may be damaged or hostile: JSON within limits of size and depth, sealed folders,
folders with links.

``replace_file`` writes a file so that it is whole, whenever the machine stops.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gruppo.loading import command_name, visible
from gruppo.platforms import sync_to_disk
from gruppo.types import GruppoError

SEAL = "COMPLETE"
"""File of a sealed folder: size and SHA-256 of every other file. It is written last."""
MAX_BYTES = 1 << 28
"""Of one JSON document. The largest that gruppo writes is a checkpoint's state: tens of KB."""
MAX_DEPTH = 100
"""Levels of nesting. Functions that walk over JSON recurse; Python allows about 1000 calls."""
MAX_LAYERS = 10_000
"""Of a model, and experts of a layer. transformers makes all that a config.json asks for before it
reads a weight."""
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file; OSError for anything else: a FIFO may never be written to, a device has
    no end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(handle, "rb")  # OSError for a folder
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_file(path: Path, limit: int | None = None) -> bytes:
    """Content of a regular file; ValueError if it has more than ``limit`` bytes, by default
    ``MAX_BYTES``."""
    limit = MAX_BYTES if limit is None else limit
    with open_file(
        path
    ) as file:  # one byte more than allowed: that it is too large shows without reading it all
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit >> 20} MiB")
    return data


def read_json(path: Path) -> Any:
    """Content of a JSON file; ValueError if it is not JSON, too large or too deep."""
    return parse_json(read_file(path))


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` that refuses huge and deeply nested documents with a ValueError."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB of JSON")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > MAX_DEPTH:  # type: ignore[arg-type]  # else it cannot be that deep
        for _ in levels(value):
            pass
    return value


def levels(value: Any) -> Iterator[list[Any]]:
    """Values of a nested document, level by level; ValueError if it is nested too deep."""
    level = [value]  # not by recursion, which is what a deep document would break
    for _ in range(MAX_DEPTH + 1):
        yield level
        nested = [node for node in level if isinstance(node, dict | list)]
        if not nested:
            return
        level = [
            part for node in nested for part in (node.values() if isinstance(node, dict) else node)
        ]
    raise ValueError(_TOO_DEEP)


def json_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file that are not blank; a line beyond ``MAX_BYTES`` comes in parts, none of which
    is JSON."""
    with open_file(path) as file:
        yield from (
            line for line in iter(lambda: file.readline(MAX_BYTES + 1), b"") if line.strip()
        )


def check_layers(settings: Any, source: str) -> None:
    """Refuse a model whose settings have more layers or experts than any model has."""
    counts = (
        item
        for level in levels(settings)
        for node in level
        if isinstance(node, dict)
        for item in node.items()
    )
    for name, count in counts:
        if re.search("(layers?|experts?)$", name) and isinstance(count, int) and count > MAX_LAYERS:
            raise GruppoError(f"""the config.json of the model {source!r} has {name} above
                {MAX_LAYERS:,}; no model has so many. Correct it, or give another model.""")


def check_seal(folder: Path) -> None:
    """Refuse a saved model whose files differ from its seal. A folder without one was saved by
    other software."""
    if not (folder / SEAL).is_file():
        return
    try:
        verify(folder)
    except (OSError, ValueError) as error:
        run, advice = (
            folder.parent,
            f"Save or export it again; if you changed it yourself, delete {folder / SEAL}.",
        )
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
        if (
            Path(name).is_absolute() or ".." in Path(name).parts
        ):  # a seal may come from somebody else
            raise ValueError(f"{SEAL} names {name!r}, which is outside the folder")
        if not (path / name).is_file():
            raise ValueError(f"its file {name!r} is missing")
        if name in compared and fingerprint(path / name) != expected:
            raise ValueError(f"{name} has changed since it was written")


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with open_file(path) as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


# --- folders of runs ------------------------------------------------------------------------------


def check_links(folder: Path) -> None:
    """Refuse a run folder with a link to something outside it, which would be read, overwritten or
    deleted.

    The folder itself may be a link. Nothing is read in ``wandb``, which links its logs to the
    user's cache.
    """
    root = Path(os.path.realpath(folder))
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                link = visible(
                    f"{folder / path.relative_to(root)} is a link to {os.readlink(path)}"
                )
                raise GruppoError(f"""{link}, outside the run folder: what is there could be read,
                    overwritten or deleted. Replace the link by a copy, or remove it; to keep a run
                    on another disk, move its whole folder and link that.""")
        if parent == str(root) and "wandb" in folders:
            folders.remove("wandb")


# --- writing --------------------------------------------------------------------------------------


@contextmanager
def explained_failures(target: Path) -> Iterator[None]:
    """Raise failures to write as GruppoError."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise GruppoError(f"""the disk is full: {target} could not be written, and the save
                before it is intact. Free some space, then continue with {command_name()}
                resume.""") from error
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise GruppoError(f"""{target} could not be written:
            {getattr(error, "strerror", None) or error}; what was saved before is intact. Check the
            folder, its permissions and its limits.""") from error


def replace_file(path: Path, content: bytes | str, *, is_synced: bool = True) -> None:
    """Write a file that holds either its old content or the new one, whenever the process is
    killed.

    ``is_synced``: also whenever the machine stops, for the price of two waits for the disk.
    """
    scratch = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with explained_failures(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        with scratch.open(
            "xb"
        ) as file:  # "x" opens no file that is there, nor one that a link names
            if isinstance(content, str):
                # What UTF-8 cannot encode (half of a surrogate pair) becomes \\udc80, as in JSON.
                content = content.encode("utf-8", "backslashreplace")
            file.write(content)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        scratch.replace(path)
        if is_synced:
            sync_to_disk(path.parent)
