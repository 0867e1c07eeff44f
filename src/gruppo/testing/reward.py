"""The contract of a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gruppo.rewards import RewardSet, Scores, columns_of, resolve_reward
from gruppo.testing.shared import ContractError, as_prompts, require
from gruppo.types import Prompt, Rollouts

SUM = Prompt("sum", "1 + 1 =", "2")
WORD = Prompt("word", "Say yes.", "yes", draw=1)


def check_reward(reward: Any, prompts: Sequence[Any] | None = None, *, timeout_s: float | None = 60.0) -> None:
    """A reward scores whatever a model may write, an empty text too, and each score belongs to its completion.

    ``reward``: a function in TRL's calling convention, an object with the Reward protocol, or a name such as
    ``file.py:function``. ``prompts``: some of your data, with the target and columns that the reward reads.
    """
    asked = as_prompts([SUM, WORD] if prompts is None else prompts)
    scorer = RewardSet([resolve_reward(reward)], timeout_s=timeout_s)
    who = f"reward {scorer.names[0]!r}"
    scorer.check(columns_of(asked))
    rollouts = completions_for(asked)
    before = _seen(rollouts)
    scores = scorer.score(rollouts)
    _check_answers(who, rollouts, scores)
    require(
        _seen(rollouts) == before,
        f"{who} changed the prompts or completions that it was given, which others read too; change a copy.",
    )
    _check_order(who, scorer, rollouts, scores)


def _check_answers(who: str, rollouts: Rollouts, scores: Scores) -> None:
    for failure in scores.failures:
        raise ContractError(
            f"{who}, {failure.kind} for the completion {rollouts.outputs[failure.row]!r:.80}: {failure.message}. It "
            "needs one finite number for each completion, whatever it says, or None for not scored."
        )
    require(
        bool(scores.rewards.isfinite().any()),
        f"{who} scored none of {len(rollouts)} completions; it needs to score some. Give check_reward prompts with the "
        "targets and columns that it reads.",
    )


def _check_order(who: str, scorer: RewardSet, rollouts: Rollouts, scores: Scores) -> None:
    again = scorer.score(rollouts).rewards
    require(
        _same(again, scores.rewards),
        f"{who} scored {again.tolist()} what it had scored {scores.rewards.tolist()}; the same completions need the "
        "same scores, or a resumed run is another run. Seed whatever is random.",
    )
    order = torch.arange(len(rollouts)).flip(0)
    turned = scorer.score(rollouts.take(order)).rewards[order]
    require(
        _same(turned, scores.rewards),
        f"{who} scored {turned.tolist()} when the completions came in reverse, but {scores.rewards.tolist()} before; a "
        "score stays with its completion. Return scores in the order of the completions.",
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def completions_for(prompts: Sequence[Prompt]) -> Rollouts:
    """What models write: nothing, the answer, the answer in a sentence, nonsense, and a great deal."""
    rows = [(n, text) for n, prompt in enumerate(prompts) for text in _texts(prompt)]
    lengths = torch.tensor([min(len(text), 4) for _, text in rows])
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=torch.tensor([n for n, _ in rows]),
        actions=torch.arange(len(rows))[:, None] + torch.arange(4),
        mask=torch.arange(4) < lengths[:, None],
        lengths=lengths,
        outputs=tuple(_as_asked(prompts[n], text) for n, text in rows),
        sampler_logprobs=torch.zeros(len(rows), 4),
        policy_version=torch.zeros(len(rows), 4, dtype=torch.long),
        temperature=torch.ones(len(rows)),
        finish=tuple("stop" for _ in rows),
    )


def _texts(prompt: Prompt) -> list[str]:
    answer = f"{prompt.target}"
    return ["", answer, f"The answer is {answer}.", "\u4f60\u597d \u2211 \\boxed{ <think>", "no " * 200]


def _as_asked(prompt: Prompt, text: str) -> Any:
    return text if isinstance(prompt.inputs, str) else [{"role": "assistant", "content": text}]


def _seen(rollouts: Rollouts) -> tuple[Any, ...]:
    """All that a reward can read, as text."""
    tensors = [x.tolist() for x in (rollouts.actions, rollouts.mask, rollouts.group_ids, rollouts.lengths)]
    prompts = [(repr(p.inputs), repr(p.target), repr(dict(p.meta))) for p in rollouts.prompts]
    return tensors, prompts, repr(rollouts.outputs)
