"""What ``gruppo launch`` starts: options, the commands of trainers and servers, and what is refused
before."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from gruppo.cli.options import parse_config, parse_own, pop_option, pop_switch
from gruppo.cli.serve import find_vllm
from gruppo.config import serialization
from gruppo.config.checks import check_folder_name
from gruppo.config.schema import Config, LaunchConfig
from gruppo.engines.vllm.client import KEY
from gruppo.integrity import check_links
from gruppo.loading import counted
from gruppo.platforms import lock_file
from gruppo.recipes.open import check_code, run_stem
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

SAVING_S = 120.0
"""How long the processes of a launcher that was killed may take to save and end."""
GRACE_S = 600.0
"""How long the other ranks may take to notice that one has ended, and to save."""


@dataclass(frozen=True)
class Launch:
    """The processes of a run."""

    chosen: LaunchConfig
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
    def gpus_per_server(self) -> int:
        found = (
            pop_option(self.vllm, "--tensor-parallel-size")[0]
            or pop_option(self.vllm, "-tp")[0]
            or "1"
        )
        return int(found) if found.isdecimal() else 1

    def server_command(self, host: str, port: int) -> list[str]:
        from gruppo.modalities.common.adapters import model_of
        from gruppo.modalities.text.modality import found_model

        chosen, config = self.chosen, self.config
        if chosen.server_command:
            known = {
                "{model}": model_of(found_model(config.model)[0]),
                "{host}": host,
                "{port}": str(port),
            }
            words = shlex.split(chosen.server_command)
            return [
                re.sub(r"\{(model|host|port)\}", lambda found: known[found[0]], word)
                for word in words
            ]
        command = [
            sys.executable,
            "-m",
            "gruppo",
            "serve",
            config.model,
            "--host",
            host,
            "--port",
            str(port),
        ]
        command += ["--lora-rank", str(config.lora.rank)] if config.lora.rank else []
        command += ["--python", chosen.server_python] if chosen.server_python else []
        command += ["--", *([] if config.compute == "auto" else ["--dtype", config.compute])]
        command += ["--trust-remote-code"] if config.trust_remote_code else []
        return [*command, *self.vllm]

    def trainer_command(self, urls: Sequence[str]) -> list[str]:
        """The command of each rank: the run is continued if its folder has begun."""
        gruppo = [sys.executable, "-m", "gruppo"]
        if not (self.folder / "config.json").is_file():
            return [
                *gruppo,
                "train",
                *self.words,
                *(["--engine", "vllm", "--engine.urls", *urls] if urls else []),
            ]
        trusts = ["--trust-run"] if "--trust-run" in self.words else []
        trusts += ["--trust-remote-code"] if self.config.trust_remote_code else []
        return [*gruppo, "resume", str(self.folder), *trusts]

    def environment(self, urls: Sequence[str] = ()) -> dict[str, str]:
        """Variables of all processes; a resumed run finds its servers by them."""
        key = {KEY: os.environ[KEY]} if KEY in os.environ else {}
        return (
            {"PYTHONUNBUFFERED": "1"}
            | key
            | ({"GRUPPO_ENGINE_URLS": ",".join(urls)} if urls else {})
        )


def parse_launch(args: list[str]) -> Launch:
    """What a command line launches; its mistakes are refused before anything starts."""
    at = args.index("--") if "--" in args else len(args)
    chosen, words = parse_own(args[:at], LaunchConfig(), "launch")
    trust_run, words = pop_switch(words, "--trust-run")
    for option in ("--engine", "--engine.kind") if chosen.servers else ():
        kind, words = pop_option(words, option)
        if kind not in (None, "vllm"):
            raise GruppoError(
                f"{option} {kind}: --servers starts vLLM servers. Leave it out, or set --servers 0."
            )
    config = parse_config("launch", words, trust_run=trust_run)
    check_folder_name(config)
    if not config.name:
        from gruppo.api import new_name

        config = replace(config, name=new_name(run_stem(words[0]), config.runs_dir))
        words += ["--name", config.name]
    launch = Launch(
        chosen, config, (*words, *(["--trust-run"] if trust_run else [])), tuple(args[at + 1 :])
    )
    check_links(launch.folder)
    if (saved := launch.folder / "config.json").is_file():
        # the code of a model runs in servers only if the command line says so, as in gruppo resume
        own = {name: getattr(config, name) for name in ("name", "runs_dir", "trust_remote_code")}
        config = replace(serialization.load(saved), **own)
        check_code(saved, config, config, trust_run=trust_run)
        launch = replace(launch, config=config)
        log.info("%s exists: the run is continued, with its own options.", launch.folder)
    check(launch)
    return launch


def with_name(args: Sequence[str], name: str) -> list[str]:
    """Return the command line with the run's name: a job that is started again continues that
    run."""
    at = args.index("--") if "--" in args else len(args)
    if any(arg.partition("=")[0] == "--name" for arg in args[:at]):
        return list(args)
    return [*args[:at], "--name", name, *args[at:]]


def check(launch: Launch) -> None:
    """Refuse what could not run."""
    chosen, config = launch.chosen, launch.config
    if chosen.servers:
        if any(word.split("=")[0] == "--engine.urls" for word in launch.words):
            raise GruppoError(
                "engine.urls: gruppo launch starts the servers",
                advice="Leave it out, or set --servers 0",
            )
        if config.engine.kind not in (
            ("vllm",) if (launch.folder / "config.json").is_file() else ("", "vllm")
        ):
            kind = (
                config.engine.kind or "the policy itself"
            )  # which a run that has begun cannot change
            raise GruppoError(
                f"{config.name} samples with {kind}, and --servers starts vLLM servers. Set "
                f"--servers 0."
            )
        config = serialization.change(
            config, {"engine.kind": "vllm", "engine.urls": ["http://127.0.0.1"]}
        )
    from gruppo.build import Parts, validate  # takes seconds

    validate(config, Parts())
    prompts, groups = config.rollout.prompts, config.rollout.prompts * (config.engine.lag + 1)
    if chosen.servers > groups:
        raise GruppoError(
            f"""--servers {chosen.servers}: at most {counted(groups, "group")} are sampled at a
                time, each on one server""",
            advice=f"Set --servers {groups} or fewer, or raise $rollout.prompts",
        )
    if chosen.trainers > prompts:
        raise GruppoError(
            f"""--trainers {chosen.trainers}: a step has {counted(prompts, "prompt")}, and each rank
                    needs one""",
            advice=f"Set --trainers {prompts} or fewer, or raise $rollout.prompts",
        )
    try:
        shlex.split(chosen.server_command)
    except ValueError as error:
        raise GruppoError(
            f"--server-command cannot be split into words ({error}). Close its quotes."
        ) from None
    if chosen.server_command and (launch.vllm or chosen.server_python):
        raise GruppoError("""--server-command is the whole command of a server. Put the Python and
            the options of vLLM into it.""")
    if chosen.servers and not chosen.server_command:
        find_vllm(chosen.server_python, option="--server-python")
    if chosen.on == "slurm" and KEY not in os.environ:  # other machines reach the servers
        os.environ[KEY] = secrets.token_urlsafe(24)


def is_written(folder: Path) -> bool:
    """Whether a trainer has a run's folder open."""
    try:
        if (folder / ".lock").exists():
            lock_file(folder / ".lock").close()
    except BlockingIOError:
        return True
    return False


def claim(launch: Launch, stack: ExitStack) -> None:
    """Make this process the only launcher of a run, once what a killed one has left behind has
    saved and ended."""
    logs = launch.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        stack.callback(lock_file(logs / ".lock").close)
    except BlockingIOError:
        raise GruppoError(
            f"another gruppo launch runs {launch.folder}; wait for it or stop it."
        ) from None
    until = time.monotonic() + SAVING_S
    if is_written(launch.folder):
        log.info("waiting for the process that writes to %s", launch.folder)
    while is_written(launch.folder):
        if time.monotonic() > until:
            raise GruppoError(
                f"another process is writing to {launch.folder}; wait for it or stop it."
            )
        time.sleep(0.2)
    handler = logging.FileHandler(launch.log("launch"), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(log.removeHandler, handler)
