"""The samples of a run: rows in ``samples.jsonl``, and their images as PNG sheets in
``images/``."""

from __future__ import annotations

import importlib.util
import io
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.integrity import replace_file
from gruppo.loading import install_command
from gruppo.protocols import Tracker
from gruppo.tracking.files import append_lines, cut_lines, to_json
from gruppo.tracking.formatting import ARRAYS, shape_text
from gruppo.tracking.images import has_pixels, is_image, make_sheet

log = logging.getLogger("gruppo")

Row = Mapping[str, Any]

FOLDER = "images"
MAX_IMAGES = 96
"""Images of a sheet."""
FIELDS = ("prompt", "image", "completion", "target")
"""Fields of a row that may be images."""


def sheet_name(step: int, is_held_out: bool = False) -> str:
    """File of a step's samples, or of the evaluation at that step, in the run's folder."""
    return f"{FOLDER}/{'eval' if is_held_out else 'step'}_{step:06d}.png"


class SamplesFile(Tracker):
    """Tracker that writes ``samples.jsonl``: prompts, completions, rewards, and their images.

    A row has ``prompt``, ``completion``, ``reward`` and further fields; rows of an evaluation have
    ``held_out``. Completions may be text, messages, images, or any object with a ``str``; ``image``
    is an image to show instead. An image becomes ``{"file", "box"}``: its sheet, and the box for
    Pillow's ``crop``. What cannot be drawn is named, and no row is lost.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._path = run_dir, run_dir / "samples.jsonl"
        self._warned: set[str] = set()
        cut_lines(self._path)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        placed = [dict(row) for row in rows]
        for is_held_out in (False, True):
            group = [row for row in placed if bool(row.get("held_out")) == is_held_out]
            try:
                self._draw(sheet_name(step, is_held_out), group)
            except ImportError:
                command = install_command("images")
                self._warn_once(f"Images are not saved: Pillow is not installed. Run: {command}")
            except Exception as error:  # a sheet is not worth a run
                self._warn_once(f"images cannot be drawn: {type(error).__name__}: {error}")
        for row in placed:  # images that are on no sheet are named, without their pixels
            for name, value in row.items():
                if has_pixels(value) and (is_image(value) or name == "completion"):
                    is_array = isinstance(value, ARRAYS)
                    row[name] = shape_text(value) if is_array else type(value).__name__
                    if not is_image(value):
                        self._warn_once(f"""{row[name]} is not an image, which has floats [C, H, W]
                            with 1 or 3 channels: it is not drawn.""")
        append_lines(self._path, [{"step": step} | to_json(row) for row in placed])

    def cut(self, step: int) -> None:
        """Keep the samples and sheets up to ``step``, before a resumed run continues."""
        cut_lines(self._path, step)
        for path in (self.run_dir / FOLDER).glob("*"):
            match = re.fullmatch(r"(?:step|eval)_(\d+)\.png", path.name)
            if match and int(match[1]) > step:
                path.unlink()

    def _draw(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Write the sheet, and replace the images of the rows by their places on it."""
        cells = [(row, field) for row in rows for field in FIELDS if is_image(row.get(field))]
        images = {id(row[field]): row[field] for row, field in cells}  # samples share their prompt
        if not images:
            return
        sheet, boxes = make_sheet(list(images.values())[:MAX_IMAGES])
        save_png(self.run_dir / name, sheet)
        places = dict(zip(images, boxes, strict=False))
        for row, field in cells:
            if box := places.get(id(row[field])):
                row[field] = {"file": name, "box": list(box)}

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)


def write_sheet(path: Path, rows: Sequence[Row]) -> bool:
    """Draw the images of rows; return False, without a file, if there are none."""
    images = [row.get("image", row.get("completion")) for row in rows]
    images = [value for value in images if is_image(value)]
    if not images or importlib.util.find_spec("PIL") is None:
        return False
    save_png(path, make_sheet(images)[0])
    return True


def save_png(path: Path, image: Any) -> None:
    file = io.BytesIO()
    image.save(file, "PNG")
    replace_file(path, file.getvalue())


def reward_of(row: Row, default: float) -> Any:
    """The row's reward, or the default if it has none."""
    reward = row.get("reward")
    return default if reward is None or reward != reward else reward
