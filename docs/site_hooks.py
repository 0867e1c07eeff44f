"""Hooks of mkdocs.yml: the site is built from a copy of docs/, with the repository's files that its
pages link to."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from mkdocs.plugins import event_priority
from pymdownx.slugs import slugify

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
LANGUAGE = re.compile(r"\(?\[(?:中文|English)\]\([^)]*\)(?: · |\) )?")
"""Links between languages; the site has its own switch."""
BOOSTS = {
    "start/your-own": 10,
    "start/": 4,
    "guides/": 4,
    "objectives/": 2,
    "reference/run-directory": 4,
}
BOOSTS |= {"reference/api": 0.1, "dev/": 0.1, "files/": 0.1}
"""Weight of a page in the search by the beginning of its address: guides come before lab notes and
docstrings."""
FENCED_OR_HEADING = re.compile(r"^```.*?^```$|^#+ (?P<heading>[^\n]+)$", re.MULTILINE | re.DOTALL)


def headings(text: str) -> list[re.Match[str]]:
    return [match for match in FENCED_OR_HEADING.finditer(text) if match["heading"]]


def with_english_anchors(chinese: str, english: str) -> str:
    """A Chinese page with the anchors of the English one too, to which pages without a translation
    link."""
    for match, original in reversed([*zip(headings(chinese), headings(english), strict=True)]):
        anchor = slugify(case="lower")(original["heading"], "-")
        chinese = f'{chinese[: match.start()]}<a id="{anchor}"></a>\n\n{chinese[match.start() :]}'
    return chinese


@event_priority(100)
def on_config(config: Any) -> Any:
    """Write the pages into a folder beside the site's (build/docs-source), and build from there."""
    source = Path(f"{config.site_dir}-source")  # two builds at a time, as in tests, do not share it
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    queue = [(path, path.relative_to(DOCS).as_posix()) for path in sorted(DOCS.rglob("*.md"))]
    written = {page for _, page in queue}
    while queue:
        path, page = queue.pop()
        text = path.read_text(encoding="utf-8")
        here = path.parent.relative_to(ROOT).as_posix()

        def on_site(match: re.Match[str], here: str = here, page: str = page) -> str:
            """Link to the page of a file; those of files outside docs/ are below files/."""
            target = normpath(f"{here}/{match[1]}")
            if not (ROOT / target).is_file() or Path(target).suffix not in (".md", ".py"):
                return match[0]
            address = target.removeprefix("docs/")
            if address == target:
                address = f"files/{target.removesuffix('.py').removesuffix('.md')}.md"
                if address not in written:
                    written.add(address)
                    queue.append((ROOT / target, address))
            return f"]({relpath(address, dirname(page) or '.')}{match[2] or ''})"

        if path.suffix == ".py":
            text = f"# {path.relative_to(ROOT).as_posix()}\n\n```python\n{text}```\n"
        else:
            text = LINK.sub(on_site, LANGUAGE.sub("", text))
        if page.endswith(".zh.md"):
            text = with_english_anchors(
                text, path.with_name(path.name.replace(".zh", "")).read_text(encoding="utf-8")
            )
        if (
            boost := next(
                (boost for start, boost in BOOSTS.items() if page.startswith(start)), None
            )
        ) is not None:
            text = f"---\nsearch:\n  boost: {boost}\n---\n\n{text}"
        (source / page).parent.mkdir(parents=True, exist_ok=True)
        (source / page).write_text(text, encoding="utf-8")
    config.docs_dir = str(source)
    return config


def on_serve(server: Any, config: Any, builder: Any) -> Any:
    """Watch docs/ and not the copy, which every build writes."""
    server.unwatch(config.docs_dir)
    for path in (DOCS, ROOT / "src/gruppo"):
        server.watch(str(path))
    return server
