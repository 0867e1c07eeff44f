"""The contract of a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gruppo.data.open import open_source
from gruppo.protocols import peek
from gruppo.rewards import RewardSet, Scores, columns_of, resolve_reward
from gruppo.rewards.remote import RewardWorkers
from gruppo.testing.policy import ContractError, as_requests
from gruppo.types import Prompt, Rollouts
from gruppo.worker import IS_AVAILABLE

TEXTS = (Prompt("sum", "1 + 1 =", "2"), Prompt("word", "Say yes.", "yes", draw=1))
MESSAGES = [replace(one, inputs=[{"role": "user", "content": one.inputs}]) for one in TEXTS]
MAX_PROMPTS = 16
"""Prompts of the data that a reward is checked with."""


class _RaisesAlways(ContractError):
    """The reward raises for every completion, as one does that is written for the other form of
    completions."""


def check_reward(
    reward: Any,
    prompts: Any = None,
    *,
    timeout_s: float | None = 60.0,
    prompt_column: str = "prompt",
    target_column: str | None = None,
) -> None:
    """Check that a reward scores any completion, an empty one too, and that each score stays with
    its completion.

    For rewards of steps, the scores of the steps are checked too. ``reward``: a function in TRL's
    calling convention, an object with the Reward protocol, or a name such as ``file.py:function``.
    ``prompts``: data as for ``gruppo.train(data=...)``, with the target and columns that the reward
    reads, or a list of ``Prompt``; of data, the first ``MAX_PROMPTS`` of an epoch are used.

    Completions are lists of messages if the prompts are, else strings, as in training. Without
    ``prompts`` they are lists of messages, and strings for a reward that raises for every such
    list.
    """
    if prompts is None:
        problems = []
        for own in (MESSAGES, TEXTS):
            try:
                return _check(reward, own, timeout_s)
            except _RaisesAlways as error:
                problems.append(str(error))
        raise ContractError(f"{' '.join(problems)} Give check_reward some of your data as prompts.")
    if isinstance(prompts, list | tuple) and all(isinstance(p, Prompt) for p in prompts):
        own = [request.prompt for request in as_requests(prompts)]
    else:
        source = open_source(
            prompts,
            seed=0,
            held_out_fraction=0.0,
            prompt_column=prompt_column,
            target_column=target_column,
        )
        own = peek(source, min(source.epoch_size or MAX_PROMPTS, MAX_PROMPTS))
    _check(reward, own, timeout_s)


def _check(reward: Any, prompts: Sequence[Prompt], timeout_s: float | None) -> None:
    """Check with completions in the form of the prompts."""
    resolved = resolve_reward(reward, RewardWorkers() if IS_AVAILABLE else None)
    scorer = RewardSet([resolved], timeout_s=timeout_s)
    who = f"reward {scorer.names[0]!r}"
    scorer.check(columns_of(prompts))
    scorer.set_decoder(lambda ids: "".join(map(chr, filter(None, ids))))
    rollouts = _completions(prompts)
    before = _readable(rollouts)  # as text: a copy would share what a reward changes in place
    scores = scorer.score(rollouts)
    if scores.failures:
        first = scores.failures[0]
        is_always = len(scores.failures) == len(rollouts) and first.kind == "exception"
        form = "texts" if isinstance(prompts[0].inputs, str) else "lists of messages"
        raise (_RaisesAlways if is_always else ContractError)(
            f"""{who}, {first.kind} for the completion {rollouts.completions[first.row]!r:.80}:
                {first.message}. It needs one finite number for each completion, whatever it says,
                or None for not scored. Completions were {form}."""
        )
    values = scores.rewards.tolist()
    if not scores.rewards.isfinite().any():
        raise ContractError(f"""{who} scored none of {len(rollouts)} completions; it needs to score
            some. Give check_reward prompts with the targets and columns that it reads.""")
    again = scorer.score(rollouts)
    order = torch.arange(len(rollouts)).flip(0)
    reverse = scorer.score(rollouts.take(order)).take(order.tolist())
    if _readable(rollouts) != before:
        raise ContractError(f"""{who} changed the prompts or completions that it was given, which
            others read too; change a copy.""")
    if not _same(again, scores):
        raise ContractError(f"""{who} scored {again.rewards.tolist()} what it had scored {values};
            the same completions need the same scores, or a resumed run is another run. Seed
            whatever is random.""")
    if not _same(reverse, scores):
        raise ContractError(f"""{who} scored {reverse.rewards.tolist()} when the completions came in
            reverse, but {values} before; a score stays with its completion. Return scores in the
            order of the completions.""")


def _same(a: Scores, b: Scores) -> bool:
    """Whether rows and their steps have the same scores."""
    pairs = zip([a.rewards, *a.steps.values()], [b.rewards, *b.steps.values()], strict=True)
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True) for x, y in pairs)


def _completions(prompts: Sequence[Prompt]) -> Rollouts:
    """Return what models write: nothing, the answer, the answer in a sentence, in lines, nonsense,
    and a great deal.

    An action is the code of a character, or 0 at the end.
    """
    texts: list[str] = []
    for answer in (str(prompt.target) for prompt in prompts):
        # nonsense: characters outside ASCII, and tags that are opened and not closed
        nonsense = "\u4f60\u597d \u2211 \\boxed{ <think>"
        sentences = [f"The answer is {answer}.", f"First,\n\nthen {answer}.\n"]
        texts += ["", answer, *sentences, nonsense, "no " * 200]
    rows, lengths = len(texts), torch.tensor([len(text) + 1 for text in texts])  # with the 0
    group_ids = torch.arange(len(prompts)).repeat_interleave(rows // len(prompts))
    columns = int(lengths.max())
    # a prompt of messages is answered by messages, as in training
    completions = tuple(
        text if isinstance(prompts[n].inputs, str) else [{"role": "assistant", "content": text}]
        for n, text in zip(group_ids.tolist(), texts, strict=True)
    )
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=group_ids,
        actions=torch.tensor([list(map(ord, text.ljust(columns, "\0"))) for text in texts]),
        mask=torch.arange(columns) < lengths[:, None],
        lengths=lengths,
        completions=completions,
        sampler_logprobs=torch.zeros(rows, columns),
        policy_version=torch.zeros(rows, columns, dtype=torch.long),
        temperature=torch.ones(rows),
        finish=tuple("stop" for _ in texts),
    )


def _readable(rollouts: Rollouts) -> str:
    """Return all that a reward can read, as text."""
    tensors = [
        x.tolist() for x in (rollouts.actions, rollouts.mask, rollouts.group_ids, rollouts.lengths)
    ]
    prompts = [(p.inputs, p.target, dict(p.meta)) for p in rollouts.prompts]
    return repr((tensors, prompts, rollouts.completions))
