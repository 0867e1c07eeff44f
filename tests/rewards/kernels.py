"""Whether this machine's kernel has what the jail is made of, found out beside it: a jail that
leaks is not skipped."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import pytest


def lacks() -> str | None:
    """What is missing; None where nothing is."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"{sys.platform} on {platform.machine()} has no jail"
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        return "this kernel has no Landlock"
    return None if Path("/proc/sys/kernel/seccomp").is_dir() else "this kernel has no seccomp"


jailed = pytest.mark.skipif(lacks() is not None, reason=str(lacks()))
