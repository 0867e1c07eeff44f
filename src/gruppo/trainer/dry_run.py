"""Description of a run for ``gruppo explain``; nothing is trained."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from gruppo.config.checks import group_sizes
from gruppo.config.schema import Config
from gruppo.config.stages import highest, learns_from_samples, stage_path
from gruppo.core.describe import describe_objective, objective_warnings
from gruppo.distributed.memory import WeightCounts, state_bytes
from gruppo.errors import as_flag
from gruppo.loading import counted
from gruppo.protocols import AdapterMixin, PromptMixin, peek
from gruppo.protocols import part as part_of
from gruppo.trainer.checks import has_reference
from gruppo.trainer.collect import max_group_size
from gruppo.trainer.demonstrations import take_demonstrations
from gruppo.trainer.forward import budget_for
from gruppo.trainer.run import Run
from gruppo.types import Request

GIB = 2**30
ASSUMED_GPU_BYTES, RESERVED_BYTES = 80 * GIB, 3 * GIB
"""Memory of a GPU if there is none; and for two CUDA contexts, fragments, and what a sleeping
server keeps."""
PROMPTS_READ = 32
"""Prompts whose lengths are measured."""


def explain(run: Run, config: Config) -> list[str]:
    """Describe the objective, the work and memory of a step, and one prompt with its
    reward.

    ``config``: of the run, which itself needs no servers.
    """
    sections = {
        "OBJECTIVE": _objective(run),
        "WORK": _work(run),
        "MEMORY": _memory(run, config),
        "ONE REAL PROMPT": _example(run),
        "ONE REAL DEMONSTRATION": _demonstration(run),
    }
    lines = []
    for title, section in sections.items():
        if section:
            lines += [title, *(f"  {line}" for line in section), ""]
    return lines[:-1]


def _objective(run: Run) -> list[str]:
    config = run.config
    if not learns_from_samples(config):
        return []
    kl_coef = highest(config, "kl_coef")
    lines = describe_objective(
        config.objective,
        kl_coef=kl_coef,
        group_size=max(group_sizes(config)),
        max_length=run.sampling.max_actions,
        action=run.display.action_name,
    )
    epochs = counted(config.optim.epochs, "epoch")
    minibatches = counted(config.optim.minibatches, "minibatch", "minibatches")
    lines.append(f"updates     {config.updates_per_batch} per step: {epochs} of {minibatches}")
    notes = objective_warnings(
        config.objective,
        kl_coef=kl_coef,
        updates_per_batch=config.updates_per_batch,
        truncates=config.rollout.top_k > 0 or config.rollout.top_p < 1,
    )
    lines += [f"note        {note}" for note in notes]
    # options that work but may not be intended
    if config.reference.is_mixed and has_reference(config, run.policy.modality):
        lines.append(
            "note        the reference follows the policy: the KL slows it down, and is no anchor "
            "to where it began"
        )
    return lines


def _work(run: Run) -> list[str]:
    config = run.config
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
    base = part_of(run.policy, AdapterMixin).frozen_base()
    if base:
        trained = WeightCounts.of(run.policy.module).trained
        frozen = sum(map(torch.numel, base.values()))
        lines.append(f"adapter     {trained:,} trained weights on a frozen base of {frozen:,}")
    if run.reference is not None:
        lines.append(f"reference   {_reference(run, has_base=bool(base))}")
    if run.environment is not None:
        lines.append(
            f"environment {run.environment.name}: up to {config.environment.turns} answers per "
            f"row, with replies that are not learned from"
        )
    updates = config.steps * config.updates_per_batch
    lines.append(f"steps       {config.steps}, optimizer steps {updates}")
    return lines


def _reference(run: Run, *, has_base: bool) -> str:
    """What the KL is measured to, and where it is kept."""
    chosen = run.config.reference
    if chosen.is_mixed:
        source = "a second adapter" if has_base else "a copy"
        rate = chosen.update_rate
        source += f" that follows the policy: {rate:g} policy + {1 - rate:g} reference "
        source += f"after every {chosen.update_every} steps"
    else:
        source = "the base, with the adapter off" if has_base else "a copy of the first weights"
    if has_base:
        return source
    return f"{source}, on {'the device' if chosen.place == 'device' else 'the CPU'}"


# --- memory ---------------------------------------------------------------------------------------


def _memory(run: Run, config: Config) -> list[str]:
    """Bytes at the peak of a step in one process, by part. From the model's shape: nothing has been
    measured."""
    prompts = peek(run.source, PROMPTS_READ)
    budget = budget_for(run, run.memory.longest_prompt(prompts))
    held = held_bytes(run)
    rollout = run.config.rollout
    largest = max_group_size(rollout, max(group_sizes(run.config)))
    parts = held | dict(run.memory.memory_estimate(run.config, prompts, budget, largest))
    # A critic's activations are made after the policy's are gone: those of a larger network need
    # the difference more.
    if run.critic is not None and run.critic.bytes_per_unit() > run.memory.bytes_per_unit():
        more = run.critic.bytes_per_unit() - run.memory.bytes_per_unit()
        parts["critic's activations"] = more * budget
    if config.engine.urls:
        parts.pop("cache while sampling", None)
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total > GIB / 2 else (2**20, "MiB")
    lines = [f"an estimate with micro-batches of {budget:,} {run.memory.budget_name}"]
    rows = {**parts, "total": total}
    lines += [f"{part:<24} {size / unit:6.2f} {name}" for part, size in rows.items()]
    if config.engine.colocated:
        kept = sum(size for part, size in held.items() if not part.startswith("gradients"))
        weights = run.policy.compute_dtype.itemsize * WeightCounts.of(run.policy.module).total
        lines += _split(kept, total, weights)
    return lines


def held_bytes(run: Run) -> dict[str, float]:
    """Bytes that a process holds between steps, by part, with the gradients."""
    policy = run.policy
    width = policy.compute_dtype.itemsize
    counts = WeightCounts.of(policy.module)
    base = part_of(policy, AdapterMixin).frozen_base()
    parts = state_bytes(
        counts,
        shards=1,
        base_bytes=float(sum(tensor.nbytes for tensor in base.values())),
        critic_trained=sum(p.numel() for p in run.parameters) - counts.trained,
    )
    if policy.compute_module is not policy.module:
        own = counts.trained if base else counts.total
        parts[f"compute copy, {run.config.compute}"] = float(width * own)
    for network in (run.reference, run.critic):
        if network is not None:
            parts |= network.memory_estimate(width)
    return parts | {f"reward {name}": size for name, size in run.rewards.memory_bytes.items()}


def _split(kept: float, peak: float, weights: float) -> list[str]:
    """How a trainer and a server share one GPU: ``kept`` and ``peak`` are the trainer's bytes while
    the server samples, and while it sleeps."""
    device = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else ASSUMED_GPU_BYTES
    free = device - kept - RESERVED_BYTES
    lines = [
        f"one GPU of {device / GIB:.1f} GiB: trainer {kept / GIB:.2f} GiB while the server "
        f"samples, {peak / GIB:.2f} while it sleeps; weights of the server {weights / GIB:.2f}"
    ]
    if free <= 1.2 * weights or peak + RESERVED_BYTES > device:
        return [*lines, "This does not fit. Use a GPU for each, shard the trainer, or train LoRA."]
    share = math.floor(100 * free / device) / 100
    return [*lines, f"gruppo serve MODEL -- --enable-sleep-mode --gpu-memory-utilization {share}"]


# --- an example -----------------------------------------------------------------------------------


def _example(run: Run) -> list[str]:
    prompt = run.source.take(1)[0]
    lines = [f"prompt      {shown(prompt.inputs)}"]
    if (encoded := part_of(run.policy, PromptMixin).format_prompt(prompt)) is not None:
        lines.append(f"as tokens   {encoded}")
    lines.append(f"target      {shown(prompt.target)}")
    if not run.rewards.names:
        return lines
    rollouts = run.engine.generate([Request(prompt, 1)], run.sampling, seed=run.config.seed)
    scores = run.rewards.score(rollouts, run.trainer_state)
    sample, length = shown(run.display.render(rollouts, 0)), int(rollouts.mask[0].sum())
    ending = f"{length} {run.display.action_name}s, ended by {rollouts.finish[0]}"
    lines.append(f"completion  {sample}  ({ending})")
    for name, part in scores.parts.items():
        lines.append(f"reward      {name}(...) = {float(part[0]):g}")
    return lines + [f"failed      {f.reward}: {f.kind}: {f.message}" for f in scores.failures]


def _demonstration(run: Run) -> list[str]:
    if run.demos is None:
        return []
    prompt = take_demonstrations(run)[0][0]
    target = part_of(run.policy, PromptMixin).format_prompt(prompt, is_target=True)
    inputs = f"prompt      {shown(prompt.inputs)}"
    return [inputs, f"target      {target or shown(prompt.target)}"]


def shown(value: Any) -> str:
    """A value in one line: the shape and range of a tensor, else its repr."""
    if isinstance(value, torch.Tensor) and value.numel():
        return f"{list(value.shape)}, from {float(value.min()):.3g} to {float(value.max()):.3g}"
    return repr(value)
