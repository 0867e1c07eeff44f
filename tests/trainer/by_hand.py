"""Whole steps in float64 from the sampled tokens and the rewards alone: plain forwards, loops,
AdamW's formula.

It shares with the trainer the weights before the step, the rows of each minibatch, and nothing
else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.trainer.forward import minibatch_rows
from gruppo.trainer.run import Run
from gruppo.types import Rollouts


@dataclass
class Networks:
    """Copies of what a run trains, and of its reference, before the step."""

    policy: Any
    ref: Any
    trunk: Any
    """A separate critic's; None for a shared one."""
    head: list[Tensor]
    """Weight and bias of the value head; empty without a critic."""

    @classmethod
    def of(cls, run: Run) -> Networks:
        policy = copy.deepcopy(run.policy.module).double()
        ref = None if run.reference is None else copy.deepcopy(run.reference.module).double()
        if run.critic is None:
            return cls(policy, ref, None, [])
        critic: Any = copy.deepcopy(run.critic.module).double()
        head = critic if run.critic.is_shared else critic["head"]
        return cls(
            policy, ref, None if run.critic.is_shared else critic["trunk"], [head.weight, head.bias]
        )

    @property
    def of_policy(self) -> list[Tensor]:
        return list(self.policy.parameters())

    @property
    def of_critic(self) -> list[Tensor]:
        return [*([] if self.trunk is None else self.trunk.parameters()), *self.head]

    def logprobs(self, module: Any, rollouts: Rollouts, row: int) -> Tensor:
        ids, start = tokens(rollouts, row)
        logits = module(ids[None]).logits[0, start - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[start:, None])[own(rollouts, row), 0]

    def values(self, rollouts: Rollouts, row: int) -> Tensor:
        ids, start = tokens(rollouts, row)
        trunk = self.policy.model if self.trunk is None else self.trunk
        features = trunk(ids[None]).last_hidden_state[0, start - 1 : -1][own(rollouts, row)]
        weight, bias = self.head
        return features @ weight[0] + bias[0]


def tokens(rollouts: Rollouts, row: int) -> tuple[Tensor, int]:
    """Prompt and completion, and where the completion begins."""
    prompt = rollouts.shared["prompt_ids"][int(rollouts.group_ids[row])]
    return torch.cat([prompt, rollouts.actions[row, : int(rollouts.lengths[row])]]), len(prompt)


def own(rollouts: Rollouts, row: int) -> Tensor:
    """Which of the row's tokens the policy chose."""
    return rollouts.mask[row, : int(rollouts.lengths[row])]


@dataclass
class Row:
    """What is known of a row before the first update."""

    old: list[float]
    values: list[float]
    advantages: list[float]
    returns: list[float]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_k (gamma lam)^k delta_(t+k), each sum written out."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * b - v for r, v, b in zip(rewards, values, after, strict=True)]
    return [
        sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
        for t in range(len(delta))
    ]


def credited(
    run: Run, networks: Networks, rollouts: Rollouts, rewards: Sequence[float]
) -> dict[int, Row]:
    """Rows to learn from, with advantages of a credit in time: of the critic, or the return less
    the batch's mean."""
    o, kl_coef = run.config.objective, run.config.stage.kl_coef
    scored = [row for row, reward in enumerate(rewards) if reward == reward]
    mean = sum(rewards[row] for row in scored) / len(scored)
    rows = {}
    for row in scored:
        if o.mask_truncated and rollouts.finish[row] == "length":
            continue
        with torch.no_grad():
            old = networks.logprobs(networks.policy, rollouts, row).tolist()
            ref = (
                networks.logprobs(networks.ref, rollouts, row).tolist()
                if networks.ref is not None
                else old
            )
            values = networks.values(rollouts, row).tolist() if networks.head else [0.0] * len(old)
        each = [-kl_coef * (p - q) for p, q in zip(old, ref, strict=True)]
        each[-1] += rewards[row] if networks.head else rewards[row] - mean
        lam = o.lam if networks.head else 1.0
        advantages = gae(each, values, o.gamma, lam)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        rows[row] = Row(old, values, advantages, returns)
    if o.whiten:
        _whiten(rows)
    return rows


def _whiten(rows: dict[int, Row]) -> None:
    every = torch.tensor([a for row in rows.values() for a in row.advantages], dtype=torch.float64)
    for row in rows.values():
        row.advantages = [
            (a - float(every.mean())) / float(every.var() + 1e-8) ** 0.5 for a in row.advantages
        ]


def loss(
    run: Run, networks: Networks, rollouts: Rollouts, rows: dict[int, Row]
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate and the clipped squared error, averaged over the tokens of a
    minibatch."""
    o, count = run.config.objective, sum(len(row.old) for row in rows.values())
    most = o.value_clip or math.inf
    policy, value = torch.zeros(2, dtype=torch.float64)
    for number, row in rows.items():
        ratio = (networks.logprobs(networks.policy, rollouts, number) - torch.tensor(row.old)).exp()
        a = torch.tensor(row.advantages)
        policy = (
            policy
            - torch.minimum(ratio * a, ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * a).sum()
            / count
        )
        if networks.head:
            now, stored, expected = (
                networks.values(rollouts, number),
                torch.tensor(row.values),
                torch.tensor(row.returns),
            )
            near = stored + (now - stored).clamp(-most, most)
            value = (
                value
                + torch.maximum((now - expected) ** 2, (near - expected) ** 2).sum() / 2 / count
            )
    return policy, value


class AdamW:
    """m / (sqrt(v) + eps), bias-corrected, after weight decay."""

    def __init__(self, parameters: list[Tensor], lr: float, config: Any) -> None:
        self.parameters, self.lr, self.config, self.steps = parameters, lr, config, 0
        self.m, self.v = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        b1, b2 = self.config.betas
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            m += (1 - b1) * (p.grad - m)
            v += (1 - b2) * (p.grad**2 - v)
            unbiased = (m / (1 - b1**self.steps), v / (1 - b2**self.steps))
            p -= self.lr * self.config.weight_decay * p
            p -= self.lr * unbiased[0] / (unbiased[1].sqrt() + self.config.eps)


def limited(parameters: list[Tensor], most: float) -> None:
    """Gradients scaled down to a norm."""
    norm = float(torch.cat([p.grad.flatten() for p in parameters]).norm())
    for p in parameters:
        p.grad *= min(1.0, most / (norm + 1e-6))


def learned(run: Run, networks: Networks, rollouts: Rollouts, rows: dict[int, Row]) -> int:
    """All updates of a batch, in place; how many there were."""
    optim, config = run.config.optim, run.config
    lr = optim.lr if config.critic.lr is None else config.critic.lr
    optimizers = [AdamW(networks.of_policy, optim.lr, optim), AdamW(networks.of_critic, lr, optim)]
    for epoch in range(optim.epochs):
        for part in minibatch_rows(run, rollouts, epoch):
            update(
                run,
                networks,
                rollouts,
                {row: rows[row] for row in part.tolist() if row in rows},
                optimizers,
            )
    return optimizers[0].steps


def update(
    run: Run,
    networks: Networks,
    rollouts: Rollouts,
    rows: dict[int, Row],
    optimizers: Sequence[AdamW],
) -> None:
    every = [*networks.of_policy, *networks.of_critic]
    for p in every:
        p.grad = torch.zeros_like(p)
    policy, value = loss(run, networks, rollouts, rows)
    (policy + run.config.stage.value_coef * value).backward()
    for together in [every] if networks.trunk is None else [networks.of_policy, networks.of_critic]:
        limited(together, run.config.optim.max_grad_norm or math.inf)
    for optimizer in optimizers:
        optimizer.step()


def flat(parameters: Sequence[Tensor | nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in parameters])
