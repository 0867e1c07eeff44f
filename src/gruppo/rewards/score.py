"""Several rewards on one batch: their parts, their weighted sum, and a record of what could not be scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gruppo.protocols import Reward
from gruppo.rewards.failures import Failure, Outcome
from gruppo.rewards.functions import FunctionReward, name_of
from gruppo.rewards.networks import Network
from gruppo.rewards.objects import ObjectReward
from gruppo.rewards.steps import Read, StepScores
from gruppo.timeouts import start
from gruppo.types import GruppoError, Rollouts

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Scores:
    """What a set of rewards says of B rows."""

    rewards: Float[Tensor, "B"]
    """The weighted sum, float32; NaN = not scored."""
    parts: Mapping[str, Float[Tensor, "B"]]
    """Each reward before its weight, float32; NaN = not scored by it."""
    failures: tuple[Failure, ...] = ()
    steps: Mapping[str, Float[Tensor, "B T"]] = field(default_factory=dict)
    """Each reward of steps before its weight, at the action that ends each step; NaN = no step ends here, or it is
    not scored. A row's part is their sum."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What functions logged: ``reward_metric/<name>``, the mean over the calls of this batch."""
    extras: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Columns that functions logged, each [B]; None where a row has no entry."""

    def take(self, rows: Sequence[int]) -> Scores:
        """The given rows, in the given order; failures of other rows are left out."""
        place = {row: n for n, row in enumerate(rows)}
        return replace(
            self,
            rewards=self.rewards[list(rows)],
            parts={name: part[list(rows)] for name, part in self.parts.items()},
            steps={name: steps[list(rows)] for name, steps in self.steps.items()},
            failures=tuple(replace(f, row=place[f.row]) for f in self.failures if f.row in place),
            extras={name: tuple(column[row] for row in rows) for name, column in self.extras.items()},
        )

    @staticmethod
    def cat(several: Sequence[Scores]) -> Scores:
        """All rows of all. A metric is the mean of those that logged it."""
        starts = [0, *accumulate(len(scores.rewards) for scores in several)]
        columns = {name for scores in several for name in scores.extras}
        logged: dict[str, list[float]] = {}
        for name, value in (entry for scores in several for entry in scores.metrics.items()):
            logged.setdefault(name, []).append(value)
        return Scores(
            rewards=torch.cat([scores.rewards for scores in several]),
            parts={name: torch.cat([scores.parts[name] for scores in several]) for name in several[0].parts},
            steps={name: _one_below_another([scores.steps[name] for scores in several]) for name in several[0].steps},
            failures=tuple(
                replace(f, row=f.row + start)
                for scores, start in zip(several, starts, strict=False)
                for f in scores.failures
            ),
            metrics={name: sum(values) / len(values) for name, values in logged.items()},
            extras={
                name: tuple(x for scores in several for x in scores.extras.get(name, (None,) * len(scores.rewards)))
                for name in sorted(columns)
            },
        )


def _one_below_another(several: Sequence[Float[Tensor, "b t"]]) -> Float[Tensor, "B T"]:
    """As many columns as the widest, as ``Rollouts.cat``."""
    columns = max(steps.shape[1] for steps in several)
    return torch.cat([torch.nn.functional.pad(x, (0, columns - x.shape[1]), value=NAN) for x in several])


class _Scorer(Protocol):
    name: str
    is_async: bool
    read: Read | None

    @property
    def gives_steps(self) -> bool: ...

    def asks(self, column: str) -> bool: ...

    def check(self, columns: Collection[str]) -> None: ...

    def score(self, rollouts: Rollouts, *, rows: Sequence[int] | None, step: int, max_steps: int) -> Outcome: ...


class RewardSet:
    """One or several rewards, called together; their weighted sum is the reward ("sum, then normalise").

    A reward that scores no row of a group, by returning None for each, does not apply to that group and is left out of
    its sum. Otherwise a row that lacks a part is NaN in the sum: a missing part never acts as a 0. In an evaluation,
    where a group is one row, a reward applies unless the row is scored by one with which it never shares a row: two
    such rewards are for different kinds of prompts. A part of weight 0 is recorded and takes no part in the sum. Rows
    that ended in "error" are not shown to the rewards; they are NaN.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | Callable[..., Any]],
        weights: Sequence[float] | None = None,
        timeout_s: float | None = 60.0,
        *,
        may_be_empty: bool = False,
    ) -> None:
        """``may_be_empty``: nothing is ever scored, as where demonstrations alone teach."""
        if callable(rewards):
            rewards = [rewards]
        if not rewards and not may_be_empty:
            raise GruppoError(
                "no reward was given; learning needs at least one. Pass a function or --reward exact_match."
            )
        self.weights = _checked_weights(weights, len(rewards))
        self._scorers = [_scorer_of(reward, timeout_s) for reward in rewards]
        self.names = _unique([scorer.name for scorer in self._scorers])

    def reads(self, text: Read) -> None:
        """Tell rewards of steps how the policy's ids are read: ``policy.chat.text``."""
        for scorer in self._scorers:
            scorer.read = text

    @property
    def step_names(self) -> tuple[str, ...]:
        """Rewards that score steps."""
        return tuple(name for name, scorer in zip(self.names, self._scorers, strict=True) if scorer.gives_steps)

    @property
    def has_steps(self) -> bool:
        """Whether some reward of steps weighs anything."""
        return any(self.weight_of[name] for name in self.step_names)

    @property
    def has_rows(self) -> bool:
        """Whether some reward of whole rows weighs anything."""
        return any(weight for name, weight in self.weight_of.items() if name not in self.step_names)

    @property
    def weight_of(self) -> dict[str, float]:
        return dict(zip(self.names, self.weights, strict=True))

    def memory(self) -> dict[str, int]:
        """Bytes of the weights of reward models, by name."""
        found = {
            name: getattr(getattr(s, "fn", s), "network", None)
            for name, s in zip(self.names, self._scorers, strict=True)
        }
        return {name: model.memory_bytes for name, model in found.items() if isinstance(model, Network)}

    def asks(self, column: str) -> bool:
        """Whether some reward reads a column."""
        return any(scorer.asks(column) for scorer in self._scorers)

    def check(self, columns: Collection[str]) -> None:
        """Refuse rewards that ask for a column which the data do not have, before anything is sampled."""
        for scorer in self._scorers:
            scorer.check(columns)

    def score(self, rollouts: Rollouts, *, step: int = 0, max_steps: int = 0, is_evaluation: bool = False) -> Scores:
        """All parts and their sum. Asynchronous rewards run at the same time, the others one after the other."""
        rows = [row for row, finish in enumerate(rollouts.finish) if finish != "error"]
        asks = [partial(s.score, rollouts, rows=rows, step=step, max_steps=max_steps) for s in self._scorers]
        outcomes = dict(zip(self.names, _in_parallel(asks, [s.is_async for s in self._scorers]), strict=True))
        return Scores(
            rewards=combine(list(outcomes.values()), self.weights, None if is_evaluation else rollouts.group_ids.cpu()),
            parts={name: outcome.rewards.float() for name, outcome in outcomes.items()},
            steps={name: at_their_actions(outcomes[name].steps, rollouts.mask.shape) for name in self.step_names},
            failures=tuple(replace(f, reward=name) for name, outcome in outcomes.items() for f in outcome.failures),
            metrics=_pooled_metrics(outcomes.values()),
            extras=_named_extras(outcomes),
        )


def at_their_actions(steps: Mapping[int, StepScores], shape: Sequence[int]) -> Float[Tensor, "B T"]:
    """Scores of steps at the actions that end them, NaN elsewhere; what ends in one action is added."""
    placed = torch.full(tuple(shape), NAN)
    for row, own in steps.items():
        for column, score in zip(own.columns, own.scores, strict=True):
            if score == score:
                placed[row, column] = score + placed[row, column].nan_to_num()
    return placed


def combine(
    outcomes: Sequence[Outcome], weights: Sequence[float], group_ids: Int[Tensor, "B"] | None
) -> Float[Tensor, "B"]:
    """Weighted sum of the parts that apply to each row; NaN where one of them is missing, or none applies.

    ``group_ids``: the groups for which it is decided what applies; None in an evaluation.
    """
    counted = [(outcome, weight) for outcome, weight in zip(outcomes, weights, strict=True) if weight != 0]
    if not counted:
        return torch.full_like(outcomes[0].rewards, NAN).float()
    parts = torch.stack([outcome.rewards for outcome, _ in counted])  # [parts, B]
    failed = torch.stack([outcome.failed for outcome, _ in counted])
    scored = ~parts.isnan()
    applies = _applies_to_row(scored) if group_ids is None else applies_to_group(scored, group_ids)
    is_missing = (applies & ~scored) | failed
    weight = torch.tensor([weight for _, weight in counted], dtype=torch.float64)
    total = (weight[:, None] * torch.where(scored, parts, 0)).sum(0)
    total = torch.where(scored.any(0) & ~is_missing.any(0), total, NAN).float()
    return torch.where(total.isfinite(), total, NAN)


def applies_to_group(scored: Bool[Tensor, "parts B"], group_ids: Int[Tensor, "B"]) -> Bool[Tensor, "parts B"]:
    """Whether a part scores any row of each row's group."""
    groups = int(group_ids.max()) + 1 if len(group_ids) else 0
    return (
        torch.zeros(len(scored), groups, dtype=torch.float32).index_add(1, group_ids, scored.float())[:, group_ids] > 0
    )


def _applies_to_row(scored: Bool[Tensor, "parts B"]) -> Bool[Tensor, "parts B"]:
    """Unless a part that never scores a row together with this one scores the row."""
    apart = (scored.float() @ scored.float().T == 0).float()  # [parts, parts]
    return apart @ scored.float() == 0


def reward_stats(scores: Scores) -> dict[str, float]:
    """Counts of what could not be scored.

    ``reward/unscored_count`` counts rows without a sum; the others count failures, so that a row which fails in two
    rewards counts twice. A wrong number of rewards counts as an exception.
    """
    kinds = [failure.kind for failure in scores.failures]
    return {
        "reward/unscored_count": float(scores.rewards.isnan().sum()),
        "reward/exception_count": float(kinds.count("exception") + kinds.count("count")),
        "reward/timeout_count": float(kinds.count("timeout")),
        "reward/not_finite_count": float(kinds.count("not_finite")),
    }


def _scorer_of(reward: Any, timeout_s: float | None) -> _Scorer:
    if isinstance(reward, FunctionReward):
        return reward
    if callable(reward) and isinstance(getattr(reward, "name", None), str):
        return ObjectReward(reward, timeout_s)
    return FunctionReward(reward, name=None if not callable(reward) else name_of(reward), timeout_s=timeout_s)


def _checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise GruppoError(
            f"{len(weights)} reward weights for {count} rewards; give one weight for each reward, or none."
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise GruppoError(f"reward weights {list(weights)} are not all finite numbers; use 0 to leave a reward out.")
    return tuple(float(weight) for weight in weights)


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with _2, _3 ... after those that are taken."""
    taken: list[str] = []
    for name in names:
        candidates = [name, *(f"{name}_{n}" for n in range(2, len(names) + 2))]
        taken.append(next(candidate for candidate in candidates if candidate not in taken))
    return tuple(taken)


def _in_parallel(asks: Sequence[Callable[[], Outcome]], is_async: Sequence[bool]) -> list[Outcome]:
    """Start the asynchronous ones, run the others here meanwhile, then wait. Each bounds its own time."""
    calls = {n: start(ask) for n, ask in enumerate(asks) if is_async[n]}
    here = {n: ask() for n, ask in enumerate(asks) if not is_async[n]}
    for call in calls.values():
        call.done.wait()
    return [here[n] if n in here else calls[n].result() for n in range(len(asks))]


def _pooled_metrics(outcomes: Collection[Outcome]) -> dict[str, float]:
    logged: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, numbers in outcome.metrics.items():
            logged.setdefault(f"reward_metric/{name}", []).extend(numbers)
    return {name: sum(numbers) / len(numbers) for name, numbers in logged.items()}


def _named_extras(outcomes: Mapping[str, Outcome]) -> dict[str, tuple[Any, ...]]:
    """By column; a column that two rewards log carries the second one's name in front."""
    extras: dict[str, tuple[Any, ...]] = {}
    for reward, outcome in outcomes.items():
        for column, values in outcome.extras.items():
            extras[f"{reward}/{column}" if column in extras else column] = values
    return extras
