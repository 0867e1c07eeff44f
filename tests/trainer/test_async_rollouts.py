"""Runs that sample ahead of the trainer: the bound with real threads, resumes, replays, and what is
refused."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kills import count_operations
from safetensors import safe_open
from tests import processes, tiny
from tests.trainer import runs
from tests.trainer.beside import CopyEngine

from gruppo import api
from gruppo.build import check_lag
from gruppo.cli.commands import train
from gruppo.config import serialization
from gruppo.config.schema import Config, EngineConfig
from gruppo.trainer.ledger import Ledger
from gruppo.trainer.prefetch import PrefetchEngine
from gruppo.types import EngineLost, GruppoError

OPERATIONS = 100
"""Fewer than a whole run has."""
ENGINE = runs.LAGGED["engine__kind"]


def config(folder: Path, **changes: Any) -> Config:
    return tiny.config(folder, **runs.LAGGED | {"reward": [tiny.reward("digits")]} | changes)


def folder_of(config: Config) -> Path:
    return Path(config.runs_dir) / config.name


@pytest.fixture(scope="module")
def lagged(tmp_path_factory) -> Path:
    """A complete run with lag 2, of six steps of four prompts."""
    chosen = config(tmp_path_factory.mktemp("lagged"), reward=[tiny.reward("noisy")])
    api.start(chosen)
    return folder_of(chosen)


def test_lag_0_equals_the_synchronous_loop_to_the_bit(tmp_path, monkeypatch):
    """The same run with the policy itself, with an engine beside the trainer, and through the queue
    of groups."""
    monkeypatch.setattr(
        CopyEngine, "concurrency", 1
    )  # a step's prompts in one call, as in the synchronous loop
    local = tiny.config(tmp_path / "local", reward=[tiny.reward("noisy")])
    beside = replace(local, runs_dir=str(tmp_path / "beside"), engine=EngineConfig(ENGINE))
    queued = replace(local, runs_dir=str(tmp_path / "queued"), engine=EngineConfig(ENGINE))
    api.start(local)
    api.start(beside)
    with api.Trainer.open(queued) as trainer:
        run = trainer.run
        PrefetchEngine.attach(run, trainer.folder)
        run.engine.sync(run.policy, 0)
        for step in trainer.steps:
            assert step.metrics["lag/max"] == 0
        run.engine.close()
        run.source = run.source.source
        trainer.finish()
    final = "final/model.safetensors"
    assert runs.tensors(folder_of(local) / final) == runs.tensors(folder_of(beside) / final)
    assert runs.tensors(folder_of(local) / final) == runs.tensors(folder_of(queued) / final)
    own = ("lag/", *runs.CLOCKED)
    rows = [
        {k: v for k, v in row.items() if not k.startswith(own)}
        for row in runs.metrics(folder_of(queued))
    ]
    assert rows == runs.metrics(folder_of(local)) == runs.metrics(folder_of(beside))


@pytest.mark.parametrize("lag", [1, 3])
def test_with_real_threads_no_token_is_older_than_the_bound_and_no_draw_is_skipped(tmp_path, lag):
    chosen = config(
        tmp_path, engine__lag=lag, engine__kind=ENGINE.replace(":engine", ":slow_engine"), steps=8
    )
    oldest = 0
    with api.Trainer.open(chosen) as trainer:
        for step in trainer.steps:
            versions = step.rollouts.policy_version[step.rollouts.mask]
            lags = step.step - 1 - versions
            oldest = max(oldest, int(lags.max()))
            assert int(lags.min()) >= 0 and int(lags.max()) <= lag
            assert (
                step.metrics["lag/max"] == int(lags.max())
                and step.metrics["lag/stale_groups_count"] == 0
            )
            assert trainer.run.engine.slots.next_index <= (lag + 1) * chosen.rollout.prompts
        trainer.finish()
    assert oldest == lag  # it did sample ahead
    assert runs.learned_from(trainer.folder) == list(range(8 * 4))


def test_metrics_say_how_old_samples_are_and_what_the_correction_leaves(lagged):
    rows = [json.loads(line) for line in (lagged / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "lag/mean" in row]
    assert [row["lag/max"] for row in rows] == [0, 1, 2, 2, 2, 2]
    for row in rows:
        assert 0 <= row["lag/mean"] <= row["lag/max"]
        assert 0 < row["correction/ess_frac"] <= 1 + 1e-9
    assert (
        rows[0]["correction/ess_frac"] == pytest.approx(1, abs=1e-6)
        and rows[4]["correction/ess_frac"] < 0.999
    )


def test_a_publish_without_a_step_makes_groups_sampled_again_from_the_same_draw(tmp_path):
    chosen = config(tmp_path, engine__lag=1)
    with api.Trainer.open(chosen) as trainer:
        run = trainer.run
        trainer.step()
        next_prompts = [group.prompt.id for group in run.engine.slots.queue][:4]
        for _ in range(2):  # as a return to the best weights does
            run.state.version += 1
            run.engine.sync(run.policy, run.state.version)
        step = trainer.step()
        assert step.metrics["lag/stale_groups_count"] >= 1 and step.metrics["lag/max"] <= 1
        assert [prompt.id for prompt in step.rollouts.prompts] == next_prompts


def test_groups_for_other_parameters_than_the_steps_are_discarded(tmp_path):
    with api.Trainer.open(config(tmp_path, engine__lag=1)) as trainer:
        trainer.step()
        trainer.set(temperature=0.5)
        step = trainer.step()
        assert set(step.rollouts.temperature.tolist()) == {0.5}


@pytest.mark.slow
def test_each_rank_samples_the_groups_of_its_own_slots_ahead(tmp_path):
    settings = serialization.to_dict(config(tmp_path, steps=4))
    processes.run_ranks(2, runs.begin_or_go_on, settings, folder=tmp_path / "children")
    run = tmp_path / "runs/run"
    assert runs.learned_from(run) == list(range(16))
    assert max(row["lag/max"] for row in runs.metrics(run) if "lag/max" in row) in (1, 2)
    for rank in range(2):
        assert sampled(run, f"*-r{rank}") == list(range(rank, 16, 2))


# --- resume and replay ----------------------------------------------------------------------------


def test_a_stopped_run_learns_from_each_draw_once_and_samples_nothing_again(tmp_path):
    chosen = config(tmp_path, saving__every=2)
    with api.Trainer.open(chosen) as trainer:
        for _ in range(3):
            trainer.step()
        ahead = [group.position for group in trainer.run.engine.slots.queue]
        while any(group.rollouts is None for group in trainer.run.engine.slots.queue):
            time.sleep(0.01)
    assert ahead == list(range(12, 24))
    with api.Trainer.resume(folder_of(chosen)) as trainer:
        asked = trainer.run.engine.engine.calls
        before = len(asked)  # those of the check of the engine
        trainer.train()
        drawn = [request.prompt.draw for call in asked[before:] for request in call]
    assert not set(drawn) & set(ahead) and len(drawn) == len(set(drawn))
    assert runs.learned_from(folder_of(chosen)) == list(range(24))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_killed_run_resumes_with_no_draw_lost_or_repeated(lagged, tmp_path, share):
    """Killed at an operation; ``python -m benchmarks.kills --kind lag`` does so at random ones."""
    settings = serialization.to_dict(config(tmp_path, reward=[tiny.reward("noisy")]))
    folder = tmp_path / "child"
    for kill_at, codes in ((round(share * OPERATIONS), {-signal.SIGKILL}), (0, {0})):
        child = processes.start(
            count_operations, settings, kill_at, 0, str(tmp_path / "operations"), folder=folder
        )
        assert child.wait() in codes, child.err
    runs.assert_nothing_lost(tmp_path / "runs/run")


def test_a_replay_repeats_the_run_to_the_bit_without_its_engine(lagged, tmp_path, monkeypatch):
    monkeypatch.setattr(CopyEngine, "generate", None)
    train(["--replay", str(lagged), "--name", "replay", "--runs-dir", str(tmp_path)])
    again = tmp_path / "replay"
    assert runs.tensors(again / "final/model.safetensors") == runs.tensors(
        lagged / "final/model.safetensors"
    )
    assert runs.metrics(again) == runs.metrics(lagged)
    assert not (again / "ledger").exists()


def test_a_replay_with_options_that_decide_what_is_sampled_is_refused(
    lagged, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        PrefetchEngine,
        "_are_ready",
        lambda *_: pytest.fail("it waits for samples that nothing makes"),
    )
    arguments = ["--replay", str(lagged), "--name", "replay", "--runs-dir", str(tmp_path)]
    with pytest.raises(
        GruppoError, match=r"has no samples of prompt .* \(position 0\) as step 1 needs them"
    ):
        train([*arguments, "--rollout.group-size", "8"])


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine__lag": -1}, "engine.lag"),
        ({"engine__kind": ""}, "needs an engine that samples while the trainer learns"),
        ({"engine__replay": "runs/other"}, "trains without engine.kind"),
    ],
)
def test_options_that_are_wrong_with_lag_are_one_line(tmp_path, changes, message):
    with pytest.raises(GruppoError, match=message) as caught:
        api.start(config(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_refills_on_several_ranks_are_refused_with_lag(tmp_path, monkeypatch):
    monkeypatch.setattr("gruppo.build.dist.world_size", lambda: 2)
    with pytest.raises(GruppoError, match="moves prompts between ranks"):
        check_lag(config(tmp_path, rollout__refill_rounds=1), CopyEngine)


def test_an_error_of_the_engine_in_another_thread_ends_the_run_with_its_line(tmp_path, monkeypatch):
    def fail(self: Any, requests: Sequence[Any], *_: Any, **__: Any) -> Any:
        raise GruppoError("the engine refuses. Do something else.")

    with api.Trainer.open(config(tmp_path)) as trainer:
        trainer.step()
        monkeypatch.setattr(CopyEngine, "generate", fail)
        with pytest.raises(GruppoError, match="the engine refuses"):
            trainer.train()


def sampled(run: Path, files: str = "*") -> list[int]:
    """Positions of the groups in the files of a ledger, each as often as it was sampled."""
    positions = []
    for path in (run / "ledger").glob(f"{files}.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.endswith("/0")]  # noqa: SIM118
        positions += [int(name.partition(".")[0]) for name in names]
    return sorted(positions)


def until(is_reached: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not is_reached():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_an_error_of_the_ledger_in_another_thread_ends_the_run(tmp_path, monkeypatch):
    """One that is no GruppoError too, and only where the engine itself has none."""

    def fail(self: Any, *_: Any) -> None:
        raise ValueError("the ledger fails")

    with api.Trainer.open(config(tmp_path)) as trainer:
        ahead = trainer.run.engine
        trainer.step()
        until(lambda: all(group.rollouts is not None for group in ahead.slots.queue))
        monkeypatch.setattr(Ledger, "append", fail)
        trainer.step()
        until(lambda: ahead._error is not None)
        assert str(ahead._error) == "the ledger fails" and not any(
            group.rollouts is None for group in ahead.slots.taken
        )


def test_after_an_engine_was_lost_a_publish_that_reaches_it_goes_on_with_sampling(
    tmp_path, monkeypatch
):
    def fail(self: Any, *_: Any, **__: Any) -> Any:
        raise EngineLost("no server is left.")

    chosen = config(tmp_path)
    with api.Trainer.open(chosen) as trainer:
        ahead = trainer.run.engine
        trainer.step()
        until(lambda: all(group.rollouts is not None for group in ahead.slots.queue))
        with monkeypatch.context() as patched:
            patched.setattr(CopyEngine, "generate", fail)
            trainer.step()  # its samples are there; those that it makes room for fail
            until(lambda: ahead._error is not None)
        trainer.train()
    assert runs.learned_from(folder_of(chosen)) == list(range(24))


def test_an_evaluation_waits_for_one_of_the_engines_calls(tmp_path, monkeypatch):
    """Their number never exceeds ``concurrency``, while threads sample for later steps."""
    now, most, sample = [], [0], CopyEngine.generate

    def generate(self: Any, *arguments: Any, **options: Any) -> Any:
        now.append(1)
        most[0] = max(most[0], len(now))
        time.sleep(0.05)
        try:
            return sample(self, *arguments, **options)
        finally:
            now.pop()

    monkeypatch.setattr(CopyEngine, "generate", generate)
    monkeypatch.setattr(CopyEngine, "concurrency", 1)
    api.start(config(tmp_path, evaluation__every=1, evaluation__prompts=4))
    assert most == [1]


@pytest.mark.parametrize("damage", ["missing", "torn", "another run", "no ledger"])
def test_a_ledger_that_is_not_whole_is_refused_in_one_line(lagged, tmp_path, damage):
    run = shutil.copytree(lagged, tmp_path / "runs" / lagged.name)
    # the groups of the first step, which a replay cannot do without: how many are finished in a
    # later step is chance
    file = run / "ledger" / "step_000001-r0.safetensors"
    if damage == "missing":
        file.unlink()
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:-1000])
    if damage == "another run":
        settings = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(settings | {"seed": 1}))
    if damage == "no ledger":
        shutil.rmtree(run / "ledger")
    with pytest.raises(GruppoError) as caught:
        train(["--replay", str(run), "--name", "replay", "--runs-dir", str(tmp_path)])
    messages = {
        "missing": "has no samples of prompt",
        "torn": f"{file} cannot be read",
        "another run": "where the data have",
        "no ledger": "no complete step in its ledger",
    }
    assert messages[damage] in str(caught.value) and "\n" not in str(caught.value)
    assert "Delete" not in str(caught.value)  # the other run needs its ledger


def test_a_replay_needs_the_folder_of_a_run(tmp_path):
    for arguments in (["--replay", str(tmp_path)], ["arithmetic", "--replay", str(tmp_path)]):
        with pytest.raises(GruppoError, match="it needs the folder of a run"):
            train(arguments)
