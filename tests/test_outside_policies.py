"""Policies and engines from outside train, resume, evaluate, sample, export and explain; broken
ones are refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.runs import assert_same, metrics

import gruppo
from gruppo import api, inference
from gruppo import export as exporting
from gruppo.config.serialization import load
from gruppo.doctor.record import read
from gruppo.doctor.report import diagnose
from gruppo.loading import load_object
from gruppo.trainer import loop
from gruppo.types import GruppoError, MicroBatch

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT: dict[str, dict[str, Any]] = {
    "routes": {"rollout__prompts": 3, "rollout__group_size": 4, "optim__warmup_steps": 0},
    "pendulum": {"rollout__prompts": 6, "optim__minibatches": 2},
}


def config(name: str, folder: Path, **changes: Any) -> gruppo.Config:
    short = {
        "steps": 3,
        "evaluation__prompts": 4,
        "evaluation__every": 0,
        "saving__every": 1,
        "name": "run",
    }
    short |= {"runs_dir": str(folder / "runs"), "show_samples_every": 1}
    short |= {
        "scoring__isolate": False
    }  # a process that imports the example, and torch with it, takes 2 s of CPU time
    return api.change(
        load_object(f"{EXAMPLES / f'{name}.py'}:{name}")(), short | SHORT[name] | changes
    )


@pytest.fixture(scope="module", params=SHORT)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, api.start(config(request.param, folder)).folder


@pytest.mark.slow
def test_a_policy_from_outside_is_killed_and_resumes_to_the_bit(finished, tmp_path, monkeypatch):
    name, run = finished
    learn = loop.learn

    def interrupted(run: Any, *arguments: Any) -> Any:
        if run.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(run, *arguments)

    with monkeypatch.context() as patch, pytest.raises(gruppo.Stopped):
        patch.setattr(loop, "learn", interrupted)
        api.start(config(name, tmp_path))
    assert len(metrics(tmp_path / "runs/run")) < len(metrics(run))
    assert_same(gruppo.resume(tmp_path / "runs/run", show=False).folder, run)


def test_it_is_evaluated_sampled_exported_and_explained(finished, tmp_path):
    name, run = finished
    evaluated, _ = inference.evaluate_run(run, prompts=4)
    assert evaluated.mean == json.loads((run / "evaluations.json").read_text())[-1]["mean"]
    source = api.build(load(run / "config.json"), api.Parts())[0].source
    prompt = json.dumps(source.take(1)[0].inputs)
    sampled = inference.sample(run, [prompt], tmp_path / "pictures")
    assert len(sampled) == (2 if name == "routes" else 1)
    exporting.export(run, tmp_path / "copy")
    copy = inference.load_policy(tmp_path / "copy")
    weights = inference.load_policy(run).module.state_dict()
    assert all(
        torch.equal(tensor, weights[key]) for key, tensor in copy.module.state_dict().items()
    )
    text = "\n".join(api.explain(config(name, tmp_path)))
    assert "OBJECTIVE" in text and "ONE REAL PROMPT" in text and "Traceback" not in text
    assert diagnose(read(run)) is not None


# --- broken ones ----------------------------------------------------------------------------------


def routes() -> Any:
    return load_object(f"{EXAMPLES / 'routes.py'}:policy")()


class NoLikelihood(gruppo.Policy):
    def __init__(self) -> None:
        self.module = torch.nn.Linear(1, 1)


def broken(**members: Any) -> gruppo.Policy:
    policy = routes()
    policy.__class__ = type("Broken", (type(policy),), {**members, "__module__": "outside"})
    return policy


def off_by_a_nat(self: Any, rollouts: Any, micro_batch: MicroBatch, **options: Any) -> Any:
    likelihood = super(type(self), self).likelihood(rollouts, micro_batch, **options)
    return gruppo.Likelihood(likelihood.logprobs - 1.0, likelihood.entropy)


def summed(self: Any, rollouts: Any, micro_batch: MicroBatch, **options: Any) -> Any:
    likelihood = super(type(self), self).likelihood(rollouts, micro_batch, **options)
    return gruppo.Likelihood(likelihood.logprobs.sum(1), likelihood.entropy)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (NoLikelihood, "NoLikelihood does not define sample"),
        (lambda: broken(likelihood=off_by_a_nat), r"likelihood of its own samples .* nats apart"),
        (lambda: broken(likelihood=summed), r"log-probs of the shape \(\d+,\) for a micro-batch"),
        (lambda: object(), "model is a object; it needs a name, a folder, or a policy"),
    ],
)
def test_a_broken_policy_is_refused_before_anything_is_written(tmp_path, make, why):
    with pytest.raises(GruppoError, match=why):
        gruppo.train(config("routes", tmp_path), model=make(), show=False)
    assert not (tmp_path / "runs").exists()


class Replayed(gruppo.Engine):
    """An engine that returns the rows that it sampled first, whatever is requested."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.rollouts = policy, None

    def generate(self, requests: Any, sampling: Any, *, seed: int) -> Any:
        self.rollouts = self.rollouts or self.policy.sample(requests, sampling, seed=seed)
        return self.rollouts

    def sync(self, policy: Any, version: int) -> None:
        self.policy = policy

    def close(self) -> None:
        pass


class Unversioned(Replayed):
    """An engine that forgets the version of the weights."""

    def generate(self, requests: Any, sampling: Any, *, seed: int) -> Any:
        return self.policy.sample(requests, sampling, seed=seed)


def replayed(policy: Any) -> Replayed:
    return Replayed(policy)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (f"{Path(__file__).resolve()}:replayed", "engine.generate"),
        (Unversioned, "reports policy_version"),
        (object(), "has no method generate"),
    ],
)
def test_a_broken_engine_is_refused_before_anything_is_written(tmp_path, engine, why):
    policy = routes()
    chosen = engine(policy) if isinstance(engine, type) else engine
    with pytest.raises(GruppoError, match=why):
        gruppo.train(config("routes", tmp_path), model=policy, engine=chosen, show=False)
    assert not (tmp_path / "runs").exists()


class Counting(gruppo.Engine):
    """The policy's own samples through an engine from outside."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.version, self.calls = policy, 0, 0

    def generate(self, requests: Any, sampling: Any, *, seed: int) -> Any:
        self.calls += 1
        rollouts = self.policy.sample(requests, sampling, seed=seed)
        version = torch.where(rollouts.mask, self.version, 0)
        return gruppo.Rollouts(**{**vars(rollouts), "policy_version": version})

    def sync(self, policy: Any, version: int) -> None:
        self.policy, self.version = policy, version

    def close(self) -> None:
        self.calls = -self.calls


def test_an_engine_from_outside_samples_a_run_to_the_same_numbers(finished, tmp_path):
    name, run = finished
    if name != "routes":
        pytest.skip("one policy is enough")
    torch.manual_seed(0)
    changes = {
        "model": f"{EXAMPLES / 'routes.py'}:policy",
        "engine": f"{Path(__file__).resolve()}:counting",
    }
    other = api.start(config("routes", tmp_path, **changes)).folder
    skipped = ("time/", "rate/", "mem/")
    for row, same in zip(metrics(run), metrics(other), strict=True):
        assert {k: v for k, v in row.items() if not k.startswith(skipped)} == {
            k: v for k, v in same.items() if not k.startswith(skipped)
        }


def counting(policy: Any) -> Counting:
    return Counting(policy)
