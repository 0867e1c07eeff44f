"""Networks that restore images: from ``--model`` to a policy, and the options that it can
satisfy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest, learns_from_samples
from gruppo.core.images import PixelLoss
from gruppo.loading import load_object
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.common.validation import (
    changed_options,
    check_first_prompts,
    check_trust_region,
    refuse_unused_options,
)
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.modalities.restoration.consistency import CONSISTENCIES, Consistency, ToDegraded
from gruppo.modalities.restoration.load import load_restorer, open_restorer
from gruppo.modalities.restoration.policy import SETTINGS, RestorationPolicy
from gruppo.protocols import Modality, ParameterGroup, Policy, PromptSource, peek
from gruppo.types import DataError, GruppoError, Sampling

NEW = "restore:"
"""Prefix of a network's name: a new policy over it."""
NEW_OPTIONS = ("action", "weights", "patches")
"""Options of ``RestorationConfig`` that a saved policy has of its own."""
OPTIONS = ("trains", "supervises", "loss")
"""Options that may be changed for a saved policy."""
KEPT = (*OPTIONS, "channels", "patches", "consistency", "spec")


class RestorationModality(Modality):
    """Networks from degraded images to clean ones."""

    name = "restoration"
    config_section = RestorationConfig
    rewards_read_images = rewards_read_reference = is_gaussian = True
    has_lengths = False

    def matches(self, model: str) -> bool:
        return model.startswith(NEW) or (
            bool(model) and (Path(model_of(model)) / SETTINGS).is_file()
        )

    def validate(self, config: Config) -> None:
        refuse_unused_options(config, self, has_consistency=True)
        chosen, model = config.section(RestorationConfig), config.model
        changed = list(changed_options(chosen, NEW_OPTIONS))
        if model == NEW:
            raise GruppoError(
                f"model {model!r} names no network",
                option="model",
                advice=f"{NEW}unet, {NEW}dncnn or {NEW}FILE.py:Class",
            )
        if changed and not model.startswith(NEW):
            raise GruppoError(
                f"restoration.{changed[0]} is of a new policy, and {model!r} has its own",
                advice=f"""Leave $restoration.{changed[0]} out, or set $model {NEW}unet
                    $restoration.weights FOLDER""",
            )
        if changed_options(chosen, ["consistency"]) and not highest(config, "cons_coef"):
            raise GruppoError(
                f"""restoration.consistency={chosen.consistency!r} was set, and no stage's cons_coef
                    is above 0""",
                option="stage.cons_coef",
                advice="0.1, or leave it out",
            )
        if self.consistency_reads_reference(config) and config.reference.place != "device":
            raise GruppoError(
                f"""reference.place={config.reference.place!r}: a consistency to the reference reads
                    its images in every update""",
                advice="Leave $reference.place out, or set $restoration.consistency equivariance",
            )
        for option, is_set, fitting in (
            ("lora.rank", config.lora.rank or config.lora.adapter, "0"),
            ("compute", config.compute == "bfloat16", "float32"),
            ("critic.kind", config.critic.kind == "separate", "shared"),
        ):
            if is_set:
                raise GruppoError(
                    f"{option} is for larger models than {model!r}, a network that restores images",
                    option=option,
                    advice=fitting,
                )

    def open(self, config: Config, data: PromptSource) -> tuple[Policy, dict[str, Any]]:
        if not config.model.startswith(NEW):
            policy = load_restorer(model_of(config.model))
            return self.adapt(config, policy, data), {"name": config.model}
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
            patches=chosen.patches,
            weights=model_of(chosen.weights) if chosen.weights else None,
            seed=config.seed,
        )
        return self.adapt(config, policy, data), {"name": config.model}

    def adapt(self, config: Config, policy: Policy, data: PromptSource) -> Policy:
        """Return a policy over the same weights, with the options that say what is trained, and on
        what."""
        assert isinstance(policy, RestorationPolicy)
        chosen, module = config.section(RestorationConfig), policy.module
        if changed := {n: getattr(chosen, n) for n in OPTIONS if getattr(chosen, n) is not None}:
            if policy.trains == "action":  # weights that a caller froze stay frozen
                module.network.requires_grad_(True)
            options: dict[str, Any] = {name: getattr(policy, name) for name in KEPT} | changed
            policy = RestorationPolicy(module.network, module.action, **options)
        # a policy from memory keeps its own consistency unless the options name another
        is_named = config.model != IN_MEMORY or bool(changed_options(chosen, ["consistency"]))
        if is_named and highest(config, "cons_coef"):
            policy.consistency = open_consistency(chosen.consistency, policy.loss, data)
        return policy

    def load(
        self,
        model: str,
        *,
        compute: Any = "auto",
        trust_remote_code: bool = False,
        is_merged: bool = False,
    ) -> Policy:
        return load_restorer(model_of(model))

    def sampling(self, config: Config, policy: Policy | None = None) -> Sampling:
        columns = policy.columns if isinstance(policy, RestorationPolicy) else 1
        return replace(config.rollout.sampling, max_actions=columns)

    def check(
        self, config: Config, policy: Policy, sampling: Any, data: PromptSource, rewards: Any
    ) -> None:
        assert isinstance(policy, RestorationPolicy)
        sampling = policy.check_sampling(sampling)
        policy.check_sampling(sampling.greedy())
        first = check_first_prompts(config, policy, data, sampling)
        if policy.columns > 1 and config.objective.credit == "return_to_go":
            raise GruppoError(
                f"""objective.credit='return_to_go' is for actions that follow each other, and the
                    {policy.columns} patches of an image are side by side""",
                option="objective.credit",
                advice="position or outcome",
            )
        if not any(parameter.requires_grad for parameter in policy.module.parameters()):
            raise GruppoError(
                f"""nothing is to be trained: neither the network of {config.model!r} nor its action
                    has weights that are not frozen""",
                advice="Give the network some, or set $restoration.action low_resolution",
            )
        if highest(config, "entropy_coef") and not policy.module.action.scale.learned:
            raise GruppoError(
                """a stage's entropy_coef is above 0, and the action's std is fixed, so that its
                    entropy never changes""",
                option="restoration.action",
                advice="with learned=true, or $stage.entropy_coef 0",
            )
        if learns_from_samples(config):
            check_trust_region(config.objective, policy.dims(first[0].inputs.shape))

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
        return (
            highest(config, "cons_coef") > 0
            and config.section(RestorationConfig).consistency == "reference"
        )

    def absolute_paths(self, config: Config, absolute: Callable[[str], str]) -> Config:
        chosen, model = config.section(RestorationConfig), config.model
        if model.startswith(NEW):
            file, colon, name = model.removeprefix(NEW).rpartition(":")
            model = f"{NEW}{absolute(file)}:{name}" if colon and file.endswith(".py") else model
        restoration = replace(
            chosen, weights=absolute(chosen.weights), consistency=absolute(chosen.consistency)
        )
        return replace(config, model=model, modality=restoration)


def open_consistency(name: str, loss: PixelLoss, data: Any) -> Consistency:
    """The consistency of an option: a name, or a degradation, of the data or of the user."""
    if name in CONSISTENCIES:
        return CONSISTENCIES[name](loss)
    if name == "degradation":
        degradation: Any = getattr(data, "degradation", None)
        if degradation is None:
            raise GruppoError(
                """restoration.consistency='degradation' degrades a restored image as the data
                    were, and these data do not say how""",
                option="data",
                advice="photos:... or degrade:..., or $restoration.consistency FILE.py:function",
            )
        return ToDegraded(lambda x, ps: degradation.expected(x, [p.meta for p in ps]), loss)
    if ":" not in name:
        known = ", ".join([*CONSISTENCIES, "degradation"])
        raise GruppoError(
            f"restoration.consistency={name!r} is not one of {known} or FILE.py:function",
            option="restoration.consistency",
            advice="to one of them",
        )
    function = load_object(name)
    if not callable(function):
        raise GruppoError(
            f"{name} is a {type(function).__name__}; a degradation is a function of images and "
            f"prompts."
        )
    return ToDegraded(function, loss)


RESTORATION = RestorationModality()
RestorationPolicy.modality = RESTORATION
