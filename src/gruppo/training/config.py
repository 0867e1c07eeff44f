"""One tree of frozen dataclasses: all that a run can be told."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gruppo.core.objective import PRESETS, Objective
from gruppo.core.schedules import Decay
from gruppo.types import GruppoError, Sampling

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
    """Name of the reward whose spread decides; without it, the sum before shaping."""

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
    token_budget: int = 4096
    """Tokens one forward and backward may cover, padding included. Changes memory and speed, never the gradient."""


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
    """The separate network: a hub id, a folder or a bundled model; without it, a copy of the policy."""
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


def check(config: Config) -> None:
    """Refuse what cannot run, before anything is loaded."""
    at_least = {
        "steps": (config.steps, 1),
        "rollout.prompts": (config.rollout.prompts, 1),
        "rollout.group_size": (config.rollout.group_size, 1),
        "optim.epochs": (config.optim.epochs, 1),
        "optim.minibatches": (config.optim.minibatches, 1),
        "optim.token_budget": (config.optim.token_budget, 1),
        "saving.keep": (config.saving.keep, 1),
        "saving.every": (config.saving.every, 0),
        "evaluation.prompts": (config.evaluation.prompts, 0),
        "evaluation.every": (config.evaluation.every, 0),
        "show_samples_every": (config.show_samples_every, 0),
        "optim.lr": (config.optim.lr, 0),
        "optim.warmup_steps": (config.optim.warmup_steps, 0),
        "optim.max_grad_norm": (config.optim.max_grad_norm, 0),
        "optim.weight_decay": (config.optim.weight_decay, 0),
        "optim.final_lr_frac": (config.optim.final_lr_frac, 0),
        "stage.kl_coef": (config.stage.kl_coef, 0),
        "stage.entropy_coef": (config.stage.entropy_coef, 0),
        "stage.value_coef": (config.stage.value_coef, 0),
        "optim.stop_kl": (config.optim.stop_kl, 0),
        "rollout.refill_rounds": (config.rollout.refill_rounds, 0),
        "critic.lr": (config.critic.lr or 0.0, 0),
        "critic.warmup_steps": (config.critic.warmup_steps, 0),
    }
    for name, (value, lowest) in at_least.items():
        if not lowest <= value < float("inf"):
            raise GruppoError(f"{name}={value} is out of range; it needs at least {lowest}. Set {option(name)}.")
    if not 0 < config.optim.eps < float("inf"):
        raise GruppoError(f"optim.eps={config.optim.eps} is out of range; it needs to be above 0. Set --optim.eps.")
    if config.optim.final_lr_frac > 1:
        raise GruppoError(
            f"optim.final_lr_frac={config.optim.final_lr_frac} lets the decay raise lr; it needs 0 to 1. Set "
            "--optim.final-lr-frac 0."
        )
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        raise GruppoError(f"optim.betas={config.optim.betas}: each needs to be in [0, 1). Set --optim.betas 0.9 0.999.")
    if not config.model:
        raise GruppoError("no model was given; a hub id, a local folder or a bundled model is needed. Set --model.")
    if not config.data:
        raise GruppoError("no data was given; a .jsonl file, a data set, arithmetic or a task is needed. Set --data.")
    if not config.reward:
        raise GruppoError("no reward was given; a built-in name or file.py:function is needed. Set --reward.")
    if config.rollout.temperature <= 0:
        raise GruppoError(
            f"rollout.temperature={config.rollout.temperature:g} gives nothing to learn from (0 is greedy). Set "
            "--rollout.temperature 1.0."
        )
    rows = config.rollout.prompts * config.rollout.group_size
    if config.optim.minibatches > rows:
        raise GruppoError(
            f"optim.minibatches={config.optim.minibatches} is more than the {rows} rows of a step. Lower it."
        )
    _ = config.rollout.sampling
    config.objective.check(
        group_size=config.rollout.group_size,
        updates_per_row=config.updates_per_batch,
        kl_coef=config.stage.kl_coef,
        max_length=config.rollout.max_new_tokens,
    )
    check_refill(config.rollout)
    if config.objective.has_critic:
        check_critic(config)
    elif config.critic != Critic():
        raise GruppoError(
            f"a critic was set, but objective.baseline={config.objective.baseline!r} asks none for values. Set "
            "--objective ppo or --objective.baseline critic, or leave --critic out."
        )


def check_refill(rollout: Rollout) -> None:
    if rollout.refill_by and not rollout.refill_rounds:
        raise GruppoError(
            f"rollout.refill_by={rollout.refill_by!r} decides nothing while rollout.refill_rounds=0. Set "
            "--rollout.refill-rounds 1 or more, or leave --rollout.refill-by out."
        )
    if rollout.refill_rounds and rollout.group_size < 2:
        raise GruppoError(
            f"rollout.refill_rounds={rollout.refill_rounds} replaces groups without spread, and a group of one never "
            "has any. Set --rollout.group-size 2 or more, or --rollout.refill-rounds 0."
        )


def check_critic(config: Config) -> None:
    critic, optim = config.critic, config.optim
    if critic.kind == "shared" and critic.model:
        raise GruppoError(
            f"critic.model={critic.model!r} is a network of its own, but critic.kind='shared' reads the policy's. Set "
            "--critic.kind separate, or leave --critic.model out."
        )
    if critic.lr and not optim.lr:
        raise GruppoError(
            f"critic.lr={critic.lr:g} is relative to optim.lr=0 and would be 0 too. Set --optim.lr above 0; "
            "--critic.warmup-steps lets the critic learn alone."
        )
    if config.stage.value_coef == 0:
        raise GruppoError(
            "stage.value_coef=0 never trains the critic, whose values stay 0. Set --stage.value-coef above 0, or a "
            "baseline without a critic."
        )
    if critic.warmup_steps >= config.steps:
        raise GruppoError(
            f"critic.warmup_steps={critic.warmup_steps} leaves the policy none of the {config.steps} steps to learn "
            "in. Lower --critic.warmup-steps or raise --steps."
        )


def option(name: str) -> str:
    """A field as it is typed in the shell."""
    return "--" + name.replace("_", "-")


# --- to a file and back ----------------------------------------------------------------------------------------------


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def plain(value: Any) -> Any:
    """A value as ``to_dict`` gives it: settings as dicts, paths as texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def from_dict(data: Mapping[str, Any]) -> Config:
    """A config from JSON. An unknown or ill-typed entry is refused with the nearest name."""
    return _build(Config, data, "")


def load(path: Path) -> Config:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GruppoError(f"{path} does not exist; a run's config.json is needed.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise GruppoError(f"{path} cannot be read as JSON ({error}); a run's config.json is needed.") from None
    if not isinstance(data, dict):
        raise GruppoError(f"{path} holds a {type(data).__name__}; a run's config.json is needed.")
    return from_dict(data)


def _build(kind: Any, data: Mapping[str, Any], where: str) -> Any:
    known = {f.name for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in data.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {where}{near[0]}?" if near else f" Known: {', '.join(sorted(known))}."
            raise GruppoError(f"the config has an unknown entry {where}{name}.{hint}")
        values[name] = _convert(hints[name], value, f"{where}{name}")
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Objective and isinstance(value, str):
        return preset(value)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise GruppoError(f"config entry {where} is {value!r}; it needs an object of settings.")
        return _build(hint, value, f"{where}.")
    if not _fits(hint, value):
        raise GruppoError(f"config entry {where} is {value!r}; it needs {words(hint)}.")
    return _cast(hint, value)


def preset(name: str) -> Objective:
    """A named objective."""
    found = PRESETS.get(name.lower().replace("-", "_"))
    if found is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise GruppoError(f"objective {name or '(nothing)'} is no preset. {hint}Presets: {', '.join(PRESETS)}.")
    return found


def _fits(hint: Any, value: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in inner
    if origin in (typing.Union, types.UnionType):
        return any(_fits(h, value) for h in inner)
    if origin is tuple:
        return isinstance(value, list | tuple) and _has_length(inner, value) and all(_fits(inner[0], v) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _has_length(inner: tuple[Any, ...], value: Any) -> bool:
    return inner[-1] is Ellipsis or len(inner) == len(value)


def _cast(hint: Any, value: Any) -> Any:
    """What JSON has as a list or a whole number, as the field's type."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _cast(next(h for h in inner if _fits(h, value)), value)
    if isinstance(value, list | tuple):
        return tuple(_cast(inner[0], v) for v in value)
    return float(value) if hint is float else value


_WORDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", type(None): "nothing"}


def words(hint: Any) -> str:
    """A type as people say it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(words, inner))
    if origin is tuple:
        kind = _WORDS[inner[0]].split(" ", 1)[1]
        return f"a list of {kind}s" if inner[-1] is Ellipsis else f"a list of {len(inner)} {kind}s"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
