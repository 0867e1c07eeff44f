"""A network with its noise schedule: from a state to the distribution of the next one, for sampling
and scoring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gruppo.core.images import quantize
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.modalities.diffusion.schedules import (
    ODE,
    TRANSITIONS,
    FlowSchedule,
    NoiseSchedule,
    PredictionType,
    StepLevels,
    broadcast,
    prediction_target,
    split_prediction,
)
from gruppo.protocols import device_of
from gruppo.types import Gaussian, GruppoError, MicroBatch, Rollouts

Weighting = Literal["uniform", "clean"]
"""Of the denoising loss: 1, or 1 / (sigma^2 + 0.05)."""
MIN_ALPHA = 1e-3
"""Least alpha at which a noise prediction determines x0 well enough: log-ratios stay within 1e-5
nats per dimension."""


class ConditionEncoder(Protocol):
    """From a prompt's inputs to the condition that the network reads besides x and t."""

    dropped: float
    """Fraction of demonstrations trained without their condition; 0 for a network without
    guidance."""
    unconditional: Tensor
    """The condition that stands for none, of the same shape as the others."""

    def encode(self, inputs: Any) -> Tensor:
        """Condition of one prompt; all have the same shape. Raises GruppoError for inputs that it
        cannot encode."""


class NoCondition:
    """Encoder for a network without conditions, which is called with None instead."""

    dropped = 0.0
    unconditional = torch.empty(0)

    def encode(self, inputs: Any) -> Tensor:
        return self.unconditional


class ClassLabels:
    """Class numbers of a class-conditional network, by number or name; the number after the last
    means no class."""

    def __init__(self, classes: int | Sequence[str], *, dropped: float = 0.0) -> None:
        names = map(str, range(classes)) if isinstance(classes, int) else classes
        self.names = tuple(names)
        self.dropped = dropped
        self.unconditional = torch.tensor(len(self.names))

    def encode(self, inputs: Any) -> Tensor:
        """Class number as a long scalar []."""
        if isinstance(inputs, str) and inputs in self.names:
            inputs = self.names.index(inputs)
        elif isinstance(inputs, str) and inputs.isdecimal():
            inputs = int(inputs)
        if type(inputs) is not int or not 0 <= inputs < len(self.names):
            known = ", ".join(map(repr, self.names))
            raise GruppoError(f"""{inputs!r:.80} is no class of this network; it knows {known:.200}.
                Use a name or its index.""")
        return torch.tensor(inputs)


class PixelCodec:
    """States are the images themselves, in [-1, 1]. A latent diffusion model overrides both
    methods."""

    def encode(self, image: Float[Tensor, "C H W"]) -> Tensor:
        """State of an image in [0, 1]; float32, on the CPU."""
        return (image.float() * 2 - 1).cpu()

    def decode(self, states: Float[Tensor, "B ..."]) -> Float[Tensor, "B C H W"]:
        """Images in [0, 1], rounded to the 8 bits of a file, so that a reward reads what a viewer
        sees."""
        return quantize((states + 1) / 2)


class ModuleCall:
    """How the network is called: module(x, times, condition), all in the module's dtype."""

    # Only the module and its inputs: a reference and a critic call other weights in the same way.
    def predict(
        self, module: nn.Module, x: Tensor, times: Tensor, condition: Tensor
    ) -> Float[Tensor, "N ..."]:
        """Prediction of the shape of x. Inputs are float32 or wider; this method converts them."""
        dtype = next(module.parameters()).dtype
        return module(x.to(dtype), times.to(dtype), condition if condition.numel() else None)

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
    predicts: PredictionType = "x0"
    schedule: NoiseSchedule = field(default_factory=FlowSchedule)
    condition: ConditionEncoder = field(default_factory=NoCondition)
    codec: PixelCodec = field(default_factory=PixelCodec)
    middle: str = ""
    """Name of the submodule whose pooled output a value head reads; "" is the module itself."""
    call: ModuleCall = field(default_factory=ModuleCall)

    def __post_init__(self) -> None:
        known = get_args(PredictionType)
        if self.predicts not in known:
            raise GruppoError(f"predicts={self.predicts!r} is not one of {known}. Use 'x0'.")
        alpha = float(self.schedule.level(self.schedule.times(1)[:1])[0])
        if self.predicts == "noise" and alpha < MIN_ALPHA:
            raise GruppoError(f"""predicts='noise' with a schedule that starts at alpha={alpha:.1g}
                divides rounding errors by it; it needs at least {MIN_ALPHA:g}. Predict 'v',
                'velocity' or 'x0', or use a DiffusionSchedule.""")

    def dummy_features(self) -> Float[Tensor, "1 F"]:
        """Features of a state of zeros, for their width and for what they depend on."""
        device = device_of(self.module)
        x = torch.zeros(1, *self.shape, device=device)
        condition = self.condition.unconditional[None].to(device)
        return self.predict(x, torch.ones(1, device=device), condition, features=True)[1]

    def levels(
        self, steps: int, columns: Int[Tensor, "N"]
    ) -> tuple[StepLevels, Float[Tensor, "N"]]:
        """Levels of step ``columns`` of a sampler with ``steps`` steps, and the times that the
        network is given."""
        times = self.schedule.times(steps)
        now = times[columns]
        levels = (*self.schedule.level(now), *self.schedule.level(times[columns + 1]))
        device = device_of(self.module)
        return StepLevels(*(level.to(device) for level in levels)), now.to(device)

    def step(
        self,
        x: Float[Tensor, "N ..."],
        columns: Int[Tensor, "N"],
        sampling: DiffusionSampling,
        condition: Tensor,
        ids: Int[Tensor, "N"],
        *,
        is_ode: bool = False,
        features: bool = False,
    ) -> tuple[Gaussian, Float[Tensor, "N F"]]:
        """The distribution of the state after step ``columns``, and features; sampling and scoring
        both call this, so that a ratio starts at 1."""
        levels, times = self.levels(sampling.steps, columns)
        prediction, pooled = self.predict(
            x, times, condition, sampling.guidance, ids, features=features
        )
        x0, noise = split_prediction(x, prediction, (levels.alpha, levels.sigma), self.predicts)
        transition = ODE if is_ode else TRANSITIONS[sampling.transition]
        return transition.step(x0, noise, levels, None if is_ode else sampling.eta), pooled

    def predict(
        self,
        x: Float[Tensor, "N ..."],
        times: Float[Tensor, "N"],
        condition: Tensor,
        guidance: float = 1.0,
        ids: Int[Tensor, "N"] | None = None,
        *,
        features: bool = False,
    ) -> tuple[Float[Tensor, "N ..."], Float[Tensor, "N F"]]:
        """Guided prediction for each state x [N, ...], and the features under its condition (width
        0 by default).

        s + (g - 1) (s - n), where s has the condition and n has none (Ho & Salimans 2022, arXiv
        2207.12598, eq. 6, whose 1 + w is g); with guidance 1 the network is evaluated once, else
        twice. Rows of one number in ``ids`` have the same condition. Those equal to the bit, which
        shared noise has kept in one state, are evaluated once.
        """
        answers: Any = slice(None)
        if ids is not None:
            kept, answers = distinct(x, times, ids)
            x, times, condition = x[kept], times[kept], condition[kept]
        rows = len(x)
        if guidance != 1:
            empty = self.condition.unconditional.to(condition).expand_as(condition)
            x, times = x.repeat(2, *[1] * (x.ndim - 1)), times.repeat(2)
            condition = torch.cat([condition, empty])
        outputs: list[Any] = []
        hook: Any = nullcontext()
        if features:
            middle = self.module.get_submodule(self.middle)
            hook = middle.register_forward_hook(lambda *args: outputs.append(args[2]))
        with hook:
            prediction = self.call.predict(self.module, x, times, condition)
        if prediction.shape != x.shape:
            raise GruppoError(f"""the network returned {list(prediction.shape)} for states
                {list(x.shape)}. Return a tensor of that shape.""")
        pooled = self.call.pool(outputs[0])[:rows] if features else prediction.new_zeros(rows, 0)
        if guidance != 1:
            conditional, unconditional = prediction.chunk(2)
            prediction = conditional + (guidance - 1) * (conditional - unconditional)
        return prediction[answers], pooled[answers]


def distinct(
    x: Float[Tensor, "N ..."], times: Float[Tensor, "N"], ids: Int[Tensor, "N"]
) -> tuple[Int[Tensor, "n"], Int[Tensor, "N"]]:
    """Indices of the rows to evaluate, and for each row the place of its answer among them.

    A row that equals the first one of its number is evaluated with it.
    """
    places: dict[int, int] = {}
    first = torch.tensor([places.setdefault(n, row) for row, n in enumerate(ids.tolist())])
    first = first.to(x.device)
    is_same = (x == x[first]).flatten(1).all(dim=1) & (times == times[first])
    rows = torch.arange(len(x), device=x.device)
    return torch.where(is_same, first, rows).unique(return_inverse=True)


# --- the steps of a micro-batch -------------------------------------------------------------------


class StepSelection:
    """The N steps of a micro-batch that the policy chose, flattened to one dimension."""

    def __init__(self, denoiser: Denoiser, rollouts: Rollouts, micro_batch: MicroBatch) -> None:
        mask = micro_batch.of(rollouts.mask)  # [b, t]
        row, column = mask.nonzero(as_tuple=True)  # [N]
        self.denoiser = denoiser
        self.rollouts = rollouts
        self.rows = micro_batch.rows
        self.shape = mask.shape
        self.device = device_of(denoiser.module)
        self.place = (row.to(self.device), column.to(self.device))  # in the micro-batch
        self.row = micro_batch.rows[row]  # in the rollouts
        self.column = column + (micro_batch.cols.start or 0)
        group = rollouts.group_ids[self.row]
        self.ids = group * rollouts.mask.shape[1] + self.column  # one for each group and column
        self.condition = rollouts.shared["condition"][group].to(self.device)

    def __len__(self) -> int:
        return len(self.row)

    def scatter(self, values: Tensor, fill: float = 0.0) -> Float[Tensor, "b t ..."]:
        """[N, ...] to the shape [b, t, ...] of the micro-batch."""
        return values.new_full((*self.shape, *values.shape[1:]), fill).index_put(self.place, values)

    def of_rows(self, values: Tensor) -> Float[Tensor, "N ..."]:
        """[B, ...] to each step, on the device."""
        return values[self.row].to(self.device)

    def states(self) -> Float[Tensor, "N ..."]:
        """The state before each step."""
        states = torch.cat([self.rollouts.per_row["first"][:, None], self.rollouts.actions], dim=1)
        return states[self.row, self.column].to(self.device)

    def sampling(self) -> DiffusionSampling:
        """How the rows were sampled; one forward scores rows of one kind."""
        kinds = self.rollouts.per_row["sampling"][self.rows]
        if (kinds != kinds[0]).any():
            raise GruppoError("these rollouts mix several samplings; evaluate each kind apart.")
        return DiffusionSampling.of_row(kinds[0])

    def normal(self, *, features: bool) -> tuple[Gaussian, Tensor | None]:
        """The distribution of each step, and features if requested."""
        if not len(self):  # no network is called with an empty batch
            mean = torch.zeros(0, *self.denoiser.shape, dtype=torch.float64, device=self.device)
            return Gaussian(mean, mean.new_zeros(0)), None
        states, sampling = self.states(), self.sampling()
        return self.denoiser.step(
            states, self.column, sampling, self.condition, self.ids, features=features
        )

    def features(self) -> Float[Tensor, "N F"] | None:
        """Features under the condition alone: one evaluation, whatever the guidance."""
        if not len(self):
            return None
        times = self.denoiser.levels(self.sampling().steps, self.column)[1]
        return self.denoiser.predict(
            self.states(), times, self.condition, ids=self.ids, features=True
        )[1]


def denoising_loss(steps: StepSelection, weighting: Weighting) -> Float[Tensor, "b t"]:
    """w mean((prediction - target)^2) over the dimensions of each demonstration; its negative is
    the log-prob of a normal with std (d / 2 w)^(1/2), without its constant."""
    denoiser, per_row = steps.denoiser, steps.rollouts.per_row
    x0 = steps.of_rows(steps.rollouts.actions[:, 0]).double()
    noise = steps.of_rows(per_row["first"]).double()
    times = per_row["level"][steps.row]
    level = denoiser.schedule.level(times)
    alpha, sigma = (broadcast(one, x0) for one in level)
    x = (alpha * x0 + sigma * noise).float()  # as the network would see it in sampling
    condition = steps.condition
    is_dropped = steps.of_rows(per_row["dropped"]).reshape(-1, *[1] * (condition.ndim - 1))
    empty = denoiser.condition.unconditional.to(condition)
    condition = torch.where(is_dropped, empty, condition)
    prediction, _ = denoiser.predict(x, times.to(x.device), condition)
    target = prediction_target(x0, noise, level, denoiser.predicts)
    error = (prediction.double() - target).square().flatten(1).mean(dim=1)
    weight = 1 / (sigma.flatten().square() + 0.05) if weighting == "clean" else 1.0
    return steps.scatter(weight * error)
