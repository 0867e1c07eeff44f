"""How far an update's gradient moves under what should not move it: ``python -m
tests.modalities.measure_gradients``.

The largest ||dg|| / ||g|| over every preset and every policy, and for two ranks over those of
``tests.distributed``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tests import processes
from tests.distributed import gradients
from tests.fakes import HUGGING_FACE, POLICIES
from tests.modalities import variants
from tests.modalities.updates import case_of, distance, farthest, learned, rewarded, whole_update

from gruppo.core.objective import PRESETS

INVARIANCES = {
    "every way of cutting into pieces": variants.micro_batches,
    "another order of rows": variants.row_order,
    "more columns": variants.columns,
    "left padding, unpacked": variants.layout,
    "1e6 and NaN in masked slots": variants.masked_slots,
    "beside fully masked rows": variants.masked_rows,
    "chunks of the head": variants.head_chunks,
}


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':34}{'float64':>10}{'float32':>10}")
    for name, varied in INVARIANCES.items():
        policies = HUGGING_FACE if varied is variants.layout else POLICIES
        far = [
            max(farthest(case, o, varied(case)) for o in PRESETS.values() for case in cases)
            for cases in (
                [case_of(make, dtype) for make in policies]
                for dtype in (torch.float64, torch.float32)
            )
        ]
        print(f"{name:34}{far[0]:10.1e}{far[1]:10.1e}", flush=True)
    ranks = over_ranks()
    far = ranks[torch.float64], ranks[torch.float32]
    print(f"{'two ranks, unequal rows and tokens':34}{far[0]:10.1e}{far[1]:10.1e}")


def over_ranks() -> dict[torch.dtype, float]:
    far: dict[torch.dtype, float] = {}
    with tempfile.TemporaryDirectory() as out:
        children = processes.ranks(2, gradients.main, out, folder=Path(out) / "said")
        assert [child.wait() for child in children] == [0, 0], "\n".join(
            child.err for child in children
        )
        both = torch.load(Path(out) / "0.pt", weights_only=False)
    for setup, (make, dtype) in gradients.SETUPS.items():
        case = case_of(make, dtype)
        for preset, objective in PRESETS.items():
            for deal in [*gradients.DEALS, "from rewards"]:
                variant = whole_update(case)
                variant = rewarded(case, objective, variant) if deal == "from rewards" else variant
                got = distance(
                    both[f"{setup} {preset} {deal}"][0], learned(case, objective, variant)[0]
                )
                far[dtype] = max(far.get(dtype, 0.0), got)
    return far


if __name__ == "__main__":
    main()
