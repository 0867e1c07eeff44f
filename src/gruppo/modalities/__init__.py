"""What differs between language models, diffusion models, restoration networks and policies from
outside."""

from gruppo.config.sections import find_modality, modalities

__all__ = ["find_modality", "modalities"]
