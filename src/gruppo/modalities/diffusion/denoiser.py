"""A network with its schedule: from a state to the distribution of the next one, for sampling and
scoring alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gruppo.core.images import quantize
from gruppo.modalities.diffusion.schedules import (
    NoiseSchedule,
    PredictionType,
    StepLevels,
    broadcast,
    split_prediction,
)
from gruppo.protocols import Outputs, device_of
from gruppo.types import GruppoError, Likelihood, MicroBatch, Rollouts

Weighting = Literal["uniform", "clean"]
"""Of the denoising loss: 1, or 1 / (sigma^2 + 0.05)."""


class ConditionEncoder(Protocol):
    """From a prompt's inputs to the condition that the network reads beside x and t."""

    dropped: float
    """Fraction of demonstrations trained without their condition; 0 for a network without
    guidance."""
    unconditional: Tensor
    """The condition that stands for none, of the same shape as the others."""

    def encode(self, inputs: Any) -> Tensor:
        """Condition of one prompt; all have the same shape. Raises GruppoError for inputs that it
        cannot encode."""


class ClassLabels:
    """Class numbers of a class-conditional network, by number or name; the number after the last
    means no class."""

    def __init__(self, classes: int | Sequence[str], *, dropped: float = 0.0) -> None:
        names = [str(n) for n in range(classes)] if isinstance(classes, int) else list(classes)
        if not names or len(set(names)) < len(names):
            raise GruppoError(
                f"classes={classes!r:.80} needs at least one name, and no name twice. Change the "
                f"list."
            )
        if not 0 <= dropped < 1:
            raise GruppoError(
                f"dropped={dropped} is out of range; it needs 0 <= dropped < 1. Use 0.1 for "
                f"guidance."
            )
        self.names, self.dropped, self.unconditional = (
            tuple(names),
            dropped,
            torch.tensor(len(names)),
        )

    def encode(self, inputs: Any) -> Tensor:
        """Class number as a long scalar []."""
        number = (
            self.names.index(inputs) if isinstance(inputs, str) and inputs in self.names else inputs
        )
        if (
            isinstance(number, bool)
            or not isinstance(number, int)
            or not 0 <= number < len(self.names)
        ):
            known = ", ".join(map(repr, self.names[:12])) + (
                ", ..." if len(self.names) > 12 else ""
            )
            raise GruppoError(
                f"{inputs!r:.80} is no class of this network; it knows {known}. Use a name or its "
                f"index."
            )
        return torch.tensor(number)


@dataclass
class PixelCodec:
    """States are the images themselves, in [-1, 1]. A latent diffusion model overrides both
    methods."""

    image_shape: tuple[int, ...]
    """[C, H, W]"""

    def encode(self, image: Float[Tensor, "C H W"]) -> Tensor:
        """State of an image in [0, 1]; float32, on the CPU."""
        return (image.float() * 2 - 1).cpu()

    def decode(self, states: Float[Tensor, "B ..."]) -> Float[Tensor, "B C H W"]:
        """Images in [0, 1], rounded to the 8 bits of a file, so that a reward reads what a viewer
        sees."""
        return quantize((states + 1) / 2)


# --- the network ---


class ModuleCall:
    """How the network is called: module(x, times, condition), all in the module's dtype."""

    # Only the module and its inputs: a reference and a critic call other weights in the same way.
    def predict(
        self, module: nn.Module, x: Tensor, times: Tensor, condition: Tensor | None
    ) -> Float[Tensor, "N ..."]:
        """Prediction of the shape of x. Inputs are float32 or wider; this method converts them."""
        dtype = next(module.parameters()).dtype
        return module(x.to(dtype), times.to(dtype), condition)

    def pool(self, output: Any) -> Float[Tensor, "N F"]:
        """Features of each row from the output of the middle submodule, [N, F, ...]: the mean over
        space."""
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

    def encode(self, inputs: Sequence[object]) -> Tensor | None:
        """Conditions [P, ...] of prompts' inputs; None for a network without conditions."""
        return (
            None
            if self.condition is None
            else torch.stack([self.condition.encode(one) for one in inputs])
        )

    def dummy_features(self) -> Float[Tensor, "1 F"]:
        """Features of a state of zeros, for their width and for what they depend on."""
        device, one = device_of(self.module), torch.ones(1)
        condition = (
            None if self.condition is None else self.condition.unconditional[None].to(device)
        )
        x, ids = torch.zeros(1, *self.shape, device=device), torch.zeros(1).long()
        return self.predict(x, one.to(device), condition, one, ids, features=True)[1]

    def levels(
        self, counts: Int[Tensor, "N"], columns: Int[Tensor, "N"]
    ) -> tuple[StepLevels, Float[Tensor, "N"]]:
        """Levels of step ``columns`` of samplers with ``counts`` steps, and the time that the
        network is given."""
        device = device_of(self.module)
        times = torch.zeros(
            2, len(columns), dtype=torch.float64
        )  # [2, N]: of the step, and of the next
        for count in counts.unique().tolist():
            rows = counts == count
            times[:, rows] = self.schedule.times(count)[
                torch.stack([columns[rows], columns[rows] + 1])
            ]
        levels = (*self.schedule.level(times[0]), *self.schedule.level(times[1]))
        return StepLevels(*(level.to(device) for level in levels)), times[0].to(device)

    def predict(
        self,
        x: Float[Tensor, "N ..."],
        times: Float[Tensor, "N"],
        condition: Tensor | None,
        guidance: Float[Tensor, "N"],
        ids: Int[Tensor, "N"],
        *,
        features: bool = False,
    ) -> tuple[Float[Tensor, "N ..."], Float[Tensor, "N F"]]:
        """Guided prediction for each state x [N, ...], and the features under its condition (width
        0 by default).

        s + (g - 1) (s - n), where s has the condition and n has none (Ho & Salimans 2022, arXiv
        2207.12598, eq. 6, whose 1 + w is g); with guidance 1 the network is evaluated once, else
        twice. Rows of one number in ``ids`` have the same condition. Those equal to the bit, which
        shared noise has kept in one state, are evaluated once. ``guidance`` and ``ids`` are on the
        CPU, the others on the network's device.
        """
        # Evaluate one row for each set of equal rows; ``answers`` says whose result is each row's.
        rows = torch.arange(len(ids))
        number = ids.unique(return_inverse=True)[1]
        first = torch.full((len(rows),), len(rows)).scatter_reduce(0, number, rows, "amin")[number]
        at = first.to(x.device)
        is_same = ((x == x[at]).flatten(1).all(dim=1) & (times == times[at])).cpu() & (
            guidance == guidance[first]
        )
        kept, answers = torch.where(is_same, first, rows).unique(return_inverse=True)
        at, answers = kept.to(x.device), answers.to(x.device)
        x, times, guidance = x[at], times[at], guidance[kept]  # [n, ...]
        condition = None if condition is None else condition[at]

        # Append the guided rows once more, without their conditions.
        n, shape, guided = len(x), x.shape, (guidance != 1).nonzero()[:, 0].to(x.device)
        if len(guided):
            # check_sampling has refused guidance of a network without conditions
            assert condition is not None and self.condition is not None
            empty = self.condition.unconditional.to(condition)
            x, times = torch.cat([x, x[guided]]), torch.cat([times, times[guided]])
            condition = torch.cat([condition, empty.expand(len(guided), *empty.shape)])

        if features and not self.middle:
            raise GruppoError("""a critic reads features of the network, and this policy names no
                submodule for it. Create it with middle='NAME' of a submodule whose output is [N, F,
                ...].""")
        outputs: list[Any] = []
        middle = self.module.get_submodule(self.middle)
        with (
            middle.register_forward_hook(lambda *args: outputs.append(args[2]))
            if features
            else nullcontext()
        ):
            prediction = self.call.predict(self.module, x, times, condition)
        if not isinstance(prediction, Tensor) or prediction.shape != x.shape:
            got = (
                list(prediction.shape)
                if isinstance(prediction, Tensor)
                else type(prediction).__name__
            )
            raise GruppoError(
                f"the network returned {got} for states {list(x.shape)}. Return a tensor of that "
                f"shape."
            )
        pooled = self.call.pool(outputs[0]) if features else prediction.new_zeros(len(x), 0)
        if len(guided):
            scale = (guidance.to(prediction)[guided] - 1).reshape(-1, *[1] * (len(shape) - 1))
            conditional = prediction[:n]
            prediction = conditional.index_add(
                0, guided, scale * (conditional[guided] - prediction[n:])
            )
        return prediction[answers], pooled[:n][answers]


class StepSelection:
    """The N steps of a micro-batch that the policy chose, flattened to one dimension."""

    def __init__(self, rollouts: Rollouts, micro_batch: MicroBatch, device: torch.device) -> None:
        mask = micro_batch.of(rollouts.mask)  # [b, t]
        row, column = mask.nonzero(as_tuple=True)  # [N]
        self.rollouts, self.shape = rollouts, mask.shape
        self.place = (row.to(device), column.to(device))  # in the micro-batch
        self.row, self.column = (
            micro_batch.rows[row],
            column + (micro_batch.cols.start or 0),
        )  # in the rollouts
        group = rollouts.group_ids[self.row]
        self.group = (
            group * rollouts.mask.shape[1] + self.column
        )  # a number for each group and column
        condition: Tensor | None = rollouts.shared.get("condition")
        self.condition = None if condition is None else condition[group].to(device)

    def scatter(self, values: Tensor, fill: float = 0.0) -> Float[Tensor, "b t ..."]:
        """[N, ...] to the shape [b, t, ...] of the micro-batch."""
        return values.new_full((*self.shape, *values.shape[1:]), fill).index_put(self.place, values)

    def inputs(
        self, denoiser: Denoiser
    ) -> tuple[StepLevels, tuple[Tensor, Tensor, Tensor | None, Tensor]]:
        """Levels of the steps, and x, times, conditions and guidance as they were sampled with."""
        per_row = self.rollouts.per_row
        levels, times = denoiser.levels(per_row["steps"][self.row], self.column)
        before = self.rollouts.actions[self.row, (self.column - 1).clamp(min=0)]
        is_first = (self.column == 0).reshape(-1, *[1] * (before.ndim - 1))
        x = torch.where(is_first, per_row["first"][self.row], before).to(times.device)
        return levels, (x, times, self.condition, per_row["guidance"][self.row])


def demonstration_likelihood(
    denoiser: Denoiser, steps: StepSelection, weighting: str, outputs: Outputs
) -> Likelihood:
    """Log-probs -w mean((prediction - truth)^2): of a normal with std (d / 2 w)^(1/2), without its
    constant."""
    device, row, per_row = device_of(denoiser.module), steps.row, steps.rollouts.per_row
    x0, e = (
        steps.rollouts.actions[row, 0].to(device).double(),
        per_row["first"][row].to(device).double(),
    )
    times, condition = per_row["level"][row], steps.condition
    alpha, sigma = (level.to(device) for level in denoiser.schedule.level(times))
    levels = StepLevels(
        alpha, sigma, torch.ones_like(alpha), torch.zeros_like(sigma)
    )  # the next level is clean data
    a, s = broadcast(alpha, x0), broadcast(sigma, x0)
    x = (
        a * x0 + s * e
    ).float()  # as the network would see it in sampling, whose states are float32
    if condition is not None and denoiser.condition is not None and denoiser.condition.dropped:
        is_dropped = per_row["dropped"][row].to(device).reshape(-1, *[1] * (condition.ndim - 1))
        condition = torch.where(
            is_dropped, denoiser.condition.unconditional.to(condition), condition
        )
    prediction, _ = denoiser.predict(
        x, times.to(device), condition, torch.ones(len(x)), torch.arange(len(x))
    )
    truth = {"noise": e, "x0": x0, "v": a * e - s * x0, "velocity": e - x0}[denoiser.predicts]
    error = (prediction.double() - truth).square().flatten(1).mean(dim=1)
    weight = 1 / (sigma.square() + 0.05) if weighting == "clean" else torch.ones_like(sigma)
    predicted_x0 = split_prediction(x, prediction, levels, denoiser.predicts)[0]
    output = steps.scatter(predicted_x0) if "output" in outputs else None
    return Likelihood(steps.scatter(-weight * error), output=output)
