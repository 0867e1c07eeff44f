"""Answers that are given, not sampled: what the policy would have had to write, token by token, to give them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gruppo.modalities.text.chat import Chat, output_of
from gruppo.types import Finish, GruppoError, Prompt, Rollouts


def answer_of(target: Any) -> str:
    """The text of a target: a text, a number, an assistant's message or a list with one; "" where there is none."""
    messages = [target] if isinstance(target, Mapping) else target
    if isinstance(messages, list | tuple):
        said = [message.get("content") for message in messages if isinstance(message, Mapping)]
        is_answer = len(said) == len(messages) == 1 and messages[0].get("role", "assistant") == "assistant"
        if not is_answer or not isinstance(said[0], str):
            raise GruppoError(
                f"the target {target!r:.80} is no answer; it needs a text, or one message of the assistant with a text."
            )
        return said[0]
    is_missing = target is None or (isinstance(target, float) and math.isnan(target))
    return "" if is_missing else str(target)


def answer_ids(chat: Chat, inputs: Any, text: str) -> list[int]:
    """The tokens that give ``text`` behind the prompt's own, and the end token that the policy would close them with.

    Those of prompt and answer written as one, where that begins with the prompt's tokens and the rest still says the
    text: a chat template may trim it, or leave out reasoning. Otherwise the text by itself, and an end token.
    """
    prompt, whole = chat.encode(inputs), chat.encode_answered(inputs, text)
    if whole[: len(prompt)] == prompt:
        ids = _to_first_end(whole[len(prompt) :], chat.eos_ids)
        if _says(chat, ids, text):
            return ids if ids[-1] in chat.eos_ids else [*ids, *chat.closing]
    ids = chat.encode_text(text)
    if set(ids) & set(chat.eos_ids):
        raise GruppoError(f"the target {text!r:.80} holds an end token, at which the answer would end. Remove it.")
    return [*ids, *chat.closing]


def _to_first_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    return next((ids[: n + 1] for n, token in enumerate(ids) if token in ends), ids)


def _says(chat: Chat, ids: list[int], text: str) -> bool:
    said = ids[:-1] if ids and ids[-1] in chat.eos_ids else ids
    return bool(said) and chat.text_with_specials(said).strip() == text.strip()


def refusal(chat: Chat, prompt: Prompt, context: int | None) -> str | None:
    """Why this prompt's target cannot be learned from, with what to do; or None."""
    try:
        text = answer_of(prompt.target)
        if not text.strip():
            return f"prompt {prompt.id!r} has no target to learn from: it is {prompt.target!r}. Give it one."
        tokens = len(chat.encode(prompt.inputs)) + len(answer_ids(chat, prompt.inputs, text))
    except GruppoError as error:
        return f"prompt {prompt.id!r}: {error}"
    if context is None or tokens <= context:
        return None
    return (
        f"prompt {prompt.id!r} and its target have {tokens} tokens; the model's context holds {context}. Shorten or "
        "remove it."
    )


def demonstrated(chat: Chat, prompts: Sequence[Prompt]) -> Rollouts:
    """One row of each prompt that answers with its target. No sampler said anything of it: its log-probs are 0."""
    texts = [answer_of(prompt.target) for prompt in prompts]
    answers = [torch.tensor(answer_ids(chat, p.inputs, text)) for p, text in zip(prompts, texts, strict=True)]
    lengths = torch.tensor([len(ids) for ids in answers], dtype=torch.long)
    actions = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True)  # [B, T]
    rows = len(prompts)
    finish: Finish = "stop"
    return Rollouts(
        prompts=tuple(prompts),
        group_ids=torch.arange(rows),
        actions=actions,
        mask=torch.arange(actions.shape[1]) < lengths[:, None],
        lengths=lengths,
        completions=tuple(output_of(text, p.inputs) for p, text in zip(prompts, texts, strict=True)),
        sampler_logprobs=torch.zeros(actions.shape),
        policy_version=torch.zeros(actions.shape, dtype=torch.long),
        temperature=torch.ones(rows),
        finish=(finish,) * rows,
        shared={"prompt_ids": tuple(torch.tensor(chat.encode(prompt.inputs)) for prompt in prompts)},
        per_row={
            "top_k": torch.zeros(rows, dtype=torch.long),
            "top_p": torch.ones(rows, dtype=torch.float64),
        },
    )
