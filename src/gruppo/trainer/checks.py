"""Refusals that depend on the kind of the model, beside those of ``config.checks``; before anything is loaded."""

from __future__ import annotations

from gruppo.config.checks import check_config, smallest_group
from gruppo.config.options import check_ranges
from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.protocols import Modality
from gruppo.tracking import trackers
from gruppo.trainer.demonstrations import Answers
from gruppo.trainer.references import check_reference
from gruppo.trainer.stages import StageSchedule

NEUTRAL = Modality()


def check(config: Config, modality: Modality = NEUTRAL) -> None:
    """Refuse what cannot run, before anything is loaded."""
    check_ranges(config)
    StageSchedule(config)  # parses schedules, controllers and gates
    check_config(config)
    trackers.check(config.track)
    modality.validate(config)
    updates, has_positions = config.updates_per_batch, config.objective.credit == "position"
    sizes = {"group_size": smallest_group(config), "updates_per_row": updates}
    # whether rewards have positions is known once they are opened: until then, as the objective needs
    modality.check_objective(config, **sizes, kl_coef=highest(config, "kl_coef"), has_positions=has_positions)
    if highest(config, "sup_coef"):
        Answers(config.supervised)  # parses the template
    check_reference(config, modality)
