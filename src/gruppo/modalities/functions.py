"""Policies that a function of the user's own returns: ``--model FILE.py:FUNCTION``, and folders
saved of them."""

from __future__ import annotations

from typing import Any

from gruppo import distributed as dist
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.text.custom import is_custom, names_function, open_custom
from gruppo.modalities.text.load import place
from gruppo.modalities.text.modality import found_model
from gruppo.modalities.text.policy import TextPolicy
from gruppo.protocols import Modality, Policy, PromptSource, digest
from gruppo.types import GruppoError


class FunctionModality(Modality):
    """Opens any policy; once open, the policy's own modality takes over."""

    name = "function"

    def matches(self, model: str) -> bool:
        return (
            bool(model)
            and model != IN_MEMORY
            and (names_function(model) or is_custom(model_of(model)))
        )

    def open(self, config: Config, data: PromptSource) -> tuple[Policy, dict[str, Any]]:
        policy = self.load(
            config.model, compute=config.compute, seed=config.seed, device=config.device
        )
        weights = {name: parameter.detach() for name, parameter in policy.module.named_parameters()}
        if dist.world_size() > 1 and len(set(dist.all_gather(digest(weights).encode()))) > 1:
            raise GruppoError(f"""{config.model} made other weights on each of the
                {dist.world_size()} ranks. Draw them from torch's generator, which --seed seeds, or
                read them from a file.""")
        return policy.modality.adapt(config, policy, data), found_model(config.model)[1]

    def load(
        self, model: str, *, seed: int = 0, compute: Any = "auto", device: str = "auto", **_: Any
    ) -> Policy:
        policy = open_custom(model_of(model), seed=seed)
        return place(policy, compute, device) if isinstance(policy, TextPolicy) else policy


FUNCTION = FunctionModality()
