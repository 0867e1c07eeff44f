"""Diffusion and flow models: each denoising step is a normal whose mean the network gives."""

from gruppo.modalities.diffusion.conditions import ClassLabels
from gruppo.modalities.diffusion.critic import DenoiserCritic
from gruppo.modalities.diffusion.families import PipelineSettings
from gruppo.modalities.diffusion.load import load_denoiser
from gruppo.modalities.diffusion.modality import DIFFUSION
from gruppo.modalities.diffusion.paths import Diffusion, Flow
from gruppo.modalities.diffusion.pipelines import DiffusersPolicy, add_adapter, load_diffusers
from gruppo.modalities.diffusion.policy import DenoiserPolicy
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.modalities.diffusion.trust_region import check_trust_region
from gruppo.modalities.diffusion.unet import UNet

__all__ = [
    "DIFFUSION",
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
