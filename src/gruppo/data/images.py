"""A folder of images as prompts with targets: captions from a table or from files next to them, or classes."""

from __future__ import annotations

import csv
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from gruppo.data.image_files import Fit, list_images, read_image
from gruppo.data.rows import read_jsonl
from gruppo.data.source import IndexedSource, digest_of, leave_out, split_by_hash
from gruppo.types import DataError, GruppoError, Prompt

log = logging.getLogger("gruppo")

TABLES = ("captions.jsonl", "metadata.jsonl", "metadata.csv")
FILE_COLUMNS, CAPTION_COLUMNS = ("file_name", "file", "image", "path"), ("caption", "text", "prompt")


def image_folder(
    folder: str | Path,
    *,
    seed: int,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    fit: Fit = "crop",
    held_out_fraction: float = 0.1,
) -> IndexedSource:
    """Stream of the png, jpg and webp files of a folder and its subfolders; ``target`` is the image.

    Captions, if there are any, are the prompts: from ``captions.jsonl``, ``metadata.jsonl`` or ``metadata.csv`` in the
    folder (a column ``file_name``, another ``caption`` or ``text``; further columns go to ``meta``), or from a .txt
    file next to each image; an image without one is left out, with a warning. Without captions the subfolders are the
    classes, and a prompt is the number of a class, ``label``; without subfolders it is an empty text.

    The held-out split goes by the captions, or by the files where there are none. Images are read when they are drawn
    (see ``read_image``). A file that is not a whole image is left out with a warning, and listed in ``unreadable``.
    """
    if channels not in (1, 3):
        raise GruppoError(f"channels={channels} is neither 1 (grey) nor 3 (colour). Set one of them.")
    root, name, unreadable = Path(folder).expanduser(), str(folder), dict[str, str]()
    size = (size, size) if isinstance(size, int) else size
    prompts = image_prompts(root)
    files = list(prompts)

    def prompt_at(index: int, draw: int) -> Prompt | None:
        file = files[index]
        try:
            image = read_image(root / file, channels=channels, size=size, fit=fit)
        except DataError as problem:
            leave_out(unreadable, file, str(problem))
            return None
        return replace(prompts[file], target=image, meta=dict(prompts[file].meta), draw=draw)

    keys = [prompt.inputs if prompt.inputs and isinstance(prompt.inputs, str) else f for f, prompt in prompts.items()]
    train, held_out = split_by_hash(keys, held_out_fraction, name)
    # sizes instead of contents: reading every image would take minutes
    facts = [[file, (root / file).stat().st_size, prompt.inputs, prompt.meta] for file, prompt in prompts.items()]
    classes = {prompt.inputs: prompt.id for prompt in prompts.values() if isinstance(prompt.inputs, int)}
    columns = ("target", *dict.fromkeys(column for prompt in prompts.values() for column in prompt.meta))
    digest, identity = digest_of([facts, size, channels, fit]), {"held_out_images": len(held_out)}
    source = IndexedSource(name, seed, train, held_out, prompt_at, columns, digest, identity, unreadable=unreadable)
    source.classes = [classes[number] for number in sorted(classes)]
    return source


def image_prompts(folder: Path) -> dict[str, Prompt]:
    """File to prompt, without its target, of every image of a folder, sorted by name."""
    files = list_images(folder)
    table = next((folder / name for name in TABLES if (folder / name).is_file()), None)
    rows = _read_captions(table, folder) if table else {}
    for file in [] if table else files:
        path = (folder / file).with_suffix(".txt")
        try:
            caption = path.read_text(encoding="utf-8-sig").strip() if path.is_file() else ""
        except UnicodeDecodeError:
            raise DataError(f"the caption {path} is not UTF-8; save the file as UTF-8.") from None
        if caption:
            rows[file] = {"caption": caption}
    if rows:
        kept = [file for file in files if file in rows]
        if missing := [file for file in files if file not in rows]:
            text = "left out: %d of %d images of %s have no caption, %s first."
            log.warning(text, len(missing), len(files), folder, missing[0])
        return {file: Prompt(file, rows[file]["caption"], meta={"file": file} | rows[file]) for file in kept}
    folders = {file: file.rpartition("/")[0] for file in files}
    names = sorted(set(folders.values()))
    if len(names) == 1:
        return {file: Prompt(file, "", meta={"file": file}) for file in files}
    labels = {name: label for label, name in enumerate(names)}
    return {
        file: Prompt(name or ".", labels[name], meta={"file": file, "label": labels[name], "class": name})
        for file, name in folders.items()
    }


def _read_captions(table: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """By file: the caption under that name, and every further column."""
    if table.suffix == ".csv":
        try:
            with table.open(encoding="utf-8-sig", newline="") as file:
                rows: list[dict[str, Any]] = list(csv.DictReader(file))
        except (UnicodeDecodeError, csv.Error) as problem:
            raise DataError(f"{table} cannot be read ({problem}); it needs comma-separated values in UTF-8.") from None
    else:
        rows = read_jsonl(table)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    chosen: list[str] = []
    for kind, names in (("file", FILE_COLUMNS), ("caption", CAPTION_COLUMNS)):
        chosen += [name for name in names if name in columns][:1]
        if not set(chosen) & set(names):
            need = f"the {kind} needs to be in one of {', '.join(names)}. Rename one of its columns."
            raise DataError(f"{table} has the columns {', '.join(map(repr, columns)) or 'none'}; {need}")
    file_column, caption_column = chosen
    captions: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        name, caption, where = row.get(file_column), row.get(caption_column), f"row {number} of {table}"
        if not isinstance(name, str) or not (folder / name).is_file():
            raise DataError(f"{where} names the image {name!r}, which does not exist. Check {file_column!r}.")
        if caption is not None and not isinstance(caption, str):
            raise DataError(f"the caption in {where} is of type {type(caption).__name__}; it needs a text.")
        if caption and caption.strip():
            rest = {column: row.get(column) for column in columns if column != file_column}
            captions[Path(name).as_posix()] = rest | {"caption": caption.strip()}
    if not captions:
        raise DataError(f"{table} holds no caption; it needs a text in the column {caption_column!r}.")
    return captions
