"""Sharded over two and four ranks, three updates have the gradients and end in the weights of one
process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests import processes
from tests.distributed import sharded
from tests.distributed.sharded import CASES, SETUPS

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks and what four computed, run when it is first needed."""
    out = tmp_path_factory.mktemp("sharded")

    @cache
    def computed(count, part):
        children = processes.ranks(
            count, sharded.main, str(out), part, folder=out / f"{part} of {count}"
        )
        codes = [
            child.wait(300) for child in children
        ]  # of all: a failed assertion would leave the others running
        assert not any(codes), "\n".join(child.err for child in children)
        return torch.load(out / f"{count} {part}.pt")

    return computed


@cache
def alone(name, optimizer):
    return sharded.three_steps(name, optimizer)


@pytest.mark.slow
@pytest.mark.silent_bug(12)
@pytest.mark.parametrize(
    ("started", "name", "optimizer"),
    [(key, *case) for key, cases in CASES.items() for case in cases],
)
def test_sharded_ranks_have_the_gradients_and_weights_of_one_process(
    ranks, started, name, optimizer
):
    setup, expected, got = (
        SETUPS[name],
        alone(name, optimizer),
        ranks(*started)[f"{name} {optimizer}"],
    )
    assert got.keys() == expected.keys()
    numbers = [key for key in expected if not key.startswith(("stat", "own"))]
    tiny = torch.finfo(setup.dtype).tiny  # where no entry is above 0
    far = {
        n: float((got[n] - expected[n]).abs().max() / expected[n].abs().max().clamp(min=tiny))
        for n in numbers
    }
    first, limit = setup.limits or (LIMITS[setup.dtype],) * 2
    assert {
        key: by
        for key, by in far.items()
        if not by <= (first if key.startswith("gradient 0") else limit)
    } == {}


def test_the_ranks_differ_in_their_number_of_micro_batches(ranks):
    """Else no repeat was needed, and the equality above would prove nothing of them."""
    for name in ("tied head", "one rank keeps nothing", "denoiser"):
        counts = ranks(2, "first")[f"{name} sgd"]["own micro-batches"].tolist()
        assert counts[0] != counts[1], name
