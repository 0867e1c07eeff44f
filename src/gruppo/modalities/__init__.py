"""What differs between language models, diffusion models, restoration networks and policies from outside."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from gruppo.protocols import Modality
from gruppo.types import GruppoError

ENTRY_POINTS = "gruppo.modalities"
"""Entry point group in which an installed package names a ``Modality`` of its own."""
BUILT_IN = {
    "restoration": "gruppo.modalities.restoration.modality:RESTORATION",
    "diffusion": "gruppo.modalities.diffusion.modality:DIFFUSION",
    "function": "gruppo.modalities.functions:FUNCTION",
    "text": "gruppo.modalities.text.modality:TEXT",
}
"""In the order in which they are asked whether a model is theirs; any other name is a language model's."""


@cache
def modalities() -> dict[str, Modality]:
    """Return all modalities by name: those of installed packages first, then the built-in ones."""
    found: dict[str, Modality] = {}
    for point in entry_points(group=ENTRY_POINTS):
        modality = point.load()
        if not isinstance(modality, Modality):
            raise GruppoError(
                f"the entry point {point.name!r} of {ENTRY_POINTS} is a {type(modality).__name__}; it needs a "
                "gruppo.Modality. Uninstall or repair its package."
            )
        found[modality.name] = modality
    for name, place in BUILT_IN.items():
        module, _, attribute = place.partition(":")
        found[name] = getattr(import_module(module), attribute)
    return found


def find_modality(model: str) -> Modality:
    """Return the modality of a model's name, folder or id; nothing is loaded."""
    return next(modality for modality in modalities().values() if modality.matches(model))
