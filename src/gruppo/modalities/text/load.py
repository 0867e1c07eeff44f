"""Building a text policy from a hub id, a folder, or a module of one's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from gruppo.loading import why_not_opened
from gruppo.modalities.common.adapters import BASE, Adapter, is_adapter, model_of, read_adapter
from gruppo.modalities.common.lora import cast_base, has_adapter
from gruppo.modalities.text.backbones import PlainBackbone
from gruppo.modalities.text.bundled import BUNDLED, bundled_model
from gruppo.modalities.text.chat import PlainChat, TransformersChat
from gruppo.modalities.text.custom import is_made, names_function
from gruppo.modalities.text.modules import open_made, open_saved
from gruppo.modalities.text.policy import TextPolicy
from gruppo.modalities.text.precision import faster_dtype
from gruppo.modalities.text.probing import probe
from gruppo.types import GruppoError

Compute = Literal["auto", "float32", "bfloat16"]
Adapt = Callable[[nn.Module], None]
"""Gives a module in float32 an adapter, and freezes all else."""


def from_pretrained(
    path: str | Path,
    *,
    compute: Compute = "auto",
    trust_remote_code: bool = False,
    chunk: int = 256,
    needs_head: bool = True,
    adapt: Adapt | None = None,
    is_merged: bool = False,
    seed: int = 0,
) -> TextPolicy:
    """A Hugging Face causal LM: a hub id, a local folder, or a run's for its final model. Master weights are float32.

    ``file.py:function`` is what that function returns, and a folder that was saved of it is opened by it again; see
    ``open_made``. Its weights may hang on ``seed``; ``compute="auto"`` leaves it the dtype that the function chose.
    ``needs_head=False`` takes a reward model too, whose language head is random: for its trunk and nothing else.
    With ``adapt`` the base is held once, in the dtype of the arithmetic. A folder with an adapter is opened on its
    base; with ``is_merged`` it is added to the base's weights.
    """
    path = model_of(path)
    if is_made(path) or names_function(path):
        made = open_saved(path, seed=seed) if is_made(path) else open_made(path, seed=seed)
        if not isinstance(made, TextPolicy):
            raise GruppoError(f"{path} makes a {type(made).__name__}; a language model is needed here.")
        policy = placed(made, compute)
        if adapt is not None:
            give_adapter(policy, adapt)
        return policy
    if is_adapter(path):
        if adapt is not None:
            raise GruppoError(
                f"the model {path} is an adapter, and another one was asked for. Go on with it by --lora.adapter "
                f"{path} and its base as --model; or merge it first, with gruppo export {path} FOLDER, and give that."
            )
        base, adapt = _below(read_adapter(path), is_merged=is_merged)
        module, tokenizer, lost = _loaded(_checked_folder(base), trust_remote_code, _words(path, base))
    else:
        module, tokenizer, lost = _loaded(_checked_folder(path), trust_remote_code)
    lacks_head = bool(lost["missing_keys"]) and not needs_head and _lacks_head_alone(module, lost)
    if (missing := sorted(lost["missing_keys"])) and not lacks_head:
        raise GruppoError(
            f"model {str(path)!r} lacks {len(missing)} weights that a {type(module).__name__} has, {missing[0]} first; "
            "they would be random. Give a folder with all weights of a causal language model."
        )
    policy = from_transformers(module, tokenizer, compute=compute, chunk=chunk, adapt=adapt)
    if lacks_head and policy.trunk() is policy.module:
        raise GruppoError(
            f"model {str(path)!r} lacks the language head, and a {type(module).__name__} cannot be run without one. "
            "Give a folder with all weights of a causal language model."
        )
    return policy


def _below(adapter: Adapter, *, is_merged: bool) -> tuple[str, Adapt]:
    """Where an adapter's base is, and what puts the adapter on it."""
    for name in adapter.base_names:
        if name in BUNDLED:
            base = str(bundled_model(name).path)
        elif Path(name).exists() or not name.startswith((".", "/", "~")):
            base = model_of(name)
        else:
            continue
        return base, partial(adapter.attach, base=name, is_merged=is_merged)
    named = f"is {adapter.base_names[0]!r}, which is not here" if adapter.base_names else "has no name"
    raise GruppoError(
        f"the base of the adapter {adapter.folder} {named}. Load the base with gruppo.from_transformers and its "
        f"adapter with adapt=gruppo.modalities.common.adapters.adapt_from({str(adapter.folder)!r}, base=''), or "
        f"name the base in {adapter.folder / BASE}."
    )


def _words(adapter: str | Path, base: str) -> str:
    """Where the tokenizer is: beside the adapter, if it was saved with one."""
    folder = Path(adapter).expanduser()
    return str(folder) if (folder / "tokenizer_config.json").is_file() else base


def _loaded(path: str, trust_remote_code: bool, words: str = "") -> tuple[Any, Any, dict[str, Any]]:
    """Module and tokenizer, and the names of weights that the files lack or have too many of."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    what = "tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(words or path, trust_remote_code=trust_remote_code)
        what = "model"
        module, lost = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers and the formats raise for files that they cannot read
        raise GruppoError(
            f"model {path!r} could not be loaded: {why_not_opened(error, what)} Give a local folder that "
            "save_pretrained wrote, or a hub id that this machine can reach or has cached."
        ) from error
    if has_adapter(module):
        raise GruppoError(
            f"{path!r} is an adapter on a hub. Download it, and give its base as --model and its folder as "
            "--lora.adapter."
        )
    return module, tokenizer, lost


def _lacks_head_alone(module: Any, lost: Mapping[str, Any]) -> bool:
    """Whether nothing but the output embedding is missing, and at most a score of texts stands in its place."""
    head = module.get_output_embeddings()
    of_head = {name for name, part in module.named_modules() if part is head}
    is_trunk_whole = all(name.rpartition(".")[0] in of_head for name in lost["missing_keys"])
    return is_trunk_whole and all(name.startswith("score.") for name in lost["unexpected_keys"])


def from_transformers(
    module: Any, tokenizer: Any, *, compute: Compute = "auto", chunk: int = 256, adapt: Adapt | None = None
) -> TextPolicy:
    """A Hugging Face model that is already in memory, with its tokenizer."""
    module = module.float().eval()
    if (device := _accelerator()) is not None:
        module = module.to(device)
    backbone = probe(module)
    if not (backbone.caches or backbone.decodes):
        logging.getLogger("gruppo").warning(
            "%s: cached decoding does not give the model's own logits, so each token reads its whole row (slow).",
            type(module).__name__,
        )
    if backbone.layout == "padded":
        logging.getLogger("gruppo").warning(
            "%s: its attention cannot be told which tokens of a group belong together, so in updates each completion "
            "reads its prompt again (slower, and the same numbers).",
            type(module).__name__,
        )
    dtype = _dtype(compute, module.get_input_embeddings().weight.shape[1], module)
    if adapt is not None:
        adapt(module)
    if has_adapter(module):
        cast_base(module, dtype)
    return TextPolicy(
        module,
        backbone,
        TransformersChat(tokenizer, end_tokens(module, tokenizer)),
        context=getattr(module.config.get_text_config(), "max_position_embeddings", None),
        compute_dtype=dtype,
        chunk=chunk,
    )


def placed(policy: TextPolicy, compute: Compute) -> TextPolicy:
    """The policy on this rank's accelerator, where there is one, and in the dtype that was asked for."""
    dtype = policy.compute_dtype if compute == "auto" else _dtype(compute, 0, policy.module)
    device = _accelerator() or policy.device
    if (dtype, device) == (policy.compute_dtype, policy.device):
        return policy
    return TextPolicy(
        policy.module.to(device),
        policy.backbone,
        policy.chat,
        context=policy.context,
        compute_dtype=dtype,
        chunk=policy.chunk,
    )


def _accelerator() -> torch.device | None:
    """This rank's GPU, if there is any."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % count}") if count else None


def give_adapter(policy: TextPolicy, adapt: Adapt) -> None:
    """An adapter for a policy that is in memory already, in place; its base is held once from now on."""
    policy.copy, policy.backbone = None, policy.backbone.on(policy.module)
    adapt(policy.module)
    cast_base(policy.module, policy.compute_dtype)
    anew = TextPolicy(
        policy.module,
        policy.backbone,
        policy.chat,
        context=policy.context,
        compute_dtype=policy.compute_dtype,
        chunk=policy.chunk,
    )
    policy.__dict__.update(vars(anew))


def from_module(
    module: nn.Module,
    tokenizer: Any,
    *,
    eos_ids: Sequence[int],
    context: int | None = None,
    render: Callable[[Sequence[Any]], list[int]] | None = None,
    compute: Compute = "float32",
    chunk: int = 256,
) -> TextPolicy:
    """Any module that maps ids [B, T] to logits [B, T, V] causally, with a tokenizer with ``encode`` and ``decode``.

    nanochat's GPT is the example: ``from_module(model, tokenizer,
    eos_ids=[tokenizer.encode_special("<|assistant_end|>")],
    render=lambda messages: tokenizer.render_for_completion({"messages": messages}))``. transformers is not needed.
    """
    for name in ("encode", "decode"):
        if not callable(getattr(tokenizer, name, None)):
            raise GruppoError(
                f"the tokenizer, a {type(tokenizer).__name__}, has no method {name}; it needs encode and decode."
            )
    if isinstance(eos_ids, int):
        raise GruppoError(f"eos_ids={eos_ids} is one number; it needs a list of ids, [{eos_ids}].")
    _keep_masters_in_float32(module)
    widths = [parameter.shape[-1] for parameter in module.parameters() if parameter.dim() == 2]
    dtype = _dtype(compute, max(widths, default=64), module)
    chat = PlainChat(tokenizer, eos_ids, render)
    return TextPolicy(module, PlainBackbone(module), chat, context=context, compute_dtype=dtype, chunk=chunk)


def end_tokens(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: the generation config's (one or several) and the tokenizer's."""
    named = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    ids = list(named) if isinstance(named, list | tuple) else [named]
    return tuple(dict.fromkeys(i for i in (*ids, tokenizer.eos_token_id) if i is not None))


def _keep_masters_in_float32(module: nn.Module) -> None:
    """Half-precision weights as float32: small updates would be rounded away in them. Buffers stay as they are."""
    for parameter in module.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def _dtype(compute: Compute, width: int, module: nn.Module) -> torch.dtype:
    if compute == "auto":
        return faster_dtype(width, device=next(module.parameters()).device)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if compute not in dtypes:
        raise GruppoError(f"compute={compute!r} is not one of auto, {', '.join(dtypes)}.")
    return dtypes[compute]


def _checked_folder(path: str | Path) -> str:
    """The folder, if it is one and holds a model; a hub id as it is."""
    folder = Path(path).expanduser()
    looks_local = folder.exists() or str(path).startswith((".", "/", "~"))
    if looks_local and not (folder / "config.json").is_file():
        what = "has no config.json" if folder.exists() else "does not exist"
        raise GruppoError(
            f"the model folder {str(path)!r} {what}. Give a folder that save_pretrained wrote, or a hub id."
        )
    return str(folder) if looks_local else str(path)
