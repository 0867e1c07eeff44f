"""Folders of images: what is read of a file, captions and classes, and files that are none."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from gruppo.data.images import image_folder, image_prompts, read_image
from gruppo.data.open import open_source
from gruppo.types import DataError

Image = pytest.importorskip("PIL.Image")


def save(path: Path, level: int = 128, *, size: tuple[int, int] = (6, 4), mode: str = "L") -> Path:
    """An image of one grey, ``size`` as (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level,) * len(mode)).save(path)
    return path


def captioned(folder: Path, n: int = 20) -> Path:
    for i in range(n):
        save(folder / f"{i:02}.png", 10 * i)
        (folder / f"{i:02}.txt").write_text(f"grey of level {10 * i}\n")
    return folder


# --- one file -------------------------------------------------------------------------------------


@pytest.mark.silent_bug(38)
def test_pixels_are_the_files_levels_over_255_in_channels_rows_and_columns(tmp_path):
    levels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14
    Image.fromarray(levels).save(tmp_path / "x.png")
    image = read_image(tmp_path / "x.png")
    assert image.shape == (3, 2, 3) and image.dtype == torch.float32
    assert (image * 255).round().tolist() == levels.transpose(2, 0, 1).tolist()


def test_grey_and_colour_are_converted_into_each_other(tmp_path):
    Image.new("RGB", (2, 2), (200, 100, 50)).save(tmp_path / "c.png")
    luma = round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)
    assert (read_image(tmp_path / "c.png", channels=1) * 255).round().unique().tolist() == [luma]
    assert read_image(save(tmp_path / "g.png", 51)).tolist() == torch.full((3, 4, 6), 0.2).tolist()


def test_what_is_transparent_is_white(tmp_path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("LA", (2, 2), (0, 51)).save(tmp_path / "faint.png")
    assert read_image(tmp_path / "clear.png").unique().tolist() == [1.0]
    assert read_image(tmp_path / "faint.png", channels=1).unique().tolist() == pytest.approx([0.8])


def test_16_bits_of_grey_are_rounded_to_8_and_not_clipped(tmp_path):
    levels = np.array([[0, 257, 30_000, 65_535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    image = read_image(tmp_path / "deep.png", channels=1)
    assert (image * 255).round().flatten().tolist() == [0, 1, round(30_000 / 257), 255]


def test_a_photograph_is_turned_upright(tmp_path):
    picture = Image.new("RGB", (6, 4))
    exif = picture.getexif()
    exif[0x0112] = 6  # orientation: turned a quarter
    picture.save(tmp_path / "x.jpg", exif=exif)
    assert read_image(tmp_path / "x.jpg").shape == (3, 6, 4)


def test_a_size_crops_the_middle(tmp_path):
    levels = np.zeros((4, 12), dtype=np.uint8)
    levels[:, 4:8] = 255  # the middle third
    Image.fromarray(levels).save(tmp_path / "x.png")
    cropped = read_image(tmp_path / "x.png", channels=1, size=4)
    assert cropped.unique().tolist() == [1.0] and cropped.shape == (1, 4, 4)


@pytest.mark.parametrize("kind", ["png", "jpg", "webp"])
def test_an_image_cut_short_or_of_other_bytes_is_one_line(tmp_path, kind):
    whole = tmp_path / f"x.{kind}"
    picture = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(picture).save(whole)
    for name, content in {
        "cut": whole.read_bytes()[:500],
        "empty": b"",
        "text": b"<html>not found</html>",
    }.items():
        bad = tmp_path / f"{name}.{kind}"
        bad.write_bytes(content)
        with pytest.raises(DataError, match=f"the image .*{name}.{kind} cannot be read") as caught:
            read_image(bad)
        assert "\n" not in str(caught.value)


# --- captions and classes -------------------------------------------------------------------------


@pytest.mark.silent_bug(24)
def test_captions_beside_the_images_stay_with_them_through_the_shuffle(tmp_path):
    source = image_folder(captioned(tmp_path), seed=1)
    for p in source.take(60):
        level = int(p.inputs.removeprefix("grey of level "))
        assert (p.id, p.meta["caption"]) == (f"{level // 10:02}.png", p.inputs)
        assert (p.target * 255).round().unique().tolist() == [level]
    assert source.columns == ("target", "file", "caption")


@pytest.mark.parametrize("table", ["captions.jsonl", "metadata.jsonl"])
def test_a_table_names_files_captions_and_further_columns(tmp_path, table):
    for name in ("a.png", "deep/b.webp", "deep/c.JPG"):
        save(tmp_path / name)
    rows = [
        {"file_name": "deep/b.webp", "text": " two, or \n more ", "level": "4"},
        {"file_name": "a.png", "text": "one"},
    ]
    (tmp_path / table).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {file: (p.inputs, p.id, p.meta["level"]) for file, p in image_prompts(tmp_path).items()}
    assert found == {
        "a.png": ("one", "a.png", None),
        "deep/b.webp": ("two, or \n more", "deep/b.webp", "4"),
    }


def test_an_image_without_a_caption_among_others_is_left_out_with_a_line(tmp_path, caplog):
    save(captioned(tmp_path, 3) / "x.png")
    with caplog.at_level(logging.WARNING, "gruppo"):
        assert list(image_prompts(tmp_path)) == ["00.png", "01.png", "02.png"]
    assert "1 of 4 images" in caplog.text and "x.png first" in caplog.text


def test_folders_are_classes_where_there_are_no_captions_and_alone_none(tmp_path):
    for name in ("dog/1.png", "cat/1.png", "cat/2.png"):
        save(tmp_path / "two" / name)
        save(tmp_path / "one" / Path(name).name)
    prompts = image_prompts(tmp_path / "two").values()
    found = [(p.meta["file"], p.inputs, p.id, p.meta["class"], p.meta["label"]) for p in prompts]
    assert found == [
        ("cat/1.png", 0, "cat", "cat", 0),
        ("cat/2.png", 0, "cat", "cat", 0),
        ("dog/1.png", 1, "dog", "dog", 1),
    ]
    assert [(p.inputs, p.id) for p in image_prompts(tmp_path / "one").values()] == [
        ("", "1.png"),
        ("", "2.png"),
    ]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            [{"file_name": "no.png", "caption": "x"}],
            r"row 1 of .* names the image 'no.png', which does not exist",
        ),
        (
            [{"file_name": "a.png", "title": "x"}],
            r"columns 'file_name', 'title'; it needs .* and one of caption",
        ),
        ([{"name": "a.png", "caption": "x"}], r"it needs file_name"),
        ([{"file_name": "a.png", "caption": 4}], r"caption in row 1 .* type int"),
        ([{"file_name": "a.png", "caption": "  "}], "holds no caption"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path, rows, reason):
    save(tmp_path / "a.png")
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=reason):
        image_prompts(tmp_path)


def test_captions_in_a_csv_file_are_refused_and_not_taken_for_none(tmp_path):
    save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,one\n")
    with pytest.raises(DataError, match=r"metadata\.csv is not read.*metadata\.jsonl"):
        image_folder(tmp_path, seed=0)


def test_a_folder_that_is_not_there_or_empty_is_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"no folder .*photo. Did you mean photos"):
        image_folder(tmp_path / "photo", seed=0)
    with pytest.raises(DataError, match=r"holds no image; it needs \.png"):
        image_folder(tmp_path / "photos", seed=0)


# --- the stream -----------------------------------------------------------------------------------


def test_a_file_that_cannot_be_read_is_left_out_with_one_line_and_counted(tmp_path, caplog):
    captioned(tmp_path)
    (tmp_path / "07.png").write_bytes(b"broken")
    source = image_folder(tmp_path, seed=3, held_out_fraction=0)
    with caplog.at_level(logging.WARNING, "gruppo"):
        sampled = source.take(57)
    assert [p.id for p in sampled].count("08.png") == 3
    assert list(source.unreadable) == ["07.png"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "left out: the image" in line and "07.png cannot be read" in line and "1 so far" in line


def test_equal_captions_fall_on_one_side_and_held_out_ones_are_never_drawn(tmp_path):
    for i in range(60):
        save(tmp_path / f"{i:02}.png", i)
        (tmp_path / f"{i:02}.txt").write_text(f"caption {i // 2}")
    source = image_folder(tmp_path, seed=1, held_out_fraction=0.3)
    held = [p.inputs for p in source.held_out(100)]
    assert len(held) > 8 and all(held.count(caption) == 2 for caption in held)
    assert not {p.inputs for p in source.take(200)} & set(held)
    assert [
        p.inputs for p in image_folder(tmp_path, seed=2, held_out_fraction=0.3).held_out(100)
    ] == held


def test_a_folder_of_images_is_named_with_a_size_or_without(tmp_path):
    captioned(tmp_path)
    assert open_source(f"images:{tmp_path}", seed=0).take(1)[0].target.shape == (3, 4, 6)
    assert open_source(f"images:{tmp_path}:8", seed=0).take(1)[0].target.shape == (3, 8, 8)
