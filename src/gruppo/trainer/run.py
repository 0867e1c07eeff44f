"""The components and the state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gruppo.config.schema import Config
from gruppo.core.surrogates import OwnSurrogate
from gruppo.distributed.sharding import local
from gruppo.environments import Environment
from gruppo.protocols import (
    Critic,
    DescriptionMixin,
    Engine,
    MemoryMixin,
    Policy,
    PromptSource,
    Reference,
    StatisticsMixin,
    Tracker,
    digest,
    part,
)
from gruppo.rewards.answers import TrainerState
from gruppo.trainer.recorder import Recorder
from gruppo.trainer.signals import Stopper
from gruppo.trainer.stages import StageSchedule
from gruppo.types import GruppoError, Sampling


@dataclass
class State:
    """What changes from step to step; with weights, optimizer and data positions, all that a
    checkpoint holds."""

    step: int = 0
    """Complete steps."""
    version: int = 0
    """Publish count of the weights."""
    totals: dict[str, float] = field(default_factory=lambda: {"tokens": 0.0, "rollouts": 0.0})
    skipped_updates: int = 0
    """Consecutive updates whose gradient was not finite."""
    unscored_steps: int = 0
    """Consecutive steps in which no row was scored."""
    idle_steps: int = 0
    """Consecutive steps without a gradient."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    running: Mapping[str, Any] = field(default_factory=dict)
    """Moving statistics of the rewards, by reward; replaced, never changed in place."""
    token_budget: int = 0
    """Units of a micro-batch since memory ran out; 0 until then. See ``forward.token_budget``."""
    best: dict[str, float] | None = None
    """Step and value of the best metric that back_off watches; replaced, never changed in place."""


@dataclass
class Run:
    """The components of a run, built once, and its ``state``. What a stage sets for a step is in
    ``StepParams``."""

    config: Config
    policy: Policy
    engine: Engine
    source: PromptSource
    rewards: Any
    optimizer: torch.optim.Optimizer
    reference: Reference | None = None
    reference_sha256: str | None = None
    """Digest of the reference's frozen weights, taken before the first update."""
    reference_shards_sha256: str | None = None
    """Of this rank's shards of them, where they are sharded."""
    first_weights_sha256: str | None = None
    """Digest of the policy's weights before training, where they are sharded since."""
    critic: Critic | None = None
    validation: PromptSource | None = None
    """Source of the held-out prompts, if it is not ``source``."""
    demos: PromptSource | None = None
    """Source of demonstrations, where some stage learns from them."""
    environment: Environment | None = None
    """What replies to the policy in conversations of several turns."""
    sampling: Sampling = None  # type: ignore[assignment]
    """Sampling where no stage sets a temperature; by default that of ``config.rollout``."""
    own_surrogate: OwnSurrogate | None = None
    """The function that ``objective.surrogate`` names."""
    stage_schedule: StageSchedule = field(init=False)
    display: DescriptionMixin = field(init=False)
    """The policy, or the neutral defaults; likewise the next two."""
    statistics: StatisticsMixin = field(init=False)
    memory: MemoryMixin = field(init=False)
    trackers: list[Tracker] = field(default_factory=list)
    stopper: Stopper = field(default_factory=Stopper)
    state: State = field(default_factory=State)
    recorder: Recorder = field(default_factory=Recorder)
    """Of the current step."""
    callbacks: Any = None
    """``trainer.callbacks.Callbacks``; None where there are none."""
    is_stopped: bool = False
    """Whether a callback or the caller has ended the run."""

    def __post_init__(self) -> None:
        self.sampling = self.sampling or self.config.rollout.sampling
        self.stage_schedule = StageSchedule(self.config, self.sampling)
        self.display = part(self.policy, DescriptionMixin)
        self.statistics = part(self.policy, StatisticsMixin)
        self.memory = part(self.policy, MemoryMixin)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser trains, in its order: the policy's, then the critic's."""
        return list(trained(self.policy.module, self.critic).values())

    @property
    def parameter_names(self) -> list[str]:
        return list(trained(self.policy.module, self.critic))

    def reference_digest(self) -> str | None:
        """Return the SHA-256 of the reference's frozen weights, taken before the first update; None
        without any."""
        if self.reference is not None and not self.reference_sha256:
            frozen = self.reference.frozen_state_dict()
            self.reference_sha256 = digest(frozen) if frozen else None
        return self.reference_sha256

    def check_reference(self) -> None:
        """Stop a run whose frozen weights are no longer those of its start. Of sharded ones, each
        rank reads its shards."""
        then = self.reference_shards_sha256 or self.reference_sha256
        if self.reference is None or then is None:
            return
        frozen = self.reference.frozen_state_dict()
        now = digest({name: local(tensor) for name, tensor in frozen.items()})
        if now != then:
            raise GruppoError(f"""step {self.state.step}: the frozen weights of the reference have
                changed since the start (SHA-256 {now[:12]}, was {then[:12]}), so the KL was to
                something else. Nothing was saved at this step; every save before it is kept.
                Something other than gruppo writes to the model: find it, then resume.""")

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done, the gate of the last stage has opened, or a callback has
        stopped the run."""
        return (
            self.state.step >= self.config.steps or self.stage_schedule.is_over or self.is_stopped
        )

    @property
    def trainer_state(self) -> TrainerState:
        """Progress for reward functions. As in TRL, an epoch counts the prompts of steps, not those
        resampled."""
        step, size = self.state.step, self.source.epoch_size
        epoch = step * self.config.rollout.prompts / size if size else None
        return TrainerState(step, self.config.steps, epoch)

    def log(self, metrics: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(self.state.step, metrics)


def trained(policy: nn.Module, critic: Critic | None) -> dict[str, nn.Parameter]:
    """Return trained parameters by name; those of the critic are named ``critic:...``."""
    named = dict(policy.named_parameters())
    if critic is not None:
        for name, parameter in critic.module.named_parameters():
            named[f"critic:{name}"] = parameter
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}
