"""A rank that is killed or stopped, and the restart by torchrun. ``benchmarks.rank_faults`` has all
phases."""

from __future__ import annotations

import pytest
from tests.distributed.faults import Fault, Faults

FAULTS = Fault("stop", "save"), Fault("kill", "learn", "fsdp"), Fault("kill", "early stop")


@pytest.mark.slow
def test_a_run_that_lost_a_rank_goes_on_to_the_weights_of_one_that_was_not_disturbed(tmp_path):
    """The faults at once: the rank beside a stopped one waits for its timeout."""
    faults = Faults(tmp_path, 12)
    started = {fault: faults.start(fault) for fault in FAULTS}
    try:
        for fault in reversed(FAULTS):
            faults.finish(fault, started[fault])
    finally:
        for rank in (
            rank for ranks in started.values() for rank in ranks if rank.process.is_alive()
        ):
            rank.kill()
