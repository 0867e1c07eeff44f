"""Networks that restore images: what a config says of one and cannot, and the policy that it means."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest
from gruppo.data.curriculum import Curriculum
from gruppo.data.restoration import WithReference
from gruppo.loading import load_object
from gruppo.modalities.common.adapters import model_of
from gruppo.modalities.restoration import RestorationPolicy, ToDegraded, load_restorer, open_restorer
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.modalities.restoration.consistency import CONSISTENCIES, Consistency
from gruppo.modalities.restoration.policy import SETTINGS
from gruppo.protocols import Reference
from gruppo.trainer import checkpoint
from gruppo.trainer.demonstrations import peeked
from gruppo.types import DataError, GruppoError, Sampling

NEW = "restore:"
"""Before the name of a network: a new policy over it."""
OF_NEW = ("action", "weights", "patches")
"""Settings of ``RestorationConfig`` that a saved policy has of its own."""
CHOICES = ("trains", "supervises", "loss")
"""Settings that may be chosen again for a saved one."""


def is_restorer(model: str) -> bool:
    """Whether a name or a folder is of a network that restores images."""
    return model.startswith(NEW) or (bool(model) and (Path(model_of(model)) / SETTINGS).is_file())


def check_restorer(config: Config) -> None:
    """Refuse settings that are of texts or of drawn pictures, and those that nothing would read."""
    chosen, usual, model = config.section(RestorationConfig), RestorationConfig(), config.model
    if model.startswith(NEW) and not model.removeprefix(NEW):
        raise GruppoError(
            f"--model {model!r} names no network. Set --model {NEW}unet, {NEW}dncnn or {NEW}FILE.py:Class."
        )
    if not model.startswith(NEW) and (odd := [n for n in OF_NEW if getattr(chosen, n) != getattr(usual, n)]):
        raise GruppoError(
            f"restoration.{odd[0]} is of a new policy, and {model!r} has its own. Leave --restoration.{odd[0]} out, or "
            f"set --model {NEW}unet --restoration.weights {'FOLDER' if model == IN_MEMORY else model}."
        )
    if not 0 < chosen.action_lr_factor < float("inf"):
        raise GruppoError(
            f"restoration.action_lr_factor={chosen.action_lr_factor} is out of range; it needs to be above 0. Set "
            "--restoration.action-lr-factor 20."
        )
    if chosen.patches < 1:
        raise GruppoError(f"restoration.patches={chosen.patches} cuts nothing. Set --restoration.patches 1.")
    held_to = highest(config, "cons_coef")
    if not held_to and chosen.consistency != usual.consistency:
        raise GruppoError(
            f"restoration.consistency={chosen.consistency!r} was set, and no stage's cons_coef is above 0. Set "
            "--stage.cons-coef 0.1, or leave it out."
        )
    if held_to and chosen.consistency == "reference" and config.reference.place != "device":
        raise GruppoError(
            f"reference.place={config.reference.place!r}: a consistency to the reference reads its pictures in every "
            "update. Leave --reference.place out, or set --restoration.consistency equivariance."
        )
    if config.lora.rank or config.lora.adapter:
        raise GruppoError(
            f"LoRA puts adapters on large models, and {model!r} is a network whose weights are trained themselves. "
            "Leave the --lora options out, or set --restoration.trains action."
        )
    if config.compute == "bfloat16":
        raise GruppoError(
            "compute='bfloat16' is of language models; a network that restores images computes in its own dtype. Set "
            "--compute float32."
        )
    if config.critic.kind == "separate":
        raise GruppoError(
            "critic.kind='separate': the critic of a network that restores images is a head on it. Set --critic.kind "
            "shared."
        )


def check_data(config: Config, policy: RestorationPolicy, sampling: Sampling, source: Any) -> None:
    """Refuse data of which this network can restore nothing, and an entropy that nothing can change."""
    first = peeked(source)
    refused = [policy.check_prompt(prompt, sampling) for prompt in first]
    if all(refused):
        raise DataError(f"none of the first {len(first)} prompts of {config.data!r} can be restored: {refused[0]}")
    if policy.columns > 1 and config.objective.credit == "return_to_go":
        raise GruppoError(
            f"objective.credit='return_to_go' is of actions that follow each other, and the {policy.columns} patches "
            "of a picture lie beside each other. Set --objective.credit position or outcome."
        )
    if not any(parameter.requires_grad for parameter in policy.module.parameters()):
        raise GruppoError(
            f"nothing is to be trained: neither the network of {config.model!r} nor its action has weights that are "
            "free. Give the network some, or set --restoration.action low_resolution."
        )
    if highest(config, "entropy_coef") and not policy.module.action.scale.learned:
        raise GruppoError(
            "a stage's entropy_coef is above 0, and the action's std is fixed: its entropy is the same whatever is "
            "learned. Set --restoration.action with learned=true, or --stage.entropy-coef 0."
        )


# --- opening one ------------------------------------------------------------------------------------------------------


def open_policy(config: Config, given: Any, source: Any) -> RestorationPolicy:
    """The policy that the model's name means, or the one that is given; chosen anew where the config says so."""
    chosen, spec = config.section(RestorationConfig), config.model.removeprefix(NEW)
    choices = {name: getattr(chosen, name) for name in CHOICES if getattr(chosen, name) is not None}
    if given is None and config.model.startswith(NEW):
        policy = open_restorer(
            spec,
            chosen.action,
            channels=_channels(config, source),
            weights=model_of(chosen.weights) if chosen.weights else None,
            seed=config.seed,
            patches=chosen.patches,
            **choices,
        )
        return _held_to(policy, config, source)
    policy = load_restorer(model_of(config.model)) if given is None else given
    if choices:
        policy = chosen_again(policy, choices)
    has_own = given is not None and chosen.consistency == RestorationConfig().consistency
    return policy if has_own else _held_to(policy, config, source)


def chosen_again(policy: RestorationPolicy, choices: Mapping[str, Any]) -> RestorationPolicy:
    """The same weights with other choices of what trains, and on what."""
    module = policy.module
    if policy.trains == "action":  # it rested; else what a caller froze stays frozen
        module.network.requires_grad_(True)
    settings = {"patches": policy.patches, **{name: getattr(policy, name) for name in CHOICES}, **choices}
    return RestorationPolicy(
        module.network,
        module.action,
        channels=policy.channels,
        consistency=policy.consistency,
        spec=policy.spec,
        **settings,
    )


def _held_to(policy: RestorationPolicy, config: Config, source: Any) -> RestorationPolicy:
    """With the consistency that the config names, where some stage asks for one."""
    if highest(config, "cons_coef"):
        policy.consistency = consistency_of(config.section(RestorationConfig).consistency, policy, source)
    return policy


def consistency_of(name: str, policy: RestorationPolicy, source: Any) -> Consistency:
    if name in CONSISTENCIES:
        return CONSISTENCIES[name](policy.loss)
    if name == "degradation":
        degradation = None if source is None else source.degradation
        if degradation is None:
            raise GruppoError(
                "restoration.consistency='degradation' degrades a restored picture as the data were, and these data "
                "do not say how. Set --data photos:... or degrade:..., or --restoration.consistency FILE.py:function."
            )

        def degrade(pictures: torch.Tensor, prompts: Any) -> torch.Tensor:
            return degradation.expected(pictures, [prompt.meta for prompt in prompts])

        return ToDegraded(degrade, policy.loss)
    if ":" not in name:
        known = ", ".join([*CONSISTENCIES, "degradation"])
        raise GruppoError(
            f"restoration.consistency={name!r} is not one of {known} or FILE.py:function. Set --restoration."
            "consistency to one of them."
        )
    given = load_object(name)
    if not callable(given):
        raise GruppoError(f"{name} is a {type(given).__name__}; a degradation is a function of pictures and prompts.")
    return ToDegraded(given, policy.loss)


def _channels(config: Config, source: Any) -> int:
    """Of the degraded images of the data."""
    first = peeked(source)[0].inputs if source is not None else None
    if not isinstance(first, torch.Tensor) or first.ndim != 3:
        raise DataError(
            f"--model {config.model} restores images, and the data {config.data!r} have none: a prompt is a "
            f"{type(first).__name__}. Set --data photos:noise=25, degrade:FOLDER:noise=25 or pairs:DEGRADED:CLEAN."
        )
    return len(first)


@torch.no_grad()
def of_the_run(path: Path, config: Config, source: WithReference) -> WithReference:
    """The data with the pictures that a run's rewards were measured against: of the policy that it began with, or of
    its reference as it was last saved."""
    if config.model == IN_MEMORY:
        raise GruppoError(
            f"the rewards of {path} are measured against the policy that it began with, a Python object which no file "
            "holds. Train with rewards that have delta=none, or against=target."
        )
    policy = open_policy(config, None, source)
    saved = checkpoint.load_latest(path / "checkpoints")
    for name, parameter in policy.module.named_parameters():
        if saved is not None and name in saved.reference:
            parameter.copy_(saved.reference[name])
    return WithReference(source.source, policy.restore)


# --- what rewards compare with ----------------------------------------------------------------------------------------


def with_reference(source: Any, policy: RestorationPolicy, reference: Reference | None) -> Any:
    """The data with the reference's pictures as the column ``reference``, where they have none of their own; those of
    the policy as it is now, where there is no reference."""
    if "reference" in (source.columns or ()):
        return source
    if isinstance(source, Curriculum):  # what decides which prompts are drawn stays the run's source
        source.source = with_reference(source.source, policy, reference)
        return source
    module = copy.deepcopy(policy.module).requires_grad_(False) if reference is None else reference.module

    def restore(pictures: torch.Tensor) -> torch.Tensor:
        with nullcontext() if reference is None else reference.on_device():
            return policy.at(module).restore(pictures)

    return WithReference(source, restore)
