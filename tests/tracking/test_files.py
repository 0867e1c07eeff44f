"""The files of a run hold what was logged, and survive a crash."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from gruppo.tracking.files import (
    CompletionFiles,
    MetricsFile,
    completion_files,
    read_completions,
    read_metrics,
)
from gruppo.tracking.samples import SamplesFile
from gruppo.types import GruppoError, Stat


def csv_rows(run_dir):
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def log_three(run_dir):
    file = MetricsFile(run_dir)
    for step in (1, 2, 3):
        file.log(step, {"reward/mean": step / 7, "len/mean_actions": step})
    file.close()
    return run_dir


@pytest.mark.silent_bug(41)
def test_both_files_hold_the_hand_computed_values_to_the_bit(tmp_path):
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.1], dtype=torch.float64)
    stat = Stat.of(rewards)  # mean 2.1 / 4; variance (2.01 - 2.1 ** 2 / 4) / 4
    file = MetricsFile(tmp_path)
    file.log(3, {"reward/mean": stat.mean, "reward/std": stat.std, "loss/policy": -1 / 3})
    file.close()
    (row,), (cells,) = read_metrics(tmp_path), csv_rows(tmp_path)
    assert row["reward/mean"] == 0.525
    assert row["reward/std"] == pytest.approx(math.sqrt((2.01 - 2.1**2 / 4) / 4), rel=1e-12)
    assert row == {
        "step": 3,
        "reward/mean": stat.mean,
        "reward/std": stat.std,
        "loss/policy": -1 / 3,
    }
    assert {name: float(cell) for name, cell in cells.items()} == row


def test_nan_is_null_and_infinities_are_text(tmp_path):
    file = MetricsFile(tmp_path)
    file.log(1, {"kl/ref_nats": math.nan, "ratio/max": math.inf, "ratio/min": -math.inf})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "kl/ref_nats": null, "ratio/max": "inf", "ratio/min": "-inf"}\n'
    (row,) = read_metrics(tmp_path)
    assert (
        math.isnan(row["kl/ref_nats"])
        and row["ratio/max"] == math.inf
        and row["ratio/min"] == -math.inf
    )
    file.close()
    assert csv_rows(tmp_path) == [
        {"step": "1", "kl/ref_nats": "nan", "ratio/max": "inf", "ratio/min": "-inf"}
    ]


def test_numpy_and_tensor_scalars_are_numbers(tmp_path):
    MetricsFile(tmp_path).log(
        1, {"a": torch.tensor(0.5), "b": torch.tensor([0.25]).numpy()[0], "c": torch.tensor(3)}
    )
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "b": 0.25, "c": 3.0}]


def test_logging_a_step_again_adds_to_its_row(tmp_path):
    file = MetricsFile(tmp_path)
    file.log(1, {"reward/mean": 0.5})
    file.log(2, {"reward/mean": 0.6})
    file.log(2, {"eval/reward": 0.7})
    file.log(3, {"reward/mean": 0.8})
    assert read_metrics(tmp_path)[1:] == [
        {"step": 2, "reward/mean": 0.6, "eval/reward": 0.7},
        {"step": 3, "reward/mean": 0.8},
    ]
    file.close()
    assert (
        tmp_path / "metrics.csv"
    ).read_text() == "step,reward/mean,eval/reward\n1,0.5,\n2,0.6,0.7\n3,0.8,\n"


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "rew', b'{"step": 4, "reward/mean": 0.5}', b"\xe4\xb8", b"\0\0\0\n"]
)
def test_a_torn_last_line_is_dropped_and_the_next_step_is_whole(tmp_path, torn):
    path = log_three(tmp_path) / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    file = MetricsFile(tmp_path)
    file.cut(3)
    file.log(4, {"reward/mean": 0.25})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert read_metrics(tmp_path)[-1] == {"step": 4, "reward/mean": 0.25}
    file.close()
    assert [row["step"] for row in csv_rows(tmp_path)] == ["1", "2", "3", "4"]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = log_three(tmp_path) / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 2', '{"step" 2'))
    with pytest.raises(GruppoError, match="line 2 is not a JSON object"):
        MetricsFile(tmp_path)


@pytest.mark.silent_bug(33)
def test_cut_and_go_on_gives_the_files_of_an_uninterrupted_run(tmp_path):
    def log(file, steps):
        for step in steps:
            file.log(
                step,
                {"reward/mean": step / 7} | ({"eval/reward": 0.1 * step} if step % 2 == 0 else {}),
            )
        file.close()

    log(MetricsFile(tmp_path / "whole"), range(1, 7))
    log(MetricsFile(tmp_path / "cut"), range(1, 6))
    (tmp_path / "cut" / "metrics.csv").write_text("stale")
    resumed = MetricsFile(tmp_path / "cut")
    resumed.cut(3)
    log(resumed, range(4, 7))
    for name in ("metrics.jsonl", "metrics.csv"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_cut_to_nothing_leaves_only_the_header(tmp_path):
    file = MetricsFile(log_three(tmp_path))
    file.cut(0)
    file.close()
    assert read_metrics(tmp_path) == []
    assert (tmp_path / "metrics.csv").read_text() == "step\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_samples_keep_any_text_and_are_cut_with_the_run(tmp_path):
    file = SamplesFile(tmp_path)
    text = 'two\nlines \u2028 "quoted" [red]中文 \udc80'
    chat = {"prompt": [{"role": "user", "content": text}], "completion": text, "target": 7}
    plain = {"prompt": "2 + 2", "completion": "4", "reward": 1.0, "exact": 1.0}
    file.log_samples(1, [chat | {"reward": math.nan}])
    file.log_samples(2, [plain | {"target": torch.Size([2])}])
    first, second = [
        json.loads(line) for line in (tmp_path / "samples.jsonl").read_bytes().split(b"\n")[:-1]
    ]
    assert first == {"step": 1, **chat, "reward": None}
    assert second == {"step": 2, **plain, "target": [2]}
    file.cut(1)
    file.log_samples(2, [{"completion": "5"}])
    assert [
        json.loads(line)["step"]
        for line in (tmp_path / "samples.jsonl").read_bytes().split(b"\n")[:-1]
    ] == [1, 2]


def test_of_a_long_array_in_samples_only_type_and_shape_are_kept(tmp_path):
    arrays = {
        "short": torch.tensor([1, 2]),
        "one": torch.tensor(0.5),
        "nan": torch.tensor([math.nan]).numpy(),
    }
    SamplesFile(tmp_path).log_samples(
        1, [{"extra": arrays | {"long": torch.zeros(3, 64, 64)}, "target": torch.zeros(17)}]
    )
    [row] = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert row["extra"] == {
        "short": [1, 2],
        "one": 0.5,
        "nan": [None],
        "long": "float32 [3, 64, 64]",
    }
    assert row["target"] == "float32 [17]"


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "run").write_text("a file, not a folder")
    with pytest.raises(GruppoError, match=r"metrics.jsonl could not be written: .*permissions"):
        MetricsFile(tmp_path / "run")


# --- completions ----------------------------------------------------------------------------------


def write_completions(folder, steps, *, max_bytes=1e9):
    files = CompletionFiles(folder, max_bytes)
    for step in range(1, steps + 1):
        files.append(
            step, [{"completion": f"{step} \ud83d {n}", "reward": math.nan} for n in range(3)]
        )
    return files


def completion_steps(folder):
    paths = completion_files(folder / "completions")
    return [json.loads(line)["step"] for path in paths for line in read_completions(path)]


def test_every_completion_is_read_by_pandas_and_datasets(tmp_path, monkeypatch):
    import datasets
    import pandas

    write_completions(tmp_path, 2)
    paths = sorted(map(str, (tmp_path / "completions").glob("*.jsonl.gz")))
    assert [len(pandas.read_json(path, lines=True)) for path in paths] == [3, 3]
    rows = datasets.load_dataset(
        "json", data_files=paths, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert rows["step"] == [1, 1, 1, 2, 2, 2] and rows[0]["reward"] is None


def test_a_resumed_run_deletes_the_completions_after_its_checkpoint(tmp_path):
    files = write_completions(tmp_path, 4)
    last = tmp_path / "completions/step_000004.jsonl.gz"
    last.write_bytes(last.read_bytes()[:-10])  # the disk was full
    (tmp_path / "completions/step_mine.jsonl.gz").mkdir()  # of the user's
    assert completion_steps(tmp_path) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    files.cut(2)
    files.append(3, [{"completion": "again"}])
    assert completion_steps(tmp_path) == [1, 1, 1, 2, 2, 2, 3]
    assert not last.exists() and (tmp_path / "completions/step_mine.jsonl.gz").is_dir()


def test_completions_stop_at_their_limit_with_one_warning(tmp_path, caplog):
    write_completions(tmp_path / "whole", 2)
    size = sum(path.stat().st_size for path in tmp_path.glob("whole/completions/*.gz"))
    write_completions(tmp_path, 4, max_bytes=size)
    assert completion_steps(tmp_path) == [1, 1, 1, 2, 2, 2]
    assert caplog.text.count("completions/ has reached") == 1
