"""Build the components of a run from a config, and from Python objects in place of its names."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from gruppo import distributed as dist
from gruppo import trust
from gruppo.config import serialization
from gruppo.config.options import options
from gruppo.config.schema import IN_MEMORY, Config
from gruppo.config.stages import highest, learns_from_samples, stage_path
from gruppo.data.open import is_function_name, open_source
from gruppo.data.source import IndexedSource
from gruppo.distributed import sharding
from gruppo.engines import LocalEngine
from gruppo.environments import (
    ConversationEngine,
    Environment,
    EnvironmentClass,
    is_adapter,
    is_class,
    open_adapter,
)
from gruppo.loading import absolute_path, absolute_spec, importing, load_object, split_names
from gruppo.modalities import find_modality
from gruppo.modalities.common.critic import SharedCritic
from gruppo.modalities.common.lora import has_adapter
from gruppo.modalities.common.reference import ReferenceModel, Rule
from gruppo.modalities.text.bundled import BUNDLED
from gruppo.platforms import usable_cuda
from gruppo.protocols import (
    AdapterMixin,
    ConversationMixin,
    Critic,
    DemonstrationMixin,
    Engine,
    ImageDescriptionMixin,
    MemoryMixin,
    Modality,
    Policy,
    RecomputeMixin,
    Reference,
    ServingMixin,
    ValueHeadMixin,
    digest,
    part,
    peek,
)
from gruppo.rewards.registry import absolute_reward, resolve_reward
from gruppo.rewards.remote import RewardWorkers
from gruppo.rewards.scoring import RewardSet
from gruppo.testing import check_engine, check_policy
from gruppo.trainer import checks
from gruppo.trainer.checks import has_reference
from gruppo.trainer.demonstrations import check_demos, open_demos
from gruppo.trainer.evaluate import held_out
from gruppo.trainer.run import Run, trained
from gruppo.types import DataError, GruppoError
from gruppo.worker import IS_AVAILABLE

log = logging.getLogger("gruppo")

PROMPTS_CHECKED, PROMPTS_PROBED = 2, 128
"""Prompts with which a policy or an engine from outside is checked."""


PARTS = {
    "model": ("model",),
    "data": ("data",),
    "reward": ("reward",),
    "environment": ("environment.kind", "environment.reply"),
    "tools": ("environment.tools",),
    "engine": ("engine.kind",),
    "validation": ("evaluation.data",),
}
"""Arguments that may be Python objects in place of the config's names, with their options."""


@dataclass(frozen=True)
class Parts:
    """Python objects given in place of a config's names, and names."""

    model: Any = None
    data: Any = None
    rewards: Sequence[Callable[..., Any]] | None = None
    environment: Any = None
    tools: Sequence[Callable[..., Any]] | None = None
    engine: Any = None
    validation: Any = None

    @property
    def names(self) -> list[str]:
        """Parts that are names, but for the model's."""
        singles = (self.data, self.environment, self.engine, self.validation)
        parts = (*singles, *(self.rewards or ()), *(self.tools or ()))
        return [part for part in parts if isinstance(part, str)]

    @classmethod
    def of(
        cls,
        model: Any,
        data: Any,
        reward: Any,
        environment: Any,
        tools: Any,
        engine: Any,
        validation: Any,
    ) -> Self:
        """Check what a caller gave."""
        if not isinstance(model, str | os.PathLike | Policy | None):
            raise GruppoError(f"""model is a {type(model).__name__}; it needs a name, a folder, or a
                policy (a gruppo.Policy). Wrap a Hugging Face model with
                gruppo.from_transformers(model, tokenizer), another module with gruppo.from_module,
                one that denoises with gruppo.DenoiserPolicy, one that restores images with
                gruppo.RestorationPolicy.""")
        kinds = (str, os.PathLike, Mapping, EnvironmentClass, type(None))
        if not callable(environment) and not isinstance(environment, kinds):
            raise GruppoError(f"""environment is {environment!r:.80} ({type(environment).__name__});
                it needs to be a class with reset, a function such as def reply(text, state) that
                returns what is said next or None, or a name, file.py:Class or file.py:function.""")
        if isinstance(environment, str | os.PathLike) and not is_adapter(os.fspath(environment)):
            environment = load_object(os.fspath(environment))
        if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
            raise GruppoError(f"""tools is {tools!r:.80} ({type(tools).__name__}); it needs to be a
                list of functions, or of their names, file.py:function.""")
        rewards = reward if reward is None or isinstance(reward, list | tuple) else [reward]
        return cls(model, data, rewards, environment, tools, engine, validation)

    def by_argument(self) -> dict[str, Any]:
        return dict(zip(PARTS, vars(self).values(), strict=True))

    def config_entries(self) -> dict[str, Any]:
        """Return the entries of a config that hold the names of these parts."""
        entries: dict[str, Any] = {}
        for argument, given in self.by_argument().items():
            option = PARTS[argument][0]
            if argument == "environment" and not (isinstance(given, str) or is_class(given)):
                option = "environment.reply"  # a function replies; a class has a kind
            if given is not None:
                is_list = argument in ("reward", "tools")
                entries[option] = [*map(name_of, given)] if is_list else name_of(given)
        if self.rewards and not any(isinstance(reward, str) for reward in self.rewards):
            # on the command line too they are then called in the trainer's process, whose random
            # state is saved
            entries["scoring.isolate"] = False
        return entries


def missing_parts(config: Config, parts: Parts) -> dict[str, str]:
    """Return the parts that the config had as Python objects and that are not given, each with its
    option."""
    leaves = options(config)
    missing = {}
    for argument, given in parts.by_argument().items():
        for option in PARTS[argument]:
            value = leaves[option].value
            is_object = IN_MEMORY in value if isinstance(value, tuple) else value == IN_MEMORY
            if is_object and given is None:
                missing[argument] = option.removesuffix(".kind")
    return missing


def validate(config: Config, parts: Parts) -> None:
    """Refuse options that contradict each other, and a config whose Python objects are not given;
    nothing is loaded."""
    with importing(trust.imports([serialization.to_dict(config), parts.names])):
        checks.check(config, _modality(config, parts))
    if missing := missing_parts(config, parts):
        raise GruppoError(
            f"""the {" and ".join(missing)} of this config came from Python objects, which a file
                does not hold""",
            advice=f"Set {' and '.join(f'${option}' for option in missing.values())}",
        )


def _modality(config: Config, parts: Parts) -> Modality:
    if isinstance(parts.model, Policy):
        return parts.model.modality
    return find_modality(config.model)


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths, so that it means the same in any folder."""

    def model(name: str) -> str:
        if name in (*BUNDLED, "unet") or name.startswith(("diffusers:", "restore:")):
            return name  # the modality makes the file of restore:FILE.py:Class absolute
        return absolute_spec(absolute_path(name))

    def data(name: str) -> str:
        if is_function_name(name):
            return absolute_spec(name)
        kind, *parts = split_names(name)
        if kind in ("images", "degrade", "pairs"):  # a decimal part is a size of images
            parts = [part if part.isdecimal() else absolute_path(part) for part in parts]
            return ":".join([kind, *parts])
        generated = ("arithmetic", "reasoning_gym", "verifiers", "digits", "photos", "lines")
        return name if kind in generated else absolute_path(name)

    def folder(name: str) -> str:  # unlike a path to read, it need not exist yet
        return name and os.path.abspath(os.path.expanduser(name))

    absolute: dict[str, Callable[[str], str]] = {
        "model": model,
        "data": data,
        "supervised.data": data,
        "prompts.chat_template": absolute_path,
        "evaluation.data": data,
        "reward": absolute_reward,
        "objective.surrogate": absolute_spec,
        "critic.model": model,
        "lora.adapter": absolute_path,
        "track": absolute_spec,
        "environment.kind": absolute_spec,
        "environment.reply": absolute_spec,
        "environment.tools": absolute_spec,
        "engine.kind": absolute_spec,
        "engine.replay": folder,
        "engine.publish_dir": folder,
    }
    leaves = options(config)
    changes: dict[str, Any] = {}
    for option, function in absolute.items():
        value = leaves[option].value
        changes[option] = function(value) if isinstance(value, str) else [*map(function, value)]
    config = serialization.change(config, changes)
    return find_modality(config.model).absolute_paths(
        config, lambda name: absolute_spec(absolute_path(name))
    )


def build(config: Config, parts: Parts) -> tuple[Run, dict[str, Any]]:
    """Build all parts of a run, the cheap checks first; return it and the model's origin."""
    if config.rollout.prompts < dist.world_size():
        raise GruppoError(
            f"""rollout.prompts={config.rollout.prompts} leaves some of the {dist.world_size()}
                ranks without a prompt""",
            option="rollout.prompts",
            advice=f"{dist.world_size()} or more, or start fewer ranks",
        )
    is_sharded = sharding.request(config.distributed.shard)
    data = config.data if parts.data is None else parts.data
    source, validation = open_data(config, data, parts.validation)
    modality = _modality(config, parts)
    sources = [source] if validation is None else [source, validation]
    rewards, environment = open_rewards(config, parts, sources, modality)
    own_surrogate = open_surrogate(config)
    demos = open_demos(config, data)
    if isinstance(parts.model, Policy):
        policy, origin = modality.adapt(config, parts.model, source), {"name": config.model}
    else:
        policy, origin = modality.open(config, source)
    if policy.modality is not modality:
        # a function made another kind of policy than its name could tell
        modality = policy.modality
        checks.check(config, modality)
    config = place(policy, config)
    # what the policy cannot be trained with is refused before a reference or a critic takes memory
    sampling = modality.sampling(config, policy)
    modality.check(config, policy, sampling, source, rewards)
    check_capabilities(config, policy)
    if isinstance(policy, ConversationMixin):
        tools = (None,) if environment is None else (environment.tools, environment.tools_of)
        policy.prepare_conversations(*tools)
    if not type(policy).__module__.startswith("gruppo."):  # a policy from outside
        tolerance = 1e-3 if policy.compute_dtype == torch.float32 else 0.1
        check_policy(policy, peek(source, PROMPTS_CHECKED), sampling=sampling, tolerance=tolerance)
    reference = open_reference(config, policy)
    if demos is not None:
        check_demos(config, demos, policy, environment)
    critic: Critic | None = None
    if config.objective.has_critic:  # new; on resume, its weights come from the checkpoint
        critic = modality.critic(config, policy, source) or SharedCritic(policy)
    engine: Any = open_engine(config, parts, policy, sampling, source)
    check_lag(config, engine)
    if environment is not None:
        engine = ConversationEngine(engine, environment, policy.check_prompt)
    if config.optim.recompute == "layer":
        # after the reference, which has no backward pass, was copied
        recompute(policy, critic)
    digests = shard(config, policy, reference, critic) if is_sharded else {}
    run = Run(
        config,
        policy,
        engine,
        source,
        rewards,
        adamw(policy, critic, config),  # after sharding, which replaces parameters
        reference=reference,
        critic=critic,
        validation=validation,
        demos=demos,
        environment=environment,
        sampling=sampling,
        own_surrogate=own_surrogate,
        **digests,
    )
    # without rewards, images are still shown
    is_evaluated = bool(rewards.names) or isinstance(policy, ImageDescriptionMixin)
    if is_evaluated and config.evaluation.prompts and not held_out(run, config.evaluation.prompts):
        log.warning(
            "the data have no held-out prompts: nothing is evaluated. Set "
            "--prompts.held-out-fraction above 0 for some, or --evaluation.data to validation data."
        )
        is_evaluated = False
    if not is_evaluated:
        run.config = serialization.change(config, {"evaluation.prompts": 0})
    return run, origin


def open_data(config: Config, data: Any, validation: Any) -> tuple[Any, Any]:
    """Open the prompts of training, and those of validation data, if any."""
    prompts, name = config.prompts, config.evaluation.data
    columns = partial(
        open_source,
        prompt_column=prompts.column,
        target_column=prompts.target_column,
        seed=config.seed,
    )
    source = columns(
        data,
        # with validation data, all others are trained on
        held_out_fraction=0.0 if name else prompts.held_out_fraction,
    )
    if not name:
        return source, None
    own = columns(name if validation is None else validation, held_out_fraction=0.0)
    return source, own.only_held_out() if isinstance(own, IndexedSource) else own


def open_surrogate(config: Config) -> Callable[..., Any] | None:
    """Load the function that ``objective.surrogate`` names, if it does."""
    name = config.objective.surrogate
    if not config.objective.has_own_surrogate:
        return None
    surrogate = load_object(name)
    if not callable(surrogate):
        raise GruppoError(
            f"{name} is a {type(surrogate).__name__}; it needs to be a function of the loss",
            option="objective.surrogate",
        )
    return surrogate


def recompute(policy: Policy, critic: Critic | None) -> None:
    """Compute activations again in the backward pass."""
    if not isinstance(policy, RecomputeMixin):
        raise GruppoError(
            f"optim.recompute=layer: {type(policy).__name__} does not define recompute",
            option="optim.recompute",
            advice="none, or lower $optim.token_budget",
        )
    policy.recompute()
    if critic is not None:
        critic.recompute()


def check_capabilities(config: Config, policy: Policy) -> None:
    """Refuse options that need a capability which the policy does not have."""
    needs: list[tuple[str, str, bool, type]] = [
        ("environment", "environment", bool(config.environment.names), ConversationMixin),
        ("critic.kind", "objective", config.objective.has_critic, ValueHeadMixin),
        ("stage.sup_coef", "stage.sup_coef", highest(config, "sup_coef") > 0, DemonstrationMixin),
        ("engine.kind", "engine.kind", config.engine.kind == "vllm", ServingMixin),
    ]
    for problem, option, is_set, kind in needs:
        if is_set and not isinstance(policy, kind):
            raise GruppoError(
                f"""{problem} needs a policy that is a gruppo.protocols.{kind.__name__}, and
                {type(policy).__name__} is not""",
                advice=f"Leave ${option} out, or add the class to the policy's bases",
            )


def place(policy: Policy, config: Config) -> Config:
    """Move a policy to the device of the config, "auto" being this rank's GPU if any; return the
    config with its dtype.

    Ranks that measured different dtypes to be faster would train two models.
    """
    device: str = config.device
    if device in ("auto", "cuda"):
        # a problem: there is a GPU, and torch cannot compute on it
        has_cuda, problem = usable_cuda()
        if device == "cuda" and not has_cuda:
            raise GruppoError(
                f"device cuda: {problem or 'torch finds no CUDA device'}",
                option="device",
                advice="cpu, or install a torch build that supports this GPU and driver",
            )
        if problem:
            log.warning("the GPU cannot be used, so the run is on the CPU: %s.", problem)
        device = "cuda" if has_cuda else "cpu"
    if device == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        # 10 bits of a convolution are too few for a ratio of 1
        torch.backends.cudnn.allow_tf32 = False
    if device == "mps" and not torch.backends.mps.is_available():
        raise GruppoError("device mps: torch finds no Metal device", option="device", advice="cpu")
    # a policy to be sharded is moved later, a unit at a time: the whole may not fit on one device
    if policy.device != torch.device(device) and not sharding.is_requested():
        policy.to(torch.device(device))
    is_half = policy.compute_dtype == torch.bfloat16
    if dist.all_max(int(is_half)) and dist.all_max(int(not is_half)):
        raise GruppoError(
            "the ranks measured different compute to be faster",
            option="compute",
            advice="float32 or bfloat16",
        )
    compute: Any = str(policy.compute_dtype).removeprefix("torch.")
    return replace(config, compute=compute)


def shard(
    config: Config, policy: Policy, reference: Reference | None, critic: Critic | None
) -> dict[str, Any]:
    """Shard all weights over ranks, in place; return digests of them from before and of this rank's
    shards, for Run.

    Last of all: copies are made, and an engine is checked, with whole weights.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = config.distributed
    apply = partial(
        sharding.shard,
        mode=chosen.shard,
        device=torch.device(device),
        is_offloaded=chosen.offload_params,
    )
    sha256: dict[str, Any] = {}
    frozen = {} if reference is None else reference.frozen_state_dict()
    if frozen:
        sha256["reference_sha256"] = digest(frozen)
    if reference is not None or config.model == IN_MEMORY:
        sha256["first_weights_sha256"] = digest(
            part(policy, AdapterMixin).frozen_base() | policy.checkpoint_weights()
        )
    policy.shard(apply)
    if critic is not None:
        critic.shard(apply)
    if reference is not None:
        reference.shard(apply)
        shards = {name: sharding.local(x) for name, x in reference.frozen_state_dict().items()}
        if shards:
            sha256["reference_shards_sha256"] = digest(shards)
    return sha256


def open_engine(config: Config, parts: Parts, policy: Policy, sampling: Any, source: Any) -> Engine:
    """Return the engine that samples: the policy itself in this process, servers, or a checked one
    from outside."""
    chosen = config.engine
    if parts.engine is None and not chosen.kind:
        return LocalEngine(policy)
    if chosen.kind == "vllm":
        return open_servers(config, policy, sampling, source)
    engine = parts.engine
    if engine is None or isinstance(engine, str | os.PathLike):
        function = load_object(chosen.kind)
        if not callable(function):
            raise GruppoError(
                f"{chosen.kind} is a {type(function).__name__}; it needs a function of a policy."
            )
        engine = function(policy)
    # 0.1 nats: an engine from outside may have arithmetic of its own, such as bfloat16
    prompts = peek(source, PROMPTS_CHECKED)
    check_engine(engine, policy, prompts, sampling=sampling, tolerance=0.1)
    return engine


def open_servers(config: Config, policy: Any, sampling: Any, source: Any) -> Engine:
    """Return an engine over servers of vLLM, each of which is found to fit this run."""
    from gruppo.engines.vllm import VllmEngine, WeightCheck

    chosen = config.engine
    folder = Path(config.runs_dir).absolute() / config.name / "published"
    if chosen.publish_dir:
        folder = Path(chosen.publish_dir) / config.name
    # a batch system may start the servers of a resumed run elsewhere
    urls = os.environ.get("GRUPPO_ENGINE_URLS") or ",".join(chosen.urls)
    probes = peek(source, PROMPTS_PROBED)
    servers = VllmEngine(
        policy,
        [url for url in urls.split(",") if url],
        folder,
        checker=WeightCheck(policy, probes, sampling, max_mismatch=chosen.max_mismatch),
        is_colocated=chosen.colocated,
        timeout_s=chosen.timeout_s,
    )
    try:
        # the longest prompts of the data, by their texts, show whether the servers' context is long
        # enough
        prompts = sorted(source.all_prompts(), key=lambda prompt: len(str(prompt.inputs)))
        longest = part(policy, MemoryMixin).longest_prompt(prompts[-64:] or probes)
        servers.check(longest + sampling.max_actions)
    except BaseException:
        servers.close()
        raise
    return servers


def check_lag(config: Config, engine: Any) -> None:
    """Refuse to sample ahead with an engine, or on ranks, that cannot."""
    if not config.engine.lag or config.engine.replay:
        return
    if engine.concurrency < 1:
        raise GruppoError(
            f"""engine.lag={config.engine.lag} needs an engine that samples while the trainer
                learns, and {type(engine).__name__} does not declare it (concurrency = 1 or more;
                see gruppo.protocols.Engine)""",
            option="engine.lag",
            advice="0",
        )
    if config.rollout.refill_rounds and dist.world_size() > 1:
        raise GruppoError(
            f"""rollout.refill_rounds={config.rollout.refill_rounds} moves prompts between ranks,
                and with engine.lag their samples are on the rank that was to use them""",
            option="rollout.refill_rounds",
            advice="0, or $engine.lag 0",
        )


def open_reference(config: Config, policy: Policy) -> Reference | None:
    """Return the reference, a copy of the untrained policy or its base; None if nothing reads
    it."""
    chosen = config.reference
    renewed = [index for index, stage in enumerate(config.plan) if stage.new_reference]
    if not has_reference(config, policy.modality):
        if renewed:
            raise GruppoError(
                f"""{stage_path(config, renewed[0])}.new_reference was set, but no stage's kl_coef
                    is above 0, so that nothing is measured against a reference""",
                option="stage.kl_coef",
                advice="0.05 or the like, or leave new_reference out",
            )
        return None
    is_frozen = chosen.kind == "frozen" and not renewed
    rule: Rule = "frozen" if is_frozen else "ema"
    if is_frozen and has_adapter(policy.module):
        rule = "adapter_off"
    every = chosen.update_every if chosen.kind == "mixed" else 0
    return ReferenceModel(
        policy,
        rule=rule,
        rate=chosen.update_rate,
        every=every,
        storage=chosen.place,
    )


def open_rewards(
    config: Config, parts: Parts, sources: Sequence[Any], modality: Modality
) -> tuple[RewardSet, Environment | None]:
    """Open the rewards, and the environment that replies to the policy, if any; check the columns
    that they read."""
    environment = open_environment(config, parts)
    own = {} if environment is None else environment.rewards
    weights: Sequence[float] | None = config.scoring.weights
    if weights is not None:
        weights = [*weights, *(1.0 for _ in own)]
    processes = RewardWorkers(config.seed) if config.scoring.isolate and IS_AVAILABLE else None
    functions = [resolve_reward(reward, processes) for reward in parts.rewards or config.reward]
    rewards = RewardSet(
        [*functions, *own.values()],
        weights,
        config.scoring.timeout_s,
        may_be_empty=not learns_from_samples(config),
    )
    if config.scoring.isolate:
        rewards.announce_soft_deadlines()
    for source in sources:
        if source.columns is not None:  # else unknown before it is drawn from
            rewards.check(readable_columns(config, source, environment, modality))
    _check_steps(rewards, environment)
    if environment is not None and environment.classes:
        rewards.set_view(environment.view)
    config.objective.check_rewards(
        of_steps=rewards.has_step_rewards, of_rows=rewards.has_outcome_rewards
    )
    return rewards, environment


def readable_columns(
    config: Config, source: Any, environment: Environment | None, modality: Modality
) -> set[str]:
    """Return the columns that rewards can ask for: the data's, the target as answer and target, and
    what the environment and the modality add."""
    columns = {*source.columns}
    if columns & {"answer", "target", "solution", "label", config.prompts.target_column}:
        columns |= {"answer", "target"}
    if environment is not None:
        taken = sorted({*source.columns} & environment.shadowed - {config.prompts.column})
        if taken:
            raise DataError(f"""{source.name} has a column {taken[0]!r}, and an environment is given
                something else by that name. Rename the column.""")
        environment.check(columns)
        columns |= {"state"} | ({"environments"} if environment.classes else set())
    return columns | ({"images"} if modality.rewards_read_images else set())


def _check_steps(rewards: RewardSet, environment: Environment | None) -> None:
    """Refuse rewards of steps in conversations, and rewards of turns without one."""
    of_steps = [name for name in rewards.step_names if name not in rewards.turn_names]
    if environment is not None and of_steps:
        raise GruppoError(f"""reward {of_steps[0]!r} scores the steps of one answer, and with an
            environment a row has several. Leave it or the environment out, or score turns with
            gruppo.rewards.turn_reward.""")
    if environment is None and rewards.turn_names:
        raise GruppoError(
            f"""reward {rewards.turn_names[0]!r} scores turns, and without an environment a row has
                one""",
            advice="Set $environment or $environment.reply",
        )


def open_environment(config: Config, parts: Parts) -> Environment | None:
    """Open the environment of a run: tools, a function that replies, or a class."""
    chosen = config.environment
    if not chosen.names:
        return None
    fn, name = parts.environment, chosen.kind or chosen.reply
    if name and (fn is None or isinstance(fn, str)):
        fn = open_adapter(name, config) if is_adapter(name) else load_object(name)
    if chosen.kind and not is_class(fn):
        fn = EnvironmentClass(fn)
    named = chosen.tools if parts.tools is None else parts.tools
    tools = [load_object(tool) if isinstance(tool, str) else tool for tool in named]
    return Environment(
        fn,
        tools=tools,
        turns=chosen.turns,
        max_reply_tokens=chosen.max_reply_tokens,
        timeout_s=chosen.timeout_s,
    )


def adamw(policy: Policy, critic: Critic | None, config: Config) -> torch.optim.AdamW:
    """Return AdamW over the policy's parameter groups, then the critic's with a learning rate of
    its own."""
    own = trained(policy.module, None)
    groups: list[dict[str, Any]] = [
        {
            "params": [own[name] for name in group.names],
            "is_critic": False,
            "lr_factor": group.lr_factor,
            "norm": group.norm,
        }
        for group in policy.modality.parameter_groups(config, policy)
    ]
    # The critic's parameters follow the policy's, as in Run.parameters. A head on the policy's
    # trunk is clipped with it, a network of its own apart.
    if critic is not None:
        params = [p for p in critic.module.parameters() if p.requires_grad]
        norm = "norm" if critic.is_shared else "critic_norm"
        groups.append({"params": params, "is_critic": True, "lr_factor": 1.0, "norm": norm})
    # sharded and whole parameters apart, since AdamW steps over all of a group at once
    split = []
    for group in groups:
        for is_sharded in (True, False):
            params = [p for p in group["params"] if sharding.is_sharded(p) == is_sharded]
            if params:
                split.append(group | {"params": params})
    optim = config.optim
    return torch.optim.AdamW(
        split,
        lr=optim.lr,
        fused=True,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )


def name_of(part: Any) -> str:
    """Return what the config holds of a part: a name, a path, or file.py:function of a function
    that can be loaded."""
    if isinstance(part, str | os.PathLike):
        return str(part)
    module = sys.modules.get(getattr(part, "__module__", None) or "")
    name = getattr(part, "__qualname__", "")
    # a lambda, a method or a function inside another one is not what its name loads
    if module is None or vars(module).get(name) is not part or not name.isidentifier():
        return IN_MEMORY
    if module.__name__ != "__main__" and "." in module.__name__:
        return f"{module.__name__}:{name}"
    file = Path(getattr(module, "__file__", None) or "")
    return f"{file.resolve()}:{name}" if file.is_file() else IN_MEMORY
