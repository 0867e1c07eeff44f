"""The samples of a run: rows in ``samples.jsonl``, and their images as PNG sheets in ``images/``."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppo.integrity import replace_file
from gruppo.loading import install_command
from gruppo.protocols import Tracker
from gruppo.tracking.files import append_lines, cut_lines, read_lines, to_json
from gruppo.tracking.formatting import ARRAYS, as_text, number, shape_text
from gruppo.tracking.images import Cell, SheetRow, draw, has_pixels, is_image, to_pil

log = logging.getLogger("gruppo")

Row = Mapping[str, Any]

FOLDER, BEFORE_AFTER = "images", "before_after.png"
MAX_ROWS, MAX_SAMPLES, MAX_PAIRS = 12, 10, 4
"""Rows of a sheet, samples in a row, and samples of a prompt before and after."""
_SHEET = re.compile(rf"{FOLDER}/(step|eval)_(\d+)\.png")
FLOW = 8
"""Images side by side where each has another prompt."""
ENDS = ("prompt", "target")
"""Fields at both ends of a row, where they are images."""


def sheet_name(step: int, is_held_out: bool = False) -> str:
    """File of a step's samples, or of the evaluation at that step, relative to the run's folder."""
    return f"{FOLDER}/{'eval' if is_held_out else 'step'}_{step:06d}.png"


def image_field(row: Row) -> str:
    """Field with the sample's image: ``image`` if the policy rendered one, else ``completion``."""
    return "image" if row.get("image") is not None else "completion"


class SamplesFile(Tracker):
    """Tracker that writes ``samples.jsonl``: prompts, completions, rewards, and where their images are.

    A row is a mapping with ``prompt``, ``completion``, ``reward`` and further fields; rows of an evaluation have
    ``held_out``. Completions may be text, messages, images, or any object with a ``str``; ``image`` is an image to show
    instead. An image becomes ``{"file", "line", "column", "box"}``: its sheet, its place there from 1, and the box for
    Pillow's ``crop``. One warning is logged for each kind of sample that cannot be drawn; no row is lost.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir, self._path = Path(run_dir), Path(run_dir) / "samples.jsonl"
        self._warned: set[str] = set()
        cut_lines(self._path)

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        placed = [dict(row) for row in rows]
        values: list[Any] = [row.get(image_field(row)) for row in rows]
        if odd := [value for value in values if isinstance(value, ARRAYS) and not is_image(value)]:
            shape = shape_text(odd[0])
            text = f"{shape} is not an image, which has floats [C, H, W] with 1 or 3 channels."
            self._warn_once(
                shape, f"{len(odd)} of {len(rows)} samples of step {step} are not drawn: {text}"
            )
        drawable = [row for row, value in zip(placed, values, strict=True) if is_image(value)]
        for is_held_out in (False, True):
            if images := [row for row in drawable if bool(row.get("held_out")) == is_held_out]:
                self._draw(step, images, is_held_out)
        for row in placed:  # images that are on no sheet are named, without their pixels
            for name, value in row.items():
                if is_image(value):
                    row[name] = (
                        shape_text(value) if isinstance(value, ARRAYS) else type(value).__name__
                    )
        append_lines(self._path, [{"step": step} | to_json(row) for row in placed])
        if any(row.get("held_out") for row in rows):
            self._compare_evaluations()

    def cut(self, step: int) -> None:
        """Keep the samples and sheets up to ``step``, before a resumed run continues."""
        cut_lines(self._path, step)
        for path in sorted((self.run_dir / FOLDER).glob("*")):
            match = re.fullmatch(r"(?:step|eval)_(\d+)\.png", path.name)
            if match and int(match[1]) > step:
                path.unlink()
        self._compare_evaluations()

    def _draw(self, step: int, rows: Sequence[dict[str, Any]], is_held_out: bool) -> None:
        """Write the sheet, and replace the images of the rows by their places on it."""
        title = f"{'held-out prompts at' if is_held_out else 'samples of'} step {step}"
        title += ", with rewards" if any(_captions(rows)) else ""
        try:
            layout = _layout(rows)
            count = sum(
                cell.source[0] not in ENDS
                for line in layout
                for cell in line.cells
                if cell is not None
            )
            title += f" ({count} of {len(rows)} images)" if count < len(rows) else ""
            sheet, boxes = draw(layout, title=title)
        except ImportError:
            text = (
                f"Images are not saved: Pillow is not installed. Run: {install_command('images')}"
            )
            return self._warn_once("Pillow", text)
        except Exception as error:  # a sheet is not worth a run
            return self._warn_once(
                "draw", f"images of step {step} cannot be drawn: {type(error).__name__}: {error}"
            )
        name = sheet_name(step, is_held_out)
        save_sheet(self.run_dir / name, sheet)
        for n, (line, line_boxes) in enumerate(zip(layout, boxes, strict=True), start=1):
            for column, (cell, box) in enumerate(zip(line.cells, line_boxes, strict=True), start=1):
                if cell is not None:
                    field, sources = cell.source
                    place = {"file": name, "line": n, "column": column, "box": list(box or ())}
                    for row in sources:
                        row[field] = place

    def _compare_evaluations(self) -> None:
        """Draw the same prompts at the first and the last evaluation; with fewer than two, delete the sheet."""
        path = self.run_dir / FOLDER / BEFORE_AFTER
        # From the file, not from memory: a resumed run compares with the first evaluation, too.
        rows = [
            r
            for r in read_lines(self._path)
            if r.get("held_out") and _is_place(r.get(image_field(r)))
        ]
        if len(steps := sorted({row["step"] for row in rows})) < 2:
            return path.unlink(missing_ok=True)
        try:
            sheet = _before_and_after(self.run_dir, rows, steps[0], steps[-1])
        except Exception as error:
            return self._warn_once(
                "compare", f"{BEFORE_AFTER} cannot be drawn: {type(error).__name__}: {error}"
            )
        save_sheet(path, sheet)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", message)


def _is_place(value: Any) -> bool:
    """Whether a field of samples.jsonl is the place of an image on a sheet; the file may come from somebody else."""
    is_place = isinstance(value, Mapping) and value.keys() == {"file", "line", "column", "box"}
    return is_place and _SHEET.fullmatch(str(value["file"])) is not None


def write_sheet(path: Path, rows: Sequence[Row], title: str) -> bool:
    """Draw the images of rows like those of a run; return False, without a file, if there are none."""
    images = [row for row in rows if is_image(row.get(image_field(row)))]
    if not images or importlib.util.find_spec("PIL") is None:
        return False
    save_sheet(path, draw(_layout(images), title=title)[0])
    return True


def save_sheet(path: Path, sheet: Any) -> None:
    sheet.save(file := io.BytesIO(), "PNG")
    replace_file(path, file.getvalue())


# --- the sheet of a step ----------------------------------------------------------------------------------------------


def _layout(rows: Sequence[Row]) -> list[SheetRow]:
    """A row of the sheet for each group; several groups share one where each has a single image and nothing else.

    The ``source`` of a cell is its field, and the rows that have the image there.
    """
    groups: dict[Any, list[Row]] = {}
    for row in sorted(
        rows, key=lambda row: "failures" in row
    ):  # rows without a score come last, by themselves
        prompt = row.get("prompt", "")
        key = id(prompt) if has_pixels(prompt) else as_text(prompt)
        group = None if row.get("held_out") else row.get("group")
        groups.setdefault(("failures" in row, group, key), []).append(row)
    captions = {id(row): caption for row, caption in zip(rows, _captions(rows), strict=True)}
    is_flow = all(
        len(group) == 1 and not is_image(group[0].get("prompt")) for group in groups.values()
    )
    sheet: list[SheetRow] = []
    for group in list(groups.values())[: MAX_ROWS * FLOW if is_flow else MAX_ROWS]:
        prompt, target, cells = (
            group[0].get("prompt", ""),
            group[0].get("target"),
            list[Cell | None](),
        )
        text = "" if is_image(prompt) or prompt is None else as_text(prompt)
        for field, row in ((image_field(row), row) for row in group[:MAX_SAMPLES]):
            cells.append(
                Cell(to_pil(row[field]), captions[id(row)], text if is_flow else "", (field, [row]))
            )
        if is_image(prompt):  # an input and its target are the same for the whole group
            cells.insert(0, Cell(to_pil(prompt), note="input", source=("prompt", group)))
            if is_image(target):
                cells.append(Cell(to_pil(target), note="target", source=("target", group)))
        sheet.append(SheetRow("" if is_flow else text, cells))
    if is_flow:
        flow = [cell for row in sheet for cell in row.cells]
        sheet = [SheetRow("", flow[n : n + FLOW]) for n in range(0, len(flow), FLOW)]
    return sheet


def reward_of(row: Row, default: float) -> Any:
    """The row's reward, or the default if it has none. In samples.jsonl an infinite one is text."""
    reward = row.get("reward")
    return default if reward is None or reward != reward else reward


def _captions(rows: Sequence[Row]) -> list[str]:
    """The rewards of these rows; nothing if none has one."""
    rewards = [reward_of(row, math.nan) for row in rows]
    if all(reward != reward for reward in rewards):
        return [""] * len(rows)
    return [r if isinstance(r, str) else number(r) if r == r else "not scored" for r in rewards]


# --- before and after -------------------------------------------------------------------------------------------------


def _before_and_after(run_dir: Path, rows: Sequence[Row], first: int, last: int) -> Any:
    from PIL import Image

    sheets: dict[str, Any] = {}

    def crop(place: Mapping[str, Any]) -> Any:
        if place["file"] not in sheets:
            with Image.open(run_dir / place["file"]) as file:
                sheets[place["file"]] = file.convert("RGB")
        return sheets[place["file"]].crop(tuple(place["box"]))

    # Pair the samples of each prompt; image prompts are equal if their pixels are.
    groups: dict[Any, tuple[list[Row], list[Row]]] = {}
    for row in rows:
        prompt = row.get("prompt", "")
        key = (
            crop(prompt).tobytes() if _is_place(prompt) else json.dumps(prompt, ensure_ascii=False)
        )
        if row["step"] in (first, last):
            groups.setdefault(key, ([], []))[row["step"] == last].append(row)
    # The evaluations may have different counts of samples: what has no partner is left out.
    pairs = [list(zip(*sides, strict=False))[:MAX_PAIRS] for sides in groups.values()]
    pairs = [group for group in pairs if group][:MAX_ROWS]
    width = max(map(len, pairs), default=0)
    flat = [row for group in pairs for pair in group for row in pair]
    captions = {id(row): caption for row, caption in zip(flat, _captions(flat), strict=True)}
    has_prompts = any(_is_place(group[0][0].get("prompt")) for group in pairs)
    lines = []
    for group in pairs:
        cells: list[Cell | None] = []
        for side in zip(*group, strict=True):
            cells += [Cell(crop(row[image_field(row)]), captions[id(row)]) for row in side]
            cells += [None] * (width - len(group))
        prompt, target = (group[0][0].get(name, "") for name in ENDS)
        if _is_place(prompt):
            cells = [Cell(crop(prompt)), *cells, Cell(crop(target)) if _is_place(target) else None]
        lines.append(SheetRow("" if _is_place(prompt) else as_text(prompt), cells))
    start = int(has_prompts)
    heads = {start: f"before: step {first}", start + width: f"after: step {last}"}
    heads |= {0: "input", 1 + 2 * width: "target"} if has_prompts else {}
    return draw(lines, title="held-out prompts before and after training", heads=heads)[0]
