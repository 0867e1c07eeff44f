"""Errors that the command line reports. They import no torch: the process of the reward functions
starts with them."""

from __future__ import annotations

import re
from collections.abc import Callable


class GruppoError(Exception):
    """A mistake that the user can correct: the problem (what was got, what is needed) and the
    advice (what to do).

    ``option`` is the dotted name of an option: that of the problem if the text begins with it, and
    that to set if there is an advice, which is then its value. Other options within the advice are
    marked, ``$rollout.group_size``. The command line writes flags, Python attributes or arguments.

        GruppoError(f"clip_low={low} is above 1", option="objective.clip_low", advice="0.2")
        GruppoError("both reply", advice="Leave $environment.reply or $environment out.")

    The message is one line: a line end in the text, with the indentation after it, becomes a space.
    """

    exit_code = 2
    spell: Callable[[str], str] = staticmethod(str)
    """How ``str`` writes the dotted name of an option: as an attribute."""

    def __init__(self, problem: str = "", *, option: str = "", advice: str = "") -> None:
        super().__init__(problem)
        self.problem = re.sub(r"\n *", " ", problem)
        self.option = option
        sentence = f"Set ${option} {advice}" if option and advice else advice
        self.advice = re.sub(r"\n *", " ", sentence)

    def message(self, spell: Callable[[str], str]) -> str:
        """The problem and the advice, with options as ``spell`` writes them."""
        problem = self.problem
        if self.option and re.match(rf"{re.escape(self.option)}(?![\w.])", problem):
            problem = spell(self.option) + problem.removeprefix(self.option)
        if not self.advice:
            return problem
        advice = re.sub(r"\$([a-z]\w*(?:\.\w+)*)", lambda name: spell(name[1]), self.advice)
        return f"{_ended(problem)} {_ended(advice)}".strip()

    def __str__(self) -> str:
        return self.message(self.spell)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) or not sentence else f"{sentence}."


def as_flag(option: str) -> str:
    """A dotted option as typed in the shell: ``--rollout.group-size``."""
    return "--" + option.replace("_", "-")


def as_argument(option: str) -> str:
    """A dotted option as passed to a function: ``rollout__group_size``."""
    return option.replace(".", "__")


class DataError(GruppoError):
    """The data or the reward cannot be used (exit code 3)."""

    exit_code = 3


class NumericalStop(GruppoError):
    """Training stopped because its numbers are no longer usable (exit code 4)."""

    exit_code = 4


class EngineLost(GruppoError):
    """No engine is left to sample with (exit code 5). What is complete is saved, and the run can be
    resumed."""

    exit_code = 5
