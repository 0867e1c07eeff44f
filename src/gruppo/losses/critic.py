"""PPO with a critic, and generalised advantage estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gruppo.core.credit import gae
from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import PPO
from gruppo.losses.inputs import Terms, boolean, coefficient, columns, refuse_nan, same_shape, weights
from gruppo.types import GruppoError, Likelihood


def compute_gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Bool[Tensor, "B T"] | None = None,
    bootstrap: Float[Tensor, "B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Advantages and returns (advantages + values) of each action, without gradient; ``core.credit.gae``.

    Every action has one, the last too: what comes after it is worth ``bootstrap`` [B], 0 where it is not given. (A
    ``values[:, 1:]`` without it drops the last step.) Time is the second dimension, and where ``mask`` is False it
    stands still.
    """
    if rewards.ndim == 2 and values.shape == (len(rewards), rewards.shape[1] + 1):
        raise GruppoError(
            f"values have {values.shape[-1]} columns for {rewards.shape[-1]} rewards; each action needs one. Give "
            "values[:, :-1], and the last as bootstrap=values[:, -1]."
        )
    loss_mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    same_shape(rewards, values=values, mask=loss_mask)
    boolean(loss_mask)
    if rewards.ndim != 2 or (bootstrap is not None and bootstrap.shape != rewards.shape[:1]):
        ends = "" if bootstrap is None else f", bootstrap {list(bootstrap.shape)}"
        raise GruppoError(
            f"rewards are {list(rewards.shape)}{ends}; they need [B, T] and [B]. For one sequence give rewards[None]."
        )
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise GruppoError(f"{name}={value} is outside [0, 1]; use {0.99 if name == 'gamma' else 0.95}.")
    refuse_nan(loss_mask, rewards=rewards, values=values)
    if bootstrap is not None:
        refuse_nan(torch.ones_like(bootstrap, dtype=torch.bool), bootstrap=bootstrap)
    with torch.no_grad():
        return gae(rewards, values, loss_mask, gamma=gamma, lam=lam, bootstrap=bootstrap)


class PPOLoss(nn.Module):
    """Proximal policy optimisation (arXiv 1707.06347) with a critic and an entropy bonus.

    L = -mean(min(r A, clip(r, 1 - e, 1 + e) A)) + c1 mean((V - R)^2) - c2 mean(entropy).

    The squared error is whole, as ``F.mse_loss``; ``core`` and ``gruppo.train`` halve it, so that their value_coef is
    2 c1. ``value_clip`` above 0 lets V move so far from ``old_values``, those stored with the batch.
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
        self.value_loss_coef = coefficient("value_loss_coef", value_loss_coef)
        self.entropy_coef = coefficient("entropy_coef", entropy_coef)

    def forward(
        self,
        policy_logprobs: Float[Tensor, "*rows"],
        old_policy_logprobs: Float[Tensor, "*rows"],
        values: Float[Tensor, "*rows"],
        returns: Float[Tensor, "*rows"],
        advantages: Float[Tensor, "*rows"],
        entropy: Float[Tensor, "*rows"] | None = None,
        mask: Bool[Tensor, "*rows"] | None = None,
        old_values: Float[Tensor, "*rows"] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss, to be minimised. All [batch], or all [B, T] with a mask, True where the policy chose the action.

        ``entropy`` may be left out where entropy_coef is 0. Advantages are taken as they are; whiten them before, over
        the whole batch and not over a part of it (``core.credit.whiten``).
        """
        terms, _ = self.terms(
            policy_logprobs, old_policy_logprobs, values, returns, advantages, entropy, mask, old_values
        )
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
        """``policy``, ``value`` and, where it is given, ``entropy``; with statistics of ratio, clip and values."""
        loss_mask = torch.ones_like(policy_logprobs, dtype=torch.bool) if mask is None else mask
        stored = {"returns": returns, "advantages": advantages, "old_policy_logprobs": old_policy_logprobs}
        same_shape(policy_logprobs, mask=loss_mask, values=values, entropy=entropy, old_values=old_values, **stored)
        self._check(loss_mask, entropy, old_values, stored)
        loss_mask, logprobs, values = columns(loss_mask), columns(policy_logprobs), columns(values)
        batch = LossInputs(
            advantages=columns(advantages).detach(),
            loss_mask=loss_mask,
            weights=weights(loss_mask, self.objective, None),
            old_logprobs=columns(old_policy_logprobs).detach(),
            old_values=None if old_values is None else columns(old_values).detach(),
            returns=columns(returns).detach(),
        )
        nats = None if entropy is None else columns(entropy)
        terms, stats = policy_loss(Likelihood(logprobs, nats, values=values), batch, self.objective)
        terms["value"] = 2 * self.value_loss_coef * terms["value"]
        if "entropy" in terms:
            terms["entropy"] = -self.entropy_coef * terms["entropy"]
        return terms, stats

    def _check(
        self, loss_mask: Tensor, entropy: Tensor | None, old_values: Tensor | None, stored: Mapping[str, Tensor]
    ) -> None:
        boolean(loss_mask)
        if self.entropy_coef > 0 and entropy is None:
            raise GruppoError(f"entropy_coef={self.entropy_coef:g} needs entropy; give it, or set entropy_coef=0.")
        if self.objective.value_clip and old_values is None:
            raise GruppoError(
                f"value_clip={self.objective.value_clip:g} needs old_values, the critic's when the batch was "
                "collected. Give them, or set value_clip=0."
            )
        refuse_nan(loss_mask, **stored)
