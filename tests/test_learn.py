"""The learning path prints what it says it prints, and says the same in both languages."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
LEARN = ROOT / "docs/learn"
ENGLISH, CHINESE = (
    [page for page in sorted(LEARN.glob("*.md")) if page.name.endswith(".zh.md") == is_chinese]
    for is_chinese in (False, True)
)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<said>.*?)^```$)?", re.MULTILINE | re.DOTALL
)
"""A Python block, and the text block after it: what it prints."""
NEW_LINE = "\n"


def each(pages: list[Path]) -> Any:
    return pytest.mark.parametrize(
        "page", pages, ids=lambda page: str(page.relative_to(LEARN).with_suffix(""))
    )


def chinese_of(page: Path) -> Path:
    return page.with_suffix(".zh.md")


@pytest.fixture(autouse=True)
def the_readers_own_session() -> Iterator[None]:
    """Pages set torch's default dtype, as a reader does in a session of her own."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@cache
def printed(*codes: str) -> list[str]:
    """What blocks print, one after another in one session. The same code runs once for both
    languages."""
    session: dict[str, Any] = {}
    result = []
    for number, code in enumerate(codes, start=1):
        with contextlib.redirect_stdout(io.StringIO()) as to:
            exec(compile(code, f"Python block {number}", "exec"), session)
        result.append(to.getvalue())
    return result


def differences(text: str) -> list[str]:
    """Where a page's Python blocks print something else than the text below them, or none stands
    there."""
    shown = list(SHOWN.finditer(text))
    pairs = zip(shown, printed(*(block["code"] for block in shown)), strict=True)
    return [
        f"line {text[: block.start()].count(NEW_LINE) + 1} says\n{block['said']}and "
        f"prints\n{result}"
        for block, result in pairs
        if result != (block["said"] or "")
    ]


@each([*ENGLISH, *CHINESE])
def test_each_block_prints_the_text_below_it(page: Path) -> None:
    assert differences(page.read_text(encoding="utf-8")) == []


def test_a_wrong_digit_a_missing_text_and_a_text_too_many_are_seen() -> None:
    assert differences("```python\nprint(0.25)\n```\n\n```text\n0.25\n```\n") == []
    assert len(differences("```python\nprint(0.25)\n```\n\n```text\n0.26\n```\n")) == 1
    assert len(differences("```python\nprint(0.25)\n```\n")) == 1
    assert (
        len(
            differences(
                "```python\nx = 1\n```\n\n```text\n1\n```\n\n```python\nassert x == 1\n```\n"
            )
        )
        == 1
    )


@each([*ENGLISH, *CHINESE])
def test_no_text_block_stands_where_nothing_prints_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    languages = [block[1] for block in FENCED.finditer(text)]
    assert set(languages) <= {"python", "text", ""}
    assert languages.count("text") == len(
        [block for block in SHOWN.finditer(text) if block["said"] is not None]
    )


def test_both_languages_have_the_same_pages_and_each_but_the_first_has_code() -> None:
    assert [chinese_of(page) for page in ENGLISH] == CHINESE
    assert [
        page.name for page in ENGLISH if "```python" not in page.read_text(encoding="utf-8")
    ] == ["README.md"]


@each(ENGLISH)
def test_the_chinese_page_has_the_code_the_numbers_and_the_sources_of_the_english_one(
    page: Path,
) -> None:
    english, chinese = (p.read_text(encoding="utf-8") for p in (page, chinese_of(page)))
    shown, reported = (
        [block.groups() for block in SHOWN.finditer(text)] for text in (english, chinese)
    )
    assert shown == reported
    for kind in (r"^#+ ", r"^\|", r"arxiv\.org/abs/([\d.]+)", r"`(--[^`]+)`", r"`(gruppo [^`]+)`"):
        assert sorted(re.findall(kind, chinese, re.M)) == sorted(re.findall(kind, english, re.M)), (
            kind
        )


@each([*ENGLISH, *CHINESE])
def test_a_paper_is_named_by_its_number_and_listed_on_the_first_page(page: Path) -> None:
    text, first = (
        page.read_text(encoding="utf-8"),
        page.with_name("README.md").read_text(encoding="utf-8"),
    )
    papers = re.findall(
        r"\[(?:arXiv )?(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/(\d{4}\.\d{5})\)", text
    )
    assert len(papers) == text.count("arxiv.org") and all(
        number == address for number, address in papers
    )
    assert {number for number, _ in papers} <= set(re.findall(r"abs/([\d.]+)", first))


def commands(page: Path) -> list[str]:
    """The lines of shell blocks, without comments; ends of lines that only explain do not count."""
    shell = [
        block[2] for block in FENCED.finditer(page.read_text(encoding="utf-8")) if not block[1]
    ]
    lines = [re.sub(r"\s+#.*", "", line).strip() for text in shell for line in text.splitlines()]
    return [line for line in lines if re.match(r"(git clone|make|gruppo) ", line)]


def test_the_chinese_readme_has_the_commands_and_the_code_of_the_english_one() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    assert commands(chinese) == commands(english) and len(commands(english)) > 8
    code = [
        [
            re.sub(r"\s+#.*", "", block[2])
            for block in FENCED.finditer(page.read_text(encoding="utf-8"))
            if block[1]
        ]
        for page in (english, chinese)
    ]
    assert code[0] == code[1] != []
