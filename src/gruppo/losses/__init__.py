"""Losses for other training loops: modules without weights, thin wrappers of ``core``.

    loss_fn = GRPOLoss(kl_beta=0.04)
    loss = loss_fn(logprobs, old_logprobs, rewards, ref_logprobs, mask)  # logprobs [B, T], rewards [prompts, group]
    loss.backward()

A call is one update: its means are over the rows that it gets. Accumulating micro-batches of unequal length gives
another gradient than one batch does; ``gruppo.train`` fixes the denominator over the whole update.
"""

from gruppo.losses.grpo import GRPOLoss
from gruppo.losses.ppo import PPOLoss, compute_gae

__all__ = ["GRPOLoss", "PPOLoss", "compute_gae"]
