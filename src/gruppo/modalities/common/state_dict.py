"""Weights of a module in safetensors files: all of them, or an error that names the difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.integrity import check_seal, read_json
from gruppo.types import GruppoError

WEIGHTS = "model.safetensors"


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file; GruppoError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise GruppoError(f"""the weights {path} cannot be read: {reason}. Give a .safetensors file,
            or a folder of policy.save.""") from None


def save_policy(folder: Path, settings: str, entries: dict[str, Any], module: nn.Module) -> None:
    """Write the weights of a module, and ``entries`` to the file ``settings``."""
    weights = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in module.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS)
    (folder / settings).write_text(json.dumps(entries, indent=1), encoding="utf-8")


def read_policy(
    folder: Path, settings: str, kind: str, needs: Callable[[Any], object] = bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of a folder that ``policy.save`` wrote. ``needs`` reads the entries that
    it must have."""
    check_seal(folder)
    try:
        entries = read_json(folder / settings)
        needs(entries)
        return entries, load_file(folder / WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise GruppoError(f"""{folder} holds no {kind}: {reason}. It needs {settings} and {WEIGHTS},
            as policy.save(folder) writes them.""") from None


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load all weights; if names or shapes differ, leave the module as it was and raise
    GruppoError.

    Tied weights are in a file once, under any of their names.
    """
    state = module.state_dict()
    loaded = {state[name].data_ptr() for name in weights if name in state}
    problems = {
        "missing": [n for n in state if n not in weights and state[n].data_ptr() not in loaded],
        "unknown": [n for n in weights if n not in state],
        "of another shape": [
            n for n in weights if n in state and weights[n].shape != state[n].shape
        ],
    }
    listed = "; ".join(
        f"{len(names)} {kind}: {', '.join(sorted(names)[:4])}"
        for kind, names in problems.items()
        if names
    )
    if listed:
        raise GruppoError(f"""the weights in {source} are of another network than
            {type(module).__name__}: {listed} (of {len(state)}). Give the network that they were
            saved from.""")
    module.load_state_dict(weights, strict=False)
