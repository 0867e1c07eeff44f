"""Image restoration: networks from degraded images to clean ones, as policies with few numbers to draw."""

from gruppo.modalities.restoration.actions import BandGains, LowResolution, PixelNoise
from gruppo.modalities.restoration.consistency import Equivariance, ToDegraded, ToReference
from gruppo.modalities.restoration.controls import Control, Controls
from gruppo.modalities.restoration.files import load_network
from gruppo.modalities.restoration.load import load_restorer, open_network, open_restorer
from gruppo.modalities.restoration.modality import RESTORATION
from gruppo.modalities.restoration.named import open_action
from gruppo.modalities.restoration.networks import DnCNN, UNet
from gruppo.modalities.restoration.policy import RestorationPolicy

__all__ = [
    "RESTORATION",
    "BandGains",
    "Control",
    "Controls",
    "DnCNN",
    "Equivariance",
    "LowResolution",
    "PixelNoise",
    "RestorationPolicy",
    "ToDegraded",
    "ToReference",
    "UNet",
    "load_network",
    "load_restorer",
    "open_action",
    "open_network",
    "open_restorer",
]
