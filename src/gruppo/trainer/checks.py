"""Refusals that depend on the kind of the model, beside those of ``config.checks``; before anything
is loaded."""

from __future__ import annotations

import logging

from gruppo.config import serialization
from gruppo.config.checks import check_config, smallest_group, unread
from gruppo.config.schema import Config, ReferenceConfig
from gruppo.config.stages import highest, stage_path
from gruppo.protocols import Modality
from gruppo.tracking import trackers
from gruppo.trainer.demonstrations import Answers
from gruppo.trainer.references import has_reference, storage_error, unread_error
from gruppo.trainer.stages import StageSchedule
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

NEUTRAL = Modality()


def check(config: Config, modality: Modality = NEUTRAL) -> None:
    """Refuse what cannot run, before anything is loaded."""
    serialization.from_dict(serialization.to_dict(config))  # types and ranges
    StageSchedule(config)  # parses schedules, controllers and gates
    check_config(config)
    if names := unread(config):
        log.warning("these options have no effect: %s.", ", ".join(names))
    trackers.check(config.track)
    modality.validate(config)
    updates, has_positions = config.updates_per_batch, config.objective.credit == "position"
    sizes = {"group_size": smallest_group(config), "updates_per_row": updates}
    # whether rewards have positions is known once they are opened: until then, as the objective
    # needs
    modality.check_objective(
        config, **sizes, kl_coef=highest(config, "kl_coef"), has_positions=has_positions
    )
    if highest(config, "sup_coef"):
        Answers(config.supervised)  # parses the template
    # options of a reference that nothing would read
    chosen, default = config.reference, ReferenceConfig()
    renewed = [index for index, stage in enumerate(config.plan) if stage.new_reference]
    if renewed and not has_reference(config, modality) and not modality.rewards_read_reference:
        raise unread_error(
            f"{stage_path(config, renewed[0])}.new_reference"
        )  # of a restorer, a reward may read it
    if chosen != default and not has_reference(config, modality):
        raise unread_error("a reference")
    for name in ("update_rate", "update_every", "watch_prompts") if not chosen.is_mixed else ():
        if getattr(chosen, name) != getattr(default, name):
            raise GruppoError(
                f"reference.{name} is of a reference that moves, and reference.kind='frozen' never "
                f"does",
                option="reference.kind",
                advice="mixed, or leave it out",
            )
    if chosen.is_mixed and chosen.update_every > config.steps:
        raise GruppoError(
            f"""reference.kind='mixed' with reference.update_every={chosen.update_every} never moves
                    in {config.steps} steps""",
            option="reference.update_every",
            advice=f"{max(config.steps // 10, 1)} or so, or $reference.kind frozen",
        )
    if chosen.place != "device" and (config.lora.rank or config.lora.adapter):
        raise storage_error(config)
