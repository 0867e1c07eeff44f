"""Weights of a module from safetensors files: all of them, or an error that names the difference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gruppo.types import GruppoError


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file; GruppoError if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise GruppoError(
            f"the weights {path} cannot be read: {reason}. Give a .safetensors file, or a folder of policy.save."
        ) from None


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load all weights; if names or shapes differ, leave the module as it was and raise GruppoError."""
    own = module.state_dict()
    differences = {
        "missing": sorted(own.keys() - weights.keys()),
        "unknown": sorted(weights.keys() - own.keys()),
        "of another shape": sorted(n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape),
    }
    if any(differences.values()):
        listed = "; ".join(
            f"{len(names)} {kind}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            for kind, names in differences.items()
            if names
        )
        raise GruppoError(
            f"the weights in {source} are of another network than {type(module).__name__}: {listed} (of {len(own)}). "
            "Give the network that they were saved from."
        )
    module.load_state_dict(dict(weights))
