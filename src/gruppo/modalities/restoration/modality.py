"""Networks that restore images: from ``--model`` to a policy, and the options that it can
satisfy."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gruppo import trust
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest
from gruppo.loading import did_you_mean, load_object, split_options, typed_options
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.common.images import ImageModality
from gruppo.modalities.common.state_dict import load_strictly, read_policy, read_safetensors
from gruppo.modalities.common.validation import changed_options, refuse_changed
from gruppo.modalities.restoration.actions import ACTIONS, open_action
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.modalities.restoration.consistency import (
    Consistency,
    equivariance,
    to_degraded,
    to_reference,
)
from gruppo.modalities.restoration.networks import NETWORKS
from gruppo.modalities.restoration.policy import SETTINGS, RestorationPolicy
from gruppo.protocols import ParameterGroup, Policy, PromptSource, peek
from gruppo.seeds import seed_at
from gruppo.types import DataError, GruppoError, Sampling

FORMS = "unet, unet:width=32, file.py:Class or package.module:Class"
NEW = "restore:"
"""Prefix of a network's name: a new policy over it."""


class RestorationModality(ImageModality):
    """Networks from degraded images to clean ones."""

    name = "restoration"
    config_section = RestorationConfig
    settings_file = SETTINGS
    has_consistency = True

    def matches(self, model: str) -> bool:
        return model.startswith(NEW) or super().matches(model)

    def validate(self, config: Config) -> None:
        super().validate(config)
        model = config.model
        if model == NEW:
            raise GruppoError(
                f"model {model!r} names no network",
                option="model",
                advice=f"{NEW}unet or {NEW}FILE.py:Class",
            )
        if not model.startswith(NEW):
            refuse_changed(config, ("action", "weights"), "a new policy")
        if self.consistency_reads_reference(config) and config.reference.place != "device":
            raise GruppoError(
                f"""reference.place={config.reference.place!r}: a consistency to the reference reads
                    its images in every update""",
                advice="Leave $reference.place out, or set $restoration.consistency equivariance",
            )

    def open(self, config: Config, data: PromptSource) -> tuple[Policy, dict[str, Any]]:
        if not config.model.startswith(NEW):
            return self.adapt(config, self.load(config.model), data), {"name": config.model}
        chosen, first = config.section(RestorationConfig), peek(data)[0].inputs
        if not isinstance(first, torch.Tensor) or first.ndim != 3:
            raise DataError(
                f"""model {config.model} restores images, and the data {config.data!r} have none: a
                    prompt is a {type(first).__name__}""",
                option="data",
                advice="photos:noise=25, degrade:FOLDER:noise=25 or pairs:DEGRADED:CLEAN",
            )
        policy = open_restorer(
            config.model.removeprefix(NEW),
            chosen.action,
            channels=len(first),
            weights=model_of(chosen.weights) if chosen.weights else None,
            seed=config.seed,
        )
        return self.adapt(config, policy, data), {"name": config.model}

    def adapt(self, config: Config, policy: Policy, data: PromptSource) -> Policy:
        """Return a policy over the same weights, supervised as the options say."""
        super().adapt(config, policy, data)  # refuses adapters
        assert isinstance(policy, RestorationPolicy)
        if not any(parameter.requires_grad for parameter in policy.module.parameters()):
            raise GruppoError(
                f"""nothing is to be trained: neither the network of {config.model!r} nor its action
                    has weights that are not frozen""",
                advice="Give the network some, or set $restoration.action low_resolution",
            )
        chosen, policy = config.section(RestorationConfig), copy.copy(policy)
        policy.loss = chosen.loss or policy.loss
        policy.supervises = chosen.supervises or policy.supervises
        # a policy from memory keeps its own consistency unless the options name another
        is_named = config.model != IN_MEMORY or bool(changed_options(chosen, ["consistency"]))
        if is_named and highest(config, "cons_coef"):
            policy.consistency = open_consistency(chosen.consistency)
        return policy

    def load(self, model: str, **options: Any) -> Policy:
        return load_restorer(model_of(model))

    def sampling(self, config: Config, policy: Policy | None = None) -> Sampling:
        return replace(config.rollout.sampling, max_actions=1)

    def parameter_groups(self, config: Config, policy: Policy) -> list[ParameterGroup]:
        """Group by unit: the action's gradient is of nats and the network's of pixels, with limits
        of their own."""
        names = [name for name, p in policy.module.named_parameters() if p.requires_grad]
        network = tuple(name for name in names if not name.startswith("action."))
        action = tuple(name for name in names if name.startswith("action."))
        factor = config.section(RestorationConfig).action_lr_factor
        groups = [ParameterGroup(network), ParameterGroup(action, factor, "action_norm")]
        return [group for group in groups if group.names]

    def consistency_reads_reference(self, config: Config) -> bool:
        is_used = highest(config, "cons_coef") > 0
        return is_used and config.section(RestorationConfig).consistency == "reference"

    def absolute_paths(self, config: Config, absolute: Callable[[str], str]) -> Config:
        chosen, model = config.section(RestorationConfig), config.model
        if model.startswith(NEW):
            file, colon, name = model.removeprefix(NEW).rpartition(":")
            model = f"{NEW}{absolute(file)}:{name}" if colon and file.endswith(".py") else model
        restoration = replace(
            chosen, weights=absolute(chosen.weights), consistency=absolute(chosen.consistency)
        )
        return replace(config, model=model, modality=restoration)


def open_consistency(name: str) -> Consistency:
    """The consistency of an option: a name, or a degradation of the user."""
    known: dict[str, Consistency] = {"reference": to_reference, "equivariance": equivariance}
    if name in known:
        return known[name]
    if ":" not in name:
        raise GruppoError(
            f"restoration.consistency={name!r} is not {' or '.join(known)} or FILE.py:function",
            option="restoration.consistency",
            advice="to one of them",
        )
    function = load_object(name)
    if not callable(function):
        raise GruppoError(f"""{name} is a {type(function).__name__}; a degradation is a function of
            images and prompts.""")
    return to_degraded(function)


# --- networks and policies by name, from files and from folders -----------------------------------


def open_network(spec: str, *, channels: int = 3, seed: int = 0) -> nn.Module:
    """Build the network of ``unet:width=24``, ``file.py:Class`` or ``package.module:Class``,
    initialized by the seed.

    A class or function from a file is called with ``channels`` if it accepts them.
    """
    kind, _, rest = spec.partition(":")
    # a network of the user's draws from the global generator too
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_at(seed, "network") % 2**63)
        if kind in NETWORKS:
            options = typed_options(NETWORKS[kind], split_options(rest), FORMS)
            return NETWORKS[kind](channels, **options)
        if not rest:
            hint = did_you_mean(kind, NETWORKS)
            raise GruppoError(f"there is no network {spec!r}; write {FORMS}.{hint}")
        network = load_object(spec)
        if callable(network) and not isinstance(network, nn.Module):
            try:
                has_channels = "channels" in inspect.signature(network).parameters
                network = network(channels=channels) if has_channels else network()
            except Exception as error:
                reason = " ".join(str(error).split())
                raise GruppoError(f"""{spec} cannot be called without arguments other than channels
                    ({type(error).__name__}: {reason}). Give them defaults.""") from error
    if not isinstance(network, nn.Module):
        raise GruppoError(f"""{spec} is a {type(network).__name__}; it needs to be a torch.nn.Module
            or a function of one.""")
    return network


def open_restorer(
    network: str,
    action: str,
    *,
    channels: int = 3,
    weights: str | Path | None = None,
    seed: int = 0,
    **options: Any,
) -> RestorationPolicy:
    """Build a policy by names: ``open_restorer("unet", "band_gains:grid=8", weights="run/final")``.

    ``weights``: of the network alone, a .safetensors file or the folder of a policy. ``options``:
    loss, supervises, consistency.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_at(seed, "action") % 2**63)
        opened = open_action(action, channels)
    module = open_network(network, channels=channels, seed=seed)
    if weights is not None:
        path, prefix = Path(weights).expanduser(), "network."
        if path.is_dir():
            saved = read_policy(path, SETTINGS, "restoration policy", bool)[1].items()
            tensors = {n.removeprefix(prefix): value for n, value in saved if n.startswith(prefix)}
        else:
            tensors = read_safetensors(path)
        load_strictly(module, tensors, str(path))
    return RestorationPolicy(module, opened, channels=channels, spec=network, **options)


def load_restorer(
    folder: str | Path, network: nn.Module | None = None, **options: Any
) -> RestorationPolicy:
    """Open the policy that ``save`` wrote. ``network``: the module to load if no name or file gives
    it.

    ``options``: a consistency, which is not saved: it may hold a function.
    """
    folder = Path(folder).expanduser()

    def build(settings: dict[str, Any]) -> RestorationPolicy:
        action, spec, channels = dict(settings["action"]), settings["network"], settings["channels"]
        opened = ACTIONS[action.pop("kind")](**action)
        module = network
        if module is None and settings["sizes"] is not None:
            module = NETWORKS[spec](**settings["sizes"])
        elif module is None and not spec:
            raise GruppoError(f"""{folder} holds the weights of a module of your own. Give
                load_restorer that module.""")
        elif module is None:
            with trust.opening(folder, trust.imports(spec)):
                module = open_network(spec, channels=channels)
        saved = {name: settings[name] for name in ("loss", "supervises")}
        return RestorationPolicy(module, opened, channels=channels, spec=spec, **saved, **options)

    policy, weights = read_policy(folder, SETTINGS, "restoration policy", build)
    load_strictly(policy.module, weights, str(folder))
    return policy


RESTORATION = RestorationModality()
RestorationPolicy.modality = RESTORATION
