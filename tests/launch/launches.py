"""Launches whose processes are forked, or shell scripts: they start in milliseconds."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests import processes, tiny
from tests.engines.fake_vllm import FakeServer

from gruppo.config import serialization
from gruppo.config.schema import LaunchConfig
from gruppo.launch.commands import Launch
from gruppo.launch.supervise import ChildProcess

SERVER_COMMAND = Launch.server_command
"""Of the package; in these tests it is replaced by ``fake_server``."""


def fake_server(launch: Launch, host: str, port: int) -> list[str]:
    return ["fake", launch.config.model, str(port)]


def recipe(folder: Path, **changes: Any) -> str:
    """A config file of a run in ``folder``."""
    config = tiny.config(
        folder, **({"saving__every": 1, "evaluation__prompts": 0, "device": "cpu"} | changes)
    )
    file = folder / f"{config.name}.json"
    file.write_text(json.dumps(serialization.to_dict(config)))
    return str(file)


def launch(folder: Path, *, words: Sequence[str] = (), **chosen: Any) -> Launch:
    """A launch of a tiny run, unchecked."""
    config = replace(tiny.config(folder), device="cpu")
    return Launch(LaunchConfig(**chosen), config, ("recipe.json", *words))


class Forked:
    """A process of the launch as a child of the tests' fork server."""

    def __init__(self, command: Sequence[str], env: dict[str, str], output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        target, *args = (
            (serve, *command[1:]) if command[0] == "fake" else (processes.command_line, command[3:])
        )
        self.port = int(args[-1]) if command[0] == "fake" else 0
        self.child = processes.start(
            _logged, target, args, str(output), folder=output.parent / output.stem, env=env
        )

    def poll(self) -> int | None:
        return self.child.process.exitcode

    def terminate(self) -> None:
        self.child.send(signal.SIGTERM)

    def kill(self) -> None:
        self.child.kill()


def _logged(target: Callable[..., Any], args: Sequence[Any], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    processes.redirect(1, file)
    processes.redirect(2, file)
    target(*args)


def serve(model: str, port: str) -> None:
    FakeServer(model, port=int(port))
    threading.Event().wait()


@dataclass
class Scripts:
    """Starts shell scripts in place of the commands: for each process, one for each of its lives;
    the last repeats."""

    scripts: dict[str, list[str]]
    started: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Names and environments of all processes."""

    def __call__(self, command: Sequence[str], env: dict[str, str], output: Path) -> ChildProcess:
        lives = self.scripts.get(output.stem, ["exec sleep 100"])
        script = lives[min(self.lives(output.stem), len(lives) - 1)]
        self.started.append((output.stem, env))
        return ChildProcess(["sh", "-c", script], env, output)

    def lives(self, name: str) -> int:
        return [other for other, _ in self.started].count(name)
