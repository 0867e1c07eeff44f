"""Diffusion and flow models: each denoising step is a normal whose mean the network gives."""

from gruppo.policies.diffusion.conditions import ClassLabels
from gruppo.policies.diffusion.critic import DenoiserCritic
from gruppo.policies.diffusion.families import PipelineSettings
from gruppo.policies.diffusion.load import load_denoiser
from gruppo.policies.diffusion.paths import Diffusion, Flow
from gruppo.policies.diffusion.pipelines import DiffusersPolicy, add_adapter, load_diffusers
from gruppo.policies.diffusion.policy import DenoiserPolicy
from gruppo.policies.diffusion.sampling import DiffusionSampling
from gruppo.policies.diffusion.trust_region import check_trust_region
from gruppo.policies.diffusion.unet import UNet

__all__ = [
    "ClassLabels",
    "DenoiserCritic",
    "DenoiserPolicy",
    "DiffusersPolicy",
    "Diffusion",
    "DiffusionSampling",
    "Flow",
    "PipelineSettings",
    "UNet",
    "add_adapter",
    "check_trust_region",
    "load_denoiser",
    "load_diffusers",
]
