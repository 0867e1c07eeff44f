"""Description of a run for ``gruppo explain``; nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gruppo.config.checks import group_sizes
from gruppo.config.schema import Config, EnvironmentConfig, Stage
from gruppo.config.stages import SCHEDULED, highest, learns_from_samples, stage_path
from gruppo.core.describe import describe_objective, objective_warnings
from gruppo.distributed.memory import WeightCounts, gathered_bytes, state_bytes
from gruppo.errors import as_flag
from gruppo.loading import counted
from gruppo.protocols import AdapterMixin, PromptMixin, peek
from gruppo.protocols import part as part_of
from gruppo.trainer import dynamic_sampling, references
from gruppo.trainer.demonstrations import take_demonstrations
from gruppo.trainer.memory import budget_for
from gruppo.trainer.run import Run
from gruppo.types import Request

GPUS_PER_MACHINE = 8
"""Over which --distributed.shard hybrid shards."""
ASSUMED_GPU_BYTES, RESERVED_BYTES = 80 * 2**30, 3 * 2**30
"""Memory of a GPU where there is none; and for two CUDA contexts, fragments, and what a sleeping
server keeps."""
PROMPTS_READ = 32
"""Prompts whose lengths are measured."""


def explain(
    run: Run, *, gpus: int = 1, samples_here: bool = True, is_colocated: bool = False
) -> list[str]:
    """Describe the objective, the stages, the work and memory of a step, and one prompt with its
    reward.

    ``gpus``: the number of ranks, for an estimate of the memory of each. ``samples_here``: with the
    model itself, not on servers; ``is_colocated``: on servers that share its GPU.
    """
    memory = _memory(run, gpus, samples_here, is_colocated)
    return [*_objective(run), *_stages(run.config), *_work(run), "", *memory, "", *_example(run)]


def _objective(run: Run) -> list[str]:
    config, rollout, optim = run.config, run.config.rollout, run.config.optim
    if not learns_from_samples(config):
        return []
    kl_coef, group_size = highest(config, "kl_coef"), max(group_sizes(config))
    limits: dict[str, Any] = {
        "max_length": run.sampling.max_actions,
        "action": run.display.action_name,
    }
    lines = describe_objective(config.objective, kl_coef=kl_coef, group_size=group_size, **limits)
    passes = (
        f"{counted(optim.epochs, 'epoch')} of "
        f"{counted(optim.minibatches, 'minibatch', 'minibatches')}"
    )
    stop = (
        f", fewer where the KL to the old policy exceeds {optim.stop_kl:g}" if optim.stop_kl else ""
    )
    lines.append(f"updates     {config.updates_per_batch} per step: {passes}{stop}")
    if rollout.refill_rounds:
        lines.append(
            f"resampling  groups without spread, by up to {rollout.refill_rounds} further rounds "
            f"of prompts"
        )
    if rollout.first_samples:
        largest = dynamic_sampling.max_group_size(rollout, group_size)
        lines.append(
            f"growth      groups with spread in {rollout.first_samples} first samples, to "
            f"{largest} at most"
        )
    truncates, updates = rollout.top_k > 0 or rollout.top_p < 1, config.updates_per_batch
    notes = [
        *objective_warnings(
            config.objective, kl_coef=kl_coef, updates_per_batch=updates, truncates=truncates
        )
    ]
    # options that work but may not be intended
    if references.has_reference(config, run.policy.modality):
        if config.reference.is_mixed:
            notes += [
                "the reference follows the policy: the KL slows it down, and is no anchor to where "
                "it began"
            ]
        elif config.lora.adapter:
            base = "the base without the adapter that training begins with"
            notes += [f"the reference is {base}: the KL does not begin at 0"]
    lines += [f"note        {note}" for note in notes]
    return ["OBJECTIVE", *(f"  {line}" for line in lines), ""]


def _stages(config: Config) -> list[str]:
    """The stages and the values that each sets; nothing for a single stage of constants."""
    if len(config.plan) == 1 and not any(
        isinstance(getattr(config.stage, name), str) for name in SCHEDULED
    ):
        return []
    lines = ["STAGES"]
    for index, stage in enumerate(config.plan):
        steps = counted(stage.steps, "step") if stage.steps else "to the end"
        until = f", or until {stage.until}" if stage.until else ""
        names = (*SCHEDULED, "warmup_steps", "new_reference")
        changed = [name for name in names if getattr(stage, name) != getattr(Stage(), name)]
        values = {name: getattr(stage, name) for name in dict.fromkeys(["rl_coef", *changed])}
        texts = {
            name: value if isinstance(value, str) else f"{value:g}"
            for name, value in values.items()
        }
        sets = ", ".join(
            name if name == "new_reference" else f"{name}={text}" for name, text in texts.items()
        )
        nothing = (
            "" if learns_from_samples(replace(config, stages=(stage,))) else "; samples nothing"
        )
        where = as_flag(stage_path(config, index))
        lines.append(
            f"  {where:<11} {stage.name or '(no name)':<12}{steps}{until}: {sets}{nothing}"
        )
    return [*lines, ""]


def _work(run: Run) -> list[str]:
    config, policy = run.config, run.policy
    size = max(group_sizes(config))
    prompts = config.rollout.prompts
    lines = []
    if learns_from_samples(config):
        lines.append(f"a step      {prompts} prompts x {size} samples = {prompts * size} rows")
    lines += run.display.describe(config, run.sampling, peek(run.source, PROMPTS_READ), size)
    if run.demos is not None:
        stages = [
            as_flag(stage_path(config, number))
            for number, stage in enumerate(config.plan)
            if highest(replace(config, stages=(stage,)), "sup_coef") > 0
        ]
        batch = config.supervised.batch
        lines.append(f"supervised  {batch} demonstrations per step, in {', '.join(stages)}")
    if base := part_of(policy, AdapterMixin).frozen_base():
        trained = sum(p.numel() for p in policy.module.parameters() if p.requires_grad)
        frozen = sum(map(torch.numel, base.values()))
        lines.append(f"adapter     {trained:,} trained weights on a frozen base of {frozen:,}")
    if run.reference is not None:
        lines.append(f"reference   {_reference(run)}")
    if run.environment is not None:
        lines += _environment(run.environment, config.environment)
    if (back_off := config.back_off).metric:
        fall = f"{back_off.metric} falls more than {back_off.drop:g} below its best"
        back = "return to the best weights, with half of the learning rate"
        lines.append(f"back off    where {fall}: {back}")
    updates = config.steps * config.updates_per_batch
    lines.append(f"steps       {config.steps}, optimizer steps {updates}")
    return ["WORK", *(f"  {line}" for line in lines)]


def _reference(run: Run) -> str:
    """What the KL is measured to, and where it is kept."""
    chosen = run.config.reference
    has_base = bool(part_of(run.policy, AdapterMixin).frozen_base())
    if chosen.is_mixed:
        source = "a second adapter" if has_base else "a copy"
        rate = chosen.update_rate
        source += f" that follows the policy: {rate:g} policy + {1 - rate:g} reference "
        source += f"after every {chosen.update_every} steps"
    else:
        source = "the base, with the adapter off" if has_base else "a copy of the first weights"
        names = zip(run.stage_schedule.names, run.config.plan, strict=True)
        if renewed := [name for name, stage in names if stage.new_reference]:
            source += f", renewed as {' and '.join(renewed)} begins"
    if has_base:
        return source
    return f"{source}, on {'the device' if chosen.place == 'device' else 'the CPU'}"


def _environment(environment: Any, chosen: EnvironmentConfig) -> list[str]:
    lines = []
    if names := [schema["function"]["name"] for schema in environment.tools]:
        lines.append(
            f"tools       {', '.join(names)}: in each prompt, as the chat template writes them"
        )
    turns = f"up to {chosen.turns} answers per row"
    replies = (
        f"replies of up to {chosen.max_reply_tokens} tokens, which are read and not learned from"
    )
    return [*lines, f"environment {environment.name}: {turns}, {replies}"]


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of one rank."""

    parts: dict[str, float]
    """On the device, at the peak of a step."""
    kept: float
    """On the device between steps, without gradients."""
    on_cpu: float
    """Of shards that are offloaded."""
    opened: float
    """On the CPU while the model is opened, before it is sharded; 0 without shards."""
    budget: int
    """Units of a micro-batch."""


def memory_estimate(run: Run, *, gpus: int = 1, samples_here: bool = True) -> Memory:
    """Estimate a rank's weights, gradients, optimizer state, and a step as the policy estimates it.

    From the model's shape: nothing has been measured, and memory has not run out yet.
    """
    config, policy = run.config, run.policy
    shards = gpus if config.distributed.shard != "none" else 1
    if config.distributed.shard == "hybrid":
        shards = min(gpus, GPUS_PER_MACHINE)
    width = 2 if policy.compute_dtype == torch.bfloat16 else 4
    counts = WeightCounts.of(policy.module)
    state = _state(run, counts, shards, width)
    rewards = run.rewards.memory_bytes
    is_offloaded = config.distributed.offload_params and shards > 1
    on_device = {} if is_offloaded else state
    kept = sum(size for name, size in on_device.items() if not name.startswith("gradients"))
    block_bytes = (
        1 if part_of(policy, AdapterMixin).frozen_base() and config.lora.load_in_4bit else 0
    )
    gathered = gathered_bytes(counts, shards=shards, compute_bytes=width, block_bytes=block_bytes)
    parts = {**on_device, **gathered}
    base_bytes = sum(t.nbytes for t in part_of(policy, AdapterMixin).frozen_base().values())
    own = counts.trained if base_bytes else counts.total
    if shards > 1 and samples_here:
        parts["whole weights to sample"] = base_bytes + width * own
    parts |= {f"reward {name}": size for name, size in rewards.items()}
    prompts = peek(run.source, PROMPTS_READ)
    budget = budget_for(run, run.memory.longest_prompt(prompts))
    parts |= _step(run, prompts, budget, gpus, samples_here)
    opened = 0.0
    if shards > 1:
        opened = base_bytes + 4 * own
        if run.reference is not None:
            opened += sum(run.reference.memory_estimate(width).values())
    on_cpu = sum(state.values()) if is_offloaded else 0.0
    return Memory(parts, kept + sum(rewards.values()), on_cpu, opened, budget)


def _state(run: Run, counts: WeightCounts, shards: int, width: int) -> dict[str, float]:
    """What a rank holds between steps: the policy, its reference and critic, and AdamW's state."""
    config, policy, base = run.config, run.policy, part_of(run.policy, AdapterMixin).frozen_base()
    critic_trained = sum(p.numel() for p in run.parameters) - counts.trained
    base_bytes = float(sum(t.nbytes for t in base.values()))
    parts = state_bytes(counts, shards=shards, base_bytes=base_bytes, critic_trained=critic_trained)
    if base:
        kind = "4 bits" if config.lora.load_in_4bit else config.compute
        parts = {f"base, {kind}": parts.pop("base"), **parts}
    # sharded weights are cast as they are gathered
    if policy.compute_module is not policy.module and shards == 1:
        own = counts.trained if base else counts.total
        parts[f"compute copy, {config.compute}"] = float(width * own)
    for network in (run.reference, run.critic):
        if network is not None:
            parts |= {name: size / shards for name, size in network.memory_estimate(width).items()}
    return parts


def _step(
    run: Run, prompts: Sequence[Any], budget: int, gpus: int, samples_here: bool
) -> dict[str, float]:
    """Activations, logits and the cache of a step."""
    rollout = run.config.rollout
    largest = dynamic_sampling.max_group_size(rollout, max(group_sizes(run.config)))
    parts = dict(run.memory.memory_estimate(run.config, prompts, budget, largest))
    # A critic's activations are made after the policy's are gone: those of a larger network need
    # the difference more.
    if run.critic is not None and run.critic.bytes_per_unit() > run.memory.bytes_per_unit():
        more = run.critic.bytes_per_unit() - run.memory.bytes_per_unit()
        parts = {"critic's activations": more * budget, **parts}
    cache = parts.pop("cache while sampling", None)
    if cache is not None and samples_here:  # each rank samples its share of the prompts, rounded up
        parts["cache while sampling"] = cache * math.ceil(rollout.prompts / gpus) / rollout.prompts
    return parts


def _memory(run: Run, gpus: int, samples_here: bool, is_colocated: bool) -> list[str]:
    memory = memory_estimate(run, gpus=gpus, samples_here=samples_here)
    total = sum(memory.parts.values())
    rows = {**memory.parts, "total": total}
    if memory.on_cpu:
        rows["of the CPU, shards"] = memory.on_cpu
    if memory.opened:  # each rank opens the whole model before it keeps its shards
        rows["of the CPU, at the start"] = memory.opened
    unit, name = (2**30, "GiB") if total > 2**29 else (2**20, "MiB")
    ranks = f" of each of {gpus} GPUs" if gpus > 1 else ""
    batches = f"micro-batches of {memory.budget:,} {run.memory.budget_name}"
    lines = [f"MEMORY{ranks}, an estimate with {batches}"]
    lines += [f"  {part:<24} {size / unit:6.2f} {name}" for part, size in rows.items()]
    if is_colocated:
        width = 2 if run.policy.compute_dtype == torch.bfloat16 else 4
        weights = width * WeightCounts.of(run.policy.module).total
        lines += _split(memory.kept, total, weights)
    return lines


def _split(kept: float, peak: float, weights: float) -> list[str]:
    """How a trainer and a server share one GPU: ``kept`` and ``peak`` are the trainer's bytes while
    the server samples, and while it sleeps."""
    has_gpu = torch.cuda.is_available()
    device = torch.cuda.mem_get_info()[1] if has_gpu else ASSUMED_GPU_BYTES
    share = (device - kept - RESERVED_BYTES) / device
    gib, fits = 2**30, share * device > 1.2 * weights and peak + RESERVED_BYTES <= device
    command = (
        f"gruppo serve MODEL -- --enable-sleep-mode --gpu-memory-utilization "
        f"{math.floor(100 * share) / 100:.2f}"
    )
    no_room = (
        "This does not fit. Use a GPU for each, shard the trainer, or train an adapter with "
        "--lora.rank."
    )
    return [
        "",
        f"ONE GPU FOR TRAINER AND SERVER, {device / gib:.1f} "
        f"GiB{'' if has_gpu else ' (there is none here)'}",
        f"  while the server samples  trainer {kept / gib:.2f} GiB, server "
        f"{share * device / gib:.2f} GiB, "
        f"{weights / gib:.2f} of it weights",
        f"  while the trainer updates trainer {peak / gib:.2f} GiB, server asleep",
        f"  reserved for both         {RESERVED_BYTES / gib:.2f} GiB",
        f"  {command if fits else no_room}",
    ]


def _example(run: Run) -> list[str]:
    prompt = run.source.take(1)[0]
    lines = ["ONE REAL PROMPT", f"  prompt      {shown(prompt.inputs)}"]
    if (encoded := part_of(run.policy, PromptMixin).format_prompt(prompt)) is not None:
        lines.append(f"  as tokens   {encoded}")
    scores = None
    if run.rewards.names:
        rollouts = run.engine.generate([Request(prompt, 1)], run.sampling, seed=run.config.seed)
        scores = run.rewards.score(rollouts, run.trainer_state)
        sample, length = shown(run.display.render(rollouts, 0)), int(rollouts.mask[0].sum())
        ending = f"{length} {run.display.action_name}s, ended by {rollouts.finish[0]}"
        lines.append(f"  completion  {sample}  ({ending})")
    lines.append(f"  target      {shown(prompt.target)}")
    if prompt.meta and not isinstance(prompt.inputs, str | list | tuple):
        columns = ", ".join(f"{name} {shown(value)}" for name, value in prompt.meta.items())
        lines.append(f"  columns     {columns}")
    if scores is not None:
        kind = "images" if run.display.renders_images else "completions"
        for name, part in scores.parts.items():
            lines.append(
                f"  reward      {name}(prompts=[...], {kind}=[...], ...) = {float(part[0]):g}"
            )
        lines += [f"  failed      {f.reward}: {f.kind}: {f.message}" for f in scores.failures]
    return lines if run.demos is None else [*lines, *_demonstration(run)]


def _demonstration(run: Run) -> list[str]:
    prompt = take_demonstrations(run)[0][0]
    target = part_of(run.policy, PromptMixin).format_prompt(prompt, is_target=True) or shown(
        prompt.target
    )
    inputs = f"  prompt      {shown(prompt.inputs)}"
    return ["", "ONE REAL DEMONSTRATION", inputs, f"  target      {target}"]


def shown(value: Any) -> str:
    """A value in one line: the shape and range of a tensor, else its repr."""
    if isinstance(value, torch.Tensor) and value.numel():
        return f"{list(value.shape)}, from {float(value.min()):.3g} to {float(value.max()):.3g}"
    return repr(value)
