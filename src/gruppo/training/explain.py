"""What a run would do, in words; nothing is trained."""

from __future__ import annotations

from typing import Any

import torch

from gruppo.core.objective import describe
from gruppo.training import config as configs
from gruppo.training.build import Parts, build
from gruppo.training.config import Config
from gruppo.training.run import Run
from gruppo.types import Request


def explain(config: Config) -> list[str]:
    """The effective objective, tokens per step, a memory estimate, and one real prompt, completion and reward."""
    configs.check(config)
    run, _ = build(config, Parts())
    return [*_objective(config), "", *_work(run), "", *_memory(run), "", *_example(run)]


def _objective(config: Config) -> list[str]:
    rollout, optim = config.rollout, config.optim
    lines = describe(
        config.objective,
        kl_coef=config.stage.kl_coef,
        group_size=rollout.group_size,
        max_length=rollout.max_new_tokens,
    )
    if config.updates_per_batch == 1:
        lines.append("updates     1 a step: on-policy, the ratio is 1 and the clip rests")
    else:
        lines.append(
            f"updates     {config.updates_per_batch} a step: {optim.epochs} epochs of {optim.minibatches} minibatches"
        )
    return ["OBJECTIVE", *(f"  {line}" for line in lines)]


def _work(run: Run) -> list[str]:
    rollout = run.config.rollout
    rows = rollout.prompts * rollout.group_size
    prompts = [_ids(run, prompt) for prompt in run.source.take(32)]
    mean = sum(map(len, prompts)) / len(prompts)
    trained = rollout.prompts * mean + rows * rollout.max_new_tokens
    if not run.policy.backbone.packs:
        trained = rows * (mean + rollout.max_new_tokens)
    return [
        "WORK",
        f"  a step      {rollout.prompts} prompts x {rollout.group_size} samples = {rows} rows",
        f"  prompts     {mean:.0f} tokens on average, {max(map(len, prompts))} at most (of 32)",
        f"  sampled     at most {rows * rollout.max_new_tokens:,} tokens a step, {rollout.max_new_tokens} a row",
        f"  trained on  at most {trained:,.0f} tokens an epoch"
        + (", a group's prompt once" if run.policy.backbone.packs else ", the prompt with every row"),
        f"  steps       {run.config.steps}, optimiser steps {run.config.steps * run.config.updates_per_batch}",
    ]


def _memory(run: Run) -> list[str]:
    numbers = sum(p.numel() for p in run.policy.module.parameters())
    trained = sum(p.numel() for p in run.parameters)
    width = 2 if run.policy.compute_dtype == torch.bfloat16 else 4
    parts: dict[str, Any] = {
        "weights, float32": 4 * numbers,
        "gradients, float32": 4 * trained,
        "AdamW state, float32": 8 * trained,
    }
    if run.policy.copy is not None:
        parts[f"compute copy, {run.config.compute}"] = width * numbers
    if run.reference is not None:
        parts["reference"] = width * numbers
    total = sum(parts.values())
    return [
        "MEMORY",
        *(f"  {name:<24} {size / 2**30:6.2f} GiB" for name, size in parts.items()),
        f"  {'together':<24} {total / 2**30:6.2f} GiB, and activations of at most "
        f"{run.config.optim.token_budget:,} tokens",
    ]


def _example(run: Run) -> list[str]:
    prompt = run.source.take(1)[0]
    rollouts = run.engine.generate([Request(prompt, 1)], run.config.rollout.sampling, seed=run.config.seed)
    scores = run.rewards.score(rollouts, step=0, max_steps=run.config.steps)
    lines = [
        "ONE REAL PROMPT",
        f"  prompt      {prompt.inputs!r}",
        f"  as tokens   {run.policy.chat.text_with_specials(_ids(run, prompt))!r}",
        f"  completion  {rollouts.outputs[0]!r}  ({int(rollouts.lengths[0])} tokens, ended by {rollouts.finish[0]})",
        f"  target      {prompt.target!r}",
    ]
    lines += [
        f"  reward      {name}(prompts=[...], completions=[...], ...) = {float(part[0]):g}"
        for name, part in scores.parts.items()
    ]
    lines += [f"  failed      {f.reward}: {f.kind}: {f.message}" for f in scores.failures]
    return lines


def _ids(run: Run, prompt: Any) -> list[int]:
    return run.policy.chat.encode(prompt.inputs)
