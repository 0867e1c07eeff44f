"""The small classifier: it learns, the same from the same seed, and is loaded whole or not at
all."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gruppo.rewards.image_classifiers import (
    ImageClassifier,
    classifier,
    random_shift,
    train_classifier,
)
from gruppo.types import DataError


def bars(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Class 0 a lying bar, class 1 a standing one, each somewhere on 12 x 12 pixels, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    images = 0.3 * torch.rand(count, 1, 12, 12, generator=generator)
    for image, label, place in zip(
        images, labels, torch.randint(2, 10, (count,), generator=generator), strict=True
    ):
        (image[0] if label == 0 else image[0].T)[place, 2:10] = 1
    return images, labels


@cache
def trained(seed: int = 0, epochs: int = 10) -> ImageClassifier:
    torch.manual_seed(seed)
    reader = ImageClassifier(classes=2, width=4)
    train_classifier(reader, *bars(200), seed=seed, epochs=epochs, lr=1e-2, batch=20)
    return reader


def test_it_learns_bars_that_it_has_not_seen_and_pays_for_them():
    reader = trained()
    images, labels = bars(100, seed=1)
    pays = classifier(reader)(images=list(images), label=labels.tolist())
    assert sum(nats > math.log(0.5) for nats in pays) >= 98 and not reader.training
    assert sum(math.exp(nats) for nats in pays) / 100 > 0.9


@pytest.mark.silent_bug(34)
def test_the_seed_decides_the_weights():
    first, again, other = (trained.__wrapped__(seed, 1).head.weight for seed in (0, 0, 1))
    assert first.equal(again) and not first.equal(other)


def test_a_saved_reader_gives_the_same_logits_and_one_of_another_size_is_refused(tmp_path):
    reader, (images, _) = trained(), bars(5)
    save_file(reader.state_dict(), tmp_path / "reader.safetensors")
    assert (
        ImageClassifier(classes=2, width=4)
        .load(tmp_path / "reader.safetensors")(images)
        .equal(reader(images))
    )
    with pytest.raises(DataError, match=r"is not a saved classifier.*Remove it to train a new one"):
        ImageClassifier(classes=3, width=4).load(tmp_path / "reader.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(DataError, match="is not a saved classifier"):
        ImageClassifier(classes=2, width=4).load(tmp_path / "damaged.safetensors")


def test_images_are_shifted_whole_by_up_to_the_pixels_said_each_by_itself():
    image = torch.zeros(1, 2, 7, 9)
    image[0, 0, 3, 4], image[0, 1, 2, 4] = 1.0, 0.5
    moved = random_shift(image.repeat(300, 1, 1, 1), torch.Generator().manual_seed(0), pixels=2)
    rows, columns = moved[:, 0].flatten(1).argmax(1) // 9, moved[:, 0].flatten(1).argmax(1) % 9
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == {
        (r, c) for r in range(1, 6) for c in range(2, 7)
    }
    assert (moved[:, 0].flatten(1).sum(1) == 1).all()
    assert (
        moved[torch.arange(300), 1, rows - 1, columns].eq(0.5).all()
    )  # the channels stay together
    edge = torch.ones(1, 1, 3, 3)
    assert random_shift(edge, torch.Generator().manual_seed(3), pixels=1).sum() in (
        4,
        6,
        9,
    )  # black comes in
