"""A tiny language model whose first letter decides which tool it calls, and an environment with
tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tests import tiny
from tests.environments.scripted import call
from tests.trainer.beside import CopyEngine

from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.types import Prompt, Rollouts

CALLS = {
    **dict.fromkeys("abcdefghijklm", "walk"),
    **dict.fromkeys("nopq", "double"),
    **dict.fromkeys("012", "fly"),
}

TEMPLATE = tiny.CHAT_TEMPLATE.replace(
    "<eos>", "{{ message['tool_calls'] | tojson if message['tool_calls'] }}<eos>"
)
"""Writes calls, without which no result of a tool can follow."""


class CallingPolicy(TextPolicy):
    """Stands for a model with a chat template for tools: its weights, tokens and log-probs are
    those of any other."""

    tools: Sequence[Mapping[str, Any]] = ()

    def prepare_conversations(
        self, tools: Sequence[Mapping[str, Any]] | None, tools_of: Any = None
    ) -> None:
        self.tools = tools or ()

    def sample(self, *args: Any, **options: Any) -> Rollouts:
        return self._parsed(super().sample(*args, **options))

    def continue_rollouts(self, *args: Any, **options: Any) -> Rollouts:
        return self._parsed(super().continue_rollouts(*args, **options))

    def _parsed(self, rollouts: Rollouts) -> Rollouts:
        completions = []
        for messages in rollouts.completions:
            *before, last = messages
            text = last["content"]
            if name := CALLS.get(text[:1]):
                last = {**last, "tool_calls": [call(name, by=len(text))]}
            elif text[:1] in "345" and text:
                last = {**last, "parse_error": "a call that never ends"}
            completions.append([*before, last])
        return replace(rollouts, completions=tuple(completions))


def policy() -> CallingPolicy:
    made = object.__new__(CallingPolicy)
    made.__dict__.update(vars(from_pretrained(tiny.model(), compute="float32")))
    made.chat.tokenizer.chat_template = TEMPLATE
    return made


def double(by: int) -> int:
    """
    Doubles a number.

    Args:
        by: The number.
    """
    return 2 * by


class Walk:
    """A place on a line; half of the groups begin the conversation of each row differently."""

    alive = 0

    def __init__(self) -> None:
        type(self).alive += 1

    def reset(self, answer: str, seed: int, number: int = 0) -> str:
        self.at, self.steps, self._seed, self.places = int(answer), [], seed, {int(answer)}
        return f" at {self.at} {seed % 100}"

    def walk(self, by: int) -> str:
        """
        Walks.

        Args:
            by: How far.
        """
        if by > 6:
            raise ValueError("too far")
        self.at += by
        self.steps.append(by)
        self.places.add(self.at)
        return f"at {self.at}"

    def step(self, text: str, turn: int, seed: int) -> str | None:
        return "go on" if turn < 2 and seed % 2 else None

    def get_reward(self) -> float:
        return self.at / 10

    def close(self) -> None:
        type(self).alive -= 1


class Wander(Walk):
    """Adds a letter to the prompt, one for each answer."""

    def reset(self, answer: str, seed: int, number: int = 0) -> str:
        super().reset(answer, seed, number)
        return chr(97 + int(answer) % 26)

    get_reward = None


def steps_taken(
    environments: Sequence[Any], state: Sequence[Mapping[str, Any]], prompts: Any
) -> list[float]:
    """What the objects were at the end."""
    assert all(isinstance(one, Walk) for one in environments)
    assert all(
        f"at {own['at'] - sum(own['steps'])} " in p[-1]["content"]
        for own, p in zip(state, prompts, strict=True)
    )
    assert all(one.at in one.places for one in environments)
    return [float(len(one.steps)) for one in environments]


class ConversingEngine(CopyEngine):
    """A ``CopyEngine`` for conversations."""

    def continue_rollouts(
        self, rollouts: Rollouts, replies: Any, sampling: Any, **options: Any
    ) -> Rollouts:
        with self.lock:
            before = rollouts.mask
            rollouts = self.policy.continue_rollouts(rollouts, replies, sampling, **options)
            is_new = rollouts.mask & ~torch.nn.functional.pad(
                before, (0, rollouts.mask.shape[1] - before.shape[1])
            )
            return replace(
                rollouts, policy_version=torch.where(is_new, self.version, rollouts.policy_version)
            )


def engine(policy: Any) -> ConversingEngine:
    return ConversingEngine(policy)


def prompts_of(rollouts: Rollouts) -> list[Prompt]:
    return [rollouts.prompts[group] for group in rollouts.group_ids.tolist()]


def go_on(turn: int) -> str | None:
    return "go on" if turn < 3 else None
