"""Objects named on the command line, ``path/to/file.py:name`` and ``package.module:name``; packages of an extra."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from gruppo.types import GruppoError


class RunWhileLoading(GruppoError):
    """A file that is loaded for what it defines started a run."""


_depth = 0


def is_loading() -> bool:
    """Whether a file is being imported for an object in it: then nothing may be trained."""
    return _depth > 0


def load_object(spec: str) -> Any:
    """The object that ``file.py:name`` or ``package.module:name`` names."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise GruppoError(f"{spec!r} names no object; write path/to/file.py:name or package.module:name.")
    module = load_file(Path(place)) if is_file_name(place) else _import_module(place)
    if name in vars(module):
        return vars(module)[name]
    names = public_names(module)
    nearest = difflib.get_close_matches(name, names, n=1)
    guess = f" Did you mean {place}:{nearest[0]}?" if nearest else ""
    raise GruppoError(f"{place} has no {name!r}; it has: {', '.join(names) or 'nothing public'}.{guess}")


def is_file_name(place: str) -> bool:
    """Whether a name means a file rather than a module."""
    return place.endswith(".py") or "/" in place or "\\" in place


def public_names(module: ModuleType) -> list[str]:
    """What a module itself defines, in order: no private names, nothing imported."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]


def load_file(path: Path) -> ModuleType:
    """Import a Python file. An unchanged file is imported once; files beside it can be imported from it."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise GruppoError(_missing_file(path))
    stat = path.stat()
    key = f"{path}:{stat.st_mtime_ns}:{stat.st_size}"
    name = f"gruppo_file_{path.stem}_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise GruppoError(f"{path} is not a Python file; name a file that ends in .py.")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    global _depth
    _depth += 1
    try:
        spec.loader.exec_module(module)
    except RunWhileLoading:
        pass  # a script that ends in gruppo.train(...): what it defined before that is there
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise GruppoError(_import_error(path, error)) from error
    finally:
        _depth -= 1
    return module


def import_extra(module: str, extra: str, what: str) -> ModuleType:
    """The module that ``what`` needs, or an error that names the extra which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise GruppoError(
            f'{what} needs the package "{module}" ({problem}); run: pip install "gruppo[{extra}]"'
        ) from problem


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise GruppoError(
            f"the module {name!r} cannot be imported: {type(error).__name__}: {error}. For a file, write"
            " path/to/file.py:name."
        ) from error


def _missing_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; name a Python file in it, as folder/file.py:name."
    beside = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, beside, n=1)
    guess = f" Did you mean {nearest[0]}?" if nearest else ""
    where = "" if path.parent.is_dir() else f" (there is no folder {path.parent} either)"
    return f"there is no file {path}{where}; name a Python file that exists.{guess}"


def _import_error(path: Path, error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else (lines or [None])[-1]
    text = error.msg if isinstance(error, SyntaxError) else (str(error).splitlines() or [""])[0]
    return f"{path}, line {line}, raised {type(error).__name__} on import: {text}. Mend the file and try again."


def why_not_opened(error: Exception, what: str) -> str:
    """What transformers says of files that it cannot read, as one sentence; its first line may begin a list."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
    if line.endswith(":"):
        return f"it has no {what} that transformers can open."
    return line if line.endswith((".", "!", "?")) else f"{line}."


def program() -> str:
    """How ``gruppo`` is called from here: by its name where the shell finds it, else by its path."""
    beside = Path(sys.executable).with_name("gruppo")
    found = shutil.which("gruppo")
    if not beside.exists() or (found and Path(found).resolve() == beside.resolve()):
        return "gruppo"
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)
