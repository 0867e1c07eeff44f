"""A run and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gruppo.config.schema import Config
from gruppo.environments import Environment
from gruppo.protocols import Critic, Engine, Policy, PromptSource, Reference, Tracker
from gruppo.trainer.signals import Stopper
from gruppo.trainer.stages import StageSchedule
from gruppo.types import Prompt, Sampling, Stat


@dataclass
class Run:
    """Everything that lives while a run runs. ``step`` counts the rounds that are complete."""

    config: Config
    policy: Policy
    engine: Engine
    source: PromptSource
    rewards: Any
    optimizer: torch.optim.Optimizer
    reference: Reference | None = None
    reference_sha256: str | None = None
    """Of the reference's frozen weights, from before the first update."""
    critic: Critic | None = None
    demos: PromptSource | None = None
    """Where demonstrations come from, where some stage learns from them."""
    sampling: Sampling = None  # type: ignore[assignment]
    """What is sampled from where no stage sets a temperature; without it, the config's of texts."""
    stage_schedule: StageSchedule = field(init=False)
    trackers: list[Tracker] = field(default_factory=list)
    stopper: Stopper = field(default_factory=Stopper)
    step: int = 0
    version: int = 0
    """Publish count of the weights."""
    totals: dict[str, float] = field(default_factory=lambda: {"tokens": 0.0, "rollouts": 0.0})
    skipped_updates: int = 0
    """Updates in a row whose gradient was not finite."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    running: Mapping[str, Any] = field(default_factory=dict)
    """Moving statistics of the rewards, by reward; replaced and never changed in place."""
    token_budget: int = 0
    """Tokens of a micro-batch once they are chosen, less where memory has run out; see ``memory.token_budget``."""
    has_run_out: bool = False
    """Whether memory ran out in this process, after which no micro-batch is made larger than ``token_budget``."""
    best: dict[str, float] | None = None
    """Step and value at which the metric that back_off watches was best; replaced and never changed in place."""
    known: dict[str, float] = field(default_factory=dict)
    """The last value of each metric that was logged since the run was started or resumed."""
    unscored_steps: int = 0
    """Steps in a row in which no row was scored."""
    example: Prompt | None = None
    """A prompt that was trained on since the run was started or resumed."""
    environment: Environment | None = None
    """What replies to the policy, where rows have several turns."""

    def __post_init__(self) -> None:
        self.sampling = self.sampling or self.config.rollout.sampling
        self.stage_schedule = StageSchedule(self.config, self.sampling)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser trains, in its order: the policy's, then the critic's."""
        return list(trained(self.policy.module, self.critic).values())

    @property
    def parameter_names(self) -> list[str]:
        return list(trained(self.policy.module, self.critic))

    def log(self, metrics: Mapping[str, float]) -> None:
        self.known.update(metrics)
        for tracker in self.trackers:
            tracker.log(self.step, metrics)

    def show(self, rows: list[dict[str, Any]]) -> None:
        for tracker in self.trackers:
            tracker.log_samples(self.step, rows)


def trained(policy: nn.Module, critic: Critic | None) -> dict[str, nn.Parameter]:
    """Parameters with a gradient, by names that no two share: an attribute's name cannot begin with ``critic:``."""
    modules = [("", policy)] if critic is None else [("", policy), ("critic:", critic.module)]
    return {
        prefix + name: parameter
        for prefix, module in modules
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def flatten(stats: Mapping[str, Stat], entries: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Metrics from statistics: ``entries`` maps a statistic to the metrics it gives, ``"mean:len/mean_actions"``."""
    metrics = {}
    for name, wanted in entries.items():
        if name in stats:
            for entry in wanted:
                what, metric = entry.split(":", 1)  # a reward may have one in its name
                is_known = stats[name].count or what in ("sum", "count")
                metrics[metric] = float(getattr(stats[name], what)) if is_known else float("nan")
    return metrics


def reduced(stats: Mapping[str, Stat]) -> dict[str, float]:
    """Metrics from statistics that are keyed ``<reduction>:<metric>``; those without a value are left out."""
    metrics = {}
    for name, stat in stats.items():
        reduction, _, metric = name.partition(":")
        if stat.count:
            metrics[metric] = float(getattr(stat, reduction))
    return metrics
