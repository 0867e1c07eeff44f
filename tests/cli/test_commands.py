"""The command line: what works, what each mistake says, and what it exits with."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests import own_models, processes, tiny
from tests.trainer.runs import newest, steps_logged

from gruppo import api
from gruppo.cli.options import parse_config
from gruppo.config import schema as configs
from gruppo.config import serialization
from gruppo.errors import as_flag
from gruppo.loading import command_name
from gruppo.recipes import RECIPES
from gruppo.trainer import checkpoint
from gruppo.types import GruppoError

TWO, THERE = "supervised:5,full", "the run has --stages.0 supervised, --stages.1 full"
BARE = {"evaluation__prompts": 0, "saving__every": 1, "steps": 3}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that is complete."""
    return api.start(tiny.config(tmp_path_factory.mktemp("finished"), **BARE)).folder


@pytest.fixture
def recipe(tmp_path) -> str:
    """A config file to train from; its runs go to ``tmp_path/runs``."""
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(serialization.to_dict(tiny.config(tmp_path, **BARE))))
    return str(path)


def call(folder: Path, *args: str) -> tuple[int, str, str]:
    child = processes.gruppo(*args, folder=folder / "child")
    return child.wait(), child.out, child.err


def one_line(folder: Path, *args: str) -> tuple[int, str]:
    """The exit code and the one line of a mistake."""
    code, _, err = call(folder, *args)
    assert err.startswith("gruppo: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err
    return code, err


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The same of a command of this process."""
    out, err = capsys.readouterr()
    assert err.startswith("gruppo: ") and err.count("\n") == 1 and err.endswith("\n") and not out, (
        out + err
    )
    return err


# --- what works -----------------------------------------------------------------------------------


def test_train_resume_eval_sample_and_explain(tmp_path, monkeypatch):
    (tmp_path / "recipes.py").write_text(
        "from pathlib import Path\nfrom tests import tiny\n\n"
        f"def toy():\n    return tiny.config(Path({str(tmp_path)!r}))\n"
    )
    run = tmp_path / "runs/first"
    overrides = [
        "--name",
        "first",
        "--steps",
        "3",
        "--objective",
        "dr-grpo",
        "--objective.clip_high=0.3",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(processes, "draws_plots", True)
        code, out, err = call(tmp_path, "train", f"{tmp_path / 'recipes.py'}:toy", *overrides)
    assert (code, err) == (0, "")
    assert (
        "step 3/3" in out and "held-out reward, 4 prompts" in out and f"gruppo sample {run} " in out
    )
    config = serialization.load(run / "config.json")
    assert config.objective == serialization.preset("dr_grpo").__class__(
        **{**vars(serialization.preset("dr_grpo")), "clip_high": 0.3}
    )
    files = [
        "config.json",
        "evaluations.json",
        "final",
        "log.txt",
        "manifest.json",
        "metrics.csv",
        "metrics.jsonl",
    ]
    assert {*files, "samples.jsonl", "plots", "checkpoints"} <= {
        path.name for path in run.iterdir()
    }

    code, out, err = call(tmp_path, "resume", str(run))
    assert (code, err) == (0, "") and "held-out" in out

    code, out, err = call(tmp_path, "eval", str(run), "--prompts", "5", "--show", "2")
    assert (code, err) == (0, "")
    after = json.loads((run / "evaluations.json").read_text())[-1]
    assert re.search(r"mean reward [\d.]+, 95% interval [\d.]+ to [\d.]+, 5 held-out prompts", out)
    assert out.count("-> ") == 2 and after["step"] == 3

    code, out, err = call(
        tmp_path, "sample", str(run), "1 + 1 = ?", "2 + 2 = ?", "--n", "2", "--temperature", "1"
    )
    assert (code, err) == (0, "") and out.count(" -> ") == 4 and out.count("'1 + 1 = ?' -> ") == 2

    before = sorted(tmp_path.rglob("*"))
    code, out, err = call(tmp_path, "explain", str(run / "config.json"), "--stage.kl-coef", "0.1")
    assert (code, err) == (0, "")
    for part in (
        "OBJECTIVE",
        "min(r A, clip(r, 0.8, 1.3) A)",
        "0.1 x KL",
        "WORK",
        "MEMORY",
        "reference",
        "digits(...) = ",
    ):
        assert part in out
    assert sorted(tmp_path.rglob("*")) == before  # nothing was trained or written


def test_recipes_and_help(tmp_path):
    code, out, err = call(tmp_path, "recipes")
    assert (code, err) == (0, "") and out.startswith("arithmetic ")
    code, out, err = call(tmp_path, "recipes", "arithmetic")
    assert (code, err) == (0, "") and out.startswith("arithmetic\n") and "CPU" in out
    for args in (["--help"], ["-h"], ["help"]):
        code, out, err = call(tmp_path, *args)
        assert (code, err) == (0, "") and all(f"{code} " in out for code in (0, 2, 3, 4, 75))
    code, out, err = call(tmp_path, "train", "arithmetic", "--help")
    assert (code, err) == (0, "") and "--rollout.group-size" in out
    assert "Stages NAME:STEPS,NAME (supervised, ramp, full)" in " ".join(out.split())
    assert f"(default: {RECIPES['arithmetic']().rollout.group_size})" in out
    code, out, err = call(tmp_path, "sample", "--help")
    assert (code, err) == (0, "") and "--temperature" in out
    assert call(tmp_path, "--version")[1].startswith("gruppo ")


def test_neither_help_nor_the_import_imports_torch():
    command = [sys.executable, "-X", "importtime", "-m", "gruppo", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "start here:" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gruppo" in imported and not imported & {"torch", "numpy"}
    code = "import sys, gruppo; dir(gruppo); print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [
        "False",
        "False",
    ]


def test_the_plain_recipe_takes_ones_own_model_data_and_reward(tmp_path):
    data = tiny.write_rows(tmp_path / "mine.jsonl")
    own = ["--model", tiny.model(), "--data", data, "--reward", tiny.reward("digits")]
    small = [
        "--steps",
        "1",
        "--rollout.max-new-tokens",
        "4",
        "--evaluation.prompts",
        "0",
        "--compute",
        "float32",
    ]
    runs = ["--runs-dir", str(tmp_path / "runs"), "--name", "run", "--scoring.timeout-s", "None"]
    code, _, err = call(tmp_path, "train", "plain", *own, *small, *runs)
    assert (code, err) == (0, "")
    config = serialization.load(tmp_path / "runs/run/config.json")
    sampling = config.rollout
    assert (sampling.temperature, sampling.top_k, sampling.top_p, config.scoring.timeout_s) == (
        1.0,
        0,
        1.0,
        None,
    )
    code, line = one_line(tmp_path, "train", "plain", *own[2:])
    assert code == 2 and "Set --model" in line


@pytest.mark.slow
def test_nothing_but_our_own_lines_reaches_the_terminal(tmp_path, recipe):
    """In a process of its own, where the libraries are imported with nothing set beforehand."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HF_", "TRANSFORMERS_", "TOKENIZERS_"))
    }
    command = [
        sys.executable,
        "-m",
        "gruppo",
        "train",
        recipe,
        "--name",
        "run",
        "--steps",
        "1",
        "--stage.kl-coef",
        "0.1",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env | {"OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *_ = done.stdout.splitlines()
    assert first.startswith("step 1/1")


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m gruppo recipes | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_does_not_end_training(tmp_path, recipe):
    args = [
        "train",
        recipe,
        "--name",
        "run",
        "--reward",
        tiny.reward("prints"),
        "--show-samples-every",
        "1",
    ]
    child = processes.start(unread, args, folder=tmp_path / "child")
    assert child.wait() == 0
    run = tmp_path / "runs/run"
    assert steps_logged(run) == BARE["steps"] and checkpoint.seal_holds(run / "final")
    assert "unscored" not in (run / "log.txt").read_text()  # the reward prints too


def unread(args: list[str]) -> None:
    """The command with its output in a pipe that nobody reads."""
    reader, writer = os.pipe()
    for number in (1, 2):
        processes.redirect(number, writer)
    os.close(reader)
    processes.command_line(args)


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_exits_75_with_the_command_that_continues(tmp_path, recipe, number):
    run = tmp_path / "runs/run"
    child = processes.gruppo(
        "train", recipe, "--name", "run", "--steps", "5000", folder=tmp_path / "child"
    )
    child.wait_for(lambda: steps_logged(run) > 2)
    child.send(number)
    assert child.wait() == 75
    *heard, last = child.err.splitlines()
    assert (
        last == f"gruppo: stopped by a signal; what is complete is saved. Continue with: "
        f"{command_name()} resume {run}"
    )
    assert heard in ([], ["gruppo: finishing this step, then saving; again stops at once"])
    assert checkpoint.load_latest(run / "checkpoints").step >= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_run_began_exits_75_and_leaves_nothing(tmp_path, recipe, number):
    child = processes.start(
        signal_while_loading, ["train", recipe, "--name", "run"], number, folder=tmp_path / "child"
    )
    assert child.wait() == 75
    assert "stopped by a signal before the run began: nothing was written." in child.err
    assert not (tmp_path / "runs").exists()


def signal_while_loading(args: list[str], number: int) -> None:
    from gruppo.modalities.text import modality

    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(
            processes.TIMEOUT_S
        )  # another thread may get the signal: this one is told a moment later

    modality.from_pretrained = killed
    processes.command_line(args)


# --- mistakes -------------------------------------------------------------------------------------

EMPTY, NOT_JSON = "empty.jsonl", "broken.jsonl"
MISTAKES = {
    "no such option": (["--stepz", "3"], 2, r"unknown option --stepz. Did you mean --steps\?"),
    "the last part of an option": (
        ["--lr", "3"],
        2,
        r"unknown option --lr. Did you mean --optim.lr\?",
    ),
    "not a number": (["--steps", "many"], 2, r"--steps=many needs to be a valid integer"),
    "no value": (["--steps"], 2, r"--steps: expected one argument"),
    "no such choice": (
        ["--compute", "fp4"],
        2,
        r"--compute: invalid choice: 'fp4'",
    ),
    "too few values": (
        ["--optim.betas", "0.9"],
        2,
        r"--optim.betas=.* needs more values",
    ),
    "a stray word": (["stray"], 2, r"not understood: stray"),
    "out of range": (["--rollout.top-p", "1.5"], 2, r"--rollout.top-p=1.5 is out of range"),
    "no such preset": (["--objective", "ppoo"], 2, r"'ppoo' is not a preset. Did you mean ppo"),
    "no such model folder": (
        ["--model", "./no/model"],
        2,
        r"model folder '.*no/model' does not exist",
    ),
    "no such hub model": (
        ["--model", "nobody/nothing"],
        2,
        r"model 'nobody/nothing' could not be loaded",
    ),
    "no such file": (["--data", "nothing.jsonl"], 3, r"there is no file nothing.jsonl"),
    "an empty data set": (
        ["--data", EMPTY],
        3,
        r"empty.jsonl is empty; it needs one JSON object per line",
    ),
    "broken data": (["--data", NOT_JSON], 3, r"line 1 of .*broken.jsonl is not JSON"),
    "no such column": (
        ["--prompts.column", "promt"],
        3,
        r"has no column 'promt'.*Did you mean prompt",
    ),
    "no such reward": (
        ["--reward", "exact_mach"],
        2,
        r"no reward 'exact_mach'.*Did you mean exact_match\?",
    ),
    "not a function": (
        ["--reward", tiny.reward("not_a_function")],
        3,
        r"not_a_function is 3.0 \(float\), which is not callable",
    ),
    "too many weights": (
        ["--scoring.weights", "1", "2"],
        2,
        r"weights \[1.0, 2.0\] for 1 rewards",
    ),
    "a runs folder that is a file": (["--runs-dir", EMPTY], 2, r"cannot be made|Not a directory"),
}


@pytest.mark.parametrize(("options", "exit_code", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_starts_nothing(
    tmp_path, capsys, recipe, options, exit_code, says
):
    (tmp_path / EMPTY).write_text("")
    (tmp_path / NOT_JSON).write_text("{oops\n")
    options = [str(tmp_path / word) if (tmp_path / word).is_file() else word for word in options]
    assert processes.exit_code(["train", recipe, "--name", "run", *options]) == exit_code
    assert re.search(says, only_line(capsys))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "render_raises",
            "raised AttributeError: 'dict' object has no attribute 'content'. Correct",
        ),
        ("forward_raises", "in forward, raised RuntimeError: "),
    ],
)
def test_an_error_in_code_of_the_users_names_its_line_and_is_not_called_a_bug(
    tmp_path, capfd, recipe, model, says
):
    assert (
        processes.exit_code(["train", recipe, "--name", "run", "--model", own_models.own(model)])
        == 2
    )
    last = capfd.readouterr().err.splitlines()[-1]
    assert f"gruppo: {own_models.FILE}, line " in last and says in last and "bug" not in last


def test_a_reward_that_never_scores_exits_3_with_one_line(tmp_path, recipe):
    code, line = one_line(
        tmp_path, "train", recipe, "--name", "run", "--reward", tiny.reward("raises")
    )
    assert (
        code == 3 and "scored none of 12 completions" in line and "Fix the reward function" in line
    )


def test_a_model_of_nan_exits_4_with_one_line(tmp_path, recipe):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny.model(), tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: w * float("nan") for n, w in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    code, line = one_line(
        tmp_path,
        "train",
        recipe,
        "--name",
        "run",
        "--model",
        str(folder),
        "--evaluation.prompts",
        "3",
    )
    assert code == 4 and "logits that are not finite" in line


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trian", "arithmetic"], "unknown command 'trian'. Did you mean train?"),
        (["train"], "no recipe was given"),
        (["train", "arithmetik"], "unknown recipe 'arithmetik'. Did you mean arithmetic?"),
        (["train", "other"], "digits-pretrain, digits-compress, "),
        (["train", "no.py:recipe"], "there is no file"),
        (["train", "no.json"], "no.json does not exist"),
        (
            ["train", tiny.reward("not_a_function")],
            "gives a float; a recipe returns a gruppo.Config",
        ),
        (["resume", "no/run"], "the run folder no/run does not exist"),
        (["resume"], "required: run. gruppo resume --help"),
        (["sample", "some-model"], f"For example: {command_name()} sample RUN"),
        (["eval", "x", "--promts", "3"], "unknown option --promts. Did you mean --prompts?"),
        (["sample", "m", "p", "--n", "two"], "--n: invalid int value: 'two'"),
    ],
)
def test_a_wrong_command_is_one_line_with_exit_code_2(capsys, args, says):
    assert processes.exit_code(args) == 2
    assert says in only_line(capsys)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--reward", "a", "--reward", "b"], "--reward is given twice; write --reward A B."),
        (["--steps", "3", "--steps=4"], "--steps is given twice; leave one of them out."),
        (
            ["--optim.max-grad-norm=1", "--optim.max_grad_norm", "2"],
            "--optim.max-grad-norm is given twice",
        ),
        (["--objective", "grpo", "--objective=ppo"], "--objective is given twice"),
        (["--stages", "full", "--stages", "full"], "--stages is given twice"),
        (["--stages", "full", "--stage.lr", "1", "--stage.lr", "1"], "--stage.lr is given twice"),
        (["--stages", TWO, "--stages.2.kl-coef", "1"], THERE),
        (["--stages", TWO, "--stages.full.kl-coef=1"], THERE),
        (["--stages", TWO, "--stages.1.lr", "fast"], "--stages.1.lr=fast is not understood"),
    ],
)
def test_an_option_of_a_stage_that_is_not_there_is_refused(args, says):
    with pytest.raises(GruppoError) as error:
        parse_config("train", ["arithmetic-format", *args])
    assert says in error.value.message(as_flag)


def test_a_run_without_stages_says_how_its_options_are_named():
    with pytest.raises(GruppoError, match=r"the run has one stage, --stage\.lr and the like"):
        parse_config("train", ["plain", "--stages.1.lr", "1"])


def test_no_command_shows_the_help_and_exits_2(tmp_path):
    code, out, _ = call(tmp_path)
    assert code == 2 and "usage: gruppo COMMAND" in out


def test_debug_shows_the_traceback(tmp_path, recipe):
    code, _, err = call(
        tmp_path, "train", recipe, "--name", "run", "--model", "./no/model", "--debug"
    )
    assert code == 1 and "Traceback" in err and "GruppoError" in err


# --- folders that are there, damaged, foreign, full -----------------------------------------------


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_folder_that_exists_is_left_as_it_is(tmp_path, recipe, finished):
    run = shutil.copytree(finished, tmp_path / "runs/run")
    before = content(run)
    code, line = one_line(tmp_path, "train", recipe, "--name", "run")
    assert code == 2 and f"the run folder {run} exists already. Choose another --name" in line
    assert content(run) == before


def test_a_damaged_only_checkpoint_is_one_line_and_nothing_is_lost(tmp_path, finished):
    run = shutil.copytree(finished, tmp_path / "run")
    os.truncate(newest(run) / "optimizer.safetensors", 100)
    before = {path: data for path, data in content(run).items() if path.name != "log.txt"}
    code, line = one_line(tmp_path, "resume", str(run))
    assert (
        code == 2
        and "optimizer.safetensors has changed since it was written" in line
        and "Delete that folder" in line
    )
    assert {path: data for path, data in content(run).items() if path.name != "log.txt"} == before


def test_a_foreign_checkpoint_is_one_line(tmp_path, finished):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(newest(run))
    with checkpoint.replacing(run / "checkpoints/step_000002") as place:
        (place / "weights.pt").write_text("pickle")
    code, line = one_line(tmp_path, "resume", str(run))
    assert code == 2 and "state.json" in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list"),
        ('{"stepz": 1}', "Did you mean steps?"),
    ],
)
def test_a_damaged_config_is_one_line(tmp_path, finished, text, says):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "config.json").write_text(text)
    for command in (["resume", str(run)], ["eval", str(run)], ["train", str(run)]):
        code, line = one_line(tmp_path, *command)
        assert code == 2 and says in line


def test_an_evaluation_of_nothing_is_one_line(tmp_path, finished):
    code, line = one_line(tmp_path, "eval", str(finished), "--prompts", "0")
    assert code == 2 and "needs at least 1" in line


def test_the_objects_of_a_config_are_asked_for_by_explain_as_by_train(tmp_path, recipe):
    config = json.loads(Path(recipe).read_text()) | {"data": configs.IN_MEMORY}
    Path(recipe).write_text(json.dumps(config))
    for command in ("train", "explain"):
        code, line = one_line(tmp_path, command, recipe)
        assert (
            code == 2
            and "the data of this config came from Python objects" in line
            and "Set --data" in line
        )


def test_the_model_of_an_unfinished_run_is_asked_for_in_vain(tmp_path, finished):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "final")
    for command in (["eval", str(run)], ["sample", str(run), "hello"]):
        code, line = one_line(tmp_path, *command)
        assert (
            code == 2
            and f"has no final model yet. Finish it with {command_name()} resume {run}" in line
        )


def test_a_runs_folder_is_its_config_and_its_final_model_for_another_run(
    tmp_path, recipe, finished
):
    options = ["--steps", "1", "--model", str(finished), "--runs-dir", str(tmp_path / "runs")]
    code, _, err = call(tmp_path, "train", str(finished / "config.json"), *options)
    assert (code, err) == (0, "")
    assert len(list((tmp_path / "runs").glob(f"{finished.name}-2*"))) == 1
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "final")
    code, line = one_line(tmp_path, "train", recipe, "--name", "none", "--model", str(run))
    assert (
        code == 2
        and f"the run {run} has no final model yet. Finish it with {command_name()} resume {run}"
        in line
    )


def with_a_full_disk_from(step: int, args: list[str]) -> None:
    """The disk is full for checkpoints from a step on."""
    real = checkpoint.save_file

    def save_file(tensors: object, path: Path, **metadata: object) -> None:
        if f"step_{step:06d}" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(tensors, path, **metadata)

    checkpoint.save_file = save_file
    processes.command_line(args)


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(tmp_path, recipe):
    child = processes.start(
        with_a_full_disk_from, 2, ["train", recipe, "--name", "run"], folder=tmp_path / "child"
    )
    assert child.wait() == 2, child.err
    assert re.fullmatch(
        r"gruppo: the disk is full: .*step_000002 could not be written.*gruppo resume\.\n",
        child.err,
    )
    run = tmp_path / "runs/run"
    assert checkpoint.load_latest(run / "checkpoints").step == 1
    assert call(tmp_path, "resume", str(run))[0] == 0
    whole = api.start(
        tiny.config(tmp_path / "whole", data=str(tmp_path / "data.jsonl"), **BARE)
    ).folder
    assert (run / "final/model.safetensors").read_bytes() == (
        whole / "final/model.safetensors"
    ).read_bytes()


def with_small_files(limit: int, args: list[str]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    processes.command_line(args)


@pytest.mark.parametrize("limit", [0, 1500, 20000])
def test_files_that_cannot_grow_are_one_line_wherever_the_run_is(tmp_path, recipe, limit):
    folder = tmp_path / "child"
    child = processes.start(
        with_small_files_piped,
        limit,
        ["train", recipe, "--name", "run"],
        str(folder / "err"),
        folder=folder,
    )
    code = child.wait()
    err = "".join(
        line for line in (folder / "err").open() if "could not be recorded as yours" not in line
    )  # a warning: the state folder cannot grow either
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    assert "File too large" in err and str(tmp_path / "runs") in err


def with_small_files_piped(limit: int, args: Sequence[str], path: str) -> None:
    """The limit would also stop our own output, so that goes through a pipe that the parent of a
    fork copies."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with open(reader) as pipe, open(path, "w") as file:
            file.write(pipe.read())
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(writer, 2)
    with_small_files(limit, list(args))


# --- in a terminal --------------------------------------------------------------------------------


def in_a_terminal(terminal: str, args: list[str]) -> None:
    handle = os.open(terminal, os.O_RDWR)
    os.environ["TERM"] = "xterm-256color"
    os.dup2(handle, 0)
    for number in (1, 2):
        processes.redirect(number, handle)
    processes.command_line(args)


def test_the_live_screen_is_closed_before_the_line_of_an_error(tmp_path, recipe):
    ours, theirs = pty.openpty()
    args = ["train", recipe, "--name", "run", "--reward", tiny.reward("raises")]
    child = processes.start(in_a_terminal, os.ttyname(theirs), args, folder=tmp_path / "child")
    assert child.wait() == 3
    os.set_blocking(ours, False)
    shown = os.read(ours, 1_000_000).decode()
    os.close(ours), os.close(theirs)
    assert "\x1b[?25l" in shown  # a live screen hides the cursor
    *_, screen, last = (
        shown.rstrip().rpartition("\x1b[?25h")[0],
        shown.rstrip().rpartition("\x1b[?25h")[2],
    )
    assert screen and last.lstrip("\r\n").startswith("gruppo: step 0: the reward scored none")


INCOMPLETE = """
import os, sys

def leaves(completions, trainer_state, **columns):
    if trainer_state.global_step == 1:
        os._exit(0)
    return [float(len(text)) for text in completions]


def engine(policy):
    sys.exit()
"""


@pytest.mark.parametrize(
    ("options", "says", "left"),
    [
        (
            ["--reward", "mine.py:leaves", "--scoring.isolate", "False"],
            "os._exit(0) was called",
            "no final model",
        ),
        (["--engine", "mine.py:engine"], "sys.exit() was called", "does not exist"),
    ],
    ids=["os._exit", "sys.exit"],
)
def test_code_that_ends_the_process_with_0_does_not_pass_for_a_complete_run(
    tmp_path, recipe, options, says, left
):
    (tmp_path / "mine.py").write_text(INCOMPLETE)
    options = [option.replace("mine.py", str(tmp_path / "mine.py")) for option in options]
    code, _, err = call(tmp_path, "train", recipe, *options, "--name", "left")
    assert code == 3 and says in err and f"gruppo resume {tmp_path / 'runs/left'}" in err
    code, _, err = call(tmp_path, "eval", str(tmp_path / "runs/left"))
    assert code == 2 and left in err


def test_a_reward_of_a_file_that_exits_costs_its_rows_and_not_the_run(tmp_path, recipe):
    (tmp_path / "mine.py").write_text(INCOMPLETE)
    code, _, err = call(
        tmp_path,
        "train",
        recipe,
        "--reward",
        f"{tmp_path / 'mine.py'}:leaves",
        "--scoring.isolate",
        "True",
        "--name",
        "whole",
    )
    assert code == 0, err
    rows = map(json.loads, (tmp_path / "runs/whole/metrics.jsonl").read_text().splitlines())
    counts = [row["reward/exception_count"] for row in rows if "reward/exception_count" in row]
    assert counts[0] == 0 < counts[1] and counts[2] == 0
