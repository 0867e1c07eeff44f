"""Rewards of images: by hand, as a saved file gives them, and under the rules for rows that cannot
be scored."""

from __future__ import annotations

import math

import pytest
import torch
from tests.rewards.fakes import rollouts_of
from torch import Tensor, nn

from gruppo.rewards import RewardSet, reward_stats
from gruppo.rewards.image_classifiers import classifier, log_probabilities
from gruppo.rewards.images import (
    brightness,
    jpeg_bytes,
    jpeg_compressibility,
    jpeg_incompressibility,
    to_pillow,
)
from gruppo.types import GruppoError

PIL = pytest.importorskip("PIL.Image")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def reloaded(image: Tensor, tmp_path) -> Tensor:
    """As a file gives it back: no code of ours reads it."""
    to_pillow(image).save(tmp_path / "image.png")
    loaded = PIL.open(tmp_path / "image.png")
    return (
        torch.tensor(list(loaded.tobytes()), dtype=torch.float32)
        .div(255)
        .reshape(*loaded.size[::-1], -1)
        .movedim(-1, 0)
    )


class Darkness(nn.Module):
    """Two classes, light and dark, whose log-odds are 10 (mean - .5); with statistics that training
    would move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1, eps=0, affine=False)
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, images: Tensor) -> Tensor:
        light = self.scale * (self.norm(images).mean(dim=(1, 2, 3)) - 0.5)
        return torch.stack([light, torch.zeros_like(light)], dim=1)


GREYS = [torch.full((1, 4, 4), level / 255) for level in (255, 153, 51)]
LOGIT = (5.0, 1.0, -3.0)
NATS = [-math.log1p(math.exp(-x)) for x in LOGIT]


# --- compressibility ------------------------------------------------------------------------------


def test_compressibility_is_minus_the_kilobytes_of_the_file_that_pillow_writes(tmp_path):
    images = [noise(1, 28, 28), noise(3, 20, 24), torch.zeros(1, 28, 28)]
    for image in images:
        to_pillow(image).save(tmp_path / "x.jpg", quality=95)
        assert jpeg_bytes(image) == (tmp_path / "x.jpg").stat().st_size
    sizes = [jpeg_bytes(image) for image in images]
    assert jpeg_compressibility()(images=images) == [-size / 1000 for size in sizes]
    assert jpeg_incompressibility()(images=images) == [size / 1000 for size in sizes]
    assert sizes[2] < sizes[0]


def test_without_its_header_a_black_image_has_no_bytes_and_others_differ_by_as_much_as_before():
    images = [torch.zeros(1, 28, 28), noise(1, 28, 28), torch.zeros(3, 28, 28)]
    whole, above = (
        jpeg_incompressibility()(images=images),
        jpeg_incompressibility(without_header=True)(images=images),
    )
    assert above[0] == above[2] == 0 and above[1] == pytest.approx(whole[1] - whole[0])


def test_a_lower_quality_makes_a_smaller_file():
    image = [noise(1, 28, 28)]
    assert jpeg_compressibility(30)(images=image)[0] > jpeg_compressibility(95)(images=image)[0]


@pytest.mark.parametrize("quality", [0, 101, 95.0, None])
def test_a_quality_that_jpeg_does_not_have_is_refused(quality):
    with pytest.raises(GruppoError, match="from 1 to 100"):
        jpeg_compressibility(quality)


# --- brightness -----------------------------------------------------------------------------------


def test_brightness_is_the_mean_or_the_closeness_to_a_target():
    assert brightness()(images=GREYS) == pytest.approx([1.0, 0.6, 0.2])
    assert brightness(0.6)(images=GREYS) == pytest.approx([0.6, 1.0, 0.6])
    with pytest.raises(GruppoError, match=r"target=2; it needs"):
        brightness(2)


# --- a classifier ---------------------------------------------------------------------------------


def test_a_classifier_gives_the_log_probability_of_each_rows_own_class():
    rewards = classifier(Darkness())(images=GREYS, label=[0, "0", 1])
    assert rewards == pytest.approx([NATS[0], NATS[1], -math.log1p(math.exp(LOGIT[2]))], rel=1e-6)


def test_a_fixed_class_and_a_floor():
    of_light = classifier(Darkness(), label=0, floor=-3.0)
    assert of_light(images=GREYS) == pytest.approx([NATS[0], NATS[1], -3.0], rel=1e-6)


def test_a_row_without_a_class_is_not_scored_and_a_class_that_is_not_there_fails_alone():
    rewards = RewardSet(classifier(Darkness()))
    metas = [{"label": 0}, {"label": None}, {"label": 2}]
    scores = rewards.score(rollouts_of(GREYS, group_ids=[0, 1, 2], targets=[None] * 3, metas=metas))
    assert scores.rewards.isnan().tolist() == [False, True, True]
    assert [(f.row, f.kind) for f in scores.failures] == [(2, "exception")]


@pytest.mark.silent_bug(40)
def test_a_classifier_is_frozen_and_stays_so_its_running_statistics_included():
    module = Darkness()
    reward = classifier(module, label=0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert not any(p.requires_grad for p in module.parameters())
    module.train()  # someone else's call
    first = reward(images=GREYS)
    assert first == reward(images=GREYS[::-1])[::-1]
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())


# --- what a reward sees ---------------------------------------------------------------------------


@pytest.mark.silent_bug(38)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "reward",
    [jpeg_compressibility(), jpeg_incompressibility(80), brightness(), brightness(0.3)],
    ids=lambda reward: reward.__name__,
)
def test_the_reward_of_a_saved_image_is_that_of_the_image_in_memory(tmp_path, channels, reward):
    image = (
        1.4 * noise(channels, 17, 23) - 0.2
    )  # as a sampler leaves it: outside the range, between the levels
    assert reward(images=[reloaded(image, tmp_path)]) == pytest.approx(
        reward(images=[image]), rel=1e-12
    )


@pytest.mark.silent_bug(38)
def test_a_classifier_too_sees_the_image_that_is_saved(tmp_path):
    image = 1.4 * noise(1, 17, 23) - 0.2
    assert log_probabilities(Darkness(), [image])[0].equal(
        log_probabilities(Darkness(), [reloaded(image, tmp_path)])[0]
    )


def test_a_saved_image_keeps_its_channels_rows_and_columns(tmp_path):
    image = (torch.arange(3 * 4 * 5).reshape(3, 4, 5) * 4) / 255
    assert reloaded(image, tmp_path).equal(image)
    assert to_pillow(image).mode == "RGB" and to_pillow(image[:1]).mode == "L"
    with pytest.raises(ValueError, match=r"shape \(2, 4, 5\); it needs \[1, H, W\] or \[3, H, W\]"):
        to_pillow(image[:2])


# --- rows that cannot be scored -------------------------------------------------------------------


@pytest.mark.silent_bug(22)
@pytest.mark.parametrize(
    "reward", [jpeg_compressibility(), brightness(), classifier(Darkness(), label=0)]
)
def test_an_image_with_a_nan_is_unscored_and_counted_and_not_a_black_one(reward):
    broken = noise(1, 4, 4)
    broken[0, 2, 2] = math.nan
    scores = RewardSet(reward).score(rollouts_of([noise(1, 4, 4), broken, noise(1, 4, 4, seed=1)]))
    assert scores.rewards.isnan().tolist() == [False, True, False]
    assert reward_stats(scores)["reward/not_finite_count"] == 1


@pytest.mark.silent_bug(22)
def test_an_image_that_no_file_can_hold_fails_alone():
    scores = RewardSet(jpeg_compressibility()).score(rollouts_of([noise(1, 4, 4), noise(2, 4, 4)]))
    assert scores.rewards.isnan().tolist() == [False, True]
    assert "needs [1, H, W] or [3, H, W]" in scores.failures[0].message
    assert reward_stats(scores)["reward/exception_count"] == 1


@pytest.mark.silent_bug(24)
def test_a_wrong_count_fails_every_row():
    scores = RewardSet(lambda images, **_: [1.0]).score(rollouts_of(GREYS))
    assert scores.rewards.isnan().all() and [f.kind for f in scores.failures] == ["count"] * 3
    assert reward_stats(scores)["reward/exception_count"] == 3


def test_images_are_passed_as_copies_and_a_column_of_that_name_is_passed_where_there_are_none():
    seen = []

    def reward(images, **_):
        seen.append(list(images))
        images[0] = images[0].zero_() if isinstance(images[0], Tensor) else None
        return [1.0] * len(images)

    rollouts = rollouts_of(GREYS[:1], metas=[{"images": "of the data"}])
    RewardSet(reward).score(rollouts)
    assert GREYS[0].unique().tolist() == [1.0] and isinstance(seen[0][0], Tensor)
    RewardSet(reward).score(rollouts_of(["a text"], metas=[{"images": "of the data"}]))
    assert seen[1] == ["of the data"]
