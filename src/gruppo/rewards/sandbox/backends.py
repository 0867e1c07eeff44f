"""Choice of a sandbox by name, and programs that run on a SandboxFusion server."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gruppo.http import ServerError, fetch_json
from gruppo.rewards.sandbox.jail import IN_MEMORY, Jail, require_jail, sources
from gruppo.rewards.sandbox.program import LOADING, NOT_RUN, add_results, read_report
from gruppo.rewards.sandbox.protocol import (
    CaseResult,
    Sandbox,
    SandboxError,
    SandboxLimits,
    base_room,
    decode_values,
)
from gruppo.types import GruppoError

_GRACE_S = 30.0  # for a server that queues requests
_ALARM = (-14, 128 + 14)  # how a process that SIGALRM ended, and a shell around it, end
_HARNESS = f"""{IN_MEMORY}
import os, signal
from sandbox.program import CHANNEL, run_calls, write_report
request = json.loads(sys.stdin.buffer.readline())
os.dup2(1, CHANNEL)
null = os.open(os.devnull, os.O_RDWR)
for fd in range(3):
    os.dup2(null, fd)
def report(*line):
    write_report(request["nonce"], *line)
    signal.setitimer(signal.ITIMER_REAL, request["case_s"])
signal.setitimer(signal.ITIMER_REAL, request["case_s"])
run_calls(request, request["first"], report)
"""
"""Runs on the server: results are lines of standard output, and an alarm that nobody handles ends a
case."""


def choose_sandbox(
    sandbox: str | Callable[[SandboxLimits], Sandbox],
    limits: SandboxLimits,
    packages: Sequence[str] = (),
) -> Callable[[], Sandbox]:
    """Return a function that opens a sandbox; raise GruppoError where programs do not run in it.

    ``sandbox``: empty for the jail; the URL of a SandboxFusion server; a command that starts Python
    in a container, with the jail inside; or a function of the limits that returns an object with
    the methods of ``Sandbox``.
    """
    if isinstance(sandbox, str) and not sandbox.startswith(("http://", "https://")):
        command = tuple(shlex.split(sandbox))
        require_jail(command, tuple(packages))
        return partial(Jail, limits, command=command, packages=packages)
    if packages:
        raise ValueError("packages are those of the server; leave packages= out")
    factory = partial(SandboxFusion, sandbox) if isinstance(sandbox, str) else sandbox
    trial = factory(limits)
    try:
        results = [
            *trial.calls("def f(x): return 6 * x", [["f(7)"]]),
            *trial.script("print(6 * int(input()))", ["7"]),
        ]
    except SandboxError as error:
        raise GruppoError(f"code that a model wrote is not run by {sandbox}: {error}.") from None
    finally:
        trial.end()
        trial.close()
    if results != [CaseResult("value", [42]), CaseResult("value", "42\n")]:
        got = ", ".join(result.message or repr(result.value) for result in results)
        raise GruppoError(
            f"a program that computes 6 * 7 gave {got:.200} in {sandbox}; it needs 42 twice."
        )
    return partial(factory, limits)


class SandboxFusion:
    """Programs on a SandboxFusion server (github.com/bytedance/SandboxFusion), which confines them.

    The server limits time on the clock and memory; hash seeds and packages are its own.
    """

    def __init__(self, url: str, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._is_ended = False

    def end(self) -> None:
        """Send no further request; a pending one ends with its time."""
        self._is_ended = True

    def close(self) -> None:
        """Nothing is held."""

    def calls(
        self,
        program: str,
        cases: Sequence[Sequence[str]],
        *,
        setup: str = "",
        entry: str | None = None,
        room: int = 0,
    ) -> list[CaseResult]:
        """As ``Jail.calls``: one process for all cases, and a new one after a case that ended
        it."""
        results, used_s, left = list[dict[str, str]](), 0.0, base_room(len(cases)) + room
        request: dict[str, Any] = {
            "program": program,
            "cases": [*map(list, cases)],
            "setup": setup,
            "entry": entry,
        }
        while len(results) < len(cases):
            if used_s >= self.limits.program_s:
                results += [NOT_RUN] * (len(cases) - len(results))
                break
            nonce = secrets.token_hex(16)
            request |= {"first": len(results), "nonce": nonce, "case_s": self.limits.case_s}
            stdin = sources("program", "plain_data").decode() + json.dumps(request) + "\n"
            run = self._post(_HARNESS, stdin, self.limits.program_s - used_s)
            used_s += run["execution_time"]
            reports, failure = dict[int, tuple[str, str]](), self._failure(run)
            for line in (run["stdout"] or "").encode("ascii", "backslashreplace").split(b"\n"):
                case, kind, text = read_report(line, nonce) or (LOADING - 1, "", "")
                if case in reports or not LOADING <= case < len(cases):
                    continue
                if len(line) > left:
                    failure = {"status": "error", "message": "too much output"}
                    break
                left -= len(line)
                reports[case] = (kind, text)
            failure = failure or {"status": "error", "message": "the process ended with status 0"}
            add_results(results, reports, len(cases), failure)
        return decode_values([CaseResult(**record) for record in results], cases, room)  # type: ignore[arg-type]

    def script(self, program: str, inputs: Sequence[str], *, room: int = 0) -> list[CaseResult]:
        """As ``Jail.script``: a process for each input."""
        results, used_s, left = list[CaseResult](), 0.0, base_room(len(inputs)) + room
        for text in inputs:
            if used_s >= self.limits.program_s:
                results.append(CaseResult(**NOT_RUN))  # type: ignore[arg-type]
                continue
            run = self._post(program, text, min(self.limits.case_s, self.limits.program_s - used_s))
            used_s += run["execution_time"]
            printed, failure = run["stdout"] or "", self._failure(run)
            if failure is None and len(printed) > left:
                failure = {"status": "error", "message": "too much output"}
            left -= len(printed) * (failure is None)
            results.append(CaseResult(**failure) if failure else CaseResult("value", printed))  # type: ignore[arg-type]
        return results

    def _failure(self, run: Mapping[str, Any]) -> dict[str, str] | None:
        """Why a process did not end with status 0."""
        limits = self.limits
        if run["status"] == "TimeLimitExceeded" or run["return_code"] in _ALARM:
            over = f"over {limits.case_s:g} s for the case or {limits.program_s:g} s in all"
            return {"status": "timeout", "message": over}
        if run["return_code"] == 0:
            return None
        errors = (run["stderr"] or "").strip().splitlines() or [
            f"the process ended with status {run['return_code']}"
        ]
        return {"status": "error", "message": errors[-1][:300]}

    def _post(self, code: str, stdin: str, run_s: float) -> dict[str, Any]:
        """Run a program on the server; SandboxError where the server does not run it."""
        body = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "run_timeout": run_s,
            "compile_timeout": run_s,
        }
        body |= {"memory_limit_MB": self.limits.memory_mib, "files": {}, "fetch_files": []}
        if self._is_ended:
            raise SandboxError("it was ended")
        began = time.monotonic()
        try:
            answer = fetch_json(self.url, body, timeout_s=run_s + _GRACE_S, retries=3)
        except ServerError as error:
            raise SandboxError(str(error)) from None
        answer = answer if isinstance(answer, dict) else {}
        run = answer.get("run_result")
        if (
            answer.get("status") == "SandboxError"
            or not isinstance(run, dict)
            or run.get("status") == "Error"
        ):
            raise SandboxError(f"{self.url} ran nothing: {answer.get('message') or run!s:.200}")
        took_s = run.get("execution_time")
        took_s = took_s if isinstance(took_s, (int, float)) else time.monotonic() - began
        return {key: run.get(key) for key in ("status", "return_code", "stdout", "stderr")} | {
            "execution_time": took_s
        }
