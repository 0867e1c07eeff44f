"""Metadata of the package: URLs of the repository, and README.md with absolute links, which a
package index needs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)")


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """README.md with links to the files of a version in a repository (GitHub's addresses)."""
    return LINK.sub(
        lambda m: f"{m[1]}[{m[2]}]({repository}/{'raw' if m[1] else 'blob'}/v{version}/{m[3]})",
        text,
    )


class RepositoryMetadata(MetadataHookInterface):
    """``GRUPPO_REPOSITORY`` is the repository's address; without it, as in ``pip install .``, there
    are no URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("GRUPPO_REPOSITORY", "").rstrip("/")
        text, version = (
            (Path(self.root) / "README.md").read_text(encoding="utf-8"),
            metadata["version"],
        )
        if repository:
            text = with_absolute_links(
                text.replace("git clone …", f"git clone {repository}"), repository, version
            )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            name: f"{repository}/{path}".rstrip("/")
            for name, path in {
                "Repository": "",
                "Documentation": f"blob/v{version}/docs/index.md",
                "Changelog": f"blob/v{version}/CHANGELOG.md",
                "Issues": "issues",
            }.items()
            if repository
        }
