"""Refusals that depend on the kind of the model, beside those of ``config.checks``; before anything
is loaded."""

from __future__ import annotations

import logging

from gruppo.config import serialization
from gruppo.config.checks import check_config, smallest_group, unread
from gruppo.config.schema import Config
from gruppo.config.stages import highest
from gruppo.protocols import Modality
from gruppo.tracking import trackers
from gruppo.trainer.demonstrations import Answers
from gruppo.trainer.stages import StageSchedule

log = logging.getLogger("gruppo")

NEUTRAL = Modality()


def has_reference(config: Config, modality: Modality) -> bool:
    """Return whether a KL or a consistency term needs a reference."""
    return highest(config, "kl_coef") > 0 or modality.consistency_reads_reference(config)


def check(config: Config, modality: Modality = NEUTRAL) -> None:
    """Refuse what cannot run, before anything is loaded."""
    serialization.from_dict(serialization.to_dict(config))  # types and ranges
    StageSchedule(config)  # parses schedules, controllers and gates
    check_config(config)
    if names := unread(config):
        log.warning("these options have no effect: %s.", ", ".join(names))
    trackers.check(config.track)
    modality.validate(config)
    modality.check_objective(
        config,
        group_size=smallest_group(config),
        updates_per_row=config.updates_per_batch,
        kl_coef=highest(config, "kl_coef"),
        # known once the rewards are opened: until then, as the objective needs
        has_positions=config.objective.credit == "position",
    )
    if highest(config, "sup_coef"):
        Answers(config.supervised)  # parses the template
