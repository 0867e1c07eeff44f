"""The size of the package stays within its limits; ``make size`` prints it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.size import SOURCE, by_part, measure, total

TOKENS = 259_200
"""In all of ``src``. It may fall; a change that raises it says why."""
DENSITY = 9.7
"""Tokens a code line, in all; half the lines of a dense file hold two thoughts."""
DENSITY_OF_A_PART = 10.5
PAGE_BYTES = 80_000
LARGE = 52
"""Functions above 400 syntax nodes or 18 names."""
SPLATS = 0
"""Dicts of keywords that are built and splatted in the next statement."""


@pytest.fixture(scope="module")
def parts():
    return by_part()


def test_the_package_is_not_larger_than_it_was(parts):
    assert total(parts).tokens <= TOKENS


def test_code_is_not_folded_into_fewer_lines(parts):
    assert total(parts).density <= DENSITY
    dense = {name: size.density for name, size in parts.items() if size.density > DENSITY_OF_A_PART}
    assert dense == {}


def test_few_functions_are_large(parts):
    assert len(total(parts).large) <= LARGE


def test_few_dicts_of_keywords_are_built_to_be_splatted(parts):
    assert len(total(parts).splats) <= SPLATS


def test_no_class_name_is_used_twice(parts):
    names = total(parts).classes
    assert sorted(names) == sorted(set(names))


def test_the_page_of_a_run_is_small():
    assert (SOURCE / "view" / "page.html").stat().st_size <= PAGE_BYTES


def test_tokens_are_counted_without_comments_and_docstrings_and_long_data_by_its_length(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""A docstring."""\n\nx = 1  # a comment\n\n\ndef f(a):\n    """Of f."""\n    return a\n'
    )
    assert measure(file).tokens == 3 + 6 + 2 and measure(file).lines == 3
    file.write_text(f'x = "{"a" * 400}"\n')
    assert measure(file).tokens == 3 + 100
    file.write_text(f'raise ValueError("{"a" * 400}")\n')
    assert measure(file).tokens == 5
    data = tmp_path / "b.toml"
    data.write_text("a = 1\n" * 20)
    assert measure(data).tokens == 30


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("options = {'a': 1}\n    g(**options)", 1),
        ("options = dict(a=1)\n    return g(**options)", 1),
        ("options = {'a': 1}\n    h()\n    g(**options)", 0),
        ("g(**{'a': 1})", 0),
    ],
)
def test_a_dict_that_the_next_statement_splats_is_found(tmp_path: Path, body, count):
    file = tmp_path / "a.py"
    file.write_text(f"def f():\n    {body}\n")
    assert len(measure(file).splats) == count
