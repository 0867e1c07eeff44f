"""Free memory is read as it is, the budget follows from it, and what does not fit is done again in
smaller pieces."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.collecting import collect
from tests.trainer.test_ppo_step import SEPARATE, SHARED, begun
from tests.trainer.test_step import run_in

from gruppo import api
from gruppo.build import Parts, build
from gruppo.modalities.text import TextPolicy
from gruppo.modalities.text.memory import TOKENS_ON_CPU
from gruppo.platforms import free_bytes
from gruppo.trainer import forward
from gruppo.trainer.forward import is_out_of_memory, token_budget
from gruppo.trainer.run import Run
from gruppo.trainer.run_dir import RunFolder
from gruppo.trainer.stages import step_params_at
from gruppo.trainer.update import backward, update
from gruppo.types import GruppoError

CPU = torch.device("cpu")

# --- what is free ---------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root folder with these files; two underscores for a slash, so that /proc/self/cgroup is
    ``proc__self__cgroup``. The machine has 9 GB, and 7 kB of swap."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=9_000_000_000))
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(free=7_000))

    def write(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("DOT", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_without_control_groups_it_is_what_the_machine_has_available_with_its_swap(machine):
    assert free_bytes(CPU, machine()) == 9_000_007_000


def test_in_a_group_of_version_2_it_is_the_limit_less_the_use_without_pages_of_files(machine):
    root = machine(
        proc__self__cgroup="0::/pod/box\n",
        sys__fs__cgroup__pod__box__memoryDOTmax="4000000000\n",
        sys__fs__cgroup__pod__box__memoryDOTcurrent="1500000000\n",
        sys__fs__cgroup__pod__box__memoryDOTstat="anon 1000\ninactive_file 300000000\nactive_file "
        "200000000\n",
    )
    assert free_bytes(CPU, root) == 4_000_000_000 - 1_500_000_000 + 500_000_000
    machine(
        sys__fs__cgroup__pod__memoryDOTmax="900\n",
        sys__fs__cgroup__pod__memoryDOTcurrent="600\n",
    )
    assert free_bytes(CPU, root) == 300  # a group is within the one above it
    machine(
        sys__fs__cgroup__pod__memoryDOTmax="max\n",
        sys__fs__cgroup__pod__box__memoryDOTmax="max\n",
    )
    assert free_bytes(CPU, root) == 9_000_007_000


# --- the budget -----------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_budget_that_memory_left(tmp_path, monkeypatch):
    config = tiny.config(tmp_path, steps=1, name="short")
    monkeypatch.setattr(TextPolicy, "default_budgets", (128, 128))
    with api.Trainer.open(config) as trainer:
        trainer.run.state.token_budget = 64
        trainer.train()
    resumed, new = build(config, Parts())[0], build(config, Parts())[0]
    assert RunFolder(tmp_path / "runs/short").restore(resumed)
    assert (token_budget(resumed), token_budget(new)) == (64, 128)
    manifest = json.loads((tmp_path / "runs/short/manifest.json").read_text())
    assert manifest["token_budget"] == 128


# --- where memory runs out ------------------------------------------------------------------------

CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate "
    "2097152000 bytes. Error code 12 (Cannot allocate memory)"
)


class Full:
    """A policy or a critic on a machine too small for more than ``rows`` rows; it fails after the
    forward."""

    def __init__(self, part: Any, name: str, rows: int, *, error: Exception | None = None) -> None:
        self.forward, self.rows, self.error = (
            getattr(part, name),
            rows,
            error or RuntimeError(CPU_SAYS),
        )
        self.asked: list[int] = []
        setattr(part, name, self)

    def __call__(self, rollouts: Any, micro_batch: Any, **kwargs: Any) -> Any:
        result = self.forward(rollouts, micro_batch, **kwargs)
        self.asked.append(len(micro_batch.rows))
        if len(micro_batch.rows) > self.rows:
            raise self.error
        return result


def gradients(run: Run) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in run.parameters])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compute", "who", "kind", "error"),
    [
        ("float32", "policy", SHARED, RuntimeError(CPU_SAYS)),
        ("bfloat16", "policy", SEPARATE, torch.OutOfMemoryError("CUDA out of memory.")),
        ("bfloat16", "critic", SEPARATE, MemoryError()),
    ],
)
def test_what_did_not_fit_is_done_again_in_smaller_micro_batches_and_nothing_counts_twice(
    tmp_path, kind, compute, who, error, caplog
):
    """The critic fails after the policy's gradient of the piece, and pieces before it, are
    there."""
    run = begun(tmp_path, kind, compute=compute)
    batch, step_params = (
        collect(run, step_params_at(run.config, 0)).batch,
        step_params_at(run.config, 0),
    )
    full = Full(
        *((run.policy, "likelihood") if who == "policy" else (run.critic, "values")),
        rows=2,
        error=error,
    )
    stats, got = backward(run, batch, step_params), gradients(run)
    budget = run.state.token_budget
    assert 1 < budget < TOKENS_ON_CPU and max(full.asked) > 2
    assert caplog.text.count("memory ran out") == len([rows for rows in full.asked if rows > 2])
    assert f"--optim.token-budget {budget} to begin there" in caplog.text

    full.rows = 1 << 30
    run.optimizer.zero_grad(set_to_none=True)
    expected_stats = backward(run, batch, step_params)
    assert torch.equal(got, gradients(run)) and stats == expected_stats
    assert stats["ratio"].count == int(batch.loss_mask.sum())
    run.optimizer.zero_grad(set_to_none=True)
    run.state.token_budget = TOKENS_ON_CPU
    whole = backward(run, batch, step_params)
    assert whole["update/micro_batches_count"].sum < stats["update/micro_batches_count"].sum
    tolerance = 1e-5 if compute == "float32" else 0.05
    torch.testing.assert_close(got, gradients(run), rtol=0, atol=tolerance * float(got.abs().max()))


def test_forwards_before_the_updates_are_cut_too_and_the_budget_stays(tmp_path, caplog):
    run = run_in(tmp_path, optim__epochs=2, stage__kl_coef=0.1)
    full = Full(run.policy, "likelihood", rows=2)
    batch = collect(run, step_params_at(run.config, 0)).batch
    lowered = run.state.token_budget
    assert lowered < TOKENS_ON_CPU and caplog.records
    tried = len(full.asked)
    update(run, batch, step_params_at(run.config, 0))
    assert max(full.asked[tried:]) <= 2 and run.state.token_budget == lowered
    again = run_in(tmp_path, optim__epochs=2, stage__kl_coef=0.1, optim__token_budget=lowered)
    torch.testing.assert_close(
        collect(again, step_params_at(again.config, 0)).batch.old_logprobs, batch.old_logprobs
    )


def test_an_error_that_is_not_about_memory_is_raised_as_it_is(tmp_path):
    run = run_in(tmp_path)
    batch = collect(run, step_params_at(run.config, 0)).batch
    Full(run.policy, "likelihood", rows=0, error=RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        backward(run, batch, step_params_at(run.config, 0))
    assert not is_out_of_memory(ValueError(CPU_SAYS))


def test_a_real_request_for_too_much_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_row_that_does_not_fit_alone_is_refused_with_numbers_and_options(tmp_path):
    run = run_in(tmp_path)
    batch = collect(run, step_params_at(run.config, 0)).batch
    full = Full(run.policy, "likelihood", rows=0)
    with pytest.raises(GruppoError) as caught:
        backward(run, batch, step_params_at(run.config, 0))
    assert 1 in full.asked
    result = str(caught.value)
    assert result.startswith("one row does not fit into memory: ") and "2097152000" in result
    assert "--rollout.max-new-tokens" in result and "--model" in result


def test_micro_batches_hold_four_of_the_longest_prompt_unless_set_or_memory_ran_out(
    tmp_path, monkeypatch
):
    run = run_in(tmp_path)
    rollouts = collect(run, step_params_at(run.config, 0)).batch.rollouts
    longest = max(len(ids) for ids in rollouts.shared["prompt_ids"])
    monkeypatch.setattr(TextPolicy, "default_budgets", (longest, longest))
    run.state.token_budget = 0
    assert forward.budget_for(run, longest) == 4 * longest
    set_by_hand = run_in(tmp_path, optim__token_budget=longest)
    assert forward.budget_for(set_by_hand, longest) == longest
    # memory has run out before: also if what is left is the default, which gave four prompts
    for left in (longest - 1, longest):
        run.state.token_budget = left
        assert forward.budget_for(run, longest) == left
