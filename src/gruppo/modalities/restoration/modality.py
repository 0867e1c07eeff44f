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
from gruppo.loading import load_object
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.common.validation import check_trust_region, refuse_unused_options
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.modalities.restoration.consistency import CONSISTENCIES, ToDegraded
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
        chosen, default, model = (
            config.section(RestorationConfig),
            RestorationConfig(),
            config.model,
        )
        is_new, cons_coef = model.startswith(NEW), highest(config, "cons_coef")
        changed = next(
            (name for name in NEW_OPTIONS if getattr(chosen, name) != getattr(default, name)), None
        )
        if model == NEW:
            raise GruppoError(
                f"model {model!r} names no network",
                option="model",
                advice=f"{NEW}unet, {NEW}dncnn or {NEW}FILE.py:Class",
            )
        if changed and not is_new:
            raise GruppoError(
                f"restoration.{changed} is of a new policy, and {model!r} has its own",
                advice=f"""Leave $restoration.{changed} out, or set $model {NEW}unet
                    $restoration.weights {"FOLDER" if model == IN_MEMORY else model}""",
            )
        if chosen.consistency != default.consistency and not cons_coef:
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
        if config.lora.rank or config.lora.adapter:
            raise GruppoError(
                f"LoRA puts adapters on large models, and {model!r} is a network that is trained "
                f"itself",
                advice="Leave the $lora options out, or set $restoration.trains action",
            )
        if config.compute == "bfloat16":
            raise GruppoError(
                """compute='bfloat16' is for language models; a network that restores images
                    computes in its own dtype""",
                option="compute",
                advice="float32",
            )
        if config.critic.kind == "separate":
            raise GruppoError(
                "critic.kind='separate': the critic of a network that restores images is a head on "
                "it",
                option="critic.kind",
                advice="shared",
            )

    def open(self, config: Config, data: PromptSource) -> tuple[Policy, dict[str, Any]]:
        if not config.model.startswith(NEW):
            return self.adapt(config, load_restorer(model_of(config.model)), data), {
                "name": config.model
            }
        chosen, first = config.section(RestorationConfig), peek(data)[0].inputs
        if not isinstance(first, torch.Tensor) or first.ndim != 3:
            raise DataError(
                f"""model {config.model} restores images, and the data {config.data!r} have none: a
                    prompt is a {type(first).__name__}""",
                option="data",
                advice="photos:noise=25, degrade:FOLDER:noise=25 or pairs:DEGRADED:CLEAN",
            )
        weights = model_of(chosen.weights) if chosen.weights else None
        sizes: dict[str, Any] = {"channels": len(first), "patches": chosen.patches}
        network = config.model.removeprefix(NEW)
        policy = open_restorer(network, chosen.action, weights=weights, seed=config.seed, **sizes)
        return self.adapt(config, policy, data), {"name": config.model}

    def adapt(self, config: Config, policy: Policy, data: PromptSource) -> Policy:
        """Return a policy over the same weights, with the options that say what is trained, and on
        what."""
        assert isinstance(policy, RestorationPolicy)
        chosen, module = config.section(RestorationConfig), policy.module
        if changed := {
            name: value for name in OPTIONS if (value := getattr(chosen, name)) is not None
        }:
            if (
                policy.trains == "action"
            ):  # undo that freeze; weights that a caller froze stay frozen
                module.network.requires_grad_(True)
            options: dict[str, Any] = {name: getattr(policy, name) for name in KEPT} | changed
            policy = RestorationPolicy(module.network, module.action, **options)
        # a policy from memory keeps its own consistency unless the options name another
        name, loss = chosen.consistency, policy.loss
        is_named = config.model != IN_MEMORY or name != RestorationConfig().consistency
        if not is_named or not highest(config, "cons_coef"):
            return policy
        if name in CONSISTENCIES:
            policy.consistency = CONSISTENCIES[name](loss)
        elif name == "degradation":
            degradation: Any = None if data is None else data.degradation
            if degradation is None:
                raise GruppoError(
                    """restoration.consistency='degradation' degrades a restored image as the data
                        were, and these data do not say how""",
                    option="data",
                    advice="photos:... or degrade:..., or $restoration.consistency FILE.py:function",
                )
            policy.consistency = ToDegraded(
                lambda x, prompts: degradation.expected(x, [p.meta for p in prompts]), loss
            )
        elif ":" not in name:
            known = ", ".join([*CONSISTENCIES, "degradation"])
            raise GruppoError(
                f"restoration.consistency={name!r} is not one of {known} or FILE.py:function",
                option="restoration.consistency",
                advice="to one of them",
            )
        elif callable(function := load_object(name)):
            policy.consistency = ToDegraded(function, loss)
        else:
            kind = type(function).__name__
            raise GruppoError(
                f"{name} is a {kind}; a degradation is a function of images and prompts."
            )
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
        first = peek(data)
        refused = [policy.check_prompt(prompt, sampling) for prompt in first]
        if all(refused):
            raise DataError(
                f"none of the first {len(first)} prompts of {config.data!r} can be restored: "
                f"{refused[0]}"
            )
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
        names = [
            name for name, parameter in policy.module.named_parameters() if parameter.requires_grad
        ]
        network = tuple(name for name in names if not name.startswith("action."))
        action = tuple(name for name in names if name.startswith("action."))
        factor = config.section(RestorationConfig).action_lr_factor
        groups = (
            ParameterGroup(network),
            ParameterGroup(action, lr_factor=factor, norm="action_norm"),
        )
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


RESTORATION = RestorationModality()
RestorationPolicy.modality = RESTORATION
