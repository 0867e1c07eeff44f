"""Refusals that depend on the kind of the model, beside those of ``config.checks``; before anything is loaded."""

from __future__ import annotations

from gruppo.config.checks import check_config, smallest_group
from gruppo.config.options import check_ranges
from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.tracking import trackers
from gruppo.trainer.demonstrations import Answers
from gruppo.trainer.models import Kind, check_kind
from gruppo.trainer.references import check_reference
from gruppo.trainer.stages import StageSchedule
from gruppo.types import GruppoError


def check(config: Config, kind: Kind = "text") -> None:
    """Refuse what cannot run. ``kind``: of the model."""
    check_ranges(config)
    StageSchedule(config)  # parses schedules, controllers and gates
    check_config(config)
    trackers.check(config.track)
    check_kind(config, kind)
    config.objective.check(
        group_size=smallest_group(config),
        updates_per_row=config.updates_per_batch,
        kl_coef=highest(config, "kl_coef"),
        max_length=config.rollout.max_new_tokens if kind == "text" else None,
        is_gaussian=kind != "text",
        has_positions=config.objective.credit == "position",  # known once the rewards are opened
    )
    if highest(config, "sup_coef"):
        Answers(config.supervised)  # parses the template
    check_reference(config)
    if config.environment.reply and kind != "text":
        raise GruppoError(
            f"environment.reply={config.environment.reply!r} replies to texts, but {config.model!r} is an image model. "
            "Leave the --environment options out, or set --model to a language model."
        )
