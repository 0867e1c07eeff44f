"""Actions by name, as they are written on a command line and in a saved folder."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gruppo.modalities.restoration.actions import BandGains, LowResolution, PixelNoise
from gruppo.modalities.restoration.controls import Control, Controls
from gruppo.types import GruppoError

ACTIONS: dict[str, Callable[..., Any]] = {
    "pixels": PixelNoise,
    "low_resolution": LowResolution,
    "band_gains": BandGains,
    "controls": Controls,
}
EXAMPLES = "pixels:std=0.01, low_resolution:grid=8, band_gains:grid=8,std=0.15 or controls:noise=0-1@0.5,mix=0-1@1"


def open_action(text: str, channels: int = 3) -> Any:
    """The action that ``band_gains:grid=8,std=0.15`` or ``controls:noise=0-50@25,mix=0-1@1`` names."""
    kind, _, rest = text.partition(":")
    if kind not in ACTIONS:
        near = difflib.get_close_matches(kind, ACTIONS, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise GruppoError(f"there is no action {kind!r}; write {EXAMPLES}.{guess}")
    options: dict[str, Any] = {}
    controls: list[Control] = []
    for part in filter(None, rest.split(",")):
        name, _, said = (micro_batch.strip() for micro_batch in part.partition("="))
        known = inspect.signature(ACTIONS[kind]).parameters
        try:
            if kind == "controls" and name not in known:
                controls.append(_control(name, said))
            elif name in known and name != "channels":
                options[name] = _read(said)
            else:
                raise ValueError(f"it has no option {name!r}")
        except ValueError as problem:
            raise GruppoError(f"the action {text!r} is not understood ({problem}); write {EXAMPLES}.") from None
    own = (controls,) if kind == "controls" else ()
    return ACTIONS[kind](*own, channels=channels, **options)


def action_of(settings: Mapping[str, Any]) -> Any:
    """The action with these ``settings``."""
    rest = dict(settings)
    return ACTIONS[rest.pop("kind")](**rest)


def _control(name: str, said: str) -> Control:
    """low-high@start"""
    span, at, start = said.partition("@")
    low, dash, high = span.partition("-")
    if not name or not at or not dash:
        raise ValueError(f"{name}={said} is no low-high@start")
    return Control(name, float(low), float(high), float(start))


def _read(said: str) -> Any:
    if said.lower() in ("true", "false"):
        return said.lower() == "true"
    return int(said) if said.lstrip("+-").isdigit() else float(said)
