"""Modalities by name, and the config sections that they bring: their names, in files and on the
command line."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from gruppo.loading import importing, load_object
from gruppo.protocols import Modality
from gruppo.types import GruppoError

ENTRY_POINTS = "gruppo.modalities"
"""Entry point group in which an installed package names a ``Modality`` of its own."""
BUILT_IN = (
    "gruppo.modalities.diffusion.modality:DIFFUSION",
    "gruppo.modalities.restoration.modality:RESTORATION",
    "gruppo.modalities.functions:FUNCTION",
    "gruppo.modalities.text.modality:TEXT",
)
"""In the order in which they are asked whether a model is theirs; any other name is a language
model's. They are loaded by name: modalities are a layer above."""


@cache
def modalities() -> dict[str, Modality]:
    """Return all modalities by name: those of installed packages first, then the built-in ones."""
    found: dict[str, Modality] = {}
    with importing(None):  # no folder names them
        for point in entry_points(group=ENTRY_POINTS):
            modality = load_object(point.value)
            if not isinstance(modality, Modality):
                raise GruppoError(f"""the entry point {point.name!r} of {ENTRY_POINTS} is a
                    {type(modality).__name__}; it needs a gruppo.Modality. Uninstall or repair its
                    package.""")
            found[modality.name] = modality
        return found | {modality.name: modality for modality in map(load_object, BUILT_IN)}


def find_modality(model: str) -> Modality:
    """Return the modality of a model's name, folder or id; nothing is loaded."""
    return next(modality for modality in modalities().values() if modality.matches(model))


def sections() -> dict[str, type]:
    """Return the config section of each modality that has one, by its name."""
    return {
        name: modality.config_section
        for name, modality in modalities().items()
        if modality.config_section
    }


def section_name(section: Any) -> str:
    """Return the name of a config section: that of its modality."""
    return next(name for name, kind in sections().items() if type(section) is kind)
