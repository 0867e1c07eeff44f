"""Lines of text: what is drawn is what the transcript says, one image a line, no clean image where
none is asked."""

from __future__ import annotations

import pytest
import torch

from gruppo.core.images import gaussian_blur, quantize
from gruppo.data import lines as module
from gruppo.data.degrade import Degradation
from gruppo.data.lines import LONGEST, MARGIN, SIGNS, line_image, line_text, text_lines
from gruppo.data.open import open_source
from gruppo.data.source import IndexedSource
from gruppo.types import DataError, GruppoError

SPOILED = "blur=0.5-2,noise=10-40"


def source(spoiled: str = SPOILED, **options) -> IndexedSource:
    return text_lines(Degradation.parse(spoiled), **{"seed": 3, "count": 40} | options)


def images_of(prompts) -> dict[str, tuple]:
    return {p.id: (p.inputs.tolist(), dict(p.meta)) for p in prompts}


def test_a_line_is_dark_text_on_light_paper_and_leaves_a_margin():
    for p in source(count=60).take(50):
        assert p.target.shape == p.inputs.shape == (1, 24, 128) and p.target.dtype == torch.float32
        paper, ink = p.target.max(), p.target.min()
        assert 0.8 <= paper <= 1 and ink < 0.5
        sides = torch.cat([p.target[..., : MARGIN - 1], p.target[..., 1 - MARGIN :]], dim=-1)
        assert (sides == paper).all() and torch.equal(p.target, quantize(p.target))


def test_a_transcript_is_of_random_signs_and_two_lines_differ():
    texts = [p.meta["text"] for p in source(count=300, held_out_fraction=0).take(300)]
    assert len(set(texts)) == 300
    words = [word for text in texts for word in text.split()]
    assert set("".join(words)) == set(SIGNS) and max(map(len, words)) <= LONGEST
    assert not set("01IOl") & set("".join(words))


def test_the_ink_is_that_of_the_transcript_in_the_line_s_own_font():
    """Drawn again by hand with Pillow: the clean line, moved to the same place, has the same
    cover."""
    from PIL import Image, ImageDraw, ImageFont

    for index in range(10):
        text, font = line_text(0, index, 24, 128)
        canvas = Image.new("L", (200, 60), 0)
        chosen = ImageFont.truetype(font.path, font.size, layout_engine=ImageFont.Layout.BASIC)
        ImageDraw.Draw(canvas).text((20, 30), text, fill=255, font=chosen, anchor="lm")
        box = canvas.getbbox()
        clean = line_image(text, font, 0, index, 24, 128)[0]
        paper, ink = clean.max(), clean.min()
        sampled = (paper - clean) / (paper - ink)
        rows, columns = ((sampled.amax(dim=side) > 0.01).nonzero()[:, 0] for side in (1, 0))
        assert (int(columns[-1] - columns[0]), int(rows[-1] - rows[0])) == pytest.approx(
            (box[2] - box[0] - 1, box[3] - box[1] - 1), abs=1
        )


def test_what_is_spoiled_is_the_clean_line_under_the_strengths_that_are_contents():
    """Without noise, by hand; noise has the standard deviation that is said."""
    for p in source("blur=0.5-2").take(5):
        assert torch.equal(p.inputs, quantize(gaussian_blur(p.target[None], p.meta["blur"])[0]))
        assert 0.5 <= p.meta["blur"] <= 2 and set(p.meta) == {"text", "blur"}
    (p,) = source("noise=10").take(1)
    middle = (p.target > 0.2) & (p.target < 0.8)
    apart = (p.inputs - p.target)[middle if middle.sum() > 200 else p.target < 0.9]
    assert len(apart) > 100 and float(apart.std()) == pytest.approx(10 / 255, rel=0.2)


def test_without_clean_images_there_is_no_target_and_all_else_is_the_same():
    whole, blind = source().take(12), source(clean=False).take(12)
    assert all(p.target is None for p in blind)
    assert [torch.equal(a.inputs, b.inputs) for a, b in zip(whole, blind, strict=True)] == [
        True
    ] * 12
    assert [a.meta for a in whole] == [b.meta for b in blind]
    assert source().columns == ("target", "text", "blur", "noise")
    assert source(clean=False).columns == ("text", "blur", "noise")


def test_another_set_has_other_lines():
    first, second = (source(number=n, count=200, held_out_fraction=0).take(200) for n in (0, 1))
    assert not {p.meta["text"] for p in first} & {p.meta["text"] for p in second}
    assert not {p.id for p in first} & {p.id for p in second}
    assert not {p.meta["blur"] for p in first} & {p.meta["blur"] for p in second}


def test_by_name():
    lines = open_source(
        "lines:blur=0.5-2,noise=10-40,count=50,clean=no,set=2,width=96,height=20", seed=1
    )
    by_hand = source(count=50, clean=False, number=2, width=96, height=20, seed=1)
    assert lines.fingerprint() == by_hand.fingerprint()
    assert str(lines.degradation) == "blur=0.5-2,noise=10-40"
    (p,) = lines.take(1)
    assert p.inputs.shape == (1, 20, 96) and p.target is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("lines", "does not say how lines are degraded; write lines:blur"),
        ("lines:count=5", "does not say how lines are degraded"),
        ("lines:noise=10,count=many", "cannot read count='many'"),
        ("lines:noise=10,clean=perhaps", "cannot read clean='perhaps'"),
        ("lines:noize=10", "step 'noize'; .* Did you mean noise"),
        ("lines:noise=10,height=4", "lines of 4 x 128 pixels; they need"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_to_write(data, message):
    with pytest.raises(DataError, match=message):
        open_source(data, seed=0)


def test_without_the_fonts_the_package_is_named(monkeypatch):
    module._load_font.cache_clear()
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    with pytest.raises(GruppoError, match="pip install no_such_package"):
        source()
