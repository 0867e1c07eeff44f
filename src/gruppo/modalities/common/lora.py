"""Low-rank adapters: y = W x + (alpha / rank) B A x, where A and B alone are trained. Hu et al. 2021 (2106.09685)."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.core.linear_head import has_hooks, is_plain_linear
from gruppo.loading import import_extra
from gruppo.seeds import generator_at
from gruppo.types import GruppoError

POLICY = "default"
"""Name of the adapter that is trained."""


@dataclass(frozen=True)
class Base:
    """The weights below an adapter, which never change. A module with adapters has one as ``gruppo_base``."""

    name: str
    """Hub id, folder or bundled name; "" of a module that came without one."""
    sha256: str
    """Of the weights in float32, whatever they are held in."""


# --- making one -------------------------------------------------------------------------------------------------------


def inject(
    module: nn.Module, *, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0, base: str = ""
) -> None:
    """Give the linear layers of a Hugging Face model an adapter, and freeze all else.

    ``targets``: names of layers, or their last parts; without any, all but the head. B is 0, so that the model is what
    it was; A is uniform within 1 / sqrt(inputs), as ``nn.Linear`` begins, and hangs on the seed and its name alone.
    """
    check_can_have(module)
    peft = import_extra("peft", "lora", "LoRA (lora.rank)")
    chosen = checked_targets(module, targets) if targets else linear_names(module)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
        target_modules=sorted(chosen),
        task_type="CAUSAL_LM",
        base_model_name_or_path=_place_of(module) or base,
    )
    inject_as(module, config, base=base)
    for name, (layer, half) in _halves(module, POLICY).items():
        with torch.no_grad():
            if half == "lora_A":
                drawn = torch.rand(layer.weight.shape, generator=generator_at(seed, "lora", name)) * 2 - 1
                layer.weight.copy_(drawn / math.sqrt(layer.weight.shape[1]))
            else:
                layer.weight.zero_()


def _place_of(module: Any) -> str:
    """Where the model was loaded from, the same from any folder; "" of one that was never in a file."""
    name = getattr(getattr(module, "config", None), "_name_or_path", "") or ""
    return str(Path(name).absolute()) if name and Path(name).exists() else name


def inject_as(module: nn.Module, config: Any, *, base: str) -> None:
    """Adapters as peft's ``config`` says; the global generators stay as they were."""
    peft = import_extra("peft", "lora", "LoRA (lora.rank)")
    sha256 = digest(base_weights(module))
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(config, module, POLICY)
    trained = {id(parameter) for parameter in adapter_weights(module, POLICY).values()}
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    own: Any = module
    own.peft_config, own.gruppo_base = {POLICY: config}, Base(base, sha256)


def hold_base(module: nn.Module, dtype: torch.dtype) -> None:
    """What is frozen, in the dtype of the arithmetic; buffers and what is trained stay as they are."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def check_can_have(module: nn.Module) -> None:
    """Refuse a module whose layers are not known by name."""
    if has_adapter(module):
        raise GruppoError(
            "the model has an adapter already, and lora.rank asks for another. Leave --lora.rank out to train the one "
            "it has."
        )
    if not callable(getattr(module, "get_output_embeddings", None)):
        raise GruppoError(
            f"LoRA needs a Hugging Face causal language model; a {type(module).__name__} of your own is none. Train "
            "its weights with --lora.rank 0, or give a model from gruppo.from_pretrained or from_transformers."
        )


def linear_names(module: Any) -> set[str]:
    """Last parts of the names of all linear layers but the head; of Conv1D, GPT-2's, too."""
    head = module.get_output_embeddings()
    return {name.rpartition(".")[2] for name, part in module.named_modules() if part is not head and is_linear(part)}


def is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


def checked_targets(module: Any, targets: Sequence[str]) -> set[str]:
    """The targets, each of which names at least one layer, and linear ones alone."""
    known, parts = sorted(linear_names(module)), dict(module.named_modules())
    head = module.get_output_embeddings()
    for target in targets:
        named = [part for name, part in parts.items() if name == target or name.endswith(f".{target}")]
        if not named:
            near = difflib.get_close_matches(target, known, 1)
            guess = f"Did you mean {near[0]}?" if near else f"Set --lora.targets to some of {', '.join(known)}."
            if "," in target:
                guess = f"Names are separated by spaces: --lora.targets {' '.join(target.replace(',', ' ').split())}."
            raise GruppoError(f"lora.targets: the model has no layer {target!r}. {guess}")
        if not all(map(is_linear, named)):
            raise GruppoError(
                f"lora.targets: {target!r} is a {type(named[0]).__name__}, and an adapter needs linear layers. Set "
                f"--lora.targets to some of {', '.join(known)}."
            )
        if head in named and getattr(head, "weight", None) is module.get_input_embeddings().weight:
            raise GruppoError(
                f"lora.targets: {target!r} is the head, whose weight is the embedding's too: a merged model would have "
                f"another embedding. Set --lora.targets to some of {', '.join(known)}."
            )
    return set(targets)


# --- what a module has ------------------------------------------------------------------------------------------------


@contextmanager
def adapter(module: nn.Module, name: str | None) -> Iterator[None]:
    """Within, the module computes through this adapter alone; with None through none: it is its base.

    What is trained stays as it is: peft's own switches change ``requires_grad`` too.
    """
    layers = adapted_layers(module)
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = [name or POLICY], name is None
        yield
    finally:
        for layer, (active, is_off) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, is_off


def adapted_layers(module: nn.Module) -> list[Any]:
    """The layers of a module that have adapters; none where it has none, or where peft is not installed."""
    return [layer for layer in module.modules() if is_adapted(layer)]


def is_adapted(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("base_layer", "_active_adapter", "lora_A", "lora_B"))


def has_adapter(module: nn.Module) -> bool:
    return bool(adapted_layers(module))


def base_of(module: nn.Module) -> Base | None:
    """What the adapters of a module stand on; None where it has none."""
    return getattr(module, "gruppo_base", None)


def adapter_weights(module: nn.Module, name: str = POLICY) -> dict[str, nn.Parameter]:
    """The numbers of one adapter, by the names that peft writes them under: ``layers.0.q_proj.lora_A.weight``."""
    return {
        f"{place}.{kind}": parameter
        for place, (layer, _) in _halves(module, name).items()
        for kind, parameter in layer.named_parameters()
    }


def _halves(module: nn.Module, name: str) -> dict[str, tuple[Any, str]]:
    """A and B of every adapted layer: ``layers.0.q_proj.lora_A`` to the layer that holds it, and which it is."""
    return {
        f"{place}.{half}": (getattr(layer, half)[name], half)
        for place, layer in module.named_modules()
        if is_adapted(layer)
        for half in ("lora_A", "lora_B")
        if name in getattr(layer, half)
    }


def base_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers without those of adapters, by the names they have without adapters; tied ones once.

    A second look at them is a look at what the policy computes with: they are not copied.
    """
    saved = module.state_dict().keys()
    tensors = dict(module.named_parameters()) | {n: b for n, b in module.named_buffers() if n in saved}
    return {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in tensors.items()
        if not any(f".{half}." in name for half in ("lora_A", "lora_B"))
    }


@torch.no_grad()
def digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and numbers, in the dtype they have."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + b"\0")
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapted linear layer computes: base(x) + scale B A x."""

    base: nn.Linear
    a: Float[Tensor, "r i"]
    b: Float[Tensor, "o r"]
    scale: float


def low_rank(module: Any) -> LowRank | nn.Linear | None:
    """What calling the module does, where that is a plain linear layer with one plain adapter or none; else None."""
    if is_plain_linear(module):
        return module
    if not is_adapted(module) or "forward" in vars(module) or has_hooks(module):
        return None
    if not is_plain_linear(module.base_layer):
        return None
    if module._disable_adapters:
        return None if module.merged_adapters else module.base_layer
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1 or module.merged_adapters or module.lora_variant:
        return None
    a, b, dropout = module.lora_A[active[0]], module.lora_B[active[0]], module.lora_dropout[active[0]]
    is_off = isinstance(dropout, nn.Identity) or not dropout.training
    if not (is_off and is_plain_linear(a) and is_plain_linear(b)) or b.bias is not None:
        return None
    if a.weight.dtype != module.base_layer.weight.dtype:  # float32 masters on a bfloat16 base: peft casts
        return None
    return LowRank(module.base_layer, a.weight, b.weight, float(module.scaling[active[0]]))


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """W + (alpha / rank) B A in place of W and the adapter: a model as if it had never had one, all of it trained."""
    for place, layer in list(module.named_modules()):
        if is_adapted(layer):
            weight = layer.base_layer.weight
            weight += layer.get_delta_weight(POLICY).to(weight.dtype)
            parent, _, name = place.rpartition(".")
            setattr(module.get_submodule(parent), name, layer.base_layer)
    for kept in ("peft_config", "gruppo_base"):
        if hasattr(module, kept):
            delattr(module, kept)
    module.requires_grad_(True)
