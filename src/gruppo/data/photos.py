"""Real photographs that Python packages carry in their wheels: nothing is downloaded, no package is imported."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

from gruppo.types import GruppoError

log = logging.getLogger("gruppo")


@dataclass(frozen=True)
class Photograph:
    """One file of a package."""

    name: str
    package: str
    """As it is imported."""
    file: str
    """Its path below the package's folder."""
    is_colour: bool = True

    @property
    def path(self) -> Path | None:
        """None where the package is not installed, or comes without the file."""
        try:
            spec = importlib.util.find_spec(self.package)
        except (ImportError, ValueError):
            return None
        folders = [] if spec is None else list(spec.submodule_search_locations or [])
        return next((path for folder in folders if (path := Path(folder) / self.file).is_file()), None)


INSTALLS = {"skimage": "scikit-image", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
PHOTOGRAPHS = (
    *(
        Photograph(name, "skimage", f"data/{file}")
        for name, file in (
            ("astronaut", "astronaut.png"),
            ("chelsea", "chelsea.png"),
            ("coffee", "coffee.png"),
            ("hubble", "hubble_deep_field.jpg"),
            ("ihc", "ihc.png"),
            ("motorcycle", "motorcycle_left.png"),  # its right view shows the same scene, and would cross the split
            ("retina", "retina.jpg"),
            ("rocket", "rocket.jpg"),
        )
    ),
    Photograph("china", "sklearn", "datasets/images/china.jpg"),
    Photograph("flower", "sklearn", "datasets/images/flower.jpg"),
    Photograph("grace_hopper", "matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    *(
        Photograph(name, "skimage", f"data/{name}.png", is_colour=False)
        for name in ("brick", "camera", "coins", "grass", "gravel", "moon", "page", "text")
    ),
)
"""Eleven in colour, eight in grey."""
HELD_OUT = ("camera", "chelsea", "coffee", "flower")
"""For evaluation: an animal, still lifes, a person. None of them shares a scene with another."""


def photographs(*, with_grey: bool = False) -> dict[str, Path]:
    """Name to file of those that are installed, in colour unless told otherwise. A missing one is named once."""
    wanted = [photo for photo in PHOTOGRAPHS if photo.is_colour or with_grey]
    found = {photo.name: path for photo in wanted if (path := photo.path) is not None}
    missing = [photo for photo in wanted if photo.name not in found]
    if not found:
        raise GruppoError(
            f"the photographs are files of {', '.join(INSTALLS.values())}, and none of them is installed; run: pip "
            'install "gruppo[photos]"'
        )
    if missing:
        packages = sorted({INSTALLS[photo.package] for photo in missing})
        log.warning(
            "%d of %d photographs are not there (%s); install %s for them.",
            len(missing),
            len(wanted),
            ", ".join(photo.name for photo in missing),
            ", ".join(packages),
        )
    return found
