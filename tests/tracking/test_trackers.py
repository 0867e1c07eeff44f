"""Trackers of others: what they are told, by whom a resumed run is known, and that none of them can
end a run."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests import tiny
from tests.trainer.runs import metrics

from gruppo import api
from gruppo import distributed as dist
from gruppo.config.schema import Config, Stage
from gruppo.loading import install_command
from gruppo.tracking import trackers
from gruppo.trainer.run_dir import RunFolder
from gruppo.types import GruppoError

ROWS = [
    {"prompt": "2 + 2 =", "completion": "4 | 5\n", "reward": 1.0, "target": "4"},
    {
        "prompt": [{"role": "user", "content": "3?"}],
        "completion": "x",
        "reward": float("nan"),
        "target": None,
    },
]


# --- TensorBoard, as it is ------------------------------------------------------------------------


def events(run: Path) -> Any:
    """What TensorBoard would show of a run."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(
        str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0, "images": 0}
    )
    return found.Reload()


def scalars(run: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(run).Scalars(name)]


def test_tensorboard_shows_every_metric_of_every_step_under_its_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = api.start(tiny.config(tmp_path, track=("tensorboard",), steps=3)).folder
    rows, shown = metrics(run), events(run)
    assert {"reward/mean", "eval/reward_mean", "grad/norm"} <= {*shown.Tags()["scalars"]}
    for name in {name for row in rows for name in row} - {"step"}:
        logged = [
            (row["step"], float("nan") if row[name] is None else row[name])
            for row in rows
            if name in row
        ]
        assert [e.step for e in shown.Scalars(name)] == [step for step, _ in logged]
        assert [e.value for e in shown.Scalars(name)] == pytest.approx(
            [v for _, v in logged], rel=1e-6, nan_ok=True
        )
    assert "samples/text_summary" in shown.Tags()["tensors"]


def test_a_resume_goes_on_in_the_same_events_and_hides_what_came_after_its_checkpoint(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    for from_step, steps, value in ((None, range(1, 5), 1.0), (2, range(3, 6), 2.0)):
        tracker = trackers.TensorBoard(tmp_path, {}, from_step)
        for step in steps:
            tracker.log(step, {"reward/mean": value})
        tracker.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_tensorboard_has_samples_as_a_table_the_sheet_and_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    image = pytest.importorskip("PIL.Image")
    import torch

    (tmp_path / "images").mkdir()
    image.new("RGB", (4, 2), (255, 0, 0)).save(tmp_path / "images/eval_000007.png")
    tracker = trackers.TensorBoard(tmp_path, {"optim.lr": 0.5, "model": "tiny"}, None)
    tracker.log_samples(3, ROWS)
    tracker.log_samples(
        7, [{"prompt": "7", "completion": torch.zeros(3, 2, 4), "reward": 1.0, "held_out": True}]
    )
    tracker.close()
    shown = events(tmp_path)
    (table,) = shown.Tensors("samples/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    lines = [[cell.strip() for cell in line[1:-2].split(" | ")] for line in text.splitlines()]
    assert lines == [
        ["reward", "prompt", "completion", "target"],
        ["---"] * 4,
        ["1.0", "2 + 2 =", "4 \\| 5\\n", "4"],
        ["nan", "3?", "x", ""],
    ]
    (sheet,) = shown.Images("held_out_sheet")
    assert (sheet.step, sheet.width, sheet.height) == (7, 4, 2)
    (settings,) = shown.Tensors("config/text_summary")
    assert "| optim.lr | 0.5 |" in settings.tensor_proto.string_val[0].decode()


# --- stand-ins for the other two ------------------------------------------------------------------


class Recorded:
    """A run of wandb or trackio that keeps what it is given."""

    def __init__(self, known_by: str) -> None:
        self.id = self.name = known_by
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.is_finished = False

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((step, data))

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def finish(self) -> None:
        self.is_finished = True


def fake_wandb(
    monkeypatch: pytest.MonkeyPatch, *, has_key: bool = True
) -> list[tuple[dict[str, Any], Recorded]]:
    """``wandb`` 0.31 as far as it is used: the parameters of ``init`` are its own names."""
    opened: list[tuple[dict[str, Any], Recorded]] = []

    def init(
        *,
        project: str,
        name: str,
        id: str | None,
        resume: str,
        dir: str,
        config: dict[str, Any],
        mode: str | None,
        settings: Any,
    ) -> Recorded:
        source = dict(locals())
        source.pop("opened", None)
        opened.append((source, Recorded(id or "new1")))
        return opened[-1][1]

    fake: Any = ModuleType("wandb")
    fake.__spec__ = SimpleNamespace(name="wandb")
    fake.init, fake.Settings = init, lambda **options: options
    fake.login = lambda prompt: has_key
    fake.Table = lambda columns, data: ("table", columns, data)
    fake.Image = lambda path: ("image", path)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return opened


def fake_trackio(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Recorded]]:
    """``trackio`` 0.43: ``init`` prints, and gives a run that is there already another name."""
    opened: list[tuple[dict[str, Any], Recorded]] = []

    def init(
        *, project: str, name: str, config: dict[str, Any], resume: str, embed: bool
    ) -> Recorded:
        print("* Trackio project initialized")
        is_there = any(run.name == name for _, run in opened)
        found = Recorded(f"{name}-2" if is_there and resume == "never" else name)
        opened.append(
            (
                {
                    "project": project,
                    "name": name,
                    "config": config,
                    "resume": resume,
                    "embed": embed,
                },
                found,
            )
        )
        return found

    fake: Any = ModuleType("trackio")
    fake.__spec__ = SimpleNamespace(name="trackio")
    fake.init = init
    fake.Table = lambda columns, data: ("table", columns, data)
    fake.Image = lambda path: ("image", path)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    return opened


TABLE = (
    "table",
    ["reward", "prompt", "completion", "target"],
    [[1.0, "2 + 2 =", "4 | 5\n", "4"], [pytest.approx(float("nan"), nan_ok=True), "3?", "x", ""]],
)


def test_wandb_gets_all_metrics_and_samples_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, run_dir = fake_wandb(monkeypatch), tmp_path / "mine"
    run_dir.mkdir()
    tracker = trackers.open_wandb(run_dir, {"optim.lr": 0.5}, None)
    tracker.log(3, {"reward/mean": 0.25})
    tracker.log_samples(3, ROWS)
    tracker.close()
    trackers.open_wandb(run_dir, {"optim.lr": 0.5}, 3)
    (source, run), (again, _) = opened
    assert (source["project"], source["name"], source["id"], source["mode"]) == (
        "gruppo",
        "mine",
        None,
        None,
    )
    assert (source["config"], source["dir"], source["resume"]) == (
        {"optim.lr": 0.5},
        str(run_dir),
        "allow",
    )
    assert (
        source["settings"]["finish_timeout"] < trackers.CLOSE_S
        and source["settings"]["console"] == "off"
    )
    assert (again["id"], again["resume"]) == ("new1", "allow")
    assert run.axes == [("step", None), ("*", "step")]
    assert run.rows[0] == (None, {"step": 3, "reward/mean": 0.25})
    assert run.rows[1][1]["samples"] == TABLE and run.is_finished


@pytest.mark.parametrize(
    ("has_key", "environment", "mode"),
    [(False, "", "offline"), (True, "", None), (False, "disabled", None)],
)
def test_wandb_without_a_key_writes_offline_unless_the_environment_says_how(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_key: bool,
    environment: str,
    mode: str | None,
) -> None:
    opened = fake_wandb(monkeypatch, has_key=has_key)
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    trackers.open_wandb(tmp_path, {}, None)
    assert opened[0][0]["mode"] == mode


def test_trackio_gets_all_metrics_and_samples_and_a_resumed_run_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = fake_trackio(monkeypatch)
    for place in ("a", "b"):
        (tmp_path / place / "mine").mkdir(parents=True)
        trackers.open_trackio(tmp_path / place / "mine", {"steps": 4}, None)
    tracker = trackers.open_trackio(tmp_path / "b/mine", {"steps": 4}, 2)
    tracker.log(3, {"reward/mean": 0.25})
    tracker.log_samples(3, ROWS)
    tracker.close()
    assert [(source["name"], source["resume"]) for source, _ in opened] == [
        ("mine", "never"),
        ("mine", "never"),
        ("mine-2", "allow"),
    ]
    assert opened[0][0]["project"] == "gruppo" and opened[0][0]["config"] == {"steps": 4}
    run = opened[2][1]
    assert run.rows == [(3, {"reward/mean": 0.25}), (3, {"samples": TABLE})] and run.is_finished
    assert capsys.readouterr().out == ""


def test_pictures_are_the_sheet_that_the_run_has_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    import torch

    opened, tracks = fake_wandb(monkeypatch), fake_trackio(monkeypatch)
    rows = [
        {
            "prompt": "7",
            "completion": torch.zeros(3, 2, 4),
            "reward": 1.0,
            "group": 0,
            "held_out": False,
        }
    ]
    both = trackers.open_wandb(tmp_path, {}, None), trackers.open_trackio(tmp_path, {}, None)
    for tracker in both:
        tracker.log_samples(2, rows)
    assert opened[0][1].rows == tracks[0][1].rows == [], "no sheet was drawn"
    (tmp_path / "images").mkdir()
    file = tmp_path / "images/step_000002.png"
    image.new("RGB", (4, 2)).save(file)
    for tracker in both:
        tracker.log_samples(2, rows)
    assert opened[0][1].rows == [(None, {"step": 2, "samples_sheet": ("image", str(file))})]
    assert tracks[0][1].rows == [(2, {"samples_sheet": ("image", str(file))})]


def test_a_whole_run_logs_its_metrics_file_to_wandb_and_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, tracks = fake_wandb(monkeypatch), fake_trackio(monkeypatch)
    config = tiny.config(tmp_path, track=("wandb", "trackio"), steps=2)
    run = api.start(config).folder
    logged: dict[int, dict[str, float]] = {}
    for _, row in opened[0][1].rows:
        logged.setdefault(row["step"], {}).update(row)
    rows = metrics(run)
    assert rows and all(
        logged[row["step"]][name] == row[name]
        for row in rows
        for name in row
        if row[name] is not None
    )
    assert {step for step, _ in tracks[0][1].rows} == {row["step"] for row in rows}
    assert (
        opened[0][0]["config"]["rollout.group_size"] == 3
        and opened[0][1].is_finished
        and tracks[0][1].is_finished
    )


def test_settings_are_leaves_under_dotted_names(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, stages=(Stage("a", steps=2, lr=0.5), Stage("b")))
    found = trackers.settings(config)
    assert (
        found["optim.lr"] == 1e-2
        and found["stages.0.name"] == "a"
        and found["stages.1.lr"] == "None"
    )
    assert found["optim.betas"] == "0.9 0.999" and found["track"] == ""
    assert {type(value) for value in found.values()} <= {bool, int, float, str}


# --- one's own, and what goes wrong ---------------------------------------------------------------


class Mine:
    """A tracker of one's own, in a folder beside the run's files."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        assert isinstance(config, Config)
        self.file = run_dir / "mine.txt"

    def log(self, step: int, metrics: Any) -> None:
        with self.file.open("a") as file:
            file.write(f"log {step}\n")

    def log_samples(self, step: int, rows: Any) -> None:
        with self.file.open("a") as file:
            file.write(f"samples {step}\n")

    def close(self) -> None:
        with self.file.open("a") as file:
            file.write("close\n")


class Raises(Mine):
    """Fails from the second step on."""

    def log(self, step: int, metrics: Any) -> None:
        super().log(step, metrics)
        if step >= 2:
            raise ConnectionError("no network\nmany lines")


class CannotOpen(Mine):
    def __init__(self, run_dir: Path, config: Config) -> None:
        raise SystemExit("no")


class NoClose:
    """Half a tracker."""

    log = log_samples = Mine.log


def mine(name: str) -> str:
    return f"{Path(__file__).resolve()}:{name}"


def test_a_tracker_that_fails_is_one_warning_and_the_run_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = api.start(tiny.config(tmp_path / "plain", steps=3)).folder
    with caplog.at_level(logging.WARNING, logger="gruppo"):
        run = api.start(
            tiny.config(tmp_path, track=(mine("Raises"), mine("CannotOpen"), mine("Mine")), steps=3)
        ).folder
    output = [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()]
    assert len(output) == 2
    assert "CannotOpen could not be opened" in output[0] and "SystemExit: no" in output[0]
    assert (
        "Raises failed" in output[1]
        and "ConnectionError: no network. The run continues" in output[1]
    )
    assert metrics(run) == metrics(plain)
    assert "log 3" in (run / "mine.txt").read_text(), "the next tracker is told of every step"


def test_a_run_does_not_wait_for_a_tracker_that_does_not_finish(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.01)
    for_ever = threading.Event()
    hanging = SimpleNamespace(log=None, log_samples=None, close=for_ever.wait)
    tracker = trackers.GuardedTracker("wandb", lambda: hanging)  # type: ignore[arg-type, return-value]
    with caplog.at_level(logging.WARNING, logger="gruppo"):
        tracker.close()
        tracker.close()
    for_ever.set()
    assert [record.getMessage() for record in caplog.records] == [
        "the tracker wandb could not be closed and is not used any more: no answer within 0.01 s. "
        "The run continues; metrics.jsonl and samples.jsonl hold everything."
    ]


def test_what_ends_a_run_passes_through_a_tracker() -> None:
    def interrupted(step: int, metrics: Any) -> None:
        raise KeyboardInterrupt

    stub: Any = SimpleNamespace(log=interrupted, log_samples=None, close=lambda: None)
    tracker = trackers.GuardedTracker("mine", lambda: stub)
    with pytest.raises(KeyboardInterrupt):
        tracker.log(1, {})


REFUSED = {
    "an unknown name": (
        ("tensorbord",),
        r"unknown tracker 'tensorbord'. Available: tensorboard, wandb, trackio.*file.py:Class",
    ),
    "a class that is not there": ((mine("Mina"),), r"has no 'Mina'.*Did you mean"),
    "half a tracker": ((mine("NoClose"),), r"has no close; it needs log\(step, metrics\)"),
    "no class": ((mine("ROWS"),), r"ROWS has no log and no log_samples and no close; it needs"),
    "the same twice": ((mine("Mine"), mine("Mine")), r"more than once; leave one of them out"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_invalid_tracker_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    names, why = REFUSED[what]
    with pytest.raises(GruppoError, match=why) as error:
        api.start(tiny.config(tmp_path, track=names))
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_missing_package_is_one_line_at_the_start_and_a_warning_in_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        GruppoError, match=rf'--track {name} needs the package .*pip install .*\[track\]"$'
    ):
        api.start(tiny.config(tmp_path, track=(name,)))
    assert not (tmp_path / "runs").exists()
    with caplog.at_level(logging.WARNING, logger="gruppo"):
        trackers.open_trackers([name], tmp_path, Config(), from_step=3)
    assert len(caplog.records) == 1 and install_command("track") in caplog.records[0].getMessage()


def test_only_the_main_rank_has_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(tiny.config(tmp_path, track=(mine("Mine"),)))
    assert [type(tracker).__name__ for tracker in folder.trackers(from_step=None)] == [
        "MetricsFile",
        "SamplesFile",
        "GuardedTracker",
    ]
    monkeypatch.setattr(dist, "is_main", lambda: False)
    assert folder.trackers(from_step=None) == []
    monkeypatch.undo()
    folder.close()


def test_the_real_packages_accept_the_arguments_of_the_stand_ins() -> None:
    """Where they are installed: the names of the parameters that the stand-ins above have."""
    wandb = pytest.importorskip("wandb")
    trackio = pytest.importorskip("trackio")
    expected = {"project", "name", "id", "resume", "dir", "config", "mode", "settings"}
    assert expected <= {*inspect.signature(wandb.init).parameters}
    assert {"project", "name", "config", "resume", "embed"} <= {
        *inspect.signature(trackio.init).parameters
    }
    assert "prompt" in inspect.signature(wandb.login).parameters
