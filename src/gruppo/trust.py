"""Which folders may name Python code that is imported when they are opened.

Configs and saved models name functions: ``/path/rewards.py:score``, ``package.module:make``.
Opening a folder of somebody else must not import them. The state folder, outside all run folders,
holds one record for each folder that names code: where it is, and what it named when this user's
command created it. A folder that names more than its record is refused without ``--trust-run``, so
that nobody who edits, copies or moves a folder can add code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from gruppo import loading
from gruppo.integrity import read_json, replace_file
from gruppo.loading import full_name, is_file_name
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

STATE, TRUSTED = "GRUPPO_STATE", "GRUPPO_TRUSTED_RUNS"
REMOTE_CODE = "trust_remote_code"
"""Setting of a config, and option of a reward model: code of a hub model's repository runs."""
RUNS_CODE = re.compile(rf"\b{REMOTE_CODE}\s*=(?!\s*false\b)", re.IGNORECASE)
"""The option of a reward that runs a repository's code."""
SERVERS = {"urls": "engine.urls=", "publish_dir": "engine.publish_dir="}
"""Entries of a config's engine: servers that get the key of this user, and a folder that is written
to."""
ENVIRONMENTS = ("openenv", "verifiers")
"""Prefixes of environments of other libraries, PREFIX:REST."""
ADAPTERS = tuple(f"{prefix}:" for prefix in (*ENVIRONMENTS, "judge"))
"""Data, environments and rewards that import a package by a name of its own, or use a server."""
MODEL_FILES = ("module.json", "restorer.json")
"""Files of saved models that name a function."""


# --- what a folder would import -------------------------------------------------------------------


def imports(settings: Any, key: str = "") -> list[str]:
    """Names of Python objects in a nested config, options that turn on code of a hub's repository,
    commands, and servers."""
    if isinstance(settings, Mapping):
        return [name for k, value in settings.items() for name in imports(value, str(k))]
    if isinstance(settings, list | tuple):
        return [name for value in settings for name in imports(value, key)]
    if key == REMOTE_CODE:
        return [REMOTE_CODE] if settings else []
    text = settings.strip() if isinstance(settings, str) else ""
    if key in SERVERS:
        return [SERVERS[key] + text] if text else []
    if text.startswith(ADAPTERS):
        return [":".join(map(str.strip, text.split(":", 1)))]
    names = [text] if RUNS_CODE.search(text) else []
    name = full_name(text.removeprefix("restore:"))
    place = name.rpartition(":")[0]
    if is_file_name(place):
        return [*names, name]
    # package.module:name is a name only where such a package is installed: texts with a colon are
    # settings too, and as data they are tasks, reasoning_gym:NAME
    with suppress(ImportError, ValueError):
        top = place.split(".")[0]
        if (
            top
            and key != "data"
            and (top in sys.modules or importlib.util.find_spec(top) is not None)
        ):
            return [*names, name]
    return names


def imports_of_run(settings: Any, folder: Path | None = None) -> list[str]:
    """Names in a run's config, in the saved models that it names, and in its own model, in
    ``folder``."""
    return [*imports(settings), *chain(*imports_of_models([settings, str(folder or "")]).values())]


def imports_of_models(settings: Any) -> dict[Path, list[str]]:
    """Names of functions in the saved models that a nested config names, by their folders."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        return dict(item for part in settings for item in imports_of_models(part).items())
    if not isinstance(settings, str) or not settings:
        return {}  # "" would be the folder that the command is called from
    folder = Path(settings).expanduser()
    return {path: names for path in (folder, folder / "final") if (names := imports_of_model(path))}


def imports_of_model(folder: Path) -> list[str]:
    """Names of functions in a saved model's folder. A damaged file names none: it cannot be opened
    either."""
    names = []
    for file in MODEL_FILES:
        with suppress(OSError, ValueError):
            names += imports(read_json(folder / file))
    return names


# --- what may be imported -------------------------------------------------------------------------


def check(
    folder: Path,
    names: Collection[str],
    *,
    trust_run: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Refuse a folder that would import what it did not name when this user created it."""
    if not names:
        return
    listed = f"{folder} names code to run or servers: {', '.join(dict.fromkeys(names))}."
    flags = []
    if not (trust_run or _is_trusted(folder, names)):
        flags.append("--trust-run")
    if not trust_remote_code and any(REMOTE_CODE in name for name in names):
        flags.append("--trust-remote-code")
    options = ", ".join(f"{flag.strip('-').replace('-', '_')}=True" for flag in flags)
    how = f"add {' '.join(flags)} (in Python {options})"
    if "--trust-run" in flags:
        raise GruppoError(f"""{listed} No command of yours on this machine created it there with
            that. Read the code and check the servers; if you trust it, {how}, or set {TRUSTED} to
            a folder above.""")
    if flags:
        raise GruppoError(f"""{listed} Only the command line can turn that on, no file. If you trust
            the repository, {how}.""")


@contextmanager
def opening(
    folder: Path, names: Collection[str], *, typed: Any = (), **trusts: bool
) -> Iterator[None]:
    """Within, a folder's names, which are checked first, may be imported, and those that the
    command was given."""
    check(folder, names, **trusts)
    with loading.importing([*names, *imports(typed)]):
        yield


def _is_trusted(folder: Path, names: Collection[str]) -> bool:
    if loading.listed is not None and loading.listed.issuperset(names):
        return True  # of the run that names this folder
    place = folder.expanduser().resolve()
    parents = filter(None, os.environ.get(TRUSTED, "").split(os.pathsep))
    if any(place.is_relative_to(_full_path(TRUSTED, parent).resolve()) for parent in parents):
        return True
    for path in (place, *place.parents):  # a model's folder is part of the run above it
        with suppress(OSError, ValueError, RuntimeError, KeyError, TypeError):
            record = read_json(_record_of(path))
            # the name of a record is only a part of the folder's SHA-256
            own = {full_name(str(name)) or name for name in record["imports"]}
            if record["folder"] == str(path) and own.issuperset(names):
                return True
    return False


# --- the state folder -----------------------------------------------------------------------------


def record(folder: Path, names: Collection[str]) -> None:
    """Record that this user created a folder that names this code; a warning if the state folder
    cannot be written."""
    if folder.name.startswith("."):  # temporary: what renames it records it
        return
    try:
        place = folder.expanduser().resolve()
        file = _record_of(place)
        if names:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = {"folder": str(place), "imports": sorted(set(names))}
            replace_file(file, json.dumps(content), is_synced=False)
        else:  # another run may have been there
            file.unlink(missing_ok=True)
    except (OSError, RuntimeError, GruppoError) as error:  # RuntimeError: there is no home
        if names:
            log.warning(
                "%s could not be recorded as yours (%s). It works now; opening it later needs "
                "--trust-run. Set %s to a folder that can be written, or %s to %s.",
                *(folder, error, STATE, TRUSTED, folder.absolute().parent),
            )


def _record_of(place: Path) -> Path:
    return state_folder() / "runs" / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json"


def state_folder() -> Path:
    """GRUPPO_STATE, or where programs keep such files; the nodes of a cluster may share it."""
    if chosen := os.environ.get(STATE):
        return _full_path(STATE, chosen)
    base = Path(os.environ.get("XDG_STATE_HOME") or "")
    # the specification: a relative one is ignored
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "gruppo"


def _full_path(variable: str, text: str) -> Path:
    """A folder that a variable names; a relative one could be a stranger's, with records of his
    own."""
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise GruppoError(
            f"{variable} has {text!r}, which means another folder in each folder. Give its full "
            f"path."
        )
    return path
