"""Hundreds of runs of one process open the same tiny model, probe it and read the same files: each
is done once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from gruppo.modalities.text import backbones, load
from gruppo.trainer import run_dir

TESTS = Path(__file__).parent


def remember(patch: pytest.MonkeyPatch) -> None:
    """Patch what has the same result each time within the tests: 70 ms of 280 that a run of two
    steps takes."""
    patch.setattr(load, "_load", loader(load._load))
    patch.setattr(load, "probe", prober(backbones.probe))
    patch.setattr(run_dir, "code_digest", reader(run_dir.code_digest))


def loader(load: Callable[..., Any]) -> Callable[..., Any]:
    """Copies of the session's tiny models; others are loaded each time."""
    known: dict[Any, Any] = {}

    def remembered(path: str, *options: Any, **named: Any) -> Any:
        if path not in tiny.FOLDERS:
            return load(path, *options, **named)
        key = (
            path,
            max(file.stat().st_mtime_ns for file in Path(path).iterdir()),
            repr((options, named)),
        )
        if key not in known:
            known[key] = load(path, *options, **named)
        module, *others = copy.deepcopy(known[key])
        module.loaded_from = key
        return module, *others

    return remembered


def prober(probe: Callable[[Any], backbones.Backbone]) -> Callable[[Any], backbones.Backbone]:
    """The fast ways of a copy that ``loader`` or ``fakes.probed_once`` has just given."""
    known: dict[Any, backbones.Backbone] = {}

    def remembered(module: Any) -> backbones.Backbone:
        if (loaded_from := module.__dict__.pop("loaded_from", None)) is None:
            return probe(module)
        key = loaded_from, backbones.TOLERANCE
        if key not in known:
            known[key] = probe(module)
        return replace(known[key], module=module)

    return remembered


def reader(code_digest: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Digests of the tests' own files, which stay as they are."""
    remembered = cache(code_digest)
    return lambda spec: (
        remembered if Path(spec.rpartition(":")[0]).is_relative_to(TESTS) else code_digest
    )(spec)
