"""Language models of one's own, opened by name, and again from what was saved of them."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gruppo.loading import load_object
from gruppo.modalities.text.backbones import PlainBackbone
from gruppo.modalities.text.custom import WEIGHTS, MadeBy
from gruppo.modalities.text.policy import TextPolicy
from gruppo.protocols import Policy
from gruppo.seeds import seed_at
from gruppo.types import GruppoError, NumericalStop

log = logging.getLogger("gruppo")

WRAP = "Return gruppo.from_module(module, tokenizer, eos_ids=[...])."


def open_made(name: str, *, seed: int = 0, folder: Path | None = None) -> Policy:
    """The policy that ``file.py:function`` returns; weights that it draws hang on the seed.

    The function takes nothing, or ``folder``: where the weights lie that will be put into what it returns, None where
    it is to return a model to begin from. The global generator of torch is left as it was.
    """
    source = MadeBy.named(name)
    make = load_object(name)
    told = {"folder": folder} if "folder" in _parameters(make, name) else {}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_at(seed, "module"))
            policy = make(**told)
            if isinstance(policy, TextPolicy) and isinstance(policy.backbone, PlainBackbone):
                _check_reads(policy, name)
                policy.backbone.made_by = source
    except GruppoError:
        raise
    except (Exception, SystemExit) as error:
        text = (str(error).splitlines() or [""])[0]
        raise GruppoError(
            f"{name} raised {type(error).__name__}{_line_of(error, source)}: {text}. Mend the function and try again."
        ) from error
    if isinstance(policy, Policy) and not isinstance(policy, TextPolicy):
        policy.origin = source
        return policy
    if not isinstance(policy, TextPolicy):
        raise GruppoError(f"{name} returned a {type(policy).__name__}; it needs a policy. {WRAP}")
    return policy


def open_saved(folder: str | Path, *, seed: int = 0) -> Policy:
    """The policy in a folder that ``policy.save`` wrote: its function makes it, and its weights are the folder's."""
    folder = Path(folder).expanduser()
    source, weights = MadeBy.read(folder), _weights_in(folder)
    try:
        policy = open_made(source.made_by, seed=seed, folder=folder)
    except GruppoError as error:
        said = f"the model {folder} is made by {source.made_by}, which cannot be used: {error}"
        raise type(error)(said) from error
    now = MadeBy.named(source.made_by)
    if now.sha256 != source.sha256:
        log.warning(
            "the model %s was saved when its file %s was another (SHA-256 %.12s..., now %.12s...): the same weights "
            "may compute something else.",
            folder,
            source.made_by.rpartition(":")[0],
            source.sha256 or "none",
            now.sha256 or "none",
        )
    if not isinstance(policy, TextPolicy):
        policy.load(folder)
        return policy
    load_strictly(policy.module, weights, str(folder))
    policy.refresh(force=True)
    return policy


def _weights_in(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise GruppoError(
            f"the weights {folder / WEIGHTS} cannot be read: {reason}. It needs {WEIGHTS}, as policy.save(folder) "
            "writes it."
        ) from None


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """All of the weights, none left out and none made up; the module is as it was if they do not fit.

    Tied weights lie in a file once, under any of their names.
    """
    held = module.state_dict()
    alike = _tied(held)
    full = {name: weights[twin] for name in held for twin in alike[name] if twin in weights}
    full |= {name: weights[name] for name in held.keys() & weights.keys()}
    parts = {
        "missing": sorted(held.keys() - full.keys()),
        "unknown": sorted(weights.keys() - held.keys()),
        "of another shape": sorted(name for name, value in full.items() if held[name].shape != value.shape),
    }
    if any(parts.values()):
        said = "; ".join(f"{len(names)} {what}: {_shown(names)}" for what, names in parts.items() if names)
        raise GruppoError(
            f"the weights in {where} are of another module than this {type(module).__name__}: {said} (of {len(held)}). "
            "Put the function back as it was when they were saved, or give other weights."
        )
    module.load_state_dict(full)


def _tied(held: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Of each name, all names of the same numbers in memory, its own among them."""
    places: dict[Any, list[str]] = {}
    keys = {n: (t.data_ptr(), t.shape, t.stride(), t.dtype) if t.numel() else n for n, t in held.items()}
    for name, key in keys.items():
        places.setdefault(key, []).append(name)
    return {name: places[key] for name, key in keys.items()}


def _shown(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


# --- what is asked of a function --------------------------------------------------------------------------------------


def _parameters(make: Any, name: str) -> Mapping[str, inspect.Parameter]:
    if not callable(make):
        raise GruppoError(f"{name} is a {type(make).__name__}; it needs a function that makes a model. {WRAP}")
    try:
        found = inspect.signature(make).parameters
    except (TypeError, ValueError):  # of what is not written in Python
        return {}
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [n for n, p in found.items() if p.default is p.empty and p.kind not in free and n != "folder"]
    if needed:
        raise GruppoError(
            f"{name} needs the arguments {', '.join(needed)}, and is called with none, or with folder. Give them "
            "defaults."
        )
    return found


def _line_of(error: BaseException, source: MadeBy) -> str:
    """Where in the function's own file."""
    file = Path(source.made_by.rpartition(":")[0]).resolve()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return f" in line {lines[-1]}" if lines else ""


@torch.no_grad()
def _check_reads(policy: TextPolicy, name: str) -> None:
    """Refuse a module that gives no logits of ids, and one whose logits of a token know what comes after it."""
    what, end = f"the module of {name}, a {type(policy.module).__name__},", next(iter(policy.chat.eos_ids), 0) or 1
    ids = torch.tensor([[0, end, 0], [0, end, end]], device=policy.device)
    logits: Any = _run(policy.backbone.module.eval(), ids, what)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        got = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise GruppoError(f"{what} gave {got} for ids of shape [2, 3]; it needs logits [2, 3, V]. Return them alone.")
    if not logits.isfinite().all():
        raise NumericalStop(f"{what} gives logits that are not finite, so nothing can be sampled from it. Mend it.")
    first, second = logits[:, :2].float()
    if float((first - second).abs().max()) > 1e-3 * (1 + float(first.abs().max())):
        raise GruppoError(
            f"{what} is not causal: its logits of a token change with the token after it, which is not there yet while "
            "it is written. Mask its attention."
        )


def _run(module: Callable[..., Any], ids: Tensor, what: str) -> Any:
    try:
        return module(ids)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        raise GruppoError(
            f"{what} raised {type(error).__name__} when called with ids of shape [2, 3]: {text}. It needs to map ids "
            "[B, T] to logits [B, T, V]."
        ) from error
