"""Adapters as folders: what peft writes and reads, and ``base.json``, which says what they stand on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.loading import import_extra, program
from gruppo.modalities.common.lora import (
    POLICY,
    Base,
    adapter_weights,
    base_of,
    check_can_have,
    inject_as,
    is_linear,
    merge,
)
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
PREFIX = "base_model.model."
"""Of peft's names: its wrapper, and in it the model."""
PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin that leave the base as it is."""
NOT_PLAIN = ("modules_to_save", "trainable_token_indices", "use_dora", "lora_bias", "target_parameters",
             "layer_replication", "use_qalora", "alora_invocation_tokens", "arrow_config")  # fmt: skip
"""What a peft LoRA may have beside A and B, and this library does not train, sample with or merge."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that lies in a folder."""

    folder: Path
    config: Any
    """peft's LoraConfig."""
    weights: Mapping[str, Tensor]
    """``layers.0.q_proj.lora_A.weight`` and so on."""
    base: Base | None
    """None where the folder has no base.json: peft wrote it, not gruppo."""

    @property
    def base_names(self) -> list[str]:
        """What the base is called: by base.json, then by peft."""
        names = [self.base.name if self.base else "", self.config.base_model_name_or_path or ""]
        return [name for name in names if name]

    def attach(self, module: nn.Module, *, base: str = "") -> None:
        """Put it on a model that was loaded as ``base``; another base is refused."""
        check_can_have(module)
        self._check_fits(module)
        inject_as(module, self.config, base=base)
        self._check_base(module, base)
        own = adapter_weights(module)
        if odd := sorted(own.keys() ^ self.weights.keys()):
            raise GruppoError(
                f"the adapter {self.folder} names other layers in {CONFIG} than it has weights for: {odd[0]} is one of "
                f"{len(odd)} differences. Save it again with peft, or train a new one."
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(self.weights[name])

    def attach_merged(self, module: nn.Module, *, base: str = "") -> None:
        """Add it to the weights of a model."""
        self.attach(module, base=base)
        merge(module)

    def _check_fits(self, module: nn.Module) -> None:
        parts = dict(module.named_modules())
        for name, weight in self.weights.items():
            place, half = name.removesuffix(".weight").rsplit(".", 1)
            layer: Any = parts.get(place)
            if layer is None or not is_linear(layer):
                raise self._refused(f"it adapts {place}, and the model has no such linear layer")
            needed = _features(layer)[0 if half == "lora_A" else 1]
            got = weight.shape[1 if half == "lora_A" else 0]
            if got != needed:
                raise self._refused(f"its {name} is for {got} features, and the model's {place} has {needed}")

    def _check_base(self, module: nn.Module, name: str) -> None:
        found = base_of(module)
        assert found is not None
        if self.base is not None and self.base.sha256 != found.sha256:
            raise self._refused(
                f"it was trained on weights with SHA-256 {self.base.sha256[:16]}..., and these have "
                f"{found.sha256[:16]}..."
            )
        if name and self.base_names and name not in self.base_names:
            same = "whose weights are the same" if self.base else "whose layers have the same shapes"
            log.warning(
                "the adapter %s was made for %s and is put on %s, %s.", self.folder, self.base_names[0], name, same
            )

    def _refused(self, why: str) -> GruppoError:
        wanted = f" Its base is {self.base_names[0]!r}." if self.base_names else ""
        return GruppoError(
            f"the adapter {self.folder} belongs to another base: {why}.{wanted} Give that as --model, or an adapter of "
            "this model."
        )


def _features(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer; GPT-2's Conv1D holds its weight the other way round."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return tuple(layer.weight.shape)


MODELS = ("config.json", "denoiser.json", "model_index.json", "restorer.json", "module.json")
"""One of them lies in every model's folder: of transformers, a denoiser, a pipeline of diffusers, a network that
restores images, a language model that a function makes."""


def model_of(name: str | Path) -> str:
    """The model folder of a run, else the name as it is."""
    path = Path(name).expanduser()
    final = path / "final"
    if (final / "COMPLETE").is_file() and not (_holds_adapter(final) or any((final / n).is_file() for n in MODELS)):
        raise GruppoError(
            f"the model of {name} is a module of your own; load {final}/model.safetensors into it. One that is trained "
            "by name, as --model file.py:function, is opened by name too."
        )
    if (final / "COMPLETE").is_file():
        return str(final)
    if (path / "manifest.json").is_file() and not any(path.glob("*.safetensors")):
        raise GruppoError(f"the run {name} has no final model yet. Finish it with {program()} resume {name}.")
    return str(name)


def is_adapter(path: str | Path) -> bool:
    """Whether a folder, or the final model of a run's, holds an adapter and no model."""
    return _holds_adapter(Path(model_of(path)).expanduser())


def _holds_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_adapter(path: str | Path) -> Adapter:
    """The adapter in a folder that peft or gruppo wrote, or in a run's."""
    folder = Path(model_of(path)).expanduser()
    if not (folder / CONFIG).is_file():
        what = f"has no {CONFIG}" if folder.exists() else "does not exist"
        raise GruppoError(f"the adapter folder {str(folder)!r} {what}. Give a folder that peft or gruppo wrote.")
    peft = import_extra("peft", "lora", f"the adapter {path}")
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        weights = load_file(folder / WEIGHTS)
        base = _read_base(folder / BASE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise GruppoError(
            f"the adapter {folder} cannot be read: {' '.join(str(error).split())}. It needs {CONFIG} and {WEIGHTS}, as "
            "peft writes them."
        ) from error
    _check_plain(folder, config)
    config.inference_mode = False
    config.init_lora_weights = True  # its numbers are read; peft's other ways to begin would change the base
    return Adapter(folder, config, {name.removeprefix(PREFIX): value for name, value in weights.items()}, base)


def _read_base(path: Path) -> Base | None:
    if not path.is_file():
        return None
    said = json.loads(path.read_text(encoding="utf-8"))
    return Base(str(said["base"]), str(said["sha256"]))


def _check_plain(folder: Path, config: Any) -> None:
    """Refuse what is more than W + s B A."""
    if getattr(config.peft_type, "value", config.peft_type) != "LORA":
        raise GruppoError(
            f"the adapter {folder} is a {getattr(config.peft_type, 'value', config.peft_type)}, and LoRA alone is "
            "supported. Merge it with peft's merge_and_unload, and give the model."
        )
    odd = [name for name in NOT_PLAIN if getattr(config, name, None)]
    odd += ["bias"] if config.bias != "none" else []
    odd += ["init_lora_weights"] if config.init_lora_weights not in PLAIN_INITS else []
    if odd:
        raise GruppoError(
            f"the adapter {folder} has {odd[0]}={getattr(config, odd[0])!r}, which changes more than W + s B A. Merge "
            "it with peft's merge_and_unload, and give the model."
        )


def save_adapter(module: nn.Module, folder: Path) -> None:
    """A folder that ``PeftModel.from_pretrained`` opens, with ``base.json`` beside it."""
    own: Any = module
    own.peft_config[POLICY].save_pretrained(folder)
    weights = {f"{PREFIX}{name}": p.detach().cpu().contiguous() for name, p in adapter_weights(module).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    base = base_of(module)
    assert base is not None
    text = json.dumps({"base": base.name, "sha256": base.sha256}, indent=2)
    (folder / BASE).write_text(text + "\n", encoding="utf-8")


def adapt_from(path: str | Path, *, base: str) -> Any:
    """What puts the adapter of a folder on a model (``from_pretrained(adapt=...)``)."""
    return partial(read_adapter(path).attach, base=base)
