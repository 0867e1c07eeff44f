"""Scoring of batches by several rewards: weighted sum, failures, retries.

The one place that handles failures. A row that a reward cannot score (None, NaN, an exception, a
timeout) is NaN and, but for None, counted; it never acts as 0.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from gruppo import distributed as dist
from gruppo.protocols import Reward
from gruppo.rewards.answers import Answer, TrainerState
from gruppo.rewards.functions import (
    Decode,
    FunctionReward,
    ObjectReward,
    RowCall,
    StepScores,
    open_reward,
)
from gruppo.timeouts import (
    CallError,
    FailureKind,
    TimedCall,
    call_with_timeout,
    start_call,
)
from gruppo.types import GruppoError, Prompt, Rollouts

log = logging.getLogger("gruppo")

SAME_ERRORS = 4
"""Single rows that repeat the error of the whole batch before the other rows fail too."""
_MAX_FLOAT32 = torch.finfo(torch.float32).max
NAN = float("nan")


@dataclass(frozen=True)
class Failure:
    """A row that a reward could not score."""

    row: int
    reward: str
    kind: FailureKind
    message: str


@dataclass(frozen=True, eq=False)
class Scores:
    """Rewards of B rows."""

    rewards: Float[Tensor, "B"]
    """Weighted sum, float32; NaN = not scored."""
    parts: Mapping[str, Float[Tensor, "B"]]
    """Each reward before its weight, float32; NaN = not scored by it."""
    failures: tuple[Failure, ...] = ()
    steps: Mapping[str, Float[Tensor, "B T"]] = field(default_factory=dict)
    """Each step reward before its weight, at the action that ends each step; NaN = no step ends
    here, or it is not scored. A row's part is their sum."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``reward_metric/<name>``: mean over the calls that logged it in this batch."""
    extras: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Columns that functions logged, each [B]; None where a row has no entry."""

    def take(self, rows: Sequence[int]) -> Scores:
        """Select rows, in the given order. Failures of other rows are dropped."""
        rows = list(rows)
        place = {row: n for n, row in enumerate(rows)}
        return replace(
            self,
            rewards=self.rewards[rows],
            parts={name: part[rows] for name, part in self.parts.items()},
            steps={name: steps[rows] for name, steps in self.steps.items()},
            failures=tuple(replace(f, row=place[f.row]) for f in self.failures if f.row in place),
            extras={name: tuple(map(x.__getitem__, rows)) for name, x in self.extras.items()},
        )

    @staticmethod
    def cat(several: Sequence[Scores]) -> Scores:
        """Concatenate rows. Steps are padded to the widest; a metric is the mean over the scores
        that have it."""
        first = several[0]
        sizes = [len(scores.rewards) for scores in several]
        width = max((x.shape[1] for scores in several for x in scores.steps.values()), default=0)

        def joined_steps(name: str) -> Tensor:
            steps = [scores.steps[name] for scores in several]
            return torch.cat([pad(x, (0, width - x.shape[1]), value=NAN) for x in steps])

        def joined_column(name: str) -> tuple[Any, ...]:
            columns = [scores.extras.get(name, (None,) * len(scores.rewards)) for scores in several]
            return tuple(chain(*columns))

        failures = list[Failure]()
        for n, scores in enumerate(several):
            failures += [replace(f, row=f.row + sum(sizes[:n])) for f in scores.failures]
        columns = sorted({name for scores in several for name in scores.extras})
        return Scores(
            rewards=torch.cat([scores.rewards for scores in several]),
            parts={n: torch.cat([scores.parts[n] for scores in several]) for n in first.parts},
            steps={name: joined_steps(name) for name in first.steps},
            failures=tuple(failures),
            metrics=_means(entry for scores in several for entry in scores.metrics.items()),
            extras={name: joined_column(name) for name in columns},
        )


class RewardSet:
    """One or several rewards, called together; their weighted sum is the reward ("sum, then
    normalize").

    A reward that scores no row of a group, by returning None for each, does not apply to that group
    and is left out of its sum. Otherwise a row that lacks a part is NaN in the sum: a missing part
    never acts as a 0. In an evaluation, where a group is one row, a reward applies unless the row
    is scored by a reward with which it never shares a row: two such rewards are for different kinds
    of prompts. A part of weight 0 is recorded but not in the sum. Rows that ended in "error" are
    not shown to the rewards; they are NaN.

    ``rewards``: functions in TRL's calling convention or objects with the ``Reward`` protocol.
    ``may_be_empty``: no reward is needed, as in a run of demonstrations only.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | Callable[..., Any]],
        weights: Sequence[float] | None = None,
        timeout_s: float | None = 60.0,
        *,
        may_be_empty: bool = False,
    ) -> None:
        rewards = [rewards] if callable(rewards) else rewards
        if not rewards and not may_be_empty:
            raise GruppoError(
                "got no reward; learning needs at least one",
                advice="Pass a function or $reward exact_match",
            )
        self.weights = _checked_weights(weights, len(rewards))
        self._rewards = _named(open_reward(source, timeout_s) for source in rewards)
        opened = self._rewards.items()
        self.names = tuple(self._rewards)
        self.weight_of = dict(zip(self.names, self.weights, strict=True))
        self.step_names = tuple(name for name, reward in opened if reward.scores_steps)
        """Rewards that score steps."""
        self.turn_names = tuple(name for name, reward in opened if reward.scores_turns)
        """Of these, those whose steps are the turns of a conversation."""
        weighted = {name for name, weight in self.weight_of.items() if weight}
        self.has_step_rewards = bool(weighted & {*self.step_names})
        """Whether a reward that scores steps has a weight."""
        self.has_outcome_rewards = bool(weighted - {*self.step_names})
        """Whether a reward that scores whole rows has a weight."""
        requested = [reward.requested_columns for reward in self._rewards.values()]
        self.requested_columns = frozenset[str]().union(*requested)
        """Columns that some reward reads, if the data have them."""
        memory = {name: getattr(reward.fn, "memory_bytes", 0) for name, reward in opened}
        self.memory_bytes = {name: count for name, count in memory.items() if count}
        """Memory of the reward models' weights, by name."""
        self._judges: dict[str, Any] = {
            name: reward.fn for name, reward in opened if hasattr(reward.fn, "usage")
        }

    def announce_soft_deadlines(self) -> None:
        """Log which rewards run in threads of this process, whose late calls cannot be ended."""
        names = []
        for name, reward in self._rewards.items():
            is_ours = str(getattr(reward.fn, "__module__", "")).startswith("gruppo.")
            if reward.timeout_s is not None and not reward.is_remote and not is_ours:
                names.append(name)
        if names:
            log.info(
                "reward %s runs in this process: a call past its deadline is left behind in its"
                " thread, and a hang in C cannot be killed. A function named as FILE.py:NAME is"
                " killed.",
                ", ".join(names),
            )

    def set_decoder(self, decode: Decode) -> None:
        """Set the policy's decoder, which step rewards need: ``policy.chat.text``."""
        for reward in self._rewards.values():
            reward.decode = decode

    def set_view(self, view: Callable[[Prompt, Any], Any]) -> None:
        """Set what makes the ``environments`` that functions read of a prompt and a state."""
        for reward in self._rewards.values():
            reward.view = view

    def check(self, columns: Collection[str]) -> None:
        """Raise DataError, before sampling, if the data lack a column that a reward requires."""
        for reward in self._rewards.values():
            reward.check(columns)

    def input_digests(self) -> dict[str, str]:
        """SHA-256 of the files on which rewards depend, beside code; a resumed run compares it."""
        return {
            f"file of the judge {name}": judge.input_digest for name, judge in self._judges.items()
        }

    def attach(self, folder: Path) -> None:
        """Count what judges use in the folder of a run, on from what it has used before. A
        collective."""
        for name, judge in self._judges.items():
            judge.attach(folder / "judges" / name)

    def usage(self) -> dict[str, float]:
        """Metrics of what judges have used so far, over all ranks. A collective if there are
        any."""
        own = {
            f"judge/{name}/{key}": x
            for name, judge in self._judges.items()
            for key, x in judge.usage().items()
        }
        if not own:
            return {}
        totals = dist.all_sum(torch.tensor([*own.values()], dtype=torch.float64)).tolist()
        return dict(zip(own, totals, strict=True))

    def describe_usage(self, usage: Mapping[str, float]) -> list[str]:
        """A line for each judge."""
        lines = []
        for name in self._judges:
            start = f"judge/{name}/"
            counts = []
            for key, x in usage.items():
                if key.startswith(start):
                    what = key.removeprefix(start).removesuffix("_count").replace("_", " ")
                    counts.append(f"{x:,.0f} {what}")
            lines.append(f"judge {name}: {', '.join(counts)}")
        return lines

    def score(
        self, rollouts: Rollouts, state: TrainerState | None = None, *, is_evaluation: bool = False
    ) -> Scores:
        """Score all rows. Asynchronous rewards run at the same time, the others one after the
        other."""
        rows = [row for row, finish in enumerate(rollouts.finish) if finish != "error"]
        results = {name: RewardResult(name, *rollouts.mask.shape) for name in self._rewards}
        tasks, running = list[Callable[[], None]](), list[TimedCall]()
        for name, reward in self._rewards.items():
            call = reward.prepare(rollouts, state or TrainerState())
            if not reward.is_remote:
                call = partial(_call_in_thread, call)
            task = partial(score_rows, call, rows, results[name], reward.timeout_s)
            if reward.is_async:
                running.append(start_call(task))
            else:
                tasks.append(task)
        for run in tasks:
            run()
        for started in running:  # each bounds its own time
            started.done.wait()
            started.result()
        every = list(results.values())
        groups = None if is_evaluation else rollouts.group_ids.cpu()
        logged = [(f"reward_metric/{name}", x) for result in every for name, x in result.metrics]
        return Scores(
            rewards=combine(every, self.weights, groups),
            parts={name: result.rewards.float() for name, result in results.items()},
            steps={name: results[name].steps for name in self.step_names},
            failures=tuple(f for result in every for _, f in sorted(result.failures.items())),
            metrics=_means(logged),
            extras=_columns_of(results),
        )


def _named(
    rewards: Iterable[FunctionReward | ObjectReward],
) -> dict[str, FunctionReward | ObjectReward]:
    """Rewards by name; equal names get _2, _3, ..."""
    named: dict[str, FunctionReward | ObjectReward] = {}
    for reward in rewards:
        names = chain([reward.name], (f"{reward.name}_{n}" for n in count(2)))
        named[next(name for name in names if name not in named)] = reward
    return named


def _columns_of(results: Mapping[str, RewardResult]) -> dict[str, tuple[Any, ...]]:
    """Logged columns; one that two rewards log carries the second one's name."""
    columns: dict[str, tuple[Any, ...]] = {}
    for name, result in results.items():
        for column, values in result.extras.items():
            columns[f"{name}/{column}" if column in columns else column] = tuple(values)
    return columns


def _checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    weights = (1.0,) * count if weights is None else weights
    if len(weights) != count or not all(map(math.isfinite, weights)):
        raise GruppoError(f"""got the reward weights {list(weights)} for {count} rewards; give one
            finite number each, 0 to leave a reward out of the sum, or none.""")
    return tuple(map(float, weights))


class RewardResult:
    """Scores and failures of one reward for the rows of a batch, recorded call by call."""

    def __init__(self, name: str, rows: int, columns: int) -> None:
        self.name = name
        self.rewards = torch.full((rows,), NAN, dtype=torch.float64)
        """[B]; NaN = not scored. Of a step reward, the sum over steps."""
        self.steps = torch.full((rows, columns), NAN)
        """[B, T] float32; NaN = no step ends here, or it is not scored."""
        self.failures: dict[int, Failure] = {}
        self.metrics: list[tuple[str, float]] = []
        self.extras: dict[str, list[Any]] = {}

    def record(self, rows: Sequence[int], answer: Answer) -> None:
        for row, value in zip(rows, answer.values, strict=True):
            try:
                if isinstance(value, CallError):
                    raise value
                if isinstance(value, StepScores):
                    self._record_steps(row, value)
                else:
                    self.rewards[row] = as_reward(value)
            except CallError as error:
                self.fail([row], error)
        self.metrics += answer.metrics
        for extra, values in answer.extras:
            logged = self.extras.setdefault(extra, [None] * len(self.rewards))
            for row, value in zip(rows, values, strict=True):
                logged[row] = value

    def _record_steps(self, row: int, value: StepScores) -> None:
        scores = [as_reward(score) for score in value.scores]
        known = [score for score in scores if score == score]
        self.rewards[row] = as_reward(math.fsum(known) if known else None)
        for column, score in zip(value.columns, scores, strict=True):
            if score == score:  # two steps may end in one action
                self.steps[row, column] = score + self.steps[row, column].nan_to_num()

    def fail(self, rows: Sequence[int], error: CallError) -> None:
        for row in rows:
            self.failures[row] = Failure(row, self.name, error.kind, error.message)


def as_reward(value: Any) -> float:
    """Convert one returned value: None to NaN; ``CallError`` for anything but a finite float32."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if value is None:
        return float("nan")
    if not isinstance(value, (int, float)):
        mark = "; mark a function that scores each step with gruppo.rewards.step_reward"
        hint = mark if isinstance(value, list) else ""
        got = f"returned {value!r:.60} ({type(value).__name__})"
        raise CallError("exception", f"{got}; each entry is a number or None{hint}")
    if not abs(value) <= _MAX_FLOAT32:
        need = "a reward is a finite float32, or None for not scored"
        raise CallError("not_finite", f"returned {value!r:.60}; {need}")
    return float(value)


# --- calls and retries ----------------------------------------------------------------------------


def _call_in_thread(call: RowCall, rows: Sequence[int], timeout_s: float | None) -> Answer:
    return call_with_timeout(partial(call, rows, timeout_s), timeout_s)


def score_rows(
    call: RowCall, rows: Sequence[int], result: RewardResult, timeout_s: float | None
) -> None:
    """Call for all rows at once, and if that fails for each row alone.

    A wrong number of rewards fails all rows: it is unknown which number belongs to which row, and
    asked about one row, a function that returns one number for everything would pass.
    """
    if not rows:
        return
    try:
        result.record(rows, call(rows, timeout_s))
    except CallError as error:
        if len(rows) == 1 or error.kind == "count":
            result.fail(rows, error)
        else:
            _retry(call, rows, result, timeout_s, error)


def _retry(
    call: RowCall,
    rows: Sequence[int],
    result: RewardResult,
    timeout_s: float | None,
    first: CallError,
) -> None:
    """Call for each row alone, one after another, all within ``timeout_s`` and each within a
    quarter of it, so that a hung row leaves time for the others.

    A function that is simply broken fails with the same error on every row: after ``SAME_ERRORS``
    rows the others are not tried.
    """
    limit_s = math.inf if timeout_s is None else timeout_s
    until = time.monotonic() + limit_s
    repeated = 0
    for n, row in enumerate(rows):
        left_s = min(until - time.monotonic(), limit_s / 4)
        if left_s <= 0:
            late = f"not reached: other rows used up a further {limit_s:.3g} s"
            result.fail(rows[n:], CallError("timeout", late))
            return
        try:
            result.record([row], call([row], None if timeout_s is None else left_s))
        except CallError as error:
            if error.kind == "timeout":
                alone = f"alone, no answer within {left_s:.3g} s of the limit of {limit_s:g} s"
                error = CallError("timeout", alone)
            result.fail([row], error)
            repeated += error.kind != "timeout" and error.identity == first.identity
        if repeated == n + 1 == SAME_ERRORS:
            result.fail(rows[n + 1 :], first)
            return


# --- sums and statistics --------------------------------------------------------------------------


def combine(
    results: Sequence[RewardResult], weights: Sequence[float], group_ids: Int[Tensor, "B"] | None
) -> Float[Tensor, "B"]:
    """Weighted sum of the parts that apply to each row; NaN where one of them is missing, or none
    applies.

    ``group_ids``: the groups over which it is decided which parts apply; None in an evaluation.
    """
    weighted = [result for result, weight in zip(results, weights, strict=True) if weight]
    if not weighted:
        return torch.full_like(results[0].rewards, NAN).float()
    parts = torch.stack([result.rewards for result in weighted])  # [parts, B]
    scored = ~parts.isnan()
    failed = torch.zeros_like(scored)
    for part, result in zip(failed, weighted, strict=True):
        part[list(result.failures)] = True
    if group_ids is None:
        # Two parts that never score the same row are for different kinds of prompts.
        apart = (scored.float() @ scored.float().T == 0).float()  # [parts, parts]
        applies = apart @ scored.float() == 0
    else:
        applies = applies_to_group(scored, group_ids)
    is_missing = (applies & ~scored) | failed
    weight = torch.tensor([weight for weight in weights if weight], dtype=torch.float64)
    total = (weight[:, None] * torch.where(scored, parts, 0)).sum(0)
    total = torch.where(scored.any(0) & ~is_missing.any(0), total, NAN).float()
    return torch.where(total.isfinite(), total, NAN)


def applies_to_group(
    scored: Bool[Tensor, "parts B"], group_ids: Int[Tensor, "B"]
) -> Bool[Tensor, "parts B"]:
    """Whether a part scores any row of each row's group."""
    groups = int(group_ids.max()) + 1 if len(group_ids) else 0
    counts = torch.zeros(len(scored), groups).index_add(1, group_ids, scored.float())
    return counts[:, group_ids] > 0


def reward_stats(scores: Scores) -> dict[str, float]:
    """Count the rows and rewards that could not be scored.

    ``reward/unscored_count`` counts rows without a sum; the others count failures, so that a row
    that fails in two rewards counts twice. A wrong number of rewards counts as an exception.
    """
    kinds = [failure.kind for failure in scores.failures]
    return {
        "reward/unscored_count": float(scores.rewards.isnan().sum()),
        "reward/exception_count": float(kinds.count("exception") + kinds.count("count")),
        "reward/timeout_count": float(kinds.count("timeout")),
        "reward/not_finite_count": float(kinds.count("not_finite")),
    }


def _means(logged: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean of all values under each name."""
    values_of: dict[str, list[float]] = {}
    for name, value in logged:
        values_of.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in values_of.items()}
