"""Plain Python functions as rewards, in TRL's calling convention: functions written for TRL run unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gruppo.rewards.failures import Answer, Ask, Outcome, score_rows
from gruppo.rewards.steps import Read, Step, cut, placed, places
from gruppo.rewards.text import text_of
from gruppo.timeouts import Unanswered, keywords_of, missing_column, name_of, wait_for
from gruppo.types import DataError, GruppoError, Prompt, Rollouts

PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Keywords that every reward function can ask for, beside the columns of the data; one of steps, ``steps`` too; of a
policy of images, ``images``; of conversations with an environment, ``state``."""


@dataclass(frozen=True)
class TrainerState:
    """What a reward function may know of the run."""

    global_step: int = 0
    max_steps: int = 0


@dataclass
class _Notes:
    """What a function logged during one call of ``size`` rows."""

    size: int
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extras: list[tuple[str, Sequence[Any]]] = field(default_factory=list)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        values = list(values)
        if len(values) != self.size:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self.size} completions")
        self.extras.append((column, values))


class FunctionReward:
    """A function called with keywords only, and only with those in its signature (all of them if it has ``**kwargs``).

    ``prompts``, ``completions`` (strings, message lists or images [C, H, W], which are ``images`` too),
    ``completion_ids``, ``trainer_state`` (``global_step``, ``max_steps``), ``log_metric(name, value)``,
    ``log_extra(column, values)`` and every column of the data as a list:
    ``Prompt.target`` as ``answer`` and ``target``, and every key of ``Prompt.meta`` (which wins over those two names).
    Where the policy spoke with an environment, ``state`` too: the dict of each conversation.
    It returns one number or None (not scored) for each completion; it may be ``async``. The call runs in a thread
    without gradients; ``timeout_s=None`` runs it in the caller's thread, without a deadline; a ``timeout_s`` of the
    function's own counts instead.

    One that ``step_reward`` has marked, or that has a ``step_separator`` of its own, scores steps: see there.
    """

    def __init__(self, fn: Callable[..., Any], *, name: str | None = None, timeout_s: float | None = 60.0) -> None:
        if not callable(fn):
            raise DataError(
                f"the reward is {fn!r:.80} ({type(fn).__name__}), which is not callable; it needs to be a function such"
                " as def reward(completions, **kwargs) that returns one number for each completion. Pass the function"
                " itself, not its result."
            )
        self.fn, self.name = fn, name or name_of(fn)
        self.timeout_s = checked_timeout(getattr(fn, "timeout_s", timeout_s))
        self.separator: str | None = getattr(fn, "step_separator", None)
        self.read: Read | None = None
        """How the policy's ids are read, which a reward of steps needs."""
        self._check: Callable[[Collection[str]], None] | None = getattr(fn, "check", None)
        self.is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._parameters, self._takes_all = keywords_of(fn, f"reward {self.name!r}")
        self._columns: set[str] = set()

    @property
    def gives_steps(self) -> bool:
        return self.separator is not None

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B"]:
        return self.score(rollouts).rewards.float()

    def asks(self, column: str) -> bool:
        """Whether the function names a column among its parameters."""
        return column in self._parameters

    def check(self, columns: Collection[str]) -> None:
        """Refuse a function that asks for a column which the data do not have. ``columns_of`` lists what they have.

        A ``check`` of the function's own is asked too.
        """
        known = {*self._provided, *columns}
        for name, required in self._parameters.items():
            if required and name not in known:
                raise DataError(missing_column(f"reward {self.name!r}", name, columns, self._provided))
        if self._check is not None:
            self._check(columns)
        self._columns.update(columns)

    def score(
        self, rollouts: Rollouts, *, rows: Sequence[int] | None = None, step: int = 0, max_steps: int = 0
    ) -> Outcome:
        """Score the given rows (all without them). A failing function costs rows, never the run."""
        self.check({*self._columns, *columns_of(rollouts.prompts), *given_beside(rollouts)})
        if self.gives_steps and self.read is None:
            raise GruppoError(
                f"reward {self.name!r} scores steps and needs to know how the policy's ids are read, to find their "
                "ends. Call RewardSet.reads(policy.chat.text) first."
            )
        rows = range(len(rollouts)) if rows is None else rows
        ask = self._ask(rollouts, TrainerState(step, max_steps))
        return score_rows(ask, rows, len(rollouts), reward=self.name, timeout_s=self.timeout_s)

    def _ask(self, rollouts: Rollouts, state: TrainerState) -> Ask:
        columns = columns_of(rollouts.prompts)
        prompt_of = [rollouts.prompts[group] for group in rollouts.group_ids.tolist()]
        wants_ids = "completion_ids" in self._parameters or (self._takes_all and rollouts.actions.ndim == 2)

        def ask(rows: Sequence[int]) -> Answer:
            notes, prompts = _Notes(len(rows)), [prompt_of[row] for row in rows]
            makers: dict[str, Callable[[], Any]] = {
                "prompts": lambda: [_copied(prompt.inputs) for prompt in prompts],
                "completions": lambda: [_copied(completion_of(rollouts, row)) for row in rows],
                "trainer_state": lambda: state,
                "log_metric": lambda: notes.log_metric,
                "log_extra": lambda: notes.log_extra,
            }
            steps = [cut(text_of(rollouts.completions[row]), self.separator) for row in rows] if self.separator else []
            if self.separator:
                makers["steps"] = lambda: [[step.text for step in own] for own in steps]
            if shows_images(rollouts):
                makers["images"] = makers["completions"]
            if "state" in rollouts.per_row:
                makers["state"] = lambda: [dict(rollouts.per_row["state"][row]) for row in rows]
            keywords = {name: make() for name, make in makers.items() if self._wants(name)}
            if wants_ids:
                keywords["completion_ids"] = [rollouts.actions[row][rollouts.mask[row]].tolist() for row in rows]
            for name in (name for name in self._columns_to_pass(columns) if name not in makers):
                keywords[name] = [column_value(prompt, name) for prompt in prompts]
            raw = self.fn(**keywords)
            raw = wait_for(raw) if inspect.isawaitable(raw) else raw
            entries = entries_of(raw, len(rows))
            if self.separator:
                entries = [self._placed(rollouts, *of_row) for of_row in zip(rows, entries, steps, strict=True)]
            return Answer(entries, notes.metrics, notes.extras)

        return ask

    def _placed(self, rollouts: Rollouts, row: int, entry: Any, steps: Sequence[Step]) -> Any:
        """A row's entry at the actions that end its steps."""
        assert self.read is not None
        columns = rollouts.mask[row].nonzero()[:, 0]
        try:
            at = places(steps, text_of(rollouts.completions[row]), rollouts.actions[row][columns].tolist(), self.read)
        except Unanswered as error:
            return error
        return placed(entry, steps, columns[at].tolist())

    @property
    def _provided(self) -> tuple[str, ...]:
        return (*PROVIDED, "steps") if self.separator else PROVIDED

    def _wants(self, name: str) -> bool:
        return self._takes_all or name in self._parameters

    def _columns_to_pass(self, columns: Collection[str]) -> list[str]:
        """Those of this batch, and those that the function cannot do without: the latter are None in this batch."""
        needed = [name for name, required in self._parameters.items() if required]
        return [name for name in dict.fromkeys([*columns, *needed]) if self._wants(name) and name not in self._provided]


def columns_of(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """The columns that a reward function can ask for: every key of ``meta``; if any, ``answer`` and ``target``."""
    prompts = list(prompts)
    names = {name for prompt in prompts for name in prompt.meta}
    if any(prompt.target is not None for prompt in prompts):
        names |= {"answer", "target"}
    return tuple(sorted(names))


def shows_images(rollouts: Rollouts) -> bool:
    """Whether what the policy made are images."""
    return any(isinstance(output, Tensor) for output in rollouts.completions)


def completion_of(rollouts: Rollouts, row: int) -> Any:
    """What the policy made of a row. Of a text to which an environment replied, the policy's own words."""
    output = rollouts.completions[row]
    return rollouts.per_row["words"][row] if isinstance(output, str) and "words" in rollouts.per_row else output


def given_beside(rollouts: Rollouts) -> list[str]:
    """What a function can ask for that neither every batch nor the data have."""
    return ["images"] * shows_images(rollouts) + ["state"] * ("state" in rollouts.per_row)


def column_value(prompt: Prompt, name: str) -> Any:
    """One cell; None where this prompt lacks the column."""
    return prompt.meta.get(name, prompt.target if name in ("answer", "target") else None)


def entries_of(raw: Any, size: int) -> list[Any]:
    """The entries of what a reward returned; Unanswered unless there is one for each of ``size`` rows."""
    if isinstance(raw, (Tensor, np.ndarray)):
        if raw.ndim != 1:
            raise Unanswered(
                "count", f"returned shape {tuple(raw.shape)}; it must return one number for each completion"
            )
        raw = raw.tolist()
    if not isinstance(raw, (list, tuple)):
        what = f"returned {raw!r:.60} ({type(raw).__name__})"
        raise Unanswered(
            "exception", f"{what}; it must return a list with one number for each completion", type(raw).__name__
        )
    if len(raw) != size:
        raise Unanswered("count", f"returned {len(raw)} rewards for {size} completions")
    return list(raw)


def checked_timeout(timeout_s: float | None) -> float | None:
    """The timeout, or the refusal of one that is not above 0."""
    if timeout_s is not None and not timeout_s > 0:
        raise GruppoError(
            f"timeout_s={timeout_s} leaves a reward no time; use seconds above 0, or None for no deadline."
        )
    return timeout_s


def _copied(value: Any) -> Any:
    """Messages and images are copied, so that a function which edits them does not edit the rollouts."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [dict(part) if isinstance(part, dict) else part for part in value]
    return value
