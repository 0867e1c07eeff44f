"""Restoration policies by name: networks, actions, folders."""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gruppo.loading import load_object
from gruppo.modalities.restoration.consistency import CONSISTENCIES, Consistency
from gruppo.modalities.restoration.files import load_network, load_strictly, read_restorer
from gruppo.modalities.restoration.named import action_of, open_action
from gruppo.modalities.restoration.networks import NETWORKS
from gruppo.modalities.restoration.policy import RestorationPolicy
from gruppo.seeds import seed_at
from gruppo.types import GruppoError

FORMS = "dncnn, unet, unet:width=32, file.py:Class or package.module:Class"


def open_network(spec: str, *, channels: int = 3, conditions: int = 0, seed: int = 0) -> nn.Module:
    """The network that ``unet:width=24``, ``file.py:Class`` or ``package.module:Class`` names, its weights by the seed.

    A class or function of a file is called with those of ``channels`` and ``conditions`` that it takes.
    """
    kind, _, rest = spec.partition(":")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_at(seed, "network") % 2**63)
        if kind in NETWORKS:
            return NETWORKS[kind](channels, conditions=conditions, **_options(kind, rest))
        if not rest:
            near = difflib.get_close_matches(kind, NETWORKS, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise GruppoError(f"there is no network {spec!r}; write {FORMS}.{guess}")
        return _of_file(spec, {"channels": channels, "conditions": conditions})


def _of_file(spec: str, told: dict[str, int]) -> nn.Module:
    made = load_object(spec)
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise GruppoError(f"{spec} is a {type(made).__name__}; it needs to be a module, or what makes one.")
        try:
            known = inspect.signature(made).parameters
            made = made(**{name: value for name, value in told.items() if name in known})
        except Exception as error:
            reason = " ".join(str(error).split())
            raise GruppoError(
                f"{spec} cannot be called without arguments of its own ({type(error).__name__}: {reason}). Give them "
                "defaults; it may take channels and conditions."
            ) from error
    if not isinstance(made, nn.Module):
        raise GruppoError(f"{spec} made a {type(made).__name__}; it needs a torch.nn.Module. Return one.")
    return made


def _options(kind: str, rest: str) -> dict[str, int]:
    known = [name for name in inspect.signature(NETWORKS[kind]).parameters if name not in ("channels", "conditions")]
    options: dict[str, int] = {}
    for part in filter(None, rest.split(",")):
        name, _, said = (micro_batch.strip() for micro_batch in part.partition("="))
        if name not in known or not said.isdigit():
            raise GruppoError(
                f"the network {kind}:{rest} is not understood; it has {', '.join(known)}, whole numbers. Write {FORMS}."
            )
        options[name] = int(said)
    return options


def open_restorer(
    network: str,
    action: str,
    *,
    channels: int = 3,
    weights: str | Path | None = None,
    consistency: str | Consistency = "reference",
    seed: int = 0,
    **choices: Any,
) -> RestorationPolicy:
    """A new policy by names: ``open_restorer("unet", "band_gains:grid=8", weights="run/final", trains="action")``.

    ``weights``: of the network alone, see ``load_network``. ``choices``: patches, trains, loss, supervises.
    """
    if isinstance(consistency, str):
        if consistency not in CONSISTENCIES:
            known = ", ".join(map(repr, CONSISTENCIES))
            raise GruppoError(f"consistency={consistency!r} is not one of {known}, or a ToDegraded. Set 'reference'.")
        consistency = CONSISTENCIES[consistency]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_at(seed, "action") % 2**63)
        acts = open_action(action, channels)
    module = open_network(network, channels=channels, conditions=acts.conditions, seed=seed)
    if weights is not None:
        load_network(module, weights)
    return RestorationPolicy(module, acts, channels=channels, consistency=consistency, spec=network, **choices)


def load_restorer(
    folder: str | Path, network: nn.Module | None = None, *, consistency: Consistency | None = None
) -> RestorationPolicy:
    """The policy that was saved. A network that is neither ours nor named ``file.py:Class`` is given, and gets weights.

    A consistency is no part of a save: it may hold a function.
    """
    folder = Path(folder).expanduser()
    said, weights = read_restorer(folder)
    action, channels = action_of(said["action"]), said["channels"]
    if network is None:
        network = _network_of(said, folder, channels, action.conditions)
    choices = {name: said[name] for name in ("patches", "trains", "loss", "supervises")}
    policy = RestorationPolicy(
        network, action, channels=channels, consistency=consistency, spec=said["network"], **choices
    )
    load_strictly(policy.module, weights, str(folder))
    policy.module.probe(channels)
    return policy


def _network_of(said: dict[str, Any], folder: Path, channels: int, conditions: int) -> nn.Module:
    if said["sizes"] is not None:
        return NETWORKS[said["network"]](**said["sizes"])
    if not said["network"]:
        raise GruppoError(f"{folder} holds the weights of a module that is not ours. Give load_restorer its module.")
    return open_network(said["network"], channels=channels, conditions=conditions)
