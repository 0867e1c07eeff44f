"""Rows become prompts: targets and columns stay together, duplicates fall on one side, unusable
rows are refused."""

from __future__ import annotations

import json

import pytest

from gruppo.data.open import open_source
from gruppo.data.rows import read_dataset, read_jsonl, row_source
from gruppo.data.source import hash_unit
from gruppo.types import DataError, GruppoError


def numbered(n: int) -> list[dict]:
    return [{"prompt": f"Say {i}.", "answer": str(i), "level": i % 3} for i in range(n)]


def said(prompts) -> list[tuple]:
    return [(p.id, p.inputs, p.target, dict(p.meta), p.draw) for p in prompts]


@pytest.mark.silent_bug(24)
def test_targets_and_columns_stay_with_their_prompt_through_the_shuffle():
    for p in row_source(numbered(30), seed=5).take(90):
        number = int(p.inputs.removeprefix("Say ").removesuffix("."))
        assert (p.id, p.target) == (str(number), str(number))
        assert dict(p.meta) == {"prompt": p.inputs, "answer": str(number), "level": number % 3}


def test_duplicates_of_a_prompt_fall_on_one_side():
    rows = [row | {"level": copy} for row in numbered(100) for copy in range(3)]
    source = row_source(rows, seed=1)
    held = [p.inputs for p in source.held_out(1000)]
    assert held and all(held.count(text) == 3 for text in held)
    assert not {p.inputs for p in source.take(300)} & set(held)


def test_few_rows_hold_out_the_prompt_of_the_lowest_hash():
    rows = [row for row in numbered(5) for _ in range(2)]
    by_hash = sorted(
        (row["prompt"] for row in numbered(5)), key=lambda text: hash_unit(json.dumps(text))
    )
    assert hash_unit(json.dumps(by_hash[0])) > 0.001
    source = row_source(rows, seed=1, held_out_fraction=0.001)
    assert [p.inputs for p in source.held_out(100)] == [by_hash[0]] * 2
    assert {p.inputs for p in source.take(8)} == set(by_hash[1:])


def test_nothing_is_held_out_at_a_fraction_of_zero_or_of_one_prompt():
    assert row_source(numbered(5), seed=1, held_out_fraction=0).held_out(4) == []
    assert row_source(numbered(1) * 3, seed=1, held_out_fraction=0.001).held_out(4) == []


def test_the_prompt_column_is_a_column_that_rewards_can_read():
    rows = [{"question": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}]
    (prompt,) = row_source(rows, seed=0, prompt_column="question", held_out_fraction=0).take(1)
    assert prompt.meta["question"] == rows[0]["question"] == prompt.inputs
    prompt.meta["question"][0]["content"] = "changed"
    assert rows[0]["question"] == prompt.inputs == [{"role": "user", "content": "1 + 1?"}]


def test_the_id_column_names_prompts_and_target_is_the_first_usual_column():
    rows = [{"id": "q7", "question": "1 + 1?", "label": "x", "solution": "2"}]
    source = row_source(rows, seed=0, prompt_column="question", held_out_fraction=0)
    (prompt,) = source.take(1)
    assert (prompt.id, prompt.target) == ("q7", "2")
    assert source.columns == ("id", "question", "label", "solution")
    named = row_source(
        rows, seed=0, prompt_column="question", target_column="label", held_out_fraction=0
    )
    assert named.take(1)[0].target == "x"


def test_a_column_that_some_rows_lack_is_none_there():
    source = row_source(
        [{"prompt": "a"}, {"prompt": "b", "hint": "h"}], seed=0, held_out_fraction=0
    )
    assert {p.inputs: p.meta["hint"] for p in source.take(2)} == {"a": None, "b": "h"}


def test_the_fingerprint_follows_the_data():
    def fingerprint(rows):
        return row_source(rows, seed=0).fingerprint()

    changed = numbered(9)
    changed[4]["answer"] = "five"
    assert fingerprint(numbered(9)) == fingerprint(numbered(9)) != fingerprint(changed)
    assert fingerprint([{"prompt": "a", "x": object()}]) == fingerprint(
        [{"prompt": "a", "x": object()}]
    )


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no rows"),
        ([{"prompt": "a"}, "b"], "row 2 .* str"),
        ([{"prompt": "a"}, {"prompt": 3}], "row 2 .* type int"),
        ([{"prompt": "a"}, {"answer": "x"}], "row 2 .* missing"),
        ([{"prompt": ""}], "row 1 .* empty"),
        ([{"prompt": []}], "row 1 .* empty"),
        ([{"prompt": ["a"]}], "message 1 .* row 1 .* type str"),
        ([{"prompt": [{"role": "user", "content": None}]}], r"content \(NoneType\)"),
        ([{"prompt": "a\ud800"}], "half a character .* position 1"),
        ([{"question": "a", "answer": "b"}], "its columns are 'question', 'answer'"),
        ([{"Prompts": "a"}], "Did you mean Prompts"),
    ],
)
def test_unusable_rows_are_refused_with_their_number_or_column(rows, reason):
    with pytest.raises(DataError, match=reason):
        row_source(rows, seed=0, held_out_fraction=0)


def test_unusable_splits_are_refused():
    with pytest.raises(
        DataError, match=r"all 5 prompts .* held out .* Lower prompts.held_out_fraction"
    ):
        row_source(numbered(5), seed=0, held_out_fraction=0.999999)
    with pytest.raises(GruppoError, match=r"outside .* Set prompts.held_out_fraction 0.1"):
        row_source(numbered(5), seed=0, held_out_fraction=1.0)
    with pytest.raises(
        DataError, match=r"no column 'anser'.*prompts.target_column.*Did you mean answer"
    ):
        row_source(numbered(5), seed=0, target_column="anser")


# --- data sets ------------------------------------------------------------------------------------

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
    with pytest.raises(DataError, match=r"split 'train' of .* cannot be read"):
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
            "Config name is missing.\nPlease pick one among the available configs: ['main', "
            "'socratic']\nX"
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        DataError,
        match=r"missing\. Please pick .*'main', 'socratic'\]\)\. .*OWNER/NAME:CONFIG:SPLIT",
    ):
        open_source("owner/some-set", seed=0)


def test_a_dataset_object_opens_and_a_dict_of_splits_says_which_to_choose(table):
    source = open_source(table, seed=0, held_out_fraction=0)
    assert sorted(p.inputs for p in source.take(12)) == sorted(row["prompt"] for row in ROWS)
    datasets = pytest.importorskip("datasets")
    with pytest.raises(DataError, match="several splits"):
        open_source(datasets.DatasetDict({"train": table}), seed=0)
    with pytest.raises(DataError, match="no known length"):
        open_source(table.to_iterable_dataset(), seed=0)


# --- JSON Lines -----------------------------------------------------------------------------------


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
    with pytest.raises(DataError, match=r"no file .*tarin.jsonl. Did you mean train.jsonl"):
        read_jsonl(tmp_path / "tarin.jsonl")
    with pytest.raises(DataError, match="no file"):
        read_jsonl(tmp_path / "no" / "such.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_jsonl(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        str([{"role": "user", "content": "1 + 1 = ?"}]),
        json.dumps([{"content": "1 + 1 = ?", "role": "user"}]),
        "array([{'role': 'user', 'content': '1 + 1 = ?'}], dtype=object)",
        " {'role': 'user', 'content': '1 + 1 = ?'}",
    ],
    ids=["python", "json", "numpy", "one message"],
)
def test_a_conversation_that_was_converted_to_a_string_is_refused_with_the_fix(text):
    with pytest.raises(
        DataError,
        match=r"the prompt in row 2 of the data is a conversation that was.*ast.literal_eval",
    ):
        row_source([{"prompt": "a"}, {"prompt": text}], seed=0)


@pytest.mark.parametrize(
    "text", ['Write JSON such as [{"role": "user"}].', "[{x: 1}]", "{'rolex': 1}"]
)
def test_texts_with_lists_in_them_are_no_conversations(text):
    assert row_source([{"prompt": text}], seed=0, held_out_fraction=0.0).take(1)[0].inputs == text
