"""The gradient of each term of the loss by itself: how large it is, and where it points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, combinations_with_replacement
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo import distributed as dist
from gruppo.distributed.sharding import is_sharded, local, replicas
from gruppo.trainer.run import Run
from gruppo.trainer.stages import StepParams
from gruppo.types import Batch, Stat

TERMS = {"policy": "rl_coef"} | {
    name: f"{name}_coef" for name in ("sup", "cons", "kl", "entropy", "value")
}
"""Terms of the loss, and the step parameter that each is multiplied by."""
Backward = Callable[[Run, Batch, StepParams], Mapping[str, Stat]]


def of_terms(
    run: Run, batch: Batch, step_params: StepParams, backward: Backward
) -> dict[str, float]:
    """``grad_norm/TERM`` and ``grad_cosine/TERM/TERM``, of what each term adds to the gradient, over all ranks.

    Each term that takes part costs a forward and a backward pass of the minibatch, and a vector of all weights. A
    cosine is NaN where a gradient is 0. The update that follows is the same as without.
    """
    vectors: dict[
        str, tuple[Float[Tensor, "N"], Float[Tensor, "M"]]
    ] = {}  # of whole weights, of this rank's shards
    is_possible = {
        "value": run.critic is not None and step_params.samples,
        "kl": run.config.objective.kl_in == "loss",
    }
    for (
        name,
        coef,
    ) in TERMS.items():  # those that take part in this step's loss; the same on all ranks
        if not (getattr(step_params, coef) > 0 and is_possible.get(name, True)):
            continue
        others: dict[str, Any] = dict.fromkeys((c for c in TERMS.values() if c != coef), 0.0)
        run.optimizer.zero_grad(set_to_none=True)
        backward(run, batch, replace(step_params, **others))
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in run.parameters]
        kinds = [g for g in own if not is_sharded(g)], [local(g) for g in own if is_sharded(g)]
        empty = torch.zeros(0, device=run.policy.device)
        whole, shards = (
            torch.cat([empty, *(gradient.flatten().float() for gradient in kind)]) for kind in kinds
        )
        run.optimizer.zero_grad(set_to_none=True)
        vectors[name] = dist.all_sum(whole), shards  # FSDP has summed those

    norms, products = dict[str, float](), dict[tuple[str, str], float]()
    for one, other in combinations_with_replacement(vectors, 2):
        (whole, shards), (other_whole, other_shards) = vectors[one], vectors[other]
        # each rank has its shards: their products are added over ranks, and copies of a shard count once
        of_shards = float(dist.all_sum(shards @ other_shards)) / replicas() if len(shards) else 0.0
        products[one, other] = float(whole @ other_whole) + of_shards
        if one == other:
            norms[one] = math.sqrt(products[one, one]) if len(shards) else float(whole.norm())
    metrics = {f"grad_norm/{name}": norm for name, norm in norms.items()}
    for one, other in combinations(vectors, 2):
        both = norms[one] * norms[other]
        metrics[f"grad_cosine/{one}/{other}"] = (
            products[one, other] / both if both else float("nan")
        )
    return metrics
