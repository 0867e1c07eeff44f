"""Calls of rewards: functions in TRL's calling convention, functions that score steps, and reward
objects.

``prepare`` binds a reward to a batch and returns a call that scores some of its rows.
``gruppo.rewards.scoring`` makes the calls: for all rows at once, and for single rows where that
fails.
"""

from __future__ import annotations

import copy
import inspect
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from gruppo.protocols import Reward
from gruppo.rewards.answers import Answer, TrainerState, as_list
from gruppo.rewards.text import text_of
from gruppo.timeouts import (
    CallError,
    accepted_keywords,
    awaited,
    function_name,
    require_columns,
)
from gruppo.types import DataError, GruppoError, Prompt, Rollouts

PROVIDED = (
    "prompts",
    "completions",
    "completion_ids",
    "group_ids",
    "trainer_state",
    "log_metric",
    "log_extra",
)
"""Arguments that every reward function can request, besides the columns of the data. In addition:
``steps`` where the function scores steps, ``images`` where the policy makes images, ``state`` where
it talks to an environment, and ``environments`` where that is of a class."""

COPIED = ("prompts", "completions", "images", "state")
"""Arguments whose values are copied: a function that edits them must not edit the rollouts."""

Decode = Callable[[Sequence[int]], str]  # token ids to text, without special tokens
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class StepScores:
    """Scores of the steps of one row."""

    columns: Sequence[int]
    """The action that ends each step, as a column of the rollouts. Steps that end in the same
    action are added."""
    scores: Sequence[Any]  # a number for each step, or None where it is not scored


TextStep = tuple[str, int]
"""A step of a completion without its separator, and the characters up to its end, separator
included."""
RowCall = Callable[[Sequence[int], float | None], Answer]
"""Scores the given rows, with a deadline in seconds that a worker keeps. Raises the reward's
exceptions, or ``CallError``."""


class FunctionReward:
    """A reward function, called with keyword arguments: those in its signature, or all if it has
    ``**kwargs``.

    It can request ``prompts``, ``completions`` (strings, message lists, or images [C, H, W], then
    also as ``images``), ``completion_ids``, ``trainer_state`` (``global_step``, ``max_steps``,
    ``epoch``), ``log_metric(name, value)``, ``log_extra(column, values)`` and every column of the
    data as a list: ``Prompt.target`` as ``answer`` and ``target``, and every key of
    ``Prompt.meta``, which wins over those two names. With an environment, ``state`` is the dict of
    each conversation; of a class, its plain attributes, and ``environments`` are objects with them.
    ``group_ids``, the group of each completion in its batch, is for functions that name it.

    It returns one number or None (not scored) per completion and may be ``async``. Calls run in a
    thread, without gradients; with ``timeout_s=None`` they run in the caller's thread and have no
    deadline. Attributes of the function that are read: ``timeout_s`` (wins over the argument),
    ``step_separator`` (see ``step_reward``), ``scores_turns`` (see ``turn_reward``),
    ``memory_bytes``, ``check(columns)``, which may refuse the columns of the data, and of a judge
    ``input_digest``, ``attach`` and ``usage``.
    """

    def __init__(
        self, fn: Callable[..., Any], *, name: str | None = None, timeout_s: float | None = 60.0
    ) -> None:
        if not callable(fn):
            raise DataError(f"""the reward is {fn!r:.80} ({type(fn).__name__}), which is not
                callable; pass a function such as def reward(completions, **kwargs).""")
        self.fn, self.name = fn, name or function_name(fn)
        self.timeout_s: float | None = getattr(fn, "timeout_s", timeout_s)
        self.separator: str | None = getattr(fn, "step_separator", None)
        self.scores_turns: bool = getattr(fn, "scores_turns", False)
        self.scores_steps = self.separator is not None or self.scores_turns
        self.view: Callable[[Prompt, Any], Any] | None = None
        """Makes an environment of a prompt from its state; set by ``RewardSet.set_view``."""
        self.decode: Decode | None = None
        """Set by ``RewardSet.set_decoder``; needed to find the token that ends each step."""
        calls = (fn, type(fn).__call__)
        self.is_async: bool = getattr(fn, "is_async", any(map(inspect.iscoroutinefunction, calls)))
        self.is_remote: bool = getattr(fn, "is_remote", False)
        """Whether it is called in a worker, where its deadline is kept."""
        self._parameters, self._takes_all = accepted_keywords(fn, f"reward {self.name!r}")
        self.requested_columns = frozenset(self._parameters)
        self._provided = PROVIDED if self.separator is None else (*PROVIDED, "steps")
        self._data_columns: set[str] = set()

    def check(self, columns: Collection[str]) -> None:
        """Raise DataError if the data lack a column that the function requires; see
        ``columns_of``."""
        require_columns(f"reward {self.name!r}", self._parameters, columns, self._provided)
        getattr(self.fn, "check", lambda columns: None)(columns)
        self._data_columns.update(columns)

    def prepare(self, rollouts: Rollouts, state: TrainerState) -> RowCall:
        if self.separator is not None and self.decode is None:
            raise GruppoError(f"""reward {self.name!r} scores steps and needs the policy's decoder
                to find their last tokens. Call RewardSet.set_decoder(policy.chat.text) first.""")
        return partial(self._call, rollouts, state, self._cells(rollouts))

    def _cells(self, rollouts: Rollouts) -> dict[str, Sequence[Any]]:
        """Columns of the batch that the function takes."""
        per_row = rollouts.per_row
        prompts = [rollouts.prompts[group] for group in rollouts.group_ids.tolist()]
        outputs: Sequence[Any] = rollouts.completions
        if "policy_text" in per_row:  # a text without the replies of an environment
            pairs = zip(outputs, per_row["policy_text"], strict=True)
            outputs = [text if isinstance(output, str) else output for output, text in pairs]
        cells: dict[str, Sequence[Any]] = {
            "prompts": per_row.get("inputs", [prompt.inputs for prompt in prompts]),
            "completions": outputs,
        }
        if any(isinstance(output, Tensor) for output in outputs):
            cells["images"] = outputs
        if "state" in per_row:
            cells["state"] = per_row["state"]
        # Objects do not leave this process: a function in a worker has to name them.
        if self.view is not None and self._takes("environments", by_default=not self.is_remote):
            cells["environments"] = list(map(self.view, prompts, per_row["state"]))
        if self._takes("completion_ids", by_default=rollouts.actions.ndim == 2):
            pairs = zip(rollouts.actions, rollouts.mask, strict=True)
            cells["completion_ids"] = [actions[own].tolist() for actions, own in pairs]
        if self._takes("group_ids", by_default=False):
            cells["group_ids"] = rollouts.group_ids.tolist()
        # A batch may lack a column that other prompts of the data have: it is then None.
        columns = {*columns_of(rollouts.prompts)}
        self.check({*self._data_columns, *columns, *cells})
        columns |= {name for name, is_required in self._parameters.items() if is_required}
        for name in columns - {*cells, *self._provided}:
            is_target = name in ("answer", "target")
            cells[name] = [p.meta.get(name, p.target if is_target else None) for p in prompts]
        return {name: values for name, values in cells.items() if self._takes(name)}

    def _takes(self, name: str, *, by_default: bool = True) -> bool:
        """Whether the function names an argument, or takes all and gets this one ``by_default``."""
        return name in self._parameters or (self._takes_all and by_default)

    def _call(
        self,
        rollouts: Rollouts,
        state: TrainerState,
        cells: Mapping[str, Sequence[Any]],
        rows: Sequence[int],
        timeout_s: float | None,
    ) -> Answer:
        """Call the function for some rows."""
        answer = Answer(len(rows))
        arguments: dict[str, Any] = {
            "trainer_state": state,
            "log_metric": answer.log_metric,
            "log_extra": answer.log_extra,
        }
        if self.separator is not None:
            texts = [text_of(rollouts.completions[row]) for row in rows]
            parts = [split_steps(text, self.separator) for text in texts]
            arguments["steps"] = [[step for step, _ in row] for row in parts]
        arguments = {name: value for name, value in arguments.items() if self._takes(name)}
        for name, values in cells.items():
            # A function that edits its arguments must not edit the rollouts.
            copies = copy.deepcopy if name in COPIED else lambda value: value
            arguments[name] = [copies(values[row]) for row in rows]
        if self.is_remote:
            arguments["call_timeout_s"] = timeout_s
        answer.values = as_list(awaited(self.fn(**arguments)), len(rows))
        if self.scores_steps:
            pairs = zip(answer.values, rows, strict=True)
            answer.values = [self._at_ends(value, rollouts, row) for value, row in pairs]
        return answer

    def _at_ends(self, value: Any, rollouts: Rollouts, row: int) -> StepScores | CallError | None:
        """The numbers of a row at the actions that end its turns or steps."""
        if self.scores_turns:
            turns = rollouts.per_row["turn_ends"][row]
            return _place(value, turns, "turn", len(turns))
        assert self.separator is not None and self.decode is not None  # refused by prepare
        text = text_of(rollouts.completions[row])
        steps = split_steps(text, self.separator)
        columns = rollouts.mask[row].nonzero()[:, 0]
        ids = rollouts.actions[row][columns].tolist()
        try:
            ends = step_ends(steps, text, ids, self.decode)
        except CallError as error:
            return error
        return _place(value, columns[ends].tolist(), "step", len(steps))


class ObjectReward:
    """An object with the ``Reward`` protocol, under the same rules for failures as a function.

    It returns [B]; or, with an attribute ``scores_steps = True``, [B, T]: a score at each action
    that ends a step, NaN elsewhere. ``columns`` names the columns that it needs. ``check`` and
    ``memory_bytes`` as of a function.
    """

    is_async = is_remote = False
    view: Any = None
    decode: Decode | None = None

    def __init__(self, reward: Reward, timeout_s: float | None) -> None:
        self.fn, self.name, self.timeout_s = reward, reward.name, timeout_s
        self.scores_steps = bool(getattr(reward, "scores_steps", False))
        self.scores_turns = bool(getattr(reward, "scores_turns", False))
        self.requested_columns = frozenset(getattr(reward, "columns", ()))

    def check(self, columns: Collection[str]) -> None:
        required = dict.fromkeys(self.requested_columns, True)
        require_columns(f"reward {self.name!r}", required, columns, ())
        getattr(self.fn, "check", lambda columns: None)(columns)

    def prepare(self, rollouts: Rollouts, state: TrainerState) -> RowCall:
        return partial(self._call, rollouts)

    def _call(self, rollouts: Rollouts, rows: Sequence[int], timeout_s: float | None) -> Answer:
        own = rollouts if len(rows) == len(rollouts) else rollouts.take(list(rows))
        returned = self.fn(own)
        if not self.scores_steps and isinstance(returned, Tensor) and returned.ndim == 2:
            raise DataError(f"""reward {self.name!r} returned {tuple(returned.shape)}: a score for
                each action. Set scores_steps = True on the object, or return one per row, [B].""")
        if not self.scores_steps:
            values = as_list(returned, len(rows))
            return Answer(len(rows), [None if value != value else value for value in values])
        if not isinstance(returned, Tensor) or returned.shape != own.mask.shape:
            got = tuple(getattr(returned, "shape", ())) or type(returned).__name__
            need = f"it needs {tuple(own.mask.shape)}, NaN where no step ends"
            raise CallError("count", f"returned shape {got}; {need}")
        scores = returned.detach().cpu()
        is_scored = ~scores.isnan()
        is_misplaced = (is_scored & ~own.mask & (scores != 0)).any(dim=1).tolist()
        values = []
        for row, ends, is_wrong in zip(scores, is_scored & own.mask, is_misplaced, strict=True):
            reason = "has a score at an action that the policy did not choose; use NaN or 0"
            placed = StepScores(ends.nonzero()[:, 0].tolist(), row[ends].tolist())
            values.append(CallError("exception", reason) if is_wrong else placed)
        return Answer(len(rows), values)


def open_reward(source: Any, timeout_s: float | None) -> FunctionReward | ObjectReward:
    """A reward that can be called, of a function or of an object with the ``Reward`` protocol."""
    if isinstance(source, FunctionReward):
        reward: FunctionReward | ObjectReward = source
    elif callable(source) and isinstance(getattr(source, "name", None), str):
        reward = ObjectReward(source, timeout_s)
    else:
        reward = FunctionReward(source, timeout_s=timeout_s)
    if reward.timeout_s is not None and not reward.timeout_s > 0:
        problem = f"timeout_s={reward.timeout_s} leaves reward {reward.name!r} no time"
        raise GruppoError(f"{problem}; use more than 0, or None.")
    return reward


def columns_of(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Columns that a reward function can request: every key of ``meta``; ``answer``, ``target`` if
    a prompt has one."""
    names = set[str]()
    for prompt in prompts:
        names |= {*prompt.meta}
        if prompt.target is not None:
            names |= {"answer", "target"}
    return tuple(sorted(names))


# --- steps ----------------------------------------------------------------------------------------


def step_reward(separator: str = "\n") -> Callable[[Function], Function]:
    """Decorator for a reward function that scores steps: the parts of a completion between
    separators.

    The function may request ``steps``, a list of texts per completion. It returns a list of numbers
    per completion, one per step; None instead of a number leaves the step unscored, None instead of
    a list the completion.
    """
    if not isinstance(separator, str) or not separator:
        raise GruppoError(f"""separator={separator!r} splits nothing; it needs the text between
            steps. Set separator=\\n.""")

    def mark(fn: Function) -> Function:
        fn.step_separator = separator  # type: ignore[attr-defined]
        return fn

    return mark


def turn_reward(fn: Function) -> Function:
    """Decorator for a reward function that scores turns: the answers of the policy in a
    conversation.

    The function returns a list of numbers per completion, one per answer; None instead of a number
    leaves the answer unscored, None instead of a list the completion.
    """
    fn.scores_turns = True  # type: ignore[attr-defined]
    return fn


def _place(entry: Any, ends: Sequence[int], unit: str, count: int) -> StepScores | CallError | None:
    """Place a row's numbers, one for each of its ``count`` steps or turns, at the actions that end
    them. An error is a value, so that other rows keep theirs."""
    if entry is None or isinstance(entry, CallError):
        return entry
    entry = entry.tolist() if hasattr(entry, "tolist") else entry
    if not isinstance(entry, list | tuple):
        got = f"returned {entry!r:.60} ({type(entry).__name__}) for a completion"
        need = f"a {unit} reward returns a list of numbers for each, or None"
        return CallError("exception", f"{got}; {need}")
    if len(entry) != count:
        got = f"returned {len(entry)} numbers for a completion of {count} {unit}s"
        return CallError("exception", got)
    # A row without actions has one step, its empty text, and no end.
    return StepScores(ends, entry[: len(ends)])


def split_steps(text: str, separator: str) -> list[TextStep]:
    """Split a text into steps. Blank parts are dropped; a text of blank parts only is a single
    step."""
    steps, end = [], 0
    for part in text.split(separator):
        end = min(end + len(part) + len(separator), len(text))
        if part.strip():
            steps.append((part, end))
    return steps or [(text, len(text))]


def step_ends(
    steps: Sequence[TextStep], text: str, ids: Sequence[int], decode: Decode
) -> list[int]:
    """Index of the id that completes each step; the last step ends with the last id, so it owns the
    end token.

    The ids are the policy's own, decoded from the first on: tokenizing the text again could give
    other ids. A character of several ids is complete at its last one.
    """
    if not decode(ids).startswith(text):
        raise CallError(
            "exception", "its text differs from its decoded tokens, so its steps cannot be located"
        )

    def written(index: int) -> int:
        """Characters of the text that the ids up to ``index`` have written."""
        prefix = decode(ids[: index + 1])
        return len(prefix if text.startswith(prefix) else os.path.commonprefix([prefix, text]))  # noqa: RUF071

    ends: list[int] = []
    for _, end in steps[:-1]:
        ends.append(bisect_left(range(len(ids)), end, lo=ends[-1] if ends else 0, key=written))
    return [*ends, len(ids) - 1] if ids else []
