"""The consistency term of a batch: restored pictures are held to something that is no clean picture."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.trainer.run import Run
from gruppo.types import Likelihood, MicroBatch, Rollouts


def term(
    run: Run, rollouts: Rollouts, micro_batch: MicroBatch, weights: Float[Tensor, "b t"], likelihood: Likelihood
) -> Float[Tensor, ""]:
    """Weighted and summed over the actions of a piece. ``likelihood`` was asked for its "output"."""
    ref = Likelihood(likelihood.logprobs.detach())
    if run.config.section(RestorationConfig).consistency == "reference" and run.reference is not None:
        ref = run.reference.likelihood(rollouts, micro_batch, outputs=("output",))
    loss = run.policy.consistency_loss(rollouts.take(micro_batch.rows), likelihood, ref)[:, micro_batch.cols]
    loss_mask = micro_batch.of(rollouts.mask).to(loss.device)
    return (weights.to(loss) * torch.where(loss_mask, loss, 0)).sum()
