"""Whole runs of networks that restore images, on crops of 8 x 8: images in a folder, networks,
rewards and a config."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.modalities.restoration.fakes import TinyNetwork, disturb
from torch import Tensor, nn

from gruppo import api
from gruppo.build import Parts, build
from gruppo.config.schema import Config
from gruppo.errors import GruppoError, as_flag
from gruppo.trainer import checkpoint, loop
from gruppo.trainer.run import Run
from gruppo.types import Prompt

SIDE = 24
"""Pixels a side of an image, of which a crop has 8."""
ACTION = "low_resolution:grid=2,std=0.1,detached=false"
"""2 x 2 numbers a channel, through which a policy gradient reaches the network."""


def here(name: str) -> str:
    """Something of this file, as a config names it."""
    return f"{Path(__file__).resolve()}:{name}"


NETWORK = f"restore:{here('TinyNetwork')}"


def write_images(folder: Path, count: int = 8, *, side: int = SIDE, mode: str = "RGB") -> Path:
    """Smooth pictures with an edge, each its own."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        generator = torch.Generator().manual_seed(n)
        coarse = torch.rand(3, 4, 4, generator=generator)
        picture = nn.functional.interpolate(coarse[None], (side, side), mode="bilinear")[0]
        picture[:, :, side // 2 + n % 3 :] *= 0.5
        pixels = (picture * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).convert(mode).save(folder / f"{n}.png")
    return folder


def degraded(folder: Path, options: str = "noise=25,crop=8") -> str:
    """The name of data with images of ``folder``, which are written where they are not there."""
    images = folder / "images"
    if not images.exists():
        write_images(images)
    return f"degrade:{images}:{options}"


def config(folder: Path, **changes: Any) -> Config:
    """A run in ``folder`` of two prompts and four samples a step, at PSNR."""
    defaults = {
        "model": NETWORK,
        "data": degraded(folder),
        "reward": ["psnr"],
        "steps": 4,
        "name": "run",
        "runs_dir": str(folder / "runs"),
        "compute": "float32",
        # a process that imports this file, and torch with it, takes 3 s of CPU time
        "scoring__isolate": False,
        "show_samples_every": 0,
        "objective__kl": "exact",
        "objective__clip_unit": "nats",
        "objective__clip_low": 1.0,
        "objective__clip_high": 1.0,
        "rollout__prompts": 2,
        "rollout__group_size": 4,
        "restoration__action": ACTION,
        "optim__lr": 1e-3,
        "prompts__held_out_fraction": 0.3,
        "evaluation__prompts": 0,
        "saving__every": 0,
    }
    if changes.get("stage__sup_coef") or any(stage.sup_coef for stage in changes.get("stages", ())):
        defaults["supervised__batch"] = 3
    if "objective" in changes:
        defaults = {
            name: value for name, value in defaults.items() if not name.startswith("objective__")
        }
    if not str(changes.get("model", NETWORK)).startswith("restore:"):
        defaults.pop("restoration__action")
    return api.change(Config(), defaults | changes)


def built(
    folder: Path, *, is_disturbed: bool = False, parts: Parts | None = None, **changes: Any
) -> Run:
    """``is_disturbed``: with other weights than the reference's, so that no term has a gradient of
    0."""
    run, _ = build(config(folder, **changes), parts or Parts())
    if is_disturbed:
        disturb(run.policy.module, 0.2)
        with torch.no_grad():  # what is fixed stays at 0
            for parameter in (
                p for p in run.policy.module.action.parameters() if not p.requires_grad
            ):
                parameter.zero_()
    return run


def trained(folder: Path, *, parts: Parts | None = None, **changes: Any) -> Path:
    return api.start(config(folder, **changes), parts or Parts()).folder


def in_double(run: Run) -> Run:
    """The run in float64: policy and reference."""
    run.policy.module.double()
    if run.reference is not None:
        run.reference.module.double()
    return run


def gradient(run: Run) -> Tensor:
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in run.parameters
        ]
    )


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def stopped_and_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, after: int, **changes: Any
) -> Path:
    """The run of ``trained``, to which a signal comes in the update of step ``after``."""
    real = loop.learn

    def interrupted(run: Run, *arguments: Any) -> Any:
        if run.state.step + 1 == after:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, *arguments)

    with monkeypatch.context() as patch, pytest.raises(loop.Stopped):
        patch.setattr(loop, "learn", interrupted)
        trained(folder, **changes)
    assert checkpoint.steps(folder / "runs/run/checkpoints") == [after]
    return api.start(folder / "runs/run").folder


# --- networks, named as file.py:class -------------------------------------------------------------


class Halves(nn.Module):
    """Returns pictures of half the size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Raises(TinyNetwork):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such picture")


class Weightless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class BreaksOnSome(TinyNetwork):
    """NaN of pictures whose first pixel is bright; of a grey one it is well."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.where(x[:, :1, :1, :1] > 0.55, torch.nan, y)


class BreaksAlways(TinyNetwork):
    """NaN of every picture but one that is all grey."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.where(x.std(dim=(1, 2, 3), keepdim=True) > 0, torch.nan, y)


# --- rewards and degradations, named as file.py:function ------------------------------------------


def bright(images: Sequence[Tensor], **_: Any) -> list[float]:
    return [float(image.mean()) for image in images]


def sometimes_nan(images: Sequence[Tensor], **_: Any) -> list[float]:
    return [float("nan") if n % 4 == 0 else float(image.mean()) for n, image in enumerate(images)]


def half(pictures: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """A degradation."""
    assert len(pictures) == len(prompts)
    return 0.5 * pictures


NO_FUNCTION = 3


def said_in_one_line(call: Callable[[], Any], kind: type[GruppoError]) -> str:
    """What the command line says of an error; it is one line."""
    with pytest.raises(kind) as error:
        call()
    message = error.value.message(as_flag)
    assert "\n" not in message
    return message
