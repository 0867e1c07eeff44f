"""The records and protocols that every room shares: the slab of the house.

Legend: ``P`` prompts, ``G`` samples per prompt, ``B`` rows (all samples of a batch), ``T`` actions the policy
takes, ``V`` vocabulary, ``*E`` event dimensions of one continuous action. Lower-case ``b`` and ``t`` are the rows and
columns of one micro-batch. Records that hold tensors are frozen and compare by identity (``eq=False``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Finish = Literal["stop", "length", "error"]

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class GruppoError(Exception):
    """A mistake that the user can mend. The message says what was got, what is needed and what to do.

    The command line prints it as one line and exits with ``exit_code``; it never ends in a traceback.
    """

    exit_code = 2


class DataError(GruppoError):
    """The data or the reward cannot be used (exit code 3)."""

    exit_code = 3


class NumericalStop(GruppoError):
    """Training stopped because its numbers are no longer usable (exit code 4)."""

    exit_code = 4


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prompt:
    """What one group is asked."""

    id: str
    inputs: Any
    """A string, a list of messages, a class or caption, a degraded image ``[C, H, W]``."""
    target: Any = None
    """For rewards and supervised losses; never read while sampling."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Every further column of the data set."""
    draw: int = 0
    """Position in the prompt stream: the same prompt drawn twice has two draws, hence other samples."""


@dataclass(frozen=True, eq=False)
class Request:
    """``size`` samples of one prompt, numbered from ``first`` so that a group can grow."""

    prompt: Prompt
    size: int
    first: int = 0


@dataclass(frozen=True)
class Sampling:
    """The distribution that actions are drawn from. Policies extend it (eta, guidance)."""

    temperature: float = 1.0
    """0 is the mode (greedy decoding, the ODE) and is never learned from."""
    top_k: int = 0
    """Keep the k most likely actions; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of actions whose probability reaches top_p; 1 keeps all."""
    max_actions: int = 64
    """Longest rollout, in actions."""
    stop: tuple[str, ...] = ()
    """Further texts that end a completion, beside the tokenizer's end tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise GruppoError(
                f"temperature={self.temperature} is not a number from 0 on; use 0 for greedy decoding, or 1.0."
            )
        if self.top_k < 0:
            raise GruppoError(
                f"top_k={self.top_k} is negative; use 0 to keep every action or a number of actions to keep."
            )
        if not 0 < self.top_p <= 1:
            raise GruppoError(f"top_p={self.top_p} is outside (0, 1]; use 1 to keep every action.")
        if self.max_actions < 1:
            raise GruppoError(f"max_actions={self.max_actions} samples nothing; use at least 1.")
        if isinstance(self.stop, str) or "" in self.stop:
            raise GruppoError(f"stop={self.stop!r} ends every rollout at once; use a tuple of texts, such as ('###',).")


@dataclass(frozen=True, eq=False)
class Rollouts:
    """B sampled rows: all that is needed to reward them and to evaluate them again."""

    prompts: tuple[Prompt, ...]
    """[P]"""
    group_ids: Int[Tensor, "B"]
    """Row to index into ``prompts`` and ``shared``; groups may differ in size."""
    actions: Tensor
    """[B, T] token ids, or [B, T, *E] states."""
    mask: Bool[Tensor, "B T"]
    """True where the policy itself chose the action: not the prompt, not a tool's output, not padding."""
    lengths: Int[Tensor, "B"]
    """Columns that exist; a column below the length whose mask is False was the environment's."""
    completions: tuple[Any, ...]
    """[B] what rewards read: a string, a list of messages, an image in [0, 1]."""
    sampler_logprobs: Float[Tensor, "B T"]
    """Nats, as the engine reported them at the sampling temperature; 0 where mask is False."""
    policy_version: Int[Tensor, "B T"]
    """Publish count of the weights that chose the action."""
    temperature: Float[Tensor, "B"]
    finish: tuple[Finish, ...]
    """[B] "stop" (ended by itself), "length" (cut at max_actions) or "error"."""
    shared: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """[P, ...] held once per prompt: prompt ids, conditioning. Ragged entries are tuples of length P."""
    per_row: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """[B, ...] held once per row: initial latent, time steps, what the environment said."""

    def __len__(self) -> int:
        return self.group_ids.shape[0]

    def take(self, rows: Int[Tensor, "b"] | Sequence[int]) -> Rollouts:
        """The given rows, in the given order. Prompts that lose every row are dropped and ``group_ids`` re-indexed."""
        index = torch.as_tensor(rows, dtype=torch.long)
        groups, group_ids = self.group_ids[index].unique(return_inverse=True)
        kept = groups.tolist()
        return replace(
            self,
            prompts=tuple(self.prompts[g] for g in kept),
            group_ids=group_ids,
            shared={name: _pick(value, groups) for name, value in self.shared.items()},
            **{name: _pick(getattr(self, name), index) for name in _ROW_FIELDS},
            per_row={name: _pick(value, index) for name, value in self.per_row.items()},
        )

    @staticmethod
    def cat(parts: Sequence[Rollouts]) -> Rollouts:
        """All rows of all parts. Rows of the same prompt and draw become one group; shorter parts are padded."""
        if not parts:
            raise ValueError("Rollouts.cat got an empty list; it needs at least one Rollouts.")
        where: dict[tuple[str, int], int] = {}
        owners: list[tuple[int, int]] = []
        group_ids = []
        for n, part in enumerate(parts):
            for p, prompt in enumerate(part.prompts):
                if (prompt.id, prompt.draw) not in where:
                    where[prompt.id, prompt.draw] = len(owners)
                    owners.append((n, p))
            new_id = torch.tensor([where[prompt.id, prompt.draw] for prompt in part.prompts], dtype=torch.long)
            group_ids.append(new_id[part.group_ids])
        columns = max(part.actions.shape[1] for part in parts)
        fields = {name: _join([_widen(name, getattr(part, name), columns) for part in parts]) for name in _ROW_FIELDS}
        return Rollouts(
            prompts=tuple(parts[n].prompts[p] for n, p in owners),
            group_ids=torch.cat(group_ids),
            shared={name: _gather([part.shared[name] for part in parts], owners) for name in parts[0].shared},
            per_row={name: _join([part.per_row[name] for part in parts]) for name in parts[0].per_row},
            **fields,
        )


_COLUMN_FIELDS = ("actions", "mask", "sampler_logprobs", "policy_version")
_ROW_FIELDS = (*_COLUMN_FIELDS, "lengths", "completions", "temperature", "finish")


def _pick(value: Any, index: Tensor) -> Any:
    return value[index] if isinstance(value, Tensor) else tuple(value[i] for i in index.tolist())


def _join(values: Sequence[Any]) -> Any:
    return torch.cat(list(values)) if isinstance(values[0], Tensor) else tuple(x for value in values for x in value)


def _gather(values: Sequence[Any], owners: Sequence[tuple[int, int]]) -> Any:
    picked = [values[n][p] for n, p in owners]
    return torch.stack(picked) if isinstance(values[0], Tensor) else tuple(picked)


def _widen(name: str, value: Any, columns: int) -> Any:
    if name not in _COLUMN_FIELDS or value.shape[1] == columns:
        return value
    padding = value.new_zeros(value.shape[0], columns - value.shape[1], *value.shape[2:])
    return torch.cat([value, padding], dim=1)


@dataclass(frozen=True, eq=False)
class Gaussian:
    """A policy's diagonal normal; the only owner of the noise scale."""

    mean: Tensor
    """[b, t, *E]"""
    std: Tensor
    """[b, t], or like ``mean``."""


@dataclass(frozen=True, eq=False)
class Likelihood:
    """What a policy says of given rollouts. Everything but ``logprobs`` is there only when asked for."""

    logprobs: Float[Tensor, "b t"]
    """Joint nats of each action, with gradient. Densities are summed in float64 over event dimensions."""
    entropy: Float[Tensor, "b t"] | None = None
    gaussian: Gaussian | None = None
    values: Float[Tensor, "b t"] | None = None
    """From a value head on the policy's trunk."""
    output: Any = None
    """The deterministic prediction that supervised losses read."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one forward covers: rows, and a range of columns."""

    rows: Int[Tensor, "b"]
    cols: slice

    def of(self, x: Tensor) -> Tensor:
        """The micro-batch of a ``[B, T, ...]`` tensor: ``[b, t, ...]``."""
        return x[self.rows][:, self.cols]


@dataclass(frozen=True, eq=False)
class Batch:
    """What ``collect`` hands to ``learn``."""

    rollouts: Rollouts | None
    demos: Rollouts | None
    """Demonstrations for supervised terms."""
    rewards: Float[Tensor, "B"]
    """NaN = not scored, or of a slot that no round of sampling filled."""
    reward_parts: Mapping[str, Float[Tensor, "B"]]
    advantages: Float[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    """mask, and scored, and not an error, and not masked for truncation: what is learned from."""
    old_logprobs: Float[Tensor, "B T"] | None = None
    """None: every row enters exactly one update, so the old log-probs are the current ones, detached."""
    ref: Likelihood | None = None
    """None with a reference: it is evaluated inside the micro-batch."""
    old_values: Float[Tensor, "B T"] | None = None
    returns: Float[Tensor, "B T"] | None = None
    old_gaussian: Gaussian | None = None
    """Of a Gaussian policy, beside its old log-probs."""

    def take(self, rows: Int[Tensor, "b"]) -> Batch:
        """The given rows of every entry that has rows."""
        pick = {
            name: value[rows]
            for name in ("rewards", "advantages", "loss_mask", "old_logprobs", "old_values", "returns")
            if (value := getattr(self, name)) is not None
        }
        ref, old = self.ref, _rows_of(self.old_gaussian, rows)
        if ref is not None:
            ref = Likelihood(ref.logprobs[rows], gaussian=_rows_of(ref.gaussian, rows))
        parts = {name: value[rows] for name, value in self.reward_parts.items()}
        rollouts = None if self.rollouts is None else self.rollouts.take(rows)
        return replace(self, rollouts=rollouts, ref=ref, old_gaussian=old, reward_parts=parts, **pick)


def _rows_of(gaussian: Gaussian | None, rows: Int[Tensor, "b"]) -> Gaussian | None:
    return None if gaussian is None else Gaussian(gaussian.mean[rows], gaussian.std[rows])


@dataclass(frozen=True)
class Stat:
    """Count, sum, sum of squares, minimum and maximum: adds over micro-batches, ranks and steps."""

    count: float = 0.0
    sum: float = 0.0
    sum_sq: float = 0.0
    min: float = float("inf")
    max: float = float("-inf")

    @staticmethod
    def of(x: Tensor, where: Tensor | None = None) -> Stat:
        """The statistics of the entries of ``x`` where ``where`` is True (all of them without it)."""
        kept = (x if where is None else x[where]).detach().double()
        if kept.numel() == 0:
            return Stat()
        low, high = kept.aminmax()
        packed = torch.stack([kept.sum(), kept.square().sum(), low, high]).tolist()
        return Stat(float(kept.numel()), *packed)

    def __add__(self, other: Stat) -> Stat:
        return Stat(
            self.count + other.count,
            self.sum + other.sum,
            self.sum_sq + other.sum_sq,
            min(self.min, other.min),
            max(self.max, other.max),
        )

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else float("nan")

    @property
    def std(self) -> float:
        """Population standard deviation (ddof 0)."""
        if not self.count:
            return float("nan")
        return max(self.sum_sq / self.count - self.mean**2, 0.0) ** 0.5
