"""What a run would do, in words; nothing is trained."""

from __future__ import annotations

from typing import Any

import torch

from gruppo.build import Parts, build, require_named
from gruppo.config.checks import group_sizes
from gruppo.config.options import flag
from gruppo.config.schema import Config, Stage
from gruppo.config.stages import SCHEDULED, highest, learns_from_samples, where_of
from gruppo.core.describe import describe_objective, objective_warnings
from gruppo.core.linear_head import tile_bytes
from gruppo.core.schedules import parse_schedule
from gruppo.environments import completion_lengths
from gruppo.modalities.common.critic import SeparateCritic
from gruppo.modalities.common.lora import POLICY, base_weights, has_adapter
from gruppo.modalities.text.backbones import PlainBackbone
from gruppo.modalities.text.policy import BATCH_ROWS
from gruppo.trainer import checks, dry_run_images, dry_run_modules, growth, references
from gruppo.trainer.demonstrations import drawn
from gruppo.trainer.memory import activations, budget_for, key_numbers
from gruppo.trainer.models import kind_of
from gruppo.trainer.run import Run
from gruppo.types import Request


def explain(config: Config) -> list[str]:
    """The effective objective, tokens per step, a memory estimate, and one real prompt, completion and reward."""
    checks.check(config, kind_of(config))
    require_named(config, Parts())
    run, _ = build(config, Parts())
    said = [*_objective(run), ""] if learns_from_samples(config) else []
    said += _plan(config)
    if not run.is_gaussian:
        return [*said, *_work(run), "", *_memory(run), "", *_example(run)]
    parts = [*dry_run_images.work(run), *_beside(run), "", *dry_run_images.memory(run), ""]
    example = dry_run_images.example(run)
    return [*said, *parts, *example, *([] if run.restores else ["", *dry_run_images.ddpo_names(run)])]


def _objective(run: Run) -> list[str]:
    config = run.config
    rollout, optim = config.rollout, config.optim
    lines = describe_objective(
        config.objective,
        kl_coef=highest(config, "kl_coef"),
        group_size=max(group_sizes(config)),
        max_length=run.sampling.max_actions,
        action="action" if run.restores else "step" if run.is_gaussian else "token",
    )
    passes = f"{optim.epochs} epochs of {optim.minibatches} minibatches"
    stop = f", fewer where the KL to the old policy exceeds {optim.stop_kl:g}" if optim.stop_kl else ""
    lines.append(f"updates     {config.updates_per_batch} a step: {passes}{stop}")
    if rollout.refill_rounds:
        lines.append(f"refilled    groups without spread, by up to {rollout.refill_rounds} further rounds of prompts")
    if rollout.first_samples:
        largest = growth.cap_of(rollout, max(group_sizes(config)))
        lines.append(f"grown       groups with spread in {rollout.first_samples} first samples, to {largest} at most")
    said = objective_warnings(
        config.objective,
        kl_coef=highest(config, "kl_coef"),
        updates_per_batch=config.updates_per_batch,
        truncates=rollout.top_k > 0 or rollout.top_p < 1,
    )
    lines += [f"note        {caution}" for caution in (*said, *references.cautions(config))]
    return ["OBJECTIVE", *(f"  {line}" for line in lines)]


def _plan(config: Config) -> list[str]:
    """The stages, with what each sets otherwise than a new one; nothing for one stage of constants."""
    if len(config.plan) == 1 and not any(isinstance(getattr(config.stage, name), str) for name in SCHEDULED):
        return []
    lines = ["STAGES"]
    for index, stage in enumerate(config.plan):
        steps = f"{stage.steps} steps" if stage.steps else "to the end"
        until = f", or until {stage.until}" if stage.until else ""
        names = (*SCHEDULED, "warmup_steps", "new_reference")
        set_otherwise = [n for n in names if getattr(stage, n) != getattr(Stage(), n)]
        own = dict.fromkeys(["rl_coef", *set_otherwise])  # in any case, or a stage of constants would say nothing
        sets = ", ".join(_set(name, getattr(stage, name)) for name in own)
        rests = "" if samples(config, index) else "; samples nothing"
        where = flag(where_of(config, index))
        lines.append(f"  {where:<11} {stage.name or '(no name)':<12}{steps}{until}: {sets}{rests}")
    return [*lines, ""]


def _set(name: str, value: float | str | bool) -> str:
    return name if value is True else f"{name}={value if isinstance(value, str) else f'{value:g}'}"


def samples(config: Config, index: int) -> bool:
    """Whether a stage learns from anything but demonstrations, in some step of it."""
    return any(_reaches(config, index, name) for name in ("rl_coef", "kl_coef", "entropy_coef"))


def _reaches(config: Config, index: int, name: str) -> bool:
    """Whether a coefficient of a stage is above 0 in some step."""
    return any(
        v > 0 for v in parse_schedule(getattr(config.plan[index], name), f"{where_of(config, index)}.{name}").values
    )


def _beside(run: Run) -> list[str]:
    """Demonstrations, the adapter, the reference, and the way back: what a run may have beside its rewards."""
    config, module, lines = run.config, run.policy.module, []
    if run.demos is not None:
        taught = [n for n in range(len(config.plan)) if _reaches(config, n, "sup_coef")]
        where = ", ".join(flag(where_of(config, n)) for n in taught)
        lines.append(f"  taught      {config.supervised.batch} demonstrations a step, in {where}")
    if has_adapter(module):
        said = module.peft_config[POLICY]
        named = said.target_modules
        targets = named if isinstance(named, str) else ", ".join(sorted(named))
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        lines.append(f"  adapter     rank {said.r}, alpha {said.lora_alpha:g}, {trained:,} weights; on {targets}")
    if run.reference is not None:
        lines.append(f"  reference   {_reference(run)}")
    if run.environment is not None:
        chosen = config.environment
        lines.append(
            f"  environment {run.environment.name}: up to {chosen.turns} answers a row, replies of up to "
            f"{chosen.max_reply_tokens} tokens, which are read and not learned from"
        )
    if (back := config.back_off).metric:
        lines.append(
            f"  back off    where {back.metric} falls more than {back.drop:g} below its best: to the best weights, and "
            f"{back.lr_factor:g} of the learning rate"
        )
    return lines


def _reference(run: Run) -> str:
    chosen, has_base = run.config.reference, has_adapter(run.policy.module)
    rests = "" if has_base else f", on {'the device' if chosen.place == 'device' else chosen.place}"
    if chosen.kind == "frozen":
        renewed = [run.stage_schedule.names[n] for n, stage in enumerate(run.config.plan) if stage.new_reference]
        then = f", renewed as {' and '.join(renewed)} begins" if renewed else ""
        return (f"the base, with the adapter off{then}") if has_base else f"a copy of the first weights{then}{rests}"
    rate, every = chosen.update_rate, chosen.update_every
    mixed = f"{rate:g} policy + {1 - rate:g} reference after every {every} steps"
    return f"{'a second adapter' if has_base else 'a copy'} that follows: {mixed}{rests}"


def _work(run: Run) -> list[str]:
    rollout, size = run.config.rollout, max(group_sizes(run.config))
    rows = rollout.prompts * size
    prompts = [_ids(run, prompt) for prompt in run.source.take(32)]
    mean = sum(map(len, prompts)) / len(prompts)
    trained = rollout.prompts * mean + rows * rollout.max_new_tokens
    if run.policy.backbone.layout == "padded":
        trained = rows * (mean + rollout.max_new_tokens)
    return [
        "WORK",
        f"  a step      {rollout.prompts} prompts x {size} samples = {rows} rows",
        f"  prompts     {mean:.0f} tokens on average, {max(map(len, prompts))} at most (of 32)",
        f"  sampled     at most {rows * rollout.max_new_tokens:,} tokens a step, {rollout.max_new_tokens} a row",
        f"  trained on  at most {trained:,.0f} tokens an epoch"
        + (", a group's prompt once" if run.policy.backbone.layout != "padded" else ", the prompt with every row")
        + ("; and what the environment says" if run.environment is not None else ""),
        *_beside(run),
        f"  steps       {run.config.steps}, optimiser steps {run.config.steps * run.config.updates_per_batch}",
    ]


def _memory(run: Run) -> list[str]:
    module, width = run.policy.module, 2 if run.policy.compute_dtype == torch.bfloat16 else 4
    numbers = sum(p.numel() for p in module.parameters() if p.requires_grad)
    trained = sum(p.numel() for p in run.parameters)
    base = base_weights(module).values() if has_adapter(module) else ()
    parts: dict[str, Any] = {f"base, {run.config.compute}": sum(map(held_bytes, base))} if base else {}
    parts |= {
        f"{'adapter' if base else 'weights'}, float32": 4 * numbers,
        "gradients, float32": 4 * trained,
        "AdamW state, float32": 8 * trained,
    }
    if run.policy.copy is not None:
        parts[f"compute copy, {run.config.compute}"] = width * numbers
    parts |= references.memory(run, width)
    parts |= {f"reward {name}": size for name, size in run.rewards.memory_bytes.items()}
    longest = max(len(_ids(run, prompt)) for prompt in run.source.take(32))
    tokens = budget_for(run, longest)
    parts |= critic_memory(run, width, tokens) | working_memory(run, width, tokens, longest)
    total = sum(parts.values())
    return [
        f"MEMORY, an estimate at {tokens:,} tokens a piece",
        *(f"  {name:<24} {size / 2**30:6.2f} GiB" for name, size in parts.items()),
        f"  {'together':<24} {total / 2**30:6.2f} GiB",
    ]


def critic_memory(run: Run, width: int, tokens: int) -> dict[str, float]:
    """Bytes of the critic's weights and of a separate one's copy; gradients and AdamW state are counted with all.

    Its activations are made after the policy's are gone: those of a larger network need the difference more.
    """
    if run.critic is None:
        return {}
    weights: dict[str, float] = {"critic, float32": 4 * own_numbers(run.critic.module)}
    if not isinstance(run.critic, SeparateCritic):
        return weights
    if (copied := run.critic.compute_copy) is not None:
        weights[f"critic's copy, {run.config.compute}"] = width * own_numbers(copied)
    if isinstance(run.policy.backbone, PlainBackbone):
        return weights  # of a copy of the policy, with activations like its own
    trunk: Any = run.critic.trunk
    own, policys = (
        activations(module.config, tokens, width, run.policy.backbone.layout) for module in (trunk, run.policy.module)
    )
    return weights | ({"critic's activations": own - policys} if own > policys else {})


def own_numbers(module: torch.nn.Module) -> int:
    """Of what is trained: the base below a critic's adapter is the policy's."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def held_bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def working_memory(run: Run, width: int, tokens: int, longest: int) -> dict[str, float]:
    """Bytes of one forward and backward over T tokens, and of the cache of B rows of L tokens, prompt included.

    Cache 2 B L layers K width, K numbers of a key. Attention scores are not counted.
    """
    if isinstance(run.policy.backbone, PlainBackbone):
        return dry_run_modules.working_memory(run, width, tokens, longest)
    model = run.policy.module.config.get_text_config()
    rollout = run.config.rollout
    size = max(group_sizes(run.config))
    rows = max(min(BATCH_ROWS, rollout.prompts * size), growth.cap_of(rollout, size))
    return {
        "activations": activations(model, tokens, width, run.policy.backbone.layout),
        "logits": logits_memory(run, tokens, width),
        "cache while sampling": width
        * 2
        * rows
        * (longest + rollout.max_new_tokens)
        * model.num_hidden_layers
        * key_numbers(model),
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
        f"  completion  {rollouts.completions[0]!r}  ({int(completion_lengths(rollouts)[0])} tokens, ended by "
        f"{rollouts.finish[0]})",
        f"  target      {prompt.target!r}",
    ]
    lines += [
        f"  reward      {name}(prompts=[...], completions=[...], ...) = {float(part[0]):g}"
        for name, part in scores.parts.items()
    ]
    lines += [f"  failed      {f.reward}: {f.kind}: {f.message}" for f in scores.failures]
    return lines + demonstration_lines(run)


def demonstration_lines(run: Run) -> list[str]:
    """One demonstration as its tokens are learned; nothing where no stage learns from any."""
    if run.demos is None:
        return []
    demos = run.policy.demonstrations(drawn(run)[0][:1], seed=run.config.seed)
    ids = demos.actions[0, : int(demos.lengths[0])].tolist()
    return [
        "",
        "ONE REAL DEMONSTRATION",
        f"  prompt      {demos.prompts[0].inputs!r}",
        f"  as tokens   {run.policy.chat.text_with_specials(demos.shared['prompt_ids'][0].tolist())!r}",
        f"  to answer   {run.policy.chat.text_with_specials(ids)!r}  ({len(ids)} tokens)",
    ]


def _ids(run: Run, prompt: Any) -> list[int]:
    return run.policy.chat.encode(prompt.inputs)
