"""Weights of restoration networks in files: a policy's folder, and a network's weights alone. Always strict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.modalities.restoration.networks import DnCNN, UNet
from gruppo.types import GruppoError

WEIGHTS, SETTINGS = "model.safetensors", "restorer.json"


def save_restorer(module: nn.Module, settings: Mapping[str, Any], folder: Path) -> None:
    """The weights and the settings; of our networks their sizes too."""
    network: Any = module.get_submodule("network")
    said = dict(settings) | {"sizes": network.sizes if isinstance(network, DnCNN | UNet) else None}
    if isinstance(network, DnCNN | UNet):
        said["network"] = type(network).__name__.lower()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.detach().cpu().contiguous().clone() for name, value in module.state_dict().items()},
        folder / WEIGHTS,
    )
    (folder / SETTINGS).write_text(json.dumps(said, indent=1), encoding="utf-8")


def read_restorer(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and the weights of a folder that ``save_restorer`` wrote."""
    try:
        said = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
        said["action"]["kind"], said["channels"], said["network"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise GruppoError(
            f"{folder} holds no restoration policy: {reason}. It needs {SETTINGS} and {WEIGHTS}, as "
            "policy.save(folder) writes them."
        ) from None
    return said, weights


def load_network(network: nn.Module, path: str | Path) -> None:
    """A network's own weights: a .safetensors file, or the network in a policy's folder. Nothing is left out.

    In the dtype of the network. Another network's weights are refused with the names that are missing or unknown.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        weights = {
            name.removeprefix("network."): value
            for name, value in read_restorer(path)[1].items()
            if name.startswith("network.")
        }
    else:
        weights = read_weights(path)
    load_strictly(network, weights, str(path))


def read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise GruppoError(
            f"the weights {path} cannot be read: {reason}. Give a .safetensors file, or a folder of policy.save."
        ) from None


@torch.no_grad()
def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """All of the weights, none left out and none made up; the module is as it was if they do not fit."""
    held = module.state_dict()
    parts = {
        "missing": sorted(held.keys() - weights.keys()),
        "unknown": sorted(weights.keys() - held.keys()),
        "of another shape": sorted(
            name for name in held.keys() & weights.keys() if held[name].shape != weights[name].shape
        ),
    }
    if any(parts.values()):
        said = "; ".join(f"{len(names)} {what}: {_shown(names)}" for what, names in parts.items() if names)
        raise GruppoError(
            f"the weights in {where} are of another network than {type(module).__name__}: {said} (of {len(held)}). "
            "Give the network that they were saved from."
        )
    module.load_state_dict(dict(weights))


def _shown(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
