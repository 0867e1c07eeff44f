"""A rank that is killed or stopped, and the restart by torchrun. ``benchmarks.rank_faults`` has all phases."""

from __future__ import annotations

import pytest
from tests.distributed.faults import Fault, Faults


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return Faults(tmp_path_factory.mktemp("faults"), 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [Fault("kill", "learn", "fsdp"), Fault("stop", "save"), Fault("kill", "early stop")], ids=str
)
def test_a_run_that_lost_a_rank_goes_on_to_the_weights_of_one_that_was_not_disturbed(faults, fault):
    faults.disturb(fault)
