"""A GPU that cannot be used, or is too small: one line, or the CPU with one warning. The devices
are fakes."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests import tiny
from tests.trainer.test_step import run_in

from gruppo.build import place
from gruppo.loading import describe_error
from gruppo.modalities.text.policy import TextPolicy
from gruppo.platforms import usable_cuda
from gruppo.trainer import memory
from gruppo.trainer.collect import collect
from gruppo.trainer.loop import FORECAST_STEPS, forecast
from gruppo.trainer.stages import step_params_at
from gruppo.types import GruppoError

OLD_DRIVER = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). "
    "Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx "
    "(Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)"
)
NO_KERNEL = (
    "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors "
    "might be "
    "asynchronously reported at some other API call"
)


def old_driver(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: warnings.warn(OLD_DRIVER, stacklevel=1) or False
    )
    return "The NVIDIA driver on your system is too old (found version 11040)"


def no_kernel(monkeypatch):
    def ones(*shape, device=None, **options):
        raise RuntimeError(NO_KERNEL)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", ones)
    return "CUDA error: no kernel image is available for execution on the device"


@pytest.fixture(autouse=True)
def _not_cached():
    usable_cuda.cache_clear()
    yield
    usable_cuda.cache_clear()


@pytest.mark.parametrize("fault", [old_driver, no_kernel])
def test_a_gpu_that_torch_cannot_use_is_named_in_one_warning_or_one_error(
    fault, tmp_path, monkeypatch, caplog, recwarn
):
    run = run_in(tmp_path)
    usable_cuda.cache_clear()
    with monkeypatch.context() as patch:
        reason = fault(patch)
        assert usable_cuda() == (False, reason)
    assert place(run.policy, run.config).device == "auto" and run.policy.device.type == "cpu"
    (line,) = [record.getMessage() for record in caplog.records if "GPU" in record.getMessage()]
    assert line == f"the GPU cannot be used, so the run is on the CPU: {reason}."
    with pytest.raises(GruppoError) as error:
        place(run.policy, tiny.config(tmp_path, device="cuda"))
    assert str(error.value).startswith(
        f"device cuda: {reason}. Set device cpu"
    ) and "\n" not in str(error.value)
    assert not recwarn.list


def test_a_machine_without_a_gpu_is_not_warned_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = run_in(tmp_path)
    assert usable_cuda() == (False, "")
    place(run.policy, run.config)
    assert not [record for record in caplog.records if "GPU" in record.getMessage()]
    with pytest.raises(GruppoError, match="torch finds no CUDA device"):
        place(run.policy, tiny.config(tmp_path, device="cuda"))


def test_a_gpu_that_works_is_asked_once(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: calls.append(1) or True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    devices, ones = [], torch.ones
    monkeypatch.setattr(
        torch, "ones", lambda *shape, device: devices.append(device) or ones(*shape)
    )
    assert usable_cuda() == usable_cuda() == (True, "") and calls == [1] and devices == ["cuda:1"]


def test_memory_of_a_gpu_that_runs_out_is_one_line():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB of "
        "which 1.1 GiB is "
        "free. Process 7 has\n6 GiB memory in use."
    )
    line, code = describe_error(error)
    assert line.startswith(
        "the GPU's memory ran out (Tried to allocate 2.00 GiB). Train a smaller --model"
    )
    assert code == GruppoError.exit_code
    assert "\n" not in line and "bug" not in line


# --- micro-batches from measured memory -----------------------------------------------------------


class FakeMemory:
    """Of a device: bytes that a forward takes for each of its tokens."""

    def __init__(self, monkeypatch, policy, per_token: int) -> None:
        self.now, self.peak, self.tokens = 1000, 1000, []
        likelihood = policy.likelihood

        def watched(rollouts, micro_batch, **options):
            self.tokens.append(policy.longest_row(rollouts, micro_batch.rows))
            assert len(micro_batch.rows) == 1 and torch.is_grad_enabled()
            first = 10**6 if len(self.tokens) == 1 else 0  # workspaces, a compiler
            self.peak = max(self.peak, self.now + per_token * self.tokens[-1] + first)
            return likelihood(rollouts, micro_batch, **options)

        monkeypatch.setattr(policy, "likelihood", watched)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(
            torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.now)
        )


def test_a_tokens_bytes_are_measured_on_the_longest_row_and_set_the_micro_batches(
    tmp_path, monkeypatch
):
    run = run_in(tmp_path)
    rollouts = collect(run, step_params_at(run.config, 0)).rollouts
    fake = FakeMemory(monkeypatch, run.policy, per_token=4096)
    measured = memory.measured_bytes(run.policy, rollouts, rollouts.mask)
    assert (
        measured == 4096
        and fake.tokens == [run.policy.longest_row(rollouts, torch.arange(len(rollouts)))] * 2
    )
    assert memory.measured_bytes(run.policy, rollouts, rollouts.mask & False) == 0
    room = memory.still_to_come(run) + 4096 * 600
    monkeypatch.setattr(memory, "free_bytes", lambda device: room)
    assert memory.token_budget(run, measured) == 256  # of 300 that half of it holds


def test_the_first_micro_batches_on_cuda_are_measured_and_no_others(tmp_path, monkeypatch):
    run = run_in(tmp_path)
    rollouts = collect(run, step_params_at(run.config, 0)).rollouts
    calls = []
    monkeypatch.setattr(memory, "measured_bytes", lambda *of: calls.append(of) or 10**9)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 * 10**9)
    next(memory.attempts(run, [(rollouts, rollouts.mask)]))
    assert not calls and run.state.token_budget == run.policy.default_budgets[0]
    run.state.token_budget = 0
    monkeypatch.setattr(TextPolicy, "device", property(lambda self: torch.device("cuda")))
    for _ in range(2):
        next(memory.attempts(run, [(rollouts, rollouts.mask)]))
    assert len(calls) == 1 and run.state.token_budget == 2


@pytest.mark.parametrize("free", [5 * 2**30, 2**20])
def test_free_memory_of_a_device_is_what_it_reports_and_what_torch_holds_unused(free, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert memory.free_bytes(torch.device("cuda")) == free + 400


# --- how long it will take ------------------------------------------------------------------------


def test_the_first_steps_forecast_the_run_and_name_its_gate(tmp_path):
    run = run_in(tmp_path, steps=50)
    run.state.step = FORECAST_STEPS
    assert forecast(run, 5.0 * FORECAST_STEPS).endswith(": the other 45 take about 3:45.")
    assert forecast(run, 0.1 * FORECAST_STEPS) == "", "seconds are not forecast"
    gated = run_in(tmp_path, steps=50, stage__until="eval/reward_mean >= 0.8")
    gated.state.step = FORECAST_STEPS
    text = forecast(gated, 12.0 * FORECAST_STEPS)
    assert text.startswith(
        f"12.0 s a step over the first {FORECAST_STEPS} on {torch.get_num_threads()} thread"
    )
    assert text.endswith(
        "the other 45 take about 9:00, fewer end the run once eval/reward_mean >= 0.8."
    )
