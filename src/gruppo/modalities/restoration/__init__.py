"""Image restoration: networks from degraded images to clean ones, as policies with few numbers to
sample."""

from gruppo.modalities.restoration.actions import (
    BandGains,
    LowResolution,
    PixelNoise,
)
from gruppo.modalities.restoration.modality import (
    RESTORATION,
    load_restorer,
    open_network,
    open_restorer,
)
from gruppo.modalities.restoration.networks import RestorationUNet
from gruppo.modalities.restoration.policy import RestorationPolicy

__all__ = ["RESTORATION", "BandGains", "LowResolution",
           "PixelNoise", "RestorationPolicy", "RestorationUNet", "load_restorer",
           "open_network", "open_restorer"]  # fmt: skip
