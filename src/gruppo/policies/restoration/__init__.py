"""Image restoration: networks from degraded images to clean ones, as policies with few numbers to draw."""

from gruppo.policies.restoration.actions import BandGains, LowResolution, PixelNoise
from gruppo.policies.restoration.consistency import Equivariance, ToDegraded, ToReference
from gruppo.policies.restoration.controls import Control, Controls
from gruppo.policies.restoration.files import load_network
from gruppo.policies.restoration.load import load_restorer, open_network, open_restorer
from gruppo.policies.restoration.named import open_action
from gruppo.policies.restoration.networks import DnCNN, UNet
from gruppo.policies.restoration.policy import RestorationPolicy

__all__ = [
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
