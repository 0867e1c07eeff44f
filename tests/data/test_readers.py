"""Rows of JSON Lines files, and of Hugging Face data sets from local files and folders."""

from __future__ import annotations

import pytest

from gruppo.data.open import open_source
from gruppo.data.readers import read_dataset, read_jsonl
from gruppo.types import DataError

ROWS = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(12)]


@pytest.fixture
def table(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return datasets.Dataset.from_list(ROWS)


def test_parquet_csv_and_saved_folders_give_the_same_rows(tmp_path, table):
    table.to_parquet(str(tmp_path / "a.parquet"))
    assert read_dataset(tmp_path / "a.parquet") == ROWS
    assert read_dataset(tmp_path / "a.parquet", split="train[:2]") == ROWS[:2]
    table.save_to_disk(str(tmp_path / "one"))
    assert read_dataset(tmp_path / "one") == ROWS
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "splits"))
    assert read_dataset(str(tmp_path / "splits"), split="test") == ROWS
    with pytest.raises(DataError, match="no split 'train'; its splits are test"):
        read_dataset(tmp_path / "splits")


def test_a_folder_of_data_files_is_read(tmp_path, table):
    (tmp_path / "files").mkdir()
    table.to_parquet(str(tmp_path / "files" / "part.parquet"))
    assert read_dataset(tmp_path / "files") == ROWS
    with pytest.raises(DataError, match="split 'test'"):
        read_dataset(tmp_path / "files", split="test")


def test_a_dataset_that_cannot_be_read_is_one_data_error(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"broken.parquet cannot be read"):
        read_dataset(tmp_path / "broken.parquet")
    with pytest.raises(DataError, match="no file"):
        read_dataset(tmp_path / "absent.parquet")
    (tmp_path / "x.txt").write_text("hi")
    with pytest.raises(DataError, match="unknown file type"):
        read_dataset(tmp_path / "x.txt")


def test_a_missing_configuration_is_said_with_those_there_are_and_how_to_write_one(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load(*_, **__):
        raise ValueError(
            "Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']\nX"
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"missing\. Please pick .*'main', 'socratic'\]\)\. .*OWNER/NAME:CONFIG:SPLIT"):
        open_source("owner/some-set", seed=0)


def test_a_dataset_object_opens_and_a_dict_of_splits_says_which_to_choose(table):
    source = open_source(table, seed=0, held_out_fraction=0)
    assert sorted(p.inputs for p in source.take(12)) == sorted(row["prompt"] for row in ROWS)
    datasets = pytest.importorskip("datasets")
    with pytest.raises(DataError, match="several splits"):
        open_source(datasets.DatasetDict({"train": table}), seed=0)
    with pytest.raises(DataError, match="no known length"):
        open_source(table.to_iterable_dataset(), seed=0)


# --- JSON Lines -------------------------------------------------------------------------------------------------------


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
