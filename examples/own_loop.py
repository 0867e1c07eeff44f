"""A training loop of your own with ``gruppo.GRPOLoss``, in plain torch; seconds on a CPU.

A prompt is a number; the answer is two tokens from 0 to 7 with that sum.

    python examples/own_loop.py
"""

import torch
from torch import nn

from gruppo import GRPOLoss

NUMBERS, GROUP = 8, 16


class TwoTokens(nn.Module):
    """A table of logits of the first token per prompt, and of the second per prompt and first
    token."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(NUMBERS, NUMBERS))
        self.second = nn.Parameter(torch.zeros(NUMBERS, NUMBERS, NUMBERS))

    def logprobs(self, prompts, tokens):
        """Return the log-probs [B, 2] of the tokens."""
        both = torch.stack(
            [self.first[prompts], self.second[prompts, tokens[:, 0]]], dim=1
        )  # [B, 2, NUMBERS]
        return both.log_softmax(-1).gather(-1, tokens[:, :, None])[:, :, 0]

    @torch.no_grad()
    def sample(self, prompts):
        first = self.first[prompts].softmax(-1).multinomial(1)[:, 0]
        return torch.stack(
            [first, self.second[prompts, first].softmax(-1).multinomial(1)[:, 0]], dim=1
        )


def main(steps=60, epochs=2):
    """Train and return the fraction of right answers at each step."""
    torch.manual_seed(0)
    policy, reference = TwoTokens(), TwoTokens()  # the reference is never trained
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    loss_of = GRPOLoss(clip_epsilon=0.2, kl_beta=0.01)
    prompts = torch.arange(NUMBERS).repeat_interleave(GROUP)  # [B]: each prompt GROUP times
    mask = torch.ones(NUMBERS * GROUP, 2, dtype=torch.bool)
    shares = []
    for _ in range(steps):
        tokens = policy.sample(prompts)
        rewards = (tokens.sum(dim=1) == prompts).float()
        shares.append(rewards.mean().item())
        with torch.no_grad():
            old, ref = policy.logprobs(prompts, tokens), reference.logprobs(prompts, tokens)
        for _ in range(epochs):
            loss = loss_of(
                policy.logprobs(prompts, tokens), old, rewards.view(NUMBERS, GROUP), ref, mask
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"right answers {shares[0]:.0%} before, {shares[-1]:.0%} after {steps} steps")
    return shares


if __name__ == "__main__":
    main()
