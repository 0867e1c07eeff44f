"""Weights of a module from safetensors files: all of them, or an error that names the
difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gruppo.integrity import check_seal, read_json
from gruppo.types import GruppoError


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file; GruppoError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise GruppoError(f"""the weights {path} cannot be read: {reason}. Give a .safetensors file,
            or a folder of policy.save.""") from None


def read_policy(
    folder: Path, settings: str, weights: str, kind: str, needs: Callable[[Any], object] = bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of a folder that ``policy.save`` wrote. ``needs`` reads the entries that
    it must have."""
    check_seal(folder)
    try:
        entries = read_json(folder / settings)
        tensors = load_file(folder / weights)
        needs(entries)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise GruppoError(f"""{folder} holds no {kind}: {reason}. It needs {settings} and {weights},
            as policy.save(folder) writes them.""") from None
    return entries, tensors


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load all weights; if names or shapes differ, leave the module as it was and raise
    GruppoError.

    Tied weights are in a file once, under any of their names.
    """
    state = module.state_dict()
    tied: dict[Any, list[str]] = {}  # names by memory, which empty tensors do not have
    keys = {
        n: (t.data_ptr(), t.shape, t.stride(), t.dtype) if t.numel() else n
        for n, t in state.items()
    }
    for name, key in keys.items():
        tied.setdefault(key, []).append(name)
    full = {name: weights[twin] for name in state for twin in tied[keys[name]] if twin in weights}
    # the own entry of a name comes before that of a twin
    full |= {name: weights[name] for name in state.keys() & weights.keys()}
    differences = {
        "missing": sorted(state.keys() - full.keys()),
        "unknown": sorted(weights.keys() - state.keys()),
        "of another shape": sorted(
            name for name, value in full.items() if state[name].shape != value.shape
        ),
    }
    if any(differences.values()):
        listed = "; ".join(
            f"{len(names)} {kind}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            for kind, names in differences.items()
            if names
        )
        raise GruppoError(f"""the weights in {source} are of another network than
            {type(module).__name__}: {listed} (of {len(state)}). Give the network that they were
            saved from.""")
    module.load_state_dict(full)
