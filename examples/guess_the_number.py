"""Several turns: a policy guesses a number, an environment replies higher or lower, and the policy
guesses again.

A randomly initialized model of 0.03 million weights learns to find 0 to 6 in three guesses, from
its reward alone. Without using the replies a policy finds 3 of 7 numbers; binary search finds all
7.

    python examples/guess_the_number.py
"""

import torch
from plain_module import TinyGPT
from torch import nn

import gruppo

ALPHABET = "\n0123456<>?"
"""The end token, the numbers, the replies, and the prompt."""


class Characters:
    def encode(self, text):
        return [ALPHABET.index(c) for c in text]

    def decode(self, ids):
        return "".join(ALPHABET[i] for i in ids)


def reply(text, state, answer):
    """Return the reply to a guess; None ends the game. ``state`` belongs to this game, and the
    reward reads it."""
    if len(text) != 1 or not text.isdigit():
        return None
    state["numbers"] = state.get("numbers", 0) + 1
    state["found"] = text == answer
    return None if text == answer else "<" if answer < text else ">"


def found(state):
    """Return 1 if the number was found, otherwise 0.1 per guess that is a number."""
    return [1.0 if game.get("found") else 0.1 * game.get("numbers", 0) for game in state]


def main(steps=400, **options):
    """Train and return the result, and how many numbers the trained policy finds."""
    torch.manual_seed(0)
    module = TinyGPT(context=16)
    module.tokens, module.head = nn.Embedding(len(ALPHABET), 32), nn.Linear(32, len(ALPHABET))
    policy = gruppo.from_module(module, Characters(), eos_ids=[0], context=16)
    games = [{"prompt": "?", "answer": str(number)} for number in range(7)]
    result = gruppo.train(
        model=policy,
        data=games,
        reward=found,
        environment=reply,
        steps=steps,
        **{
            "environment__turns": 3,
            "rollout__max_new_tokens": 6,
            "rollout__prompts": 7,
            "rollout__group_size": 16,
            "objective": "dr_grpo",
            "optim__lr": 2e-3,
            "stage__entropy_coef": "linear:0.1,0",
            "prompts__held_out_fraction": 0.0,
        }
        | options,
    )
    requests = [
        gruppo.Request(gruppo.Prompt(game["answer"], "?", target=game["answer"]), 1)
        for game in games
    ]
    greedy = gruppo.Sampling(temperature=0.0, max_actions=6)
    environment = gruppo.Environment(reply, turns=3)
    played = gruppo.converse(
        policy.sample, policy.continue_rollouts, environment, requests, greedy, seed=0
    )
    for game, text, state in zip(games, played.completions, played.per_row["state"], strict=True):
        print(
            f"{game['answer']}: {' '.join(text.split())}  "
            f"{'found' if state.get('found') else 'not found'}"
        )
    return result, sum(bool(state.get("found")) for state in played.per_row["state"])


if __name__ == "__main__":
    main()
