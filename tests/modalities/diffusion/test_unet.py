"""The UNet that ships: rows by themselves, of any even sizes, told the time and the class."""

from __future__ import annotations

import pytest
import torch

from gruppo.modalities.diffusion.unet import DenoisingUNet
from gruppo.types import GruppoError


def net(*sizes, **changes):
    torch.manual_seed(0)
    made = DenoisingUNet(*sizes, **changes)
    torch.nn.init.normal_(made.conv_out[-1].weight, std=0.1)
    return made.double()


def inputs_of(made, n=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, *made.sizes["shape"], generator=generator, dtype=torch.float64)
    return x, torch.linspace(0.1, 1, n, dtype=torch.float64), torch.arange(n)


def test_it_has_about_as_many_weights_as_the_trials_had():
    assert sum(p.numel() for p in DenoisingUNet().parameters()) == 268_132


def test_a_new_one_says_nothing_yet():
    assert not DenoisingUNet((1, 8, 8), 3, width=8)(
        torch.randn(2, 1, 8, 8), torch.ones(2), torch.arange(2)
    ).any()


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 10, 6)], ids=str)
def test_a_row_is_what_it_is_alone_and_of_the_shape_of_its_picture(shape):
    made = net(shape, 3, width=8)
    x, times, labels = inputs_of(made)
    together = made(x, times, labels)
    assert together.shape == x.shape
    for n in range(3):
        alone = made(x[n : n + 1], times[n : n + 1], labels[n : n + 1])
        torch.testing.assert_close(together[n : n + 1], alone, rtol=0, atol=1e-12)


def test_time_and_class_are_told_and_none_of_the_classes_is_another():
    made = net((1, 8, 8), 3, width=8)
    x, times, labels = (part[:1] for part in inputs_of(made))
    outputs = [made(x, times, labels), made(x, times / 2, labels)] + [
        made(x, times, labels + n) for n in (1, 2, 3)
    ]
    for n, one in enumerate(outputs):
        for other in outputs[:n]:
            assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("sizes", [{"shape": (1, 27, 28)}, {"width": 20}], ids=str)
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(GruppoError, match="a multiple of 8, and images with even sides"):
        DenoisingUNet(**sizes)
