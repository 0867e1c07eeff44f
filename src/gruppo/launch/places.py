"""Where the processes of a launch run: on this machine, or in a placement group of Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from gruppo.launch.child import ChildProcess, Process, RemoteProcess, free_ports
from gruppo.launch.commands import Launch, log
from gruppo.loading import counted, import_extra, visible
from gruppo.platforms import usable_processors
from gruppo.types import GruppoError

LOST = -9
"""Exit code of a process whose machine is gone."""
PLACED_S = 600.0
"""How long Ray may take to find room."""


class Place(Protocol):
    """Starts processes. A trainer's output is in ``trainer0.log`` and so on, a server's in ``server0.log``."""

    def start_server(self, number: int) -> Process: ...

    def url(self, number: int) -> str:
        """Address of a server that was started; "" while it is not known."""

    def start_trainers(self, urls: Sequence[str]) -> list[Process]: ...

    def close(self) -> None: ...


class Local:
    """Processes of this machine: the trainers on its first GPUs, if any, and the servers on the next ones."""

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
    """What torchrun would tell the ranks on these machines, those of a machine following each other."""
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


# --- Ray --------------------------------------------------------------------------------------------------------------


class InActor:
    """A process in an actor of its own. Where the actor or its machine is lost, so is the process."""

    def __init__(self, ray: Any, group: Any, bundle: int, resources: Mapping[str, float]) -> None:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
        kind = ray.remote(
            num_cpus=1, num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy
        )(RemoteProcess)
        self._ray, self._actor = ray, kind.remote()
        self._code: int | None = None

    def call(self, method: str, *args: Any) -> Any:
        try:
            return self._ray.get(getattr(self._actor, method).remote(*args))
        except self._ray.exceptions.RayError as error:
            why = visible(
                "".join(str(error).strip().splitlines()[-1:])
            )  # above it stands the actor's traceback
            raise GruppoError(f"""Ray cannot start a process of the launch: {why:.300}. All nodes need the same paths,
                such as {sys.executable} and {os.getcwd()}, and the same packages.""") from error

    def poll(self) -> int | None:
        if self._code is None:
            try:
                self._code = self._ray.get(self._actor.poll.remote())
            except self._ray.exceptions.RayActorError:
                self._code = LOST
            if self._code is not None:
                self._ray.kill(self._actor)  # gives its place in the group back
        return self._code

    def terminate(self) -> None:
        with suppress(self._ray.exceptions.RayActorError):
            self._ray.get(self._actor.terminate.remote())

    def kill(self) -> None:
        with suppress(self._ray.exceptions.RayActorError):
            self._ray.get(self._actor.kill.remote())


class Ray:
    """A placement group of the cluster that runs, or else of one on this machine: a bundle per process."""

    def __init__(self, launch: Launch) -> None:
        ray = self.ray = import_extra("ray", "ray", "--on ray")
        import_extra("ray.util.scheduling_strategies", "ray", "--on ray")
        chosen, self.launch = launch.chosen, launch
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        options = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            try:
                ray.init(address="auto", **options)
            except ConnectionError:  # no cluster runs
                if os.environ.get("RAY_ADDRESS"):
                    raise
                # processes that wait for each other share the processors of one machine
                ray.init(
                    num_cpus=chosen.trainers + chosen.servers, include_dashboard=False, **options
                )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise GruppoError(f"""Ray cannot be used: {visible(" ".join(str(error).split())):.300}. Correct RAY_ADDRESS,
                or the cluster; without both, gruppo launch starts one on this machine.""") from error
        for number, handler in handlers.items():  # Ray's own ends this process at once
            signal.signal(number, handler)
        has_gpus = launch.config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        gpus = [1] * chosen.trainers + [launch.gpus_per_server] * chosen.servers
        bundles = [
            {"CPU": 1.0, "GPU": float(count)} if has_gpus else {"CPU": 1.0} for count in gpus
        ]
        self.bundles, self.group = bundles, ray.util.placement_group(bundles, strategy="PACK")
        self.addresses: dict[int, tuple[str, int]] = {}
        if not self.group.wait(5):
            log.info("waiting for a placement group of %s", bundles)
            if not self.group.wait(PLACED_S):
                totals = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
                raise GruppoError(f"""Ray found no room for {counted(len(bundles), "process", "processes")} of {bundles}
                    within {PLACED_S:g} s; the cluster has {totals}. Lower --trainers or --servers, or add nodes.""")

    def _start(
        self, actor: InActor, command: Sequence[str], env: Mapping[str, str], name: str
    ) -> Process:
        # the launcher's environment, as srun gives it; devices are the actor's
        passed = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CUDA_VISIBLE", "RAY_"))
        }
        actor.call(
            "start", command, {**passed, **env}, self.launch.log(name).absolute(), os.getcwd()
        )
        return actor

    def start_server(self, number: int) -> Process:
        bundle = self.launch.chosen.trainers + number
        actor = InActor(self.ray, self.group, bundle, self.bundles[bundle])
        # a server that is started again keeps its port, which the trainers know; its machine may be another one
        _, port = self.addresses.get(
            number, ("", self.launch.chosen.port and self.launch.chosen.port + number)
        )
        self.addresses[number] = actor.call("address", port)
        command = self.launch.server_command("0.0.0.0", self.addresses[number][1])
        return self._start(actor, command, self.launch.environment(), f"server{number}")

    def url(self, number: int) -> str:
        host, port = self.addresses[number]
        return f"http://{host}:{port}"

    def start_trainers(self, urls: Sequence[str]) -> list[Process]:
        actors = [
            InActor(self.ray, self.group, n, self.bundles[n])
            for n in range(self.launch.chosen.trainers)
        ]
        placed = sorted(
            [(*actor.call("address", 0), n) for n, actor in enumerate(actors)], key=lambda at: at[0]
        )
        ranks = rank_environments([host for host, _, _ in placed], placed[0][1])
        command, env = self.launch.trainer_command(urls), self.launch.environment(urls)
        own = [(actors[n], env | rank) for (_, _, n), rank in zip(placed, ranks, strict=True)]
        return [
            self._start(actor, command, env, f"trainer{n}") for n, (actor, env) in enumerate(own)
        ]

    def close(self) -> None:
        self.ray.util.remove_placement_group(self.group)
        self.ray.shutdown()
