"""Image files as tensors [C, H, W] in [0, 1], and a folder of them as prompts with captions or
classes."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gruppo.core.images import from_pillow
from gruppo.data.rows import read_jsonl
from gruppo.data.source import IndexedSource, digest_of, leave_out, split_by_hash
from gruppo.loading import did_you_mean, import_extra
from gruppo.types import DataError, Prompt

log = logging.getLogger("gruppo")

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
EXIF_ORIENTATION = 0x0112
TABLES = ("captions.jsonl", "metadata.jsonl")
CAPTION_COLUMNS = ("caption", "text", "prompt")


def image_folder(
    folder: str | Path, *, seed: int, size: int | None = None, held_out_fraction: float = 0.1
) -> IndexedSource:
    """Stream of the png, jpg and webp files of a folder and its subfolders; ``target`` is the
    image.

    Captions, if there are any, are the prompts: from ``captions.jsonl`` or ``metadata.jsonl`` in
    the folder (a column ``file_name``, another ``caption`` or ``text``; further columns go to
    ``meta``), or from a .txt file next to each image; an image without one is left out, with a
    warning. Without captions the subfolders are the classes, and a prompt is the number
    of a class, ``label``; without subfolders it is an empty string.

    The held-out split goes by the captions, or by the files if there are none. Images are read when
    they are drawn (see ``read_image``). A file that is not a whole image is left out with a
    warning, and listed in ``unreadable``.
    """
    root, name = Path(folder).expanduser(), str(folder)
    unreadable: dict[str, str] = {}
    prompts = image_prompts(root)
    files = list(prompts)

    def prompt_at(index: int, draw: int) -> Prompt | None:
        file = files[index]
        try:
            image = read_image(root / file, size=size)
        except DataError as problem:
            leave_out(unreadable, file, str(problem))
            return None
        return replace(prompts[file], target=image, meta=dict(prompts[file].meta), draw=draw)

    keys = [str(prompts[f].inputs) if "caption" in prompts[f].meta else f for f in files]
    train, held_out = split_by_hash(keys, held_out_fraction, name)
    # sizes instead of contents: reading every image would take minutes
    facts = [[f, (root / f).stat().st_size, prompts[f].inputs, prompts[f].meta] for f in files]
    columns = ("target", *dict.fromkeys(name for p in prompts.values() for name in p.meta))
    digest = digest_of([facts, size, held_out])
    source = IndexedSource(name, seed, train, held_out, prompt_at, columns, digest)
    source.unreadable = unreadable
    classes = {(p.inputs, p.id) for p in prompts.values() if isinstance(p.inputs, int)}
    source.classes = [name for _, name in sorted(classes)]
    return source


def image_prompts(folder: Path) -> dict[str, Prompt]:
    """File to prompt, without its target, of every image of a folder, sorted by name."""
    files = list_images(folder)
    rows = _captions(folder, files)
    if rows:
        missing = [file for file in files if file not in rows]
        if missing:
            counts = len(missing), len(files), folder, missing[0]
            log.warning("left out: %d of %d images of %s have no caption, %s first.", *counts)
        return {
            file: Prompt(file, rows[file]["caption"], meta={"file": file} | rows[file])
            for file in files
            if file in rows
        }
    names = sorted({file.rpartition("/")[0] for file in files})
    prompts = {}
    for file in files:
        name, meta = file.rpartition("/")[0], dict[str, Any](file=file)
        label = names.index(name)
        prompts[file] = Prompt(file, "", meta=meta)
        if len(names) > 1:
            meta |= {"label": label, "class": name}
            prompts[file] = Prompt(name or ".", label, meta=meta)
    return prompts


def _captions(folder: Path, files: list[str]) -> dict[str, dict[str, Any]]:
    """By file: the caption under that name, and every further column; of a table, or else of text
    files."""
    for name in TABLES:
        if (folder / name).is_file():
            return _read_table(folder / name)
    if (folder / "metadata.csv").is_file():  # as Hugging Face's image folders may have
        raise DataError(f"""{folder}/metadata.csv is not read; its images would have no captions.
            Write its rows to metadata.jsonl, one JSON object a line.""")
    rows = {}
    for file in files:
        path = (folder / file).with_suffix(".txt")
        if not path.is_file():
            continue
        try:
            caption = path.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError:
            raise DataError(f"the caption {path} is not UTF-8; save the file as UTF-8.") from None
        if caption:
            rows[file] = {"caption": caption}
    return rows


def _read_table(table: Path) -> dict[str, dict[str, Any]]:
    """By file: the caption under that name, and every further column."""
    rows = read_jsonl(table)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    caption_column = next((name for name in CAPTION_COLUMNS if name in columns), None)
    if "file_name" not in columns or caption_column is None:
        raise DataError(f"""{table} has the columns {", ".join(map(repr, columns)) or "none"}; it
            needs file_name, and one of {", ".join(CAPTION_COLUMNS)}. Rename its columns.""")
    captions: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        file, caption = row.get("file_name"), row.get(caption_column) or ""
        if not isinstance(file, str) or not (table.parent / file).is_file():
            raise DataError(
                f"row {number} of {table} names the image {file!r}, which does not exist."
            )
        if not isinstance(caption, str):
            raise DataError(f"""the caption in row {number} of {table} is of type
                {type(caption).__name__}; it needs a string.""")
        if caption.strip():
            rest = {column: row.get(column) for column in columns if column != "file_name"}
            captions[Path(file).as_posix()] = rest | {"caption": caption.strip()}
    if not captions:
        raise DataError(f"{table} holds no caption in the column {caption_column!r}.")
    return captions


# --- files ----------------------------------------------------------------------------------------


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    """The image opened by Pillow; any failure within is one DataError."""
    pillow = import_extra("PIL.Image", "images", f"reading {path}")
    try:
        with pillow.open(path) as image:
            yield image
    except Exception as problem:  # Pillow raises OSError, SyntaxError, ValueError, struct.error
        reason = " ".join(str(problem).replace(str(path), "the file").split())
        raise DataError(
            f"the image {path} cannot be read ({type(problem).__name__}: {reason})."
        ) from problem


def read_image(
    path: str | Path, *, channels: int = 3, size: int | None = None
) -> Float[Tensor, "C H W"]:
    """The image, upright according to its EXIF entry, in gray (1 channel) or color (3), transparent
    parts on white.

    ``size``: side of a square to resize to, which keeps the proportions and cuts both sides. 16-bit
    gray is rounded to 8 bits. Raises DataError for a file that is not a whole image.
    """
    with _opened(path) as file:
        from PIL import Image, ImageOps

        file.load()
        image = ImageOps.exif_transpose(file)
        if image.mode.startswith("I"):  # 16-bit gray, which convert() would clip at 255
            levels = np.asarray(image).clip(0, 65535) / 257
            image = Image.fromarray(levels.round().astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("L" if channels == 1 else "RGB")
        if size is not None and image.size != (size, size):
            image = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    return from_pillow(image)


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of a file, upright, from its header alone."""
    with _opened(path) as file:
        width, height = file.size
        # Pillow decodes all of a PNG to look for an EXIF entry
        has_exif = file.format != "PNG" or "exif" in file.info
        is_turned = has_exif and file.getexif().get(EXIF_ORIENTATION, 1) >= 5
    return (width, height) if is_turned else (height, width)


def list_images(folder: Path) -> list[str]:
    """Paths of all images below a folder, relative to it, sorted."""
    if not folder.is_dir():
        siblings = [other.name for other in folder.parent.glob("*/")]
        raise DataError(f"there is no folder {folder}.{did_you_mean(folder.name, siblings)}")
    files = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]
    if not files:
        raise DataError(f"""{folder} holds no image; it needs {", ".join(SUFFIXES)} files, there or
            in its subfolders.""")
    return sorted(files)


def package_file(package: str, file: str) -> Path | None:
    """A file of an installed package, which is not imported; None without the package or the
    file."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (Path(folder) / file).is_file():
                return Path(folder) / file
    return None
