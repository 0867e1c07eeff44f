"""Modalities: what differs between language, diffusion and restoration models."""
