"""Options that a modality does not use."""

from __future__ import annotations

from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.types import GruppoError


def refuse_other_options(config: Config, section: type | None) -> None:
    """Refuse options of other modalities than the one whose section is given, and a consistency term without one."""
    options = config.modality
    if options is not None and not isinstance(options, section or ()) and options != type(options)():
        name = type(options).__name__.removesuffix("Config").lower()
        raise GruppoError(
            f"{name} settings were given, and {config.model!r} is no {name} model. Leave the --{name} options out, or "
            f"set --model to one."
        )


def refuse_consistency(config: Config) -> None:
    """Refuse a consistency term, which only networks that restore images have."""
    if highest(config, "cons_coef"):
        raise GruppoError(
            f"a stage's cons_coef is above 0: consistency is of restored images, and {config.model!r} restores none. "
            "Set --stage.cons-coef 0; --stage.kl-coef holds any policy to its reference."
        )


def refuse_text_options(config: Config) -> None:
    """Refuse options that only language models use."""
    model = config.model
    if config.rollout.max_new_tokens != type(config.rollout)().max_new_tokens:
        raise GruppoError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} is of texts, and {model!r} is an image model. "
            "Leave it out; --diffusion.steps are the steps of a picture that is drawn from noise."
        )
    if config.objective.overlong:
        raise GruppoError(
            f"objective.overlong={config.objective.overlong} penalises long texts; every image has as many steps. Set "
            "--objective.overlong 0."
        )
    if config.critic.model:
        raise GruppoError(
            f"critic.model={config.critic.model!r}: the critic of an image model is a head on its network, or a copy "
            "of it. Leave --critic.model out."
        )
    if config.objective.mask_truncated:
        raise GruppoError(
            "objective.mask_truncated leaves out texts that were cut; every picture has all its steps. Set "
            "--objective.mask-truncated False."
        )
    if config.environment.reply:
        raise GruppoError(
            f"environment.reply={config.environment.reply!r} replies to texts, and {model!r} is an image model. "
            "Leave the --environment options out, or set --model to a language model."
        )
