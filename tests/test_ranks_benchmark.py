"""The table of memory, steps and saves of several ranks: the sums behind it, and that a rank
measures them."""

from __future__ import annotations

import pytest
from benchmarks import ranks


def of_rank(held_gb: float, *step_s: float, waited: float = 1.0) -> dict[str, object]:
    times = {"step_s": list(step_s), "save_waited_s": waited, "save_written_s": 3.0}
    return {"held_gb": held_gb, "parameters": 100_000_000, **times}


def test_the_saving_is_that_of_the_rank_that_holds_most_and_the_step_that_of_the_slowest():
    measured = {
        "1 none": [of_rank(2.0, 5.0, 1.0, 3.0)],
        "2 none": [of_rank(2.0, 2.0), of_rank(2.0, 2.0)],
        "4 fsdp": [
            of_rank(0.5, 1.0),
            of_rank(0.8, 1.0),
            of_rank(0.5, 4.0, waited=2.0),
            of_rank(0.5, 1.0),
        ],
    }
    found = ranks.summary(measured)
    assert found["1 none"]["step_s"] == 3.0
    assert found["4 fsdp"] == pytest.approx(
        {
            "held_gb": 0.8,
            "ideal_gb": 0.4,
            "saving_frac": 0.8,
            "step_s": 4.0,
            "save_waited_s": 2.0,
            "save_written_s": 3.0,
        }
    )
    rows = [line.strip("| ").split(" | ") for line in ranks.table(found).splitlines()[2:]]
    assert rows[1][:5] == ["2", "none", "2.00", "1.60", ""] and rows[2][:5] == [
        "4",
        "fsdp",
        "0.80",
        "0.40",
        "80%",
    ]


@pytest.mark.slow
def test_one_rank_measures_what_it_holds_its_steps_and_a_save():
    """In a process of its own: one that has run other tests may give memory back."""
    (found,) = ranks.on_ranks(1, {"size": "tiny", "steps": 1, "shard": "none"})
    assert found["held_gb"] > 16e-9 * found["parameters"] and len(found["step_s"]) == 1
    assert 0 < found["save_waited_s"] <= found["save_written_s"]
