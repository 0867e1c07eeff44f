"""Functions that make a language model, by name: ``path/to/file.py:function`` or ``package.module:function``.

Beside its weights lies ``module.json``, which names the function: weights do not say what computes with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from gruppo.loading import is_file_name, load_object
from gruppo.types import GruppoError

WEIGHTS, SETTINGS = "model.safetensors", "module.json"


def names_function(name: str) -> bool:
    """Whether a model's name means a function. A folder of that very name comes first; a bare ``file.py`` lacks one."""
    if Path(name).expanduser().is_dir():
        return False
    place, colon, function = name.rpartition(":")
    if not colon or name.endswith(".py"):
        return name.endswith(".py")
    return is_file_name(place) or (function.isidentifier() and _is_package(place))


def _is_package(place: str) -> bool:
    parts = place.split(".")
    try:
        return all(part.isidentifier() for part in parts) and find_spec(parts[0]) is not None
    except (ImportError, ValueError):  # of a module that was made by hand
        return False


def from_root(name: str) -> str:
    """The function with its file named from the root, so that it means the same in any folder."""
    place, colon, function = name.rpartition(":")
    return f"{os.path.abspath(Path(place).expanduser())}{colon}{function}" if colon and is_file_name(place) else name


def is_made(folder: str | Path) -> bool:
    """Whether a folder holds the weights of such a model."""
    return (Path(folder).expanduser() / SETTINGS).is_file()


@dataclass(frozen=True)
class MadeBy:
    """The function that made a model, and the file that it was in."""

    made_by: str
    """``/path/to/file.py:function``, the same from any folder, or ``package.module:function``."""
    sha256: str
    """Of the file; "" of a module without one."""

    @classmethod
    def named(cls, name: str) -> MadeBy:
        """What is known by the name; one that means nothing is refused."""
        if not name.rpartition(":")[1] or name.endswith(".py"):
            raise GruppoError(
                f"the model {name!r} is a Python file; a function in it makes the model. Name it too, as {name}:model."
            )
        load_object(name)
        place = from_root(name).rpartition(":")[0]
        if is_file_name(place):
            return cls(from_root(name), _sha256(Path(place)))
        origin = getattr(sys.modules[place], "__file__", None)
        return cls(name, _sha256(Path(origin)) if origin else "")

    @classmethod
    def read(cls, folder: Path) -> MadeBy:
        try:
            said = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            return cls(str(said["made_by"]), str(said["sha256"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GruppoError(
                f"{folder / SETTINGS} cannot be read ({type(error).__name__}: {error}). It needs the entries made_by "
                "and sha256, as policy.save(folder) writes them."
            ) from None

    def write(self, folder: Path) -> None:
        (folder / SETTINGS).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
