"""The batch through TRL's own trainers: only the sampling is replaced, by the batch's rows.

Tests that import this module are skipped where TRL is missing or another version.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from tests.fakes import Float64, bpe_tokenizer, causal_lm
from tests.parity.batch import (
    COMPLETIONS,
    GROUPS,
    MAX_LENGTH,
    PROMPT_IDS,
    WEIGHTS,
    Case,
    Result,
    result_of,
)
from torch import Tensor

VERSION = "1.16.0"
trl = pytest.importorskip(
    "trl", reason=f"TRL is not installed; `make test` installs trl=={VERSION}"
)
if trl.__version__ != VERSION:
    pytest.skip(f"parity is with TRL {VERSION}; this is {trl.__version__}", allow_module_level=True)

Rewards = Sequence[Sequence[float | None]]
"""[function][row]"""
NO_REWARDS: Rewards = [[0.0] * len(GROUPS)]


@cache
def folder() -> str:
    """TRL makes its reference by loading the policy's folder once more."""
    name = tempfile.mkdtemp(prefix="gruppo-parity-")
    atexit.register(shutil.rmtree, name, ignore_errors=True)
    causal_lm("Llama", **WEIGHTS).save_pretrained(name)
    return name


def trainer_of(
    kind: str, rewards: Rewards = NO_REWARDS, *, micro_batches: int = 1, **config: Any
) -> Any:
    """A real trainer ("GRPO" or "RLOO") over a tiny Llama, in training mode; one update is the
    whole batch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    rows = len(GROUPS)
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(),
    ):  # deprecations of others; the trainer seeds everything
        warnings.simplefilter("ignore")
        trainer = getattr(trl, f"{kind}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32),
            reward_funcs=[
                lambda completions, values=values, **_: list(values) for values in rewards
            ],
            args=getattr(trl, f"{kind}Config")(
                output_dir=folder(),
                per_device_train_batch_size=rows // micro_batches,
                gradient_accumulation_steps=micro_batches,
                num_generations=GROUPS.count(0),
                max_completion_length=MAX_LENGTH,
                use_cpu=True,
                bf16=False,
                report_to=[],
                gradient_checkpointing=False,
                **config,
            ),
            train_dataset=Dataset.from_list([{"prompt": ""}] * rows),
            processing_class=bpe_tokenizer(),
        )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = micro_batches
    return trainer


def scored(
    trainer: Any, *, compute_module: Tensor | None = None, tools_mask: Tensor | None = None
) -> dict[str, Tensor]:
    """TRL's own scoring of the batch's rows: masks, advantages, and the correction of what an
    engine reported."""
    prompts = [PROMPT_IDS[group] for group in GROUPS]
    rows = None if compute_module is None else ragged(compute_module)
    tools = None if tools_mask is None else ragged(tools_mask.long())
    texts = [""] * len(GROUPS)
    grpo = (prompts, COMPLETIONS, tools, texts, rows, {}, None, [])
    trainer._generate = lambda _: (
        grpo if "GRPO" in type(trainer).__name__ else (prompts, COMPLETIONS, texts)
    )
    return trainer._generate_and_score_completions([{"prompt": ""} for _ in GROUPS])


def ragged(x: Tensor) -> list[list[float]]:
    return [row[: len(ids)].tolist() for row, ids in zip(x, COMPLETIONS, strict=True)]


def trl_loss(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    engine: bool = False,
    micro_batches: int = 1,
    **config: Any,
) -> Result:
    """``GRPOTrainer._compute_loss``. ``engine``: the rows came from an engine whose log-probs are
    the sampler's."""
    trainer = trainer_of("GRPO", micro_batches=micro_batches, **config)
    with throughout(dtype):
        _to(trainer, dtype)
        batch = (
            scored_by_engine(trainer, case, dtype)
            if engine
            else scored(trainer, tools_mask=case.tools_mask)
        )
        batch |= {
            "advantages": case.advantages.to(dtype),
            "old_per_token_logps": case.old.to(dtype),
        }
        batch |= {"ref_per_token_logps": case.ref.to(dtype)}
        parts = split(batch, micro_batches)
        return result_of(
            sum(trainer._compute_loss(trainer.model, part) for part in parts), trainer.model
        )


def split(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Rows in equal shares; what has no rows, such as the number of tokens, in each."""
    rows = torch.arange(len(GROUPS)).chunk(parts)
    return [{name: x[share] if x.dim() else x for name, x in batch.items()} for share in rows]


@contextmanager
def throughout(dtype: torch.dtype) -> Iterator[None]:
    """In float64, what asks for float32 by name gets float64: TRL's head, norms, rotary angles.

    Autograd leaves the mode behind, so the backward of TRL's head enters it again.
    """
    if dtype != torch.float64:
        yield
        return
    head = trl.kernels.ChunkedLogProbFunction
    backward = head.backward

    def wide(*args: Any) -> Any:
        with Float64():
            return backward(*args)

    with pytest.MonkeyPatch.context() as patch, Float64():
        patch.setattr(head, "backward", staticmethod(wide))
        yield


def scored_by_engine(trainer: Any, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """As if vLLM had sampled: the weights of that time are known by their log-probs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "use_vllm", True)
        patch.setattr(
            trainer,
            "_get_per_token_logps_and_entropies",
            lambda *_, **__: (case.old.to(dtype), None, None),
        )
        batch = scored(
            trainer, compute_module=case.compute_module.to(dtype), tools_mask=case.tools_mask
        )
    trainer.use_vllm = True
    return batch


def rloo_loss(case: Case, dtype: torch.dtype) -> Result:
    """``RLOOTrainer._compute_loss`` on rows that the current weights drew."""
    trainer = trainer_of("RLOO")
    with throughout(dtype):
        _to(trainer, dtype)
        batch = scored(trainer) | {"advantages": case.advantages.to(dtype)}
        return result_of(trainer._compute_loss(trainer.model, batch), trainer.model)


def _to(trainer: Any, dtype: torch.dtype) -> None:
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            model.to(dtype)
