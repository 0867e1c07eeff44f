"""Image restoration: networks from degraded images to clean ones, as policies with few numbers to
sample."""

from gruppo.modalities.restoration.actions import (
    BandGains,
    Control,
    Controls,
    LowResolution,
    PixelNoise,
    open_action,
)
from gruppo.modalities.restoration.consistency import Equivariance, ToDegraded, ToReference
from gruppo.modalities.restoration.load import (
    load_network,
    load_restorer,
    open_network,
    open_restorer,
)
from gruppo.modalities.restoration.modality import RESTORATION
from gruppo.modalities.restoration.networks import DnCNN, RestorationUNet
from gruppo.modalities.restoration.policy import RestorationPolicy

__all__ = ["RESTORATION", "BandGains", "Control", "Controls", "DnCNN", "Equivariance",
           "LowResolution", "PixelNoise", "RestorationPolicy", "RestorationUNet",
           "ToDegraded", "ToReference", "load_network", "load_restorer", "open_action",
           "open_network", "open_restorer"]  # fmt: skip
