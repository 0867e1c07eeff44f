"""Imports point downward only, and parts of one layer never import each other."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "gruppo"
LAYERS: tuple[set[str], ...] = (
    {
        "types",
        "protocols",
        "seeds",
        "loading",
        "platforms",
        "timeouts",
        "errors",
        "worker",
        "packing",
        "names",
        "integrity",
        "http",
        "trust",
        "tasksets",
    },
    {"core"},
    {"distributed", "losses"},
    {"config"},
    {"modalities", "engines", "environments", "rewards", "data", "tracking"},
    {"testing", "trainer"},
    {"build", "recipes", "doctor"},
    {"view", "plan"},
    {"api", "inference"},
    {"export"},
    {"trl"},
    {"cli", "launch", "__init__", "__main__"},
)
"""From the bottom to the top."""
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}
INTERNAL = {0, len(LAYERS) - 1}
"""Layers whose parts may import each other."""
TORCH_ONLY = {"types", "seeds", "core", "losses"}


def imports(tree: ast.Module, package: list[str]) -> set[str]:
    """Full dotted names that a module imports, those inside functions included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names |= {
                ".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names
            }
    return names


def is_below(target: str, part: str) -> bool:
    return LAYER[target] < LAYER[part] or (LAYER[target] == LAYER[part] and LAYER[part] in INTERNAL)


def faults(part: str, name: str) -> list[str]:
    """What is wrong with ``part`` importing ``name``."""
    top, *rest = name.split(".")
    if top in {"pickle", "cloudpickle", "dill"} or name == "torch.load":
        return [f"{part} uses {name}"]
    if top == "gruppo":
        target = rest[0] if rest and rest[0] in LAYER else "__init__"
        return [] if target == part or is_below(target, part) else [f"{part} imports {target}"]
    allowed = part not in TORCH_ONLY or top in {"torch", "jaxtyping", *sys.stdlib_module_names}
    return [] if allowed else [f"{part} imports {top}"]


def violations(src: Path) -> list[str]:
    found = []
    for file in sorted(src.rglob("*.py")):
        inside = file.relative_to(src).with_suffix("").parts
        part, tree = inside[0], ast.parse(file.read_text(encoding="utf-8"))
        if part not in LAYER:
            found.append(f"{part} is in no layer")
            continue
        for name in sorted(imports(tree, ["gruppo", *inside[:-1]])):
            found += faults(part, name)
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
            for node in ast.walk(tree)
        ):
            found.append(f"{part} uses torch.load")
    return found


def test_imports_point_downward_and_nothing_is_unpickled():
    assert violations(SRC) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("core/a.py", "from gruppo.tracking import files", ["core imports tracking"]),
        ("core/a.py", "import numpy as np", ["core imports numpy"]),
        (
            "core/a.py",
            "import math, torch.nn\nfrom jaxtyping import Float\nfrom gruppo.types import Stat",
            [],
        ),
        ("core/a.py", "def f():\n    from gruppo import Trainer", ["core imports __init__"]),
        ("rewards/deep/a.py", "from ...data import tasks", ["rewards imports data"]),
        (
            "rewards/deep/a.py",
            "from .. import numeric\nfrom . import b\nimport gruppo.core.kl, rich",
            [],
        ),
        ("losses/a.py", "from gruppo import distributed", ["losses imports distributed"]),
        ("losses/a.py", "from gruppo.rewards import score", ["losses imports rewards"]),
        (
            "losses/a.py",
            "from gruppo.core.loss import policy_loss\nfrom gruppo.losses.inputs import Rows",
            [],
        ),
        ("core/a.py", "from gruppo.losses import GRPOLoss", ["core imports losses"]),
        ("losses/a.py", "import numpy", ["losses imports numpy"]),
        ("engines/a.py", "import gruppo.trainer.loop", ["engines imports trainer"]),
        ("trainer/a.py", "from gruppo.recipes import arithmetic", ["trainer imports recipes"]),
        (
            "cli/app.py",
            "from gruppo import recipes, testing\nfrom gruppo.tracking.files import read_metrics",
            [],
        ),
        ("data/a.py", "from pickle import loads", ["data uses pickle.loads"]),
        ("data/a.py", "import torch\ntorch.load('x', weights_only=True)", ["data uses torch.load"]),
        ("data/a.py", "from torch import load", ["data uses torch.load"]),
        ("attic/a.py", "", ["attic is in no layer"]),
    ],
)
def test_the_checker_sees_a_bad_import(tmp_path, file, line, found):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(line)
    assert violations(tmp_path) == found


KIND = re.compile(
    r"is_gaussian|\.restores\b|\bkind [!=]=|isinstance\([^)]*(Policy|policy)\b|hasattr\("
)
"""Questions about the kind of policy."""


def test_the_trainer_imports_no_modality_and_asks_no_policy_what_kind_it_is():
    """What differs is asked of the policy or of its modality."""
    found = []
    for file in sorted((SRC / "trainer").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        modules = [
            name
            for name in imports(ast.parse(text), ["gruppo", "trainer"])
            if name.startswith("gruppo.modalities")
        ]
        lines = [line.strip() for line in text.splitlines() if KIND.search(line)]
        found += [f"{file.name}: {what}" for what in modules + lines]
    assert found == []


def test_no_modules_import_each_other():
    """The modules of the package form no cycle; imports inside functions and for type checkers
    alone do not count."""
    graph: dict[str, set[str]] = {}
    for file in SRC.rglob("*.py"):
        parts = file.relative_to(SRC).with_suffix("").parts
        name = ".".join(["gruppo", *parts]).removesuffix(".__init__")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        top = ast.Module(
            [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
        )
        graph[name] = imports(top, ["gruppo", *parts[:-1]])
    modules = set(graph)
    edges = {
        name: {t if t in modules else t.rpartition(".")[0] for t in targets} & modules
        for name, targets in graph.items()
    }
    done: set[str] = set()

    def cycle_from(name: str, path: tuple[str, ...]) -> tuple[str, ...]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return ()
        cycles = (cycle_from(target, (*path, name)) for target in edges[name] if target != name)
        found = next(filter(None, cycles), ())
        done.add(name)
        return found

    assert [cycle for cycle in (cycle_from(name, ()) for name in sorted(modules)) if cycle] == []
