"""Trainers and servers on this machine: what ends is started again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gruppo.cli.serve import answers
from gruppo.errors import EngineLost
from gruppo.launch import slurm
from gruppo.launch.commands import Launch, devices, free_ports, log, parse_launch
from gruppo.loading import visible
from gruppo.platforms import ends_with_parent, lock_file
from gruppo.types import GruppoError

POLL_S = 0.5
GRACE_S = 600.0
"""How long the other ranks may take to notice that one has ended, and to save."""
SERVER_GRACE_S = 40.0
"""How long servers may take to end."""
FINAL = (0, 2, 3, 4)
"""Exit codes that a restart would not change: done, usage, data, numbers."""
STOPPED = 75


class ChildProcess(subprocess.Popen):
    """A process whose output is appended to a file. It gets SIGTERM when this process dies."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            super().__init__(
                command,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches the launcher alone, which stops the others in order
                start_new_session=True,
                preexec_fn=ends_with_parent(),
            )

    def kill(self) -> None:
        """Kill it, and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass
class Server:
    """A server of this machine."""

    name: str
    port: int
    env: dict[str, str]
    process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Supervisor:
    """Starts the servers of a launch, and the trainers once all servers answer."""

    def __init__(self, launch: Launch, start: Callable[..., Any] = ChildProcess) -> None:
        self.launch, self._start = launch, start
        self._env, environments = devices(launch)
        ports = free_ports(len(environments))
        self.servers = [
            Server(f"server{n}", port, env)
            for n, (port, env) in enumerate(zip(ports, environments, strict=True))
        ]
        self.trainers = list[Any]()
        self.restarts = Counter[str]()
        output = launch.log("trainer0")
        self._shown = output.stat().st_size if output.is_file() else 0

    def run(self) -> int:
        """Run until the trainers are done or cannot go on; return the exit code."""
        try:
            while True:
                self._wait_for_servers()
                self.start_trainers()
                code = self._watch()
                if code in FINAL:
                    return code
                if not self._may_restart("the trainers", code):
                    log.error("%s can be continued by the same command", self.launch.folder)
                    return code
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                log.info("stopping: the trainers save; a second signal stops at once")
                for process in self.trainers:
                    process.terminate()
                return self._watch() if self.trainers else STOPPED
            return STOPPED
        finally:
            self._end()

    def start_server(self, server: Server) -> None:
        command = self.launch.server_command("127.0.0.1", server.port)
        server.process = self._start(command, server.env, self.launch.log(server.name))

    def start_trainers(self) -> None:
        """Start all ranks, with the variables that torchrun sets."""
        launch, count = self.launch, self.launch.options.trainers
        urls = [server.url for server in self.servers]
        command = launch.resume_command() if launch.is_begun else launch.train_command(urls)
        env = {**self._env, "GRUPPO_ENGINE_URLS": ",".join(urls)}
        if count > 1:
            env |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_ports(1)[0]),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
            }
        self.trainers = []
        for rank in range(count):
            if count > 1:
                env = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.trainers.append(self._start(command, env, launch.log(f"trainer{rank}")))

    def _wait_for_servers(self) -> None:
        what = "the trainers start when all servers answer and nothing writes to %s"
        log.info(what, self.launch.folder)
        for server in self.servers:
            if server.process is None:
                self.start_server(server)
        while _is_written(self.launch.folder) or not all(answers(s.url) for s in self.servers):
            self._check_servers()
            time.sleep(POLL_S)
        if self.launch.options.servers and not self.servers:
            raise EngineLost(f"""no server is left; the logs in {self.launch.folder / "logs"} say
                why. Correct that, and give the command again.""")

    def _check_servers(self) -> None:
        """Start servers again that have ended, or leave them out."""
        for server in [*self.servers]:
            code = server.process.poll()
            if code is None:
                continue
            server.process.kill()  # what it has left holds the port
            if not self.trainers:
                last = _last_line(self.launch.log(server.name))
                raise GruppoError(f"""{server.name} ended with code {code} before it answered:
                    {last}. Correct that, and give the command again.""")
            if self._may_restart(server.name, code):
                self.start_server(server)
            else:
                self.servers.remove(server)

    def _watch(self) -> int:
        """Wait for the trainers; return their exit code."""
        until = float("inf")
        while None in (codes := [process.poll() for process in self.trainers]):
            if any(codes):  # the others notice it, save and end
                until = min(until, time.monotonic() + GRACE_S)
            if time.monotonic() > until:
                for process in self.trainers:
                    process.kill()
            self._check_servers()
            self._show_output()
            time.sleep(POLL_S)
        self._show_output()
        return exit_code(codes)

    def _may_restart(self, name: str, code: int) -> bool:
        if self.restarts[name] == self.launch.options.max_restarts:
            log.error("%s: exit code %s; not started again (--max-restarts)", name, code)
            return False
        self.restarts[name] += 1
        log.warning("%s: exit code %s; started again", name, code)
        return True

    def _show_output(self) -> None:
        """Print what the first rank has printed since."""
        # no file yet, or nobody reads: a closed pipe, a terminal that is gone
        with suppress(OSError), self.launch.log("trainer0").open("rb") as file:
            file.seek(self._shown)
            lines, end, _ = file.read().rpartition(b"\n")
            self._shown += len(lines + end)
            print((lines + end).decode("utf-8", "replace"), end="", flush=True)

    def _end(self) -> None:
        servers = [server.process for server in self.servers if server.process is not None]
        for process in self.trainers:
            process.kill()
        for process in servers:
            process.terminate()
        until = time.monotonic() + SERVER_GRACE_S
        with suppress(KeyboardInterrupt):
            while any(p.poll() is None for p in servers) and time.monotonic() < until:
                time.sleep(POLL_S)
        for process in servers:
            process.kill()


def exit_code(codes: Sequence[int | None]) -> int:
    """The exit code of the trainers by those of the ranks: a cause comes before what others made of
    it, and a rank that was killed counts as stopped."""
    causes = [code for code in codes if code]
    return min((code for code in causes if 0 < code < 128), default=STOPPED if causes else 0)


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{visible(lines[-1]) if lines else 'it printed nothing':.300} ({output})"


def _is_written(folder: Path) -> bool:
    """Whether a trainer has a run's folder open."""
    try:
        if (folder / ".lock").exists():
            lock_file(folder / ".lock").close()
    except BlockingIOError:
        return True
    return False


def _show(command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
    """Print a command as typed in a shell, in place of starting it."""
    words = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    print(f"# {output.stem}\n{' '.join(words)} {shlex.join(command)}")


def launch(args: list[str]) -> int:
    """Start what a command line requests, and stay until it is done; return the exit code."""
    planned = parse_launch(args)
    if planned.options.slurm:
        return slurm.submit(planned)
    if planned.options.dry_run:
        supervisor = Supervisor(planned, _show)
        for server in supervisor.servers:
            supervisor.start_server(server)
        supervisor.start_trainers()
        return 0
    lock = planned.folder / "logs" / ".lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with lock_file(lock):
            return Supervisor(planned).run()
    except BlockingIOError:
        raise GruppoError(
            f"another gruppo launch runs {planned.folder}; wait for it or stop it."
        ) from None
