"""One tree of frozen dataclasses: all that a run can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gruppo.core.objective import Objective
from gruppo.core.schedules import Decay
from gruppo.types import Sampling

IN_MEMORY = "<in memory>"
"""Written in place of a Python object that has no name to load it by."""


@dataclass(frozen=True)
class Rollout:
    """What is sampled each step."""

    prompts: int = 8
    """Prompts a step, over all ranks."""
    group_size: int = 8
    """Samples of each prompt."""
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    """1 keeps every token."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, beside the end tokens."""
    refill_rounds: int = 0
    """Further rounds of generation a step that may replace groups without spread (DAPO's dynamic sampling)."""
    refill_by: str = ""
    """Name of the reward whose spread decides; without it, or where it scores no row, the sum before shaping."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens, self.stop)


@dataclass(frozen=True)
class Optim:
    """AdamW, and how a batch is cut into updates."""

    lr: float = 1e-6
    warmup_steps: int = 0
    decay: Decay = "constant"
    final_lr_frac: float = 0.0
    """Where the decay ends, as a fraction of lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    epochs: int = 1
    """Passes over each batch."""
    stop_kl: float = 0.0
    """Epochs of a batch end when the mean KL to the old policy, in nats a token, exceeds this; 0 never."""
    minibatches: int = 1
    """Updates a pass."""
    token_budget: int = 0
    """Tokens one forward and backward may cover, padding included; 0 chooses 640 on a CPU and 16384 on a GPU, or four
    times the longest prompt, or fewer where memory is short. Halved where it runs out. Changes memory and speed, never
    the gradient."""


@dataclass(frozen=True)
class Stage:
    """Coefficients of the loss terms."""

    kl_coef: float = 0.0
    """The papers' beta. Above 0 a frozen copy of the first weights is kept as the reference."""
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    """Of the critic's loss."""


@dataclass(frozen=True)
class Critic:
    """What predicts the return before each action. Used where objective.baseline is critic, and nowhere else."""

    kind: Literal["shared", "separate"] = "shared"
    """A head on the policy's own network, or a network of its own: twice the memory, no pull on the policy."""
    model: str = ""
    """The separate network: a hub id, a folder (a reward model too) or a bundled model; without it, a copy of the
    policy."""
    lr: float | None = None
    """Peak learning rate, on the policy's schedule; without it, the policy's."""
    warmup_steps: int = 0
    """First steps, in which the critic learns alone."""


@dataclass(frozen=True)
class Scoring:
    """How reward functions are called."""

    weights: tuple[float, ...] | None = None
    """One for each reward; all 1 without."""
    timeout_s: float | None = 60.0
    """A call that takes longer leaves its rows unscored; None waits for ever."""


@dataclass(frozen=True)
class Prompts:
    """How the data is read."""

    column: str = "prompt"
    target_column: str | None = None
    """Without it, the first of answer, target, solution, label that is there."""
    held_out_fraction: float = 0.1
    """Share of the prompts, by hash, that are kept for evaluation and never trained on."""


@dataclass(frozen=True)
class Evaluation:
    """Greedy answers to held-out prompts, before and after training."""

    prompts: int = 256
    """0 evaluates nothing."""
    every: int = 0
    """Steps between further evaluations; 0 for none."""


@dataclass(frozen=True)
class Saving:
    every: int = 50
    """Steps between checkpoints; one is written at the end and at a stop in any case."""
    keep: int = 2
    """Checkpoints kept."""


@dataclass(frozen=True)
class Config:
    """A whole run. Recipes are functions that return one; the shell overrides its leaves."""

    model: str = ""
    """A hub id, a local folder, or a bundled model such as smollm2-135m."""
    data: str = ""
    """A .jsonl file, a Hugging Face data set, arithmetic, or reasoning_gym:TASK."""
    reward: tuple[str, ...] = ()
    """Built-in names, or file.py:function; called as in TRL."""
    steps: int = 200
    """Number of collect-learn-publish rounds."""
    seed: int = 0
    name: str = ""
    """Folder below runs_dir; without it, one is made from the recipe's name and the time."""
    runs_dir: str = "runs"
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of forward and backward; auto measures once. Master weights are float32 in any case."""
    trust_remote_code: bool = False
    """Let a hub model run code of its own."""
    show_samples_every: int = 10
    """Steps between sample completions on the screen; 0 shows none."""
    objective: Objective = field(default_factory=Objective)
    rollout: Rollout = field(default_factory=Rollout)
    optim: Optim = field(default_factory=Optim)
    stage: Stage = field(default_factory=Stage)
    critic: Critic = field(default_factory=Critic)
    scoring: Scoring = field(default_factory=Scoring)
    prompts: Prompts = field(default_factory=Prompts)
    evaluation: Evaluation = field(default_factory=Evaluation)
    saving: Saving = field(default_factory=Saving)

    @property
    def updates_per_batch(self) -> int:
        return self.optim.epochs * self.optim.minibatches
