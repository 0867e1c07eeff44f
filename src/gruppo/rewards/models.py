"""Reward models: classifiers of whole texts (outcome) and of the steps of a text (process).

Both are reward functions in TRL's calling convention. The completion is read as text by the model's
own tokenizer, independent of the policy's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gruppo.integrity import check_layers
from gruppo.loading import transformers_error
from gruppo.rewards.functions import split_steps, step_reward
from gruppo.rewards.text import LogMetric, text_of
from gruppo.types import GruppoError

Output = Literal["logit", "probability"]
Column = Sequence[Any]  # an entry for each row
OUTCOME, PROCESS = "ForSequenceClassification", "ForTokenClassification"
BATCH = 16
"""Texts of a forward pass."""
NO_LIMIT = 1 << 20  # a tokenizer without a maximum length states an astronomical one


class NetworkOptions(TypedDict, total=False):
    """Options of a classifier; see ``ScoringNetwork``."""

    label: int | str
    max_length: int
    dtype: Literal["float32", "bfloat16"]
    trust_remote_code: bool


class RewardModel:
    """Any ``AutoModelForSequenceClassification``: one number per completion.

    One label: its logit. Two or more: the log-odds of ``label`` against the others, or with
    ``output="probability"`` its probability (the sigmoid of a single logit). If its tokenizer has a
    chat template, the model reads a conversation, with a plain prompt as the user's message;
    otherwise prompt and completion as one text, the messages of a conversation joined by line ends.
    ``options``: see ``ScoringNetwork``.
    """

    # A forward pass is waited for: a retry after a deadline would start a second one.
    timeout_s = None

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        output: Output = "logit",
        name: str = "reward_model",
        **options: Unpack[NetworkOptions],
    ) -> None:
        self.__name__ = name
        self.network = ScoringNetwork(model, tokenizer, OUTCOME, output, **options)
        self.memory_bytes = self.network.memory_bytes

    def __call__(
        self, prompts: Column, completions: Column, log_metric: LogMetric = None, **_: Any
    ) -> list[float]:
        texts = list(map(self.encode, prompts, completions))
        scores = self.network.scores(texts, self.__name__, log_metric)
        return [float(score) for score in scores]

    def encode(self, prompt: Any, completion: Any) -> list[int]:
        """Tokenize one text. An assistant message that the prompt begins is continued."""
        tokenizer = self.network.tokenizer
        answer = text_of(completion)
        if not getattr(tokenizer, "chat_template", None):
            return list(tokenizer(plain_text(prompt) + answer)["input_ids"])
        is_text = isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}] if is_text else list(prompt)
        if messages and messages[-1]["role"] == "assistant":
            answer = text_of([messages.pop()]) + answer
        messages.append({"role": "assistant", "content": answer})
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


class ProcessRewardModel:
    """Any ``AutoModelForTokenClassification`` in TRL's convention: a number for each step of each
    completion.

    A completion is split at ``separator``. The model reads the prompt, then each step followed by
    ``mark`` (by default the separator), each tokenized by itself; a step's score is that of the
    last token of its mark, which cannot attend to later steps. A conversation is written by the
    chat template, if there is one.
    ``options``: see ``ScoringNetwork``; steps that were truncated away are unscored.
    """

    timeout_s = None

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        separator: str = "\n",
        mark: str = "",
        output: Output = "probability",
        name: str = "process_reward",
        **options: Unpack[NetworkOptions],
    ) -> None:
        step_reward(separator)(self)  # sets ``step_separator``
        self.__name__, self.separator = name, separator
        self.network = ScoringNetwork(model, tokenizer, PROCESS, output, **options)
        self.memory_bytes = self.network.memory_bytes
        self.mark = self._encode(mark or separator)
        if not self.mark:
            raise GruppoError(f"""the tokenizer of {self.network.name} has no token for
                {mark or separator!r}, at which a step is scored. Set mark to another text.""")

    def __call__(
        self, prompts: Column, completions: Column, log_metric: LogMetric = None, **_: Any
    ) -> list[Any]:
        texts = list[list[int]]()
        ends = list[list[int]]()  # the index of each step's last id
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = self._prompt_ids(prompt)
            own_ends = []
            for step, _end in split_steps(text_of(completion), self.separator):
                ids += [*self._encode(step), *self.mark]
                own_ends.append(len(ids) - 1)
            texts.append(ids)
            ends.append(own_ends)
        rows = list[Any]()
        scores = self.network.scores(texts, self.__name__, log_metric)
        for ids, values, own in zip(texts, scores, ends, strict=True):
            lost = len(ids) - len(values)
            # The first id of a truncated text may be its opening token, not the end of a step.
            first = lost + (lost > 0)
            rows.append([float(values[end - lost]) if end >= first else None for end in own])
        return rows

    def _prompt_ids(self, prompt: Any) -> list[int]:
        tokenizer = self.network.tokenizer
        if isinstance(prompt, str) or not getattr(tokenizer, "chat_template", None):
            opening = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            return [*opening, *self._encode(plain_text(prompt))]
        continues = prompt[-1]["role"] == "assistant"
        ids = tokenizer.apply_chat_template(
            prompt,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        return list(ids)

    def _encode(self, text: str) -> list[int]:
        return list(self.network.tokenizer(text, add_special_tokens=False)["input_ids"])


def plain_text(prompt: Any) -> str:
    """Convert a prompt to text; the messages of a conversation each end with a line end."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{text_of([{**message, 'role': 'assistant'}])}\n" for message in prompt)


class ScoringNetwork:
    """A frozen classification model with its tokenizer, from token ids to scores.

    ``label``: index or name of the good label; the last of up to two. ``max_length`` (0: the
    model's limit): longer texts lose their beginning, which is counted as
    ``reward_metric/NAME_truncated_frac``.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any,
        head: str,
        output: Output,
        *,
        label: int | str | None = None,
        max_length: int = 0,
        dtype: Literal["float32", "bfloat16"] = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        self.module: Any = model
        self.name, self.tokenizer = type(model).__name__, tokenizer
        if not isinstance(model, nn.Module):
            self.name = str(model)
            self.module, self.tokenizer = _load(self.name, head, dtype, trust_remote_code)
        elif tokenizer is None:
            raise GruppoError("a reward model that is a module needs its tokenizer; pass both.")
        self.module.requires_grad_(False).eval()
        vocabulary = self.module.get_input_embeddings().weight.shape[0]
        if len(self.tokenizer) > vocabulary:
            raise GruppoError(f"""reward model {self.name} knows {vocabulary} token ids, and its
                tokenizer writes {len(self.tokenizer)}: they do not fit. Use the tokenizer that the
                model was trained with.""")
        config = self.module.config.get_text_config()
        self.head, self.output = head, output
        self.label = _label_index(self.module.config, label, self.name)
        self.memory_bytes = sum(p.numel() * p.element_size() for p in self.module.parameters())
        positions = getattr(config, "max_position_embeddings", None) or NO_LIMIT
        limits = [positions, self.tokenizer.model_max_length, NO_LIMIT]
        self.max_length = max_length or int(min(limit for limit in limits if limit > 0))
        self.pad_id = config.pad_token_id
        # transformers finds the last token of a text by the padding.
        self.batch = 1 if self.pad_id is None and head == OUTCOME else BATCH
        self.device = accelerator()
        self.module.to(self.device)

    def truncate(self, ids: list[int]) -> list[int]:
        """Keep the last ``max_length`` ids of a text, and its opening token if there is one."""
        lost = len(ids) - self.max_length
        if lost <= 0:
            return ids
        if ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id):
            return [ids[0], *ids[lost + 1 :]]
        return ids[lost:]

    @torch.no_grad()
    def scores(
        self, texts: Sequence[list[int]], name: str = "", log_metric: LogMetric = None
    ) -> list[Tensor]:
        """Score of each text [] or of each of its tokens [length], float32 on the CPU.

        Of a single label its logit, else the log-odds of ``label``; or the probability.
        """
        rows = list(map(self.truncate, texts))
        if log_metric is not None:
            lost = sum(len(row) < len(text) for row, text in zip(rows, texts, strict=True))
            log_metric(f"{name}_truncated_frac", lost / len(rows))
        batches = [rows[n : n + self.batch] for n in range(0, len(rows), self.batch)]
        return [self._score(logits) for batch in batches for logits in self._forward(batch)]

    def _score(self, logits: Float[Tensor, "*length labels"]) -> Float[Tensor, "*length"]:
        others = [k for k in range(logits.shape[-1]) if k != self.label]
        odds = logits[..., self.label]
        if others:
            odds = odds - logits[..., others].logsumexp(-1)
        return odds.sigmoid() if self.output == "probability" else odds

    def _forward(self, rows: list[list[int]]) -> list[Tensor]:
        """[labels] or [length, labels] of each row of a batch.

        Padded on the right, whatever the tokenizer does, so that positions are those of a row
        alone.
        """
        tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
        ids = pad_sequence(tokens, batch_first=True, padding_value=self.pad_id or 0)
        mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        ids, mask = ids.to(self.device), mask.to(self.device)
        logits = self.module(input_ids=ids, attention_mask=mask).logits.float().cpu()
        if logits.ndim != (2 if self.head == OUTCOME else 3):
            other, name = _other(self.head)
            raise GruppoError(f"""reward model {self.name} gave logits of shape
                {list(logits.shape)} for {len(rows)} texts, as a ...{other} does. Use a model
                ...{self.head}, or the reward {name}.""")
        if self.head == OUTCOME:
            return list(logits)
        return [x[: len(row)] for x, row in zip(logits, rows, strict=True)]


def accelerator() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def _other(head: str) -> tuple[str, str]:
    """The other kind of model, and the name of its reward."""
    return (PROCESS, "process_reward") if head == OUTCOME else (OUTCOME, "reward_model")


def _label_index(config: Any, label: int | str | None, name: str) -> int:
    """Index of the good label, which has to be named if there are more than two."""
    names = [str(config.id2label[n]) for n in range(config.num_labels)]
    if label is None and len(names) <= 2:
        return len(names) - 1
    known = {**{str(n): n for n in range(len(names))}, **{x: n for n, x in enumerate(names)}}
    if str(label) not in known:
        raise GruppoError(f"""reward model {name} got label={label!r}; it has {", ".join(names)}.
            Set label to the good one's name or number, such as label={len(names) - 1}.""")
    return known[str(label)]


def _load(path: str, head: str, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder or hub id; raise GruppoError for a model without the
    head."""
    import transformers

    folder = Path(path).expanduser()
    path = str(folder) if folder.exists() else path
    try:
        config = transformers.PretrainedConfig.get_config_dict(path)[0]
        check_layers(config, path)
        architecture = (config.get("architectures") or [""])[0]
        other, name = _other(head)
        if architecture.endswith(other):
            raise GruppoError(f"{path!r} is a {architecture}. Write {name}:{path}.")
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
        module, info = getattr(transformers, f"AutoModel{head}").from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except GruppoError:
        raise
    except Exception as error:  # transformers and the file formats raise many kinds
        raise GruppoError(f"""reward model {path!r} could not be loaded:
            {transformers_error(error, "model")} Use a folder with the model and its tokenizer, or a
            hub id that this machine can reach or has cached.""") from error
    if missing := sorted(info["missing_keys"]):
        raise GruppoError(f"""{path!r} holds a {architecture or "model"} and lacks {missing[0]},
            which a {type(module).__name__} has: it would score with random weights. Use a model
            that was trained to score, with its head.""")
    return module, tokenizer
