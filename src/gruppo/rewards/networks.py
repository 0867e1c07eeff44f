"""Classification models as scorers: loading, refusals, and forwards in batches by length."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gruppo.loading import why_not_opened
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

Kind = Literal["ForSequenceClassification", "ForTokenClassification"]
SPEC = {"ForSequenceClassification": "reward_model", "ForTokenClassification": "process_reward"}
"""How a model of each kind is named in a config."""
LONGEST = 1 << 20
"""A tokenizer that states no limit states an astronomical one."""


@dataclass(frozen=True)
class Ids:
    """One text for a model."""

    ids: list[int]
    is_cut: bool
    """Whether its beginning was left out, being too long."""


class Network:
    """A frozen model with a tokenizer of its own, from ids to logits.

    ``offload``: the weights rest on the CPU and come to the accelerator for the time of a call.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any,
        kind: Kind,
        *,
        batch_tokens: int,
        max_length: int,
        device: str,
        offload: bool,
        dtype: str,
        trust_remote_code: bool,
    ) -> None:
        for name, value, lowest in (("batch_tokens", batch_tokens, 1), ("max_length", max_length, 0)):
            if not isinstance(value, int) or value < lowest:
                raise GruppoError(f"{name}={value!r} is not a whole number of at least {lowest}. Leave it out.")
        self.device = device_of(device)
        if isinstance(model, nn.Module):
            if tokenizer is None:
                raise GruppoError("a reward model that is given as a module needs its tokenizer; give both.")
            self.name, self.module, self.tokenizer = type(model).__name__, model, tokenizer
        else:
            self.name = str(model)
            self.module, self.tokenizer = loaded(str(model), kind, dtype, trust_remote_code)
        self.module.requires_grad_(False).eval()
        check_vocabulary(self.name, self.module, self.tokenizer)
        self.batch_tokens = batch_tokens
        self.max_length = max_length or longest_of(self.module, self.tokenizer)
        self.work = accelerator() if offload else self.device
        if offload and self.work.type == "cpu":
            log.info("reward model %s: offload=True changes nothing, there is no accelerator here.", self.name)
        self.device = torch.device("cpu") if offload else self.device
        self.module.to(self.device)

    @property
    def labels(self) -> int:
        return int(getattr(self.module.config, "num_labels", 1))

    @property
    def memory_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    def fitted(self, ids: Sequence[int]) -> Ids:
        """The ids, as many as the model reads: of more, the end, behind the first where that opens every text."""
        ids = list(ids)
        if len(ids) <= self.max_length:
            return Ids(ids, is_cut=False)
        opens = ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id)
        head = ids[:1] if opens and self.max_length > 1 else []
        return Ids([*head, *ids[len(ids) - self.max_length + len(head) :]], is_cut=True)

    @torch.no_grad()
    def logits(self, rows: Sequence[list[int]]) -> list[Tensor]:
        """Of each row, [labels] or [its length, labels]; float32 on the CPU."""
        said: dict[int, Tensor] = {}
        with self._at_work():
            for batch in by_length([len(ids) for ids in rows], self.batch_tokens):
                for n, logits in zip(batch, self._in_memory([rows[n] for n in batch]), strict=True):
                    said[n] = logits
        return [said[n] for n in range(len(rows))]

    def _in_memory(self, rows: list[list[int]]) -> list[Tensor]:
        """One batch, in halves where memory runs out."""
        try:
            return self._forward(rows)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        self.batch_tokens = max(self.batch_tokens // 2, 1)
        log.warning("reward model %s: out of memory; batches of %d tokens from now on.", self.name, self.batch_tokens)
        half = len(rows) // 2
        return self._in_memory(rows[:half]) + self._in_memory(rows[half:])

    def _forward(self, rows: list[list[int]]) -> list[Tensor]:
        """Padded on the right whatever the tokenizer says, so that positions are those of a row alone."""
        lengths = torch.tensor([len(ids) for ids in rows])
        pad, is_own = self._padding(rows)
        ids = torch.full((len(rows), int(lengths.max())), pad)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        with read_as_padding(self.module, None if is_own else pad):
            said = self.module(input_ids=ids.to(self.work), attention_mask=mask.to(self.work)).logits
        if said.shape[0] != len(rows):
            raise GruppoError(f"reward model {self.name}: {len(rows)} texts gave logits of shape {list(said.shape)}.")
        said = said.float().cpu()
        return [x if said.ndim == 2 else x[:length] for x, length in zip(said, lengths.tolist(), strict=True)]

    def _padding(self, rows: list[list[int]]) -> tuple[int, bool]:
        """The model's padding; without one, an id that no row holds: transformers finds the last token by it."""
        own = _text_config(self.module).pad_token_id
        if own is not None:
            return own, True
        used = {i for row in rows for i in row}
        return next(i for i in range(len(used) + 1) if i not in used), False

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if self.work == self.device:
            yield
            return
        try:
            self.module.to(self.work)
            yield
        finally:
            self.module.to(self.device)
            if self.work.type == "cuda":
                torch.cuda.empty_cache()


def by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of like length together, at most ``budget`` tokens a batch, padding included; a longer row is alone."""
    batches: list[list[int]] = []
    for n in sorted(range(len(lengths)), key=lambda n: (lengths[n], n)):
        if batches and (len(batches[-1]) + 1) * lengths[n] <= budget:
            batches[-1].append(n)
        else:
            batches.append([n])
    return batches


@contextmanager
def read_as_padding(module: Any, pad: int | None) -> Iterator[None]:
    """The model takes ``pad`` for padding meanwhile; None: whatever it takes for it anyway."""
    config = _text_config(module)
    own = config.pad_token_id
    config.pad_token_id = own if pad is None else pad
    try:
        yield
    finally:
        config.pad_token_id = own


def _text_config(module: Any) -> Any:
    return module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config


# --- loading and refusing --------------------------------------------------------------------------------------------


def loaded(path: str, kind: Kind, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Module and tokenizer of a folder or a hub id. A model of another kind, or without a head, is refused."""
    import transformers
    from transformers.utils import logging as hf_logging

    if dtype not in ("float32", "bfloat16"):
        raise GruppoError(f"dtype={dtype!r} is neither float32 nor bfloat16. Set dtype=float32.")
    folder = Path(path).expanduser()
    if folder.exists() or path.startswith((".", "/", "~")):
        if not (folder / "config.json").is_file():
            what = "has no config.json" if folder.exists() else "does not exist"
            raise GruppoError(f"the reward model's folder {path!r} {what}. Give one that save_pretrained wrote.")
        path = str(folder)
    hf_logging.disable_progress_bar()
    loudness = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # what is missing is said below, in one sentence
    own: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    what = "config"
    try:
        architectures = transformers.AutoConfig.from_pretrained(path, **own).architectures or [""]
        check_kind(path, kind, architectures[0])
        what = "tokenizer"
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **own)
        what = "model"
        opener = getattr(transformers, f"AutoModel{kind}")
        own |= {"dtype": getattr(torch, dtype), "use_safetensors": True, "output_loading_info": True}
        module, lost = opener.from_pretrained(path, **own)
    except GruppoError:
        raise
    except Exception as error:  # whatever transformers and the formats raise for files that they cannot read
        raise GruppoError(
            f"reward model {path!r} could not be loaded: {why_not_opened(error, what)} Give a folder with the "
            "model and its tokenizer, or a hub id that this machine can reach or has cached."
        ) from error
    finally:
        hf_logging.set_verbosity(loudness)
    if missing := sorted(lost["missing_keys"]):
        raise GruppoError(
            f"{path!r} holds a {architectures[0] or 'model'} and lacks {missing[0]}, which a {type(module).__name__} "
            "has: it would score with random weights. Give a model that was trained to score, with its head."
        )
    return module, tokenizer


def check_kind(path: str, kind: Kind, architecture: str) -> None:
    for other, spec in SPEC.items():
        if other != kind and architecture.endswith(other):
            what = "each token" if other == "ForTokenClassification" else "whole texts"
            raise GruppoError(
                f"{path!r} is a {architecture}, which scores {what}; {SPEC[kind]} needs a ...{kind}. Write "
                f"{spec}:{path}."
            )


def check_vocabulary(name: str, module: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer that is not the model's, where it can be told."""
    known = module.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > known:
        raise GruppoError(
            f"reward model {name} knows {known} token ids, and its tokenizer writes {len(tokenizer)}: they are not of "
            "one model. Give the tokenizer that the model was trained with."
        )


def longest_of(module: Any, tokenizer: Any) -> int:
    """Tokens that the model reads at most."""
    stated = (getattr(_text_config(module), "max_position_embeddings", None), tokenizer.model_max_length)
    return min((int(n) for n in stated if n and 0 < n < LONGEST), default=LONGEST)


def accelerator() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def device_of(name: str) -> torch.device:
    """Where the weights rest: the accelerator where there is one, or what is asked for."""
    if not name:
        return accelerator()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise GruppoError(
            f"device={name!r} is not there: {reason.rstrip('.')}. Set device=cpu, or leave it out."
        ) from None
    return device
