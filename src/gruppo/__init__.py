"""gruppo: GRPO and PPO for anything that samples. Names are loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "train": "gruppo.api",
    "resume": "gruppo.api",
    "Stopped": "gruppo.trainer.loop",
    "load_policy": "gruppo.inference",
    **dict.fromkeys(
        ("Config", "EvaluationConfig", "OptimConfig", "RolloutConfig", "SavingConfig", "Stage"), "gruppo.config.schema"
    ),
    "Policy": "gruppo.protocols",
    "Modality": "gruppo.protocols",
    "IndexedSource": "gruppo.data.source",
    "Objective": "gruppo.core.objective",
    "PRESETS": "gruppo.core.objective",
    "GRPOLoss": "gruppo.losses",
    "PPOLoss": "gruppo.losses",
    "compute_gae": "gruppo.losses",
    "TextPolicy": "gruppo.modalities.text",
    "from_pretrained": "gruppo.modalities.text",
    "from_transformers": "gruppo.modalities.text",
    "from_module": "gruppo.modalities.text",
    "DenoiserPolicy": "gruppo.modalities.diffusion",
    "DiffusionSampling": "gruppo.modalities.diffusion",
    "load_denoiser": "gruppo.modalities.diffusion",
    "load_diffusers": "gruppo.modalities.diffusion",
    "RestorationPolicy": "gruppo.modalities.restoration",
    "open_restorer": "gruppo.modalities.restoration",
    "load_restorer": "gruppo.modalities.restoration",
    "Environment": "gruppo.environments",
    "converse": "gruppo.environments",
    **dict.fromkeys(("Gaussian", "Likelihood", "MicroBatch", "Prompt"), "gruppo.types"),
    "Request": "gruppo.types",
    "Rollouts": "gruppo.types",
    "Sampling": "gruppo.types",
    "GruppoError": "gruppo.types",
    "check_policy": "gruppo.testing",
    "check_reward": "gruppo.testing",
    "check_engine": "gruppo.testing",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from gruppo.api import resume, train
    from gruppo.config.schema import Config, EvaluationConfig, OptimConfig, RolloutConfig, SavingConfig, Stage
    from gruppo.core.objective import PRESETS, Objective
    from gruppo.data.source import IndexedSource
    from gruppo.environments import Environment, converse
    from gruppo.inference import load_policy
    from gruppo.losses import GRPOLoss, PPOLoss, compute_gae
    from gruppo.modalities.diffusion import DenoiserPolicy, DiffusionSampling, load_denoiser, load_diffusers
    from gruppo.modalities.restoration import RestorationPolicy, load_restorer, open_restorer
    from gruppo.modalities.text import TextPolicy, from_module, from_pretrained, from_transformers
    from gruppo.protocols import Modality, Policy
    from gruppo.testing import check_engine, check_policy, check_reward
    from gruppo.trainer.loop import Stopped
    from gruppo.types import Gaussian, GruppoError, Likelihood, MicroBatch, Prompt, Request, Rollouts, Sampling


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gruppo' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
