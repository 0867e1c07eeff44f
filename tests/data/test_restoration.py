"""Degraded and clean images: aligned crops, a resumable stream, whole images held out, and refusals
that name files."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from gruppo.data.open import open_source
from gruppo.data.restoration import (
    PHOTOGRAPHS,
    Degradation,
    ImagePair,
    image_pairs,
    photographs,
)
from gruppo.data.source import IndexedSource
from gruppo.types import DataError, GruppoError

Image = pytest.importorskip("PIL.Image")


def scene(n: int, height: int = 24, width: int = 20) -> torch.Tensor:
    """Every pixel's place in its levels, and the image's number in the blue of all."""
    rows = torch.arange(height)[:, None].expand(height, width)
    columns = torch.arange(width).expand(height, width)
    return torch.stack([rows, columns, torch.full_like(rows, n)]) / 255


def source(n: int = 10, **options) -> IndexedSource:
    scenes = {f"image {i}": ImagePair(scene(i), scene(i) / 2) for i in range(n)}
    return image_pairs(scenes, **{"seed": 3, "crop": 8} | options)


def folder(root: Path, names, *, size=(20, 24), factor: float = 1.0) -> Path:
    """Files of the scenes; ``size`` as (width, height)."""
    for n, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        levels = (scene(n, size[1], size[0]) * 255 * factor).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(levels).save(path, quality=100)
    return root


def contents(prompts) -> list[tuple]:
    return [(p.id, p.inputs.tolist(), p.target.tolist(), dict(p.meta), p.draw) for p in prompts]


# --- crops ----------------------------------------------------------------------------------------


@pytest.mark.silent_bug(24)
@pytest.mark.silent_bug(39)
def test_both_images_of_a_pair_are_cropped_and_turned_alike_and_keep_their_name():
    prompts = source().take(60)
    for p in prompts:
        assert p.inputs.shape == p.target.shape == (3, 8, 8)
        torch.testing.assert_close(p.inputs, p.target / 2)
        assert (p.target[2] * 255).round().unique().tolist() == [int(p.id.removeprefix("image "))]
        assert p.meta == {"image": p.id}
        rows, columns = ((p.target[c] * 255).round() for c in (0, 1))
        steps = {(int(x[1, 0] - x[0, 0]), int(x[0, 1] - x[0, 0])) for x in (rows, columns)}
        assert len(steps) == 2 and all(sorted(map(abs, step)) == [0, 1] for step in steps)
    corners = [tuple((p.target[:2, 0, 0] * 255).round().int().tolist()) for p in prompts]
    assert len(set(corners)) > 40, "places and turns differ"


def test_without_flips_rows_go_down_and_columns_to_the_right():
    for p in source(flips=False).take(30):
        top, left = (p.target[:2, 0, 0] * 255).round().int().tolist()
        torch.testing.assert_close(p.target[:2], scene(0)[:2, top : top + 8, left : left + 8])


@pytest.mark.silent_bug(26)
def test_strengths_and_noise_depend_on_seed_and_draw():
    scenes = {f"image {i}": ImagePair(scene(i)) for i in range(4)}
    options = {"degradation": Degradation.parse("noise=5-50"), "crop": 8}
    a, b, c = (image_pairs(scenes, seed=seed, **options) for seed in (1, 1, 2))
    assert a.columns == ("target", "image", "noise")
    first = a.take(12)
    assert contents(first) == contents(b.take(5) + b.take(7)) != contents(c.take(12))
    assert len({p.meta["noise"] for p in first}) == 12 and all(
        5 <= p.meta["noise"] <= 50 for p in first
    )
    assert (first[0].inputs != first[0].target).any()


# --- held out -------------------------------------------------------------------------------------


def test_whole_images_are_held_out_and_their_crops_lie_side_by_side_in_turns():
    chosen = source(held_out=("image 3", "image 7"), degradation=Degradation.parse("noise=10-20"))
    trained = {p.id for p in chosen.take(40)}
    held_out = chosen.held_out(100)
    assert trained == {f"image {n}" for n in (0, 1, 2, 4, 5, 6, 8, 9)}
    assert [p.id for p in held_out] == ["image 3", "image 7"] * 6, (
        "3 x 2 crops of 8 pixels in 24 x 20"
    )
    assert [p.draw for p in held_out] == list(range(12))
    corners = {(p.id, *(p.target[:2, 0, 0] * 255).round().int().tolist()) for p in held_out}
    assert corners == {
        (f"image {n}", top, left) for n in (3, 7) for top in (0, 8, 16) for left in (0, 8)
    }
    other = source(
        held_out=("image 3", "image 7"), degradation=Degradation.parse("noise=10-20"), seed=99
    )
    assert contents(other.held_out(5)) == contents(held_out[:5]), "the same in every run"


def test_a_share_of_the_images_is_held_out_by_name_and_none_at_0():
    some = source(20, held_out_fraction=0.3)
    kept = {p.id for p in some.held_out(1000)}
    assert 1 <= len(kept) <= 12 and not kept & {p.id for p in some.take(60)}
    assert source(held_out_fraction=0, held_out=("image 1",)).held_out(5) == []
    assert {p.id for p in source(held_out=("nobody",)).held_out(99)}, (
        "of names that are not there, the share"
    )


def test_whole_images_of_one_size():
    scenes = {n: ImagePair(scene(i, 6, 10), scene(i, 6, 10) / 2) for i, n in enumerate("abcde")}
    lines = image_pairs(scenes, seed=0, crop=0, flips=False, held_out=("c",))
    assert lines.columns == ("target", "image")
    p = lines.held_out(9)
    assert len(p) == 1 and torch.equal(p[0].target, scene(2, 6, 10)) and p[0].meta == {"image": "c"}
    assert lines.take(1)[0].inputs.shape == (3, 6, 10)
    mixed = {**scenes, "f": ImagePair(scene(0, 8, 8))}
    with pytest.raises(DataError, match=r"several sizes; whole images need one. Set crop=64"):
        image_pairs(mixed, seed=0, crop=0, flips=False)


# --- folders --------------------------------------------------------------------------------------


def test_pairs_are_found_by_name_whatever_the_kind_of_file(tmp_path):
    folder(tmp_path / "clean", ["a.png", "deep/b.png", "c.png"])
    folder(tmp_path / "noisy", ["a.png", "deep/b.webp", "c.png"], factor=0.5)
    found = open_source(
        f"pairs:{tmp_path / 'noisy'}:{tmp_path / 'clean'}:crop=8", seed=0, held_out_fraction=0
    )
    prompts = found.take(6)
    assert {p.id for p in prompts} == {"a", "deep/b", "c"}
    for p in prompts:
        if p.id != "deep/b":
            torch.testing.assert_close(p.inputs, p.target / 2, rtol=0, atol=0.51 / 255)


def test_pairs_that_do_not_match_are_refused_with_their_names(tmp_path):
    folder(tmp_path / "clean", ["a.png", "b.png", "c.png"])
    folder(tmp_path / "noisy", ["a.png", "x.png"])
    with pytest.raises(DataError, match=r"3 images are unpaired: b, c, x \(b is in .*clean alone"):
        open_source(f"pairs:{tmp_path / 'noisy'}:{tmp_path / 'clean'}:crop=8", seed=0)
    folder(tmp_path / "small", ["a.png", "b.png", "c.png"], size=(10, 12))
    with pytest.raises(
        DataError, match=r"the images a of .* are a pair of 12 x 10 and 24 x 20 pixels"
    ):
        open_source(f"pairs:{tmp_path / 'small'}:{tmp_path / 'clean'}:crop=8", seed=0)
    folder(tmp_path / "twice", ["a.png", "a.webp"])
    with pytest.raises(DataError, match=r"holds both a.png and a.webp"):
        open_source(f"pairs:{tmp_path / 'twice'}:{tmp_path / 'clean'}", seed=0)


def test_a_folder_is_degraded_on_the_fly_and_files_that_are_no_images_are_named(tmp_path, caplog):
    folder(tmp_path, ["a.png", "b.png", "c.png"])
    (tmp_path / "broken.png").write_bytes(b"no image")
    whole = (tmp_path / "c.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING, "gruppo"):
        found = open_source(f"degrade:{tmp_path}:dark=0.5,crop=8", seed=0, held_out_fraction=0)
        prompts = found.take(12)
    assert {p.id for p in prompts} == {"a.png", "b.png", "c.png"}
    assert set(found.unreadable) == {"broken.png", "cut.png"} and "broken.png" in caplog.text
    assert [p.draw for p in prompts] != list(range(12)), "with a gap where an image was cut short"
    p = prompts[0]
    torch.testing.assert_close(p.inputs, p.target / 2, rtol=0, atol=0.51 / 255)


def test_a_folder_without_a_whole_image_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no folder"):
        open_source(f"degrade:{tmp_path / 'none'}:dark=0.5", seed=0)
    with pytest.raises(DataError, match="holds no image; it needs"):
        open_source(f"degrade:{tmp_path}:dark=0.5", seed=0)
    (tmp_path / "x.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="holds no image that can be read"):
        open_source(f"degrade:{tmp_path}:dark=0.5", seed=0)
    folder(tmp_path, ["x.png"])
    whole = (tmp_path / "x.png").read_bytes()
    (tmp_path / "x.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError, match=r"2 draws of .* in a row gave no prompt. the image .*x\.png"
    ):
        open_source(f"degrade:{tmp_path}:dark=0.5,crop=8", seed=0).take(1)


@pytest.mark.parametrize(
    ("scenes", "options", "why"),
    [
        (
            {"a": ImagePair(scene(0))},
            {"crop": 21},
            r"1 of 1 images .* smaller than the crop of 21 pixels, such as a. Set crop=20",
        ),
        ({"a": ImagePair(scene(0), scene(0)[:, 1:])}, {}, "a pair of 23 x 20 and 24 x 20"),
        ({"a": ImagePair(scene(0))}, {"channels": 2}, "channels=2 and crop=8: channels is 1"),
        ({"a": ImagePair(scene(0))}, {"crop": -1}, "crop=-1"),
        ({}, {}, "holds no image"),
    ],
    ids=["small", "pair", "channels", "crop", "none"],
)
def test_bad_images_are_refused_in_one_line(scenes, options, why):
    with pytest.raises(GruppoError, match=why) as caught:
        image_pairs(scenes, **{"seed": 0, "crop": 8} | options)
    assert "\n" not in str(caught.value)


def test_a_photograph_turned_by_its_entry_has_the_size_that_is_read(tmp_path):
    picture = Image.fromarray(np.zeros((24, 40, 3), dtype=np.uint8))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / "x.jpg", exif=exif)
    found = open_source(f"degrade:{tmp_path}:dark=0.5,crop=24", seed=0, held_out_fraction=0)
    assert found.take(1)[0].target.shape == (3, 24, 24)
    with pytest.raises(DataError, match=r"Set crop=24"):
        open_source(f"degrade:{tmp_path}:dark=0.5,crop=30", seed=0)


# --- photographs ----------------------------------------------------------------------------------


def test_the_photographs_are_real_files_of_installed_packages(monkeypatch, caplog):
    pytest.importorskip("skimage")
    found = photographs()
    assert {"astronaut", "chelsea", "coffee", "rocket"} <= found.keys()
    assert all(path.is_file() for path in found.values()) and len(PHOTOGRAPHS) == 11
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GruppoError, match=r"none of them is installed; run: .*pip install"):
        photographs()


# --- by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("photos", "all else needs a degradation; write one of photos:noise=25"),
        ("photos:x:noise=25", "cannot read data=.*; write one of"),
        ("degrade:noise=25", "cannot read data="),
        ("pairs:a", "cannot read data="),
        ("pairs:a:b:noise=3", "pairs are degraded already"),
        ("photos:noise=25,crop=x", "cannot read crop='x'"),
        ("photos:noise=25,flips=maybe", "cannot read flips='maybe'"),
        ("photos:noisy=25", "Did you mean noise"),
    ],
)
def test_a_name_that_is_not_understood_is_refused(data, why):
    with pytest.raises(DataError, match=why):
        open_source(data, seed=0)
