"""One rank's part of a shared update: a process of its own, forked for test_ranks.py, or called in a world of one.

A bigram policy over five tokens, one batch of seven rows of unequal length, rows dealt to the ranks. The last row is
unscored. Results are returned as plain numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gruppo import distributed as dist
from gruppo.core.advantages import group_advantages
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import Objective
from gruppo.core.weights import Average, loss_total, loss_weights
from gruppo.distributed import collectives
from gruppo.types import GruppoError, Likelihood, Stat

VOCABULARY, MAX_LENGTH = 5, 9
F32, F64 = torch.float32, torch.float64
LENGTHS = torch.tensor([9, 1, 3, 2, 2, 7, 4])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 3.0, -1.0, 2.0, float("nan")])
GROUP_IDS = torch.tensor([0, 3, 0, 1, 1, 2, 2])
"""Kept rows of a group are on one rank under every split."""
SPLITS = {
    "a group each": [[0, 1, 2], [3, 4, 5, 6]],
    "one rank has one short row": [[0, 2, 3, 4, 5, 6], [1]],
    "one rank keeps nothing": [[0, 1, 2, 3, 4, 5], [6]],
}


def update(rows: Tensor, average: str, baseline: str, scale: str) -> dict[str, Any]:
    """Gradients and statistics of the rows' part of one update, added up over all ranks."""
    generator = torch.Generator().manual_seed(0)
    actions = torch.randint(VOCABULARY, (7, MAX_LENGTH), generator=generator)
    old = -1 - torch.rand(7, MAX_LENGTH, generator=generator, dtype=torch.float64)
    bigrams = nn.Parameter(
        torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
    )
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    columns = int(LENGTHS[rows].max())  # each rank pads to its own width
    mask = torch.arange(columns)[None] < LENGTHS[rows][:, None]
    loss_mask = mask & REWARDS[rows].isfinite()[:, None]
    advantages, _ = group_advantages(
        REWARDS[rows], GROUP_IDS[rows], mask, baseline=baseline, scale=scale, all_sum=dist.all_sum
    )
    own = {"average": average, "group_ids": GROUP_IDS[rows]}
    weights = loss_weights(
        loss_mask, total=dist.all_sum(loss_total(loss_mask, max_length=MAX_LENGTH, **own)), **own
    )
    actions = actions[rows, :columns]
    log_p = bigrams.log_softmax(-1)[nn.functional.pad(actions[:, :-1], (1, 0))]
    logprobs = log_p.gather(-1, actions[..., None])[..., 0]
    inputs = LossInputs(
        advantages, loss_mask, weights, old[rows, :columns], Likelihood(old[rows, :columns] - 0.1)
    )
    terms, stats = policy_loss(
        Likelihood(logprobs, -(log_p.exp() * log_p).sum(-1)),
        inputs,
        Objective(average=average, kl="k3"),
    )
    loss = terms["policy"] + 0.1 * terms["kl"] - 0.01 * terms["entropy"]
    if loss_mask.any():
        loss.backward()  # a rank that keeps nothing has no piece, hence no gradient at all
    before = None if bigrams.grad is None else bigrams.grad.clone()
    dist.sum_gradients([bigrams, unused, frozen])
    merged = dist.merge_stats(stats | {"loss": Stat.of(loss)})
    return {
        "gradient": bigrams.grad.tolist(),
        "own gradient": None if before is None else before.tolist(),
        "unused": None if unused.grad is None else unused.grad.tolist(),
        "frozen has one": frozen.grad is not None,
        "stats": {name: [s.count, s.sum, s.sum_sq, s.min, s.max] for name, s in merged.items()},
        "advantages": advantages[:, 0].tolist(),
    }


def cases() -> list[tuple[str, str, str]]:
    """(average, baseline, scale): each average once, and the baselines and scales that look at all ranks."""
    return [
        *((average, "batch_mean", "none") for average in get_args(Average)),
        ("token", "batch_mean", "batch"),
    ]


def everything(deal: list[list[int]]) -> dict[str, Any]:
    rows = torch.tensor(deal[dist.rank()])
    return {" ".join(case): update(rows, *case) for case in cases()}


def primitives() -> dict[str, Any]:
    mine = torch.tensor([1.0, 2.0]) * 10 ** dist.rank()
    total = dist.all_sum(mine)
    stat = {0: Stat(2, 5, 13, 2, 3), 1: Stat()}[dist.rank()]
    names = {"b": Stat.of(torch.tensor([7.0 - dist.rank()])), "a": stat}
    names = (
        names if dist.rank() == 0 else dict(reversed(names.items()))
    )  # the order of names must not matter
    torch.distributed.barrier()
    return {
        "rank": dist.rank(),
        "world": dist.world_size(),
        "is main": dist.is_main(),
        "sum": total.tolist(),
        "mine after": mine.tolist(),
        "max": dist.all_max(10 + 3 * dist.rank()),
        "gathered": [part.decode() for part in dist.all_gather(b"x" * (3 * dist.rank()) + b"end")],
        "together": agreed(),
        "buckets": buckets(),
        "merged": {
            n: [s.count, s.sum, s.sum_sq, s.min, s.max] for n, s in dist.merge_stats(names).items()
        },
    }


def buckets() -> bool:
    """Whether gradients summed in buckets equal those summed one by one, to the last bit; several dtypes and sizes."""
    collectives.LARGE_BYTES, collectives.BUCKET_BYTES = 400, 300
    generator = torch.Generator().manual_seed(dist.rank())
    shapes = [(3,), (50,), (7,), (20, 10), (90,), (0,), (1,)]
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=kind)) for shape in shapes for kind in (F32, F64)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    apart = nn.Parameter(torch.zeros(20, 10))  # its gradient is not contiguous
    apart.grad = torch.randn(10, 20, generator=generator).t()
    expected = [
        dist.all_sum(parameter.grad)
        for parameter in (*parameters, apart)
        if parameter.grad is not None
    ]
    dist.sum_gradients([*parameters, apart])
    return all(map(torch.equal, [parameter.grad for parameter in (*parameters, apart)], expected))


def agreed() -> list[str]:
    """What each rank is told where nothing, the other rank, or both fail."""
    result = []
    for failing in ((), (0,), (1,), (0, 1)):
        try:
            with dist.fail_together():
                if dist.rank() in failing:
                    raise GruppoError(f"rank {dist.rank()}")
            result.append("")
        except GruppoError as error:
            result.append(str(error))
    return result


def main(out: Path) -> None:
    torch.set_num_threads(1)
    dist.init()
    results = {name: everything(deal) for name, deal in SPLITS.items()}
    results["primitives"] = primitives()
    (out / f"{dist.rank()}.json").write_text(json.dumps(results))
    dist.shutdown()
