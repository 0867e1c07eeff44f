"""Options that a modality does not use."""

from __future__ import annotations

from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.protocols import Modality
from gruppo.types import GruppoError


def refuse(*problems: object) -> None:
    """Raise GruppoError with the first problem that is not falsy; each argument reads ``condition and message``."""
    for problem in filter(None, problems):
        raise GruppoError(str(problem))


def refuse_unused_options(config: Config, modality: Modality, *, has_consistency: bool = False) -> None:
    """Refuse options of other modalities; ``has_consistency``: whether it has a consistency term."""
    options, model, rollout, objective = config.modality, config.model, config.rollout, config.objective
    if not modality.has_lengths:
        refuse(
            rollout.max_new_tokens != type(rollout)().max_new_tokens
            and f"rollout.max_new_tokens={rollout.max_new_tokens} applies to text, and {model!r} is an image model. "
            "Leave it out; --diffusion.steps sets the number of denoising steps.",
            objective.overlong
            and f"objective.overlong={objective.overlong} penalizes long texts; every image has as many steps. Set "
            "--objective.overlong 0.",
            config.critic.model
            and f"critic.model={config.critic.model!r}: the critic of an image model is a head on its network, or a "
            "copy of it. Leave --critic.model out.",
            config.lora.load_in_4bit
            and f"lora.load_in_4bit is of language models, and {model!r} is an image model. Leave it out.",
            objective.mask_truncated
            and "objective.mask_truncated leaves out truncated texts, and images are never truncated. Set "
            "--objective.mask-truncated False.",
            config.environment.names
            and f"environment {config.environment.names[0]!r} replies to texts, but {model!r} is an image model. "
            "Leave the --environment options out, or set --model to a language model.",
        )
    if options is not None and type(options) is not modality.config_section and options != type(options)():
        name = type(options).__name__.removesuffix("Config").lower()
        raise GruppoError(f"""{name} settings were given, and {model!r} is no {name} model. Leave the --{name} options
            out, or set --model to one.""")
    if not has_consistency and highest(config, "cons_coef"):
        raise GruppoError(f"""a stage's cons_coef is above 0: consistency is of restored images, and {model!r} restores
            none. Set --stage.cons-coef 0; --stage.kl-coef holds any policy to its reference.""")
