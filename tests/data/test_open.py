"""``open_source`` opens every kind of data, and lists what it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gruppo.data.arithmetic import arithmetic
from gruppo.data.open import open_source
from gruppo.data.source import IndexedSource
from gruppo.types import DataError


def test_lists_of_texts_dicts_and_conversations_open():
    for rows in (["a"], [{"prompt": "a"}], ({"prompt": "a"},)):
        assert open_source(rows, seed=0, held_out_fraction=0).take(1)[0].inputs == "a"
    messages = [{"role": "user", "content": "a"}]
    assert open_source([messages], seed=0, held_out_fraction=0).take(1)[0].inputs == messages


def test_columns_are_passed_on(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "1 + 1?", "gold": "2"}\n')
    for path in (file, str(file)):
        source = open_source(
            path, seed=0, prompt_column="question", target_column="gold", held_out_fraction=0
        )
        assert isinstance(source, IndexedSource) and source.name == str(file)
        assert source.take(1)[0].target == "2"


def test_arithmetic_takes_a_range():
    assert (
        open_source("arithmetic", seed=5).fingerprint() == arithmetic(0, 20, seed=5).fingerprint()
    )
    ranged = open_source("arithmetic:-5:99", seed=0, held_out_fraction=0.3)
    assert ranged.state_dict() == arithmetic(-5, 99, seed=0, held_out_fraction=0.3).state_dict()
    natural = arithmetic(0, 9, seed=0, allow_negative=False)
    assert open_source("arithmetic:0:9:natural", seed=0).state_dict() == natural.state_dict()
    with pytest.raises(DataError, match="arithmetic:0:99"):
        open_source("arithmetic:9", seed=0)


def test_a_function_of_a_file_gives_rows_or_a_source_and_a_folder_with_a_size_is_none(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from gruppo.data.arithmetic import arithmetic\n"
        "def rows(): return [{'prompt': 'a'}, 'b']\n"
        "def sums(): return arithmetic(0, 9, seed=1)\n"
    )
    source = open_source(f"{file}:rows", seed=0, held_out_fraction=0)
    assert sorted(prompt.inputs for prompt in source.take(2)) == ["a", "b"]
    assert open_source(f"{file}:sums", seed=0).state_dict() == arithmetic(0, 9, seed=1).state_dict()
    with pytest.raises(DataError, match="no folder"):
        open_source(f"images:{tmp_path}/pictures:64", seed=0)


def test_a_reasoning_gym_task_opens():
    pytest.importorskip("reasoning_gym")
    assert open_source("reasoning_gym:chain_sum", seed=0).name == "reasoning_gym:chain_sum"


@pytest.mark.parametrize("data", ["nonsense", "", 3, None, {"prompt": "a"}, "a/b/c", "a b/c"])
def test_anything_else_lists_the_accepted_forms(data):
    with pytest.raises(DataError, match=r"Data is one of: .*arithmetic.* OWNER/NAME:CONFIG:SPLIT"):
        open_source(data, seed=0)


def test_a_misspelt_kind_names_the_nearest_and_missing_files_are_named():
    with pytest.raises(DataError, match="Did you mean arithmetic"):
        open_source("arithmatic", seed=0)
    with pytest.raises(DataError, match="no file"):
        open_source(Path("absent.jsonl"), seed=0)
    with pytest.raises(DataError, match="no rows"):
        open_source([], seed=0)


@pytest.mark.parametrize(
    ("rest", "config", "split"),
    [
        ("", None, "train"),
        (":test[:100]", None, "test[:100]"),
        (":main:test", "main", "test"),
        (":20231101.en:train[10:20]+test[:5]", "20231101.en", "train[10:20]+test[:5]"),
    ],
)
def test_a_hub_name_is_split_into_name_configuration_and_split(monkeypatch, rest, config, split):
    requested = []

    def read(*given):
        requested.append(given)
        return [{"prompt": "a"}]

    monkeypatch.setattr("gruppo.data.rows.read_dataset", read)
    open_source(f"owner/some-set{rest}", seed=0, held_out_fraction=0)
    assert requested == [("owner/some-set", config, split)]


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.csv").write_text("prompt\na\n")
    with pytest.raises(Exception, match=r'pip install .*\[data\]"'):
        open_source(tmp_path / "a.csv", seed=0)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(Exception, match=r'pip install .*\[tasks\]"'):
        open_source("reasoning_gym:gcd", seed=0)
