"""Where sampler and trainer disagree; and policies that cut rows into columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.collecting import collect
from tests.trainer import by_hand
from tests.trainer.test_metrics import shift
from tests.trainer.test_step import run_in, step

from gruppo.protocols import Engine
from gruppo.trainer.run import Run
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import backward
from gruppo.types import GruppoError, Likelihood, MicroBatch, Rollouts


class OffEngine(Engine):
    """Reports log-probs that are off by a known amount, or not at all."""

    def __init__(self, real: Any, off: Any) -> None:
        self.real, self.off = real, off

    def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
        rollouts = self.real.generate(*args, **kwargs)
        return replace(rollouts, sampler_logprobs=self.off(rollouts))


def run_off(folder: Path, off: Any, **changes: Any) -> Run:
    run = run_in(folder, **changes)
    run.engine = OffEngine(run.engine, off)
    return run


def some_nan(rollouts: Rollouts) -> torch.Tensor:
    return rollouts.sampler_logprobs.where(rollouts.actions % 5 > 0, torch.nan)


def test_a_sampler_without_log_probs_is_refused_by_its_engines_name(tmp_path):
    run = run_off(tmp_path, some_nan, objective__correction="truncate")
    with pytest.raises(GruppoError, match=r"\d+ of the \d+ from OffEngine are not numbers"):
        step(run)


def test_without_a_correction_a_sampler_need_not_report_log_probs(tmp_path):
    run, plain = run_off(tmp_path, some_nan), run_in(tmp_path)
    _, logged = step(run)
    step(plain)
    assert torch.equal(by_hand.flat(run.parameters), by_hand.flat(plain.parameters))
    assert logged["mismatch/mean_nats"] != logged["mismatch/mean_nats"]  # NaN: not known


@pytest.mark.silent_bug(13)
@pytest.mark.parametrize(
    ("mode", "level", "preset"),
    [
        ("truncate", "token", "grpo"),
        ("truncate", "sequence", "ppo"),
        ("mask", "token", "ppo"),
        ("mask", "sequence", "grpo"),
    ],
)
def test_a_correction_weighs_the_policy_term_and_no_other(tmp_path, mode, level, preset):
    """What it changes in the gradient is the same whether the other terms are there or not."""
    several = {
        "optim__epochs": 2,
        "stage__kl_coef": 0.3,
        "stage__entropy_coef": 0.1,
        "rollout__group_size": 6,
    }
    bounds = {"objective__correction_low": 0.8, "objective__correction_high": 1.2}
    both = {"objective__correction": mode, "objective__correction_level": level, **bounds}
    run = run_off(
        tmp_path, lambda r: r.sampler_logprobs - shift(r), objective=preset, **several, **both
    )
    step_params = step_params_at(run.config, 0)
    batch = collect(run, step_params).batch
    with torch.no_grad():
        for parameter in run.parameters:
            parameter += 0.02  # away from the reference, the old weights and the old values
    run.config = replace(run.config, objective=replace(run.config.objective, kl_in="loss"))
    alone = replace(step_params, kl_coef=0.0, entropy_coef=0.0, value_coef=0.0)

    def gradient(correction: str, step_params: Any) -> torch.Tensor:
        run.config = replace(
            run.config, objective=replace(run.config.objective, correction=correction)
        )
        run.optimizer.zero_grad()
        backward(run, batch, step_params)
        return by_hand.flat([p.grad for p in run.parameters])

    everything, policy = (gradient(mode, k) - gradient("none", k) for k in (step_params, alone))
    others = gradient(mode, step_params) - gradient(mode, alone)
    assert policy.abs().max() > 1e-3 and others.abs().max() > 1e-3
    torch.testing.assert_close(everything, policy, rtol=0, atol=2e-6)


# --- columns --------------------------------------------------------------------------------------


class Columns:
    """A policy whose pieces end in the middle of a row, as those of a policy over denoising steps
    do."""

    def __init__(self, real: Any, at: int) -> None:
        self.real, self.at = real, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def micro_batches(self, *args: Any) -> list[MicroBatch]:
        return [
            part for micro_batch in self.real.micro_batches(*args) for part in self.cut(micro_batch)
        ]

    def cut(self, micro_batch: MicroBatch) -> Iterator[MicroBatch]:
        stop = micro_batch.cols.stop
        yield MicroBatch(micro_batch.rows, slice(0, min(self.at, stop)))
        if stop > self.at:
            yield MicroBatch(micro_batch.rows, slice(self.at, stop))

    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, **wanted: Any) -> Likelihood:
        whole = self.real.likelihood(
            rollouts, MicroBatch(micro_batch.rows, slice(0, micro_batch.cols.stop)), **wanted
        )
        parts = {
            n: x[:, micro_batch.cols]
            for n in ("logprobs", "entropy", "values")
            if (x := getattr(whole, n)) is not None
        }
        return replace(whole, **parts)


def in_columns(run: Run) -> Run:
    run.policy = Columns(run.policy, 3)
    if run.reference is not None:
        run.reference._policy = Columns(run.reference._policy, 3)
    return run


@pytest.mark.slow
@pytest.mark.silent_bug(11)
@pytest.mark.parametrize("preset", ["grpo", "ppo", "reinforce_pp", "dapo"])
def test_a_policy_that_cuts_rows_into_columns_takes_the_same_step(tmp_path, preset):
    changes = {
        "objective": preset,
        "optim__epochs": 2,
        "optim__minibatches": 2,
        "stage__kl_coef": 0.1,
    }
    whole, cut = run_in(tmp_path, **changes), in_columns(run_in(tmp_path, **changes))
    before = by_hand.flat(whole.parameters)
    for _ in range(2):
        step(whole), step(cut)
    after = by_hand.flat(whole.parameters)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(by_hand.flat(cut.parameters), after, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "gspo"},
        {"objective__surrogate": "vespo"},
        {"objective__correction": "mask", "objective__correction_level": "sequence"},
    ],
    ids=["ratio", "vespo", "correction"],
)
def test_choices_over_a_whole_row_are_refused_where_micro_batches_hold_less(tmp_path, changes):
    run = in_columns(run_in(tmp_path, optim__epochs=2, **changes))
    with pytest.raises(GruppoError, match=r"cuts rows into columns.*need whole rows"):
        step(run)
