"""Diffusion and flow models: each denoising step is a normal distribution whose mean the network
gives."""

from gruppo.modalities.common.validation import check_trust_region
from gruppo.modalities.diffusion.denoiser import ClassLabels
from gruppo.modalities.diffusion.modality import DIFFUSION, load_denoiser
from gruppo.modalities.diffusion.pipelines import (
    DiffusersPolicy,
    PipelineSettings,
    add_adapter,
    load_diffusers,
)
from gruppo.modalities.diffusion.policy import DenoiserPolicy
from gruppo.modalities.diffusion.sampling import DiffusionSampling
from gruppo.modalities.diffusion.schedules import DiffusionSchedule, FlowSchedule
from gruppo.modalities.diffusion.unet import DenoisingUNet

__all__ = ["DIFFUSION", "ClassLabels", "DenoiserPolicy", "DenoisingUNet",
           "DiffusersPolicy", "DiffusionSampling", "DiffusionSchedule", "FlowSchedule",
           "PipelineSettings", "add_adapter", "check_trust_region", "load_denoiser",
           "load_diffusers"]  # fmt: skip
