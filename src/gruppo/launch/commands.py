"""The commands of ``gruppo launch``: its options, trainers, servers, and what is refused before
anything starts."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from gruppo.cli.options import parse_config, parse_own
from gruppo.cli.serve import find_vllm
from gruppo.config import serialization
from gruppo.config.checks import check_folder_name
from gruppo.config.schema import Config, LaunchConfig
from gruppo.integrity import check_links
from gruppo.loading import counted
from gruppo.platforms import usable_processors
from gruppo.recipes.open import check_code, run_stem
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")
GRUPPO = (sys.executable, "-m", "gruppo")


@dataclass(frozen=True)
class Launch:
    """The trainers and servers of a run."""

    options: LaunchConfig
    config: Config
    words: tuple[str, ...]
    """Recipe and options, as ``gruppo train`` takes them."""
    vllm: tuple[str, ...] = ()
    """Options of vLLM."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.runs_dir) / self.config.name

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.folder / "logs" / f"{name}.log"

    @property
    def is_begun(self) -> bool:
        """Whether the run has a folder, which is then continued."""
        return (self.folder / "config.json").is_file()

    @property
    def gpus_per_server(self) -> int:
        words = " ".join(self.vllm)
        size = re.search(r"(?:--tensor-parallel-size|-tp)[ =](\d+)", words)
        return int(size[1]) if size else 1

    @property
    def _trust(self) -> list[str]:
        return ["--trust-run"] if self.options.trust_run else []

    def server_command(self, host: str, port: int) -> list[str]:
        config = self.config
        command = [*GRUPPO, "serve", config.model, "--host", host, "--port", str(port)]
        if config.lora.rank:
            command += ["--lora-rank", str(config.lora.rank)]
        command.append("--")
        if config.compute != "auto":
            command += ["--dtype", config.compute]
        if config.trust_remote_code:
            command.append("--trust-remote-code")
        return [*command, *self.vllm]

    def train_command(self, urls: Sequence[str]) -> list[str]:
        """The command of each rank of a new run; it ends with the addresses of the servers."""
        command = [*GRUPPO, "train", *self.words, *self._trust]
        if self.options.servers:
            if not self.config.engine.kind:
                command += ["--engine", "vllm"]
            command += ["--engine.urls", *urls]
        return command

    def resume_command(self) -> list[str]:
        """The command of each rank of a run that has begun; ``GRUPPO_ENGINE_URLS`` names its
        servers."""
        command = [*GRUPPO, "resume", str(self.folder), *self._trust]
        if self.config.trust_remote_code:
            command.append("--trust-remote-code")
        return command


def parse_launch(args: list[str]) -> Launch:
    """Parse a command line; its mistakes are refused before anything starts."""
    at = args.index("--") if "--" in args else len(args)
    options, words = parse_own(args[:at], LaunchConfig(), "launch")
    config = parse_config("launch", words, trust_run=options.trust_run)
    check_folder_name(config)
    if not config.name:
        from gruppo.api import new_name

        config = replace(config, name=new_name(run_stem(words[0]), config.runs_dir))
        words += ["--name", config.name]
    launch = Launch(options, config, tuple(words), tuple(args[at + 1 :]))
    check_links(launch.folder)
    if launch.is_begun:
        # the code of a model runs in servers only if the command line says so, as in gruppo resume
        own = {name: getattr(config, name) for name in ("name", "runs_dir", "trust_remote_code")}
        saved = launch.folder / "config.json"
        config = replace(serialization.load(saved), **own)
        check_code(saved, config, config, trust_run=options.trust_run)
        launch = replace(launch, config=config)
        log.info("%s exists: the run is continued, with its own options.", launch.folder)
    _check(launch)
    return launch


def _check(launch: Launch) -> None:
    """Refuse what could not run."""
    options, config = launch.options, launch.config
    if options.servers:
        # a run that has begun cannot change its engine
        if config.engine.kind != "vllm" and (config.engine.kind or launch.is_begun):
            kind = config.engine.kind or "the policy itself"
            raise GruppoError(f"engine={kind}: --servers starts vLLM servers. Set --servers 0.")
        if config.engine.urls and not launch.is_begun:
            raise GruppoError(
                "engine.urls: gruppo launch starts the servers. Leave it out, or set --servers 0."
            )
        servers = {"engine.kind": "vllm", "engine.urls": ["http://127.0.0.1"]}
        config = serialization.change(config, servers)
        find_vllm("")
    from gruppo.build import Parts, validate  # takes seconds

    validate(config, Parts())
    prompts = config.rollout.prompts
    for name, limit in (("servers", prompts * (config.engine.lag + 1)), ("trainers", prompts)):
        count = getattr(options, name)
        if count > limit:
            raise GruppoError(
                f"--{name} {count}: a step has {counted(limit, 'prompt')}, and each needs one",
                advice=f"Set --{name} {limit} or fewer, or raise $rollout.prompts",
            )


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def devices(launch: Launch) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Environment of the trainers and of each server: the trainers have the first GPUs of this
    machine, if any, and the servers the next ones."""
    import torch

    trainers, servers = launch.options.trainers, launch.options.servers
    count = 0 if launch.config.device == "cpu" else torch.cuda.device_count()
    if not count:
        environment = dict[str, str]()
        if trainers > 1 and "OMP_NUM_THREADS" not in os.environ:
            # not fewer for --servers: a resumed run needs as many threads as before
            environment["OMP_NUM_THREADS"] = str(max(usable_processors() // trainers, 1))
        return environment, [{}] * servers
    each = launch.gpus_per_server
    first = 0 if launch.config.engine.colocated else trainers
    needed = max(first + servers * each, trainers)
    if needed > count:
        raise GruppoError(
            f"{counted(trainers, 'trainer')} and {counted(servers, 'server')} of "
            f"{counted(each, 'GPU')} need {needed} GPUs, and {count} are here",
            advice="Lower --trainers or --servers, or share GPUs with $engine.colocated True",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(count)))

    def environment_of(start: int, count: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[start : start + count])}

    own = [environment_of(first + n * each, each) for n in range(servers)]
    return environment_of(0, trainers), own
