"""A denoiser in a folder: its weights, and what they are called with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.modalities.diffusion.conditions import ClassLabels
from gruppo.modalities.diffusion.paths import Diffusion, Flow
from gruppo.modalities.diffusion.unet import UNet
from gruppo.types import GruppoError

if TYPE_CHECKING:
    from gruppo.modalities.diffusion.policy import DenoiserPolicy

WEIGHTS, SETTINGS = "model.safetensors", "denoiser.json"
PATHS = {"flow": Flow, "diffusion": Diffusion}


def save_denoiser(policy: DenoiserPolicy, folder: FilePath) -> None:
    """The weights and a description; of a module that is not ours, without its sizes."""
    condition, path, module = policy.denoiser.condition, policy.denoiser.path, policy.module
    if not isinstance(condition, ClassLabels | None) or not isinstance(path, Flow | Diffusion):
        raise GruppoError(
            f"a folder holds ClassLabels and a Flow or Diffusion, and this policy has a {type(condition).__name__} and "
            f"a {type(path).__name__}. Save policy.module by yourself."
        )
    said = {
        "shape": policy.denoiser.shape,
        "predicts": policy.denoiser.predicts,
        "weighting": policy.weighting,
        "middle": policy.denoiser.network.middle,
        "path": {"kind": "flow" if path.is_flow else "diffusion", **asdict(path)},
        "condition": None if condition is None else {"classes": condition.names, "dropped": condition.dropped},
        "unet": module.sizes if isinstance(module, UNet) else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in module.state_dict().items()}, folder / WEIGHTS)
    (folder / SETTINGS).write_text(json.dumps(said, indent=1), encoding="utf-8")


def load_denoiser(folder: str | FilePath, module: nn.Module | None = None) -> DenoiserPolicy:
    """The policy that was saved; a module that is not our UNet is given, and gets the weights."""
    from gruppo.modalities.diffusion.policy import DenoiserPolicy

    folder = FilePath(folder)
    try:
        said = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GruppoError(
            f"{folder} holds no denoiser: {reason}. It needs {SETTINGS} and {WEIGHTS}, as "
            "policy.save(folder) writes them."
        ) from None
    try:
        if module is None and said["unet"] is None:
            raise GruppoError(
                f"{folder} holds the weights of a module that is not ours. Give load_denoiser its module."
            )
        if module is None:
            sizes = dict(said["unet"])
            module = UNet(sizes.pop("shape"), sizes.pop("classes"), **sizes)
        path, labels = dict(said["path"]), said["condition"]
        chosen: dict[str, Any] = {name: said[name] for name in ("predicts", "weighting", "middle")}
        chosen["path"] = PATHS[path.pop("kind")](**path)
        chosen["condition"] = None if labels is None else ClassLabels(labels["classes"], dropped=labels["dropped"])
        shape = said["shape"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise GruppoError(
            f"{folder / SETTINGS} is damaged or of another version ({type(error).__name__}: {error}). Save the model "
            "again with policy.save(folder), or give another --model."
        ) from None
    _check_fits(module, weights, folder)
    module.load_state_dict(weights)
    return DenoiserPolicy(module, shape, **chosen)


def _check_fits(module: nn.Module, weights: Mapping[str, Tensor], folder: FilePath) -> None:
    held, given = ({name: tuple(x.shape) for name, x in of.items()} for of in (module.state_dict(), weights))
    if odd := sorted(held.items() ^ given.items()):
        name = odd[0][0]
        raise GruppoError(
            f"the weights in {folder} are of another module: {name} is {given.get(name, 'missing')} there and "
            f"{held.get(name, 'unknown')} here, one of {len({n for n, _ in odd})} differences. Give the module that "
            "was saved."
        )
