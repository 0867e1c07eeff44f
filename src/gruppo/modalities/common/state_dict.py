"""Weights of a module in safetensors files: all of them, or an error that names the difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.integrity import check_seal, read_json
from gruppo.types import GruppoError

T = TypeVar("T")

WEIGHTS = "model.safetensors"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


def reason_of(error: Exception) -> str:
    """The reason why a file cannot be read, on one line."""
    return getattr(error, "strerror", None) or " ".join(str(error).split())


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file; GruppoError if it cannot be read."""
    try:
        return load_file(path)
    except UNREADABLE as error:
        raise GruppoError(f"""the weights {path} cannot be read: {reason_of(error)}. Give a
            .safetensors file, or a folder of policy.save.""") from None


def save_policy(folder: Path, settings: str, entries: dict[str, Any], module: nn.Module) -> None:
    """Write the weights of a module, and ``entries`` to the file ``settings``."""
    state = module.state_dict().items()
    weights = {name: value.detach().cpu().contiguous().clone() for name, value in state}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS)
    (folder / settings).write_text(json.dumps(entries, indent=1), encoding="utf-8")


def read_policy(
    folder: Path, settings: str, kind: str, build: Callable[[dict[str, Any]], T]
) -> tuple[T, dict[str, Tensor]]:
    """What ``build`` makes of the settings in a folder that ``policy.save`` wrote, and the
    weights."""
    check_seal(folder)
    try:
        return build(read_json(folder / settings)), load_file(folder / WEIGHTS)
    except UNREADABLE as error:
        raise GruppoError(f"""{folder} holds no {kind}: {reason_of(error)}. It needs {settings} and
            {WEIGHTS}, as policy.save(folder) of this version writes them.""") from None


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
