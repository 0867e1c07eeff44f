"""What is asked of policy and critic before and in an update: no forward for nothing, and numbers
that fit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.collecting import collect
from tests.trainer import by_hand
from tests.trainer.test_ppo_step import KINDS, SEPARATE, SHARED, begun, both
from tests.trainer.test_step import run_in

from gruppo.build import Parts
from gruppo.protocols import Outputs
from gruppo.trainer.run import Run
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import backward, learn
from gruppo.types import GruppoError, NumericalStop

NO_KL = {"stage__kl_coef": 0.0}


@contextmanager
def asked(run: Run) -> Iterator[list[Outputs]]:
    """What each forward of the policy is asked for meanwhile."""
    wants: list[Outputs] = []
    likelihood = run.policy.likelihood

    def watched(rollouts: Any, micro_batch: Any, *, outputs: Outputs = ()) -> Any:
        wants.append(outputs)
        return likelihood(rollouts, micro_batch, outputs=outputs)

    run.policy.likelihood = watched
    try:
        yield wants
    finally:
        run.policy.likelihood = likelihood


@KINDS
def test_where_only_values_are_needed_no_log_prob_is_computed_before_the_update(tmp_path, kind):
    run = begun(tmp_path, kind, **NO_KL)
    with asked(run) as wants:
        batch = collect(run, step_params_at(run.config, 0)).batch
    assert wants == [] and batch.old_logprobs is None and batch.old_values.abs().max() > 0
    after, expected, result = both(begun(tmp_path, kind, **NO_KL))
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
    assert result["ratio/mean"] == result["ratio/max"] == 1.0


@pytest.mark.silent_bug(2)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling", [{}, {"rollout__top_k": 7, "rollout__temperature": 0.7}], ids=["plain", "top-k"]
)
def test_the_entropy_as_a_number_changes_no_bit_of_the_log_probs(tmp_path, compute, sampling):
    run = run_in(tmp_path, compute=compute, rollout__max_new_tokens=24, **sampling)
    rollouts = collect(run, step_params_at(run.config, 0)).batch.rollouts
    for micro_batch in run.policy.micro_batches(rollouts, rollouts.mask, 150):
        with torch.no_grad():
            before = run.policy.likelihood(rollouts, micro_batch)
        within = run.policy.likelihood(rollouts, micro_batch, outputs=("entropy_value",))
        assert before.entropy is None and within.entropy is not None
        assert torch.equal(before.logprobs, within.logprobs)


# --- while the critic learns alone ----------------------------------------------------------------


def head_calls(run: Run, batch: Any, **changes: Any) -> tuple[int, dict[str, Any]]:
    """How often the language head runs in an update's pieces, and the statistics."""
    calls: list[int] = []
    hook = run.policy.compute_module.get_output_embeddings().register_forward_hook(
        lambda *_: calls.append(1)
    )
    stats = backward(run, batch, replace(step_params_at(run.config, 0), **changes))
    hook.remove()
    return len(calls), stats


@KINDS
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_while_the_critic_learns_alone_nothing_goes_back_through_the_policy(
    tmp_path, kind, compute
):
    run = begun(tmp_path, kind, compute=compute, optim__token_budget=200)
    batch = collect(run, step_params_at(run.config, 0)).batch
    calls, stats = head_calls(run, batch, is_critic_alone=False)
    critic = by_hand.flat([p.grad for p in run.critic.module.parameters()])
    assert calls == 2 * stats["update/micro_batches_count"].sum and any(
        p.grad is not None for p in run.policy.module.parameters()
    )
    run.optimizer.zero_grad(set_to_none=True)
    calls, alone = head_calls(run, batch, is_critic_alone=True)
    assert calls == alone["update/micro_batches_count"].sum > 1
    assert all(
        p.grad is None
        for p in (*run.policy.module.parameters(), *run.policy.compute_module.parameters())
    )
    assert all(
        p.requires_grad
        for p in (*run.policy.module.parameters(), *run.policy.compute_module.parameters())
    )
    assert critic.abs().max() > 0
    assert torch.equal(by_hand.flat([p.grad for p in run.critic.module.parameters()]), critic)
    assert alone == stats


# --- numbers that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, NO_KL], ids=["with log-probs", "values alone"])
def test_a_shared_critics_values_that_would_be_broadcast_are_refused_before_and_in_an_update(
    tmp_path, changes
):
    run = begun(tmp_path, SHARED, **changes)
    batch = collect(run, step_params_at(run.config, 0)).batch
    likelihood, values = run.policy.likelihood, run.policy.values

    def narrow(*args: Any, **wanted: Any) -> Any:
        whole = likelihood(*args, **wanted)
        return whole if whole.values is None else replace(whole, values=whole.values[:, :1])

    run.policy.likelihood, run.policy.values = narrow, lambda *args: values(*args)[:, :1]
    with pytest.raises(GruppoError, match="the critic returned values of shape"):
        collect(run, step_params_at(run.config, 0))
    with pytest.raises(GruppoError, match="the critic returned values of shape"):
        backward(run, batch, step_params_at(run.config, 0))


def skip(run: Run, batch: Any) -> None:
    before = by_hand.flat(run.parameters)
    logged = learn(run, batch, step_params_at(run.config, 0))
    assert logged["update/skipped_count"] == 1 and torch.equal(by_hand.flat(run.parameters), before)


def test_the_network_whose_gradient_is_not_finite_is_named_with_its_option(tmp_path, caplog):
    run = begun(tmp_path, SEPARATE)
    values, step_params = run.critic.values, step_params_at(run.config, 0)
    batch = collect(run, step_params).batch
    run.critic.values = lambda *args: values(*args) * math.nan
    run.state.skipped_updates = 1
    with caplog.at_level("WARNING", "gruppo"):
        skip(run, batch)
    assert "grad/critic_norm is not finite" in caplog.text and "grad/norm" not in caplog.text
    with pytest.raises(NumericalStop, match=r"grad/critic_norm is not finite.*critic\.lr"):
        skip(run, batch)
    run.critic.values, run.state.skipped_updates = values, 2
    with pytest.raises(NumericalStop, match=r"grad/norm is not finite.*optim\.lr"):
        skip(run, replace(batch, advantages=batch.advantages * math.nan))


# --- time -----------------------------------------------------------------------------------------


def test_the_time_of_a_rollout_holds_the_drawing_of_prompts_and_none_of_the_reward(tmp_path):
    def slow(completions: Any, **_: Any) -> list[float]:
        time.sleep(0.2)
        return [1.0] * len(completions)  # no group has spread: all are drawn again

    run = run_in(tmp_path, Parts(rewards=[slow]), rollout__refill_rounds=1)
    take, sampled = run.source.take, []

    def slowly(n: int) -> Any:
        time.sleep(0.05)
        sampled.append(n)
        return take(n)

    run.source.take = slowly
    began = time.perf_counter()
    logged = collect(run, step_params_at(run.config, 0)).metrics
    seconds = time.perf_counter() - began
    assert len(sampled) == 8 and logged["refill/rounds_count"] == 1
    assert logged["time/rollout_s"] >= 0.05 * 8 and logged["time/reward_s"] >= 0.2 * 2
    parts = logged["time/rollout_s"] + logged["time/reward_s"] + logged["time/credit_s"]
    assert 0.95 * seconds < parts <= seconds
    assert logged["time/rollout_s"] < seconds - 0.2 * 2
