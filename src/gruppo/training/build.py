"""From a config, and Python objects in place of its names, to the parts of a run."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gruppo import dist
from gruppo.data.open import open_source
from gruppo.engines import LocalEngine
from gruppo.loading import is_file_name
from gruppo.policies.critic import SeparateCritic, SharedCritic
from gruppo.policies.reference import FrozenReference
from gruppo.policies.text import TextPolicy, from_pretrained
from gruppo.policies.text.bundled import BUNDLED, bundled_model
from gruppo.rewards.resolve import resolve_reward
from gruppo.rewards.score import RewardSet
from gruppo.training.config import IN_MEMORY, Config
from gruppo.training.evaluate import held_out
from gruppo.training.run import Run, trained
from gruppo.types import Critic, DataError, GruppoError

log = logging.getLogger("gruppo")

TEMPLATE_TOKENS = 512
"""More than a chat template adds to a conversation. Prompts that are shorter than the context by this need no count."""


@dataclass(frozen=True)
class Parts:
    """Python objects given in place of a config's names."""

    model: TextPolicy | None = None
    data: Any = None
    rewards: Sequence[Callable[..., Any]] | None = None

    @classmethod
    def of(cls, model: Any, data: Any, reward: Any) -> Parts:
        """What a caller gives: a model's name is no part; one reward, or a list of them."""
        if model is not None and not isinstance(model, str | os.PathLike | TextPolicy):
            raise GruppoError(
                f"model is a {type(model).__name__}; it needs a name, a folder or a TextPolicy. Wrap a Hugging Face "
                "model with gruppo.from_transformers(model, tokenizer), any other module with gruppo.from_module."
            )
        rewards = None if reward is None else list(reward) if isinstance(reward, list | tuple) else [reward]
        return cls(model if isinstance(model, TextPolicy) else None, data, rewards)


def missing_parts(config: Config, parts: Parts) -> list[str]:
    """What the config says was given in memory, and is not given now."""
    named = {
        "model": config.model == IN_MEMORY and parts.model is None,
        "data": config.data == IN_MEMORY and parts.data is None,
        "reward": IN_MEMORY in config.reward and parts.rewards is None,
    }
    return [name for name, is_missing in named.items() if is_missing]


def require_named(config: Config, parts: Parts) -> None:
    """Refuse a config from a file that needs Python objects which are not given now."""
    if missing := missing_parts(config, parts):
        raise GruppoError(
            f"the {' and '.join(missing)} of this config came from Python objects, which a file does not hold. "
            f"Set {' and '.join(f'--{name}' for name in missing)}."
        )


def with_absolute_paths(config: Config) -> Config:
    """The config with its files and folders named from the root, so that it means the same in any folder."""

    def absolute(name: str) -> str:
        return os.path.abspath(name) if name and Path(name).exists() else name

    def model(name: str) -> str:
        return name if name in BUNDLED else absolute(name)

    def reward(name: str) -> str:
        place, colon, function = name.rpartition(":")
        return f"{absolute(place)}{colon}{function}" if colon and is_file_name(place) else name

    has_known_data = config.data.partition(":")[0] in ("arithmetic", "reasoning_gym")
    return replace(
        config,
        model=model(config.model),
        data=config.data if has_known_data else absolute(config.data),
        reward=tuple(map(reward, config.reward)),
        critic=replace(config.critic, model=model(config.critic.model)),
    )


def build(config: Config, parts: Parts) -> tuple[Run, dict[str, Any]]:
    """All parts of a run, the cheap checks first; and where the model came from."""
    if config.rollout.prompts < dist.world():
        raise GruppoError(
            f"rollout.prompts={config.rollout.prompts} leaves some of the {dist.world()} ranks without a prompt. Set "
            f"--rollout.prompts {dist.world()} or more, or start fewer ranks."
        )
    source = open_data(config, parts)
    rewards = open_rewards(config, parts, source)
    policy, model_source = open_model(config, parts)
    config = replace(config, compute=agreed_compute(policy))
    check_lengths(source, policy, config)
    critic = open_critic(config, policy, source) if config.objective.has_critic else None
    run = Run(
        config=config,
        policy=policy,
        engine=LocalEngine(policy),
        source=source,
        rewards=rewards,
        optimizer=adamw(policy.module, critic, config),
        reference=FrozenReference(policy) if config.stage.kl_coef > 0 else None,
        critic=critic,
    )
    if config.evaluation.prompts and not held_out(run, config.evaluation.prompts):
        log.warning(
            "the data have no held-out prompts: nothing is evaluated. Set --prompts.held-out-fraction above 0 for some."
        )
        run.config = replace(config, evaluation=replace(config.evaluation, prompts=0))
    return run, model_source


def reward_columns(columns: Sequence[str], config: Config) -> set[str]:
    """What a reward may ask for: the data's columns, and the target under the names answer and target."""
    targets = {"answer", "target", "solution", "label", config.prompts.target_column}
    return {*columns} | ({"answer", "target"} if targets & {*columns} else set())


def open_data(config: Config, parts: Parts) -> Any:
    return open_source(
        config.data if parts.data is None else parts.data,
        seed=config.seed,
        prompt_column=config.prompts.column,
        target_column=config.prompts.target_column,
        held_out_fraction=config.prompts.held_out_fraction,
    )


def open_rewards(config: Config, parts: Parts, source: Any) -> RewardSet:
    given = parts.rewards or config.reward
    rewards = RewardSet(list(map(resolve_reward, given)), config.scoring.weights, config.scoring.timeout_s)
    if hasattr(source, "columns"):
        rewards.check(reward_columns(source.columns, config))
    check_refill_by(config, rewards)
    return rewards


def open_model(config: Config, parts: Parts) -> tuple[TextPolicy, dict[str, Any]]:
    if parts.model is not None:
        return parts.model, {"name": config.model}
    path, source = found_model(config.model)
    policy = from_pretrained(path, compute=config.compute, trust_remote_code=config.trust_remote_code)
    return policy, source


def found_model(name: str) -> tuple[str, dict[str, Any]]:
    """Where a model is to be loaded from, and what a manifest says of it."""
    if name in BUNDLED:
        found = bundled_model(name)
        return str(found.path), {"name": name, "source": found.source, "sha256": found.sha256}
    if "/" not in name and not Path(name).exists() and (near := difflib.get_close_matches(name, BUNDLED, 1)):
        raise GruppoError(f"there is no model {name!r}. Did you mean {near[0]}?")
    return name, {"name": name}


def open_critic(config: Config, policy: TextPolicy, source: Any) -> Critic:
    """A new critic of the untrained policy; on a resume, its weights come from the checkpoint."""
    if config.critic.kind == "shared":
        return SharedCritic(policy)
    if not config.critic.model:
        return SeparateCritic(policy)
    path, _ = found_model(config.critic.model)
    # in float32, whatever the run computes in: the critic makes a copy of its trunk alone
    model = from_pretrained(path, compute="float32", trust_remote_code=config.trust_remote_code, needs_head=False)
    try:
        check_lengths(source, model, config)
    except DataError as error:
        raise DataError(f"the critic {config.critic.model} is too short for these data: {error}") from None
    return SeparateCritic(policy, model)


def check_refill_by(config: Config, rewards: RewardSet) -> None:
    wanted = config.rollout.refill_by
    if wanted and wanted not in rewards.names:
        raise GruppoError(
            f"rollout.refill_by={wanted!r} is none of this run's rewards, {', '.join(rewards.names)}. Set "
            "--rollout.refill-by to one of them, or leave it out for their sum."
        )


def agreed_compute(policy: TextPolicy) -> Any:
    """The dtype of the arithmetic, for the run's config. Ranks that measured different ones would train two models."""
    is_half = policy.compute_dtype == torch.bfloat16
    if dist.all_max(int(is_half)) and dist.all_max(int(not is_half)):
        raise GruppoError("the ranks measured different --compute to be faster. Set --compute float32 or bfloat16.")
    return str(policy.compute_dtype).removeprefix("torch.")


def check_lengths(source: Any, policy: TextPolicy, config: Config) -> None:
    """Refuse data with a prompt that the model's context cannot hold, before anything is trained."""
    for prompt in source.all_prompts() if hasattr(source, "all_prompts") else ():
        longest = len(str(prompt.inputs).encode()) + TEMPLATE_TOKENS  # a token of text is at least a byte
        if policy.context and longest + config.rollout.max_new_tokens < policy.context:
            continue
        if why := policy.refuse(prompt, config.rollout.sampling):
            raise DataError(why)


def adamw(module: torch.nn.Module, critic: Critic | None, config: Config) -> torch.optim.AdamW:
    """The policy's parameters, then the critic's as a group of its own; a group's rate is the step's x lr_scale."""
    optim = config.optim
    groups: list[dict[str, Any]] = [{"params": list(trained(module, None).values()), "lr_scale": 1.0}]
    if critic is not None:
        own = config.critic.lr
        scale = 1.0 if own is None or own == optim.lr else own / optim.lr
        groups.append({"params": [p for p in critic.module.parameters() if p.requires_grad], "lr_scale": scale})
    return torch.optim.AdamW(
        groups,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )


def name_of(part: Any) -> str:
    """What a config says of a part: its name or path; of a function that can be loaded again, file.py:function."""
    if isinstance(part, str | os.PathLike):
        return str(part)
    module = sys.modules.get(getattr(part, "__module__", None) or "")
    name = getattr(part, "__qualname__", "")
    if module is None or vars(module).get(name) is not part or not name.isidentifier():
        return IN_MEMORY
    if module.__name__ != "__main__" and "." in module.__name__:
        return f"{module.__name__}:{name}"
    file = Path(getattr(module, "__file__", None) or "")
    return f"{file.resolve()}:{name}" if file.is_file() else IN_MEMORY
