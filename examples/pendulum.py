"""Swing up a pendulum: a Gaussian policy with the environment stepped inside ``sample``, trained by
PPO with GAE.

Actions are continuous, every step has a reward, and the critic is a value head on the policy's
network.

    gruppo train examples/pendulum.py:pendulum --name pendulum   # a few minutes on one core
    python examples/pendulum.py runs/pendulum                    # mean return against baselines
"""

from __future__ import annotations

import math
import sys

import torch
from torch import nn

import gruppo
from gruppo.protocols import DescriptionMixin, MemoryMixin, ValueHeadMixin
from gruppo.seeds import generator_at

STEPS, DT, GRAVITY, MAX_SPEED, MAX_TORQUE = 100, 0.05, 10.0, 8.0, 2.0
HELD_OUT = 64


def observe(state):
    """[..., 2] angle (0 is upright) and speed to [..., 3] cos, sin and scaled speed."""
    angle, speed = state.unbind(-1)
    return torch.stack([angle.cos(), angle.sin(), speed / MAX_SPEED], -1)


def step(state, action):
    """The next state and the reward, as in Gymnasium's Pendulum-v1; actions are in units of
    MAX_TORQUE."""
    angle, speed = state.unbind(-1)
    torque = action.clamp(-1, 1) * MAX_TORQUE
    wrapped = (angle + math.pi) % (2 * math.pi) - math.pi
    cost = wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2
    speed = (speed + (1.5 * GRAVITY * angle.sin() + 3 * torque) * DT).clamp(-MAX_SPEED, MAX_SPEED)
    return torch.stack([angle + speed * DT, speed], -1), -cost


class Network(nn.Module):
    """Mean of the action [..., 1] from observations [..., 3], and a learned log standard
    deviation."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean = nn.Linear(64, 1)
        self.log_std = nn.Parameter(torch.full((1,), -0.5))


class PendulumPolicy(gruppo.Policy, ValueHeadMixin, DescriptionMixin, MemoryMixin):
    likelihood_outputs = frozenset({"entropy", "entropy_value", "gaussian", "values"})
    action_name, budget_name = "step", "steps"

    def __init__(self, module):
        self.module, self.value_head = module.eval(), None

    def at(self, module):
        other = super().at(module)
        other.value_head = None
        return other

    def feature_width(self):
        return 64

    def check_sampling(self, sampling):
        if sampling.temperature not in (0, 1) or sampling.top_k or sampling.top_p < 1:
            raise gruppo.GruppoError(
                "a Gaussian policy samples at temperature 1, or its mean at 0. Leave others out."
            )
        return sampling

    @torch.no_grad()
    def sample(self, requests, sampling, *, seed):
        sampling = self.check_sampling(sampling)
        group = torch.tensor([g for g, request in enumerate(requests) for _ in range(request.size)])
        noise = torch.stack(
            [
                torch.randn(
                    STEPS, generator=generator_at(seed, "noise", request.prompt.draw, number)
                )
                for request in requests
                for number in range(request.first, request.first + request.size)
            ]
        ).to(self.device)  # [B, T]
        state = torch.tensor([request.prompt.inputs for request in requests])[group]  # [B, 2]
        state = state.to(self.device)
        std = self.module.log_std.exp()
        states, actions, means, rewards = [], [], [], []
        for t in range(STEPS):
            mean = self.module.mean(self.module.trunk(observe(state)))[:, 0]
            action = mean + std * noise[:, t] if sampling.temperature else mean
            states.append(state)
            actions.append(action)
            means.append(mean)
            state, reward = step(state, action)
            rewards.append(reward)
        actions, rewards = torch.stack(actions, 1), torch.stack(rewards, 1).cpu()  # [B, T]
        logprobs = torch.distributions.Normal(torch.stack(means, 1), std).log_prob(actions)
        mask = torch.ones(actions.shape, dtype=torch.bool)
        return gruppo.Rollouts(
            prompts=tuple(request.prompt for request in requests),
            group_ids=group,
            actions=actions[..., None].cpu(),
            mask=mask,
            lengths=mask.sum(1),
            completions=tuple(f"return {total:.1f}" for total in rewards.sum(1).tolist()),
            sampler_logprobs=logprobs.cpu(),
            policy_version=torch.zeros(mask.shape, dtype=torch.long),
            temperature=torch.full((len(group),), float(sampling.temperature)),
            finish=("stop",) * len(group),
            per_row={"states": torch.stack(states, 1).cpu(), "rewards": rewards},
        )

    def likelihood(self, rollouts, micro_batch, *, outputs=()):
        states = micro_batch.of(rollouts.per_row["states"]).to(self.device)
        features = self.module.trunk(observe(states))  # [b, t, 64]
        mean = self.module.mean(features)[..., 0]
        normal = torch.distributions.Normal(mean, self.module.log_std.exp().expand(mean.shape))
        wants_entropy = "entropy" in outputs or "entropy_value" in outputs
        return gruppo.Likelihood(
            normal.log_prob(micro_batch.of(rollouts.actions)[..., 0].to(self.device)),
            normal.entropy() if wants_entropy else None,
            gruppo.Gaussian(mean[..., None], normal.stddev[..., None])
            if "gaussian" in outputs
            else None,
            self.value_head(features.flatten(0, 1)).reshape(mean.shape)
            if "values" in outputs
            else None,
        )

    def values(self, rollouts, micro_batch):
        states = micro_batch.of(rollouts.per_row["states"]).to(self.device)
        features = self.module.trunk(observe(states))
        return self.value_head(features.flatten(0, 1)).reshape(features.shape[:2])


def policy():
    """An untrained policy; gruppo seeds torch's generator before it calls this."""
    return PendulumPolicy(Network())


def starts(seed=0):
    """An endless stream of starting states, and ``HELD_OUT`` others for evaluation."""

    def prompt(item, draw):
        angle, speed = (2 * torch.rand(2, generator=generator_at(*item)) - 1).tolist()
        return gruppo.Prompt("-".join(map(str, item)), [math.pi * angle, speed], draw=draw)

    return gruppo.IndexedSource(
        name="pendulum",
        seed=seed,
        train=lambda draw: (seed, "train", draw),
        evaluation=[(0, "held out", n) for n in range(HELD_OUT)],
        prompt_at=prompt,
        columns=(),
        digest="starting states of a pendulum",
    )


class StepReward:
    """The rewards of the steps, as the environment gave them inside ``sample``, divided by 100 to
    suit the critic."""

    name, scores_steps = "swing_up", True

    def __call__(self, rollouts):
        return rollouts.per_row["rewards"] / 100


step_reward = StepReward()


def pendulum():
    """Swing up a pendulum by PPO with GAE; the critic is a value head on the policy's network."""
    return gruppo.Config(
        model=f"{__file__}:policy",
        data=f"{__file__}:starts",
        reward=(f"{__file__}:step_reward",),
        objective=gruppo.Objective(
            baseline="critic",
            scale="none",
            whiten=True,
            credit="return_to_go",
            gamma=0.97,
            lam=0.95,
        ),
        rollout=gruppo.RolloutConfig(prompts=64, group_size=1, max_new_tokens=STEPS),
        optim=gruppo.OptimConfig(lr=1e-3, epochs=5, minibatches=4, token_budget=10000),
        evaluation=gruppo.EvaluationConfig(prompts=HELD_OUT, every=50),
        steps=200,
    )


# --- baselines ------------------------------------------------------------------------------------


def energy_controller(state):
    """Pump energy until the pendulum is nearly upright, then balance it by proportional-derivative
    control."""
    angle, speed = state.unbind(-1)
    wrapped = (angle + math.pi) % (2 * math.pi) - math.pi
    energy = speed**2 / 6 + GRAVITY / 2 * (angle.cos() - 1)  # 0 upright and at rest
    pump = -torch.sign(speed * energy) * 1.0
    balance = -(10 * wrapped + 2 * speed) / MAX_TORQUE
    return torch.where(wrapped.abs() < 0.4, balance, pump).clamp(-1, 1)


def returns_of(act):
    """Returns of the held-out starts under a function from states [B, 2] to actions [B]."""
    state = torch.tensor([prompt.inputs for prompt in starts().held_out(HELD_OUT)])
    total = torch.zeros(len(state))
    for _ in range(STEPS):
        state, reward = step(state, act(state))
        total += reward
    return total


def compare(run):
    """Print the mean return of held-out starts, of the policy and of the baselines."""
    trained = gruppo.load_policy(run)
    with torch.no_grad():
        rows = {
            "no torque": returns_of(lambda state: torch.zeros(len(state))),
            "energy controller": returns_of(energy_controller),
            "policy": returns_of(
                lambda s: trained.module.mean(trained.module.trunk(observe(s)))[:, 0]
            ),
        }
    for name, values in rows.items():
        print(f"{name:<20} {float(values.mean()):8.1f}")


if __name__ == "__main__":
    compare(sys.argv[1] if len(sys.argv) > 1 else "runs/pendulum")
