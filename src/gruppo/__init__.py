"""gruppo: GRPO and PPO for anything that samples. Names are loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gruppo.platforms import spin_briefly_beside_other_jobs

__version__ = "0.2.0"

_NAMES = {
    "gruppo.api": "Trainer train resume",
    "gruppo.trainer.loop": "Stopped",
    "gruppo.trainer.callbacks": "Callback Step",
    "gruppo.inference": "load_policy",
    "gruppo.config.schema": "Config EvaluationConfig OptimConfig RolloutConfig SavingConfig Stage",
    "gruppo.protocols": "Policy Modality Engine",
    "gruppo.data.source": "IndexedSource",
    "gruppo.core.objective": "Objective PRESETS",
    "gruppo.losses": "GRPOLoss PPOLoss compute_gae",
    "gruppo.modalities.text": "TextPolicy from_pretrained from_transformers from_module",
    "gruppo.modalities.diffusion": "DenoiserPolicy DiffusionSampling load_denoiser load_diffusers",
    "gruppo.modalities.restoration": "RestorationPolicy open_restorer load_restorer",
    "gruppo.environments": "Environment converse",
    "gruppo.types": "Gaussian Likelihood MicroBatch Prompt Request Rollouts Sampling GruppoError",
    "gruppo.testing": "check_policy check_reward check_engine",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from gruppo.api import Trainer, resume, train
    from gruppo.config.schema import (
        Config,
        EvaluationConfig,
        OptimConfig,
        RolloutConfig,
        SavingConfig,
        Stage,
    )
    from gruppo.core.objective import PRESETS, Objective
    from gruppo.data.source import IndexedSource
    from gruppo.environments import Environment, converse
    from gruppo.inference import load_policy
    from gruppo.losses import GRPOLoss, PPOLoss, compute_gae
    from gruppo.modalities.diffusion import (
        DenoiserPolicy,
        DiffusionSampling,
        load_denoiser,
        load_diffusers,
    )
    from gruppo.modalities.restoration import RestorationPolicy, load_restorer, open_restorer
    from gruppo.modalities.text import TextPolicy, from_module, from_pretrained, from_transformers
    from gruppo.protocols import Engine, Modality, Policy
    from gruppo.testing import check_engine, check_policy, check_reward
    from gruppo.trainer.callbacks import Callback, Step
    from gruppo.trainer.loop import Stopped
    from gruppo.types import (
        Gaussian,
        GruppoError,
        Likelihood,
        MicroBatch,
        Prompt,
        Request,
        Rollouts,
        Sampling,
    )

spin_briefly_beside_other_jobs()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'gruppo' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
