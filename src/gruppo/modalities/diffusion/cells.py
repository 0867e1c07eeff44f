"""The actions of a piece that the policy chose, in one line, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gruppo.modalities.diffusion.network import Asked
from gruppo.protocols import Outputs
from gruppo.types import Gaussian, Likelihood, MicroBatch, Rollouts


@dataclass(frozen=True, eq=False)
class Cells:
    """N actions: their rows and columns in the rollouts, and their places in the piece."""

    row: Int[Tensor, "N"]
    column: Int[Tensor, "N"]
    group: Int[Tensor, "N"]
    """A number for each group and column."""
    place: tuple[Tensor, Tensor]
    shape: tuple[int, int]

    @classmethod
    def of(cls, rollouts: Rollouts, micro_batch: MicroBatch, device: torch.device) -> Cells:
        mask = micro_batch.of(rollouts.mask)
        b, t = mask.shape
        row, column = mask.nonzero(as_tuple=True)
        place = (row.to(device), column.to(device))
        row, column = micro_batch.rows[row], column + (micro_batch.cols.start or 0)
        return cls(row, column, rollouts.group_ids[row] * rollouts.mask.shape[1] + column, place, (b, t))

    def __len__(self) -> int:
        return len(self.row)

    def spread(self, numbers: Tensor, filling: float = 0.0) -> Float[Tensor, "b t ..."]:
        """[N, ...] to [b, t, ...]."""
        empty = numbers.new_full((*self.shape, *numbers.shape[1:]), filling)
        return empty.index_put(self.place, numbers)

    def condition(self, rollouts: Rollouts) -> Tensor | None:
        """[N, ...]; None of a network without one."""
        shared = rollouts.shared.get("condition")
        return None if shared is None else shared[rollouts.group_ids[self.row]].to(self.place[0].device)

    def asked(self, rollouts: Rollouts, times: Float[Tensor, "N"]) -> Asked:
        """The states before the actions."""
        before = rollouts.actions[self.row, (self.column - 1).clamp(min=0)]
        is_first = (self.column == 0).reshape(-1, *[1] * (before.ndim - 1))
        x = torch.where(is_first, rollouts.per_row["first"][self.row], before).to(times.device)
        return Asked(x, times, self.condition(rollouts), rollouts.per_row["guidance"][self.row])

    def nothing_said(self, shape: tuple[int, ...], outputs: Outputs) -> Likelihood:
        """Where the policy chose nothing."""
        none = self.spread(torch.zeros(0, dtype=torch.float64, device=self.place[0].device))
        events = none.new_zeros(*self.shape, *shape)
        return Likelihood(
            none,
            none if "entropy" in outputs or "entropy_value" in outputs else None,
            Gaussian(events, torch.ones_like(none)) if "gaussian" in outputs else None,
            none.float() if "values" in outputs else None,
            events if "output" in outputs else None,
        )
