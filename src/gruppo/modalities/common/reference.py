"""What the KL term is measured against: the policy as it was, or weights that follow it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.modalities.common.lora import adapter
from gruppo.modalities.common.weight_storage import MemoryShelf, Place, Shelf, empty, filled, lent, shelf_at
from gruppo.protocols import Outputs, Policy
from gruppo.types import GruppoError, Likelihood, MicroBatch, Request, Rollouts


class FrozenReference:
    """The policy as it was when this was made: a copy in evaluation mode, without gradients, that never changes.

    It is a copy of the weights that do the arithmetic, so that the KL of an unchanged policy is exactly 0.
    """

    def __init__(self, policy: Any, *, place: Place = "device", folder: Path | None = None) -> None:
        self.module, self._policy = _copied(policy)
        self.rests = place != "device"
        own = _parameters(self.module)
        self._shelf = shelf_at(place, own, folder or Path()) if self.rests else MemoryShelf(own)
        if self.rests:
            empty(self.module)

    def here(self) -> AbstractContextManager[None]:
        return filled(self.module, self._shelf) if self.rests else nullcontext()

    @torch.no_grad()
    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()) -> Likelihood:
        with self.here():
            return self._policy.likelihood(rollouts, micro_batch, outputs=outputs)

    def update(self, policy: Policy, step: int) -> None:
        """Nothing: it is frozen."""

    def frozen(self) -> Mapping[str, Tensor]:
        return self._shelf.read() if self.rests else _parameters(self.module)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: it is made of the model that the run began with."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _check_fits({}, state)


class MixedReference:
    """Weights that follow the policy's: reference <- rate policy + (1 - rate) reference, every ``every`` steps; where
    that is 0, only when ``renew`` is called.

    Held and mixed in the dtype of the policy's master weights; what computes is cast from them. What the policy does
    not train stays as it was, and so do buffers. Gorbatovski et al. 2024 (arXiv 2404.09656), the soft update.
    """

    def __init__(
        self, policy: Any, *, rate: float, every: int, place: Place = "device", folder: Path | None = None
    ) -> None:
        self.rate, self.every, self.rests = rate, every, place != "device"
        self.module, self._policy = _copied(policy)
        self._shelf = self._filled_shelf(policy, place, folder or Path())
        if self.rests:
            empty(self.module)

    def _filled_shelf(self, policy: Any, place: Place, folder: Path) -> Shelf:
        masters, own = _parameters(policy.module), _parameters(self.module)
        computes_in_their_dtype = all(own[name].dtype == master.dtype for name, master in masters.items())
        if place == "device" and computes_in_their_dtype:
            return MemoryShelf(own)  # one copy serves both
        return shelf_at(place, masters, folder)

    def here(self) -> AbstractContextManager[None]:
        return filled(self.module, self._shelf) if self.rests else nullcontext()

    @torch.no_grad()
    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()) -> Likelihood:
        with self.here():
            return self._policy.likelihood(rollouts, micro_batch, outputs=outputs)

    def sample(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        with self.here():
            return self._policy.sample(requests, sampling, seed=seed)

    def go_on(self, rollouts: Rollouts, replies: Mapping[int, Any], sampling: Any, **how: Any) -> Rollouts:
        with self.here():
            return self._policy.go_on(rollouts, replies, sampling, **how)

    def update(self, policy: Policy, step: int) -> None:
        if self.every and step % self.every == 0:
            self._mix(policy, self.rate)

    def renew(self, policy: Policy) -> None:
        """Become the policy as it is now."""
        self._mix(policy, 1.0)

    def _mix(self, policy: Policy, rate: float) -> None:
        held = self._shelf.read()
        for name, theirs in trained(policy.module).items():
            mix(held.pop(name), theirs, rate=rate)
        self._cast()

    def distance(self, policy: Policy) -> float:
        """|policy - reference| / |reference| over the weights that are trained."""
        return _distance(self._shelf.read(), trained(policy.module))

    def frozen(self) -> Mapping[str, Tensor]:
        """Nothing: all of it moves."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return self._shelf.read()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _restore(self._shelf.read(), state)
        self._cast()

    @torch.no_grad()
    def _cast(self) -> None:
        """What computes, from the masters, where both are held."""
        if not self.rests:
            held = self._shelf.read()
            for name, parameter in self.module.named_parameters():
                parameter.copy_(held[name])


class BaseReference:
    """The policy without its adapters: the model that they were put on. Nothing is copied.

    The policy's own modules compute, so that the KL of an adapter that adds nothing is exactly 0.
    """

    rests = False

    def __init__(self, policy: Any) -> None:
        self._owner = policy
        self._trained = set(trained(policy.module))

    @property
    def module(self) -> nn.Module:
        return self._owner.compute_module

    def here(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()) -> Likelihood:
        with adapter(self.module, None):
            return self._owner.at(self.module).likelihood(rollouts, micro_batch, outputs=outputs)

    def update(self, policy: Policy, step: int) -> None:
        """Nothing: the base is frozen."""

    def frozen(self) -> Mapping[str, Tensor]:
        return {name: tensor for name, tensor in _parameters(self.module).items() if name not in self._trained}

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: it is made of the model that the run began with."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _check_fits({}, state)


class MixedAdapter:
    """A second adapter that follows the policy's, on the same base: the two are mixed parameter by parameter.

    The product B A of mixed A and B is not the mix of the products. It computes in the policy's own modules, which
    hold its numbers for as long as that takes.
    """

    rests = False

    def __init__(self, policy: Any, *, rate: float, every: int) -> None:
        self.rate, self.every, self._owner = rate, every, policy
        self._held = {name: tensor.detach().clone() for name, tensor in trained(policy.module).items()}

    @property
    def module(self) -> nn.Module:
        return self._owner.compute_module

    def here(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def likelihood(self, rollouts: Rollouts, micro_batch: MicroBatch, *, outputs: Outputs = ()) -> Likelihood:
        with self._worn() as policy:
            return policy.likelihood(rollouts, micro_batch, outputs=outputs)

    def sample(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        with self._worn() as policy:
            return policy.sample(requests, sampling, seed=seed)

    def go_on(self, rollouts: Rollouts, replies: Mapping[int, Any], sampling: Any, **how: Any) -> Rollouts:
        with self._worn() as policy:
            return policy.go_on(rollouts, replies, sampling, **how)

    def update(self, policy: Policy, step: int) -> None:
        if self.every and step % self.every == 0:
            self._mix(policy, self.rate)

    def renew(self, policy: Policy) -> None:
        """Become the policy's adapter as it is now."""
        self._mix(policy, 1.0)

    def _mix(self, policy: Policy, rate: float) -> None:
        for name, theirs in trained(policy.module).items():
            mix(self._held[name], theirs, rate=rate)

    def distance(self, policy: Policy) -> float:
        """|policy - reference| / |reference| over the adapters' numbers."""
        return _distance(dict(self._held), trained(policy.module))

    def frozen(self) -> Mapping[str, Tensor]:
        """The base of both adapters."""
        return {name: tensor for name, tensor in _parameters(self.module).items() if name not in self._held}

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._held)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _restore(self._held, state)

    @contextmanager
    def _worn(self) -> Iterator[Any]:
        self._owner.refresh()
        own = {name: parameter for name, parameter in self.module.named_parameters() if name in self._held}
        with lent(own, {name: self._held[name].to(p.device, p.dtype) for name, p in own.items()}):
            yield self._owner.at(self.module)


def trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def mix(own: Tensor, theirs: Tensor, *, rate: float) -> None:
    """own <- rate theirs + (1 - rate) own, in place. Rate 0 and 1 leave and copy it to the bit, whatever it holds."""
    if rate == 1:
        own.copy_(theirs)
    elif rate:
        own.mul_(1 - rate).add_(rate * theirs.to(own.device))


def _distance(reference: dict[str, Tensor], policy: Mapping[str, Tensor]) -> float:
    """Takes what it has read out of ``reference``, which may be mapped from disk."""
    off = whole = 0.0
    for name, theirs in policy.items():
        own = reference.pop(name)
        off += float((theirs.to(own.device) - own).square_().sum(dtype=torch.float64))
        whole += float(own.square().sum(dtype=torch.float64))
    return (off / whole) ** 0.5 if whole else float("nan")


# --- modules and their weights ----------------------------------------------------------------------------------------


def _copied(policy: Any) -> tuple[nn.Module, Any]:
    """A copy of what computes, and the policy over it."""
    policy.refresh(force=True)
    module = copy.deepcopy(policy.compute_module).requires_grad_(False).eval()
    return module, policy.at(module)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@torch.no_grad()
def _restore(held: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    _check_fits(held, state)
    for name, tensor in held.items():
        tensor.copy_(state[name])


def _check_fits(held: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Refuse the saved weights of another reference."""
    if odd := sorted(held.keys() ^ state.keys()):
        raise GruppoError(
            f"the saved reference is not this run's: {len(odd)} tensors differ by name, {odd[0]} among them. Resume "
            "with the run's own config and model, or start a new run."
        )
    for name, tensor in held.items():
        if tensor.shape != state[name].shape:
            raise GruppoError(
                f"the saved reference is not this run's: its {name} is {list(state[name].shape)}, this run needs "
                f"{list(tensor.shape)}. Resume with the run's own config and model, or start a new run."
            )
