"""Rows with pictures become a sheet and lines that say where on it each is; nothing that is no picture stops a run."""

from __future__ import annotations

import json
import logging
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from gruppo.core.images import to_uint8
from gruppo.loading import install_command
from gruppo.tracking import samples
from gruppo.tracking.samples import MAX_ROWS, MAX_SAMPLES, SamplesFile, sheet_name
from gruppo.types import GruppoError


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


def places(rows):
    return [(row["completion"]["line"], row["completion"]["column"]) for row in rows]


@pytest.mark.silent_bug(24)
def test_the_place_of_each_row_holds_its_own_pixels(tmp_path):
    rows = [row(n % 3, seed=n, reward=n / 10) for n in range(9)]
    SamplesFile(tmp_path).log_samples(12, rows)
    written = lines_of(tmp_path)
    assert [line["reward"] for line in written] == [n / 10 for n in range(9)]
    assert places(written) == [(n % 3 + 1, n // 3 + 1) for n in range(9)]
    for source, line in zip(rows, written, strict=True):
        assert line["completion"]["file"] == "images/step_000012.png" == sheet_name(12)
        outputs = to_uint8(source["completion"]).permute(1, 2, 0).expand(-1, -1, 3).numpy()
        assert (levels_at(tmp_path, line["completion"]) == outputs).all()


def test_a_group_is_a_line_and_what_could_not_be_scored_comes_last(tmp_path):
    failed = row(3, 0, math.nan, failures=[{"kind": "exception"}])
    rows = [failed, *(row(3, n, group=n // 2) for n in range(4)), row(7, 9)]
    SamplesFile(tmp_path).log_samples(1, rows)
    assert places(lines_of(tmp_path)) == [(4, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]


def test_an_evaluation_has_a_line_for_each_prompt_also_where_each_is_a_group(tmp_path):
    SamplesFile(tmp_path).log_samples(1, [row(n % 2, n, group=n, held_out=True) for n in range(4)])
    assert places(lines_of(tmp_path)) == [(1, 1), (2, 1), (1, 2), (2, 2)]


def test_without_scores_a_sheet_does_not_mention_rewards(tmp_path, monkeypatch):
    sampled = []

    def draw(lines, title, draw=samples.draw):
        sampled.append((title, [cell.caption for line in lines for cell in line.cells]))
        return draw(lines, title=title)

    monkeypatch.setattr(samples, "draw", draw)
    SamplesFile(tmp_path).log_samples(1, [row(1, 1, math.nan), row(1, 2, math.nan)])
    SamplesFile(tmp_path).log_samples(
        2, [row(1, 1, math.nan), row(1, 2, None), row(1, 3, -math.inf)]
    )
    assert sampled == [
        ("samples of step 1", ["", ""]),
        ("samples of step 2, with rewards", ["not scored", "not scored", "-inf"]),
    ]


def test_single_pictures_of_many_prompts_stand_beside_each_other(tmp_path):
    SamplesFile(tmp_path).log_samples(1, [row(f"caption {n}", n) for n in range(11)])
    assert places(lines_of(tmp_path)) == [(n // 8 + 1, n % 8 + 1) for n in range(11)]


@pytest.mark.silent_bug(24)
def test_inputs_and_targets_stand_at_both_ends_of_their_samples(tmp_path):
    source, expected = [picture(n, 3) for n in (1, 2)], [picture(n, 3) for n in (3, 4)]
    rows = [row(source[n], 10 + k, target=expected[n]) for n in (0, 1) for k in range(3)]
    SamplesFile(tmp_path).log_samples(1, rows)
    for k, line in enumerate(lines_of(tmp_path)):
        of_line = [
            (line[name]["line"], line[name]["column"])
            for name in ("prompt", "completion", "target")
        ]
        assert of_line == [(k // 3 + 1, 1), (k // 3 + 1, k % 3 + 2), (k // 3 + 1, 5)]
        for name, image in (("prompt", source[k // 3]), ("target", expected[k // 3])):
            assert (
                levels_at(tmp_path, line[name]) == to_uint8(image).permute(1, 2, 0).numpy()
            ).all()


def test_a_target_of_a_class_is_another_picture_of_it_and_is_not_drawn(tmp_path):
    SamplesFile(tmp_path).log_samples(
        1, [row(3, 1, target=picture(2)), row(3, 4, target=picture(2))]
    )
    assert {line["target"] for line in lines_of(tmp_path)} == {"float32 [1, 28, 28]"}


def test_a_sheet_has_its_limits_and_no_row_is_lost(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(
        samples,
        "draw",
        lambda lines, title, draw=samples.draw: titles.append(title) or draw(lines, title=title),
    )
    rows = [row(prompt, 1) for prompt in range(MAX_ROWS + 2) for _ in range(2)]
    SamplesFile(tmp_path).log_samples(5, [*rows, *(row(0, 2) for _ in range(MAX_SAMPLES))])
    written = lines_of(tmp_path)
    assert len(written) == len(rows) + MAX_SAMPLES
    is_left_out = [line["completion"] == "float32 [1, 28, 28]" for line in written]
    assert (
        is_left_out
        == [False] * (2 * MAX_ROWS) + [True] * 4 + [False] * (MAX_SAMPLES - 2) + [True] * 2
    )
    assert titles == ["samples of step 5, with rewards (32 of 38 images)"]


def test_texts_leave_no_sheet(tmp_path):
    rows = [{"prompt": "2 + 2", "completion": "4", "reward": 1.0}]
    SamplesFile(tmp_path).log_samples(1, rows)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_an_image_beside_a_completion_is_drawn_and_the_completion_stays_text(tmp_path):
    from matplotlib.figure import Figure

    figures = [Figure(figsize=(1, 1), facecolor=colour) for colour in ("red", "blue")]
    rows = [
        row("20 cities", 1, completion=[0, 2, 1], image=figure, held_out=True) for figure in figures
    ]
    file = SamplesFile(tmp_path)
    file.log_samples(0, [{**rows[0], "completion": "0 2 1"}])
    file.log_samples(5, [{**rows[1], "completion": "0 2 1"}])
    first, last = lines_of(tmp_path)
    assert first["completion"] == last["completion"] == "0 2 1"
    with Image.open(tmp_path / last["image"]["file"]) as sheet:
        assert sheet.crop(tuple(last["image"]["box"])).getpixel((3, 3)) == (0, 0, 255)
    assert (tmp_path / "images" / "before_after.png").exists()


# --- bad input --------------------------------------------------------------------------------------------------------


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
    assert len(output) == 1 and output[0].startswith("2 of 3 samples of step 1 are not drawn: ")
    first, second, third = lines_of(tmp_path)[:3]
    assert first["completion"]["column"] == 1 and second["completion"] == third["completion"]
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

    monkeypatch.setattr(samples, "draw", fails)
    with caplog.at_level(logging.WARNING, "gruppo"):
        SamplesFile(tmp_path).log_samples(3, [row(1, 1)])
    assert "images of step 3 cannot be drawn: ZeroDivisionError: oops" in caplog.text
    assert lines_of(tmp_path)[0]["completion"] == "float32 [1, 28, 28]"


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "images").write_text("a file, not a folder")
    with pytest.raises(GruppoError, match=r"step_000001.png could not be written: .*permissions"):
        SamplesFile(tmp_path).log_samples(1, [row(1, 1)])


# --- evaluations, and resumed runs ------------------------------------------------------------------------------------


def evaluation(step, prompts, **more):
    return [
        row(prompt, 100 * step + n, reward=step + n / 10, held_out=True, **more)
        for n, prompt in enumerate(prompts)
    ]


def compared(run_dir, monkeypatch, file, step, rows):
    """The lines of the sheet that is drawn of before and after, when the rows of an evaluation are logged."""
    sampled = []

    def draw(lines, draw=samples.draw, **options):
        sampled.append((lines, options))
        return draw(lines, **options)

    monkeypatch.setattr(samples, "draw", draw)
    file.log_samples(step, rows)
    monkeypatch.undo()
    assert (run_dir / "images" / "before_after.png").exists()
    return sampled[-1]


def seen(cell):
    return None if cell is None else (np.asarray(cell.image)[::4, ::4, 0].tolist(), cell.caption)


def expected(source):
    return (to_uint8(source["completion"])[0].tolist(), samples.number(source["reward"]))


@pytest.mark.silent_bug(24)
def test_before_and_after_are_the_same_prompts_at_the_first_and_the_last_evaluation(
    tmp_path, monkeypatch
):
    file, prompts = SamplesFile(tmp_path), [0, 1, 2, 0, 1, 0]
    first, last = evaluation(0, prompts), evaluation(9, [1, 0, 2, 0, 1, 0])
    file.log_samples(0, first)
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["eval_000000.png"]
    file.log_samples(4, evaluation(4, prompts))
    lines, options = compared(tmp_path, monkeypatch, file, 9, last)
    assert options["heads"] == {0: "before: step 0", 3: "after: step 9"}
    assert [line.label for line in lines] == ["0", "1", "2"]
    of_zero = [first[n] for n in (0, 3, 5)], [last[n] for n in (1, 3, 5)]
    assert list(map(seen, lines[0].cells)) == [
        expected(source) for side in of_zero for source in side
    ]
    assert list(map(seen, lines[2].cells)) == [
        expected(first[2]),
        None,
        None,
        expected(last[2]),
        None,
        None,
    ]


@pytest.mark.silent_bug(24)
def test_degraded_pictures_are_paired_by_their_pixels(tmp_path, monkeypatch):
    file, source = SamplesFile(tmp_path), [picture(n) for n in (1, 2)]
    first = evaluation(0, source, target=picture(5))
    file.log_samples(0, first)
    last = evaluation(1, source[::-1], target=picture(5))
    lines, options = compared(tmp_path, monkeypatch, file, 1, last)
    assert options["heads"] == {0: "input", 1: "before: step 0", 2: "after: step 1", 3: "target"}
    for n, line in enumerate(lines):
        ends = [to_uint8(image)[0].tolist() for image in (source[n], picture(5))]
        middle = [expected(first[n])[0], expected(last[1 - n])[0]]
        assert [np.asarray(c.image)[::4, ::4, 0].tolist() for c in line.cells] == [
            ends[0],
            *middle,
            ends[1],
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
    names = {path.name for path in (cut / "images").iterdir()} - {"mine.png", "before_after.png"}
    assert names == {
        *(f"step_00000{n}.png" for n in range(4)),
        "eval_000000.png",
        "eval_000002.png",
    }
    log(resumed, range(4, 7))
    (cut / "images" / "mine.png").unlink()
    names = sorted(path.relative_to(whole) for path in whole.rglob("*.*"))
    assert len(names) == 7 + 4 + 2 and names == sorted(
        path.relative_to(cut) for path in cut.rglob("*.*")
    )
    assert all((whole / name).read_bytes() == (cut / name).read_bytes() for name in names)


def test_a_run_cut_to_one_evaluation_has_nothing_to_compare(tmp_path):
    log(SamplesFile(tmp_path), range(3))
    file = SamplesFile(tmp_path)
    file.cut(1)
    assert not (tmp_path / "images" / "before_after.png").exists()
    file.cut(-1)
    assert list((tmp_path / "images").iterdir()) == [] and lines_of(tmp_path) == []


def test_a_sheet_that_somebody_deleted_costs_the_comparison_alone(tmp_path, caplog):
    file = SamplesFile(tmp_path)
    file.log_samples(0, evaluation(0, [1]))
    (tmp_path / "images" / "eval_000000.png").unlink()
    with caplog.at_level(logging.WARNING, "gruppo"):
        file.log_samples(2, evaluation(2, [1]))
    assert (
        "before_after.png cannot be drawn: FileNotFoundError" in caplog.text
        and len(lines_of(tmp_path)) == 2
    )
