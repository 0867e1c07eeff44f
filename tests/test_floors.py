"""The floors of the house: imports point downward only, rooms never import each other."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "gruppo"
FLOOR = {
    **dict.fromkeys(["types", "seeds", "loading", "calls"], 0),
    "core": 1,
    **dict.fromkeys(["dist", "losses"], 2),
    **dict.fromkeys(["policies", "engines", "envs", "rewards", "data", "track"], 3),
    "training": 4,
    **dict.fromkeys(["cli", "commands", "options", "doctor", "recipes", "testing", "__init__", "__main__"], 5),
}
SHARED_FLOORS = {0, 5}
"""Floors whose parts may import each other: the slab and the door."""
TORCH_ONLY = {"types", "seeds", "core", "losses"}


def imports(tree: ast.Module, package: list[str]) -> set[str]:
    """Full dotted names that a module imports, those inside functions included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names |= {".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names}
    return names


def is_below(target: str, part: str) -> bool:
    return FLOOR[target] < FLOOR[part] or (FLOOR[target] == FLOOR[part] and FLOOR[part] in SHARED_FLOORS)


def faults(part: str, name: str) -> list[str]:
    """What is wrong with ``part`` importing ``name``."""
    top, *rest = name.split(".")
    if top in {"pickle", "cloudpickle", "dill"} or name == "torch.load":
        return [f"{part} uses {name}"]
    if top == "gruppo":
        target = rest[0] if rest and rest[0] in FLOOR else "__init__"
        return [] if target == part or is_below(target, part) else [f"{part} imports {target}"]
    allowed = part not in TORCH_ONLY or top in {"torch", "jaxtyping", *sys.stdlib_module_names}
    return [] if allowed else [f"{part} imports {top}"]


def violations(src: Path) -> list[str]:
    found = []
    for file in sorted(src.rglob("*.py")):
        inside = file.relative_to(src).with_suffix("").parts
        part, tree = inside[0], ast.parse(file.read_text(encoding="utf-8"))
        if part not in FLOOR:
            found.append(f"{part} is on no floor")
            continue
        for name in sorted(imports(tree, ["gruppo", *inside[:-1]])):
            found += faults(part, name)
        if any(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load" for node in ast.walk(tree)):
            found.append(f"{part} uses torch.load")
    return found


def test_imports_point_downward_and_nothing_is_unpickled():
    assert violations(SRC) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("core/a.py", "from gruppo.track import files", ["core imports track"]),
        ("core/a.py", "import numpy as np", ["core imports numpy"]),
        ("core/a.py", "import math, torch.nn\nfrom jaxtyping import Float\nfrom gruppo.types import Stat", []),
        ("core/a.py", "def f():\n    from gruppo import Trainer", ["core imports __init__"]),
        ("rewards/deep/a.py", "from ...data import tasks", ["rewards imports data"]),
        ("rewards/deep/a.py", "from .. import numeric\nfrom . import b\nimport gruppo.core.kl, rich", []),
        ("losses/a.py", "from gruppo import dist", ["losses imports dist"]),
        ("losses/a.py", "from gruppo.rewards import score", ["losses imports rewards"]),
        ("losses/a.py", "from gruppo.core.loss import policy_loss\nfrom gruppo.losses.inputs import Rows", []),
        ("core/a.py", "from gruppo.losses import GRPOLoss", ["core imports losses"]),
        ("losses/a.py", "import numpy", ["losses imports numpy"]),
        ("engines/a.py", "import gruppo.training.loop", ["engines imports training"]),
        ("training/a.py", "from gruppo.recipes import arithmetic", ["training imports recipes"]),
        ("cli.py", "from gruppo import recipes, testing\nfrom gruppo.track.files import read_metrics", []),
        ("data/a.py", "from pickle import loads", ["data uses pickle.loads"]),
        ("data/a.py", "import torch\ntorch.load('x', weights_only=True)", ["data uses torch.load"]),
        ("data/a.py", "from torch import load", ["data uses torch.load"]),
        ("attic/a.py", "", ["attic is on no floor"]),
    ],
)
def test_the_checker_sees_a_bad_import(tmp_path, file, line, found):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(line)
    assert violations(tmp_path) == found
