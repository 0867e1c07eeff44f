"""How long torch's threads spin before they sleep, chosen when gruppo is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/loadavg").is_file(), reason="reads Linux's number of running threads"
)
THREADS = str(max(os.cpu_count() or 1, 2))


@pytest.fixture(scope="module")
def other_job():
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    yield
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("program", "changes", "spins"),
    [
        ("import gruppo", {"OMP_NUM_THREADS": THREADS}, "1000"),
        ("import gruppo", {"OMP_NUM_THREADS": f"{THREADS},1"}, "1000"),
        ("import gruppo", {"OMP_NUM_THREADS": "1"}, None),
        ("import gruppo", {"OMP_NUM_THREADS": THREADS, "GOMP_SPINCOUNT": "7"}, "7"),
        ("import gruppo", {"OMP_NUM_THREADS": THREADS, "OMP_WAIT_POLICY": "ACTIVE"}, None),
        ("import sys; sys.modules['torch'] = 0; import gruppo", {"OMP_NUM_THREADS": THREADS}, None),
    ],
)
def test_threads_spin_briefly_beside_other_jobs_unless_the_user_decides(
    other_job, program, changes, spins
):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    command = [
        sys.executable,
        "-c",
        f"{program}; import os; print(os.environ.get('GOMP_SPINCOUNT'))",
    ]
    done = subprocess.run(
        command, env=environment | changes, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(spins)
