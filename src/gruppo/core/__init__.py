"""The mathematics: tensors and floats in, tensors out. No config, device, print or global generator."""
