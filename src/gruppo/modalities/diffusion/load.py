"""A denoiser in a folder: its weights, and how they are called."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from gruppo.modalities.common.state_dict import load_strictly
from gruppo.modalities.diffusion.denoiser import Denoiser
from gruppo.modalities.diffusion.encoders import ClassLabels
from gruppo.modalities.diffusion.schedules import DiffusionSchedule, FlowSchedule
from gruppo.modalities.diffusion.unet import DenoisingUNet
from gruppo.types import GruppoError

WEIGHTS, SETTINGS = "model.safetensors", "denoiser.json"


def save_denoiser(denoiser: Denoiser, weighting: str, folder: Path) -> None:
    """Write the weights and the settings; the sizes of a module only where it is a ``DenoisingUNet``."""
    condition, schedule, module = denoiser.condition, denoiser.schedule, denoiser.module
    if not isinstance(condition, ClassLabels | None) or type(schedule) not in (FlowSchedule, DiffusionSchedule):
        raise GruppoError(
            f"a folder can hold ClassLabels and a FlowSchedule or DiffusionSchedule, and this policy has a "
            f"{type(condition).__name__} and a {type(schedule).__name__}. Save policy.module yourself."
        )
    settings = {
        "shape": denoiser.shape,
        "predicts": denoiser.predicts,
        "weighting": weighting,
        "middle": denoiser.middle,
        "path": {"kind": "flow" if schedule.is_flow else "diffusion", **asdict(schedule)},
        "condition": None if condition is None else {"classes": condition.names, "dropped": condition.dropped},
        "unet": module.sizes if isinstance(module, DenoisingUNet) else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in module.state_dict().items()}, folder / WEIGHTS)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1), encoding="utf-8")


def read_denoiser(folder: Path, module: nn.Module | None) -> tuple[nn.Module, list[int], dict[str, Any]]:
    """Module with its weights, shape of a state, and the other arguments of the policy that was saved."""
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GruppoError(
            f"{folder} holds no denoiser: {reason}. It needs {SETTINGS} and {WEIGHTS}, as policy.save(folder) writes "
            "them."
        ) from None
    try:
        if module is None and settings["unet"] is None:
            raise GruppoError(f"{folder} holds the weights of a module of your own. Give load_denoiser that module.")
        if module is None:
            sizes = dict(settings["unet"])
            module = DenoisingUNet(sizes.pop("shape"), sizes.pop("classes"), **sizes)
        options: dict[str, Any] = {name: settings[name] for name in ("predicts", "weighting", "middle")}
        schedule, labels = dict(settings["path"]), settings["condition"]
        kinds = {"flow": FlowSchedule, "diffusion": DiffusionSchedule}
        options["schedule"] = kinds[schedule.pop("kind")](**schedule)
        options["condition"] = None if labels is None else ClassLabels(labels["classes"], dropped=labels["dropped"])
        shape = settings["shape"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise GruppoError(
            f"{folder / SETTINGS} is damaged or of another version ({type(error).__name__}: {error}). Save the model "
            "again with policy.save(folder), or give another --model."
        ) from None
    load_strictly(module, weights, str(folder))
    return module, shape, options
