"""Demonstrations: the tokens that the policy would have to sample to answer with a given target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gruppo.modalities.text.chat import Chat, as_completion
from gruppo.types import Finish, GruppoError, Prompt, Rollouts


def target_text(target: Any) -> str:
    """Text of a target: a text, a number, an assistant's message or a list of one; "" if it is missing."""
    messages = [target] if isinstance(target, Mapping) else target
    if isinstance(messages, list | tuple):
        contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
        is_answer = len(contents) == len(messages) == 1 and messages[0].get("role", "assistant") == "assistant"
        if not is_answer or not isinstance(contents[0], str):
            raise GruppoError(
                f"the target {target!r:.80} is no answer; it needs a text, or one message of the assistant with a text."
            )
        return contents[0]
    is_missing = target is None or (isinstance(target, float) and math.isnan(target))
    return "" if is_missing else str(target)


def answer_ids(chat: Chat, inputs: Any, text: str) -> list[int]:
    """Tokens of ``text`` behind the prompt's own, with the end token that the policy would close them with.

    They are those of prompt and answer encoded together, if these begin with the prompt's tokens and the rest decodes
    to the text: a chat template may trim it or leave out reasoning. Otherwise the text is encoded by itself.
    """
    prompt, whole = chat.encode(inputs), chat.encode_answered(inputs, text)
    if whole[: len(prompt)] == prompt:
        ids = whole[len(prompt) :]
        ids = next((ids[: n + 1] for n, token in enumerate(ids) if token in chat.eos_ids), ids)
        is_closed = bool(ids) and ids[-1] in chat.eos_ids
        content = ids[:-1] if is_closed else ids
        if content and chat.text_with_specials(content).strip() == text.strip():
            return ids if is_closed else [*ids, *chat.closing]
    ids = chat.encode_text(text)
    if set(ids) & set(chat.eos_ids):
        raise GruppoError(f"the target {text!r:.80} holds an end token, at which the answer would end. Remove it.")
    return [*ids, *chat.closing]


def check_demonstration(chat: Chat, prompt: Prompt, context: int | None) -> str | None:
    """Return why this prompt's target cannot be learned from, with what to do; None if it can."""
    try:
        text = target_text(prompt.target)
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


def demonstration_rollouts(chat: Chat, prompts: Sequence[Prompt]) -> Rollouts:
    """One row per prompt whose completion is its target. There was no sampler: sampler_logprobs are 0."""
    texts = [target_text(prompt.target) for prompt in prompts]
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
        completions=tuple(as_completion(text, p.inputs) for p, text in zip(prompts, texts, strict=True)),
        sampler_logprobs=torch.zeros(actions.shape),
        policy_version=torch.zeros(actions.shape, dtype=torch.long),
        temperature=torch.ones(rows),
        finish=(finish,) * rows,
        shared={"prompt_ids": tuple(torch.tensor(chat.encode(prompt.inputs)) for prompt in prompts)},
        per_row={"top_k": torch.zeros(rows, dtype=torch.long), "top_p": torch.ones(rows, dtype=torch.float64)},
    )
