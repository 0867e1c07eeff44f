"""Whole runs of image models on pictures of 8 x 8: a denoiser in a folder, data, rewards and a
config."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gruppo import api
from gruppo.build import Parts, build
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.data.digits import labelled_images
from gruppo.data.source import IndexedSource
from gruppo.modalities.diffusion import ClassLabels, DenoiserPolicy, DenoisingUNet, FlowSchedule
from gruppo.trainer import checkpoint, loop
from gruppo.trainer.run import Run

SHAPE, CLASSES = (3, 8, 8), 3
DIMS = 192


def labelled(count: int = 30, *, seed: int = 0) -> IndexedSource:
    """Random bytes in three classes, of which a third is held out."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=generator)
    return labelled_images(images, torch.arange(count) % CLASSES, seed=0, held_out_fraction=0.3)


def write_images(folder: Path, count: int = 24) -> Path:
    """Pictures in three subfolders, each class of a colour of its own, with noise."""
    from PIL import Image

    generator = torch.Generator().manual_seed(1)
    for n in range(count):
        place = folder / "abc"[n % CLASSES]
        place.mkdir(parents=True, exist_ok=True)
        picture = torch.randint(0, 64, (8, 8, 3), dtype=torch.uint8, generator=generator)
        picture[..., n % CLASSES] += 160
        Image.fromarray(picture.numpy()).save(place / f"{n}.png")
    return folder


@cache
def denoiser(*, dropped: float = 0.0) -> str:
    """The folder of a UNet whose last layer is not zero, made once a session."""
    folder = Path(tempfile.mkdtemp(prefix="gruppo-denoiser-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(0)
    module = DenoisingUNet(SHAPE, CLASSES, width=8)
    torch.nn.init.normal_(module.conv_out[-1].weight, std=0.1)
    labels = ClassLabels(CLASSES, dropped=dropped)
    DenoiserPolicy(
        module, SHAPE, schedule=FlowSchedule(), condition=labels, weighting="clean", middle="middle"
    ).save(folder)
    return str(folder)


def config(folder: Path, **changes: Any) -> Config:
    """A run in ``folder`` of three prompts and four pictures a step; its data are given as an
    object."""
    defaults = {
        "model": denoiser(),
        "data": IN_MEMORY,
        "reward": [reward("bright")],
        "steps": 4,
        "name": "run",
        "runs_dir": str(folder / "runs"),
        # a process that imports this file, and torch with it, takes 3 s of CPU time
        "scoring__isolate": False,
        "show_samples_every": 2,
        "diffusion__steps": 4,
        "objective__kl": "exact",
        "objective__clip_unit": "nats",
        "objective__clip_low": 1.0,
        "objective__clip_high": 1.0,
        "rollout__prompts": 3,
        "rollout__group_size": 4,
        "optim__lr": 1e-3,
        "evaluation__prompts": 3,
        "evaluation__every": 2,
        "saving__every": 2,
        "saving__keep": 1,
    }
    if "objective" in changes:
        defaults = {
            name: value for name, value in defaults.items() if not name.startswith("objective__")
        }
    return api.change(Config(), defaults | changes)


def built(folder: Path, **changes: Any) -> Run:
    return build(config(folder, **changes), Parts(data=labelled()))[0]


def trained(folder: Path, **changes: Any) -> Path:
    chosen = config(folder, **changes)
    return api.start(chosen, parts_of(chosen)).folder


def parts_of(chosen: Config) -> Parts:
    """The data as an object, where they have no name."""
    return Parts(data=labelled() if chosen.data == IN_MEMORY else None)


class Killed(BaseException):
    """What ends a process at once, as far as a test can see."""


def stopped_and_resumed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    after: int,
    is_killed: bool = False,
    **changes: Any,
) -> Path:
    """The run of ``trained``, to which a signal comes in the update of step ``after``; or that ends
    in the next one's without a word, where step ``after`` was saved."""
    real = loop.learn

    def interrupted(run: Run, *arguments: Any) -> Any:
        if is_killed and run.state.step == after:
            raise Killed
        if run.state.step + 1 == after and not is_killed:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed if is_killed else loop.Stopped):
        patch.setattr(loop, "learn", interrupted)
        trained(folder, **changes)
    assert checkpoint.steps(folder / "runs/run/checkpoints") == [after]
    return api.start(folder / "runs/run", parts_of(config(folder, **changes))).folder


# --- rewards, named as file.py:function -----------------------------------------------------------


def reward(name: str) -> str:
    return f"{Path(__file__).resolve()}:{name}"


def bright(images: Sequence[Tensor], **_: Any) -> list[float]:
    return [float(image.mean()) for image in images]


def dark(images: Sequence[Tensor], **_: Any) -> list[float]:
    return [-value for value in bright(images)]


def whole_numbers(images: Sequence[Tensor], **_: Any) -> list[int]:
    """0 or 1, as an int."""
    return [int(float(image[..., :4].mean()) > float(image[..., 4:].mean())) for image in images]


def one_too_many(images: Sequence[Tensor], **_: Any) -> list[float]:
    return [0.0] * (len(images) + 1)


def needs_images(completions: Sequence[Any], images: Sequence[Tensor]) -> list[float]:
    """Asks for pictures by name."""
    return [0.0] * len(images)
