"""Links in the folder of a run lead no command to files outside it. Attacks use commands and files
alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import processes, tiny

import gruppo
from gruppo.view.report import write_report

OPTIONS = {"steps": 2, "saving__every": 1, "evaluation__every": 1, "reward": ["exact_match"]}


@pytest.fixture(autouse=True)
def _reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write their reports, which other tests do without."""
    monkeypatch.setattr("gruppo.view.report.write_report", write_report)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint, completions, evaluations and a final model."""
    return gruppo.train(
        tiny.config(tmp_path_factory.mktemp("finished"), **OPTIONS), show=False
    ).folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "runs/run")


@pytest.fixture
def outside(finished: Path, tmp_path: Path) -> Path:
    """Files of somebody else: another run, a picture, a text."""
    shutil.copytree(finished, tmp_path / "outside/other")
    (tmp_path / "outside/text").write_text("mine")
    return tmp_path / "outside"


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def plant(run: Path, part: str, target: Path) -> None:
    """Put a link to ``target`` in place of a part of the run."""
    link = run / part
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


Gruppo = Callable[..., str]


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Gruppo:
    """The one line with which a command ends that must refuse a link."""

    def call(*args: object) -> str:
        capsys.readouterr()
        assert processes.exit_code([*map(str, args)]) == 2
        line = capsys.readouterr().err
        assert (
            line.count("\n") == 1 and "is a link to" in line and "outside the run folder" in line
        ), line
        return line

    return call


def accepts(*args: object) -> None:
    assert processes.exit_code([*map(str, args)]) == 0


# --- a part of the run is a link to something outside ---------------------------------------------

FILES = ["config.json", "manifest.json", "metrics.jsonl", "samples.jsonl", "evaluations.json"]
SAVES = [
    "checkpoints",
    "checkpoints/latest",
    "checkpoints/step_000002",
    "completions",
    "final",
    "final/config.json",
]
SAME = [*FILES, *SAVES, "completions/step_000001.jsonl.gz", "metrics.csv", "log.txt", ".lock"]
"""Parts of a run that are links to those of another run."""
SCRATCH = [
    ".report.html.new",
    ".metrics.csv.new",
    ".metrics.jsonl.new",
    ".samples.jsonl.new",
    ".latest.tmp-1",
]
OTHERS = [
    *SCRATCH,
    "report.html",
    "token_budget",
    "images/step_000001.png",
    "trackers.json",
    "judges/x/0.tmp",
]
"""Files of a run that are links to the text of somebody else."""
FOLDERS = ["images", "plots", "judges", "best", "ledger", "tensorboard", "logs", "wandb"]


@pytest.mark.parametrize("command", ["resume", "report"])
@pytest.mark.parametrize("part", [*SAME, *OTHERS, *FOLDERS])
def test_a_run_with_a_part_outside_is_refused_and_nothing_outside_changes(
    run: Path, outside: Path, refuses: Gruppo, part: str, command: str
) -> None:
    plant(
        run,
        part,
        outside / "other" / part
        if part in SAME
        else outside / "text"
        if part in OTHERS
        else outside,
    )
    before, own = contents(outside), contents(run)
    line = refuses(command, run)
    assert str(run / part) in line and contents(outside) == before and contents(run) == own


COMMANDS = [
    ["train", "RUN"],
    ["train", "RUN/config.json"],
    ["train", "--replay", "RUN"],
    ["launch", "RUN", "--dry-run"],
    ["launch", "arithmetic", "--name", "run", "--runs-dir", "RUNS", "--dry-run"],
    ["explain", "RUN"],
    ["config", "RUN"],
    ["resume", "RUN"],
    ["eval", "RUN", "--prompts", "1"],
    ["sample", "RUN", "1 + 1"],
    ["sample", "RUN/final", "1 + 1"],
    ["export", "RUN", "exported"],
    ["export", "RUN/final", "exported"],
    ["doctor", "RUN"],
    ["report", "RUN", "--output", "page.html"],
    ["view", "RUN", "--port", "99999"],  # at which nothing could be served
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_opens_a_run_refuses_it(
    run: Path,
    outside: Path,
    refuses: Gruppo,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    plant(run, "checkpoints", outside / "other/checkpoints")
    before = contents(tmp_path)
    refuses(*(word.replace("RUNS", str(run.parent)).replace("RUN", str(run)) for word in command))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("call", [gruppo.train, gruppo.resume, gruppo.Trainer.resume])
def test_python_refuses_it_too(run: Path, outside: Path, call: Callable[..., object]) -> None:
    plant(run, "completions", outside / "other/completions")
    before = contents(outside)
    with pytest.raises(
        gruppo.GruppoError, match=r"completions is a link to .* outside the run folder"
    ):
        call(run)
    assert contents(outside) == before


@pytest.mark.parametrize("part", ["log.txt", "logs", ".lock", ".config.json.tmp-1"])
def test_a_new_run_does_not_follow_the_links_of_a_folder_that_waits_for_it(
    run: Path, outside: Path, refuses: Gruppo, tmp_path: Path, part: str
) -> None:
    waiting = tmp_path / "runs/new"
    plant(waiting, part, outside if part == "logs" else outside / "text")
    before = contents(outside)
    refuses("train", run, "--name", "new", "--runs-dir", run.parent)
    assert contents(outside) == before


@pytest.mark.parametrize(
    "target",
    ["../../outside/text", "absent", "../run-2", "loop"],
    ids=[
        "relative",
        "dangling",
        "a folder whose name begins like the run's",
        "over a link that leads back",
    ],
)
def test_any_spelling_of_a_target_outside_is_refused(
    run: Path, outside: Path, refuses: Gruppo, target: str
) -> None:
    shutil.copytree(outside / "other", run.parent / "run-2")
    (outside / "loop").symlink_to(outside / "text")
    places = {"absent": outside / "absent", "loop": Path("images/../../../outside/loop")}
    (run / "images").mkdir(exist_ok=True)
    plant(run, "report.html", places.get(target, Path(target)))
    refuses("report", run)
    assert not (outside / "absent").exists() and (outside / "text").read_text() == "mine"


def test_the_refusal_of_a_name_with_a_line_end_is_one_line(
    run: Path, outside: Path, refuses: Gruppo
) -> None:
    plant(run, "plots/a\nb\x1b[2J", outside / "text")
    assert r"a\nb\x1b[2J" in refuses("report", run)


# --- links that are no fault ----------------------------------------------------------------------


def test_a_run_folder_that_is_a_link_and_links_within_it_are_opened(
    run: Path, outside: Path, tmp_path: Path
) -> None:
    (run / "newest").symlink_to("checkpoints/step_000002")
    (run / "wandb/run-1/logs").mkdir(parents=True)
    (run / "wandb/run-1/logs/debug-core.log").symlink_to(outside / "text")  # as wandb does
    (tmp_path / "link").symlink_to(run)
    for command in ("resume", "report", "doctor"):
        accepts(command, tmp_path / "link")


def test_a_model_folder_of_links_as_in_the_cache_of_a_hub_is_opened(
    finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "snapshot").mkdir()
    for path in (finished / "final").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    accepts("sample", tmp_path / "snapshot", "1 + 1")


# --- links within the folder ----------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [".report.html.new", ".report.html.tmp-{pid}"])
def test_a_temporary_file_is_not_written_through_a_link(run: Path, scratch: str) -> None:
    plant(run, scratch.format(pid=os.getpid()), Path("config.json"))
    before = (run / "config.json").read_bytes()
    accepts("report", run)
    assert (run / "config.json").read_bytes() == before
    assert (run / "report.html").is_file() and not (run / "report.html").is_symlink()


def test_a_report_to_a_file_elsewhere_is_not_written_through_a_link_beside_it(
    run: Path, outside: Path
) -> None:
    for scratch in (".page.html.new", f".page.html.tmp-{os.getpid()}"):
        (outside / scratch).symlink_to(outside / "text")
    accepts("report", run, "--output", outside / "page.html")
    assert (outside / "text").read_text() == "mine" and (outside / "page.html").is_file()


# --- paths in files -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["../../outside/secret.png", "OUTSIDE/secret.png"])
def test_pictures_outside_that_samples_name_are_not_drawn(
    run: Path, outside: Path, place: str
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8), "red").save(outside / "secret.png")
    shown = {
        "file": place.replace("OUTSIDE", str(outside)),
        "box": [0, 0, 8, 8],
    }
    rows = [
        {"step": step, "held_out": True, "prompt": "p", "completion": "c", "image": shown}
        for step in (1, 2)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accepts("resume", run)
