"""Shared by the modalities: references, critics, LoRA adapters, images, weights in files, refused
options."""
