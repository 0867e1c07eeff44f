"""Restoration policies and networks by name, from files and from folders. Weights are always loaded
strictly."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gruppo import trust
from gruppo.loading import did_you_mean, load_object, split_options, typed_options
from gruppo.modalities.common.state_dict import load_strictly, read_policy, read_safetensors
from gruppo.modalities.restoration.actions import ACTIONS, open_action
from gruppo.modalities.restoration.networks import NETWORKS
from gruppo.modalities.restoration.policy import SETTINGS, RestorationPolicy
from gruppo.seeds import seed_at
from gruppo.types import GruppoError

FORMS = "unet, unet:width=32, file.py:Class or package.module:Class"


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
