"""Reward models: classifiers of whole texts (outcome) and of the steps of a text (process).

Both are reward functions in TRL's calling convention. The completion is read as text by the model's own tokenizer,
whatever the policy's is; the policy's tokens are never written anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from gruppo.rewards.networks import Ids, Network
from gruppo.rewards.steps import checked_separator, cut
from gruppo.rewards.text import text_of
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

Output = Literal["logit", "probability"]
Log = Callable[[str, float], None]


class RewardModel:
    """Any ``AutoModelForSequenceClassification``: one number for each completion.

    One label: its logit. Two or more: the log-odds of ``label`` (index or name; 1 of two) against the others, or with
    ``output="probability"`` its probability (the sigmoid of a single logit). Where its tokenizer has a chat template
    the model reads a conversation, a plain prompt as the user's words; else prompt and completion as one text, the
    messages of a conversation joined by line ends. ``chat`` decides otherwise. A text longer than ``max_length`` (0:
    what the model holds) loses its beginning, which is counted as ``reward_metric/NAME_truncated_frac`` and warned of.
    """

    timeout_s = None
    """A forward is waited for: a deadline would start others beside it."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        label: int | str | None = None,
        output: Output = "logit",
        chat: bool | None = None,
        batch_tokens: int = 4096,
        max_length: int = 0,
        device: str = "",
        offload: bool = False,
        dtype: str = "float32",
        trust_remote_code: bool = False,
        name: str = "reward_model",
    ) -> None:
        self.__name__ = name
        self.network = Network(
            model,
            tokenizer,
            "ForSequenceClassification",
            batch_tokens=batch_tokens,
            max_length=max_length,
            device=device,
            offload=offload,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        self.label, self.output = label_of(self.network, label), checked_output(output)
        has_template = bool(getattr(self.network.tokenizer, "chat_template", None))
        self.chats = has_template if chat is None else checked_chat(chat, has_template, self.network.name)
        self._cuts = _Cuts(name)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Log | None = None, **_: Any
    ) -> list[float]:
        texts = [self.network.fitted(self._ids(*row)) for row in zip(prompts, completions, strict=True)]
        self._cuts.count(texts, self.network.max_length, log_metric)
        logits = self.network.logits([text.ids for text in texts])
        if any(x.ndim != 1 for x in logits):
            raise GruppoError(
                f"reward model {self.network.name} gave logits of shape {list(logits[0].shape)} for one text; an "
                "outcome model gives one number for each label. For a model of steps write process_reward."
            )
        return [float(scored(x, self.label, self.output)) for x in logits]

    def _ids(self, prompt: Any, completion: Any) -> list[int]:
        tokenizer = self.network.tokenizer
        if not self.chats:
            return list(tokenizer(plain(prompt) + text_of(completion))["input_ids"])
        return list(tokenizer.apply_chat_template(conversation(prompt, completion), tokenize=True, return_dict=False))


class ProcessRewardModel:
    """Any ``AutoModelForTokenClassification`` in TRL's convention: a number for each step of each completion.

    A completion is cut at ``separator``. The model reads the prompt, then each step followed by ``mark`` (without one,
    the separator), each tokenised by itself; a step's score stands at the last token of its mark, which has read
    nothing that came later. A conversation is written by the chat template, where there is one.

    ``score="steps"`` gives each step its score; "mean", "min", "last" or "product" one number of them, an outcome.
    ``label``, ``output``, ``max_length`` and the rest as of ``RewardModel``; steps that a cut text lacks are unscored.
    """

    timeout_s = None

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        separator: str = "\n",
        mark: str = "",
        score: Literal["steps", "mean", "min", "last", "product"] = "steps",
        label: int | str | None = None,
        output: Output = "probability",
        batch_tokens: int = 4096,
        max_length: int = 0,
        device: str = "",
        offload: bool = False,
        dtype: str = "float32",
        trust_remote_code: bool = False,
        name: str = "process_reward",
    ) -> None:
        if score != "steps" and score not in SUMMARIES:
            raise GruppoError(f"score={score!r} is not one of steps, {', '.join(SUMMARIES)}. Set score=steps.")
        self.__name__, self.separator, self.score = name, checked_separator(separator), score
        self.step_separator = separator if score == "steps" else None
        """As ``step_reward`` marks a function."""
        self.network = Network(
            model,
            tokenizer,
            "ForTokenClassification",
            batch_tokens=batch_tokens,
            max_length=max_length,
            device=device,
            offload=offload,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        self.label, self.output = label_of(self.network, label), checked_output(output)
        self.mark = self._encoded(mark or separator)
        if not self.mark:
            raise GruppoError(
                f"the tokenizer of {self.network.name} has no token for {mark or separator!r}, where a step's score is "
                "to stand. Set mark to a text that it knows."
            )
        self._cuts = _Cuts(name)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Log | None = None, **_: Any
    ) -> list[Any]:
        written = [self._written(*row) for row in zip(prompts, completions, strict=True)]
        texts = [self.network.fitted(ids) for ids, _ in written]
        self._cuts.count(texts, self.network.max_length, log_metric)
        logits = self.network.logits([text.ids for text in texts])
        if any(x.ndim != 2 for x in logits):
            raise GruppoError(
                f"reward model {self.network.name} gave logits of shape {list(logits[0].shape)} for one text; a "
                "process model gives a number for each token. For a model of whole texts write reward_model."
            )
        rows = zip(written, texts, logits, strict=True)
        scores = [self._scores(len(ids) - len(text.ids), ends, x) for (ids, ends), text, x in rows]
        return scores if self.score == "steps" else [summary(row, self.score) for row in scores]

    def _written(self, prompt: Any, completion: Any) -> tuple[list[int], list[int]]:
        """Ids, and the position of each step's score."""
        ids, ends = self._opening(prompt), []
        for step in cut(text_of(completion), self.separator):
            ids += [*self._encoded(step.text), *self.mark]
            ends.append(len(ids) - 1)
        return ids, ends

    def _opening(self, prompt: Any) -> list[int]:
        tokenizer = self.network.tokenizer
        if not isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
            continues = prompt[-1]["role"] == "assistant"
            return list(
                tokenizer.apply_chat_template(
                    prompt,
                    tokenize=True,
                    return_dict=False,
                    add_generation_prompt=not continues,
                    continue_final_message=continues,
                )
            )
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return [*begin, *self._encoded(plain(prompt))]

    def _encoded(self, text: str) -> list[int]:
        return list(self.network.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _scores(self, lost: int, ends: Sequence[int], logits: Tensor) -> list[float | None]:
        """At the positions ``ends`` of a text that lost so many ids; the first of those that are left opens it."""
        scores = scored(logits, self.label, self.output).tolist()
        return [scores[end - lost] if end - lost >= (lost > 0) else None for end in ends]


# --- what both read and say ------------------------------------------------------------------------------------------


def conversation(prompt: Any, completion: Any) -> list[Any]:
    """Messages: a plain prompt is the user's; words of the assistant that the prompt begins are continued."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    answer = text_of(completion)
    if messages and messages[-1]["role"] == "assistant":
        answer = text_of([messages.pop()]) + answer
    return [*messages, {"role": "assistant", "content": answer}]


def plain(prompt: Any) -> str:
    """A prompt as text; of a conversation the words of all, a line end after each."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{text_of([{**message, 'role': 'assistant'}])}\n" for message in prompt)


def scored(logits: Tensor, label: int, output: Output) -> Tensor:
    """[..., labels] to [...]: of a single label its logit, else the log-odds of ``label``; or the probability."""
    if logits.shape[-1] == 1:
        odds = logits[..., 0]
    else:
        others = [n for n in range(logits.shape[-1]) if n != label]
        odds = logits[..., label] - logits[..., others].logsumexp(-1)
    return odds.sigmoid() if output == "probability" else odds


SUMMARIES: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "min": min,
    "last": lambda scores: scores[-1],
    "product": math.prod,
}


def summary(scores: Sequence[float | None], how: str) -> float | None:
    known = [score for score in scores if score is not None]
    return SUMMARIES[how](known) if known else None


def label_of(network: Network, label: int | str | None) -> int:
    """The index of the label that is good."""
    names = {str(name): int(n) for n, name in (getattr(network.module.config, "id2label", None) or {}).items()}
    count = network.labels
    if label is None:
        if count > 2:
            raise GruppoError(
                f"reward model {network.name} has {count} labels, {', '.join(names)}; say which of them is good. Set "
                f"label={count - 1}, or its name."
            )
        return count - 1
    index = names.get(str(label), label)
    index = int(index) if str(index).isdecimal() else index
    if not isinstance(index, int) or not 0 <= index < count:
        raise GruppoError(
            f"reward model {network.name} has no label {label!r}; it has {', '.join(names) or f'0 to {count - 1}'}. "
            "Set label to one of them or its number."
        )
    return index


def checked_output(output: Output) -> Output:
    if output not in ("logit", "probability"):
        raise GruppoError(f"output={output!r} is neither logit nor probability. Set output=logit.")
    return output


def checked_chat(chat: bool, has_template: bool, name: str) -> bool:
    if chat and not has_template:
        raise GruppoError(f"chat=True, but the tokenizer of {name} has no chat template. Leave chat out.")
    return chat


class _Cuts:
    """How many texts were too long; said once, counted always."""

    def __init__(self, name: str) -> None:
        self.name, self.is_said = name, False

    def count(self, texts: Sequence[Ids], longest: int, log_metric: Log | None) -> None:
        cuts = sum(text.is_cut for text in texts)
        if log_metric is not None:
            log_metric(f"{self.name}_truncated_frac", cuts / len(texts))
        if cuts and not self.is_said:
            log.warning(
                "reward %s: %d of %d texts are longer than the %d tokens that the model reads; it reads their ends. "
                "reward_metric/%s_truncated_frac counts them from now on.",
                self.name,
                cuts,
                len(texts),
                longest,
                self.name,
            )
        self.is_said = self.is_said or cuts > 0
