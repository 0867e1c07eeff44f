"""What a sandbox is: programs and cases in, plain data out. The comparison with expected values
stays outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gruppo.rewards.sandbox.plain_data import NodeBudget, NotPlain, decode
from gruppo.types import GruppoError

_LEAST_MIB, _MOST_MIB = 128, 1 << 20


class SandboxError(GruppoError):
    """The sandbox itself failed; nothing is known about the program."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program."""

    case_s: float = 2.0
    """Seconds for a case: of the processor, and as many asleep."""
    program_s: float = 6.0
    """Seconds for all its cases: of the processor, and as many asleep."""
    memory_mib: int = 1024
    """Address space, that of the interpreter included."""

    def __post_init__(self) -> None:
        is_time = 0 < self.case_s <= 3600 and 0 < self.program_s <= 3600
        if not (is_time and _LEAST_MIB <= self.memory_mib <= _MOST_MIB):
            raise GruppoError(f"""case_s={self.case_s:g}, program_s={self.program_s:g},
                memory_mib={self.memory_mib} cannot limit a program; it needs seconds above 0 and up
                to 3600, and {_LEAST_MIB} to {_MOST_MIB} MiB.""")


@dataclass(frozen=True)
class CaseResult:
    """Result of one case of a program."""

    status: Literal["value", "error", "timeout", "not_run"]
    value: Any = None
    """Calls: the list of the expressions' values. Scripts: the printed text."""
    message: str = ""
    """Why there is no value; for an exception, its type and text."""
    exception: str = ""
    """Built-in type of the exception that the case raised, or the one that its type derives
    from."""


class Sandbox(Protocol):
    """Runs programs one after another. Values are plain data of base types: see ``plain_data``.

    ``room``: bytes that all values of a program may have together, beyond ``base_room``. Methods
    raise SandboxError where the sandbox itself fails; it is closed then, and not used again.
    """

    def calls(
        self,
        program: str,
        cases: Sequence[Sequence[str | Mapping[str, str]]],
        *,
        setup: str = "",
        entry: str | None = None,
        room: int = 0,
    ) -> list[CaseResult]:
        """Evaluate each case in the namespace of the program, after ``setup``.

        A case holds expressions, or arguments for ``entry``, ``{"args": ..., "kwargs": ...}`` as
        ``plain_data.encode`` writes them. ``entry``: a function that may be a method of ``class
        Solution``.
        """

    def script(self, program: str, inputs: Sequence[str], *, room: int = 0) -> list[CaseResult]:
        """Run the program with each standard input, in a new process each; the value is the printed
        text."""

    def end(self) -> None:
        """Stop at once; pending requests raise SandboxError. Called from another thread."""

    def close(self) -> None:
        """Free what it holds. Called once, after ``end``."""


def base_room(cases: int) -> int:
    """Bytes that the answer to any program may have: 64 KiB, and 4 KiB for each case."""
    return (1 << 16) + (cases << 12)


def decode_values(
    results: Sequence[CaseResult], cases: Sequence[Sequence[Any]], room: int
) -> list[CaseResult]:
    """Decode the values of calls. All of them share a budget of nodes: an honest one has at most
    one for 4 bytes."""
    budget, decoded = NodeBudget((1 << 14) + room // 16), []
    for result, case in zip(results, cases, strict=True):
        if result.status == "value":
            try:
                value = decode(result.value, budget)
                if not isinstance(value, list) or len(value) != len(
                    case
                ):  # a line that the program forged
                    raise NotPlain("it is no plain data")
                result = CaseResult("value", value)
            except NotPlain as error:
                result = CaseResult("error", message=str(error))
        decoded.append(result)
    return decoded
