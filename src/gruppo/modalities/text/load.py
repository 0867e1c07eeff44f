"""Opening a text policy: from a hub id, a folder, a run, a function's name, or a module in
memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from gruppo.distributed.sharding import is_requested
from gruppo.integrity import check_layers, check_seal, read_json
from gruppo.loading import transformers_error
from gruppo.modalities.common.adapters import BASE, Adapter, is_adapter, model_of, read_adapter
from gruppo.modalities.common.four_bit import (
    check_quantized,
    compute_in,
    four_bit_layers,
    quantization_config,
)
from gruppo.modalities.common.lora import cast_base
from gruppo.modalities.common.lora import has_adapter as is_adapted_model
from gruppo.modalities.text.backbones import Backbone, probe
from gruppo.modalities.text.bundled import BUNDLED
from gruppo.modalities.text.chat import Chat, Render
from gruppo.modalities.text.custom import is_custom, names_function, open_custom
from gruppo.modalities.text.policy import TextPolicy
from gruppo.modalities.text.precision import faster_dtype
from gruppo.platforms import usable_cuda
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

Compute = Literal["auto", "float32", "bfloat16"]
Adapt = Callable[[nn.Module], None]
"""Adds an adapter to a float32 module and freezes everything else."""


def from_pretrained(
    path: str | Path,
    *,
    compute: Compute = "auto",
    trust_remote_code: bool = False,
    needs_head: bool = True,
    adapt: Adapt | None = None,
    is_merged: bool = False,
    load_in_4bit: bool = False,
    seed: int = 0,
    device: str = "auto",
) -> TextPolicy:
    """Open a Hugging Face causal LM: a hub id, a local folder, or a run for its final model.
    Masters are float32.

    ``file.py:function``, or a folder that was saved of such a model, is opened by the function
    (``open_custom``) with random weights from ``seed``; ``compute="auto"`` keeps the dtype that the
    function chose. ``needs_head=False`` also accepts a reward model, whose language head is then
    random: only its trunk may be used. With ``adapt``, the base is stored once, in the compute
    dtype or, with ``load_in_4bit``, in 4 bits. An adapter folder is opened on its base;
    ``is_merged`` adds it to the base. ``device="auto"`` is this rank's GPU if there is one, and
    "cpu" leaves it alone.
    """
    path = model_of(path)
    if is_custom(path) or names_function(path):
        if load_in_4bit:
            raise four_bit_error(path)
        return _open_function(path, compute, device, adapt, seed)
    model_path, tokenizer_path = path, path
    if is_adapter(path):
        if adapt is not None:
            raise GruppoError(
                f"the model {path} is an adapter, and another one is requested",
                advice=f"""Continue it with $lora.adapter {path} and its base as $model; or merge it
                    first, with gruppo export {path} FOLDER, and give that""",
            )
        model_path, adapt = _base_of_adapter(read_adapter(path), is_merged=is_merged)
        # an adapter that others saved may lack the tokenizer, which is then that of its base
        if not (Path(path).expanduser() / "tokenizer_config.json").is_file():
            tokenizer_path = model_path
    quantization = quantization_config() if load_in_4bit else None
    place = None if is_requested() else _accelerator(device)
    module, tokenizer, loading = _load(
        model_path, tokenizer_path, trust_remote_code, quantization, place, bool(adapt)
    )
    missing = sorted(loading["missing_keys"])
    if not missing or (not needs_head and missing == ["lm_head.weight"]):
        policy = from_transformers(module, tokenizer, compute=compute, adapt=adapt, device=device)
        if not missing or policy.backbone.splits:
            return policy
    raise GruppoError(f"""model {path!r} lacks {len(missing)} weights that a
        {type(module).__name__} has, {missing[0]} first; they would be random. Give a folder
        with all weights of a causal language model.""")


def _open_function(
    path: str, compute: Compute, device: str, adapt: Adapt | None, seed: int
) -> TextPolicy:
    policy = open_custom(path, seed=seed)
    if not isinstance(policy, TextPolicy):
        raise GruppoError(f"{path} makes a {type(policy).__name__}, not a language model.")
    place(policy, compute, device)
    if adapt is not None:
        give_adapter(policy, adapt)
    return policy


def _base_of_adapter(adapter: Adapter, *, is_merged: bool) -> tuple[str, Adapt]:
    """Return where the base of an adapter is, and the function that adds the adapter to it."""
    for name in adapter.base_names:
        if name in BUNDLED or Path(name).exists() or not name.startswith((".", "/", "~")):
            base = str(BUNDLED[name]().path) if name in BUNDLED else model_of(name)
            return base, partial(adapter.attach, base=name, is_merged=is_merged)
    names = " or ".join(map(repr, adapter.base_names)) or "not named"
    raise GruppoError(
        f"""the base of the adapter {adapter.folder} is {names}, which is not here. Name it in
            {adapter.folder / BASE}, or load it with gruppo.from_transformers and
            adapt=gruppo.modalities.common.adapters.adapt_from(...)."""
    )


def four_bit_error(model: str) -> GruppoError:
    return GruppoError(
        f"""lora.load_in_4bit quantizes a model of transformers while it is read from files, and
            {model!r} is made in memory""",
        option="lora.load_in_4bit",
        advice="False, or give a folder or a hub id",
    )


def _load(
    path: str,
    tokenizer_path: str,
    trust_remote_code: bool,
    quantization: Any,
    place: torch.device | None,
    has_adapter: bool,
) -> tuple[Any, Any, dict[str, Any]]:
    """Return module, tokenizer, and transformers' loading info: the names of missing and unexpected
    weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
    from transformers.utils import logging as hf_logging

    folder = Path(path).expanduser()
    is_local = folder.exists() or path.startswith((".", "/", "~"))
    if is_local and not (folder / "config.json").is_file():
        problem = "has no config.json" if folder.exists() else "does not exist"
        raise GruppoError(
            f"the model folder {path!r} {problem}. Give a folder of save_pretrained, or a hub id."
        )
    check_seal(folder)
    source = str(folder) if is_local else path
    options = dict[str, Any](dtype=torch.float32, use_safetensors=True)
    kind = "tokenizer"
    hf_logging.disable_progress_bar()
    try:
        if is_local:
            check_layers(read_json(folder / "config.json"), source)
        else:
            check_layers(PretrainedConfig.get_config_dict(source)[0], source)
        tokenizer = AutoTokenizer.from_pretrained(
            Path(tokenizer_path).expanduser(), trust_remote_code=trust_remote_code
        )
        kind = "model"
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        found = getattr(config, "quantization_config", None)
        if found is not None:
            check_quantized(found, f"the model {source!r}", has_adapter=has_adapter)
        elif quantization is not None:
            options["quantization_config"] = quantization
        if quantization is not None:
            # by default, transformers takes the first GPU, on all ranks
            options["device_map"] = {"": place or "cpu"}
        module, loading = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, trust_remote_code=trust_remote_code, **options
        )
    except GruppoError:
        raise
    except Exception as error:  # whatever transformers raises for files that it cannot read
        raise GruppoError(f"""model {source!r} could not be loaded:
            {transformers_error(error, kind)} Give a local folder that save_pretrained wrote, or a
            hub id that this machine can reach or has cached.""") from error
    if is_adapted_model(module):
        raise GruppoError(
            f"{source!r} is an adapter on a hub",
            advice="Download it, give its base as $model, its folder as $lora.adapter",
        )
    return module, tokenizer, loading


def from_transformers(
    module: Any,
    tokenizer: Any,
    *,
    compute: Compute = "auto",
    adapt: Adapt | None = None,
    device: str = "auto",
) -> TextPolicy:
    """Make a policy of a Hugging Face model in memory and its tokenizer, on this rank's GPU if
    ``device`` allows."""
    name = type(module).__name__
    if getattr(module, "is_quantized", False):
        _check_four_bit(module, has_adapter=adapt is not None)
        compute_in(module, torch.float32)
    else:
        module.float()  # masters, whatever dtype the files have
    module.eval()  # before the probe: dropout would make every fast way look wrong
    if (gpu := _accelerator(device)) is not None and not is_requested():
        module = module.to(gpu)
    backbone = probe(module)
    if not (backbone.caches or backbone.runs_layers):
        log.warning("%s: its cache is not exact, so each token reads its whole row (slow).", name)
    if backbone.is_padded:
        log.warning("%s: in updates each completion reads its prompt again (slower).", name)
    dtype = _compute_dtype(compute, module.get_input_embeddings().weight.shape[1], module, device)
    if adapt is not None:
        adapt(module)
    if is_adapted_model(module):  # not where the adapter was merged
        cast_base(module, dtype)
    # every id that ends a completion: those of the generation config, one or several, and the
    # tokenizer's
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    ends = [*(ends if isinstance(ends, list | tuple) else [ends]), tokenizer.eos_token_id]
    chat = Chat(tokenizer, tuple(dict.fromkeys(i for i in ends if i is not None)))
    context = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    return TextPolicy(module, backbone, chat, context=context, compute_dtype=dtype)


def _check_four_bit(module: Any, *, has_adapter: bool) -> None:
    settings = module.config.quantization_config
    check_quantized(settings, f"this {type(module).__name__}", has_adapter=has_adapter)
    for name, layer in four_bit_layers(module).items():
        # a block of 64 weights shares a scale. Of rows that are not whole blocks, bitsandbytes 0.50
        # takes the wrong scales on a CPU: an error of 38% in place of 9% at 48 inputs, silently
        if layer.in_features % (size := layer.weight.quant_state.blocksize):
            raise GruppoError(
                f"""{name} has {layer.in_features} inputs, and bitsandbytes computes 4-bit layers
                    rightly only where they are a multiple of {size}""",
                option="lora.load_in_4bit",
                advice="False",
            )


def place(policy: TextPolicy, compute: Compute, device: str = "auto") -> TextPolicy:
    """Move a policy to this rank's GPU, if ``device`` allows, and to the requested dtype, in
    place."""
    target = policy.device if is_requested() else _accelerator(device) or policy.device
    dtype = policy.compute_dtype if compute == "auto" else _compute_dtype(compute, 0, policy.module)
    if (dtype, target) != (policy.compute_dtype, policy.device):
        policy.module.to(target)
        policy.compute_in(dtype)
    return policy


def give_adapter(policy: TextPolicy, adapt: Adapt) -> None:
    """Add an adapter to an open policy, in place; its base is stored once from then on, in the
    compute dtype."""
    policy.copy = None  # frees the copy before the adapter is made
    policy.backbone = replace(policy.backbone, module=policy.module)
    adapt(policy.module)
    cast_base(policy.module, policy.compute_dtype)
    policy.compute_in(policy.compute_dtype)
    policy.value_head = None


def from_module(
    module: nn.Module,
    tokenizer: Any,
    *,
    eos_ids: Sequence[int],
    context: int | None = None,
    render: Render | None = None,
    compute: Compute = "float32",
) -> TextPolicy:
    """Make a policy of any module that maps ids [B, T] to logits [B, T, V] causally; transformers
    is not needed.

    T is at least 2 in every call. The tokenizer needs ``encode`` and ``decode``. ``render`` returns
    the ids of messages up to where the assistant answers; if the last message is the assistant's,
    the answer begins with it. For nanochat's GPT see examples/nanochat_rl.py.
    """
    if isinstance(eos_ids, int):
        raise GruppoError(f"eos_ids={eos_ids} is one number; it needs a list of ids, [{eos_ids}].")
    for parameter in module.parameters():
        # as masters they would round small updates away
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    widths = [parameter.shape[-1] for parameter in module.parameters() if parameter.dim() == 2]
    dtype = _compute_dtype(compute, max(widths, default=64), module)
    chat = Chat(tokenizer, eos_ids, is_plain=True, render=render)
    backbone = Backbone(module, is_plain=True)
    return TextPolicy(module, backbone, chat, context=context, compute_dtype=dtype)


def _accelerator(device: str = "auto") -> torch.device | None:
    """Return this rank's GPU, if there is any and the requested device is not another."""
    if device not in ("auto", "cuda") or not usable_cuda()[0]:
        return None
    return torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}")


def _compute_dtype(
    compute: Compute, width: int, module: nn.Module, device: str = "auto"
) -> torch.dtype:
    if compute == "auto":
        later = _accelerator(device) if is_requested() else None  # where the shards will compute
        return faster_dtype(width, device=later or next(module.parameters()).device)
    if compute not in ("float32", "bfloat16"):
        raise GruppoError(f"compute={compute!r} is not one of auto, float32, bfloat16.")
    return getattr(torch, compute)
