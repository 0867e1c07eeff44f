"""The pictures of a run as PNG sheets in ``RUN/images``, and rows that say where on them each picture is."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gruppo.tracking.formatting import described, is_array, number, shown
from gruppo.tracking.images import Cell, Line, draw, is_picture, picture_of
from gruppo.tracking.writing import replace_bytes

log = logging.getLogger("gruppo")

Row = Mapping[str, Any]

FOLDER, BEFORE_AFTER = "images", "before_after.png"
MOST_LINES, MOST_SAMPLES, MOST_PAIRS = 12, 10, 4
"""On a sheet; and of a prompt before and after."""
FLOW = 8
"""Pictures beside each other where each is of another prompt."""
LONGEST_ARRAY = 16
"""Numbers of an array that samples.jsonl holds."""
ENDS = ("prompt", "target")
"""What stands at both ends of a line, where it is a picture."""


def sheet_name(step: int, is_held_out: bool = False) -> str:
    """The file of a step's samples, or of the evaluation at it, below the run's folder."""
    return f"{FOLDER}/{'eval' if is_held_out else 'step'}_{step:06d}.png"


def has_sheet(rows: Sequence[Row]) -> bool:
    """Whether a sheet is made of these rows: some are pictures, and Pillow is there."""
    return any(is_picture(row.get("completion")) for row in rows) and can_draw()


def can_draw() -> bool:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return False
    return True


class Sheets:
    """Draws the rows of a step and gives them back as JSON can hold them.

    A picture becomes ``{"file", "line", "column", "box"}``: the sheet, the place on it from 1, and what Pillow's
    ``crop`` cuts out; any other array, and a picture that found no room, its type and shape. What cannot be drawn is
    said once for each kind, and so is a missing Pillow; no row is lost by it.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self._said: set[str] = set()

    def place(self, step: int, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The rows with places for pixels, after their sheet has been written.

        Rows with ``held_out`` are an evaluation's and have a sheet of their own, with a line for each prompt. Of the
        others those of one ``group`` and prompt are on a line; those with ``failures`` come last.
        """
        placed = [dict(row) for row in rows]
        self._count_odd(step, [row["completion"] for row in rows if _is_odd(row.get("completion"))], len(rows))
        for is_held_out in (False, True):
            pictures = [row for row in placed if is_picture(row.get("completion"))]
            pictures = [row for row in pictures if bool(row.get("held_out")) == is_held_out]
            if pictures and self._has_pillow():
                self._draw(step, pictures, is_held_out)
        return [{name: described(v) if _is_long(v) else v for name, v in row.items()} for row in placed]

    def cut(self, step: int) -> None:
        """Delete the sheets of later steps, and what a killed process left half-written."""
        for path in sorted((self.run_dir / FOLDER).glob("*")):
            of_step = re.fullmatch(r"(?:step|eval)_(\d+)\.png", path.name)
            if path.name.endswith(".png.new") or (of_step and int(of_step[1]) > step):
                path.unlink()

    def before_and_after(self, rows: Sequence[Row]) -> None:
        """A sheet of the same prompts at the first evaluation and at the last, from the rows of samples.jsonl.

        With fewer than two evaluations there is none, and one that was drawn is deleted.
        """
        rows = [row for row in rows if row.get("held_out") and isinstance(row.get("completion"), Mapping)]
        path = self.run_dir / FOLDER / BEFORE_AFTER
        steps = sorted({row["step"] for row in rows})
        if len(steps) < 2 or not can_draw():
            return path.unlink(missing_ok=True)
        try:
            sheet = _before_and_after(self.run_dir, rows, steps[0], steps[-1])
        except Exception as problem:
            self._say("before", f"before and after cannot be drawn: {type(problem).__name__}: {problem}")
            return
        _write(path, sheet)

    def _draw(self, step: int, rows: Sequence[dict[str, Any]], is_held_out: bool) -> None:
        """Write the sheet, and put places into these rows."""
        title = f"{'held-out prompts at' if is_held_out else 'samples of'} step {step}{_and_rewards(rows)}"
        try:
            lines = _laid_out(rows)
            count = sum(place.name == "completion" for line in lines for place in line.places)
            title += f" ({count} of {len(rows)} pictures)" if count < len(rows) else ""
            sheet, boxes = draw([Line(line.words, [p.cell for p in line.places]) for line in lines], title=title)
        except Exception as problem:  # a sheet is not worth a run
            self._say("draw", f"the sheet of step {step} cannot be drawn: {type(problem).__name__}: {problem}")
            return
        name = sheet_name(step, is_held_out)
        _write(self.run_dir / name, sheet)
        for n, (line, of_line) in enumerate(zip(lines, boxes, strict=True), start=1):
            for column, (place, box) in enumerate(zip(line.places, of_line, strict=True), start=1):
                for row in place.rows:
                    row[place.name] = {"file": name, "line": n, "column": column, "box": list(box or ())}

    def _count_odd(self, step: int, odd: Sequence[Any], count: int) -> None:
        if odd:
            what = described(odd[0])
            self._say(
                f"odd {what}",
                f"{len(odd)} of {count} samples of step {step} are on no sheet: {what} is no picture; one has floats "
                "[C, H, W] of 1 or 3 channels.",
            )

    def _has_pillow(self) -> bool:
        if not can_draw():
            self._say("Pillow", 'No pictures are kept: Pillow is not installed. Run: pip install "gruppo[images]"')
        return can_draw()

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("%s", message)


def write_sheet(path: Path, rows: Sequence[Row], title: str) -> bool:
    """The pictures of some rows in a file, laid out as those of a run; False, and no file, where none can be drawn."""
    pictures = [dict(row) for row in rows if is_picture(row.get("completion"))]
    if not has_sheet(pictures):
        return False
    lines = [Line(line.words, [place.cell for place in line.places]) for line in _laid_out(pictures)]
    _write(path, draw(lines, title=title)[0])
    return True


def _write(path: Path, sheet: Any) -> None:
    file = io.BytesIO()
    sheet.save(file, "PNG")
    replace_bytes(path, file.getvalue())


def _is_odd(value: Any) -> bool:
    return is_array(value) and not is_picture(value)


def _is_long(value: Any) -> bool:
    return is_picture(value) or (is_array(value) and math.prod(value.shape) > LONGEST_ARRAY)


# --- the sheet of a step ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Place:
    """A picture on a sheet: an entry of these rows."""

    name: str
    rows: Sequence[dict[str, Any]]
    cell: Cell


@dataclass(frozen=True, eq=False)
class _Placed:
    words: str
    places: Sequence[_Place]


def _laid_out(rows: Sequence[dict[str, Any]]) -> list[_Placed]:
    """A line for each group; several groups on a line where each has a single picture and nothing beside it."""
    groups, said = list(_grouped(rows).values()), _rewards_of(rows)
    if all(len(group) == 1 and not is_picture(group[0].get("prompt")) for group in groups):
        alone = [group[0] for group in groups][: MOST_LINES * FLOW]
        places = [_sample(row, said(row), shown(row.get("prompt", ""))) for row in alone]
        return [_Placed("", places[n : n + FLOW]) for n in range(0, len(places), FLOW)]
    return [_line(group, said) for group in groups[:MOST_LINES]]


def _grouped(rows: Sequence[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    """Rows by group and prompt; those that a reward could not score by themselves, at the end."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: "failures" in row):
        prompt = row.get("prompt", "")
        words = id(prompt) if is_array(prompt) else shown(prompt)
        group = None if row.get("held_out") else row.get("group")
        groups.setdefault(("failures" in row, group, words), []).append(row)
    return groups


def _line(group: Sequence[dict[str, Any]], said: Callable[[Row], str]) -> _Placed:
    """What was given, where that is a picture, the samples, and what was wanted."""
    prompt, target = (group[0].get(name) for name in ("prompt", "target"))
    samples = [_sample(row, said(row)) for row in group[:MOST_SAMPLES]]
    if not is_picture(prompt):
        return _Placed(shown(prompt if prompt is not None else ""), samples)
    given = _Place("prompt", group, Cell(picture_of(prompt), ("", "given")))
    wanted = [_Place("target", group, Cell(picture_of(target), ("", "target")))] if is_picture(target) else []
    return _Placed("", [given, *samples, *wanted])


def _sample(row: dict[str, Any], *words: str) -> _Place:
    return _Place("completion", [row], Cell(picture_of(row["completion"]), words))


def _rewards_of(rows: Sequence[Row]) -> Callable[[Row], str]:
    """What stands below each of these rows' pictures: nothing where none was scored."""
    return _reward if _and_rewards(rows) else lambda row: ""


def _and_rewards(rows: Sequence[Row]) -> str:
    """For the title."""
    return ", and their rewards" if any(_is_scored(row) for row in rows) else ""


def _reward(row: Row) -> str:
    if not _is_scored(row):
        return "not scored"
    return row["reward"] if isinstance(row["reward"], str) else number(row["reward"])


def _is_scored(row: Row) -> bool:
    reward = row.get("reward")
    return reward is not None and reward == reward


# --- before and after -------------------------------------------------------------------------------------------------


def _before_and_after(run_dir: Path, rows: Sequence[Row], first: int, last: int) -> Any:
    sheets = _Crops(run_dir)
    groups: dict[Any, tuple[list[Row], list[Row]]] = {}
    for row in rows:
        if row["step"] in (first, last):
            groups.setdefault(sheets.prompt_of(row), ([], []))[row["step"] == last].append(row)
    pairs = [list(zip(*both, strict=False))[:MOST_PAIRS] for both in groups.values()]
    pairs = [of_prompt for of_prompt in pairs if of_prompt][:MOST_LINES]
    width = max(map(len, pairs), default=0)
    said = _rewards_of([row for of_prompt in pairs for pair in of_prompt for row in pair])
    lines = [_compared(of_prompt, width, sheets, said) for of_prompt in pairs]
    given = int(any(isinstance(of_prompt[0][0].get("prompt"), Mapping) for of_prompt in pairs))
    heads = {given: f"before: step {first}", given + width: f"after: step {last}"}
    if given:
        heads |= {0: "given", 1 + 2 * width: "target"}
    sheet, _ = draw(lines, title="held-out prompts before and after", heads=heads)
    return sheet


def _compared(pairs: Sequence[tuple[Row, Row]], width: int, sheets: _Crops, said: Callable[[Row], str]) -> Line:
    """One prompt's pictures before, then after."""
    first, empty = pairs[0][0], [None] * (width - len(pairs))
    sides = [[Cell(sheets.crop(row["completion"]), (said(row),)) for row in side] for side in zip(*pairs, strict=True)]
    samples = [*sides[0], *empty, *sides[1], *empty]
    if not isinstance(first.get("prompt"), Mapping):
        return Line(shown(first.get("prompt", "")), samples)
    ends = [Cell(sheets.crop(place)) if isinstance(place := first.get(name), Mapping) else None for name in ENDS]
    return Line("", [ends[0], *samples, ends[1]])


class _Crops:
    """Pictures out of the sheets that they were drawn on."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._sheets: dict[str, Any] = {}

    def crop(self, place: Mapping[str, Any]) -> Any:
        from PIL import Image

        if place["file"] not in self._sheets:
            with Image.open(self._run_dir / place["file"]) as file:
                self._sheets[place["file"]] = file.convert("RGB")
        return self._sheets[place["file"]].crop(tuple(place["box"]))

    def prompt_of(self, row: Row) -> str | bytes:
        """What tells prompts apart."""
        prompt = row.get("prompt", "")
        is_place = isinstance(prompt, Mapping) and "box" in prompt
        return self.crop(prompt).tobytes() if is_place else json.dumps(prompt, ensure_ascii=False)
