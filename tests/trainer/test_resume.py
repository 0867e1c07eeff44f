"""A run that is stopped and resumed is the run that was never stopped, to the bit."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from tests import processes, tiny
from tests.rewards import isolated
from tests.trainer.runs import (
    FULL,
    SIMPLE,
    Signalling,
    assert_same,
    begin_or_go_on,
    newest,
    steps_logged,
)

import gruppo
from gruppo import api
from gruppo.build import Parts
from gruppo.config import schema as configs
from gruppo.config import serialization
from gruppo.inference import evaluate_run
from gruppo.loading import code_digest, command_name
from gruppo.modalities.text import from_pretrained
from gruppo.rewards.functions import FunctionReward
from gruppo.trainer import checkpoint, run_dir
from gruppo.trainer.loop import Stopped
from gruppo.types import GruppoError

STEPS = 12


def config_in(folder: Path, kind: dict, **changes: object) -> configs.Config:
    return tiny.config(folder, **({"steps": STEPS} | kind | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing stops."""

    @cache
    def run(kind: str) -> Path:
        return api.start(
            config_in(tmp_path_factory.mktemp(kind), {"simple": SIMPLE, "full": FULL}[kind])
        ).folder

    return lambda kind: run("full" if kind else "simple")


def same_data(folder: Path, kind: dict, whole) -> dict:
    """A config as JSON that differs from the whole run's in its folder alone."""
    config = serialization.load(whole(kind) / "config.json")
    return serialization.to_dict(dataclasses.replace(config, runs_dir=str(folder / "runs")))


@pytest.mark.silent_bug(33)
@pytest.mark.parametrize(("kind", "calls_before"), [(SIMPLE, 1), (FULL, 9)], ids=["simple", "full"])
def test_2n_steps_are_n_steps_a_stop_and_n_steps(tmp_path, kind, whole, calls_before):
    config = same_data(tmp_path, kind, whole)
    reward = Signalling(calls_before + 1)
    score = tiny.noisy if kind else tiny.digits

    def stopping(completions, **_):
        reward(completions)
        return score(completions)

    stopping.__name__ = "noisy" if kind else "digits"
    with pytest.raises(Stopped, match="gruppo resume"):
        api.start(serialization.from_dict(config), Parts(rewards=[stopping]))
    assert_same(api.start(tmp_path / "runs/run").folder, whole(kind))


@pytest.mark.silent_bug(33)
def test_sigkill_at_random_moments_resumes_to_the_bit(tmp_path, whole):
    config = same_data(tmp_path, FULL, whole)
    chance, codes, run = random.Random(6), [], tmp_path / "runs/run"
    while 0 not in codes:
        child = processes.start(begin_or_go_on, config, folder=tmp_path / "child")
        if len(codes) < 6:
            until = min(steps_logged(run) + chance.choice([-99, 0, 1, 2]), STEPS - 2)
            child.wait_for(lambda until=until: steps_logged(run) > until)
            time.sleep(chance.random() * 0.03)
            child.send(signal.SIGKILL)
        codes.append(child.wait())
        assert codes[-1] in (0, -signal.SIGKILL), child.err
    assert codes.count(-signal.SIGKILL) >= 3
    assert_same(run, whole(FULL))
    assert not [path for path in run.rglob(".*") if path.name != ".lock"]


# --- where a stop is heeded -----------------------------------------------------------------------


def start_with(folder: Path, reward: object, policy: object = None, **changes: object) -> Path:
    config = config_in(folder, SIMPLE, saving__every=0, **changes)
    api.start(config, Parts(model=policy, rewards=[reward]))
    return folder / "runs/run"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_during_collect_keeps_the_boundary_before_it(tmp_path, number):
    before = signal.signal(number, lambda *_: None)  # by default it would end the tests
    try:
        with pytest.raises(Stopped):  # calls: evaluation, steps 1 to 3, evaluation, step 4
            start_with(tmp_path, Signalling(6, [number]))
    finally:
        signal.signal(number, before)
    run = tmp_path / "runs/run"
    assert checkpoint.steps(run / "checkpoints") == [3] and steps_logged(run) == 3
    assert json.loads((newest(run) / "state.json").read_text())["source"]["cursor"] == 3 * 4


def test_a_signal_during_an_evaluation_keeps_the_step_before_it(tmp_path):
    with pytest.raises(Stopped):
        start_with(tmp_path, Signalling(5))
    run = tmp_path / "runs/run"
    assert checkpoint.steps(run / "checkpoints") == [3]
    assert [e["step"] for e in json.loads((run / "evaluations.json").read_text())] == [0]


def policy_that_signals(step: int, *numbers: int, model: str = ""):
    """Signals arrive in the middle of the update of a step (one forward a step, three
    minibatches)."""
    policy = from_pretrained(model or tiny.model(), compute="float32")
    real, calls = policy.likelihood, []

    def likelihood(*args, **kwargs):
        calls.append(1)
        if len(calls) == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    policy.likelihood = likelihood
    return policy


def test_a_signal_during_learn_says_that_it_was_heard_and_what_is_saved(tmp_path, capfd):
    with pytest.raises(gruppo.Stopped) as stopped:
        start_with(
            tmp_path, tiny.digits, policy_that_signals(2, signal.SIGINT), evaluation__prompts=0
        )
    assert (
        capfd.readouterr().err == "gruppo: finishing this step, then saving; again stops at once\n"
    )
    assert str(stopped.value) == (
        "stopped by a signal; what is complete is saved. Continue with: "
        f"{command_name()} resume {tmp_path / 'runs/run'}"
    )


def test_a_signal_before_any_step_is_complete_says_that_there_is_nothing_to_save(tmp_path, capfd):
    with pytest.raises(gruppo.Stopped, match="before a step was saved"):
        start_with(tmp_path, Signalling(1), evaluation__prompts=0)
    assert capfd.readouterr().err == ""  # it left at once
    assert not checkpoint.steps(tmp_path / "runs/run/checkpoints")


def test_a_second_signal_stops_at_once_and_leaves_the_former_save(tmp_path):
    policy = policy_that_signals(3, signal.SIGTERM, signal.SIGTERM)
    config = config_in(tmp_path, SIMPLE, evaluation__prompts=0, saving__every=1)
    with pytest.raises(KeyboardInterrupt):
        api.start(config, Parts(model=policy))
    run = tmp_path / "runs/run"
    assert checkpoint.steps(run / "checkpoints") == [2] and steps_logged(run) == 2
    assert checkpoint.load_latest(run / "checkpoints").step == 2


@pytest.mark.parametrize("warning", [signal.SIGUSR1, signal.SIGHUP])
def test_the_signal_that_follows_a_warning_does_not_stop_at_once(tmp_path, warning):
    """Slurm sends SIGUSR1 before a time limit and SIGTERM at it; a session that ends sends SIGHUP
    beside SIGTERM."""
    policy = policy_that_signals(2, warning, signal.SIGTERM)
    with pytest.raises((Stopped, KeyboardInterrupt)) as stopped:
        start_with(tmp_path, tiny.digits, policy, evaluation__prompts=0)
    assert stopped.type is Stopped
    assert checkpoint.steps(tmp_path / "runs/run/checkpoints") == [2]


def test_a_hangup_that_is_ignored_as_under_nohup_does_not_stop(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = start_with(tmp_path, Signalling(2, [signal.SIGHUP]), steps=2, evaluation__prompts=0)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoint.seal_holds(run / "final")


def test_a_reward_that_swallows_the_interrupt_does_not_keep_a_half_scored_batch(tmp_path):
    reward = FunctionReward(Signalling(3, swallows=True), timeout_s=None)  # in the main thread
    with pytest.raises(Stopped):
        start_with(tmp_path, reward, evaluation__prompts=0)
    assert checkpoint.steps(tmp_path / "runs/run/checkpoints") == [2]


def test_the_signal_handlers_of_the_caller_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    start_with(tmp_path, tiny.digits, steps=1)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# --- what cannot be resumed, and what is given again ----------------------------------------------


def test_resuming_a_finished_run_changes_nothing(tmp_path, whole):
    run = shutil.copytree(whole(SIMPLE), tmp_path / "run")
    files = {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != "log.txt"
    }
    api.start(run)
    assert files == {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != "log.txt"
    }


def test_a_checkpoint_of_another_model_is_refused(tmp_path, whole):
    run = shutil.copytree(whole(SIMPLE), tmp_path / "run")
    other = api.start(tiny.config(tmp_path / "other", model=other_model(tmp_path)))
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other.folder / "checkpoints", run / "checkpoints")
    with pytest.raises(GruppoError, match="does not belong to this model"):
        api.start(run)


def other_model(folder: Path) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny.character_tokenizer()
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=1, **sizes)
    ).save_pretrained(folder / "m")
    tokenizer.save_pretrained(folder / "m")
    return str(folder / "m")


def test_changed_data_are_refused(tmp_path, whole):
    run = shutil.copytree(whole(SIMPLE), tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["data"] = tiny.write_rows(tmp_path / "other.jsonl", tiny.rows(20))
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(GruppoError, match="saved position does not belong"):
        api.start(run)


def test_a_folder_that_is_in_use_is_refused(tmp_path, whole):
    run = shutil.copytree(whole(SIMPLE), tmp_path / "run")
    folder = api.RunFolder(run)
    folder.open()
    try:
        with pytest.raises(GruppoError, match="another process is writing"):
            api.start(run)
    finally:
        folder.close()


def test_parts_in_memory_are_asked_for_by_name_and_resume_to_the_bit(tmp_path):
    def parts():
        return {"model": from_pretrained(tiny.model(), compute="float32"), "data": tiny.rows()}

    settings = dataclasses.asdict(config_in(tmp_path, SIMPLE, stage__kl_coef=0.1, steps=6))
    config = serialization.from_dict(settings)

    def train(name, reward):
        return gruppo.train(
            dataclasses.replace(config, name=name), **parts(), reward=reward, show=False
        ).folder

    expected = train("whole", [lambda completions, **_: tiny.digits(completions)])
    stop = Signalling(8)
    with pytest.raises(Stopped):
        train("stopped", [lambda completions, **_: stop(completions)])
    run = tmp_path / "runs/stopped"
    with pytest.raises(
        GruppoError,
        match=r"model and data and reward came from Python objects.*model=..., data=...",
    ):
        gruppo.resume(run, show=False)
    again = parts() | {"reward": lambda completions, **_: tiny.digits(completions)}
    assert_same(gruppo.resume(run, **again, show=False).folder, expected)


def test_a_random_reward_given_as_a_function_draws_the_same_where_it_is_resumed_by_name(tmp_path):
    """A function given by name runs in another process, whose random numbers are others."""
    config = dataclasses.replace(
        config_in(
            tmp_path, SIMPLE, steps=4, saving__every=2, saving__keep=2, scoring__isolate=True
        ),
        name="whole",
    )
    run = gruppo.train(config, reward=isolated.draws, show=False).folder
    stopped = shutil.copytree(run, tmp_path / "runs/stopped")
    shutil.rmtree(stopped / "final")
    shutil.rmtree(newest(stopped))
    assert_same(gruppo.resume(stopped, show=False, trust_run=True).folder, run)


def test_a_model_in_memory_that_has_been_trained_since_is_refused(tmp_path):
    policy = from_pretrained(tiny.model(), compute="float32")
    stop = Signalling(8)
    with pytest.raises(Stopped):
        gruppo.train(
            config_in(tmp_path, SIMPLE, stage__kl_coef=0.1), model=policy, reward=stop, show=False
        )
    with pytest.raises(GruppoError, match="weights have changed"):
        gruppo.resume(tmp_path / "runs/run", model=policy, reward=stop, show=False)


def test_a_run_killed_before_its_first_save_starts_again(tmp_path, whole):
    config = same_data(tmp_path, SIMPLE, whole)
    run = shutil.copytree(whole(SIMPLE), tmp_path / "runs/run")
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "final")
    (run / "checkpoints").mkdir()
    (run / "config.json").write_text(json.dumps(config))
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(
        "".join(rows[:3])
    )  # steps 0 to 2; the first save is due after step 2
    assert_same(api.start(run).folder, whole(SIMPLE))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


LOSSES = {
    "no folder": shutil.rmtree,
    "an empty one": empty,
    "latest is left": lambda folder: [shutil.rmtree(path) for path in folder.glob("step_*")],
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_a_run_that_lost_its_checkpoints_does_not_begin_again_and_keeps_its_metrics(
    tmp_path, whole, lose
):
    run = shutil.copytree(whole(SIMPLE), tmp_path / "run")
    lose(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        GruppoError,
        match=r"holds no checkpoint, and 12 steps were logged.*Put the checkpoints back",
    ):
        api.start(run)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_metrics_reach_the_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    events, sync, save = [], run_dir.sync_to_disk, checkpoint.Save.write
    monkeypatch.setattr(
        run_dir, "sync_to_disk", lambda path: (events.append(path.name), sync(path))
    )
    monkeypatch.setattr(
        checkpoint.Save, "write", lambda *a, **k: (events.append("checkpoint"), save(*a, **k))
    )
    api.start(config_in(tmp_path, SIMPLE, steps=2, saving__every=1))
    assert events == [
        name
        for step in (1, 2)
        for name in ("metrics.jsonl", "samples.jsonl", f"step_00000{step}.jsonl.gz", "checkpoint")
    ]


def test_a_torn_evaluations_file_is_written_anew_and_partial_writes_are_removed(tmp_path, whole):
    run = shutil.copytree(whole(SIMPLE), tmp_path / "run")
    (run / "evaluations.json").write_text("[{")
    leftovers = [
        run / ".config.json.tmp-9",
        run / "best/.step_000003.tmp-9",
        run / "checkpoints/.latest.old-9",
    ]
    leftovers += [
        run / "completions/.step_000001.jsonl.gz.tmp-9",
        run / "images/.step_000004.png.tmp-9",
    ]
    for path in leftovers:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    api.start(run)
    assert (run / "evaluations.json").read_text() == (
        whole(SIMPLE) / "evaluations.json"
    ).read_text()
    assert not any(path.exists() for path in leftovers)


def test_a_run_killed_before_its_config_was_written_starts_again_under_its_name(tmp_path):
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    for name in (".lock", "log.txt", ".config.json.tmp-9"):
        (run / name).write_text("")
    api.start(config_in(tmp_path, SIMPLE, steps=1, evaluation__prompts=0))
    assert not (run / ".config.json.tmp-9").exists()


@pytest.mark.parametrize(
    "lose", [shutil.rmtree, lambda run: run.rename(run.with_name("moved")), empty]
)
def test_a_run_folder_that_is_deleted_or_moved_in_training_is_reported_as_that(tmp_path, lose):
    run, calls = tmp_path / "runs/run", []

    def losing(completions, **_):
        calls.append(1)
        if len(calls) == 2:
            lose(run)
        return tiny.digits(completions)

    with pytest.raises(GruppoError, match="was deleted or moved during training"):
        start_with(tmp_path, losing, evaluation__prompts=0)
    assert not list(run.glob("*"))  # no folder without a config that holds half a run


# --- what has changed since the run began ---------------------------------------------------------

MINE = (
    "import own_rules\n\ndef digits(completions, **_):\n    return own_rules.score(completions)\n"
)
BESIDE = "from tests import tiny\n\ndef score(completions):\n    return tiny.digits(completions)\n"
REPLY = "def reply(text, state, turn):\n    return None\n"


def edit(name: str):
    def change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / name).write_text((folder / name).read_text() + "\nLATER = 1\n")
        sys.modules.pop("own_rules", None)  # a new process would import it anew

    return change


def write_template(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "tiny/chat_template.jinja"
    path.write_text(path.read_text().replace("<assistant>", "<assistant><assistant>"))


def add_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = json.loads((folder / "tiny/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tiny/tokenizer.json").write_text(json.dumps(tokenizer))


def add_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_rows(folder / "validation.jsonl", tiny.rows(3))


def another_version(package: str):
    def change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        version = run_dir.metadata.version
        monkeypatch.setattr(
            run_dir.metadata, "version", lambda name: "0.0" if name == package else version(name)
        )

    return change


def another_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)


CHANGES = {
    "reward": (edit("mine.py"), "the code of .*mine.py:digits has changed"),
    "what it imports": (edit("own_rules.py"), "the code of .*mine.py:digits has changed"),
    "environment": (edit("replies.py"), "the code of .*replies.py:reply has changed"),
    "chat template": (write_template, "the chat template has changed"),
    "tokenizer": (add_token, "the tokenizer has changed"),
    "validation data": (add_row, "the validation data has changed"),
    "torch": (another_version("torch"), "torch was .* and is 0.0"),
    "gruppo": (another_version("gruppo"), "gruppo was .* and is 0.0"),
    "threads": (another_thread, r"threads was 1 and is 64 \(set OMP_NUM_THREADS=1\)"),
}


@pytest.fixture
def stopped(tmp_path, monkeypatch) -> Path:
    """A run that a signal stopped after one step, whose reward, environment and model lie in
    ``tmp_path``."""
    for name, text in {"mine.py": MINE, "own_rules.py": BESIDE, "replies.py": REPLY}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of mine.py is added to it
    sys.modules.pop("own_rules", None)
    tiny.write_model(tmp_path / "tiny")
    files = {
        "reward": [f"{tmp_path / 'mine.py'}:digits"],
        "environment__reply": f"{tmp_path / 'replies.py'}:reply",
    }
    files["environment__max_reply_tokens"] = 8  # all turns fit the context
    files["evaluation__data"] = tiny.write_rows(tmp_path / "validation.jsonl", tiny.rows(2))
    config = config_in(
        tmp_path, files, model=str(tmp_path / "tiny"), steps=2, evaluation__prompts=0
    )
    with pytest.raises(Stopped):
        api.start(config, Parts(model=policy_that_signals(1, signal.SIGTERM, model=config.model)))
    return tmp_path / "runs/run"


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_what_changes_the_results_is_refused_unless_it_is_allowed(
    stopped, monkeypatch, caplog, change, says
):
    with monkeypatch.context() as patch:
        change(stopped.parents[1], patch)
        with pytest.raises(
            GruppoError, match=rf"not continue to the same results: {says}.* with allow_changes"
        ):
            api.start(stopped)
        api.start(stopped, allow_changes=True)
        assert re.search(says, caplog.text)
        api.start(stopped)  # the manifest names what it was continued with


def test_what_only_may_change_the_results_is_reported(stopped, monkeypatch, caplog):
    another_version("transformers")(stopped, monkeypatch)
    api.start(stopped)
    assert re.search("since the run began: transformers was .* and is 0.0.", caplog.text)


def test_a_run_with_an_isolated_built_in_reward_is_resumed_and_evaluated_without_a_flag(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("GRUPPO_TRUSTED_RUNS", raising=False)
    config = tiny.config(tmp_path, reward=(r"regex_format:\\d",), scoring__isolate=True, steps=2)
    folder = api.start(config).folder
    assert api.start(folder).folder == folder
    assert evaluate_run(folder, prompts=2)[0].scored == 2


def test_the_code_of_a_module_is_compared_whether_or_not_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "a_module_of_mine.py").write_text("def mine(completions, **_): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_digest("a_module_of_mine:mine")
    importlib.import_module("a_module_of_mine")
    assert before == code_digest("a_module_of_mine:mine") is not None
    (tmp_path / "a_module_of_mine.py").write_text("def mine(completions, **_): pass")
    assert code_digest("a_module_of_mine:mine") != before
