"""From a config, and Python objects in place of its names, to the parts of a run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gruppo import distributed as dist
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest, learns_from_samples
from gruppo.data.open import open_source
from gruppo.engines import LocalEngine
from gruppo.environments import PROVIDED, ConversationEngine, Environment
from gruppo.loading import load_object
from gruppo.modalities.common.critic import SeparateCritic, SharedCritic
from gruppo.modalities.diffusion import DenoiserCritic, DiffusionSampling, check_trust_region
from gruppo.modalities.restoration import RestorationPolicy
from gruppo.modalities.restoration.config import RestorationConfig
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.modalities.text.bundled import BUNDLED
from gruppo.modalities.text.custom import absolute_name, names_function
from gruppo.protocols import Critic
from gruppo.rewards.registry import absolute_spec, resolve_reward
from gruppo.rewards.scoring import RewardSet
from gruppo.tracking import trackers
from gruppo.trainer import restorers
from gruppo.trainer.demonstrations import check_demos, open_demos, peeked
from gruppo.trainer.evaluate import held_out, mode_of
from gruppo.trainer.memory import token_budget
from gruppo.trainer.models import HUB, NEW, POLICIES, Kind, found_model, kind_of, open_model, sampling_of
from gruppo.trainer.references import open_reference
from gruppo.trainer.run import Run, trained
from gruppo.types import DataError, GruppoError, Sampling

log = logging.getLogger("gruppo")

TEMPLATE_TOKENS = 512
"""More than a chat template adds to a conversation. Prompts that are shorter than the context by this need no count."""


@dataclass(frozen=True)
class Parts:
    """Python objects given in place of a config's names."""

    model: Any = None
    data: Any = None
    rewards: Sequence[Callable[..., Any]] | None = None
    environment: Callable[..., Any] | None = None

    @classmethod
    def of(cls, model: Any, data: Any, reward: Any, environment: Any = None) -> Parts:
        """What a caller gives: a model's name is no part; one reward, or a list of them."""
        if model is not None and not isinstance(model, (str, os.PathLike, *POLICIES)):
            raise GruppoError(
                f"model is a {type(model).__name__}; it needs a name, a folder, a TextPolicy, a DenoiserPolicy or a "
                "RestorationPolicy. Wrap a Hugging Face model with gruppo.from_transformers(model, tokenizer), another "
                "module with gruppo.from_module, one that denoises with gruppo.DenoiserPolicy, one that restores "
                "images with gruppo.RestorationPolicy."
            )
        rewards = None if reward is None else list(reward) if isinstance(reward, list | tuple) else [reward]
        if environment is not None and not callable(environment) and not isinstance(environment, str | os.PathLike):
            raise GruppoError(
                f"environment is {environment!r:.80} ({type(environment).__name__}); it needs to be a function such as "
                "def reply(text, state) that returns what is said next or None, or a name, file.py:function."
            )
        own = load_object(os.fspath(environment)) if isinstance(environment, str | os.PathLike) else environment
        return cls(model if isinstance(model, POLICIES) else None, data, rewards, own)


OPTIONS = {"environment": "environment.reply"}
"""Options of parts that are not called like them."""


def missing_parts(config: Config, parts: Parts) -> list[str]:
    """What the config says was given in memory, and is not given now."""
    named = {
        "model": config.model == IN_MEMORY and parts.model is None,
        "data": config.data == IN_MEMORY and parts.data is None,
        "reward": IN_MEMORY in config.reward and parts.rewards is None,
        "environment": config.environment.reply == IN_MEMORY and parts.environment is None,
    }
    return [name for name, is_missing in named.items() if is_missing]


def require_named(config: Config, parts: Parts) -> None:
    """Refuse a config from a file that needs Python objects which are not given now."""
    if missing := missing_parts(config, parts):
        raise GruppoError(
            f"the {' and '.join(missing)} of this config came from Python objects, which a file does not hold. "
            f"Set {' and '.join('--' + OPTIONS.get(name, name) for name in missing)}."
        )


def with_absolute_paths(config: Config) -> Config:
    """The config with its files and folders named from the root, so that it means the same in any folder."""

    def absolute(name: str) -> str:
        return os.path.abspath(name) if name and Path(name).exists() else name

    def model(name: str) -> str:
        if name.startswith(restorers.NEW):
            file, colon, what = name.removeprefix(restorers.NEW).partition(":")
            return f"{restorers.NEW}{absolute(file) if file.endswith('.py') else file}{colon}{what}"
        if names_function(name):
            return absolute_name(name)
        return name if name in (*BUNDLED, NEW) or name.startswith(HUB) else absolute(name)

    def data(name: str) -> str:
        kind, *parts = name.split(":")
        if kind in ("images", "degrade", "pairs"):
            return ":".join([kind, *(part if part.isdecimal() else absolute(part) for part in parts)])
        return name if kind in ("arithmetic", "reasoning_gym", "digits", "photos", "lines") else absolute(name)

    section = config.modality
    if isinstance(section, RestorationConfig):
        section = replace(section, weights=absolute(section.weights), consistency=absolute_spec(section.consistency))
    return replace(
        config,
        model=model(config.model),
        data=data(config.data),
        supervised=replace(config.supervised, data=data(config.supervised.data)),
        reward=tuple(map(absolute_spec, config.reward)),
        critic=replace(config.critic, model=model(config.critic.model)),
        lora=replace(config.lora, adapter=absolute(config.lora.adapter)),
        modality=section,
        track=tuple(map(trackers.absolute, config.track)),
        environment=replace(config.environment, reply=absolute_spec(config.environment.reply)),
    )


def build(config: Config, parts: Parts) -> tuple[Run, dict[str, Any]]:
    """All parts of a run, the cheap checks first; and where the model came from."""
    if config.rollout.prompts < dist.world_size():
        raise GruppoError(
            f"rollout.prompts={config.rollout.prompts} leaves some of the {dist.world_size()} ranks without a prompt. "
            f"Set --rollout.prompts {dist.world_size()} or more, or start fewer ranks."
        )
    source = open_data(config, parts)
    environment = open_environment(config, parts, source)
    rewards = open_rewards(config, parts, source)
    demos = open_demos(config, config.data if parts.data is None else parts.data)
    kind = kind_of(config, parts.model)
    policy, model_source = open_model(config, kind, parts.model, source)
    config = replace(config, compute=agreed_compute(policy))
    sampling = sampling_of(config, kind, getattr(policy, "columns", 1))
    check_policy(config, kind, policy, sampling, rewards, source)
    reads_reference = kind == "restorer" and "reference" in rewards.requested_columns
    reference = open_reference(config, policy, is_read=reads_reference)
    if reads_reference:
        source = restorers.with_reference(source, policy, reference)
    if demos is not None:
        check_demos(config, demos, policy)
    critic = open_critic(config, kind, policy, source) if config.objective.has_critic else None
    run = Run(
        config=config,
        policy=policy,
        engine=LocalEngine(policy) if environment is None else ConversationEngine(LocalEngine(policy), environment),
        source=source,
        rewards=rewards,
        optimizer=adamw(policy, critic, config),
        reference=reference,
        critic=critic,
        demos=demos,
        sampling=sampling,
        environment=environment,
    )
    check_micro_batches(run)
    if config.evaluation.prompts and not rewards.names and kind == "text":
        run.config = replace(config, evaluation=replace(config.evaluation, prompts=0))  # nothing says what is good
    elif config.evaluation.prompts and not held_out(run, config.evaluation.prompts):
        log.warning(
            "the data have no held-out prompts: nothing is evaluated. Set --prompts.held-out-fraction above 0 for some."
        )
        run.config = replace(config, evaluation=replace(config.evaluation, prompts=0))
    return run, model_source


def check_policy(config: Config, kind: Kind, policy: Any, sampling: Sampling, rewards: RewardSet, source: Any) -> None:
    """Refuse what this policy cannot be asked for, now that it is open."""
    if kind == "text":
        rewards.set_decoder(policy.chat.text)
        check_lengths(source, policy, config)
        return
    sampling = policy.check_sampling(sampling)
    policy.check_sampling(mode_of(sampling))
    if kind == "restorer":
        restorers.check_data(config, policy, sampling, source)
    else:
        check_pictures(config, kind, policy, source)
    if learns_from_samples(config):
        dims = policy.dims(peeked(source)[0].inputs.shape) if kind == "restorer" else policy.dims
        check_trust_region(config.objective, dims)


def check_pictures(config: Config, kind: Kind, policy: Any, source: Any) -> None:
    """Refuse data that ask for nothing this model can draw; say where it was made for other pictures."""
    first = peeked(source)
    refused = [policy.check_prompt(prompt, None) for prompt in first]
    if all(refused):
        hint = " Put captions.jsonl or a .txt file beside each image." if kind == "pipeline" else ""
        raise DataError(f"none of the first {len(first)} prompts of {config.data!r} can be drawn: {refused[0]}{hint}")
    shapes = {tuple(p.target.shape) for p in first if isinstance(p.target, torch.Tensor)}
    own = tuple(policy.denoiser.codec.image_shape)
    if shapes and own not in shapes:
        log.warning("the model draws %s, and the pictures of %s are %s.", list(own), config.data, list(min(shapes)))
    if config.model == NEW and not highest(config, "sup_coef"):
        log.warning(
            "a new network draws grey, and no stage has demonstrations to learn from: set --stages supervised:2000,full"
            ", or train it first with --stage.rl-coef 0 --stage.sup-coef 1."
        )


def check_micro_batches(run: Run) -> None:
    """Refuse ratios of whole rows where a piece holds less than a row of denoising steps."""
    sampling = run.sampling
    if not isinstance(sampling, DiffusionSampling) or not run.config.objective.needs_whole_rows:
        return
    if sampling.noise == "branched":
        return
    budget, needs = token_budget(run), (sampling.max_actions - 1) * (2 if sampling.guidance != 1 else 1)
    if needs > budget:
        raise GruppoError(
            f"this objective compares whole rows, of up to {needs} evaluations of the network, and a piece has {budget}"
            f". Set --optim.token-budget {needs}, or --objective.ratio token."
        )


def reward_columns(columns: Sequence[str], config: Config, kind: Kind) -> set[str]:
    """What a reward may ask for: the data's columns, the target under the names answer and target, and images."""
    targets = {"answer", "target", "solution", "label", config.prompts.target_column}
    found = {*columns} | ({"answer", "target"} if targets & {*columns} else set())
    found |= {"reference"} if kind == "restorer" else set()
    found |= {"state"} if config.environment.reply else set()
    return found if kind == "text" else found | {"images"}


def open_data(config: Config, parts: Parts) -> Any:
    return open_source(
        config.data if parts.data is None else parts.data,
        seed=config.seed,
        prompt_column=config.prompts.column,
        target_column=config.prompts.target_column,
        held_out_fraction=config.prompts.held_out_fraction,
        difficulty_column=config.prompts.difficulty_column,
    )


def open_environment(config: Config, parts: Parts, source: Any) -> Environment | None:
    """What replies to the policy, or None where each prompt is answered once."""
    chosen = config.environment
    if not chosen.reply:
        return None
    environment = Environment(
        load_object(chosen.reply) if parts.environment is None else parts.environment,
        turns=chosen.turns,
        max_reply_tokens=chosen.max_reply_tokens,
        timeout_s=chosen.timeout_s,
    )
    if source.columns is not None:
        columns = reward_columns(source.columns, config, "text") - {"state"}
        if taken := sorted({*source.columns} & {*PROVIDED} - {"prompt", config.prompts.column}):
            raise DataError(
                f"the data have a column {taken[0]!r}, and an environment is given something else by that name. Rename "
                "the column."
            )
        environment.check(columns)
    return environment


def open_rewards(config: Config, parts: Parts, source: Any) -> RewardSet:
    given = parts.rewards or config.reward
    rewards = RewardSet(
        list(map(resolve_reward, given)),
        config.scoring.weights,
        config.scoring.timeout_s,
        may_be_empty=not learns_from_samples(config),
    )
    if source.columns is not None:
        rewards.check(reward_columns(source.columns, config, kind_of(config, parts.model)))
    if config.environment.reply and rewards.step_names:
        raise GruppoError(
            f"reward {rewards.step_names[0]!r} scores the steps of one answer, and with an environment a row has "
            "several. Leave it or --environment.reply out."
        )
    check_refill_by(config, rewards)
    config.objective.check_rewards(of_steps=rewards.has_step_rewards, of_rows=rewards.has_outcome_rewards)
    return rewards


def open_critic(config: Config, kind: Kind, policy: Any, source: Any) -> Critic:
    """A new critic of the untrained policy; on a resume, its weights come from the checkpoint."""
    if config.critic.kind == "shared":
        return SharedCritic(policy)
    if kind != "text":  # a restorer's is shared
        return DenoiserCritic(policy)
    if not config.critic.model:
        return SeparateCritic(policy)
    path, _ = found_model(config.critic.model)
    # in float32, whatever the run computes in: the critic makes a copy of its trunk alone
    trusted = config.trust_remote_code
    model = from_pretrained(path, compute="float32", trust_remote_code=trusted, needs_head=False, is_merged=True)
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


def agreed_compute(policy: Any) -> Any:
    """The dtype of the arithmetic, for the run's config. Ranks that measured different ones would train two models."""
    is_half = policy.compute_dtype == torch.bfloat16
    if dist.all_max(int(is_half)) and dist.all_max(int(not is_half)):
        raise GruppoError("the ranks measured different --compute to be faster. Set --compute float32 or bfloat16.")
    return str(policy.compute_dtype).removeprefix("torch.")


def check_lengths(source: Any, policy: TextPolicy, config: Config) -> None:
    """Refuse data with a prompt that the model's context cannot hold, before anything is trained."""
    for prompt in source.all_prompts():
        longest = len(str(prompt.inputs).encode()) + TEMPLATE_TOKENS  # a token of text is at least a byte
        if policy.context and longest + config.rollout.max_new_tokens < policy.context:
            continue
        if why := policy.check_prompt(prompt, config.rollout.sampling):
            raise DataError(why)


def adamw(policy: Any, critic: Critic | None, config: Config) -> torch.optim.AdamW:
    """The policy's parameters, then the critic's as a group of its own, with a rate of its own; see ``learn``.

    Of a network that restores images, what draws the action is a group too: ``lr_factor`` is over the policy's rate.
    """
    optim, own = config.optim, trained(policy.module, None)
    action = [name for name in own if isinstance(policy, RestorationPolicy) and name.startswith("action.")]
    factor = config.section(RestorationConfig).action_lr_factor
    rates = ([name for name in own if name not in action], 1.0), (action, factor)
    groups: list[dict[str, Any]] = [
        {"params": [own[name] for name in names], "is_critic": False, "lr_factor": factor}
        for names, factor in rates
        if names
    ]
    if critic is not None:
        params = [p for p in critic.module.parameters() if p.requires_grad]
        groups.append({"params": params, "is_critic": True, "lr_factor": 1.0})
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
