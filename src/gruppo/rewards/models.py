"""Reward models: classifiers of whole texts (outcome) and of the steps of a text (process).

Both are reward functions in TRL's calling convention. The completion is read as text by the model's
own tokenizer, independent of the policy's.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
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

log = logging.getLogger("gruppo")

Output = Literal["logit", "probability"]
Column = Sequence[Any]  # an entry for each row
Head = Literal["ForSequenceClassification", "ForTokenClassification"]
KINDS = {
    "ForSequenceClassification": ("reward_model", "whole texts"),
    "ForTokenClassification": ("process_reward", "each token"),
}
"""Name of the reward for each kind of model, and what it scores."""
SUMMARIES: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "min": min,
    "last": lambda scores: scores[-1],
    "product": math.prod,
}
NO_LIMIT = 1 << 20  # a tokenizer without a maximum length states an astronomical one


class NetworkOptions(TypedDict, total=False):
    """Options of a classifier; see ``ScoringNetwork``."""

    label: int | str
    batch: int
    max_length: int
    device: str
    offload: bool
    dtype: Literal["float32", "bfloat16"]
    trust_remote_code: bool


class RewardModel:
    """Any ``AutoModelForSequenceClassification``: one number per completion.

    One label: its logit. Two or more: the log-odds of ``label`` against the others, or with
    ``output="probability"`` its probability (the sigmoid of a single logit). If its tokenizer has a
    chat template, the model reads a conversation, with a plain prompt as the user's message;
    otherwise prompt and completion as one text, the messages of a conversation joined by line ends.
    ``chat`` overrides this. ``options``: see ``ScoringNetwork``.
    """

    # a forward pass is waited for: a retry after a deadline would start a second one beside it
    timeout_s = None

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        output: Output = "logit",
        chat: bool | None = None,
        name: str = "reward_model",
        **options: Unpack[NetworkOptions],
    ) -> None:
        self.__name__ = name
        head: Head = "ForSequenceClassification"
        self.network = ScoringNetwork(model, tokenizer, head, output, **options)
        self.memory_bytes = self.network.memory_bytes
        has_template = bool(getattr(self.network.tokenizer, "chat_template", None))
        if chat and not has_template:
            problem = f"chat=True, but the tokenizer of {self.network.name} has no chat template"
            raise GruppoError(f"{problem}. Omit chat.")
        self.uses_chat = has_template if chat is None else chat

    def __call__(
        self, prompts: Column, completions: Column, log_metric: LogMetric = None, **_: Any
    ) -> list[float]:
        texts = list(map(self.encode, prompts, completions))
        texts = self.network.truncate(texts, self.__name__, log_metric)
        return [float(score) for score in self.network.scores(texts)]

    def encode(self, prompt: Any, completion: Any) -> list[int]:
        """Tokenize one text. An assistant message that the prompt begins is continued."""
        tokenizer, answer = self.network.tokenizer, text_of(completion)
        if not self.uses_chat:
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

    ``score="steps"`` gives each step its score; "mean", "min", "last" or "product" one number of
    them, an outcome. ``options``: see ``ScoringNetwork``; steps that were truncated away are
    unscored.
    """

    timeout_s = None
    step_separator: str | None = None  # as ``step_reward`` sets it

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        separator: str = "\n",
        mark: str = "",
        score: Literal["steps", "mean", "min", "last", "product"] = "steps",
        output: Output = "probability",
        name: str = "process_reward",
        **options: Unpack[NetworkOptions],
    ) -> None:
        step_reward(separator)(self)  # refuses a separator that splits nothing
        if score != "steps":
            self.step_separator = None
        self.__name__, self.separator, self.score = name, separator, score
        self.network = ScoringNetwork(model, tokenizer, "ForTokenClassification", output, **options)
        self.memory_bytes = self.network.memory_bytes
        self.mark = self._encode(mark or separator)
        if not self.mark:
            problem = f"the tokenizer of {self.network.name} has no token for {mark or separator!r}"
            raise GruppoError(
                f"{problem}, at which a step is scored. Set mark to a text that it knows."
            )

    def __call__(
        self, prompts: Column, completions: Column, log_metric: LogMetric = None, **_: Any
    ) -> list[Any]:
        texts, ends = list[list[int]](), list[list[int]]()  # and the index of each step's last id
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = self._prompt_ids(prompt)
            own_ends = []
            for step, _end in split_steps(text_of(completion), self.separator):
                ids += [*self._encode(step), *self.mark]
                own_ends.append(len(ids) - 1)
            texts.append(ids)
            ends.append(own_ends)
        truncated = self.network.truncate(texts, self.__name__, log_metric)
        scores = []
        for n, values in enumerate(self.network.scores(truncated)):
            scores.append(_at_ends(values.tolist(), ends[n], len(texts[n])))
        if self.score == "steps":
            return scores
        known = [[score for score in row if score is not None] for row in scores]
        return [SUMMARIES[self.score](row) if row else None for row in known]

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


def _at_ends(values: list[float], ends: Sequence[int], length: int) -> list[float | None]:
    """Scores of the steps of a text that had ``length`` ids; None for those that were truncated
    away."""
    lost = length - len(values)
    # The first id of a truncated text may be its opening token, which is not the end of a step.
    first = lost + (lost > 0)
    return [values[end - lost] if end >= first else None for end in ends]


def plain_text(prompt: Any) -> str:
    """Convert a prompt to text; the messages of a conversation each end with a line end."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{text_of([{**message, 'role': 'assistant'}])}\n" for message in prompt)


class ScoringNetwork:
    """A frozen classification model with its tokenizer, from token ids to logits and scores.

    ``label``: index or name of the good label; the last of up to two. ``batch``: texts of a forward
    pass. ``max_length`` (0: the model's limit): longer texts lose their beginning, which is counted
    as ``reward_metric/NAME_truncated_frac`` and logged once. ``device``: by default the
    accelerator, if there is one. ``offload``: the weights are kept on the CPU between calls.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any,
        head: Head,
        output: Output,
        *,
        label: int | str | None = None,
        batch: int = 16,
        max_length: int = 0,
        device: str = "",
        offload: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        if batch < 1 or max_length < 0:
            problem = f"batch={batch}, max_length={max_length} score no text"
            raise GruppoError(f"{problem}; batch is at least 1, max_length at least 0. Omit both.")
        self.work_device = _available(device) if device else accelerator()
        self.device = torch.device("cpu") if offload else self.work_device
        self.module: Any
        if isinstance(model, nn.Module):
            if tokenizer is None:
                raise GruppoError("a reward model that is a module needs its tokenizer; pass both.")
            self.name, self.module, self.tokenizer = type(model).__name__, model, tokenizer
        else:
            self.name = str(model)
            self.module, self.tokenizer = _load(str(model), head, dtype, trust_remote_code)
        self.module.requires_grad_(False).eval()
        vocabulary = self.module.get_input_embeddings().weight.shape[0]
        if len(self.tokenizer) > vocabulary:
            raise GruppoError(f"""reward model {self.name} knows {vocabulary} token ids, and its
                tokenizer writes {len(self.tokenizer)}: they do not fit. Use the tokenizer that the
                model was trained with.""")
        config = self.module.config
        self._config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.head, self.output, self.batch = head, output, batch
        self.label = _label_index(config, label, self.name)
        self.memory_bytes = sum(p.numel() * p.element_size() for p in self.module.parameters())
        positions = getattr(self._config, "max_position_embeddings", None)
        self.max_length = max_length or _shortest(positions, self.tokenizer.model_max_length)
        self._has_warned = False
        self.module.to(self.device)

    def truncate(
        self, texts: Sequence[list[int]], name: str, log_metric: LogMetric = None
    ) -> list[list[int]]:
        """Keep the last ``max_length`` ids of each text, and its opening token if there is one."""
        result, count = list(texts), 0
        for n, ids in enumerate(texts):
            if len(ids) > self.max_length:
                opens = ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id)
                opening = ids[:1] if opens and self.max_length > 1 else []
                result[n] = [*opening, *ids[len(ids) - self.max_length + len(opening) :]]
                count += 1
        if log_metric is not None:
            log_metric(f"{name}_truncated_frac", count / len(texts))
        if count and not self._has_warned:
            self._has_warned = True
            log.warning(
                "reward %s: %d of %d texts are longer than the %d tokens that the model reads; it "
                "reads their ends. "
                "reward_metric/%s_truncated_frac counts them from now on.",
                *(name, count, len(texts), self.max_length, name),
            )
        return result

    @torch.no_grad()
    def scores(self, rows: Sequence[list[int]]) -> list[Tensor]:
        """Score of each text [] or of each of its tokens [length], float32 on the CPU.

        Of a single label its logit, else the log-odds of ``label``; or the probability.
        """
        order = sorted(
            range(len(rows)), key=lambda n: len(rows[n])
        )  # similar lengths share a batch
        scores: dict[int, Tensor] = {}
        try:
            if self.work_device != self.device:
                self.module.to(self.work_device)
            for start in range(0, len(order), self.batch):
                batch = order[start : start + self.batch]
                logits = self._forward([rows[n] for n in batch])
                scores |= dict(zip(batch, map(self._score, logits), strict=True))
        finally:
            if self.work_device != self.device:
                self.module.to(self.device)
        return [scores[n] for n in range(len(rows))]

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
        config = self._config
        own_pad = config.pad_token_id
        used = {i for row in rows for i in row}
        # transformers finds the last token by the padding: without a token of its own, use one that
        # no row holds
        unused = next(i for i in range(len(used) + 1) if i not in used)
        pad = unused if own_pad is None else own_pad
        tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
        ids = pad_sequence(tokens, batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        try:
            config.pad_token_id = pad
            output = self.module(
                input_ids=ids.to(self.work_device), attention_mask=mask.to(self.work_device)
            ).logits
        finally:
            config.pad_token_id = own_pad
        is_outcome = self.head == "ForSequenceClassification"
        if output.shape[0] != len(rows) or output.ndim != (2 if is_outcome else 3):
            raise GruppoError(f"""reward model {self.name} gave logits of shape {list(output.shape)}
                for {len(rows)} texts; it needs
                {"one number" if is_outcome else "numbers for each token"} per label. Use a model
                ...{self.head}, or the reward
                {"process_reward" if is_outcome else "reward_model"}.""")
        logits = output.float().cpu()
        return [x if is_outcome else x[: len(row)] for x, row in zip(logits, rows, strict=True)]


def accelerator() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def _shortest(*limits: int | None) -> int:
    return min((int(n) for n in limits if n and 0 < n < NO_LIMIT), default=NO_LIMIT)


def _available(device: str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        problem = f"device={device!r} is not available: {reason}"
        raise GruppoError(f"{problem}. Set device=cpu, or omit it.") from None
    return found


def _label_index(config: Any, label: int | str | None, name: str) -> int:
    """Index of the good label: that of more than two has to be named."""
    count = int(getattr(config, "num_labels", 1))
    if label is None and count <= 2:
        return count - 1
    names = {str(k): int(n) for n, k in (getattr(config, "id2label", None) or {}).items()}
    index = ({str(n): n for n in range(count)} | names).get(str(label))
    if index is None:
        raise GruppoError(f"""reward model {name} got label={label!r}; it has
            {", ".join(names) or f"0 to {count - 1}"}. Set label to the good one's name or number,
            such as label={count - 1}.""")
    return index


def _load(path: str, head: Head, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder or hub id; raise GruppoError for a model without the
    head."""
    import transformers
    from transformers.utils import logging as hf_logging

    folder = Path(path).expanduser()
    path = str(folder) if folder.exists() else path
    hf_logging.disable_progress_bar()
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # missing weights are reported below, in one sentence
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    what = "config"
    try:
        check_layers(transformers.PretrainedConfig.get_config_dict(path)[0], path)
        config = transformers.AutoConfig.from_pretrained(path, **options)
        architecture = (config.architectures or [""])[0]
        for other, (spec, unit) in KINDS.items():
            if other != head and architecture.endswith(other):
                problem = (
                    f"{path!r} is a {architecture}, which scores {unit}; {KINDS[head][0]} "
                    f"needs a ...{head}."
                )
                raise GruppoError(f"{problem} Write {spec}:{path}.")
        what = "tokenizer"
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
        what = "model"
        module, info = getattr(transformers, f"AutoModel{head}").from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except GruppoError:
        raise
    except Exception as error:  # transformers and the file formats raise many kinds
        raise GruppoError(f"""reward model {path!r} could not be loaded:
            {transformers_error(error, what)} Use a folder with the model and its tokenizer, or a
            hub id that this machine can reach or has cached.""") from error
    finally:
        hf_logging.set_verbosity(verbosity)
    if missing := sorted(info["missing_keys"]):
        raise GruppoError(f"""{path!r} holds a {architecture or "model"} and lacks {missing[0]},
            which a {type(module).__name__} has: it would score with random weights. Use a model
            that was trained to score, with its head.""")
    return module, tokenizer
