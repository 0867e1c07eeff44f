"""Rewards of restored images: equal to scikit-image, by hand in patches, and unscored where nothing
is to compare."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.rewards.fakes import rollouts_of
from torch import Tensor

from gruppo.core.images import quantize, to_uint8
from gruppo.rewards import RewardSet, reward_stats
from gruppo.rewards.images import ocr_accuracy, psnr, ssim

pytest.importorskip("PIL.Image")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return quantize(torch.rand(*shape, generator=torch.Generator().manual_seed(seed)))


def near(image: Tensor, by: float, seed: int = 5) -> Tensor:
    return quantize(
        image + by * torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    )


CLEAN = [noise(3, 24, 20, seed=n) for n in range(3)]
RESTORED = [near(image, 0.02 * (n + 1)) for n, image in enumerate(CLEAN)]
DEGRADED = [near(image, 0.1) for image in CLEAN]


def levels(image: Tensor) -> np.ndarray:
    return to_uint8(image).permute(1, 2, 0).numpy()


# --- fidelity -------------------------------------------------------------------------------------


@pytest.mark.silent_bug(38)
@pytest.mark.silent_bug(39)
def test_psnr_and_ssim_are_those_that_scikit_image_gives_the_saved_files():
    metrics = pytest.importorskip("skimage.metrics")
    restored = [image + 0.3 / 255 for image in RESTORED]  # what rounding takes away
    for image, clean, db, likeness in zip(
        restored,
        CLEAN,
        psnr()(images=restored, target=CLEAN),
        ssim()(images=restored, target=CLEAN),
        strict=True,
    ):
        pair = levels(clean), levels(image)
        assert db == pytest.approx(metrics.peak_signal_noise_ratio(*pair), abs=1e-6)
        theirs = metrics.structural_similarity(
            *pair, channel_axis=2, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        assert likeness == pytest.approx(theirs, abs=1e-6)


def test_equal_images_are_worth_100_db_and_not_an_infinity_that_nothing_could_be_learned_from():
    assert psnr()(images=CLEAN, target=CLEAN) == [100.0] * 3
    assert ssim()(images=CLEAN, target=CLEAN) == pytest.approx([1.0] * 3)
    scores = RewardSet([psnr()]).score(rollouts_of(CLEAN, targets=[CLEAN[0]]))
    assert scores.rewards[0] == 100 and scores.rewards[1] < 20


@pytest.mark.silent_bug(22)
def test_what_cannot_be_compared_is_not_scored_and_never_0():
    images = [RESTORED[0], torch.full((3, 24, 20), torch.nan)]
    found = psnr()(images=images, target=[None, CLEAN[0]])
    assert found[0] is None and math.isnan(found[1])
    scores = RewardSet([psnr()]).score(
        rollouts_of([RESTORED[0], images[1], RESTORED[0][:, 1:]], targets=[CLEAN[0]])
    )
    assert scores.rewards.isnan().tolist() == [False, True, True]
    assert reward_stats(scores)["reward/unscored_count"] == 2
    assert (
        "the target is [3, 24, 20] and the image [3, 23, 20]; both need one shape"
        in scores.failures[-1].message
    )


@pytest.mark.silent_bug(42)
@pytest.mark.parametrize("make", [psnr, ssim], ids=["psnr", "ssim"])
def test_no_cheap_picture_scores_above_a_restored_one(make):
    """Blank, mean, blurred, noisy, shifted, inverted, and out of range; the degraded one itself."""
    rows = torch.linspace(0, 6, 24).sin().reshape(1, 24, 1) * torch.linspace(
        0, 9, 20
    ).cos().reshape(1, 1, 20)
    clean = quantize(0.5 + 0.3 * rows.expand(3, 24, 20) + 0.1 * (CLEAN[0] - 0.5))
    honest, degraded = near(clean, 0.02), near(clean, 0.1)
    mean = clean.mean(dim=(1, 2), keepdim=True).expand_as(clean)
    blurred = torch.nn.functional.avg_pool2d(
        clean[None], 5, stride=1, padding=2, count_include_pad=False
    )[0]
    cheats = [
        torch.zeros_like(clean),
        torch.ones_like(clean),
        mean,
        blurred,
        noise(3, 24, 20),
        1 - clean,
        9 * clean - 4,
    ]
    cheats += [clean.roll(3, dims=-1), degraded, clean.flip(-2)]
    found = make()(images=[honest, *cheats], target=[clean] * (1 + len(cheats)))
    assert max(found[1:]) < found[0]


# --- text -----------------------------------------------------------------------------------------


def test_accuracy_is_one_minus_the_edits_of_a_character_as_they_are_read():
    texts_read = {0: "Fast", 1: "F st", 2: "fast train", 3: ""}

    def read(image):
        return texts_read[int(image[0, 0, 0])]

    images = [torch.full((1, 4, 4), n / 255) for n in range(4)]
    texts = ["Fast"] * 4
    assert ocr_accuracy(read)(images=images, text=texts) == pytest.approx([1.0, 0.75, 0.0, 0.0])
    assert ocr_accuracy(read, ignore_case=True)(images=images, text=texts)[2] == 0.0
    assert ocr_accuracy(read)(images=images[:1], text=["F a s t"]) == [1.0]
    assert ocr_accuracy(read, ignore_case=True)(images=images[:1], text=["fAST"]) == [1.0]
    assert ocr_accuracy(read)(images=images[:1], text=["fAST"]) == [0.0]
    broken = [torch.full((1, 4, 4), torch.nan)]
    assert ocr_accuracy(read)(images=[images[0], images[0]], text=[None, " "]) == [None, None]
    assert math.isnan(ocr_accuracy(read)(images=broken, text=["x"])[0])
