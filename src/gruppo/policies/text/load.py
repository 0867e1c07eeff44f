"""Building a text policy from a hub id, a folder, or a module of one's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from gruppo.policies.text.backbones import PlainBackbone
from gruppo.policies.text.chat import PlainChat, TransformersChat
from gruppo.policies.text.policy import TextPolicy
from gruppo.policies.text.precision import faster_dtype
from gruppo.policies.text.probing import probe
from gruppo.types import GruppoError

Compute = Literal["auto", "float32", "bfloat16"]


def from_pretrained(
    path: str | Path,
    *,
    compute: Compute = "auto",
    trust_remote_code: bool = False,
    chunk: int = 256,
    needs_head: bool = True,
) -> TextPolicy:
    """A Hugging Face causal LM: a hub id or a local folder. Master weights are float32.

    ``needs_head=False`` takes a reward model too, whose language head is random: for its trunk and nothing else.
    """
    module, tokenizer, lost = _loaded(_checked_folder(path), trust_remote_code)
    lacks_head = bool(lost["missing_keys"]) and not needs_head and _lacks_head_alone(module, lost)
    if (missing := sorted(lost["missing_keys"])) and not lacks_head:
        raise GruppoError(
            f"model {str(path)!r} lacks {len(missing)} weights that a {type(module).__name__} has, {missing[0]} first; "
            "they would be random. Give a folder with all weights of a causal language model."
        )
    policy = from_transformers(module, tokenizer, compute=compute, chunk=chunk)
    if lacks_head and policy.trunk() is policy.module:
        raise GruppoError(
            f"model {str(path)!r} lacks the language head, and a {type(module).__name__} cannot be run without one. "
            "Give a folder with all weights of a causal language model."
        )
    return policy


def _loaded(path: str, trust_remote_code: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Module and tokenizer, and the names of weights that the files lack or have too many of."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        module, lost = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever transformers and the formats raise for files that they cannot read
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise GruppoError(
            f"model {path!r} could not be loaded: {reason} Give a local folder that save_pretrained wrote, or a "
            "hub id that this machine can reach or has cached."
        ) from error
    return module, tokenizer, lost


def _lacks_head_alone(module: Any, lost: Mapping[str, Any]) -> bool:
    """Whether nothing but the output embedding is missing, and at most a score of texts stands in its place."""
    head = module.get_output_embeddings()
    of_head = {name for name, part in module.named_modules() if part is head}
    is_trunk_whole = all(name.rpartition(".")[0] in of_head for name in lost["missing_keys"])
    return is_trunk_whole and all(name.startswith("score.") for name in lost["unexpected_keys"])


def from_transformers(module: Any, tokenizer: Any, *, compute: Compute = "auto", chunk: int = 256) -> TextPolicy:
    """A Hugging Face model that is already in memory, with its tokenizer."""
    module = module.float().eval()
    if torch.cuda.is_available():
        module = module.to(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}")
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
    width = module.get_input_embeddings().weight.shape[1]
    return TextPolicy(
        module,
        backbone,
        TransformersChat(tokenizer, end_tokens(module, tokenizer)),
        context=getattr(module.config.get_text_config(), "max_position_embeddings", None),
        compute_dtype=_dtype(compute, width, module),
        chunk=chunk,
    )


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
