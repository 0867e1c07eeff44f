"""PPO with a critic, and generalized advantage estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import PPO
from gruppo.core.returns import gae
from gruppo.losses.inputs import Terms, batch_weights, check_coefficient, check_finite, check_shapes
from gruppo.types import GruppoError, Likelihood


def compute_gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Bool[Tensor, "B T"] | None = None,
    bootstrap: Float[Tensor, "B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Advantages and returns (advantages + values) of each action, without gradient; see ``core.returns.gae``.

    Every action has one, the last included: what comes after it is worth ``bootstrap`` [B], 0 by default. (A
    ``values[:, 1:]`` without it drops the last step.) Time is the second dimension and skips columns where ``mask`` is
    False.
    """
    if rewards.ndim == 2 and values.shape == (len(rewards), rewards.shape[1] + 1):
        raise GruppoError(
            f"values have {values.shape[-1]} columns for {rewards.shape[-1]} rewards; each action needs one. Pass "
            "values[:, :-1], and the last column as bootstrap=values[:, -1]."
        )
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    check_shapes(rewards, mask=mask, values=values)
    if rewards.ndim != 2 or (bootstrap is not None and bootstrap.shape != rewards.shape[:1]):
        ends = "" if bootstrap is None else f", bootstrap {list(bootstrap.shape)}"
        raise GruppoError(
            f"rewards are {list(rewards.shape)}{ends}; they need [B, T] and [B]. For one sequence pass rewards[None]."
        )
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise GruppoError(f"{name}={value} is outside [0, 1]; use {0.99 if name == 'gamma' else 0.95}.")
    check_finite(mask, rewards=rewards, values=values)
    if bootstrap is not None:
        check_finite(torch.ones_like(bootstrap, dtype=torch.bool), bootstrap=bootstrap)
    with torch.no_grad():
        return gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)


class PPOLoss(nn.Module):
    """Proximal policy optimization (arXiv 1707.06347) with a critic and an entropy bonus.

    L = -mean(min(r A, clip(r, 1 - e, 1 + e) A)) + c1 mean((V - R)^2) - c2 mean(entropy).

    The squared error is not halved, as in ``F.mse_loss``; ``core`` and ``gruppo.train`` halve it, so their value_coef
    is 2 c1. ``value_clip`` above 0 bounds the change of V from ``old_values``, those stored with the batch.
    """

    compute_gae = staticmethod(compute_gae)

    def __init__(
        self,
        clip_epsilon: float = 0.2,
        value_loss_coef: float = 0.5,
        entropy_coef: float = 0.01,
        value_clip: float = 0.0,
    ) -> None:
        super().__init__()
        self.objective = replace(PPO, clip_low=clip_epsilon, clip_high=clip_epsilon, value_clip=value_clip)
        self.value_loss_coef = check_coefficient("value_loss_coef", value_loss_coef)
        self.entropy_coef = check_coefficient("entropy_coef", entropy_coef)

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, ""]:
        """Loss to be minimized: the sum of ``terms``, which takes the same arguments."""
        terms, _ = self.terms(*args, **kwargs)
        return torch.stack(list(terms.values())).sum()

    def terms(
        self,
        policy_logprobs: Float[Tensor, "*rows"],
        old_policy_logprobs: Float[Tensor, "*rows"],
        values: Float[Tensor, "*rows"],
        returns: Float[Tensor, "*rows"],
        advantages: Float[Tensor, "*rows"],
        entropy: Float[Tensor, "*rows"] | None = None,
        mask: Bool[Tensor, "*rows"] | None = None,
        old_values: Float[Tensor, "*rows"] | None = None,
    ) -> Terms:
        """``policy``, ``value`` and, with an entropy, ``entropy``; and statistics of ratio, clip and values.

        All inputs are [batch], or all [B, T] with a mask, True where the policy chose the action. ``entropy`` may be
        left out if entropy_coef is 0. Advantages are used as they are: whiten them first, over the whole batch and not
        over a part of it (``core.returns.whiten``).
        """
        mask = torch.ones_like(policy_logprobs, dtype=torch.bool) if mask is None else mask
        stored = {"returns": returns, "advantages": advantages, "old_policy_logprobs": old_policy_logprobs}
        check_shapes(policy_logprobs, mask=mask, values=values, entropy=entropy, old_values=old_values, **stored)
        if self.entropy_coef > 0 and entropy is None:
            raise GruppoError(f"entropy_coef={self.entropy_coef:g} needs entropy; pass it, or set entropy_coef=0.")
        if self.objective.value_clip and old_values is None:
            raise GruppoError(
                f"value_clip={self.objective.value_clip:g} needs old_values, the critic's when the batch was "
                "collected. Pass them, or set value_clip=0."
            )
        check_finite(mask, **stored)

        def columns(x: Tensor) -> Tensor:
            return x[:, None] if x.ndim == 1 else x  # [batch] is one action per row

        batch = LossInputs(
            advantages=columns(advantages).detach(),
            loss_mask=columns(mask),
            weights=batch_weights(columns(mask), self.objective, max_length=1),
            old_logprobs=columns(old_policy_logprobs).detach(),
            old_values=None if old_values is None else columns(old_values).detach(),
            returns=columns(returns).detach(),
        )
        nats = None if entropy is None else columns(entropy)
        likelihood = Likelihood(columns(policy_logprobs), nats, values=columns(values))
        terms, stats = policy_loss(likelihood, batch, self.objective)
        terms["value"] = 2 * self.value_loss_coef * terms["value"]
        if "entropy" in terms:
            terms["entropy"] = -self.entropy_coef * terms["entropy"]
        return terms, stats
