"""TRL's trainers with gruppo below: ``from gruppo.trl import GRPOConfig, GRPOTrainer``.

Arguments keep TRL's names, defaults and meaning (1.16). What gruppo has no counterpart for is
refused by its name, and what means something else is reported once. Other names of TRL, such as
TrlParser, are those of the installed TRL.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gruppo.trl.arguments import GRPOConfig
from gruppo.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

ELSEWHERE = {
    "PPO": "TRL 1.16 has no PPO either. Here: gruppo.train(objective='ppo', ...), see "
    "docs/objectives/ppo.md",
    "RLOO": "Here: gruppo.train(objective='rloo', ...), see docs/objectives/reinforce.md",
    "SFT": "Here demonstrations are a stage of a run: stages such as supervised:50, see "
    "docs/guides/stages.md",
}
"""By the beginning of a trainer's name: where gruppo has it."""


def __getattr__(name: str) -> Any:
    """A name of the installed TRL, except its other trainers, so that one import changes in a
    script."""
    if name.startswith("__"):  # such as __path__, which the import system looks for
        raise AttributeError(name)
    if name.endswith(("Trainer", "Config")) and name not in ("ModelConfig", "DatasetMixtureConfig"):
        near = next(
            (text for start, text in ELSEWHERE.items() if start in name), "Import it from trl"
        )
        raise ImportError(f"gruppo.trl has {', '.join(__all__)}, and no {name}. {near}.")
    if find_spec("trl") is None:
        raise ImportError(
            f"{name} is TRL's own, and TRL is not installed. Run: pip install trl==1.16.0"
        )
    return getattr(import_module("trl"), name)
