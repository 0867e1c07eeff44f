"""Rewards of restored images: equal to scikit-image, by hand in patches, and unscored where nothing
is to compare."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.rewards.fakes import rollouts_of
from torch import Tensor

from gruppo.core.images import quantize, to_uint8
from gruppo.rewards import RewardSet, reward_stats
from gruppo.rewards.images import PatchReward, jpeg_bytes, jpeg_saving, ocr_accuracy, psnr, ssim
from gruppo.rewards.registry import resolve_reward
from gruppo.types import DataError, GruppoError, Prompt, Rollouts

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


def test_a_gain_is_over_the_degraded_image_or_over_the_reference_s():
    absolute, of_input = (
        psnr()(images=RESTORED, target=CLEAN),
        psnr()(images=DEGRADED, target=CLEAN),
    )
    gain = psnr(delta="input")
    assert gain.__name__ == "psnr_gain"
    assert gain(images=RESTORED, target=CLEAN, prompts=DEGRADED) == pytest.approx(
        np.subtract(absolute, of_input)
    )
    reference = psnr(delta="reference")
    assert reference(images=RESTORED, target=CLEAN, reference=DEGRADED) == pytest.approx(
        np.subtract(absolute, of_input)
    )
    likeness = ssim(delta="input")(images=DEGRADED, target=CLEAN, prompts=DEGRADED)
    assert likeness == pytest.approx([0, 0, 0])


def test_a_gain_reads_prompts_and_columns_in_a_set_of_rewards():
    prompts = tuple(
        Prompt(f"p{n}", DEGRADED[n], CLEAN[n], {"reference": RESTORED[n]}, draw=n) for n in range(2)
    )
    rollouts = replace(rollouts_of([RESTORED[0], RESTORED[1]], group_ids=[0, 1]), prompts=prompts)
    scores = RewardSet([psnr(), psnr(delta="input"), psnr(delta="reference")]).score(rollouts)
    assert list(scores.parts) == ["psnr", "psnr_gain", "psnr_gain_2"]
    expected = np.subtract(
        *(psnr()(images=of[:2], target=CLEAN[:2]) for of in (RESTORED, DEGRADED))
    )
    assert scores.parts["psnr_gain"].tolist() == pytest.approx(expected, rel=1e-6)
    assert scores.parts["psnr_gain_2"].tolist() == [0, 0]
    with pytest.raises(DataError, match="asks for 'reference', which the data do not have"):
        RewardSet([psnr(delta="reference")]).check(["images", "target"])


@pytest.mark.silent_bug(22)
def test_what_cannot_be_compared_is_not_scored_and_never_0():
    images = [RESTORED[0], torch.full((3, 24, 20), torch.nan)]
    found = psnr()(images=images, target=[None, CLEAN[0]])
    assert found[0] is None and math.isnan(found[1])
    assert psnr(delta="reference")(images=images[:1], target=CLEAN[:1], reference=[None]) == [None]
    scores = RewardSet([psnr()]).score(
        rollouts_of([RESTORED[0], images[1], RESTORED[0][:, 1:]], targets=[CLEAN[0]])
    )
    assert scores.rewards.isnan().tolist() == [False, True, True]
    assert reward_stats(scores)["reward/unscored_count"] == 2
    assert (
        "the target is [3, 24, 20] and the image [3, 23, 20]; both need one shape"
        in scores.failures[-1].message
    )


@pytest.mark.parametrize("make", [psnr, ssim], ids=["psnr", "ssim"])
def test_options_that_there_are_not_are_refused(make):
    with pytest.raises(
        GruppoError, match="got delta='ref'; it needs one of none, input, reference"
    ):
        make(delta="ref")
    with pytest.raises(GruppoError, match="got patch=-8; it needs a whole number of pixels"):
        make(patch=-8)


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


# --- patches --------------------------------------------------------------------------------------


def patched(outputs, columns: int, **changes) -> Rollouts:
    """Rows of two images, one action per patch."""
    prompts = tuple(
        Prompt(f"p{n}", DEGRADED[n], CLEAN[n], {"reference": RESTORED[n]}, draw=n) for n in range(2)
    )
    rows = len(outputs)
    rollouts = Rollouts(
        prompts=prompts,
        group_ids=torch.arange(rows) % 2,
        actions=torch.zeros(rows, columns, 1, 1, 1),
        mask=torch.ones(rows, columns, dtype=torch.bool),
        lengths=torch.full((rows,), columns),
        completions=tuple(outputs),
        sampler_logprobs=torch.zeros(rows, columns),
        policy_version=torch.zeros(rows, columns, dtype=torch.long),
        temperature=torch.ones(rows),
        finish=("stop",) * rows,
    )
    return replace(rollouts, **changes)


@pytest.mark.silent_bug(24)
def test_patches_by_hand_row_by_row_and_their_sum_is_their_mean():
    clean = torch.full((3, 8, 12), 0.5)
    image = clean.clone()
    for n in range(6):
        row, column = divmod(n, 3)
        image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 2.0 ** -(n + 2)
    rollouts = patched(
        [image], 6, prompts=(Prompt("a", image, clean),), group_ids=torch.zeros(1, dtype=torch.long)
    )
    found = psnr(patch=4)(rollouts)
    saved = [
        (quantize(torch.tensor([0.5 + 2.0 ** -(n + 2)])) - quantize(torch.tensor([0.5]))).item()
        for n in range(6)
    ]
    assert (6 * found[0]).tolist() == pytest.approx(
        [-20 * math.log10(apart) for apart in saved], rel=1e-5
    )
    scores = RewardSet([psnr(patch=4)]).score(rollouts)
    assert scores.rewards[0].item() == pytest.approx(float(found.sum()), rel=1e-6)
    torch.testing.assert_close(scores.steps["psnr"], found)


def test_patches_of_ssim_are_means_of_scikit_image_s_map():
    metrics = pytest.importorskip("skimage.metrics")
    found = ssim(patch=4)(patched(RESTORED[:1], 30))
    options = {
        "channel_axis": 2,
        "gaussian_weights": True,
        "sigma": 1.5,
        "use_sample_covariance": False,
        "full": True,
    }
    _, map_ = metrics.structural_similarity(levels(CLEAN[0]), levels(RESTORED[0]), **options)
    means = map_.mean(axis=2).reshape(6, 4, 5, 4).mean(axis=(1, 3)).flatten()
    assert (30 * found[0]).tolist() == pytest.approx(means.tolist(), abs=1e-6)


def test_a_patch_s_gain_is_over_the_same_patch_of_the_other_image():
    rollouts = patched(RESTORED[:2], 30)
    absolute, gain = psnr(patch=4)(rollouts), psnr(patch=4, delta="input")(rollouts)
    torch.testing.assert_close(
        gain, absolute - psnr(patch=4)(patched(DEGRADED[:2], 30)), rtol=1e-4, atol=1e-5
    )
    assert psnr(patch=4, delta="reference")(rollouts).eq(0).all()


@pytest.mark.silent_bug(22)
def test_a_patch_without_a_score_is_nan_and_the_row_is_unscored():
    prompts = (Prompt("a", DEGRADED[0]), Prompt("b", DEGRADED[1], CLEAN[1], draw=1))
    outputs = [RESTORED[0], RESTORED[1], RESTORED[0], torch.full((3, 24, 20), torch.nan)]
    mask = torch.ones(4, 30, dtype=torch.bool)
    mask[1, 5] = False
    rollouts = patched(outputs, 30, prompts=prompts, mask=mask)
    found = psnr(patch=4)(rollouts)
    assert found[0].isnan().all() and found[2].isnan().all() and found[3].isnan().all()
    assert found[1].isnan().nonzero().flatten().tolist() == [5]
    scores = RewardSet([psnr(patch=4)]).score(rollouts)
    assert scores.rewards.isfinite().tolist() == [False, True, False, False]


def test_patches_that_are_not_the_policy_s_are_refused():
    with pytest.raises(
        GruppoError,
        match=r"patch=8 gives 3 x 2.5 squares of images of 24 x 20, and the policy has 30",
    ):
        psnr(patch=8)(patched(RESTORED[:1], 30))
    with pytest.raises(GruppoError, match=r"patch=4 gives 6 x 5 squares .* has 1 actions"):
        psnr(patch=4)(patched(RESTORED[:1], 1))
    reward = psnr(patch=4, delta="reference")
    assert isinstance(reward, PatchReward) and reward.scores_steps and reward.name == "psnr_gain"
    with pytest.raises(
        DataError,
        match="'psnr_gain' asks for 'reference', which the data do not have; they have: target\\.",
    ):
        RewardSet([reward]).check(["target"])
    RewardSet([reward]).check(["target", "reference"])
    with pytest.raises(DataError, match="asks for 'target'"):
        RewardSet([ssim(patch=4)]).check(["image"])


# --- bytes ----------------------------------------------------------------------------------------


def test_a_saving_is_the_share_of_bytes_without_the_header():
    rich, poor = noise(3, 32, 32), torch.full((3, 32, 32), 0.5)
    poor[:, :8] = rich[:, :8]
    header = jpeg_bytes(torch.zeros(3, 32, 32), 90)
    expected = 1 - (jpeg_bytes(poor, 90) - header) / (jpeg_bytes(rich, 90) - header)
    assert 0.5 < expected < 0.8
    assert jpeg_saving()(images=[poor, rich], reference=[rich, rich]) == pytest.approx(
        [expected, 0]
    )
    assert jpeg_saving(against="target")(images=[poor], target=[rich]) == pytest.approx([expected])
    assert jpeg_saving(against="input")(images=[poor], prompts=[rich]) == pytest.approx([expected])
    black = torch.zeros(3, 32, 32)
    assert jpeg_saving()(images=[black, rich], reference=[rich, black])[0] == 1
    assert math.isfinite(jpeg_saving()(images=[rich], reference=[black])[0])
    found = jpeg_saving()(images=[poor, poor * math.nan], reference=[None, rich])
    assert found[0] is None and math.isnan(found[1])


@pytest.mark.parametrize(
    "options", [{"quality": 0}, {"quality": 90.0}, {"against": "clean"}], ids=str
)
def test_a_saving_that_there_is_not_is_refused(options):
    with pytest.raises(GruppoError, match=r"jpeg_saving got|quality=.* of a JPEG"):
        jpeg_saving(**options)


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


# --- nothing to compare with ----------------------------------------------------------------------


def test_brisque_prefers_a_photograph_to_it_with_noise_or_blur_and_has_no_score_of_a_flat_one():
    pytest.importorskip("brisque")
    from skimage import data

    from gruppo.core.images import gaussian_blur

    photo = torch.from_numpy(data.chelsea().copy()).permute(2, 0, 1).float() / 255
    noise = torch.randn(photo.shape, generator=torch.Generator().manual_seed(0))
    noisy, blurred = (photo + 0.1 * noise).clamp(0, 1), gaussian_blur(photo[None], 3.0)[0]
    clean, *others, flat = resolve_reward("brisque")(
        images=[photo, noisy, blurred, torch.full((3, 64, 64), 0.5)]
    )
    assert clean > 0.9 and max(others) < 0.6 and math.isnan(flat)


def test_brisque_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "brisque", None)
    with pytest.raises(GruppoError, match=r"install .*\[quality\]"):
        resolve_reward("brisque")
