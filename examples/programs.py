"""A model learns to write programs from the fraction of tests that they pass.

A task is a letter, an answer an expression of x and y. Programs run in a jail that never contains
the expected results. Linux only; seconds on a CPU. For a real model: ``gruppo train plain --data
YOURS.jsonl --reward code_tests``.

    python examples/programs.py
"""

import torch
from torch import nn

import gruppo
from gruppo.rewards import code_tests

SYMBOLS = "\nabcxy+-*"
TASKS = {"a": "x+y", "b": "x-y", "c": "x*y"}
"""Solutions of the tasks; only the tests are made from them."""


class Symbols:
    def encode(self, text):
        return [SYMBOLS.index(c) for c in text]

    def decode(self, ids):
        return "".join(SYMBOLS[i] for i in ids)


class Writer(nn.Module):
    """A recurrent network from ids [B, T] to logits [B, T, V]."""

    def __init__(self, width=32):
        super().__init__()
        self.symbols, self.memory = (
            nn.Embedding(len(SYMBOLS), width),
            nn.GRU(width, width, batch_first=True),
        )
        self.head = nn.Linear(width, len(SYMBOLS))

    def forward(self, ids):
        return self.head(self.memory(self.symbols(ids))[0])


def tests_of(expression):
    """Return asserts as in MBPP: calls and their expected results."""
    pairs = [(2, 3), (5, 4), (7, 9), (-3, 6)]
    return [f"assert f({x}, {y}) == {eval(expression, {'x': x, 'y': y})}" for x, y in pairs]


def main(steps=80, **options):
    """Train and return the result."""
    torch.manual_seed(0)
    score = code_tests()

    def share_of_tests(completions, tests, **columns):
        return score(
            [f"def f(x, y): return {text}" for text in completions], tests=tests, **columns
        )

    policy = gruppo.from_module(Writer(), Symbols(), eos_ids=[0], context=8)
    result = gruppo.train(
        model=policy,
        data=[
            {"prompt": task, "tests": tests_of(expression)} for task, expression in TASKS.items()
        ],
        reward=share_of_tests,
        steps=steps,
        **{
            "rollout__max_new_tokens": 3,
            "rollout__prompts": 3,
            "rollout__group_size": 32,
            "optim__lr": 5e-3,
        }
        | {"stage__entropy_coef": 0.02, "prompts__held_out_fraction": 0.0}
        | options,
    )
    return result


if __name__ == "__main__":
    main()
