"""JSON Lines files, well formed and not."""

from __future__ import annotations

import pytest

from gruppo.data.jsonl import read_jsonl
from gruppo.types import DataError


def test_rows_come_in_order_with_their_unicode(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"prompt": "群 \u2028 x"}\r\n\n{"prompt": "b", "n": 1}'.encode())
    assert read_jsonl(file) == [{"prompt": "群 \u2028 x"}, {"prompt": "b", "n": 1}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"prompt": "a"}\n\n{"prompt": \n', "line 3 .* not JSON"),
        (b'{"prompt": "a"}\n[1]\n', "line 2 .* list"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2 .* not UTF-8"),
        (b"[" * 100_000, "line 1 .* not JSON"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(tmp_path, content, reason):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_jsonl(file)


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"no file .*tarin.jsonl; the nearest is 'train.jsonl'"):
        read_jsonl(tmp_path / "tarin.jsonl")
    with pytest.raises(DataError, match="no file"):
        read_jsonl(tmp_path / "no" / "such.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_jsonl(tmp_path)
