"""One ragged batch with designed ratios, and its loss and gradient by gruppo's own path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from tests.fakes import bpe_tokenizer, doubled, of
from torch import Tensor

from gruppo.core.loss import LossInputs, policy_loss
from gruppo.core.objective import Objective
from gruppo.core.weights import loss_total, loss_weights
from gruppo.types import Likelihood, MicroBatch, Prompt, Rollouts

MAX_LENGTH = 8
"""The longest completion allowed; the longest row has 7 tokens."""
END = bpe_tokenizer().eos_token_id
PROMPT_IDS = [[70, 8, 41], [12, 99, 3, 3, 200, 57]]
COMPLETIONS = [
    [5, 81, 17, 240, END],
    [33, 34, END],
    [9, 120, 6, 77, 18, 2, END],
    [64],
    [150, 11, 92, END],
    [21, 22, 23, 101, 8, 13],
]
"""Two groups of three. Rows 3 and 5 do not end: they were cut."""
GROUPS = [0, 0, 0, 1, 1, 1]
LENGTHS = [len(ids) for ids in COMPLETIONS]
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
TOOLS = torch.zeros_like(MASK).index_put(
    (torch.tensor([0, 2, 2, 5]), torch.tensor([1, 2, 3, 4])), torch.tensor(True)
)
ENDED = torch.tensor([ids[-1] == END for ids in COMPLETIONS])
ADVANTAGES = torch.tensor([1.2, -0.7, 0.5, -1.1, 0.8, -0.3], dtype=torch.float64)
ROW_LOG_RATIOS = torch.tensor([0.5, -0.45, 2e-4, 0.4, -0.5, -1e-4], dtype=torch.float64)
"""Mean log-ratio of each row: above, below and inside the clip range, under advantages of both
signs."""


def _noise(scale: float, seed: int) -> Tensor:
    draws = torch.randn(
        MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.where(MASK, scale * draws, 0)


def _log_ratios() -> Tensor:
    noise = _noise(0.3, seed=0)
    noise = noise - noise.sum(dim=1, keepdim=True) / MASK.sum(dim=1, keepdim=True)
    return torch.where(MASK, noise + ROW_LOG_RATIOS[:, None], 0)


LOG_RATIOS = _log_ratios()
REF_GAP = _noise(0.5, seed=1)
"""Reference's log-probs less the policy's."""
SAMPLER_GAP = _noise(0.6, seed=2)
"""Old log-probs less the sampler's, as the trainer recomputed them."""


@dataclass(frozen=True, eq=False)
class Result:
    """A loss and its gradient by the parameter's name."""

    loss: float
    gradient: Mapping[str, Tensor]

    def distance(self, other: Result) -> tuple[float, float]:
        """Absolute difference of the losses, relative norm of the difference of the gradients."""
        assert self.gradient.keys() == other.gradient.keys()
        both = [
            (self.gradient[name].double(), other.gradient[name].double())
            for name in sorted(self.gradient)
        ]
        apart = torch.stack([(a - b).norm() for a, b in both]).norm()
        size = torch.stack([b.norm() for _, b in both]).norm()
        return abs(self.loss - other.loss), float(apart / size)


def result_of(loss: Tensor, module: torch.nn.Module) -> Result:
    loss.backward()
    return Result(
        float(loss.detach()), {name: p.grad.cpu().clone() for name, p in module.named_parameters()}
    )


# --- gruppo ---------------------------------------------------------------------------------------


def rollouts(temperature: float = 1.0, mask: Tensor = MASK) -> Rollouts:
    rows, columns = mask.shape
    actions = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in COMPLETIONS], batch_first=True
    )
    return Rollouts(
        prompts=tuple(Prompt(f"p{n}", "", draw=n) for n in range(2)),
        group_ids=torch.tensor(GROUPS),
        actions=actions,
        mask=mask,
        lengths=torch.tensor(LENGTHS),
        completions=("",) * rows,
        sampler_logprobs=torch.zeros(rows, columns),
        policy_version=torch.zeros(rows, columns, dtype=torch.long),
        temperature=torch.full((rows,), temperature),
        finish=tuple("stop" if ended else "length" for ended in ENDED.tolist()),
        shared={"prompt_ids": tuple(torch.tensor(ids) for ids in PROMPT_IDS)},
        per_row={
            "top_k": torch.zeros(rows, dtype=torch.long),
            "top_p": torch.ones(rows, dtype=torch.float64),
        },
    )


WEIGHTS = {"initializer_range": 0.05}
"""Small ones: both sides round in float32, and large ones make 2e-6 of it."""
PIECE = MicroBatch(torch.arange(len(LENGTHS)), slice(0, max(LENGTHS)))


@cache
def current(temperature: float = 1.0) -> Tensor:
    """Log-probs of the weights that both sides hold, in float64."""
    with torch.no_grad():
        return (
            doubled(of("Llama", **WEIGHTS)).likelihood(rollouts(temperature), PIECE).logprobs.cpu()
        )


@dataclass(frozen=True, eq=False)
class Case:
    """What the loss is computed from beside the weights."""

    advantages: Tensor = ADVANTAGES
    log_ratios: Tensor = LOG_RATIOS
    temperature: float = 1.0
    between_turns: bool = False
    """Some tokens in the middle of rows are a tool's."""

    @property
    def mask(self) -> Tensor:
        return MASK & ~TOOLS if self.between_turns else MASK

    @property
    def tools_mask(self) -> Tensor | None:
        return self.mask if self.between_turns else None

    @property
    def old(self) -> Tensor:
        return current(self.temperature) - self.log_ratios

    @property
    def ref(self) -> Tensor:
        return current(self.temperature) + REF_GAP

    @property
    def compute_module(self) -> Tensor:
        """Rounded to float32, in which engines report them."""
        return (self.old - SAMPLER_GAP).float().double()


def gruppo_loss(
    objective: Objective,
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Result:
    """The policy's own likelihood, loss weights and policy loss, in one piece."""
    policy = of("Llama", **WEIGHTS) if dtype == torch.float32 else doubled(of("Llama", **WEIGHTS))
    loss_mask = case.mask & ENDED[:, None] if objective.mask_truncated else case.mask
    total = loss_total(loss_mask, average=objective.average, max_length=MAX_LENGTH)
    here = {"device": policy.device, "dtype": dtype}
    inputs = LossInputs(
        advantages=torch.where(loss_mask, case.advantages[:, None], 0).to(**here),
        loss_mask=loss_mask.to(policy.device),
        weights=loss_weights(loss_mask, average=objective.average, total=total).to(policy.device),
        old_logprobs=case.old.to(**here),
        ref=Likelihood(case.ref.to(**here)) if kl_coef else None,
        sampler_logprobs=case.compute_module.to(**here),
    )
    outputs = ("entropy",) if entropy_coef else ()
    likelihood = policy.likelihood(rollouts(case.temperature, case.mask), PIECE, outputs=outputs)
    terms, _ = policy_loss(likelihood, inputs, objective)
    loss = terms["policy"]
    if kl_coef:
        loss = loss + kl_coef * terms["kl"]
    if entropy_coef:
        loss = loss - entropy_coef * terms["entropy"]
    return result_of(loss, policy.module)
