"""Keeps the processes of a launch running: servers first, then the trainers. What dies is started
again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppo.cli.options import pop_option
from gruppo.cli.serve import answers
from gruppo.engines.vllm.client import KEY
from gruppo.errors import EngineLost
from gruppo.launch import slurm
from gruppo.launch.child import Process
from gruppo.launch.commands import GRACE_S, Launch, claim, is_written, log, parse_launch, with_name
from gruppo.launch.places import Local, Place
from gruppo.loading import visible
from gruppo.types import GruppoError

POLL_S = 0.5
WINDOW_S = 3600.0
"""Within which restarts are counted."""
WAIT_S = 60.0
"""Between two lines about a server that does not answer yet."""
SERVER_GRACE_S = 40.0
"""How long servers may take to end."""
FINAL = (2, 3, 4)
"""Exit codes that a restart would not change: usage, data, numbers."""
STOPPED = 75


@dataclass
class Server:
    """State of a server."""

    process: Process | None = None
    started_at: float = 0.0
    reported_at: float = 0.0
    """When the last line about it was logged."""
    is_ready: bool = False
    was_ready: bool = False
    is_left_out: bool = False
    failures: list[float] = field(default_factory=list)
    """Times of its failures within the window."""


class Supervisor:
    """Servers and trainers of one launch."""

    def __init__(self, launch: Launch, place: Place) -> None:
        self.launch, self.place = launch, place
        self.servers = [Server() for _ in range(launch.chosen.servers)]
        self.trainers: list[Process] = []
        self.urls: list[str] = []
        """Servers that the trainers were started with."""
        self.failures: list[float] = []
        self._failed_at, self._is_moving, self._is_waiting = 0.0, False, False
        output = launch.log("trainer0")
        self._echoed = output.stat().st_size if output.is_file() else 0

    def run(self) -> int:
        """Run until the trainers are done or cannot go on; return the exit code."""
        try:
            while (code := self._turn()) is None:
                self._echo()
                time.sleep(POLL_S)
            return code
        except (
            KeyboardInterrupt
        ):  # the trainers finish their step and save; a second signal ends them at once
            with suppress(KeyboardInterrupt):
                if self.trainers:
                    log.info(
                        "stopping: the trainers finish their step and save; a second signal stops "
                        "at once"
                    )
                for process in self.trainers:
                    process.terminate()
                while any(process.poll() is None for process in self.trainers):
                    self._echo()
                    time.sleep(POLL_S / 5)
            codes = [process.poll() for process in self.trainers]
            return exit_code(codes) if codes and None not in codes else STOPPED
        finally:
            self._echo()
            servers = [server.process for server in self.servers if server.process is not None]
            try:
                for process in self.trainers:
                    if process.poll() is None:
                        process.kill()
                for process in servers:  # not before the trainers, which may still sample from them
                    process.terminate()
                until = time.monotonic() + SERVER_GRACE_S
                while (
                    any(process.poll() is None for process in servers) and time.monotonic() < until
                ):
                    time.sleep(POLL_S / 5)
            finally:
                for process in servers:
                    if process.poll() is None:
                        process.kill()

    def _turn(self) -> int | None:
        for number, server in enumerate(self.servers):
            if not server.is_left_out:
                self._check_server(number, server)
        if self.trainers:
            return self._check_trainers()
        used = [server for server in self.servers if not server.is_left_out]
        if self.servers and not used:
            raise EngineLost(f"""no server is left; the logs in {self.launch.folder / "logs"} say
                why. Correct that, and give the command again.""")
        if not all(server.is_ready for server in used):
            return None
        # a rank of before may still save
        was_waiting, self._is_waiting = self._is_waiting, is_written(self.launch.folder)
        if self._is_waiting and not was_waiting:
            log.info(
                "the trainers start once the process that writes to %s has ended",
                self.launch.folder,
            )
        if not self._is_waiting:
            self.urls = [
                self.place.url(n) for n, server in enumerate(self.servers) if not server.is_left_out
            ]
            self.trainers, self._failed_at, self._is_moving = (
                self.place.start_trainers(self.urls),
                0.0,
                False,
            )
            log.info("the trainers are started; their output is in %s", self.launch.log("trainer0"))
        return None

    def _check_server(self, number: int, server: Server) -> None:
        output = self.launch.log(f"server{number}")
        if server.process is None:
            server.process = self.place.start_server(number)
            server.started_at = server.reported_at = time.monotonic()
            if not server.was_ready:
                log.info("server %d is started; its output is in %s", number, output)
            return
        if (code := server.process.poll()) is not None:
            server.process, server.is_ready = None, False
            if not server.was_ready:
                text = (
                    output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
                )
                last = visible((text.strip().splitlines() or ["it printed nothing"])[-1])
                raise GruppoError(f"""server {number} ended with code {code} before it answered:
                    {last:.300} ({output}). Correct that, and give the command again.""")
            server.is_left_out = not self._may_restart(
                f"server {number}", f"code {code}", server.failures
            )
        elif not server.is_ready and (url := self.place.url(number)) and answers(url):
            server.is_ready = server.was_ready = True
            log.info(
                "server %d answers at %s after %.0f s",
                number,
                url,
                time.monotonic() - server.started_at,
            )
            if self.trainers and url not in self.urls and not self._is_moving:
                log.info("its address is new: the trainers save, and continue with it")
                self._is_moving = True
                for process in self.trainers:
                    process.terminate()
        elif not server.is_ready and time.monotonic() > server.reported_at + WAIT_S:
            server.reported_at = time.monotonic()
            log.info(
                "server %d does not answer yet at %s; its output is in %s",
                number,
                url or "any address",
                output,
            )

    def _check_trainers(self) -> int | None:
        codes = [process.poll() for process in self.trainers]
        if None in codes:  # the others notice that a rank has ended, save and end
            if any(codes):
                self._failed_at = self._failed_at or time.monotonic()
                if time.monotonic() > self._failed_at + GRACE_S:
                    for process in self.trainers:
                        process.kill()
            return None
        self.trainers, text = [], " ".join(map(str, codes))
        if (code := exit_code(codes)) in (0, *FINAL):
            if code:
                log.error(
                    "the trainers ended with code %d; %s says why",
                    code,
                    self.launch.log("trainer0"),
                )
            return code
        if not self._is_moving and not self._may_restart(
            "the trainers", f"code {text}", self.failures
        ):
            log.error(
                "the run in %s can be continued: give the command again with its --name",
                self.launch.folder,
            )
            return code
        return None

    def _may_restart(self, name: str, how: str, failures: list[float]) -> bool:
        """Whether what has ended may be started again; says so."""
        now, allowed = time.monotonic(), self.launch.chosen.max_restarts
        failures[:] = [*(at for at in failures if at > now - WINDOW_S), now]
        if len(failures) > allowed:
            log.error(
                "%s ended with %s, and --max-restarts is %d: not started again", name, how, allowed
            )
            return False
        log.warning(
            "%s ended with %s: started again (%d of %d within an hour)",
            name,
            how,
            len(failures),
            allowed,
        )
        return True

    def _echo(self) -> None:
        """Show what the first rank has printed since."""
        # no file yet, or nobody reads: a closed pipe, a terminal that is gone
        with suppress(OSError), self.launch.log("trainer0").open("rb") as file:
            file.seek(self._echoed)
            lines, end, _ = file.read().rpartition(b"\n")
            self._echoed += len(lines) + len(end)
            print((lines + end).decode("utf-8", "replace"), end="", flush=True)


def exit_code(codes: Sequence[int | None]) -> int:
    """The exit code of the trainers by those of the ranks: a cause comes before what others made of
    it."""
    causes = [code for code in codes if code]
    return min((code for code in causes if 0 < code < 128), default=STOPPED if causes else 0)


def show(launch: Launch) -> None:
    """Print the commands of all processes, as typed in a shell."""

    def printed(command: Sequence[str], env: Mapping[str, str], output: Path) -> Any:
        shown = [
            f"{name}={'...' if name == KEY else shlex.quote(value)}" for name, value in env.items()
        ]
        print(
            f"# {output.stem}\n{' '.join([*shown, shlex.join(command)])} >> "
            f"{shlex.quote(str(output))}"
        )

    place = slurm.Steps(launch, printed) if launch.chosen.on == "slurm" else Local(launch, printed)
    for number in range(launch.chosen.servers):
        place.start_server(number)
    place.start_trainers(
        [place.url(n) or f"http://server{n}" for n in range(launch.chosen.servers)]
    )


def submit_to_ray(planned: Launch, args: Sequence[str]) -> int:
    """Submit this launch as a job of one node of the Ray cluster; return the exit code of
    ``ray``."""
    gpus = planned.chosen.trainers + planned.chosen.servers * planned.gpus_per_server
    options = [f"--submission-id={planned.config.name}"]
    if planned.config.device != "cpu":
        options.append(f"--entrypoint-num-gpus={gpus}")
    own = with_name(args, planned.config.name)
    at = own.index("--") if "--" in own else len(own)
    words = [*pop_option(own[:at], "--on")[1], *own[at:]]
    job = [sys.executable, "-m", "gruppo", "launch", *words]
    command = ["ray", "job", "submit", *options, "--", *job]
    if planned.chosen.dry_run:
        print(shlex.join(command))
        return 0
    try:
        return subprocess.run(command).returncode
    except OSError as error:
        raise GruppoError(f"""ray cannot be run ({error.strerror}). Install "ray[default]", and set
            RAY_ADDRESS to the cluster.""") from None


def launch(args: list[str]) -> int:
    """Start what a command line asks for, and stay until it is done; return the exit code."""
    planned = parse_launch(args)
    chosen, is_in_job = planned.chosen, "SLURM_JOB_ID" in os.environ
    if chosen.on == "slurm" and not is_in_job:
        script = slurm.script(planned, args)
        if not chosen.dry_run:
            script = f"job {slurm.submit(planned, script)}; its log is {planned.log('slurm')}"
        print(script)
        return 0
    if chosen.on == "ray":
        return submit_to_ray(planned, args)
    if chosen.dry_run:
        show(planned)
        return 0
    place: Place = slurm.Steps(planned) if chosen.on == "slurm" else Local(planned)
    with ExitStack() as stack:
        stack.callback(place.close)
        claim(planned, stack)
        return Supervisor(planned, place).run()
