"""A process on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from gruppo.platforms import ends_with_parent


class Process(Protocol):
    """A process that was started."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it, and what it has started."""


class ChildProcess:
    """A process of this machine, whose output is appended to a file. It gets SIGTERM when this
    process dies."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], output: Path, cwd: str | None = None
    ) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **env},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches the launcher alone, which stops the others in order
                start_new_session=True,
                preexec_fn=ends_with_parent(),
            )
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and self._process.poll() is not None:
            # what it has left: a server goes on where gruppo serve was killed, and holds the port
            self.kill()
            self._code = self._process.returncode
        return self._code

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if os.name != "posix":
            self._process.kill()
        elif self._code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
