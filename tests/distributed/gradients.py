"""One rank's part of one update of each preset, by the trainer's own code; started twice by
test_gradients.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tests.fakes import llama, plain
from tests.modalities.updates import Case, Variant, case_of, learned, rewarded
from tests.modalities.variants import share
from torch import Tensor

from gruppo import distributed as dist
from gruppo.core.objective import PRESETS
from gruppo.types import Stat

SETUPS = {
    "plain-float64": (plain, torch.float64),
    "llama-float64": (llama, torch.float64),
    "llama-float32": (llama, torch.float32),
}
CASES = [("plain-float64", preset) for preset in PRESETS]
CASES += [
    (setup, preset)
    for setup in ("llama-float64", "llama-float32")
    for preset in ("grpo", "gspo", "ppo")
]
"""Presets differ in their denominators, whatever the model; with a real model the rows are cut
otherwise."""
DEALS = {
    "a long rank and a short one": [[8, 0, 5, 2, 4, 6], [3, 7, 1]],
    "one rank keeps nothing": [[0, 1, 2, 3, 4, 5, 6, 8], [7]],
}
"""Which rows each rank has; row 7 is not scored."""
GROUPS = [[0, 1, 2, 3, 6, 7, 8], [4, 5]]
"""Whole groups on each rank, for advantages made of rewards."""


def part_of(
    case: Case, name: str, rows: Sequence[int], *, from_rewards: bool
) -> tuple[Tensor, dict[str, Stat]]:
    """The gradient and the statistics of these rows' part of the update, added up over all
    ranks."""
    variant, objective = Variant(share(case.batch, rows), case.policy, budget=60), PRESETS[name]
    if from_rewards:
        variant = rewarded(case, objective, variant)
    return learned(case, objective, variant)


def everything(rank: int) -> dict[str, tuple[Tensor, dict[str, Stat]]]:
    deals = {
        **{deal: (rows[rank], False) for deal, rows in DEALS.items()},
        "from rewards": (GROUPS[rank], True),
    }
    return {
        f"{setup} {preset} {deal}": part_of(
            case_of(*SETUPS[setup]), preset, rows, from_rewards=from_rewards
        )
        for setup, preset in CASES
        for deal, (rows, from_rewards) in deals.items()
    }


def main(out: str) -> None:
    dist.init()
    torch.save(everything(dist.rank()), Path(out) / f"{dist.rank()}.pt")
    dist.shutdown()
