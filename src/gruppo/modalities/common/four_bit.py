"""4-bit bases of adapters: QLoRA, Dettmers et al. 2023 (2305.14314), by bitsandbytes through
transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gruppo.loading import import_extra
from gruppo.types import GruppoError


def quantization_config() -> Any:
    """NF4 with double quantization, for ``from_pretrained`` of transformers."""
    for package in ("bitsandbytes", "accelerate"):
        import_extra(package, "qlora", "a 4-bit base (lora.load_in_4bit)")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )


def check_quantized(settings: Any, what: str, *, has_adapter: bool) -> None:
    """Refuse a quantized model whose weights would be trained, and one that cannot hold an adapter.

    ``settings``: the ``quantization_config`` of the model's config, of transformers or as read from
    a file.
    """
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    if not has_adapter:
        raise GruppoError(
            f"""{what} is quantized, and quantized weights cannot be trained or run without an
                    adapter here""",
            option="lora.rank",
            advice="16 to train an adapter on it, or give the model that it was quantized from",
        )
    if (
        not settings.get("load_in_4bit")
        or settings.get("bnb_4bit_quant_storage", "uint8") != "uint8"
    ):
        raise GruppoError(
            f"""{what} is quantized in a way that gruppo cannot put an adapter on
                ({settings.get("quant_method")}); it needs bitsandbytes' 4 bits, stored as uint8""",
            advice="Give the model that it was quantized from, with $lora.load_in_4bit True",
        )


def four_bit_layers(module: nn.Module) -> dict[str, Any]:
    """The layers with 4-bit weights, by name."""
    return {
        name: part
        for name, part in module.named_modules()
        if type(part).__module__.startswith("bitsandbytes.")
    }


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype in which 4-bit layers compute."""
    for layer in four_bit_layers(module).values():
        layer.compute_dtype, layer.compute_type_is_set = dtype, True
        # In evaluation mode bitsandbytes would repack the weights in place for AVX-512, and a
        # packed layer has no backward pass: gradients of the layers below it would be missing
        # without an error.
        layer.support_avx512bf16_for_cpu = False
        layer.quant_state = layer.weight.quant_state  # FSDP replaces the weight, which loses it
