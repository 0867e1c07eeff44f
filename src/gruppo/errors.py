"""Errors that the command line reports. They import no torch: the process of the reward functions starts with them."""

from __future__ import annotations

import re


class GruppoError(Exception):
    """A mistake that the user can correct. The message says what was got, what is needed and what to do.

    It is one line: a line end in ``message``, with the indentation after it, becomes a space. The command line prints
    it without a traceback, and exits with ``exit_code``.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(re.sub(r"\n *", " ", message))


class DataError(GruppoError):
    """The data or the reward cannot be used (exit code 3)."""

    exit_code = 3


class NumericalStop(GruppoError):
    """Training stopped because its numbers are no longer usable (exit code 4)."""

    exit_code = 4


class EngineLost(GruppoError):
    """No engine is left to sample with (exit code 5). What is complete is saved, and the run can be resumed."""

    exit_code = 5
