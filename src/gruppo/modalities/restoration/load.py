"""Restoration policies and networks by name, from files and from folders. Weights are always loaded
strictly."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gruppo import trust
from gruppo.loading import did_you_mean, load_object, split_options, typed_options
from gruppo.modalities.common.state_dict import load_strictly, read_policy, read_safetensors
from gruppo.modalities.restoration.actions import ACTIONS, open_action
from gruppo.modalities.restoration.consistency import Consistency
from gruppo.modalities.restoration.networks import NETWORKS, Restorer
from gruppo.modalities.restoration.policy import SAVED, SETTINGS, RestorationPolicy
from gruppo.seeds import seed_at
from gruppo.types import GruppoError

FORMS = "dncnn, unet, unet:width=32, file.py:Class or package.module:Class"


def open_network(spec: str, *, channels: int = 3, conditions: int = 0, seed: int = 0) -> nn.Module:
    """Build the network of ``unet:width=24``, ``file.py:Class`` or ``package.module:Class``,
    initialized by the seed.

    A class or function from a file is called with those of ``channels`` and ``conditions`` that it
    accepts.
    """
    kind, _, rest = spec.partition(":")
    sizes = {"channels": channels, "conditions": conditions}
    # a network of the user's draws from the global generator too
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_at(seed, "network") % 2**63)
        if kind in NETWORKS:
            options = typed_options(NETWORKS[kind], split_options(rest), FORMS)
            return NETWORKS[kind](**options | sizes)
        if not rest:
            raise GruppoError(
                f"there is no network {spec!r}; write {FORMS}.{did_you_mean(kind, NETWORKS)}"
            )
        network = load_object(spec)
        if callable(network) and not isinstance(network, nn.Module):
            try:
                known = inspect.signature(network).parameters
                network = network(**{name: sizes[name] for name in sizes if name in known})
            except Exception as error:
                reason = " ".join(str(error).split())
                raise GruppoError(f"""{spec} cannot be called without further arguments
                    ({type(error).__name__}: {reason}). Give them defaults; it may take channels and
                    conditions.""") from error
    if not isinstance(network, nn.Module):
        raise GruppoError(
            f"{spec} is a {type(network).__name__}; it needs to be a torch.nn.Module or a function "
            f"of one."
        )
    return network


def load_network(network: nn.Module, path: str | Path) -> None:
    """Load a network's weights from a .safetensors file, or from a policy's folder, in the dtype of
    the network."""
    path, prefix = Path(path).expanduser(), "network."
    if not path.is_dir():
        weights = read_safetensors(path)
    else:
        saved = _read_folder(path)[1].items()
        weights = {n.removeprefix(prefix): value for n, value in saved if n.startswith(prefix)}
    load_strictly(network, weights, str(path))


def open_restorer(
    network: str,
    action: str,
    *,
    channels: int = 3,
    weights: str | Path | None = None,
    seed: int = 0,
    **options: Any,
) -> RestorationPolicy:
    """Build a policy by names: ``open_restorer("unet", "band_gains:grid=8", weights="run/final",
    trains="action")``.

    ``weights``: of the network alone, see ``load_network``. ``options``: patches, trains, loss,
    supervises, consistency.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_at(seed, "action") % 2**63)
        opened = open_action(action, channels)
    module = open_network(network, channels=channels, conditions=opened.conditions, seed=seed)
    if weights is not None:
        load_network(module, weights)
    return RestorationPolicy(module, opened, channels=channels, spec=network, **options)


def load_restorer(
    folder: str | Path, network: nn.Module | None = None, *, consistency: Consistency | None = None
) -> RestorationPolicy:
    """Open the policy that ``save`` wrote. ``network``: the module to load if no name or file gives
    it.

    A consistency is not saved: it may hold a function.
    """
    folder = Path(folder).expanduser()
    settings, weights = _read_folder(folder)
    action, spec = dict(settings["action"]), settings["network"]
    opened = ACTIONS[action.pop("kind")](**action)
    if network is None and settings["sizes"] is not None:
        network = NETWORKS[spec](**settings["sizes"])
    elif network is None and not spec:
        raise GruppoError(
            f"{folder} holds the weights of a module of your own. Give load_restorer that module."
        )
    elif network is None:
        channels = settings["channels"]
        with trust.opening(folder, trust.imports(spec)):
            network = open_network(spec, channels=channels, conditions=opened.conditions)
    load_strictly(Restorer(network, opened), weights, str(folder))
    options = {name: settings[name] for name in ("channels", *SAVED)}
    return RestorationPolicy(network, opened, consistency=consistency, spec=spec, **options)


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and weights of a policy's folder."""
    needs = lambda x: (x["action"]["kind"], x["channels"], x["network"])  # noqa: E731
    return read_policy(folder, SETTINGS, "restoration policy", needs)
