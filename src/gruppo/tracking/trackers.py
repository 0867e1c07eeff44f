"""External trackers: TensorBoard, Weights & Biases, trackio, or a class from a file.

Each is a thin adapter. If one fails (no network, no disk, a bug), that is one warning: the run
continues without it, and the files in its folder hold everything.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy

from gruppo.config.options import as_text as option_text
from gruppo.config.options import options
from gruppo.config.schema import Config
from gruppo.integrity import read_json, replace_file
from gruppo.loading import import_extra, install_command, load_object
from gruppo.protocols import Tracker
from gruppo.timeouts import CallError, call_with_timeout
from gruppo.tracking.formatting import as_text
from gruppo.tracking.images import has_pixels
from gruppo.tracking.samples import sheet_name
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

PROJECT, STATE_FILE = "gruppo", "trackers.json"
"""The project of all runs, and the file with the ids by which a resumed run is continued."""
METHODS = ("log", "log_samples", "close")
CLOSE_S = 60.0
"""Seconds that a tracker may take to send what is pending."""
COLUMNS = ("reward", "prompt", "completion", "target")
"""Columns of a table of text samples."""

Settings = dict[str, Any]


def check(names: Sequence[str]) -> None:
    """Refuse an unknown tracker, or one whose package is missing. No package is imported."""
    if len({*names}) < len(names):
        raise GruppoError("--track names a tracker more than once; leave one of them out.")
    for name in names:
        if ":" in name:
            _check_methods(name, load_object(name))
        elif name not in TRACKERS:
            raise GruppoError(f"""unknown tracker {name!r}. Available: {", ".join(TRACKERS)}; for
                your own class write path/to/file.py:Class.""")
        elif find_spec(name) is None:
            raise GruppoError(f"""--track {name} needs the package "{name}", which is not
                installed; run: {install_command("track")}""")


def _check_methods(name: str, made: Any) -> None:
    """Refuse anything but a tracker, or a function that returns one."""
    missing = [method for method in METHODS if not callable(getattr(made, method, None))]
    if missing and (isinstance(made, type) or not callable(made)):
        raise GruppoError(f"""the tracker {name} has no {" and no ".join(missing)}; it needs
            log(step, metrics), log_samples(step, rows) and close().""")


def open_trackers(
    names: Sequence[str], run_dir: Path, config: Config, *, from_step: int | None
) -> list[Tracker]:
    """Open trackers by name, each guarded. ``from_step``: the last step before a resume, None for a
    new run."""

    def open_tracker(name: str) -> Tracker:
        if name in TRACKERS:
            return TRACKERS[name](run_dir, settings(config), from_step)
        return load_object(name)(run_dir, config)

    return [GuardedTracker(name, partial(open_tracker, name)) for name in names]


def guarded(track: Sequence[Any]) -> list[Tracker]:
    """Check trackers that are Python objects, and guard them."""
    for one in track:
        _check_methods(type(one).__name__, one)
    return [GuardedTracker(type(one).__name__, partial(lambda one: one, one)) for one in track]


def settings(config: Config) -> Settings:
    """The options of a config by dotted name, as numbers, strings or booleans."""
    values = {name: option.value for name, option in options(config).items()}
    return {
        name: value if isinstance(value, bool | int | float | str) else option_text(value)
        for name, value in values.items()
    }


class GuardedTracker:
    """A tracker whose first error becomes a warning, after which it is only closed. Ctrl-C passes
    through."""

    def __init__(self, name: str, factory: Callable[[], Tracker]) -> None:
        self.name, self._has_failed = name, False
        self._tracker: Tracker | None = self._call("could not be opened", factory)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._tracker is not None and not self._has_failed:
            # some cannot send tensors or NumPy scalars
            numbers = {name: float(value) for name, value in metrics.items()}
            self._call("failed", partial(self._tracker.log, step, numbers))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._tracker is not None and not self._has_failed:
            self._call("failed", partial(self._tracker.log_samples, step, rows))

    def close(self) -> None:
        """Let it send what is pending, for at most ``CLOSE_S``. May be called twice."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            close = partial(call_with_timeout, tracker.close, CLOSE_S)
            self._call("could not be closed", close)

    def _call(self, problem: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (Exception, SystemExit) as error:  # SystemExit: it must not end the run either
            if not self._has_failed:
                reason = str(error).strip().partition("\n")[0]
                if not isinstance(error, CallError):
                    reason = f"{type(error).__name__}: {reason}"
                text = "the tracker %s %s and is not used any more: %s. The run continues; "
                text += "metrics.jsonl and samples.jsonl hold everything."
                log.warning(text, self.name, problem, reason)
            self._has_failed = True


# --- trackers by name -----------------------------------------------------------------------------


class TensorBoard:
    """Event files in ``RUN/tensorboard``. A resumed run continues them, and hides what came after
    its checkpoint."""

    def __init__(self, run_dir: Path, settings: Settings, from_step: int | None) -> None:
        import_extra("tensorboard", "track", "--track tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._run_dir, folder = run_dir, run_dir / "tensorboard"
        is_new = not folder.is_dir()
        # events are only ever appended
        purge = None if is_new else (-1 if from_step is None else from_step) + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        if is_new:
            self._writer.add_text("config", _markdown(("setting", "value"), *settings.items()), 0)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for tag, table, sheet in _samples(self._run_dir, step, rows):
            if table:
                self._writer.add_text(tag, _markdown(COLUMNS, *table), step)
            if sheet.is_file():
                from PIL import Image

                with Image.open(sheet) as image:
                    pixels = numpy.asarray(image.convert("RGB"))
                self._writer.add_image(f"{tag}_sheet", pixels, step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@dataclass
class HostedTracker:
    """A run of wandb or trackio, which have tables and images in common."""

    package: Any
    run: Any
    run_dir: Path
    send: Callable[[int, dict[str, Any]], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.send(step, dict(metrics))

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for tag, table, sheet in _samples(self.run_dir, step, rows):
            if table:
                self.send(step, {tag: self.package.Table(columns=list(COLUMNS), data=table)})
            if sheet.is_file():
                self.send(step, {f"{tag}_sheet": self.package.Image(str(sheet))})

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):  # trackio prints
            self.run.finish()


def open_wandb(run_dir: Path, settings: Settings, from_step: int | None) -> Tracker:
    """A run of the project gruppo. ``WANDB_MODE``, ``WANDB_PROJECT`` and so on apply; without a key
    it is offline."""
    wandb = import_extra("wandb", "track", "--track wandb")
    mode = None
    if not os.environ.get("WANDB_MODE") and not wandb.login(prompt=False):
        mode = "offline"
        log.info("wandb has no API key: it writes to %s; wandb sync uploads it.", run_dir / "wandb")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run_dir.name,
        id=_tracker_ids(run_dir).get("wandb"),
        resume="allow",
        dir=str(run_dir),
        config=settings,
        mode=mode,
        settings=wandb.Settings(silent=True, console="off", finish_timeout=CLOSE_S - 10),
    )
    _tracker_ids(run_dir, wandb=run.id)
    # The step is a column of its own, so that rows which a resumed run repeats are drawn over the
    # earlier ones.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return HostedTracker(wandb, run, run_dir, lambda step, row: run.log({"step": step, **row}))


def open_trackio(run_dir: Path, settings: Settings, from_step: int | None) -> Tracker:
    """A run of the local project gruppo; ``trackio show --project gruppo`` opens it."""
    trackio = import_extra("trackio", "track", "--track trackio")
    name = _tracker_ids(run_dir).get("trackio")
    with redirect_stdout(io.StringIO()):  # it prints how to open its page, over the live screen
        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name or run_dir.name,
            config=settings,
            resume="allow" if name else "never",  # another run of this name may be in the project
            embed=False,
        )
    _tracker_ids(run_dir, trackio=run.name)
    return HostedTracker(trackio, run, run_dir, lambda step, row: run.log(row, step=step))


def _tracker_ids(run_dir: Path, **opened: str) -> dict[str, str]:
    """Ids of the run in its trackers, by which a resume continues it; saved when one was
    opened."""
    path, ids = run_dir / STATE_FILE, dict[str, str]()
    with suppress(OSError, ValueError, TypeError):
        ids = dict(read_json(path))
    if opened:
        replace_file(path, json.dumps({**ids, **opened}))
    return ids


TRACKERS: Mapping[str, Callable[[Path, Settings, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}
"""By the name that ``--track`` takes, which is also the package's name."""


# --- samples as tables ----------------------------------------------------------------------------


def _samples(
    run_dir: Path, step: int, rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, list[list[Any]], Path]]:
    """Training and held-out samples: a tag, a table of those with text, and the sheet of images,
    which may not be there."""
    for tag, is_held_out in {"samples": False, "held_out": True}.items():
        tagged = [row for row in rows if bool(row.get("held_out")) == is_held_out]
        texts = [row for row in tagged if not has_pixels(row.get("completion"))]
        if tagged:
            table = [[_cell(name, row.get(name)) for name in COLUMNS] for row in texts]
            yield tag, table, run_dir / sheet_name(step, is_held_out)


def _cell(name: str, value: Any) -> float | str:
    """The reward as a number, everything else as text: a column has one type."""
    if name == "reward":
        return float("nan") if value is None else float(value)
    if value is None or isinstance(value, str):
        return value or ""  # a string as it is, with its line ends
    return as_text(value)


def _markdown(*rows: Sequence[Any]) -> str:
    """A table in Markdown, which TensorBoard renders; the first row is its header."""
    lines = [[as_text(str(cell)).replace("|", "\\|") for cell in row] for row in rows]
    lines.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
