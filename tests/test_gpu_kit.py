"""The GPU kit: whatever happens to a part, the others have their results, and the same command goes
on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks import gpu
from benchmarks.gpu import Part


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_a_part_that_fails_or_hangs_costs_no_other_and_is_run_again_with_the_rest(tmp_path):
    marker = tmp_path / "fixed"
    fails = f"import os, sys; sys.exit(0 if os.path.exists({str(marker)!r}) else 7)"
    counted = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    parts = [
        Part("first", python(counted), 60, 0),
        Part("fails", python(fails), 60, 0),
        Part("hangs", python("import time; time.sleep(600)"), 0.3, 0),
        Part("last", python("print('head\\n\\nits table')"), 60, 0),
    ]
    states = gpu.run_all(parts, tmp_path, time.monotonic() + 600)
    assert [record["state"] for record in states.values()] == [
        "done",
        "failed with code 7, see fails.log",
        "over its 0 s",
        "done",
    ]
    assert (
        "its table" in (tmp_path / "summary.md").read_text()
        and "head" not in (tmp_path / "summary.md").read_text()
    )
    marker.touch()
    states = gpu.run_all(parts, tmp_path, time.monotonic() + 600)
    assert states["fails"]["state"] == "done" and (tmp_path / "count").read_text() == "x"


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="the system does not list processes as files"
)
def test_a_part_that_is_over_its_time_leaves_no_process_behind(tmp_path):
    """A side of a benchmark has a process group of its own, and would hold memory of the device."""
    child = "[sys.executable, '-S', '-c', 'import time; time.sleep(600)']"
    written = tmp_path / "pid"
    code = f"import subprocess, sys, time; p = subprocess.Popen({child}, process_group=0)"
    code += f"; open({str(written)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    part, log = Part("sides", python(code), 60, 0), tmp_path / "log"

    def interrupt(timeout_s):
        while not (written.exists() and written.read_text()):
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        wait = subprocess.Popen.wait
        patch.setattr(
            subprocess.Popen,
            "wait",
            lambda self, *limit: interrupt(*limit) if limit else wait(self),
        )
        with pytest.raises(KeyboardInterrupt):
            gpu.run(part, log, 60)
    pid = int(written.read_text())
    stat = Path(f"/proc/{pid}/stat")  # gone, or not yet collected by the process that inherited it
    deadline = time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.05)


def test_no_part_is_started_without_time_for_it_and_an_interrupt_keeps_what_is_complete(
    tmp_path, monkeypatch
):
    parts = [Part("first", python(""), 60, 0), Part("second", python(""), 60, 20)]
    states = gpu.run_all(parts, tmp_path, time.monotonic() + 10)
    assert [record["state"] for record in states.values()] == ["done", "no time left"]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.run_all(parts, tmp_path, time.monotonic() + 600)
    summary = (tmp_path / "summary.md").read_text()
    assert "| first | done |" in summary and "| second | interrupted |" in summary


def test_the_kit_measures_three_workloads_on_two_models_against_the_tests_of_the_device(tmp_path):
    names = [part.name for part in gpu.parts(tmp_path, is_tiny=False, vllm_python="")]
    steps = [name for name in names if name.startswith("step-")]
    assert names[0] == "tests" and len(steps) == 6 and {"generate", "roofline"} <= {*names}
    assert sum(part.limit_s for part in gpu.parts(tmp_path, is_tiny=True, vllm_python="")) < 15 * 60
