"""Language models that a function returns, by name: ``path/to/file.py:function`` or
``package.module:function``.

Saved weights do not say what computes with them, so ``module.json`` beside them names the function.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gruppo import trust
from gruppo.integrity import check_seal, read_json
from gruppo.loading import absolute_spec, is_file_name, load_object
from gruppo.modalities.common.state_dict import load_strictly, read_safetensors
from gruppo.modalities.text.policy import TextPolicy
from gruppo.protocols import Policy
from gruppo.seeds import seed_at
from gruppo.timeouts import describe_error
from gruppo.types import GruppoError, NumericalStop

WEIGHTS, SETTINGS = "model.safetensors", "module.json"
HINT = "Return gruppo.from_module(module, tokenizer, eos_ids=[...])."


def names_function(name: str) -> bool:
    """Return whether a model name means a function. A folder of that name comes first; a bare
    ``file.py`` lacks one."""
    if Path(name).expanduser().is_dir():
        return False
    place, colon, function = name.rpartition(":")
    if not colon or name.endswith(".py"):
        return name.endswith(".py")
    if is_file_name(place):
        return True
    parts = place.split(".")
    try:
        return all(map(str.isidentifier, (function, *parts))) and find_spec(parts[0]) is not None
    except (ImportError, ValueError):  # find_spec fails on modules without a spec
        return False


def is_custom(folder: str | Path) -> bool:
    """Return whether a folder holds the weights of such a model."""
    return (Path(folder).expanduser() / SETTINGS).is_file()


@dataclass(frozen=True)
class ModelFunction:
    """The function that makes a model."""

    made_by: str
    """``/path/to/file.py:function``, the same from any folder, or ``package.module:function``."""

    @classmethod
    def from_name(cls, name: str) -> ModelFunction:
        if name.endswith(".py"):
            raise GruppoError(f"""the model {name!r} is a Python file; a function in it makes the
                model. Name it too, as {name}:model.""")
        load_object(name)  # refuses a name that cannot be imported
        return cls(absolute_spec(name))

    @classmethod
    def read(cls, folder: Path) -> ModelFunction:
        try:
            return cls(str(read_json(folder / SETTINGS)["made_by"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GruppoError(f"""{folder / SETTINGS} cannot be read ({type(error).__name__}:
                {error}). It needs the entry made_by, as policy.save writes it.""") from None

    def write(self, folder: Path) -> None:
        (folder / SETTINGS).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        trust.record(folder, trust.imports(self.made_by))


def open_custom(name: str | Path, *, seed: int = 0) -> Policy:
    """Return the policy of ``file.py:function``, or of a folder that was saved of one: with the
    folder's weights.

    Random weights depend on the seed only.
    """
    if not is_custom(name):
        return _make(str(name), seed, None)
    folder = Path(name).expanduser()
    check_seal(folder)
    source = ModelFunction.read(folder)
    weights = read_safetensors(folder / WEIGHTS)
    try:
        with trust.opening(folder, trust.imports(source.made_by)):
            policy = _make(source.made_by, seed, folder)
    except GruppoError as error:
        raise type(error)(
            f"the model {folder} is made by {source.made_by}, which cannot be used: {error}"
        ) from error
    if isinstance(policy, TextPolicy):
        load_strictly(policy.module, weights, str(folder))
        policy.refresh(force=True)
    else:
        policy.load(folder)
    return policy


def _make(name: str, seed: int, folder: Path | None) -> Policy:
    """Call a function that takes no argument, or ``folder``: whose weights will be loaded, or None
    for a new model.

    The global generator of torch is left unchanged.
    """
    source = ModelFunction.from_name(name)
    make = load_object(name)
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(make).parameters
    except (TypeError, ValueError):  # not written in Python, or not a function
        parameters = {}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_at(seed, "module"))
            policy = make(folder=folder) if "folder" in parameters else make()
            if isinstance(policy, TextPolicy) and policy.backbone.is_plain:
                _check_logits(policy, name)
                policy.backbone.source = source
    except GruppoError:
        raise
    except (Exception, SystemExit) as error:
        raise GruppoError(f"{name} raised {describe_error(error)}. {HINT}") from error
    if not isinstance(policy, Policy):
        raise GruppoError(f"{name} returned a {type(policy).__name__}; it needs a policy. {HINT}")
    if not isinstance(policy, TextPolicy):
        policy.origin = source
    return policy


@torch.no_grad()
def _check_logits(policy: TextPolicy, name: str) -> None:
    """Refuse a module that does not map ids to logits, and one whose logits of a token depend on
    later tokens."""
    what = f"the module of {name}, a {type(policy.module).__name__},"
    end = next(iter(policy.chat.eos_ids), 0) or 1
    ids = torch.tensor([[0, end, 0], [0, end, end]], device=policy.device)
    try:
        logits: Any = policy.backbone.module.eval()(ids)
        shape = list(logits.shape)
    except Exception as error:
        raise GruppoError(f"""{what} raised {describe_error(error)} for ids of shape [2, 3]. It
            needs to map ids [B, T] to logits [B, T, V].""") from error
    if len(shape) != 3 or shape[:2] != [2, 3]:
        raise GruppoError(
            f"{what} gave {shape} for ids [2, 3]; it needs to return logits [2, 3, V]."
        )
    if not logits.isfinite().all():
        raise NumericalStop(
            f"{what} gives logits that are not finite, so nothing can be sampled from it. Fix it."
        )
    first, second = logits[:, :2].float()
    if float((first - second).abs().max()) > 1e-3 * (1 + float(first.abs().max())):
        raise GruppoError(f"""{what} is not causal: its logits of a token change with the token
            after it, which does not exist yet during sampling. Mask its attention.""")
