"""Where the processes of a launch run: on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from gruppo.launch.child import ChildProcess, Process, free_ports
from gruppo.launch.commands import Launch
from gruppo.loading import counted
from gruppo.platforms import usable_processors
from gruppo.types import GruppoError


class Place(Protocol):
    """Starts processes. A trainer's output is in ``trainer0.log`` and so on, a server's in
    ``server0.log``."""

    def start_server(self, number: int) -> Process: ...

    def url(self, number: int) -> str:
        """Address of a server that was started; "" while it is not known."""

    def start_trainers(self, urls: Sequence[str]) -> list[Process]: ...

    def close(self) -> None: ...


class Local:
    """Processes of this machine: the trainers on its first GPUs, if any, and the servers on the
    next ones."""

    def __init__(self, launch: Launch, start: Callable[..., Process] = ChildProcess) -> None:
        import torch

        self.launch, self._start = launch, start
        chosen, each, first = launch.chosen, launch.gpus_per_server, launch.chosen.port
        self.ports = (
            [*range(first, first + chosen.servers)] if first else free_ports(chosen.servers)
        )
        for port in self.ports if first else ():
            with socket.socket() as probe:
                if os.name == "posix":  # connections that have ended hold no port
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except (OSError, OverflowError):
                    raise GruppoError(f"""port {port} is in use, or not allowed. Set --port to the first of
                        {counted(chosen.servers, "free port")}, or leave it out.""") from None
        self.trainer_env, self.server_envs = dict[str, str](), [dict[str, str]()] * chosen.servers
        count = 0 if launch.config.device == "cpu" else torch.cuda.device_count()
        if not count:
            # not fewer for --servers: a resumed run needs as many threads as before
            threads = max(usable_processors() // chosen.trainers, 1)
            if chosen.trainers > 1 and "OMP_NUM_THREADS" not in os.environ:
                self.trainer_env = {"OMP_NUM_THREADS": str(threads)}
            return
        first = 0 if launch.config.engine.colocated else chosen.trainers
        if (needed := max(first + chosen.servers * each, chosen.trainers)) > count:
            raise GruppoError(
                f"""{counted(chosen.trainers, "trainer")} and {counted(chosen.servers, "server")} of
                    {counted(each, "GPU")} need {needed} GPUs, and {count} are here""",
                advice="Lower --trainers or --servers, or share GPUs with $engine.colocated True",
            )
        names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = names or [str(number) for number in range(count)]
        self.trainer_env = {"CUDA_VISIBLE_DEVICES": ",".join(names[: chosen.trainers])}
        groups = [names[first + n * each : first + (n + 1) * each] for n in range(chosen.servers)]
        self.server_envs = [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]

    def start_server(self, number: int) -> Process:
        command = self.launch.server_command("127.0.0.1", self.ports[number])
        env = self.launch.environment() | self.server_envs[number]
        return self._start(command, env, self.launch.log(f"server{number}"))

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    def start_trainers(self, urls: Sequence[str]) -> list[Process]:
        command, env = (
            self.launch.trainer_command(urls),
            self.launch.environment(urls) | self.trainer_env,
        )
        ranks = rank_environments(["127.0.0.1"] * self.launch.chosen.trainers, free_ports(1)[0])
        return [
            self._start(command, env | rank, self.launch.log(f"trainer{n}"))
            for n, rank in enumerate(ranks)
        ]

    def close(self) -> None:
        pass


def rank_environments(hosts: Sequence[str], port: int) -> list[dict[str, str]]:
    """What torchrun would tell the ranks on these machines, those of a machine following each
    other."""
    if len(hosts) == 1:
        return [{}]
    shared, ranks = (
        {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(port), "WORLD_SIZE": str(len(hosts))},
        [],
    )
    for rank, host in enumerate(hosts):
        ranks.append(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank - hosts.index(host))})
        ranks[-1]["LOCAL_WORLD_SIZE"] = str(hosts.count(host))
    return ranks
