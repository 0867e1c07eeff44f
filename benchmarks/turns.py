"""Processes that take turns, so that a noisy machine is noisy for all of them.

A side is a module of this folder run by any Python: it calls ``say`` once when it is ready, then
``wait_for_turn`` and ``say`` for each turn. It is halted until its turn comes: an idle worker that
polls would slow down the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "@@ "
"""Before each line of JSON: libraries print what they like between them."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def say(**numbers: Any) -> None:
    """From a side to whoever started it."""
    print(MARK + json.dumps(numbers), flush=True)


def wait_for_turn() -> None:
    """Returns when it is this side's turn; ends the process when there are no more."""
    if not sys.stdin.readline():
        sys.exit(0)


class Side:
    """One library in a process of its own."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        python: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self.process = subprocess.Popen(
            [python or sys.executable, "-W", "ignore", "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            # gruppo, imported here, may have chosen how its own threads wait: each side decides for
            # itself
            env={k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
            | QUIET
            | dict(environment or {}),
            cwd=Path(__file__).parents[1],
            # of this session: were this process to die, the halted ones would be hung up
            process_group=0,
        )
        self.ready = self._read()
        self._signal(signal.SIGSTOP)

    def turn(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        numbers = self._read()
        self._signal(signal.SIGSTOP)
        return numbers

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        self.errors.seek(0)
        raise SystemExit(f"the {self.name} side ended early. {self.errors.read()[-3000:]}")

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.errors.close()

    def _signal(self, number: int) -> None:
        """To the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def in_turns(
    sides: Sequence[Side], turns: int, *, warm: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Turns of all sides by name, after ``warm`` that are not kept."""
    done: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for turn in range(warm + turns):
        for side in sides:
            numbers = side.turn()
            if turn >= warm:
                done[side.name].append(numbers)
    return done
