"""Rewards of restored images: fidelity to the clean one, bytes saved, text that can be read.

In TRL's calling convention: ``images`` [C, H, W] in [0, 1], ``target`` the clean ones, ``prompts`` the degraded ones.
All are read as a file of 8 bits would hold them. With ``patch``, a reward is one of each square of so many pixels; the
policy then needs an action of each square, and ``--objective.credit position``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.core import images as measures
from gruppo.core.images import as_saved
from gruppo.loading import import_extra
from gruppo.rewards.images import NAN, Image, ImageReward, is_picture, jpeg_bytes, named, to_pillow
from gruppo.rewards.ocr import Read, edits, rapidocr
from gruppo.types import DataError, GruppoError, Prompt, Rollouts

Delta = Literal["none", "input", "reference"]
Against = Literal["target", "input", "reference"]
Measure = Callable[[Float[Tensor, "1 C H W"], Float[Tensor, "1 C H W"], int], Tensor]
"""Of an image, the clean one, and a patch's side (0: one number)."""
MOST_DB = 100.0
"""Of images that are equal, whose PSNR is infinite: no number to learn from."""


def psnr(*, delta: Delta = "none", patch: int = 0) -> Any:
    """Peak signal-to-noise ratio to the target in dB, at most 100.

    ``delta``: above that of the degraded image ("input"), or of the frozen network's, which is the column "reference".
    A group's mean takes a delta out again; it tells how much was won. Blurred images earn more than sharp ones.
    """
    return _fidelity("psnr", _psnr, delta, patch)


def ssim(*, delta: Delta = "none", patch: int = 0) -> Any:
    """Structural similarity to the target, -1 to 1, as scikit-image with a Gaussian window of 11 pixels.

    Of a patch: the mean of the map over its pixels, whose windows look over its edges. ``delta`` as in ``psnr``.
    """
    return _fidelity("ssim", _ssim, delta, patch)


def _psnr(image: Tensor, clean: Tensor, patch: int) -> Tensor:
    return measures.psnr(image, clean, patch=patch).clamp(max=MOST_DB)


def _ssim(image: Tensor, clean: Tensor, patch: int) -> Tensor:
    return measures.ssim(image, clean, patch=patch)


def _fidelity(name: str, measure: Measure, delta: Delta, patch: int) -> Any:
    if delta not in get_args(Delta):
        raise GruppoError(f"{name} got delta={delta!r}; it needs none, input or reference.")
    if not isinstance(patch, int) or patch < 0:
        raise GruppoError(f"{name} got patch={patch!r}; it needs a whole number of pixels, or 0 for one number.")
    full = name if delta == "none" else f"{name}_gain"
    if patch:
        return PatchReward(full, measure, delta, patch)

    def scored(images: Sequence[Image], target: Sequence[Any], others: Sequence[Any]) -> list[float | None]:
        return [_score(measure, *row) for row in zip(images, target, others, strict=True)]

    def absolute(images: Sequence[Image], target: Sequence[Any], **_: Any) -> list[float | None]:
        return scored(images, target, [NOTHING] * len(images))

    def over_input(
        images: Sequence[Image], target: Sequence[Any], prompts: Sequence[Any], **_: Any
    ) -> list[float | None]:
        return scored(images, target, prompts)

    def over_reference(
        images: Sequence[Image], target: Sequence[Any], reference: Sequence[Any], **_: Any
    ) -> list[float | None]:
        return scored(images, target, reference)

    by_delta: dict[str, ImageReward] = {"none": absolute, "input": over_input, "reference": over_reference}
    return named(by_delta[delta], full)


NOTHING = object()
"""In place of an image that a fidelity is measured from, where it is absolute."""


def _score(measure: Measure, image: Image, target: Any, other: Any) -> float | None:
    """None without a target; NaN of an image with one."""
    found = _map(measure, image, target, other, 0)
    return None if found is None else float(found)


def _map(measure: Measure, image: Image, target: Any, other: Any, patch: int) -> Tensor | None:
    """Of one image, less the other's; None where nothing can be compared."""
    if target is None or other is None:
        return None
    clean = _as_given(target, image, "target")
    if not is_picture(image):
        return torch.full_like(measure(clean, clean, patch)[0], NAN)
    found = measure(as_saved(image)[None], clean, patch)[0]
    return found if other is NOTHING else found - measure(_as_given(other, image, "reference"), clean, patch)[0]


def _as_given(picture: Any, image: Image, what: str) -> Float[Tensor, "1 C H W"]:
    if not isinstance(picture, Tensor) or picture.shape != image.shape:
        got = f"{list(picture.shape)}" if isinstance(picture, Tensor) else f"a {type(picture).__name__}"
        raise ValueError(f"the {what} is {got} and the image {list(image.shape)}; both need one shape")
    return as_saved(picture)[None]


class PatchReward:
    """A fidelity of each square of ``patch`` pixels, row by row from the top left: [B, T], one for each action.

    Divided by the number of squares, so that their sum, which is a row's reward, is their mean.
    """

    gives_steps = True

    def __init__(self, name: str, measure: Measure, delta: Delta, patch: int) -> None:
        self.name, self.measure, self.delta, self.patch = name, measure, delta, patch

    @property
    def columns(self) -> tuple[str, ...]:
        """What it compares with."""
        return ("target", *(["reference"] if self.delta == "reference" else []))

    def check(self, columns: Collection[str]) -> None:
        """Refuse data without what is compared with."""
        if missing := [name for name in self.columns if name not in columns]:
            raise DataError(
                f"reward {self.name!r} with patch={self.patch} compares with {missing[0]!r}, which the data do not "
                "have. Give clean images as targets, and wrap the data in WithReference for a reference."
            )

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B T"]:
        rows = [
            self._row(image, rollouts.prompts[group], rollouts.mask.shape[1])
            for image, group in zip(rollouts.completions, rollouts.group_ids.tolist(), strict=True)
        ]
        return torch.where(rollouts.mask, torch.stack(rows), NAN)

    def _row(self, image: Image, prompt: Prompt, columns: int) -> Float[Tensor, "T"]:
        other = {"none": NOTHING, "input": prompt.inputs, "reference": prompt.meta.get("reference")}[self.delta]
        height, width = image.shape[-2:]
        if height % self.patch or width % self.patch or (height // self.patch) * (width // self.patch) != columns:
            raise GruppoError(
                f"reward {self.name!r} with patch={self.patch} makes {height / self.patch:g} x {width / self.patch:g} "
                f"squares of images of {height} x {width}, and the policy has {columns} actions. Set patch to the side "
                "of the policy's patches, or leave it out."
            )
        found = _map(self.measure, image, prompt.target, other, self.patch)
        return torch.full((columns,), NAN) if found is None else found.flatten().float() / columns


# --- bytes ------------------------------------------------------------------------------------------------------------


def jpeg_saving(quality: int = 90, *, against: Against = "reference") -> ImageReward:
    """Share of JPEG bytes saved: 1 - bytes / bytes of the other image, both without their header.

    ``against``: the frozen network's image (the column "reference"), the degraded one, or the target. A share weighs a
    plain picture and a rich one alike, where bytes would not. A blank image earns 1: add a fidelity.
    """
    if not isinstance(quality, int) or not 1 <= quality <= 100:
        raise GruppoError(f"jpeg_saving got quality={quality!r}; it needs a whole number from 1 to 100, such as 90.")
    if against not in get_args(Against):
        raise GruppoError(f"jpeg_saving got against={against!r}; it needs target, input or reference.")
    import_extra("PIL", "images", "jpeg_saving")

    def saved(image: Image, other: Any) -> float | None:
        if other is None:
            return None
        if not is_picture(image):
            return NAN
        header = _header_bytes(tuple(image.shape), quality)
        first = jpeg_bytes(_as_given(other, image, against)[0], quality) - header
        return 1 - (jpeg_bytes(image, quality) - header) / max(first, 1)

    def scored(images: Sequence[Image], others: Sequence[Any]) -> list[float | None]:
        return [saved(*row) for row in zip(images, others, strict=True)]

    def than_target(images: Sequence[Image], target: Sequence[Any], **_: Any) -> list[float | None]:
        return scored(images, target)

    def than_input(images: Sequence[Image], prompts: Sequence[Any], **_: Any) -> list[float | None]:
        return scored(images, prompts)

    def than_reference(images: Sequence[Image], reference: Sequence[Any], **_: Any) -> list[float | None]:
        return scored(images, reference)

    by_other: dict[str, ImageReward] = {"target": than_target, "input": than_input, "reference": than_reference}
    return named(by_other[against], "jpeg_saving")


@cache
def _header_bytes(shape: Sequence[int], quality: int) -> int:
    """Of a black image, which has little else."""
    return jpeg_bytes(torch.zeros(*shape), quality)


# --- quality without anything to compare with ---


def brisque() -> ImageReward:
    """1 - BRISQUE / 100: how natural an image looks, by statistics of its detail; nothing is compared with.

    Mittal et al. 2012, the network of the package brisque (extra ``quality``). About 1 for a good photograph, 0 for a
    bad one, without a bound below. An image without detail has no score. It knows whole photographs alone (at 64 pixels
    a noisy crop may earn more than a clean one), and what is optimised for it learns its gaps: keep a fidelity beside.
    """
    model = _natural_scenes()

    def score(image: Image) -> float:
        if not is_picture(image):
            return NAN
        levels = np.asarray(to_pillow(image).convert("RGB"))
        with np.errstate(all="ignore"):  # a flat image divides by 0, and has no score
            found = 1 - model.score(levels) / 100
        return float(found) if levels.std() > 0 else NAN

    def reward(images: Sequence[Image], **_: Any) -> list[float | None]:
        return [score(image) for image in images]

    return named(reward, "brisque")


@cache
def _natural_scenes() -> Any:
    package = import_extra("brisque", "quality", "brisque")

    class Flat(package.BRISQUE):  # type: ignore[name-defined]
        """Its features are arrays of one number, of which numpy 2.4 makes no float."""

        def scale_features(self, features: Any) -> Any:
            return super().scale_features([np.ravel(one)[0] for one in features])

    return Flat(url=False)


# --- text -------------------------------------------------------------------------------------------------------------


def ocr_accuracy(read: Read | None = None, *, line: bool = True, ignore_case: bool = False) -> ImageReward:
    """1 - edits / characters between what is read and the column ``text``, at least 0; spaces do not count.

    One minus the character error rate, cut at 0. No clean image is needed. A row without a text is not scored. ``read``
    is rapidocr (extra ``ocr``) unless given; ``line``: every image is one line of text.
    """
    reader = read or rapidocr(line=line)

    def score(image: Image, text: Any) -> float | None:
        wanted = _letters(text, ignore_case) if text is not None else ""
        if not wanted:
            return None
        if not is_picture(image):
            return NAN
        found = _letters(reader(np.asarray(to_pillow(image).convert("RGB"))), ignore_case)
        return max(0.0, 1 - edits(found, wanted) / len(wanted))

    def reward(images: Sequence[Image], text: Sequence[Any], **_: Any) -> list[float | None]:
        return [score(*row) for row in zip(images, text, strict=True)]

    return named(reward, "ocr_accuracy", is_waited_for=True)


def _letters(text: Any, ignore_case: bool) -> str:
    letters = "".join(str(text).split())
    return letters.casefold() if ignore_case else letters
