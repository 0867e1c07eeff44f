"""Optional dependencies: each extra installs something that the package uses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from gruppo import loading

ROOT = Path(__file__).parents[1]
IMPORT_NAMES = {
    "pillow": "PIL",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
    "reasoning-gym": "reasoning_gym",
    "math-verify": "math_verify",
}


def test_every_package_of_an_extra_is_imported_or_read_by_the_library():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    folders = (ROOT / "src", ROOT / "examples")
    paths = [path for folder in folders for path in folder.rglob("*")]
    files = [path for path in paths if path.suffix in (".py", ".toml")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    used = [
        name for extra, names in extras.items() if extra not in ("dev", "docs") for name in names
    ]
    packages = {re.split(r"[<>=\[]", name)[0] for name in used}
    unused = []
    for package in packages:
        name = re.escape(IMPORT_NAMES.get(package, package))
        is_used = re.search(rf"(from|import) {name}\b|\"{name}(\.\w+)?\"", source) is not None
        if not is_used:
            unused.append(package)
    assert unused == []


def test_an_extra_is_installed_from_the_clone_or_from_the_index(monkeypatch, tmp_path):
    assert f'install -e "{ROOT}[report]"' in loading.install_command("report")
    monkeypatch.setattr(
        loading, "__file__", str(tmp_path / "lib/python3.11/site-packages/gruppo/loading.py")
    )
    assert loading.install_command("report").endswith('install "gruppo[report]"')
