"""Losses for other people's training loops: modules without weights, thin shells over ``core``.

    loss_of = GRPOLoss(kl_beta=0.04)
    loss = loss_of(logprobs, old_logprobs, rewards, ref_logprobs, mask)  # logprobs [B, T], rewards [prompts, group]
    loss.backward()

A call is one update: its means are over the rows it is given. Whoever adds up micro-batches of unequal length gets
another gradient than from one batch; ``gruppo.train`` fixes the denominator over the whole update.
"""

from gruppo.losses.critic import PPOLoss, compute_gae
from gruppo.losses.group import GRPOLoss

__all__ = ["GRPOLoss", "PPOLoss", "compute_gae"]
