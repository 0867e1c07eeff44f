"""Config sections that modalities bring: their names, in files and on the command line, and their dataclasses."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from gruppo.loading import load_object

BUILT_IN = {
    "diffusion": "gruppo.modalities.diffusion.config:DiffusionConfig",
    "restoration": "gruppo.modalities.restoration.config:RestorationConfig",
}
"""Loaded by name: modalities are a layer above."""


@cache
def sections() -> dict[str, type]:
    """The section of each modality by name, including installed packages (entry point group ``gruppo.modalities``)."""
    found = {name: load_object(spec) for name, spec in BUILT_IN.items()}
    for entry_point in entry_points(group="gruppo.modalities"):
        modality = entry_point.load()
        if modality.config_section is not None:
            found[modality.name] = modality.config_section
    return found


def section_name(section: Any) -> str:
    """The name of a modality's section: that of its modality."""
    return next(name for name, kind in sections().items() if type(section) is kind)
