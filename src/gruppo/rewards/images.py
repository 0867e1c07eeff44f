"""Rewards that read images, in TRL's calling convention: ``images`` is a list of tensors [C, H, W] in [0, 1].

Images are read as a file of 8 bits would hold them, whatever the policy hands over. One with a NaN is not scored: as a
file it would be black, which compresses best. What a policy can gain by cheating is stated with each.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.core.images import as_saved, to_bytes
from gruppo.core.images import brightness as mean_luma
from gruppo.loading import import_extra
from gruppo.types import GruppoError

Image = Float[Tensor, "C H W"]
ImageReward = Callable[..., list[float | None]]
Output = Literal["probability", "log_probability"]
MODES = {1: "L", 3: "RGB"}
NAN = float("nan")


def jpeg_compressibility(quality: int = 95, *, without_header: bool = False) -> ImageReward:
    """Minus the size of the image as a JPEG, in kB (1000 bytes): ddpo-pytorch's reward of this name.

    ``without_header``: bytes above those of a black image of the same size, which then earns 0. A black image earns
    most, and is found within a minute: add a reward that reads what the image shows, and a KL.
    """
    return _jpeg_reward("jpeg_compressibility", -1.0, quality, without_header)


def jpeg_incompressibility(quality: int = 95, *, without_header: bool = False) -> ImageReward:
    """The size of the image as a JPEG, in kB (1000 bytes). White noise earns most."""
    return _jpeg_reward("jpeg_incompressibility", 1.0, quality, without_header)


def _jpeg_reward(name: str, sign: float, quality: int, without_header: bool) -> ImageReward:
    if not isinstance(quality, int) or not 1 <= quality <= 100:
        raise GruppoError(f"{name} got quality={quality!r}; it needs a whole number from 1 to 100, such as 95.")
    import_extra("PIL", "images", name)

    def score(image: Image) -> float:
        header = _black_jpeg_bytes(tuple(image.shape), quality) if without_header else 0
        return sign * (jpeg_bytes(image, quality) - header) / 1000

    return _of_each(name, score)


def jpeg_bytes(image: Image, quality: int = 95) -> int:
    """The size of the image as a JPEG, in bytes."""
    file = io.BytesIO()
    to_pillow(image).save(file, "JPEG", quality=quality)
    return file.tell()


@cache
def _black_jpeg_bytes(shape: Sequence[int], quality: int) -> int:
    return jpeg_bytes(torch.zeros(*shape), quality)


def to_pillow(image: Image) -> Any:
    """The image as a file would hold it."""
    pillow = import_extra("PIL.Image", "images", "turning a tensor into an image file")
    if image.ndim != 3 or image.shape[0] not in MODES:
        raise ValueError(f"an image of shape {tuple(image.shape)}; it needs [1, H, W] or [3, H, W]")
    levels = to_bytes(image.detach().cpu()).permute(1, 2, 0).numpy()  # [H, W, C]
    return pillow.fromarray(levels[..., 0] if len(image) == 1 else levels, MODES[len(image)])


def brightness(target: float | None = None) -> ImageReward:
    """Mean luma, 0 (black) to 1 (white); or 1 - |mean luma - target|. A blank image of that brightness earns most."""
    if target is not None and not 0 <= target <= 1:
        raise GruppoError(f"brightness got target={target!r}; it needs a number from 0 (black) to 1 (white).")

    def score(image: Image) -> float:
        mean = float(mean_luma(as_saved(image)[None]))
        return mean if target is None else 1 - abs(mean - target)

    return _of_each("brightness", score)


def symmetry(axis: Literal["vertical", "horizontal"] = "vertical") -> ImageReward:
    """Correlation of the image with its mirror image, -1 to 1; of a blank one 0, since nothing in it is symmetric.

    ``axis``: where the mirror stands; "vertical" mirrors left to right. A single centred dot earns as much as a face.
    """
    if axis not in ("vertical", "horizontal"):
        raise GruppoError(f"symmetry got axis={axis!r}; it needs vertical (left to right) or horizontal.")
    side = -1 if axis == "vertical" else -2

    def score(image: Image) -> float:
        image = as_saved(image).double()
        if image.amin() == image.amax():
            return 0.0
        from_mean = image - image.mean()
        return float((from_mean * from_mean.flip(side)).mean() / from_mean.square().mean())

    return _of_each("symmetry", score)


def classifier(
    module: nn.Module,
    *,
    label: int | None = None,
    output: Output = "log_probability",
    floor: float | None = None,
    batch: int = 256,
    name: str = "classifier",
) -> ImageReward:
    """What a frozen classifier gives the asked class: its probability, or the logarithm, in nats.

    ``module`` maps images [b, C, H, W] in [0, 1] to logits [b, classes]. The class is ``label``, the same for all, or
    each row's in the column ``label`` (None there: not scored). ``floor``: the least that is given, so that a hopeless
    image does not outweigh all others. What the classifier takes for the class earns as much as the class does: let
    another one, of another architecture, judge.
    """
    if output not in ("probability", "log_probability"):
        raise GruppoError(f"{name} got output={output!r}; it needs probability or log_probability.")
    module.requires_grad_(False).eval()

    def given(images: Sequence[Image], labels: Sequence[Any]) -> list[float | None]:
        nats = log_probabilities(module, images, batch)
        nats = [row if is_picture(image) else row * NAN for row, image in zip(nats, images, strict=True)]
        asked = [None if label is None else row[int(label)] for row, label in zip(nats, labels, strict=True)]
        scores = [x if x is None or output == "log_probability" else x.exp() for x in asked]
        return [None if x is None else float(x if floor is None else x.clamp(min=floor)) for x in scores]

    def of_column(images: Sequence[Image], label: Sequence[Any], **_: Any) -> list[float | None]:
        return given(images, label)

    def of_one(images: Sequence[Image], **_: Any) -> list[float | None]:
        return given(images, [label] * len(images))

    return named(of_column if label is None else of_one, name, is_waited_for=True)


@torch.no_grad()
def log_probabilities(module: nn.Module, images: Sequence[Image], batch: int = 256) -> list[Float[Tensor, "classes"]]:
    """Nats of each class, of each image as it would be saved; on the CPU, in float64."""
    module.eval()  # whoever holds it too may have set it to train
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    found: list[Tensor] = []
    for start in range(0, len(images), batch):
        stack = torch.stack([as_saved(image) for image in images[start : start + batch]]).to(device)
        found += module(stack).double().log_softmax(dim=-1).cpu()
    return found


# --- how they are called ----------------------------------------------------------------------------------------------


def _of_each(name: str, score: Callable[[Image], float]) -> ImageReward:
    """A reward that looks at one image at a time."""

    def reward(images: Sequence[Image], **_: Any) -> list[float | None]:
        return [score(image) if is_picture(image) else NAN for image in images]

    return named(reward, name)


def is_picture(image: Image) -> bool:
    """Whether every pixel is a number."""
    return bool(image.isfinite().all())


def named(reward: ImageReward, name: str, *, is_waited_for: bool = False) -> ImageReward:
    """``is_waited_for``: without a deadline, since another forward would then start beside the first."""
    reward.__name__ = name
    if is_waited_for:
        reward.timeout_s = None  # type: ignore[attr-defined]
    return reward
