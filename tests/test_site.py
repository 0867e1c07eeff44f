"""The documentation site: every page is in its navigation, builds without warnings, and is found by
its readers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_navigation_lists_every_page_once() -> None:
    listed = re.findall(
        r"^ +- (?:\S.*: )?(\S+\.md)$",
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    pages = [
        path.relative_to(DOCS).as_posix()
        for path in DOCS.rglob("*.md")
        if not path.name.endswith(".zh.md")
    ]
    assert sorted(listed) == sorted(pages)


def test_every_heading_of_the_navigation_has_a_chinese_name() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    headings = re.findall(r"^ +- ([A-Z][a-z ]+):", text[text.index("\nnav:") :], re.MULTILINE)
    translated = re.findall(r"^            ([A-Z][a-z ]+): ", text, re.MULTILINE)
    assert sorted(headings) == sorted(translated)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it: a warning is an error."""
    pytest.importorskip("material", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


@pytest.mark.slow
def test_the_site_builds_without_warnings_in_both_languages(site: Path) -> None:
    """Links to pages, headings and files that do not exist are warnings."""
    english, chinese = (
        (site / page).read_text(encoding="utf-8") for page in ("index.html", "zh/index.html")
    )
    assert 'lang="en"' in english and 'lang="zh"' in chinese and "常见任务" in chinese
    assert "GRPO" in (site / "zh/learn/grpo-by-hand/index.html").read_text(encoding="utf-8")
    docstrings = (site / "reference/api/index.html").read_text(encoding="utf-8")
    assert "Train a model on data with a reward" in docstrings


@pytest.mark.slow
def test_the_site_makes_no_request_to_another_host(site: Path) -> None:
    script = r"<(?:script|img|iframe)[^>]+src=\"(https?:[^\"]+)"
    loaded = re.compile(script + r"|<link[^>]+rel=\"stylesheet\"[^>]+href=\"(https?:[^\"]+)")
    assert [
        found
        for page in site.rglob("*.html")
        for found in loaded.findall(page.read_text(encoding="utf-8"))
    ] == []


QUERIES = {
    "multi gpu": "guides/many-gpus/",
    "own reward": "start/your-own-reward/",
    "custom reward function": "start/your-own-reward/",
    "kl": "objectives/kl/",
    "out of memory": "guides/out-of-memory/",
    "gsm8k": "guides/math/",
    "reward model": "guides/reward-models/",
    "lora one gpu": "guides/lora/",
    "ppo critic": "objectives/ppo/",
    "tool": "guides/conversations/",
    "reward not increasing": "guides/reading-a-run/",
}
"""What readers type, and the page that should be among the first three."""


@pytest.fixture(scope="module")
def ranked(site: Path) -> Callable[[str], list[str]]:
    """The pages for a query in the order of the theme's search, which runs lunr.js in the browser.

    As in its integrations/search: titles weigh 1000 times as much as texts, pages and full matches
    are preferred.
    """
    builder = pytest.importorskip(
        "lunr.builder", reason="the extra docs is not installed"
    ).Builder()
    builder.pipeline.add(pytest.importorskip("lunr.stop_word_filter").stop_word_filter)
    builder.b(0)
    read = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    separator = read["config"]["separator"]
    builder.ref("location")
    for name in ("title", "text"):
        builder.field(name, boost=read["config"]["fields"][name]["boost"])
    for document in read["docs"]:
        texts = {
            name: re.sub(separator, " ", re.sub("<[^>]+>", " ", document[name]))
            for name in ("title", "text")
        }
        builder.add(
            {"location": document["location"], **texts},
            attributes={"boost": document.get("boost", 1)},
        )
    index = builder.build()

    def search(query: str) -> list[str]:
        words = set(query.split())
        scores = dict[str, float]()
        for found in index.search(query):
            is_page = "#" not in found["ref"]
            share = len(words & {*found["match_data"].metadata}) / len(words)
            page = found["ref"].partition("#")[0]
            scores[page] = max(scores.get(page, 0.0), found["score"] * (1 + (is_page + share) ** 2))
        return sorted(scores, key=lambda page: -scores[page])

    return search


@pytest.mark.slow
@pytest.mark.parametrize("query", QUERIES)
def test_the_search_finds_the_page_for_the_words_of_a_reader(
    query: str, ranked: Callable[[str], list[str]]
) -> None:
    assert QUERIES[query] in ranked(query)[:3]
