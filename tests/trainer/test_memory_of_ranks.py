"""One rank of two runs out of memory: both repeat the update with smaller micro-batches, or both
end."""

from __future__ import annotations

import os
from typing import Any

import torch
from tests import processes, tiny
from tests.trainer.runs import weights

from gruppo import api
from gruppo.config import serialization
from gruppo.modalities.text import TextPolicy
from gruppo.types import GruppoError

SIZES = {"rollout__prompts": 3, "rollout__group_size": 3, "optim__eps": 0.1, "optim__lr": 0.05}


def short_on_the_second_rank(config: dict[str, Any], rows: int) -> None:
    likelihood = TextPolicy.likelihood

    def full(self: Any, rollouts: Any, micro_batch: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK") == "1" and len(micro_batch.rows) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return likelihood(self, rollouts, micro_batch, **kwargs)

    TextPolicy.likelihood = full
    api.start(serialization.from_dict(config))


def refused(config: dict[str, Any], rows: int) -> None:
    result = "one row does not fit into memory: CUDA out of memory. Tried to allocate 20.00 GiB"
    try:
        short_on_the_second_rank(config, rows)
    except GruppoError as error:
        assert result in str(error)
        return
    raise AssertionError("a row that does not fit was not refused")


def test_memory_that_runs_out_on_one_rank_cuts_the_micro_batches_of_both_and_the_step_is_equal(
    tmp_path,
):
    for name, ranks in (("one", 1), ("two", 2)):
        config = serialization.to_dict(tiny.config(tmp_path, name=name, steps=2, **SIZES))
        children = processes.ranks(
            ranks, short_on_the_second_rank, config, 1, folder=tmp_path / name
        )
        codes = [child.wait() for child in children]
        assert not any(codes), "\n".join(child.err for child in children)
    log = (tmp_path / "runs/two/log.txt").read_text()  # of rank 0, whose memory did not run out
    assert log.count("memory ran out") == children[1].err.count("memory ran out") == 1
    torch.testing.assert_close(
        weights(tmp_path / "runs/two"), weights(tmp_path / "runs/one"), rtol=0, atol=1e-6
    )


def test_where_a_row_does_not_fit_on_one_rank_all_ranks_end(tmp_path):
    config = serialization.to_dict(tiny.config(tmp_path, steps=1, **SIZES))
    children = processes.ranks(2, refused, config, 0, folder=tmp_path / "children")
    assert [child.wait() for child in children] == [0, 0], "\n".join(
        child.err for child in children
    )
