"""Options that a modality does not use."""

from __future__ import annotations

from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.types import GruppoError


def refuse(*rules: tuple[object, str]) -> None:
    """Raise GruppoError with the message of the first rule whose condition is true."""
    for condition, message in rules:
        if condition:
            raise GruppoError(message)


def refuse_other_options(config: Config, section: type | None) -> None:
    """Refuse options of other modalities than the one with this config section."""
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
    model, rollout, objective = config.model, config.rollout, config.objective
    refuse(
        (
            rollout.max_new_tokens != type(rollout)().max_new_tokens,
            f"rollout.max_new_tokens={rollout.max_new_tokens} applies to text, and {model!r} is an image model. Leave "
            "it out; --diffusion.steps sets the number of denoising steps.",
        ),
        (
            objective.overlong,
            f"objective.overlong={objective.overlong} penalises long texts; every image has as many steps. Set "
            "--objective.overlong 0.",
        ),
        (
            config.critic.model,
            f"critic.model={config.critic.model!r}: the critic of an image model is a head on its network, or a copy "
            "of it. Leave --critic.model out.",
        ),
        (
            objective.mask_truncated,
            "objective.mask_truncated leaves out truncated texts, and images are never truncated. Set "
            "--objective.mask-truncated False.",
        ),
        (
            config.environment.reply,
            f"environment.reply={config.environment.reply!r} replies to texts, but {model!r} is an image model. "
            "Leave the --environment options out, or set --model to a language model.",
        ),
    )
