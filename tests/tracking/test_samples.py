"""Rows with pictures become a sheet and lines that say where on it each is; nothing that is no
picture stops a run."""

from __future__ import annotations

import json
import logging
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from gruppo.core.images import to_uint8
from gruppo.loading import install_command
from gruppo.tracking import samples
from gruppo.tracking.samples import MAX_IMAGES, SamplesFile, sheet_name


def picture(seed, channels=1, side=28):
    return torch.rand(channels, side, side, generator=torch.Generator().manual_seed(seed))


def row(prompt, seed, reward=0.5, **more):
    return {"prompt": prompt, "completion": picture(seed), "reward": reward, "target": None, **more}


def lines_of(run_dir):
    text = (run_dir / "samples.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def levels_at(run_dir, place):
    """The levels [H, W, C] of a small picture as its sheet has them, one for each square."""
    with Image.open(run_dir / place["file"]) as sheet:
        crop = np.asarray(sheet.crop(tuple(place["box"])))
    return crop[::4, ::4]  # of 28 pixels a side, each a square of 4


@pytest.mark.silent_bug(24)
def test_the_place_of_each_row_holds_its_own_pixels(tmp_path):
    rows = [row(n % 3, seed=n, reward=n / 10) for n in range(9)]
    SamplesFile(tmp_path).log_samples(12, rows)
    written = lines_of(tmp_path)
    assert [line["reward"] for line in written] == [n / 10 for n in range(9)]
    for source, line in zip(rows, written, strict=True):
        assert line["completion"]["file"] == "images/step_000012.png" == sheet_name(12)
        outputs = to_uint8(source["completion"]).permute(1, 2, 0).expand(-1, -1, 3).numpy()
        assert (levels_at(tmp_path, line["completion"]) == outputs).all()


def test_an_image_beside_a_completion_is_drawn_and_the_completion_stays_text(tmp_path):
    rows = [
        row("20 cities", 1, image=Image.new("RGB", (99, 99), colour), held_out=True)
        for colour in ("red", "blue")
    ]
    file = SamplesFile(tmp_path)
    file.log_samples(0, [{**rows[0], "completion": "0 2 1"}])
    file.log_samples(5, [{**rows[1], "completion": "0 2 1"}])
    first, last = lines_of(tmp_path)
    assert first["completion"] == last["completion"] == "0 2 1"
    with Image.open(tmp_path / last["image"]["file"]) as sheet:
        assert sheet.crop(tuple(last["image"]["box"])).getpixel((3, 3)) == (0, 0, 255)


def test_a_shared_input_and_target_are_on_the_sheet_once(tmp_path):
    shared = {"prompt": picture(1), "target": picture(2)}
    SamplesFile(tmp_path).log_samples(1, [row("", n) | shared for n in (3, 4)])
    first, second = lines_of(tmp_path)
    assert first["prompt"] == second["prompt"] and first["target"] == second["target"]
    assert first["completion"] != second["completion"]


def test_a_sheet_has_its_limit_and_no_row_is_lost(tmp_path):
    SamplesFile(tmp_path).log_samples(5, [row("", n) for n in range(MAX_IMAGES + 2)])
    named = [line["completion"] == "float32 [1, 28, 28]" for line in lines_of(tmp_path)]
    assert named == [False] * MAX_IMAGES + [True] * 2


# --- bad input ------------------------------------------------------------------------------------


ODD = [
    torch.rand(4, 8, 8),
    torch.rand(28, 28),
    torch.rand(3, 0, 8),
    torch.zeros(3, 8, 8, dtype=torch.uint8),
    np.zeros((1, 8, 8)),
    torch.rand(2, 3, 8, 8),
]


@pytest.mark.silent_bug(22)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(list(odd.shape)))
def test_arrays_that_are_not_images_are_counted_once_and_their_rows_are_kept(tmp_path, caplog, odd):
    file = SamplesFile(tmp_path)
    with caplog.at_level(logging.WARNING, "gruppo"):
        for step in (1, 2):
            file.log_samples(
                step,
                [row(1, 1), {**row(1, 2), "completion": odd}, {**row(1, 3), "completion": odd}],
            )
    output = [record.getMessage() for record in caplog.records]
    assert len(output) == 1 and "is not an image, which has floats [C, H, W]" in output[0]
    first, second, third = lines_of(tmp_path)[:3]
    assert first["completion"]["box"] and second["completion"] == third["completion"]
    assert (tmp_path / "samples.jsonl").stat().st_size < 1500


def test_a_missing_pillow_is_one_warning_and_rows_are_kept_without_pixels(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setitem(sys.modules, "PIL", None)
    file = SamplesFile(tmp_path)
    with caplog.at_level(logging.WARNING, "gruppo"):
        for step in (1, 2):
            file.log_samples(step, [row(1, 1), row(1, 2, held_out=True)])
    assert [record.getMessage() for record in caplog.records] == [
        f"Images are not saved: Pillow is not installed. Run: {install_command('images')}"
    ]
    assert {line["completion"] for line in lines_of(tmp_path)} == {"float32 [1, 28, 28]"}
    assert not (tmp_path / "images").exists()


def test_a_sheet_that_cannot_be_drawn_costs_a_line_and_no_run(tmp_path, caplog, monkeypatch):
    def fails(*arguments, **options):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(samples, "make_sheet", fails)
    with caplog.at_level(logging.WARNING, "gruppo"):
        SamplesFile(tmp_path).log_samples(3, [row(1, 1)])
    assert "images cannot be drawn: ZeroDivisionError: oops" in caplog.text
    assert lines_of(tmp_path)[0]["completion"] == "float32 [1, 28, 28]"


# --- evaluations, and resumed runs ----------------------------------------------------------------


def evaluation(step, prompts, **more):
    return [
        row(prompt, 100 * step + n, reward=step + n / 10, held_out=True, **more)
        for n, prompt in enumerate(prompts)
    ]


def log(file, steps):
    for step in steps:
        if step % 2 == 0:
            file.log_samples(step, evaluation(step, [0, 1]))
        file.log_samples(step, [row(1, 7 * step + n) for n in range(3)])


@pytest.mark.silent_bug(33)
def test_cut_and_go_on_gives_the_pictures_of_an_uninterrupted_run(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    log(SamplesFile(whole), range(7))
    log(SamplesFile(cut), range(9))
    (cut / "images" / "mine.png").write_bytes(b"somebody's")
    resumed = SamplesFile(cut)
    resumed.cut(3)
    names = {path.name for path in (cut / "images").iterdir()} - {"mine.png"}
    assert names == {
        *(f"step_00000{n}.png" for n in range(4)),
        "eval_000000.png",
        "eval_000002.png",
    }
    log(resumed, range(4, 7))
    (cut / "images" / "mine.png").unlink()
    names = sorted(path.relative_to(whole) for path in whole.rglob("*.*"))
    assert len(names) == 7 + 4 + 1 and names == sorted(
        path.relative_to(cut) for path in cut.rglob("*.*")
    )
    assert all((whole / name).read_bytes() == (cut / name).read_bytes() for name in names)
