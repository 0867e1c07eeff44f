"""What ``benchmarks.photos`` measures, by hand and on pictures of its own."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks import photos
from benchmarks.photos import Measures, best_filter, filtered, measured, rate, row_of, sizes, taught
from torch import Tensor

from gruppo.core.images import detail_bands, psnr
from gruppo.data.restoration import ImagePair, image_pairs
from gruppo.data.source import IndexedSource
from gruppo.modalities.restoration import open_restorer
from gruppo.rewards.images import jpeg_bytes
from gruppo.types import GruppoError

pytest.importorskip("PIL.Image")


def scenes(n: int, seed: int = 0) -> Tensor:
    """Smooth pictures with an edge: clean ones."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0.1, 0.9)
    smooth[..., 16:] = smooth[..., 16:] * 0.6
    return photos.quantize(smooth)


def noisy(clean: Tensor, levels: float = 8.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return clean + levels / 255 * torch.randn(clean.shape, generator=generator)


def test_a_row_compares_bytes_in_sum_and_psnr_in_the_mean_and_draws_pairs():
    base = Measures(
        torch.tensor([30.0, 32.0], dtype=torch.float64),
        torch.tensor([1000.0, 3000.0], dtype=torch.float64),
    )
    found = Measures(
        torch.tensor([30.1, 32.1], dtype=torch.float64),
        torch.tensor([800.0, 2400.0], dtype=torch.float64),
    )
    row = row_of("both", found, base)
    assert (row.psnr, row.d_psnr, row.bytes) == pytest.approx((31.1, 0.1, 1600))
    assert row.saved_frac == pytest.approx(0.2)
    assert row.saved_interval == pytest.approx(
        (0.2, 0.2)
    )  # in each picture alike: nothing is left to chance
    assert row.d_psnr_interval == pytest.approx((0.1, 0.1))
    apart = row_of(
        "one", Measures(base.psnr, torch.tensor([1000.0, 2400.0], dtype=torch.float64)), base
    )
    assert apart.saved_frac == pytest.approx(0.15)
    assert apart.saved_interval == pytest.approx((0.0, 0.2))  # the first twice, the second twice


def test_sizes_are_files_without_their_header():
    pictures = scenes(2)
    black = jpeg_bytes(torch.zeros(3, 32, 32), 90)
    assert sizes(pictures).tolist() == [jpeg_bytes(picture, 90) - black for picture in pictures]
    assert sizes(torch.zeros(1, 3, 32, 32)).tolist() == [0]


def test_the_best_filter_keeps_the_psnr_and_no_point_beside_it_is_smaller():
    clean = scenes(4)
    base = noisy(clean)
    floor = float(measured(base, clean).psnr.mean())
    gains = torch.tensor(best_filter(base, clean, floor))
    own = measured(filtered(base, detail_bands(base), gains), clean)
    assert float(own.psnr.mean()) >= floor
    assert float(own.bytes.sum()) < 0.7 * float(
        sizes(base).sum()
    )  # noise is detail, and nothing of it is worth bytes
    for band in range(4):
        for step in (-0.1, 0.1):
            beside = gains.clone()
            beside[band] += step
            other = measured(filtered(base, detail_bands(base), beside), clean)
            assert float(other.psnr.mean()) < floor or float(other.bytes.sum()) > 0.98 * float(
                own.bytes.sum()
            )


def test_no_filter_is_better_where_every_gain_costs_psnr():
    clean = scenes(2)
    assert best_filter(clean, clean, float(psnr(clean, clean).mean())) == (0.0,) * 4


def test_the_stand_in_for_bytes_ranks_blurs_and_noise_as_files_do():
    clean = scenes(6)
    kinds = [
        clean,
        noisy(clean, 4),
        noisy(clean, 12),
        filtered(clean, detail_bands(clean), torch.tensor([-1.0, 0, 0, 0])),
    ]
    kinds = [photos.quantize(kind) for kind in kinds]
    reported = torch.stack([rate(kind).sum() for kind in kinds])
    real = torch.stack([sizes(kind).sum() for kind in kinds])
    assert reported.argsort().tolist() == real.argsort().tolist()
    # one luma coefficient: 8 x 128 at a step of 3, of one block; chroma is 0
    assert float(rate(torch.full((1, 3, 16, 16), 0.5))) == pytest.approx(
        4 * torch.tensor(1 + 8 * 127.5 / 3).log2().item() / 8000, rel=1e-4
    )


class Small:
    """Pictures of their own in place of the photographs."""

    def __call__(self, data: str, seed: int) -> IndexedSource:
        from gruppo.data.restoration import Degradation

        files = {f"p{n}": ImagePair(picture) for n, picture in enumerate(scenes(6))}
        return image_pairs(
            files,
            seed=seed,
            degradation=Degradation.parse("noise=25"),
            crop=16,
            held_out=("p0", "p1"),
            name="small",
        )


def test_a_taught_head_learns_alone_from_zero_and_the_runs_own_policy_stays(monkeypatch):
    monkeypatch.setattr(photos, "opened", Small())
    policy = open_restorer("unet:width=4", "band_gains:grid=2,std=0.15", supervises="base")
    torch.nn.init.constant_(
        policy.module.action.head.conv_out.bias, 3.0
    )  # what the run has learned
    before = {name: value.clone() for name, value in policy.module.state_dict().items()}
    other = taught(policy, photos.of_pixels, "", steps=30, batch=4, lr=1e-2)
    for name, value in policy.module.state_dict().items():
        assert torch.equal(value, before[name])
        if name.startswith("network."):
            assert torch.equal(value, other.module.state_dict()[name])
    bias = other.module.action.head.conv_out.bias.detach()
    assert 0 < float(bias.abs().max()) < 1.5  # not from 3
    noisy, clean = photos.held_out("")
    base, restored = photos.shown(other, noisy)
    assert float(psnr(restored, clean).mean()) > float(psnr(base, clean).mean()) + 0.2


def test_the_table_of_a_run_has_a_line_for_each_side(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(photos, "opened", Small())
    run = tmp_path / "run"
    open_restorer("unet:width=4", "band_gains:grid=2,std=0.15").save(run / "final")
    photos.main(
        [f"seed 0={run}", str(run), "--teach-steps", "2", "--json", str(tmp_path / "rows.json")]
    )
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "8 crops of 16 x 16"
    assert len(output) == 3 + 7 + 6  # the degraded pictures are told of once
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in rows[:3]] == [
        "degraded",
        "seed 0: network alone",
        "seed 0: restored",
    ]
    assert rows[2]["d_psnr"] == 0 and rows[2]["saved_frac"] == 0  # a new head does nothing
    assert rows[3]["saved_frac"] > 0.2 and len(rows[3]["gains"]) == 4


def test_data_that_are_no_pairs_are_refused():
    with pytest.raises(GruppoError, match="are no pairs of images"):
        photos.held_out("digits")


def test_a_sheet_shows_crops_at_equal_distances_side_by_side(tmp_path):
    from PIL import Image

    clean = scenes(5)
    photos.sheet(
        tmp_path / "sheet.png",
        open_restorer("unet:width=4", "band_gains:grid=4"),
        noisy(clean),
        clean,
        count=3,
    )
    with Image.open(tmp_path / "sheet.png") as image:
        width, height = image.size
    assert width > 4 * 32 and height > 3 * 32
