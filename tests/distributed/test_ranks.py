"""The collectives over two processes, and in a world of one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests import processes
from tests.distributed import share


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks computed."""
    out = tmp_path_factory.mktemp("ranks")
    processes.run_ranks(2, share.main, out, folder=out)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_parameter_without_a_gradient_counts_as_zero_and_a_frozen_one_is_left_out(two):
    assert [rank["without gradient"] for rank in two] == [[[0, 0], [3, 3], None]] * 2


def test_gradients_of_any_dtype_and_layout_are_summed_to_the_last_bit(two):
    assert [rank["gradients"] for rank in two] == [True, True]


def test_the_collectives_by_hand(two):
    for rank, primitives in enumerate(two):
        assert (primitives["rank"], primitives["world"], primitives["is main"]) == (
            rank,
            2,
            rank == 0,
        )
        assert primitives["sum"] == [11, 22]
        assert primitives["mine after"] == [10**rank, 2 * 10**rank]
        assert primitives["max"] == 13
        assert primitives["gathered"] == ["end", "xxxend"]
        nothing, first, second, both = primitives["together"]
        assert (nothing, both) == ("", f"rank {rank}")
        assert [first, second][rank] == f"rank {rank}"  # its own
        assert [second, first][rank].endswith(f" failed in phase 'start': rank {1 - rank}")
        assert primitives["merged"] == {"a": [2, 5, 13, 2, 3], "b": [2, 13, 85, 6, 7]}
