"""Files that hold the old content or the new one, whenever the machine stops; and one line where there is no room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gruppo.types import GruppoError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within, what the machine refuses to write is a ``GruppoError`` that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise GruppoError(
            f"{path} cannot be written: {reason}. The run needs a folder with free space that it may write to. "
            "Nothing saved before is lost: make room, or choose another folder, and resume the run."
        ) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file of text. What UTF-8 cannot hold (half of a surrogate pair) becomes \\udc80, as JSON writes it."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


def replace_bytes(path: Path, data: bytes) -> None:
    """Write ``path`` so that it holds either the old bytes or the new ones, whenever the machine stops."""
    scratch = path.with_name(f".{path.name}.new")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
