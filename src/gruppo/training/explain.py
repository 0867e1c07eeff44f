"""What a run would do, in words; nothing is trained."""

from __future__ import annotations

from typing import Any

import torch

from gruppo.core.describe import cautions, describe
from gruppo.core.linear_head import tile_bytes
from gruppo.policies.critic import SeparateCritic
from gruppo.policies.text.policy import BATCH_ROWS
from gruppo.training import checks
from gruppo.training.build import Parts, build, require_named
from gruppo.training.config import Config
from gruppo.training.memory import activations, key_numbers, token_budget
from gruppo.training.run import Run
from gruppo.types import Request


def explain(config: Config) -> list[str]:
    """The effective objective, tokens per step, a memory estimate, and one real prompt, completion and reward."""
    checks.check(config)
    require_named(config, Parts())
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
    passes = f"{optim.epochs} epochs of {optim.minibatches} minibatches"
    stop = f", fewer where the KL to the old policy exceeds {optim.stop_kl:g}" if optim.stop_kl else ""
    lines.append(f"updates     {config.updates_per_batch} a step: {passes}{stop}")
    if rollout.refill_rounds:
        lines.append(f"refilled    groups without spread, by up to {rollout.refill_rounds} further rounds of prompts")
    said = cautions(
        config.objective,
        kl_coef=config.stage.kl_coef,
        updates_per_batch=config.updates_per_batch,
        truncates=rollout.top_k > 0 or rollout.top_p < 1,
    )
    lines += [f"note        {caution}" for caution in said]
    return ["OBJECTIVE", *(f"  {line}" for line in lines)]


def _work(run: Run) -> list[str]:
    rollout = run.config.rollout
    rows = rollout.prompts * rollout.group_size
    prompts = [_ids(run, prompt) for prompt in run.source.take(32)]
    mean = sum(map(len, prompts)) / len(prompts)
    trained = rollout.prompts * mean + rows * rollout.max_new_tokens
    if run.policy.backbone.layout == "padded":
        trained = rows * (mean + rollout.max_new_tokens)
    return [
        "WORK",
        f"  a step      {rollout.prompts} prompts x {rollout.group_size} samples = {rows} rows",
        f"  prompts     {mean:.0f} tokens on average, {max(map(len, prompts))} at most (of 32)",
        f"  sampled     at most {rows * rollout.max_new_tokens:,} tokens a step, {rollout.max_new_tokens} a row",
        f"  trained on  at most {trained:,.0f} tokens an epoch"
        + (", a group's prompt once" if run.policy.backbone.layout != "padded" else ", the prompt with every row"),
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
    parts |= critic_memory(run, width) | working_memory(run, width)
    total = sum(parts.values())
    return [
        f"MEMORY, an estimate at {token_budget(run):,} tokens a piece",
        *(f"  {name:<24} {size / 2**30:6.2f} GiB" for name, size in parts.items()),
        f"  {'together':<24} {total / 2**30:6.2f} GiB",
    ]


def critic_memory(run: Run, width: int) -> dict[str, float]:
    """Bytes of the critic's weights and of a separate one's copy; gradients and AdamW state are counted with all.

    Its activations are made after the policy's are gone: those of a larger network need the difference more.
    """
    if run.critic is None:
        return {}
    weights: dict[str, float] = {"critic, float32": 4 * sum(p.numel() for p in run.critic.module.parameters())}
    if not isinstance(run.critic, SeparateCritic):
        return weights
    if (copied := run.critic.compute_copy) is not None:
        weights[f"critic's copy, {run.config.compute}"] = width * sum(p.numel() for p in copied.parameters())
    trunk: Any = run.critic.trunk
    own, policys = (
        activations(module.config, token_budget(run), width, run.policy.backbone.layout)
        for module in (trunk, run.policy.module)
    )
    return weights | ({"critic's activations": own - policys} if own > policys else {})


def working_memory(run: Run, width: int) -> dict[str, float]:
    """Bytes of one forward and backward over T tokens, the run's budget, and of the cache of B rows of L tokens.

    Cache 2 B L layers K width, K numbers of a key. Attention scores are not counted.
    """
    model = run.policy.module.config.get_text_config()
    tokens, rollout = token_budget(run), run.config.rollout
    longest = max(len(_ids(run, prompt)) for prompt in run.source.take(32)) + rollout.max_new_tokens
    rows = max(min(BATCH_ROWS, rollout.prompts * rollout.group_size), rollout.group_size)
    return {
        "activations": activations(model, tokens, width, run.policy.backbone.layout),
        "logits": logits_memory(run, tokens, width),
        "cache while sampling": width * 2 * rows * longest * model.num_hidden_layers * key_numbers(model),
    }


def logits_memory(run: Run, tokens: int, width: int) -> int:
    """Bytes of tiles where the head is linear; else of a chunk in float32, three times: raw, tempered, gradient."""
    vocabulary, rollout = run.policy.module.config.get_text_config().vocab_size, run.config.rollout
    if isinstance(run.policy.backbone.head, torch.nn.Linear) and rollout.top_k == 0 and rollout.top_p == 1:
        return tile_bytes(tokens, vocabulary, width, run.policy.device)
    return 3 * 4 * min(run.policy.chunk, tokens) * vocabulary


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
