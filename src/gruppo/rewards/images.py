"""Built-in rewards of images, in TRL's calling convention: ``images`` is a list of tensors [C, H,
W] in [0, 1].

Images are read as a file of 8 bits would hold them, whatever the policy returns. One with a NaN is
NaN, a counted failure: as a file it would be black, which compresses best. Restoration rewards
compare with ``target`` (the clean images), ``prompts`` (the degraded ones) or the column
``reference`` (the frozen network's). Each docstring states what a policy can gain by cheating.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core import images as measures
from gruppo.core.images import MAX_PSNR_DB, quantize, to_pillow
from gruppo.loading import import_extra
from gruppo.types import GruppoError, Rollouts

Image = Float[Tensor, "C H W"]
ImageReward = Callable[..., list[float | None]]
Delta = Literal["none", "input", "reference"]
Against = Literal["target", "input", "reference"]
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


def jpeg_saving(quality: int = 90, *, against: Against = "reference") -> ImageReward:
    """Share of JPEG bytes saved: 1 - bytes / bytes of the other image, both without their header.

    ``against``: the frozen network's image (the column "reference"), the degraded one, or the
    target. A share weighs simple and detailed images alike, where bytes would not. A blank image
    earns 1: add a fidelity.
    """
    size = jpeg_size(quality, without_header=True)
    column = _column("jpeg_saving", "against", against, get_args(Against))

    def score(image: Image, other: Any) -> float:
        return 1 - size(image) / max(size(_saved_like(image, other, against)[0]), 1)

    return per_image("jpeg_saving", score, column)


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


def _column(reward: str, option: str, value: str, known: Sequence[str]) -> str:
    """The column of the image that a restored one is compared with."""
    if value not in known:
        raise GruppoError(f"{reward} got {option}={value!r}; it needs one of {', '.join(known)}.")
    return "prompts" if value == "input" else value


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


def symmetry(axis: Literal["vertical", "horizontal"] = "vertical") -> ImageReward:
    """Correlation of the image with its mirror image, -1 to 1; 0 for a blank image, in which
    nothing is symmetric.

    ``axis``: of the mirror; "vertical" mirrors left to right. A single centered dot earns as much
    as a face.
    """
    if axis not in ("vertical", "horizontal"):
        raise GruppoError(
            f"symmetry got axis={axis!r}; it needs vertical (left to right) or horizontal."
        )
    side = -1 if axis == "vertical" else -2

    def score(image: Image) -> float:
        image = quantize(image).double()
        from_mean = image - image.mean()
        if image.amin() == image.amax():
            return 0.0
        return float((from_mean * from_mean.flip(side)).mean() / from_mean.square().mean())

    return per_image("symmetry", score)


def brisque() -> ImageReward:
    """1 - BRISQUE / 100: how natural an image looks, by statistics of its detail, without a
    reference image.

    Mittal et al. 2012, the network of the package brisque (extra ``quality``). About 1 for a good
    photograph, 0 for a bad one, without a lower bound. An image without detail is NaN. The model
    knows only whole photographs (at 64 pixels a noisy crop may earn more than a clean one), and
    optimising for it finds its gaps: combine it with a fidelity.
    """
    model = import_extra("brisque", "quality", "brisque").BRISQUE(url=False)
    scale = model.scale_features
    # The package's features are arrays of one number, which numpy 2.4 no longer converts to float.
    model.scale_features = lambda features: scale([np.ravel(feature)[0] for feature in features])

    def score(image: Image) -> float:
        levels = np.asarray(to_pillow(image).convert("RGB"))
        with np.errstate(all="ignore"):  # a flat image divides by 0
            distortion = model.score(levels) / 100
        return float(1 - distortion) if levels.std() > 0 else NAN

    return per_image("brisque", score)


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
        package = import_extra("rapidocr", "ocr", "ocr_match")
        import_extra("onnxruntime", "ocr", "ocr_match")
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


def ocr_match(read: OcrReader | None = None, *, line: bool = False) -> ImageReward:
    """``ocr_accuracy`` of images with any layout, whatever the case, as in Flow-GRPO (arXiv
    2505.05470)."""
    reward = ocr_accuracy(read, line=line, ignore_case=True)
    reward.__name__ = "ocr_match"
    return reward


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


def psnr(*, delta: Delta = "none", patch: int = 0) -> Any:
    """Peak signal-to-noise ratio to the target in dB, at most 100.

    ``delta``: minus that of the degraded image ("input") or of the frozen network's (the column
    "reference"). A group's mean cancels a delta; it shows the improvement. ``patch``: one reward
    per square of this many pixels, which needs a policy with one action per square and
    ``--objective.credit position``. Blurred images earn more than sharp ones.
    """
    return _fidelity("psnr", measures.psnr, delta, patch)


def ssim(*, delta: Delta = "none", patch: int = 0) -> Any:
    """Structural similarity to the target, -1 to 1, as scikit-image with a Gaussian window of 11
    pixels.

    For a patch: the mean of the map over its pixels, whose windows extend over its edges. ``delta``
    as of ``psnr``.
    """
    return _fidelity("ssim", measures.ssim, delta, patch)


def _fidelity(name: str, measure: Callable[..., Tensor], delta: Delta, patch: int) -> Any:
    column = _column(name, "delta", delta, get_args(Delta))
    if patch < 0:
        raise GruppoError(
            f"{name} got patch={patch!r}; it needs a whole number of pixels, or 0 for one number."
        )

    def of(image: Image, clean: Tensor) -> Tensor:
        return measure(image, clean, patch=patch)[0].clamp(max=MAX_PSNR_DB)

    def score(image: Image, target: Any, *other: Any) -> Tensor:
        """[] or [patches]: the measure of the image, minus that of the other image."""
        clean = _saved_like(image, target, "target")
        value = of(quantize(image)[None], clean)
        for one in other:
            value = value - of(_saved_like(image, one, delta), clean)
        return value

    columns = ["target"]
    if delta != "none":
        name = f"{name}_gain"
        columns.append(column)
    if patch:
        return PatchReward(name, score, columns, patch)
    return per_image(name, lambda *images: float(score(*images)), *columns)


class PatchReward:
    """A fidelity of each square of ``patch`` pixels, row by row from the top left: [B, T], one per
    action.

    Divided by the number of squares, so that their sum, which is the row's reward, is their mean.
    """

    scores_steps = True

    def __init__(
        self, name: str, score: Callable[..., Any], inputs: Sequence[str], patch: int
    ) -> None:
        self.name, self.score, self.inputs, self.patch = name, score, inputs, patch
        self.columns = tuple(column for column in inputs if column != "prompts")

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B T"]:
        rewards = torch.full(rollouts.mask.shape, NAN)
        count = rewards.shape[1]
        for row, image in enumerate(rollouts.completions):
            height, width = image.shape[-2:]
            if height % self.patch or width % self.patch or height * width != count * self.patch**2:
                raise GruppoError(f"""reward {self.name!r} with patch={self.patch} gives
                    {height / self.patch:g} x {width / self.patch:g} squares of images of {height} x
                    {width}, and the policy has {count} actions. Set patch to the side of the
                    policy's patches, or leave it out.""")
            prompt = rollouts.prompts[rollouts.group_ids[row]]
            cells = {**prompt.meta, "target": prompt.target, "prompts": prompt.inputs}
            scores = score_or_nothing(self.score, image, *map(cells.get, self.inputs))
            if isinstance(scores, Tensor):
                rewards[row] = scores.flatten() / count
        return rewards.masked_fill(~rollouts.mask, NAN)


def _saved_like(image: Image, other: Any, what: str) -> Float[Tensor, "1 C H W"]:
    """Quantize another image; ValueError unless it has the shape of ``image``."""
    if not isinstance(other, Tensor) or other.shape != image.shape:
        got = list(other.shape) if isinstance(other, Tensor) else f"a {type(other).__name__}"
        raise ValueError(
            f"the {what} is {got} and the image {list(image.shape)}; both need one shape"
        )
    return quantize(other)[None]


# --- shared ---------------------------------------------------------------------------------------


def per_image(
    name: str, score: Callable[..., float | None], *columns: str, is_network: bool = False
) -> ImageReward:
    """Return a reward function ``name(images, **columns)`` that scores one image at a time.

    ``is_network``: without a deadline, since a retry after it would start a second forward pass
    beside the first.
    """

    def reward(images: Sequence[Image], **data: Sequence[Any]) -> list[float | None]:
        rows = zip(images, *(data[name] for name in columns), strict=True)
        return [score_or_nothing(score, *row) for row in rows]

    reward.__name__ = name
    # The signature is what tells FunctionReward which columns of the data to pass.
    kind = inspect.Parameter.KEYWORD_ONLY
    arguments = [inspect.Parameter(argument, kind) for argument in ("images", *columns)]
    reward.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
    if is_network:
        reward.timeout_s = None  # type: ignore[attr-defined]
    return reward


def score_or_nothing(score: Callable[..., Any], image: Image, *cells: Any) -> Any:
    """Score an image; None where a cell is missing, NaN where a pixel is not finite."""
    if any(cell is None for cell in cells):
        return None
    return score(image, *cells) if image.isfinite().all() else NAN


def jpeg_bytes(image: Image, quality: int = 95) -> int:
    """The size of the image as a JPEG, in bytes."""
    file = io.BytesIO()
    to_pillow(image).save(file, "JPEG", quality=quality)
    return file.tell()
