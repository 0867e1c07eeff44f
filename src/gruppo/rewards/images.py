"""Built-in rewards of images, in TRL's calling convention: ``images`` is a list of tensors [C, H,
W] in [0, 1].

Images are read as a file of 8 bits would hold them, whatever the policy returns. One with a NaN is
NaN, a counted failure: as a file it would be black, which compresses best. Restoration rewards
compare with ``target``, the clean images. Each docstring states what a policy can gain by cheating.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core import images as measures
from gruppo.core.images import MAX_PSNR_DB, quantize, to_pillow
from gruppo.loading import import_extra
from gruppo.types import GruppoError

Image = Float[Tensor, "C H W"]
ImageReward = Callable[..., list[float | None]]
OcrReader = Callable[[np.ndarray], str]  # an image [H, W, 3] of bytes to the text in it
NAN = float("nan")


def jpeg_compressibility(quality: int = 95, *, without_header: bool = False) -> ImageReward:
    """Minus the size of the image as a JPEG, in kB (1000 bytes): ddpo-pytorch's reward of this
    name.

    ``without_header``: bytes above those of a black image of the same size, which then earns 0. A
    black image earns most, and is found within a minute: add a reward that reads what the image
    shows, and a KL.
    """
    size = jpeg_size(quality, without_header=without_header)
    return per_image("jpeg_compressibility", lambda image: -size(image) / 1000)


def jpeg_incompressibility(quality: int = 95, *, without_header: bool = False) -> ImageReward:
    """The size of the image as a JPEG, in kB (1000 bytes). White noise earns most."""
    size = jpeg_size(quality, without_header=without_header)
    return per_image("jpeg_incompressibility", lambda image: size(image) / 1000)


def jpeg_size(quality: int, *, without_header: bool) -> Callable[[Image], int]:
    """Return a function that gives the JPEG bytes of an image. A header counts as the bytes of a
    black image."""
    if not isinstance(quality, int) or not 1 <= quality <= 100:
        raise GruppoError(
            f"quality={quality!r} of a JPEG; it needs a whole number from 1 to 100, such as 95."
        )
    import_extra("PIL", "images", "a reward of JPEG files")
    header = cache(lambda shape: jpeg_bytes(torch.zeros(shape), quality) if without_header else 0)
    return lambda image: jpeg_bytes(image, quality) - header(image.shape)


def jpeg_bytes(image: Image, quality: int = 95) -> int:
    """The size of the image as a JPEG, in bytes."""
    file = io.BytesIO()
    to_pillow(image).save(file, "JPEG", quality=quality)
    return file.tell()


def brightness(target: float | None = None) -> ImageReward:
    """Mean luma, 0 (black) to 1 (white); or 1 - |mean luma - target|. A blank image of that
    brightness earns most."""
    if target is not None and not 0 <= target <= 1:
        raise GruppoError(
            f"brightness got target={target!r}; it needs a number from 0 (black) to 1 (white)."
        )

    def score(image: Image) -> float:
        mean = float(measures.mean_luma(quantize(image)[None]))
        return mean if target is None else 1 - abs(mean - target)

    return per_image("brightness", score)


# --- text in images -------------------------------------------------------------------------------


def ocr_accuracy(
    read: OcrReader | None = None, *, line: bool = True, ignore_case: bool = False
) -> ImageReward:
    """max(0, 1 - edits / characters) between the recognized text and the column ``text``, without
    spaces.

    0 to 1: one minus the character error rate; additional words in the image cost edits. A row
    without a text is not scored. ``read`` is rapidocr (extra ``ocr``) by default. ``line``: every
    image is one line of text; text detection, which takes most of the time, is skipped. Ugly
    letters earn as much as fine ones.
    """
    if read is None:  # the networks of rapidocr are in its wheel
        package = import_extra("rapidocr", "ocr", "ocr_accuracy")
        import_extra("onnxruntime", "ocr", "ocr_accuracy")
        engine = package.RapidOCR(params={"Global.log_level": "critical"})
        stages = {"use_det": False, "use_cls": False, "use_rec": True} if line else {}
        read = lambda image: " ".join(engine(image, **stages).txts or ())  # noqa: E731
    normalize: Callable[[str], str] = str.casefold if ignore_case else str

    def score(image: Image, text: Any) -> float | None:
        expected = normalize("".join(str(text).split()))
        if not expected:
            return None
        recognized = normalize("".join(read(np.asarray(to_pillow(image).convert("RGB"))).split()))
        return max(0.0, 1 - edit_distance(recognized, expected) / len(expected))

    return per_image("ocr_accuracy", score, "text", is_network=True)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: insertions, deletions and replacements that turn one text into the
    other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        above, row = row, [i]
        for j, y in enumerate(b, start=1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
    return row[-1]


# --- fidelity -------------------------------------------------------------------------------------


def psnr() -> ImageReward:
    """Peak signal-to-noise ratio to the target in dB, at most 100. Blurred images earn more than
    sharp ones."""
    return _fidelity("psnr", measures.psnr)


def ssim() -> ImageReward:
    """Structural similarity to the target, -1 to 1, as scikit-image with a Gaussian window of 11
    pixels."""
    return _fidelity("ssim", measures.ssim)


def _fidelity(name: str, measure: Callable[..., Tensor]) -> ImageReward:
    def score(image: Image, target: Any) -> float:
        if not isinstance(target, Tensor) or target.shape != image.shape:
            got = list(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(
                f"the target is {got} and the image {list(image.shape)}; both need one shape"
            )
        similarity = measure(quantize(image)[None], quantize(target)[None])
        return float(similarity.clamp(max=MAX_PSNR_DB))

    return per_image(name, score, "target")


# --- shared ---------------------------------------------------------------------------------------


def per_image(
    name: str, score: Callable[..., float | None], *columns: str, is_network: bool = False
) -> ImageReward:
    """Return a reward function ``name(images, **columns)`` that scores one image at a time: None if
    a cell is missing, NaN if a pixel is not finite.

    ``is_network``: without a deadline, since a retry after it would start a second forward pass
    beside the first.
    """

    def score_row(image: Image, *cells: Any) -> float | None:
        if any(cell is None for cell in cells):
            return None
        return score(image, *cells) if image.isfinite().all() else NAN

    def reward(images: Sequence[Image], **data: Sequence[Any]) -> list[float | None]:
        rows = zip(images, *(data[name] for name in columns), strict=True)
        return [score_row(*row) for row in rows]

    reward.__name__ = name
    # The signature is what tells FunctionReward which columns of the data to pass.
    kind = inspect.Parameter.KEYWORD_ONLY
    arguments = [inspect.Parameter(argument, kind) for argument in ("images", *columns)]
    reward.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    if is_network:
        reward.timeout_s = None  # type: ignore[attr-defined]
    return reward
