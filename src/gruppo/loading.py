"""Objects named on the command line (``path/to/file.py:name``, ``package.module:name``) and
packages of extras."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import inspect
import os
import re
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gruppo.errors import GruppoError, as_flag


class RunDuringImport(GruppoError):
    """A file that is imported for an object in it starts a run."""


BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages; Debian has the second."""
_depth = 0
_named: set[str] = set()
"""Packages from which an object was named."""
listed: frozenset[str] | None = None
"""Full names that may be imported; None: any, because no folder is open."""


@contextmanager
def _during_import() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def refuse_during_import() -> None:
    """Refuse to train while a file is being imported for an object in it, as a script without a
    guard does."""
    if _depth > 0:
        raise RunDuringImport


@contextmanager
def importing(names: Collection[str] | None) -> Iterator[None]:
    """Within, only these names may be imported: what a folder's list of names does not show cannot
    run. None: any."""
    global listed
    previous, listed = listed, None if names is None else frozenset(names)
    try:
        yield
    finally:
        listed = previous


def check_listed(name: str) -> None:
    """Refuse a name that is not among those of ``importing``."""
    if listed is not None and name not in listed:
        raise GruppoError(f"""{name} would run code, and what is open was not found to name it, so
            it is not imported. Write it as path/to/file.py:name or package.module:name.""")


def full_name(spec: str) -> str:
    """The one spelling of the name of an object: ``/resolved/file.py:name`` or
    ``package.module:name``; "" for any other text."""
    place, _, name = spec.strip().rpartition(":")
    is_file = is_file_name(place)
    if is_file:
        try:
            place = os.path.realpath(os.path.expanduser(place))
        except (OSError, ValueError):  # a null character
            return ""
    is_place = place.endswith(".py") if is_file else all(map(str.isidentifier, place.split(".")))
    return f"{place}:{name}" if is_place and name.isidentifier() else ""


def load_object(spec: str) -> Any:
    """Object that ``file.py:name`` or ``package.module:name`` names."""
    place, _, name = full_name(spec).rpartition(":")
    if not place:
        raise GruppoError(
            f"{spec!r} names no object; write path/to/file.py:name or package.module:name."
        )
    check_listed(f"{place}:{name}")
    module = load_file(Path(place)) if is_file_name(place) else _load_module(place)
    try:
        # not from vars(): a module may load its names when they are first used
        return getattr(module, name)
    except AttributeError:
        pass
    except (Exception, SystemExit) as error:
        raise GruppoError(
            f"{place}:{name} cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    own = [
        other
        for other, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not other.startswith("_")
    ]
    hint = did_you_mean(name, own, prefix=f"{place}:")
    raise GruppoError(
        f"{place} has no {name!r}; it has: {', '.join(own) or 'nothing public'}.{hint}"
    )


def _load_module(place: str) -> ModuleType:
    _named.add(place.split(".")[0])
    try:
        with _during_import():
            return importlib.import_module(place)
    except RunDuringImport:
        raise GruppoError(f"""the module {place!r} starts a run when it is imported; put that under
            if __name__ == '__main__'.""") from None
    except (Exception, SystemExit) as error:
        raise GruppoError(f"""the module {place!r} cannot be imported: {type(error).__name__}:
            {error}. For a file, write path/to/file.py:name.""") from error


def is_file_name(place: str) -> bool:
    """Whether a name is that of a file and not of a module."""
    return place.endswith(".py") or "/" in place or "\\" in place


def absolute_path(path: str) -> str:
    """Return the absolute path of a file or folder that exists; any other name as it is."""
    expanded = os.path.expanduser(path)
    # not os.path.abspath: what follows a link and .. is another file than without them
    return str(Path(expanded).absolute()) if path and os.path.exists(expanded) else path


def split_names(text: str) -> list[str]:
    """The parts of ``pairs:DEGRADED:CLEAN`` between colons, of which that of a Windows drive, C:\\,
    is none."""
    slashes = r"\\/" if os.name == "nt" else r"\\"
    return re.split(rf"(?<!^[A-Za-z])(?<!:[A-Za-z]):|:(?![{slashes}])", text)


def visible(text: str) -> str:
    """The text on one line, with control and invisible characters as escapes such as ``\\n`` and
    ``\\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def absolute_spec(spec: str) -> str:
    """Return ``file.py:name`` with the absolute path of its file, so that it means the same in any
    folder."""
    place, colon, name = spec.rpartition(":")
    return f"{absolute_path(place)}{colon}{name}" if colon and is_file_name(place) else spec


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its resolved path. An unchanged one is imported once; it can import
    files beside it."""
    if not path.is_file():
        guess = did_you_mean(path.name, [other.name for other in path.parent.glob("*.py")])
        raise GruppoError(f"there is no file {path}; name a Python file that exists.{guess}")
    stat = path.stat()  # a file that has changed is another module
    key = f"{path}:{stat.st_mtime_ns}:{stat.st_size}"
    name = f"gruppo_file_{path.stem}_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    # last, so that a file beside it hides no installed package
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with _during_import():
            spec.loader.exec_module(module)
    except RunDuringImport:
        pass  # a script that ends in gruppo.train(...): what it defined before that is there
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in frames[::-1] if Path(frame.filename) == path), None)
        text = (str(error).splitlines() or [""])[0]
        if isinstance(error, SyntaxError):
            text = error.msg
            line = error.lineno if error.filename == str(path) else line
        raise GruppoError(f"""{path}, line {line}, raised {type(error).__name__} on import: {text}.
            Fix the file and try again.""") from error
    return module


def is_users_module(name: str, file: str | None) -> bool:
    """Whether a module is the user's: named for an object in it, or neither of gruppo nor in a
    folder of libraries."""
    top = name.split(".")[0]
    if file is None or file.startswith("<") or top == "gruppo":
        return False
    libraries = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")]
    return top in _named or not (
        INSTALLED & {*Path(file).parts} or any(map(Path(file).is_relative_to, libraries))
    )


def code_digest(spec: str) -> str | None:
    """SHA-256 of the user's file that ``file.py:name`` or ``package.module:name`` names, with the
    files beside it that it imports.

    The files are read and not imported: a reward function of a file is imported in another process.
    None for the name of anything else.
    """
    place = spec.rpartition(":")[0]
    top = place.split(".")[0]
    if is_file_name(place):
        waiting = [Path(place).expanduser().resolve()]
    elif not place or (top != "__main__" and top in {*sys.stdlib_module_names, "gruppo"}):
        return None
    else:  # a script that is run is the module __main__, one that is loaded has a name of ours
        # not getattr, with which a lazy module would import what it stands for
        root = getattr(sys.modules.get(place), "__dict__", {}).get("__file__")
        waiting = [Path(root)] if root else [_module_in(Path(folder), place) for folder in sys.path]
    digests: dict[Path, str] = {}
    while waiting:
        file = waiting.pop()
        if file in digests or not file.is_file():
            continue
        source = file.read_bytes()
        digests[file] = hashlib.sha256(source).hexdigest()
        with suppress(SyntaxError, ValueError, RecursionError):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [alias.name for alias in node.names]
                    names = [getattr(node, "module", None) or name for name in names]
                    waiting += [_module_in(file.parent, name) for name in names]
    if not digests:
        return None
    return hashlib.sha256("".join(sorted(digests.values())).encode()).hexdigest()


def _module_in(folder: Path, name: str) -> Path:
    """The file of a module in a folder, which may not exist."""
    path = folder.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def describe_error(error: BaseException) -> tuple[str, int]:
    """An error in one line, and the exit code of a command that it ends."""
    # the innermost line of the user's own code that raised the error, or called what raised it
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users_module(frame.f_globals.get("__name__") or "", frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    what = f"{type(error).__name__}: {error}"
    code = GruppoError.exit_code
    if isinstance(error, GruppoError):
        message, code = error.message(as_flag), error.exit_code
    elif type(error).__name__ == "OutOfMemoryError":  # of torch, which is not imported here
        first = str(error).partition(". GPU")[0].removeprefix("CUDA out of memory. ")
        message = f"""the GPU's memory ran out ({first}). Train a smaller --model, or an
            adapter with --lora.rank 16; set a lower --rollout.max-new-tokens; end other processes
            on the GPU; or set --device cpu."""
    elif place is not None:
        message = f"{place}, raised {what}. Correct the function, then try again."
    elif isinstance(error, OSError) and error.errno is not None:
        message = f"{error.filename or 'the system'}: {error.strerror}. Fix that, then try again."
    else:
        message, code = f"{what} (this looks like a bug in gruppo; --debug shows where)", 1
    return visible(" ".join(message.split())), code  # it may quote a file of somebody else


def import_extra(module: str, extra: str, what: str) -> ModuleType:
    """Module that ``what`` needs. The error names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise GruppoError(f"""{what} needs the package "{module}" ({problem}); run:
            {install_command(extra)}""") from problem


def transformers_error(error: Exception, what: str) -> str:
    """Error of transformers on files that it cannot read, as one sentence. Its first line may begin
    a list."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
    if line.endswith(":"):
        return f"it has no {what} that transformers can open."
    return line.rstrip(".") + "."


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 step, 2 steps."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def command_name(program: str = "gruppo") -> str:
    """Command that runs a program of this Python from here: its name where the shell finds it, else
    its path."""
    path = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    if not path.exists() or (found and Path(found).resolve() == path.resolve()):
        return program
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def install_command(extra: str) -> str:
    """Command that installs an extra into this Python, for a clone of the repository or an
    installed wheel."""
    root = Path(__file__).resolve().parents[2]
    package = (
        f'-e "{root}[{extra}]"' if (root / "pyproject.toml").is_file() else f'"gruppo[{extra}]"'
    )
    return f"{command_name('pip')} install {package}"


def split_options(text: str, error: type[GruppoError] = GruppoError) -> dict[str, str]:
    """Options written as ``name=value,name=value``; a part without "=" has an empty value."""
    options: dict[str, str] = {}
    for part in filter(str.strip, text.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if name in options:
            raise error(f"{text!r} has {name} twice; write it once.")
        options[name] = value
    return options


def typed_options(
    function: Callable[..., Any],
    options: Mapping[str, str],
    usage: str,
    error: type[GruppoError] = GruppoError,
) -> dict[str, Any]:
    """Keyword arguments of a function from text, in the types of its defaults; None stands for a
    number."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    values: dict[str, Any] = {}
    for name, text in options.items():
        if name not in defaults:
            raise error(
                f"there is no option {name!r}; write {usage}.{did_you_mean(name, defaults)}"
            )
        kind = float if defaults[name] is None else type(defaults[name])
        try:
            values[name] = BOOLEANS[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            raise error(f"cannot read {name}={text!r}; write {usage}.") from None
    return values


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, prefix: str = "") -> str:
    """Return " Did you mean X?" with the known name nearest to ``name``; ``otherwise`` where none
    is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {prefix}{nearest[0]}?" if nearest else otherwise
