"""Trackers beside the run's own files: TensorBoard, Weights & Biases, trackio, or a class of one's own.

Each is a thin adapter. What fails in one of them (no network, no disk, a bug) is one warning: the run goes on without
it, and the files in its folder hold everything.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import io
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gruppo.config.schema import Config
from gruppo.config.serialization import to_dict
from gruppo.loading import import_extra, is_file_name, load_object
from gruppo.protocols import Tracker
from gruppo.tracking.formatting import is_array, shown
from gruppo.tracking.sheets import has_sheet, sheet_name
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

PROJECT, KEPT = "gruppo", "trackers.json"
"""The project that runs are shown in, and the file that holds what a resumed run is known by."""
METHODS = ("log", "log_samples", "close")
CLOSE_S = 60.0
"""Seconds that a tracker may take for what it has not sent yet."""
COLUMNS = ("reward", "prompt", "completion", "target")
FIELDS = (*COLUMNS, "parts", "extra", "failures")
"""Of a sample that is a text; the first are in every table."""


def check(names: Sequence[str]) -> None:
    """Refuse an unknown tracker, and one whose package is missing. No package is imported."""
    for name in names:
        if name not in TRACKERS:
            _check_own(name)
        elif not _is_installed(name):
            raise GruppoError(
                f'--track {name} needs the package "{name}", which is not installed; run: pip install "gruppo[track]"'
            )
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise GruppoError(f"--track names {twice[0]} more than once; leave one of them out.")


def absolute(name: str) -> str:
    """The tracker with its file named from the root, so that it means the same in any folder."""
    place, colon, what = name.rpartition(":")
    if not colon or not is_file_name(place) or not Path(place).expanduser().exists():
        return name
    return f"{os.path.abspath(Path(place).expanduser())}:{what}"


def open_trackers(names: Sequence[str], run_dir: Path, config: Any, *, from_step: int | None) -> list[Tracker]:
    """The trackers by name, each guarded. ``from_step``: where a resumed run goes on from, None of a new one."""
    opened = []
    for name in names:
        tracker = Guarded(name)
        if name in TRACKERS:
            tracker.open(partial(TRACKERS[name], run_dir, settings(config), from_step))
        else:
            tracker.open(partial(_open_own, name, run_dir, config))
        opened.append(tracker)
    return list(opened)


def settings(config: Any) -> dict[str, Any]:
    """Each leaf of a config under its dotted name, as a number, a text or a truth value."""
    leaves: dict[str, Any] = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for part, inner in value.items():
                collect(inner, f"{name}.{part}" if name else part)
        elif isinstance(value, list | tuple) and any(isinstance(part, Mapping) for part in value):
            for number, inner in enumerate(value):
                collect(inner, f"{name}.{number}")
        else:
            leaves[name] = value if isinstance(value, bool | int | float | str) else _as_text(value)

    collect(to_dict(config) if isinstance(config, Config) else config, "")
    return leaves


class Guarded:
    """A tracker whose first error is a warning, and its last call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tracker: Tracker | None = None

    def open(self, make: Callable[[], Tracker]) -> None:
        """Make the tracker; it stays away where that fails."""
        with self._guard("could not be opened"):
            self._tracker = make()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._tracker is not None:
            with self._guard("failed"):
                self._tracker.log(step, {name: float(value) for name, value in metrics.items()})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._tracker is not None:
            with self._guard("failed"):
                self._tracker.log_samples(step, rows)

    def close(self) -> None:
        """Let it send what it has, for so long and no longer. May be called twice."""
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        closing = threading.Thread(target=self._close, args=(tracker,), daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            log.warning(
                "the tracker %s has not finished within %g s; the run does not wait for it.", self.name, CLOSE_S
            )

    def _close(self, tracker: Tracker) -> None:
        with self._guard("could not be closed"):
            tracker.close()

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """An exception within is said once and lets the tracker go; what ends a run passes."""
        try:
            yield
        except (Exception, SystemExit) as error:
            log.warning(
                "the tracker %s %s, and gets nothing more of this run: %s: %s. The run goes on; metrics.jsonl and "
                "samples.jsonl hold everything.",
                self.name,
                what,
                type(error).__name__,
                (str(error).strip().splitlines() or [""])[0],
            )
            tracker, self._tracker = self._tracker, None
            if tracker is not None:
                threading.Thread(target=_closed_quietly, args=(tracker,), daemon=True).start()


def _closed_quietly(tracker: Tracker) -> None:
    with suppress(Exception):
        tracker.close()


# --- the trackers by name ---------------------------------------------------------------------------------------------


class _Maker(Protocol):
    def __call__(self, run_dir: Path, settings: Mapping[str, Any], from_step: int | None) -> Tracker: ...


class TensorBoard:
    """Event files in ``RUN/tensorboard``. A resume goes on in them, and hides what came after its checkpoint."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], from_step: int | None) -> None:
        import_extra("tensorboard", "track", "--track tensorboard")
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._run_dir, folder = run_dir, run_dir / "tensorboard"
        is_there = folder.is_dir()
        purge = None if not is_there else 0 if from_step is None else from_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        if not is_there:
            for summary in hparams(dict(settings), {}):
                self._writer._get_file_writer().add_summary(summary)
            self._writer.add_text("config", _table(("setting", "value"), settings.items()), 0)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for tag, of_tag in _by_tag(rows):
            if texts := _texts(of_tag):
                self._writer.add_text(tag, _table(*texts), step)
            if (sheet := _sheet(self._run_dir, step, of_tag)) is not None:
                self._writer.add_image(f"{tag}_sheet", _pixels(sheet), step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the project gruppo. ``WANDB_MODE``, ``WANDB_PROJECT`` and the like decide; without a key it is offline.

    The step is a column of its own, so that rows which a resumed run repeats are shown over the former ones.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], from_step: int | None) -> None:
        self._wandb = wandb = import_extra("wandb", "track", "--track wandb")
        self._run_dir, kept = run_dir, _kept(run_dir).get("wandb")
        mode = None if os.environ.get("WANDB_MODE") or _has_key(wandb) else "offline"
        if mode is not None:
            log.info("wandb has no API key: it writes to %s, and wandb sync sends it.", run_dir / "wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            id=kept,
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            mode=mode,
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=30.0, login_timeout=10.0, finish_timeout=CLOSE_S - 10
            ),
        )
        _keep(run_dir, "wandb", self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for tag, of_tag in _by_tag(rows):
            shown: dict[str, Any] = {}
            if texts := _texts(of_tag):
                columns, data = texts
                shown[tag] = self._wandb.Table(columns=list(columns), data=[list(row) for row in data])
            if (sheet := _sheet(self._run_dir, step, of_tag)) is not None:
                shown[f"{tag}_sheet"] = self._wandb.Image(str(sheet))
            if shown:
                self._run.log({"step": step, **shown})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of the local project gruppo; ``trackio show --project gruppo`` opens it."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], from_step: int | None) -> None:
        self._trackio = trackio = import_extra("trackio", "track", "--track trackio")
        self._run_dir, kept = run_dir, _kept(run_dir).get("trackio")
        with redirect_stdout(io.StringIO()):  # it prints how to open its page, over the live screen
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=kept or run_dir.name,
                config=dict(settings),
                resume="allow" if kept else "never",
                embed=False,
            )
        _keep(run_dir, "trackio", self._run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for tag, of_tag in _by_tag(rows):
            if texts := _texts(of_tag):
                columns, data = texts
                table = self._trackio.Table(columns=list(columns), data=[list(row) for row in data])
                self._run.log({tag: table}, step=step)
            if (sheet := _sheet(self._run_dir, step, of_tag)) is not None:
                self._run.log({f"{tag}_sheet": self._trackio.Image(str(sheet))}, step=step)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()


TRACKERS: Mapping[str, _Maker] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
"""By the name that ``--track`` takes, which is the package's too."""


# --- one's own --------------------------------------------------------------------------------------------------------


def _check_own(name: str) -> None:
    if ":" not in name:
        near = difflib.get_close_matches(name, TRACKERS, 1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(TRACKERS)}."
        raise GruppoError(f"there is no tracker {name!r}. {hint} For a class of your own write path/to/file.py:Class.")
    own = _own(name)
    if inspect.isclass(own) and (missing := [method for method in METHODS if not callable(getattr(own, method, None))]):
        raise GruppoError(
            f"the tracker {name} has no {' and no '.join(missing)}; it needs log(step, metrics), "
            "log_samples(step, rows) and close()."
        )


def _own(name: str) -> Callable[[Path, Any], Tracker]:
    """What is called with the run's folder and its config, and gives a tracker."""
    own = load_object(name)
    if not callable(own):
        raise GruppoError(f"the tracker {name} is {own!r:.80} ({type(own).__name__}); name a class, as file.py:Class.")
    return own


def _open_own(name: str, run_dir: Path, config: Any) -> Tracker:
    tracker: Tracker = _own(name)(run_dir, config)
    return tracker


# --- what they are told -----------------------------------------------------------------------------------------------


def _by_tag(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows of training and of an evaluation apart."""
    tags = {"samples": False, "held_out": True}
    parts = [
        (tag, [row for row in rows if bool(row.get("held_out")) == is_held_out]) for tag, is_held_out in tags.items()
    ]
    return [(tag, part) for tag, part in parts if part]


def _texts(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[list[Any]]] | None:
    """Columns and cells of the samples that are texts; None where none is."""
    rows = [row for row in rows if not is_array(row.get("completion"))]
    columns = [name for name in FIELDS if name in COLUMNS or any(name in row for row in rows)]
    return (columns, [[_cell(name, row.get(name)) for name in columns] for row in rows]) if rows else None


def _cell(name: str, value: Any) -> float | str:
    """The reward as a number, all else as a text: a column has one type."""
    if name == "reward":
        return float("nan") if value is None else float(value)
    if value is None or isinstance(value, str):
        return value or ""
    return _as_text(value) if isinstance(value, Mapping) or name == "failures" else shown(value)


def _sheet(run_dir: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """The PNG file that the run has made of these rows, where it has."""
    file = run_dir / sheet_name(step, is_held_out=bool(rows[0].get("held_out")))
    return file if has_sheet(rows) and file.is_file() else None


def _pixels(file: Path) -> Any:
    import numpy
    from PIL import Image

    with Image.open(file) as picture:
        return numpy.asarray(picture.convert("RGB"))


def _table(columns: Sequence[str], rows: Any) -> str:
    """As Markdown, which is how TensorBoard shows texts."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_in_a_table(cell) for cell in line) + " |" for line in lines)


def _in_a_table(cell: Any) -> str:
    return shown(str(cell)).replace("|", "\\|")


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


# --- what a resumed run is known by -----------------------------------------------------------------------------------


def _kept(run_dir: Path) -> dict[str, str]:
    try:
        return dict(json.loads((run_dir / KEPT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _keep(run_dir: Path, name: str, known_by: str) -> None:
    (run_dir / KEPT).write_text(json.dumps({**_kept(run_dir), name: known_by}), encoding="utf-8")


def _has_key(wandb: Any) -> bool:
    """Whether wandb can log in without asking. Where it does not say, it may ask, for ten seconds."""
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # an older one, which asks
        return True


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
