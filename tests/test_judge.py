"""The judge of digits: what it is trained to refuse, and what a verdict says, by hand."""

from __future__ import annotations

import pytest
import torch
from benchmarks.judge import NO_DIGIT, Judge, Verdict, no_digits, verdict, warped

from gruppo.rewards.image_classifiers import ImageClassifier

pytest.importorskip("PIL.Image")


def noise(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def test_what_is_no_digit_is_a_third_of_one_or_two_halves_or_blank():
    images, labels = 0.5 + 0.5 * noise(100), torch.arange(100) % 10
    others = no_digits(images, labels, torch.Generator().manual_seed(0))
    black = (others == 0).flatten(1).double().mean(dim=1)
    assert others.shape == (20, 1, 28, 28)
    assert black[:10].tolist() == pytest.approx([17 / 28] * 10)  # 11 of 28 rows or columns are left
    kept = {
        tuple((scrap[0] > 0).nonzero().amin(0).tolist() + (scrap[0] > 0).nonzero().amax(0).tolist())
        for scrap in others[:10]
    }
    assert kept == {(0, 0, 10, 27), (0, 0, 27, 10), (17, 0, 27, 27), (0, 17, 27, 27)}
    assert all(blank.unique().numel() == 1 for blank in others[16:])


def test_a_warp_keeps_the_range_and_moves_each_image_its_own_way():
    image = torch.zeros(50, 1, 28, 28)
    image[:, :, 8:20, 10:18] = 1
    moved = warped(image, torch.Generator().manual_seed(0))
    assert moved.min() >= 0 and moved.max() <= 1
    assert len({round(float(x), 6) for x in moved.sum(dim=(1, 2, 3))}) == 50
    ink = moved.round().sum(dim=(1, 2, 3)) / 96
    assert 0.8 < ink.mean() < 1.25 and ink.min() > 0.6 and ink.max() < 1.6


def test_a_verdict_counts_the_asked_class_and_what_is_no_digit():
    judge = Judge().eval()
    with torch.no_grad():
        judge.head.weight.zero_()
        judge.head.bias.zero_()
        judge.head.bias[7] = 1.0  # whatever it sees
    images, real = noise(6), noise(6, seed=1)
    reported = verdict(judge, images, torch.tensor([7, 7, 7, 1, 2, 3]), real)
    assert (reported.asked_frac, reported.no_digit_frac) == (0.5, 0.0)
    assert reported.ink == pytest.approx(images.mean().item(), abs=1e-3)
    with torch.no_grad():
        judge.head.bias[NO_DIGIT] = 2.0
    assert verdict(judge, images, torch.full((6,), 7), real).no_digit_frac == 1.0


def test_real_images_have_no_distance_to_themselves():
    reported = verdict(Judge(), noise(60), torch.arange(60) % 10, noise(60))
    assert isinstance(reported, Verdict) and reported.frechet == pytest.approx(0, abs=1e-6)


def test_the_judge_shares_no_layer_type_with_the_reader_but_linear_ones_and_flat_shapes():
    networks = (Judge(), ImageClassifier())
    kinds = [{type(m).__name__ for m in net.modules()} for net in networks]
    assert kinds[0] & kinds[1] == {"Sequential", "Conv2d", "Linear", "Flatten"}
    kernels = [
        {m.kernel_size for m in net.modules() if isinstance(m, torch.nn.Conv2d)} for net in networks
    ]
    assert not kernels[0] & kernels[1]
