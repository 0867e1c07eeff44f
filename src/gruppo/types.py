"""Records that every part of the package shares; the errors of ``gruppo.errors`` are importable
from here too.

Shapes: ``P`` prompts, ``G`` samples per prompt, ``B`` rows (all samples of a batch), ``T`` actions,
``V`` vocabulary, ``*E`` event dimensions of one continuous action. Lower-case ``b`` and ``t`` are
the rows and columns of one micro-batch. Records that hold tensors are frozen and compare by
identity (``eq=False``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gruppo.errors import DataError, EngineLost, GruppoError, NumericalStop  # noqa: F401

Finish = Literal["stop", "length", "error"]


# --- records --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prompt:
    """What one group is sampled from."""

    id: str
    inputs: Any
    """A string, a list of messages, a class or caption, a degraded image ``[C, H, W]``."""
    target: Any = None
    """For rewards and supervised losses; never read while sampling."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Every further column of the data set."""
    draw: int = 0
    """Position in the prompt stream: the same prompt drawn twice has two draws, hence other
    samples."""


@dataclass(frozen=True, eq=False)
class Request:
    """``size`` samples of one prompt, numbered from ``first`` so that a group can grow."""

    prompt: Prompt
    size: int
    first: int = 0
    has_more_turns: bool = False
    """Whether ``continue_rollouts`` may follow, so that a policy can keep what it has read."""


@dataclass(frozen=True)
class Sampling:
    """The distribution that actions are sampled from. Policies extend it (eta, guidance)."""

    temperature: float = 1.0
    """0 is the mode (greedy decoding, the ODE) and is never learned from."""
    top_k: int = 0
    """Keep the k most likely actions; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of actions whose probability reaches top_p; 1 keeps all."""
    max_actions: int = 64
    """Longest rollout, in actions."""
    stop: tuple[str, ...] = ()
    """Further strings that end a completion, besides the tokenizer's end tokens."""

    def __post_init__(self) -> None:
        valid = {
            "temperature": 0 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "max_actions": self.max_actions >= 1,
            "stop": "" not in self.stop,  # which any single string contains
        }
        for name, is_valid in valid.items():
            if not is_valid:
                raise GruppoError(f"""{name}={getattr(self, name)!r} is not possible: temperature is
                    0 or above, top_k 0 or above, top_p in (0, 1], max_actions 1 or above, and stop
                    a tuple of strings, such as ('###',).""")

    def greedy(self) -> Self:
        """Return the parameters of an evaluation: the most likely actions, or the ODE of a
        diffusion model."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """B sampled rows, with all that rewards and another evaluation need."""

    prompts: tuple[Prompt, ...]
    """[P]"""
    group_ids: Int[Tensor, "B"]
    """Row to index into ``prompts`` and ``shared``; groups may differ in size."""
    actions: Tensor
    """[B, T] token ids, or [B, T, *E] states."""
    mask: Bool[Tensor, "B T"]
    """True where the policy itself chose the action: not the prompt, not a tool's output, not
    padding."""
    lengths: Int[Tensor, "B"]
    """Columns of each row; those whose mask is False are the environment's."""
    completions: tuple[Any, ...]
    """[B] as rewards read it: a string, a list of messages, an image in [0, 1]."""
    sampler_logprobs: Float[Tensor, "B T"]
    """Nats, as the engine reported them at the sampling temperature; 0 where mask is False."""
    policy_version: Int[Tensor, "B T"]
    """Publish count of the weights that chose the action."""
    temperature: Float[Tensor, "B"]
    finish: tuple[Finish, ...]
    """[B] "stop" (ended by itself), "length" (cut at max_actions) or "error"."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """[P, ...] entries of each prompt: prompt ids, conditioning. Ragged entries are tuples of
    length P."""
    per_row: Mapping[str, Any] = field(default_factory=dict)
    """[B, ...] entries of each row: initial latent, time steps, the environment's replies."""

    def __len__(self) -> int:
        return self.group_ids.shape[0]

    def take(self, rows: Int[Tensor, "b"] | Sequence[int]) -> Rollouts:
        """Select rows, in the order of ``rows``. Prompts without rows are dropped and ``group_ids``
        re-indexed."""
        index = torch.as_tensor(rows, dtype=torch.long)  # [b]
        # groups [p] that have rows, and the new group of each row
        groups, group_ids = self.group_ids[index].unique(return_inverse=True)
        fields = {name: _pick(getattr(self, name), index) for name in _ROW_FIELDS}
        return replace(
            self,
            prompts=_pick(self.prompts, groups),
            group_ids=group_ids,
            shared={name: _pick(value, groups) for name, value in self.shared.items()},
            per_row={name: _pick(value, index) for name, value in self.per_row.items()},
            **fields,
        )

    @staticmethod
    def cat(parts: Sequence[Rollouts]) -> Rollouts:
        """Concatenate rows. Those of the same prompt and draw become one group; shorter parts are
        padded."""
        prompts = [prompt for part in parts for prompt in part.prompts]
        seen: dict[tuple[str, int], int] = {}
        # for each prompt, the position of the first one of its group
        firsts = [seen.setdefault((p.id, p.draw), position) for position, p in enumerate(prompts)]
        offsets = accumulate((len(part.prompts) for part in parts), initial=0)
        ids = torch.cat([part.group_ids + n for part, n in zip(parts, offsets, strict=False)])
        groups, group_ids = torch.tensor(firsts)[ids].unique(return_inverse=True)
        columns = max(part.actions.shape[1] for part in parts)
        fields: dict[str, Any] = {}
        for name in _ROW_FIELDS:
            values = [getattr(part, name) for part in parts]
            if name in COLUMN_FIELDS:
                values = [_widened(x, columns) for x in values]
            fields[name] = _join(values)
        first = parts[0]
        shared = {name: _join([part.shared[name] for part in parts]) for name in first.shared}
        # an environment may begin a conversation with what reset(seed) returns
        for own, position in zip(shared.get("prompt_ids", ()), firsts, strict=False):
            if not torch.equal(own, shared["prompt_ids"][position]):
                raise DataError(f"""samples of prompt {prompts[position].id!r} have different
                    prompts, and cannot be joined to one group. Let reset(seed) of its environment
                    return the same for the same seed and columns.""")
        return Rollouts(
            prompts=_pick(prompts, groups),
            group_ids=group_ids,
            shared={name: _pick(value, groups) for name, value in shared.items()},
            per_row={name: _join([part.per_row[name] for part in parts]) for name in first.per_row},
            **fields,
        )


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """N rows to be sampled token by token: the first turn of each, or a further one."""

    prompts: tuple[Int[Tensor, "L"], ...]
    """Token ids of each prompt."""
    owners: Int[Tensor, "N"]
    """Row to index into ``prompts``."""
    addresses: tuple[tuple[int, int], ...]
    """Draw and sample number of each row, which address its random numbers."""
    starts: tuple[int, ...] = ()
    """Tokens that the policy sampled in each row before; empty in the first turn."""
    prefixes: tuple[Int[Tensor, "T"], ...] | None = None
    """Tokens of each row after its prompt; None in the first turn."""
    limits: Int[Tensor, "N"] | None = None
    """Maximum tokens of each row; None: ``sampling.max_actions``."""
    kept: tuple[Any, ...] | None = None
    """What the policy has kept of each row (None: nothing) and may take; None where no further turn
    may follow."""


@dataclass(frozen=True, eq=False)
class Generated:
    """The sampled tokens of N rows."""

    tokens: Int[Tensor, "N T"]
    logprobs: Float[Tensor, "N T"]
    lengths: Int[Tensor, "N"]
    finish: tuple[Finish, ...]
    versions: Int[Tensor, "N T"] | None = None
    """Publish count of the weights behind each token; None where the engine stamps whole
    rollouts."""
    kept: tuple[Any, ...] | None = None
    """What is kept of each row for its next turn; see ``TokenBatch``."""


# Tests empty it, so that the CPU stands for a device that has to be waited for.
AT_ONCE = frozenset({"cpu"})
"""Kinds of devices whose numbers can be read without waiting for work that was queued before. On
others, statistics are read together at the end of an update."""

COLUMN_FIELDS = ("actions", "mask", "sampler_logprobs", "policy_version")
_ROW_FIELDS = (*COLUMN_FIELDS, "lengths", "completions", "temperature", "finish")


def _widened(x: Tensor, columns: int) -> Tensor:
    """Pad [B, T, *E] with zeros to this number of columns."""
    widths = (0, 0) * (x.ndim - 2) + (0, columns - x.shape[1])
    return nn.functional.pad(x, widths)


def _pick(value: Any, index: Tensor) -> Any:
    return value[index] if isinstance(value, Tensor) else tuple(value[i] for i in index.tolist())


def _join(values: Sequence[Any]) -> Any:
    return torch.cat(list(values)) if isinstance(values[0], Tensor) else tuple(chain(*values))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to a tensor, or to each one of a record; None stays None."""
    if isinstance(value, Tensor):
        return function(value)
    if value is None:
        return None
    return replace(value, **{name: map_tensors(x, function) for name, x in vars(value).items()})


@dataclass(frozen=True, eq=False)
class Gaussian:
    """A policy's diagonal normal; the only owner of the noise scale."""

    mean: Tensor
    """[b, t, *E]"""
    std: Tensor
    """[b, t], or like ``mean``."""


@dataclass(frozen=True, eq=False)
class Likelihood:
    """A policy's evaluation of rollouts. Everything but ``logprobs`` is computed on request."""

    logprobs: Float[Tensor, "b t"]
    """Joint nats of each action, with gradient. Densities are summed in float64 over event
    dimensions."""
    entropy: Float[Tensor, "b t"] | None = None
    gaussian: Gaussian | None = None
    values: Float[Tensor, "b t"] | None = None
    """From a value head on the policy's trunk."""
    output: Any = None
    """The deterministic prediction that supervised losses read."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows and a range of columns that one forward covers."""

    rows: Int[Tensor, "b"]
    cols: slice
    is_repeat: bool = False
    """Whether it is run at zero weight, since sharded weights need as many forwards on each
    rank."""

    def of(self, x: Tensor) -> Tensor:
        """Select the micro-batch, ``[b, t, ...]``, of a ``[B, T, ...]`` tensor."""
        return x[self.rows][
            :, self.cols
        ]  # [b, t, ...]; cols is a slice, so that the second step copies nothing


@dataclass(frozen=True, eq=False)
class Before:
    """Evaluations of a step's rows from before its first update; None for what is not needed."""

    old_logprobs: Float[Tensor, "B T"] | None = None
    """None: every row enters exactly one update, whose detached log-probs are the old ones."""
    old_gaussian: Gaussian | None = None
    """Of a Gaussian policy, with its old log-probs."""
    ref: Likelihood | None = None
    """None with a reference: it is evaluated inside the micro-batch."""
    old_values: Float[Tensor, "B T"] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainBatch(Before):
    """Rows of a step or a minibatch, as ``learn`` trains on them."""

    rollouts: Rollouts | None
    demos: Rollouts | None = None
    """Demonstrations for supervised terms."""
    rewards: Float[Tensor, "B"]
    """NaN: not scored, or of a slot that no round of sampling filled."""
    loss_mask: Bool[Tensor, "B T"]
    """``mask`` without rows that are unscored, ended in an error, or are masked for truncation."""
    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None = None
    weights: Float[Tensor, "B T"] | None = None
    """Of each action in the loss, over the minibatch of all ranks; set by ``update``."""

    def take(self, rows: Int[Tensor, "b"]) -> TrainBatch:
        """Select rows of everything but the demonstrations, which have rows of their own."""
        rollouts = None if self.rollouts is None else self.rollouts.take(rows)
        own = map_tensors(replace(self, rollouts=None, demos=None), lambda x: x[rows])
        return replace(own, rollouts=rollouts, demos=self.demos)


@dataclass(frozen=True)
class Stat:
    """Count, sum, sum of squares, minimum and maximum: adds over micro-batches, ranks and steps."""

    count: float = 0.0
    sum: float = 0.0
    sum_sq: float = 0.0
    min: float = float("inf")
    max: float = float("-inf")
    pending: tuple[Float[Tensor, "5"], ...] = ()
    """Further parts on an accelerator, in the order of the fields above, which ``read`` adds to
    them."""

    @staticmethod
    def of(x: Tensor, where: Tensor | None = None) -> Stat:
        """Compute the statistics of ``x``, where ``where`` is True if given; on an accelerator they
        are pending."""
        x = x.detach()
        if x.device.type in AT_ONCE:
            kept = x if where is None else x[where]
            kept = kept.double()  # sums of bfloat16 would lose small terms
            if kept.numel() == 0:  # aminmax refuses an empty tensor
                return Stat()
            sums = torch.stack([kept.sum(), kept.square().sum(), *kept.aminmax()])
            return Stat(float(kept.numel()), *sums.tolist())
        if x.numel() == 0:
            return Stat()
        # Masked entries are replaced: indexing by the mask would wait for the device
        x = x.double()
        mask = torch.ones_like(x, dtype=torch.bool)
        if where is not None:
            mask = where.reshape(*where.shape, *[1] * (x.ndim - where.ndim)).expand_as(x)
        sums = torch.where(mask, x, 0)
        ends = [torch.where(mask, x, torch.inf).amin(), torch.where(mask, x, -torch.inf).amax()]
        numbers = [mask.sum().to(x), sums.sum(), sums.square().sum(), *ends]
        return Stat(pending=(torch.stack(numbers),))

    def __add__(self, other: Stat) -> Stat:
        sums = (self.count + other.count, self.sum + other.sum, self.sum_sq + other.sum_sq)
        return Stat(
            *sums, min(self.min, other.min), max(self.max, other.max), self.pending + other.pending
        )

    @staticmethod
    def read(stats: Mapping[str, Stat]) -> dict[str, Stat]:
        """Add what is pending, in one transfer from the device."""
        pending = [part for stat in stats.values() for part in stat.pending]
        numbers = iter(torch.stack(pending).tolist() if pending else ())
        read = dict[str, Stat]()
        for name, stat in stats.items():
            own = replace(stat, pending=())
            for _ in stat.pending:
                own += Stat(*next(numbers))
            read[name] = own
        return read

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else float("nan")

    @property
    def ess_frac(self) -> float:
        """Effective sample size of weights, (sum w)^2 / sum w^2, as a share of their number (Kong
        1992)."""
        return self.sum**2 / (self.count * self.sum_sq) if self.sum_sq else float("nan")

    @property
    def std(self) -> float:
        """Population standard deviation (ddof 0)."""
        if not self.count:
            return float("nan")
        # rounding can make the variance of equal numbers slightly negative
        return max(self.sum_sq / self.count - self.mean**2, 0.0) ** 0.5
