"""The weights of a run, by name: to a checkpoint, and back into a model that fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gruppo.config.schema import IN_MEMORY
from gruppo.protocols import digest
from gruppo.trainer import checkpoint
from gruppo.trainer.run import Run
from gruppo.types import GruppoError


@torch.no_grad()
def restore_weights(held: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights in place; ValueError if names or shapes differ."""
    if held.keys() != saved.keys():
        odd = sorted(held.keys() ^ saved.keys())
        raise ValueError(f"{len(odd)} tensors differ by name, {odd[0]} among them")
    for name, tensor in held.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(f"{name} has shape {tuple(saved[name].shape)}, the model needs {tuple(tensor.shape)}")
        tensor.copy_(saved[name])


def first_weights(run: Run) -> str | None:
    """SHA-256 of the untrained weights, where a resume depends on them and no file name stands for them."""
    if run.reference is None and run.config.model != IN_MEMORY:
        return None
    return digest(run.policy.frozen_base() | run.policy.checkpoint_weights())


def check_base(run: Run, saved: checkpoint.Saved, folder: Path) -> None:
    """Refuse a checkpoint of an adapter on other weights than the run's."""
    own, then = run.policy.base_sha256, saved.state.get("base_sha256")
    if own == then:
        return
    if own is None or then is None:
        what = "holds an adapter, and this run trains all weights" if own is None else "holds all weights, no adapter"
    else:
        what = f"holds an adapter of weights with SHA-256 {then[:16]}..., and {run.config.model} has {own[:16]}..."
    raise GruppoError(
        f"the checkpoint of step {saved.step} in {folder} {what}: it belongs to another base. Resume with the run's "
        "own config and the model as it was, or start a new run."
    )


def check_critic(run: Run, saved: checkpoint.Saved, folder: Path) -> None:
    """Refuse a checkpoint with another critic than the run's, before anything is restored."""
    own = None if run.critic is None else run.critic.checkpoint_weights()
    if (what := _other_critic(own, saved.critic)) is not None:
        raise GruppoError(
            f"the checkpoint of step {saved.step} in {folder} {what}. Resume with the run's own objective and critic, "
            "or start a new run."
        )


def _other_critic(own: Mapping[str, Tensor] | None, saved: Mapping[str, Tensor] | None) -> str | None:
    """What is wrong with the saved critic, or None."""
    if own is None or saved is None:
        if own is None and saved is None:
            return None
        return "holds a critic, and this run has none" if own is None else "holds no critic, and this run needs one"
    if odd := sorted(own.keys() ^ saved.keys()):
        return f"holds another critic than this run's: {len(odd)} tensors differ by name, {odd[0]} among them"
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            got, needed = list(saved[name].shape), list(tensor.shape)
            return f"holds another critic than this run's: its {name} is {got}, this run needs {needed}"
    return None
