"""A policy that writes what a script says, with calls of tools as a chat template's parser would
find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gruppo.environments import Environment, converse
from gruppo.types import Prompt, Request, Rollouts, Sampling

ASK = [{"role": "user", "content": "6 x 7?"}]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def says(content: str = "", *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": [*calls]} if calls else {}),
        **more,
    }


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


class Script:
    """Writes the messages of a script, one token for each character; a turn beyond it is "done"."""

    def __init__(self, *messages: Any) -> None:
        self.messages = messages
        self.prompts: list[Any] = []
        """What the rows were prompted with, once for each group."""

    def write(self, prompt: Prompt, sample: int, conversation: Sequence[Any]) -> dict[str, Any]:
        turn = sum(message["role"] == "assistant" for message in conversation)
        message = self.messages[turn] if turn < len(self.messages) else says("done")
        return message(prompt, sample) if callable(message) else message

    def sample(self, requests: Sequence[Request], sampling: Any, *, seed: int) -> Rollouts:
        parts = []
        for request in requests:
            self.prompts.append(request.prompt.inputs)
            ids = torch.tensor(
                [ord(c) % 500 for m in request.prompt.inputs for c in m["content"]] or [1]
            )
            answers = [
                self.write(request.prompt, request.first + n, ()) for n in range(request.size)
            ]
            rows, width = request.size, max(len(answer["content"]) + 1 for answer in answers)
            actions = torch.zeros(rows, width, dtype=torch.long)
            lengths = torch.tensor([len(answer["content"]) + 1 for answer in answers])
            mask = torch.arange(width) < lengths[:, None]
            parts.append(
                Rollouts(
                    prompts=(request.prompt,),
                    group_ids=torch.zeros(rows, dtype=torch.long),
                    actions=torch.where(mask, 7, actions),
                    mask=mask,
                    lengths=lengths,
                    completions=tuple([answer] for answer in answers),
                    sampler_logprobs=torch.where(mask, -1.0, 0.0),
                    policy_version=torch.zeros(rows, width, dtype=torch.long),
                    temperature=torch.ones(rows),
                    finish=("stop",) * rows,
                    shared={"prompt_ids": (ids,)},
                )
            )
        return Rollouts.cat(parts)

    def continue_rollouts(
        self,
        rollouts: Rollouts,
        replies: Mapping[int, Any],
        sampling: Any,
        *,
        seed: int,
        max_reply_tokens: int,
    ) -> Rollouts:
        """Two columns for each message of a reply, and three for the next answer."""
        width = rollouts.actions.shape[1] + max(2 * len(reply) for reply in replies.values()) + 3
        columns = ("actions", "mask", "sampler_logprobs", "policy_version")
        old = {name: getattr(rollouts, name) for name in columns}
        fields = {
            name: torch.nn.functional.pad(x, (0, width - x.shape[1])) for name, x in old.items()
        }
        lengths, completions = rollouts.lengths.clone(), list(rollouts.completions)
        texts = list(rollouts.per_row["text"])
        for row, reply in replies.items():
            prompt = rollouts.prompts[int(rollouts.group_ids[row])]
            sample = int(rollouts.per_row["sample"][row])
            answer = self.write(prompt, sample, completions[row])
            completions[row], texts[row] = [*completions[row], *reply, answer], answer["content"]
            start = int(lengths[row]) + 2 * len(reply)
            fields["actions"][row, int(lengths[row]) : start] = 9
            fields["actions"][row, start : start + 3], fields["mask"][row, start : start + 3] = (
                7,
                True,
            )
            lengths[row] = start + 3
        per_row = {**rollouts.per_row, "text": tuple(texts)}
        return replace(
            rollouts, lengths=lengths, completions=tuple(completions), per_row=per_row, **fields
        )


def play(
    script: Script,
    environment: Environment,
    requests: Sequence[Request] | None = None,
    **options: Any,
) -> Rollouts:
    """Conversations of the script with the environment; one prompt with two samples by default."""
    requests = [Request(Prompt("a", ASK), 2)] if requests is None else requests
    seed = options.pop("seed", 0)
    return converse(
        script.sample,
        script.continue_rollouts,
        environment,
        requests,
        Sampling(),
        seed=seed,
        **options,
    )


def counts(rollouts: Rollouts, row: int = 0) -> dict[str, int]:
    from gruppo.environments import COUNTS

    found = dict(zip(COUNTS, rollouts.per_row["tool_counts"][row].tolist(), strict=True))
    return {name: count for name, count in found.items() if count}


Factory = Callable[[], Any]
