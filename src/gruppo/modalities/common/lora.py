"""Low-rank adapters: y = W x + (alpha / rank) B A x, where only A and B are trained. Hu et al. 2021
(2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gruppo.core.linear_head import has_hooks, is_plain_linear
from gruppo.loading import did_you_mean, import_extra
from gruppo.modalities.common.four_bit import compute_in, four_bit_layers
from gruppo.protocols import AdapterMixin, Policy, digest, saved_tensors
from gruppo.seeds import generator_at
from gruppo.types import GruppoError

POLICY = "default"
"""Name of the adapter that is trained."""


@dataclass(frozen=True)
class Base:
    """The frozen weights below an adapter; a module with adapters has one as ``gruppo_base``."""

    name: str
    """Hub id, folder or bundled name; "" for a module from memory."""
    sha256: str
    """Of the weights in float32, whatever dtype they are stored in; of a 4-bit base, of its 4-bit
    weights."""
    is_4bit: bool = False


# --- adding an adapter ----------------------------------------------------------------------------


@torch.no_grad()
def inject(
    module: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] = (),
    default_targets: Sequence[str] = (),
    seed: int = 0,
    base: str = "",
) -> None:
    """Add an adapter to the linear layers of a model, and freeze everything else.

    ``targets``: names of layers, or their last parts; by default ``default_targets``, or all but
    the head of a Hugging Face language model. B is 0, so that the model's outputs do not change; A
    is uniform within 1 / sqrt(inputs), as in ``nn.Linear``, and depends on the seed and its name
    only. Both are at least float32.
    """
    check_adaptable(module, has_head=not default_targets)
    peft = import_extra("peft", "lora", "LoRA (lora.rank)")
    model: Any = module
    # the head by identity: its name differs between models
    head: Any = None if default_targets else model.get_output_embeddings()
    linear = {
        name: part for name, part in module.named_modules() if part is not head and is_linear(part)
    }
    names = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        parts = [p for name, p in module.named_modules() if f".{name}".endswith(f".{target}")]
        problem = f"the model has no linear layers {target!r}"
        if head in parts and head.weight is model.get_input_embeddings().weight:
            problem = f"{target!r} is the head, whose weight is tied to the embedding"
        elif parts and all(map(is_linear, parts)):
            continue
        advice = f"Set $lora.targets to some of {', '.join(names)}, separated by spaces"
        raise GruppoError(
            f"lora.targets: {problem}",
            advice=did_you_mean(target, names, otherwise=advice).strip(),
        )
    source = getattr(getattr(module, "config", None), "_name_or_path", "")
    if source and Path(source).exists():  # so that peft finds a local base from any folder
        source = str(Path(source).absolute())
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
        task_type=None if default_targets else "CAUSAL_LM",
        target_modules=sorted(set(targets or default_targets or names)),
        base_model_name_or_path=source or base,
    )
    inject_config(module, config, base=base)
    for name, weight in adapter_weights(module).items():
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
        if ".lora_B." in f".{name}":
            weight.zero_()
            continue
        generator = generator_at(seed, "lora", name.removesuffix(".weight"))
        uniform = torch.rand(weight.shape, generator=generator) * 2 - 1
        weight.copy_(uniform / math.sqrt(weight.shape[1]))


def inject_config(module: nn.Module, config: Any, *, base: str) -> Base:
    """Add adapters according to a peft config; return the base. The global generators do not
    change."""
    peft = import_extra("peft", "lora", "LoRA (lora.rank)")
    sha256 = digest(base_weights(module))
    with torch.random.fork_rng(devices=[]):  # peft draws A; the caller sets or reads it afterwards
        try:
            peft.inject_adapter_in_model(config, module, POLICY)
        except ValueError as error:
            raise GruppoError(f"the adapter does not fit this model: {error}") from error
    module.requires_grad_(False)
    for parameter in adapter_weights(module).values():
        parameter.requires_grad_(True)
    target: Any = module
    target.peft_config = {POLICY: config}
    target.gruppo_base = Base(base, sha256, bool(four_bit_layers(module)))
    return target.gruppo_base


def cast_base(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the frozen parameters to the compute dtype; buffers, trained and 4-bit parameters keep
    theirs."""
    compute_in(module, dtype)
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def check_adaptable(module: nn.Module, *, has_head: bool = True) -> None:
    """Refuse a module that has an adapter already or whose layers are not known by name."""
    if has_adapter(module):
        raise GruppoError(
            "the model already has an adapter, and lora.rank adds another",
            advice="Leave $lora.rank out to train that one",
        )
    if has_head and not callable(getattr(module, "get_output_embeddings", None)):
        raise GruppoError(
            f"LoRA needs a Hugging Face causal language model, not a {type(module).__name__}",
            advice="""Train all weights with $lora.rank 0, or give a model from
                gruppo.from_pretrained or from_transformers""",
        )


def is_linear(part: nn.Module) -> bool:
    """Return whether an adapter can be added: to nn.Linear, or to the Conv1D of GPT-2."""
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


# --- modules with adapters ------------------------------------------------------------------------


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """Compute through the base alone for the length of the block.

    ``requires_grad`` does not change; peft's own switches would change it.
    """
    layers: list[Any] = [layer for layer in module.modules() if is_adapted(layer)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, is_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = is_disabled


def is_adapted(module: Any) -> bool:
    """Return whether this layer is a LoRA layer of peft; works without peft."""
    return all(
        hasattr(module, name) for name in ("base_layer", "_active_adapter", "lora_A", "lora_B")
    )


def has_adapter(module: nn.Module) -> bool:
    return any(map(is_adapted, module.modules()))


def adapter_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the adapter under the names of peft's files:
    ``layers.0.q_proj.lora_A.weight``."""
    return {
        f"{path}.{half}.{kind}": parameter
        for path, layer in module.named_modules()
        if is_adapted(layer)
        for half in ("lora_A", "lora_B")
        if POLICY in getattr(layer, half)
        for kind, parameter in getattr(layer, half)[POLICY].named_parameters()
    }


def base_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers without adapters, under the names of the bare model;
    tied ones once.

    They are the tensors that compute, not copies. The scales of 4-bit weights are among them.
    """
    tensors: dict[str, Tensor] = saved_tensors(module)
    for path, layer in four_bit_layers(module).items():
        scales = layer.weight.quant_state.as_dict(packed=True)
        tensors |= {f"{path}.weight.{name}": tensor for name, tensor in scales.items()}
    return {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in tensors.items()
        if not any(f".{half}." in name for half in ("lora_A", "lora_B"))
    }


def trained(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def module_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; of a module with adapters, what is trained
    alone."""
    # not base_weights without adapters: a network of the user's may have layers of its own that are
    # called lora_A
    tensors = trained(module) if has_adapter(module) else saved_tensors(module)
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


class AdaptablePolicy(AdapterMixin, Policy):
    """A policy whose module may have a LoRA adapter, which alone is saved in checkpoints; its base
    never changes."""

    def checkpoint_weights(self) -> dict[str, Tensor]:
        return module_weights(self.module)

    def frozen_base(self) -> dict[str, Tensor]:
        return base_weights(self.module) if has_adapter(self.module) else {}

    @property
    def base_sha256(self) -> str | None:
        return getattr(getattr(self.module, "gruppo_base", None), "sha256", None)


@dataclass(frozen=True, eq=False)
class LowRank:
    """The computation of an adapted linear layer: base(x) + scale B A x."""

    base: nn.Linear
    a: Float[Tensor, "r i"]
    b: Float[Tensor, "o r"]
    scale: float


def low_rank(module: Any) -> LowRank | nn.Linear | None:
    """Return what calling the module computes if that is a plain linear layer with at most one
    plain adapter."""
    if is_plain_linear(module):
        return module
    is_changed = "forward" in vars(module) or has_hooks(module)
    if is_changed or not is_adapted(module) or not is_plain_linear(module.base_layer):
        return None
    if module._disable_adapters:
        return None if module.merged_adapters else module.base_layer
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1 or module.merged_adapters or module.lora_variant:
        return None
    a, b = module.lora_A[active[0]], module.lora_B[active[0]]
    dropout = module.lora_dropout[active[0]]
    is_plain = is_plain_linear(a) and is_plain_linear(b) and b.bias is None
    if not is_plain or (dropout.training and not isinstance(dropout, nn.Identity)):
        return None
    if a.weight.dtype != module.base_layer.weight.dtype:  # float32 on a bfloat16 base: peft casts
        return None
    return LowRank(module.base_layer, a.weight, b.weight, float(module.scaling[active[0]]))


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Replace W and its adapter with W + (alpha / rank) B A; all weights of the resulting plain
    model are trainable."""
    for path, layer in list(module.named_modules()):  # a list: the loop replaces modules
        if is_adapted(layer):
            weight = layer.base_layer.weight
            weight += layer.get_delta_weight(POLICY).to(weight.dtype)
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, layer.base_layer)
    for attribute in ("peft_config", "gruppo_base"):
        if hasattr(module, attribute):
            delattr(module, attribute)
    module.requires_grad_(True)
