"""A network with its schedule: from a state to the distribution of the next one, for sampling and scoring alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gruppo.modalities.diffusion.encoders import ConditionEncoder, PixelCodec
from gruppo.modalities.diffusion.schedules import NoiseSchedule
from gruppo.modalities.diffusion.transitions import PredictionType, StepLevels, Transition, split_prediction
from gruppo.types import Gaussian, GruppoError, MicroBatch, Rollouts

MIN_ALPHA = 1e-3
"""Least alpha at which a noise prediction determines x0 well enough: log-ratios stay within 1e-5 nats per dimension."""


@dataclass(frozen=True, eq=False)
class DenoiserInputs:
    """N states to step from; ``guidance`` is on the CPU, the others are on the network's device."""

    x: Float[Tensor, "N ..."]
    times: Float[Tensor, "N"]
    condition: Tensor | None
    """[N, ...]"""
    guidance: Float[Tensor, "N"]
    """Classifier-free guidance scale; at 1 the network is evaluated once, else twice."""


class ModuleCall:
    """How the network is called: module(x, times, condition), all in the module's dtype."""

    def predict(self, module: nn.Module, x: Tensor, times: Tensor, condition: Tensor | None) -> Float[Tensor, "N ..."]:
        """Prediction of the shape of x. Inputs are float32 or wider; this method converts them."""
        dtype = next(module.parameters()).dtype
        return module(x.to(dtype), times.to(dtype), condition)

    def pool(self, output: Any) -> Float[Tensor, "N F"]:
        """Features of each row from the output of the middle submodule, [N, F, ...]: the mean over space."""
        return output.flatten(2).mean(dim=-1) if output.ndim > 2 else output


@dataclass(frozen=True, eq=False)
class Denoiser:
    """A module and what it was trained for."""

    module: nn.Module
    shape: tuple[int, ...]
    """Of a state."""
    predicts: PredictionType
    schedule: NoiseSchedule
    condition: ConditionEncoder | None
    codec: PixelCodec
    middle: str
    """Name of the submodule whose pooled output a value head reads, or ""."""
    call: ModuleCall

    def __post_init__(self) -> None:
        names = dict(self.module.named_modules())
        if self.middle and self.middle not in names:
            raise GruppoError(
                f"the network has no submodule {self.middle!r} to read features from; it has "
                f"{', '.join(list(names)[1:9])}."
            )
        if self.predicts not in get_args(PredictionType):
            known = ", ".join(map(repr, get_args(PredictionType)))
            raise GruppoError(f"predicts={self.predicts!r} is not one of {known}. Use 'x0'.")
        if self.predicts != "noise":
            return
        alpha = float(self.schedule.level(self.schedule.times(1)[:1])[0])
        if alpha < MIN_ALPHA:
            raise GruppoError(
                f"predicts='noise' with a schedule that starts at alpha={alpha:.1g}: x0 is what remains of x without "
                f"its noise, divided by alpha, and so are rounding errors. It needs alpha of at least {MIN_ALPHA:g}. "
                "Train the network to predict 'v', 'velocity' or 'x0', or use DiffusionSchedule('linear')."
            )

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def encode(self, inputs: Sequence[object]) -> Tensor | None:
        """Conditions [P, ...] of the inputs of prompts; None for a network without conditions."""
        return None if self.condition is None else torch.stack([self.condition.encode(one) for one in inputs])

    def dummy_inputs(self) -> DenoiserInputs:
        """One state of zeros, to try the network with."""
        condition = None if self.condition is None else self.condition.unconditional()[None].to(self.device)
        zeros = torch.zeros(1, *self.shape, device=self.device)
        return DenoiserInputs(zeros, torch.ones(1, device=self.device), condition, torch.ones(1))

    def levels(self, counts: Int[Tensor, "N"], columns: Int[Tensor, "N"]) -> tuple[StepLevels, Float[Tensor, "N"]]:
        """Levels of step ``columns`` of samplers with ``counts`` steps, and the time that the network is given."""
        times = torch.zeros(2, len(columns), dtype=torch.float64)
        for count in counts.unique().tolist():
            rows = counts == count
            times[:, rows] = self.schedule.times(count)[torch.stack([columns[rows], columns[rows] + 1])]
        levels = (*self.schedule.level(times[0]), *self.schedule.level(times[1]))
        return StepLevels(*(level.to(self.device) for level in levels)), times[0].to(self.device)

    def step(
        self,
        inputs: DenoiserInputs,
        levels: StepLevels,
        transition: Transition,
        groups: Int[Tensor, "N"],
        *,
        features: bool = False,
    ) -> tuple[Gaussian, Float[Tensor, "N ..."], Float[Tensor, "N F"]]:
        """Distribution of the next states (mean [N, *E], std [N]), predicted x0, and features as ``predict``."""
        prediction, pooled = self.predict(inputs, groups, features=features)
        x0, noise = split_prediction(inputs.x, prediction, levels, self.predicts)
        return transition(inputs.x, x0, noise, levels), x0, pooled

    def features(self, inputs: DenoiserInputs, groups: Int[Tensor, "N"]) -> Float[Tensor, "N F"]:
        """Features of the states with their conditions, for a value head."""
        return self.predict(replace(inputs, guidance=torch.ones_like(inputs.guidance)), groups, features=True)[1]

    def predict(
        self, inputs: DenoiserInputs, groups: Int[Tensor, "N"], *, features: bool = False
    ) -> tuple[Float[Tensor, "N ..."], Float[Tensor, "N F"]]:
        """Guided prediction for each state, and the features under its condition (width 0 unless asked for).

        s + (g - 1) (s - n), where s has the condition and n has none (Ho & Salimans 2022, arXiv 2207.12598, eq. 6,
        whose 1 + w is g). Rows of equal number in ``groups`` have the same condition. Those equal to the bit, which
        shared noise has kept in one state, are evaluated once.
        """
        # Evaluate one row for each set of equal rows; ``answers`` says whose result is each row's.
        rows = torch.arange(len(groups))
        _, number = groups.unique(return_inverse=True)
        first = torch.full((len(rows),), len(rows)).scatter_reduce(0, number, rows, "amin")[number]
        at = first.to(inputs.x.device)
        is_same = (inputs.x == inputs.x[at]).flatten(1).all(dim=1) & (inputs.times == inputs.times[at])
        is_same = is_same.cpu() & (inputs.guidance == inputs.guidance[first])
        kept, answers = torch.where(is_same, first, rows).unique(return_inverse=True)
        at, answers = kept.to(inputs.x.device), answers.to(inputs.x.device)
        x, times, guidance = inputs.x[at], inputs.times[at], inputs.guidance[kept]
        condition = None if inputs.condition is None else inputs.condition[at]

        # Append the guided rows once more, without their conditions.
        n, shape, guided = len(x), x.shape, (guidance != 1).nonzero()[:, 0].to(x.device)
        if len(guided):
            assert condition is not None and self.condition is not None
            empty = self.condition.unconditional().to(condition)
            x, times = torch.cat([x, x[guided]]), torch.cat([times, times[guided]])
            condition = torch.cat([condition, empty.expand(len(guided), *empty.shape)])

        if features and not self.middle:
            raise GruppoError(
                "a critic reads the output of the network's middle, and this policy names no submodule for it. Create "
                "it with middle='NAME' of a submodule whose output is [N, F, ...]."
            )
        outputs: list[Any] = []
        middle = self.module.get_submodule(self.middle)
        with middle.register_forward_hook(lambda *args: outputs.append(args[2])) if features else nullcontext():
            prediction = self.call.predict(self.module, x, times, condition)
        if not isinstance(prediction, Tensor) or prediction.shape != x.shape:
            got = list(prediction.shape) if isinstance(prediction, Tensor) else type(prediction).__name__
            raise GruppoError(
                f"the network returned {got} for states of shape {list(x.shape)}; it needs one number for each. "
                "Return a tensor of the shape of x."
            )
        pooled = self.call.pool(outputs[0]) if features else prediction.new_zeros(len(x), 0)
        if len(guided):
            scale = (guidance.to(prediction)[guided] - 1).reshape(-1, *[1] * (len(shape) - 1))
            conditional = prediction[:n]
            prediction = conditional.index_add(0, guided, scale * (conditional[guided] - prediction[n:]))
        return prediction[answers], pooled[:n][answers]


@dataclass(frozen=True, eq=False)
class StepSelection:
    """The N steps of a micro-batch that the policy chose, flattened to one dimension."""

    row: Int[Tensor, "N"]
    column: Int[Tensor, "N"]
    group: Int[Tensor, "N"]
    """A number for each group and column."""
    place: tuple[Tensor, Tensor]
    """Row and column in the micro-batch."""
    shape: tuple[int, int]
    """Of the micro-batch."""

    @classmethod
    def of(cls, rollouts: Rollouts, micro_batch: MicroBatch, device: torch.device) -> StepSelection:
        mask = micro_batch.of(rollouts.mask)
        row, column = mask.nonzero(as_tuple=True)
        place = (row.to(device), column.to(device))
        row, column = micro_batch.rows[row], column + (micro_batch.cols.start or 0)
        group = rollouts.group_ids[row] * rollouts.mask.shape[1] + column
        return cls(row, column, group, place, (mask.shape[0], mask.shape[1]))

    def scatter(self, values: Tensor, fill: float = 0.0) -> Float[Tensor, "b t ..."]:
        """[N, ...] to the shape [b, t, ...] of the micro-batch."""
        empty = values.new_full((*self.shape, *values.shape[1:]), fill)
        return empty.index_put(self.place, values)

    def inputs(self, rollouts: Rollouts, times: Float[Tensor, "N"]) -> DenoiserInputs:
        """The states before the steps, as they were sampled from."""
        before = rollouts.actions[self.row, (self.column - 1).clamp(min=0)]
        is_first = (self.column == 0).reshape(-1, *[1] * (before.ndim - 1))
        x = torch.where(is_first, rollouts.per_row["first"][self.row], before).to(times.device)
        condition = rollouts.shared.get("condition")
        if condition is not None:
            condition = condition[rollouts.group_ids[self.row]].to(times.device)
        return DenoiserInputs(x, times, condition, rollouts.per_row["guidance"][self.row])
