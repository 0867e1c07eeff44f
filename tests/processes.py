"""Children that start in milliseconds: forked from a server that has imported everything once and
has no threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        "accelerate",
        "gruppo.cli.commands",
        "gruppo.api",
        "gruppo.view.report",
        "matplotlib.pyplot",
        "pytest",
        "tests.trainer.runs",
        "tests.warm",
        "torch.distributed.fsdp",
        "transformers.generation.utils",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)
TIMEOUT_S = 60
draws_plots = False
"""Whether runs of children that start now draw plots when they finish; the fixture ``plots`` sets
it."""


def no_plots(*_: Any, **__: Any) -> list[Path]:
    return []


def no_fsync(_: int) -> None:
    """For ``os.fsync``: the tests end processes, and not the power."""


@dataclass
class Child:
    process: BaseProcess
    folder: Path

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit code; minus the signal's number where one ended it."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"the child did not end within {timeout_s} s:\n{self.err}")
        return self.process.exitcode

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def kill(self) -> int:
        self.send(signal.SIGKILL)
        self.process.join()
        return self.process.exitcode or 0

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait_for(self, is_there: Callable[[], Any]) -> None:
        """Until something is true, or the child has ended."""
        until = time.monotonic() + TIMEOUT_S
        while not is_there() and self.process.is_alive() and time.monotonic() < until:
            time.sleep(0.002)


def start(
    target: Callable[..., Any], *args: Any, folder: Path, env: Mapping[str, str] | None = None
) -> Child:
    """Call ``target(*args)`` in a child, its output in files of ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (target, args, str(folder), dict(env or {}), draws_plots)
    process = _server.Process(target=_child, args=arguments, daemon=True)
    process.start()
    return Child(process, folder)


def gruppo(*args: str, folder: Path, env: Mapping[str, str] | None = None) -> Child:
    """The command line in a child."""
    return start(command_line, args, folder=folder, env=env)


def command_line(args: Sequence[str]) -> None:
    from gruppo.cli import app

    app.main(list(args))


def exit_code(args: Sequence[str]) -> int:
    """What a command of this process exits with."""
    try:
        command_line(args)
    except SystemExit as done:
        return int(done.code or 0)
    raise AssertionError("a command exits")


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def ranks(count: int, target: Callable[..., Any], *args: Any, folder: Path) -> list[Child]:
    """As many children as torchrun would start, with what it tells them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [
        start(
            target,
            *args,
            folder=folder / f"rank{n}",
            env=shared | {"RANK": str(n), "LOCAL_RANK": str(n)},
        )
        for n in range(count)
    ]


def run_ranks(count: int, target: Callable[..., Any], *args: Any, folder: Path) -> None:
    """Call ``target(*args)`` on each of several ranks, or once in this process."""
    if count == 1:
        target(*args)
        return
    children = ranks(count, target, *args, folder=folder)
    codes = [child.wait() for child in children]
    assert not any(codes), "\n".join(child.err for child in children)


def redirect(number: int, to: int) -> None:
    """Redirect standard output (1) or error (2). The forked stream knows a file's position, which a
    pipe has not."""
    os.dup2(to, number)
    stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if number == 1:
        sys.stdout = stream
    else:
        sys.stderr = stream


def _child(
    target: Callable[..., Any],
    args: Sequence[Any],
    folder: str,
    env: Mapping[str, str],
    draws: bool,
) -> None:
    os.environ.update(env)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    import torch

    torch.set_num_threads(1)
    os.fsync = no_fsync
    if not draws:
        from gruppo import api
        from gruppo.view import report

        api.plot_run = report.write_report = no_plots
    target(*args)
