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
from gruppo.platforms import free_bytes, usable_cuda
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


@pytest.mark.parametrize("free", [5 * 2**30, 2**20])
def test_free_memory_of_a_device_is_what_it_reports_and_what_torch_holds_unused(free, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert free_bytes(torch.device("cuda")) == free + 400
