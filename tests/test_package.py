"""The package's metadata: links that a package index can follow, one version, licenses and
templates."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import gruppo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = "https://example.org/owner/gruppo"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("hatchling", reason="the extra dev is not installed")
    monkeypatch.delenv("GRUPPO_REPOSITORY", raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_become_addresses_of_the_version_and_others_stay(hook: Any) -> None:
    text = "[a](docs/a.md#b) ![p](docs/p.png) [c](https://c.org) [d](#d)"
    blob, raw = f"{REPOSITORY}/blob/v0.2.0", f"{REPOSITORY}/raw/v0.2.0"
    expected = f"[a]({blob}/docs/a.md#b) ![p]({raw}/docs/p.png) [c](https://c.org) [d](#d)"
    assert hook.with_absolute_links(text, REPOSITORY, "0.2.0") == expected


@pytest.mark.parametrize("repository", ["", REPOSITORY + "/"])
def test_the_metadata_has_urls_and_no_relative_link_where_the_repository_is_known(
    hook: Any, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRUPPO_REPOSITORY", repository)
    metadata: dict[str, Any] = {"version": gruppo.__version__}
    hook.RepositoryMetadata(str(ROOT), {}).update(metadata)
    targets = re.findall(r"\]\(([^)]+)\)", metadata["readme"]["text"])
    assert all("://" in target for target in targets) == bool(repository)
    assert all(
        url.startswith(REPOSITORY) and not url.endswith("/") for url in metadata["urls"].values()
    )
    assert bool(metadata["urls"]) == bool(repository)


def test_every_link_of_the_readme_leads_to_a_file_that_the_repository_holds() -> None:
    targets = re.findall(
        r"\]\((?!\w+:|#)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert [target for target in targets if not (ROOT / target).is_file()] == []


def test_the_version_is_named_once_and_the_citation_has_it() -> None:
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert f"\nversion: {gruppo.__version__}\n" in (ROOT / "CITATION.cff").read_text(
        encoding="utf-8"
    )


def packages() -> dict[str, set[str]]:
    """Each package that gruppo names, with the extras that install it."""
    found: dict[str, set[str]] = {}
    for extra, names in {
        "always": PROJECT["dependencies"],
        **PROJECT["optional-dependencies"],
    }.items():
        for name in names:
            found.setdefault(re.split(r"[<>=\[ ;]", name)[0], set()).add(extra)
    return found


def test_the_page_of_licenses_lists_every_package_with_its_extras() -> None:
    page = (ROOT / "docs/reference/licenses.md").read_text(encoding="utf-8")
    table = page[page.index("## Packages") : page.index("## Models and data")]
    rows = re.findall(r"^\| ([a-z][\w-]*) \| (.+?) \| \S", table, re.MULTILINE)
    listed = {
        name: {*extras.replace("`", "").split(", ")} for name, extras in rows if name != "package"
    }
    assert listed == packages()


def test_the_install_page_lists_every_extra() -> None:
    page = (ROOT / "docs/start/install.md").read_text(encoding="utf-8")
    table = page[page.index("| extra |") : page.index("## Platforms")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(
        PROJECT["optional-dependencies"]
    )
