"""Adapter folders: the files that peft writes and reads, and ``base.json``, which identifies the
base weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.integrity import check_links, check_seal, read_json
from gruppo.loading import command_name, import_extra
from gruppo.modalities.common import lora
from gruppo.modalities.common.state_dict import UNREADABLE, reason_of
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
PREFIX = "base_model.model."
"""Of peft's names: its wrapper, and the model inside it."""
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Values of options of an adapter W + s B A; some initializations change the base."""
NOT_PLAIN = (
    "modules_to_save",
    "trainable_token_indices",
    "use_dora",
    "lora_bias",
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "alora_invocation_tokens",
    "arrow_config",
)
"""Options of a peft LoRA beyond A and B, which this library does not train, sample with or
merge."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter read from a folder."""

    folder: Path
    config: Any
    """peft's LoraConfig."""
    weights: Mapping[str, Tensor]
    """``layers.0.q_proj.lora_A.weight`` and so on."""
    base: lora.Base | None
    """None if the folder has no base.json: peft wrote it, not gruppo."""
    base_names: list[str]
    """Names of the base, from base.json, then from peft's config."""

    def attach(self, module: nn.Module, *, base: str = "", is_merged: bool = False) -> None:
        """Add the adapter to a model that was loaded as ``base``, or to its weights; refuse another
        base."""
        lora.check_adaptable(module)
        found = lora.inject_config(module, self.config, base=base)
        if problem := self._misfit(module, found):
            made_for = f" Its base is {self.base_names[0]!r}." if self.base_names else ""
            raise GruppoError(f"""the adapter {self.folder} belongs to another base:
                {problem}.{made_for} Give that as --model, or an adapter of this model.""")
        is_known = self.base is not None and self.base.is_4bit == found.is_4bit
        if not is_known and self.base_names and base not in ("", *self.base_names):
            log.warning(
                "the adapter %s is for %s and is put on %s, whose layers have the same shapes.",
                *(self.folder, self.base_names[0], base),
            )
        elif self.base is not None and not is_known:
            log.warning(
                "the adapter %s was trained on a base of 4 bits and is put on one of full "
                "precision, or the reverse: their weights cannot be compared.",
                self.folder,
            )
        with torch.no_grad():
            for name, parameter in lora.adapter_weights(module).items():
                parameter.copy_(self.weights[name])
        if is_merged:
            lora.merge(module)

    def _misfit(self, module: nn.Module, found: lora.Base) -> str:
        """Why the weights do not fit a module with this adapter over the base ``found``; "" if they
        do."""
        shapes = {name: [*weight.shape] for name, weight in lora.adapter_weights(module).items()}
        own = {name: [*weight.shape] for name, weight in self.weights.items()}
        for name in sorted(own.keys() | shapes.keys()):
            saved, needed = own.get(name, "missing"), shapes.get(name, "missing")
            if saved != needed:
                return f"its {name} is {saved}, and that of the model is {needed}"
        # weights of 4 bits cannot be compared with those of full precision
        if self.base is None or self.base.is_4bit != found.is_4bit:
            return ""
        if self.base.sha256 == found.sha256:
            return ""
        digests = f"{self.base.sha256[:16]}..., these have {found.sha256[:16]}..."
        return f"it was trained on weights with SHA-256 {digests}"


MODELS = ("config.json", "denoiser.json", "model_index.json", "restorer.json", "module.json")
"""Files that mark a model folder: of transformers, a denoiser, a diffusers pipeline, a restoration
network, a language model that a function makes."""


def model_of(name: str | Path) -> str:
    """Return the final model folder of a run; any other name unchanged."""
    path = Path(name).expanduser()
    final = path / "final"
    run = path.parent if path.name == "final" else path
    is_final = (final / "COMPLETE").is_file()
    # a folder of a hub's cache has links
    if (run / "manifest.json").is_file() or (run / "final/COMPLETE").is_file():
        check_links(run)
    if is_final and not any((final / file).is_file() for file in (*MODELS, CONFIG)):
        raise GruppoError(
            f"the model of {name} is a module of your own; load {final}/model.safetensors into it",
            advice="One that is trained by name, as $model file.py:function, is opened by name too",
        )
    if is_final:
        return str(final)
    if (path / "manifest.json").is_file() and not any(path.glob("*.safetensors")):
        raise GruppoError(
            f"the run {name} has no final model yet. Finish it with {command_name()} resume {name}."
        )
    return str(name)


def is_adapter(path: str | Path) -> bool:
    """Return whether a folder, or the final model of a run, holds an adapter and no model."""
    folder = Path(model_of(path)).expanduser()
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_adapter(path: str | Path) -> Adapter:
    """Read the adapter in a folder that peft or gruppo wrote, or in a run; refuse any other than W
    + s B A."""
    folder = Path(model_of(path)).expanduser()
    if not (folder / CONFIG).is_file():
        problem = f"has no {CONFIG}" if folder.exists() else "does not exist"
        raise GruppoError(f"""the adapter folder {str(folder)!r} {problem}. Give a folder that peft
            or gruppo wrote.""")
    peft = import_extra("peft", "lora", f"the adapter {path}")
    check_seal(folder)
    base = None
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        weights = load_file(folder / WEIGHTS)
        if (folder / BASE).is_file():
            entry = read_json(folder / BASE)
            base = lora.Base(str(entry["base"]), str(entry["sha256"]), bool(entry.get("is_4bit")))
    except (*UNREADABLE, RecursionError) as error:
        raise GruppoError(f"""the adapter {folder} cannot be read: {reason_of(error)}. It needs
            {CONFIG} and {WEIGHTS}, as peft writes them.""") from error
    odd = [name for name in NOT_PLAIN if getattr(config, name, None)]
    odd += [name for name, known in PLAIN.items() if getattr(config, name, None) not in known]
    if odd:
        raise GruppoError(f"""the adapter {folder} has {odd[0]}={getattr(config, odd[0])!s}, which
            is more than a LoRA of W + s B A. Merge it with peft's merge_and_unload, and give the
            model.""")
    config.inference_mode = False
    # its weights are read; peft's other initializations would change the base
    config.init_lora_weights = True
    weights = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    names = [base.name if base else "", config.base_model_name_or_path or ""]
    return Adapter(folder, config, weights, base, list(filter(None, names)))


def save_adapter(module: nn.Module, folder: Path) -> None:
    """Write a folder that ``PeftModel.from_pretrained`` opens, with ``base.json`` beside the
    adapter."""
    source: Any = module
    source.peft_config[lora.POLICY].save_pretrained(folder)
    weights = {
        f"{PREFIX}{name}": p.detach().cpu().contiguous()
        for name, p in lora.adapter_weights(module).items()
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    base: lora.Base = source.gruppo_base
    entry: dict[str, Any] = {"base": base.name, "sha256": base.sha256, "is_4bit": base.is_4bit}
    (folder / BASE).write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")


def adapt_from(path: str | Path, *, base: str) -> Any:
    """Return the function that adds a folder's adapter to a model, for
    ``from_pretrained(adapt=...)``."""
    return partial(read_adapter(path).attach, base=base)
