"""Checks of losses, advantages, the critic, and optimizer steps that are skipped, too small or too expensive."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from typing import Any

from gruppo.config.stages import peak_lr, stage_path
from gruppo.doctor import remedies
from gruppo.doctor.findings import TREND_STEPS, Change, Match
from gruppo.doctor.record import Record, Series
from gruppo.trainer.weight_change import LEAST as MIN_CHANGED

POSITIVE = 0.8
"""Fraction of the last steps with a positive loss that is no coincidence."""
SIGNIFICANT_LOSS = 0.05
"""Fraction of the mean size of an advantage above which a policy loss is more than a residual."""
NOT_FALLEN = 0.95
"""Fraction of a loss that is left when it has not fallen."""
LEARNED = 0.1
"""Nats per token below which demonstrations are learned, so that their loss need not fall."""
SLOW_LR = 0.4
"""Ratio of the mean learning rate to its peak; a linear warm-up over the whole stage has 0.5."""
LOSS_GROWTH, FAST_LOSS_GROWTH = 1.3, 2.2
"""Ratio of the last third of a loss to the middle one when it rises, and when it rises faster than linearly (1.7)."""
EXTREME = 10.0
"""Standard deviations. A single outlier in a group of 64 is at 7.9."""
SHIFTED = 0.5
"""Standard deviations of the mean advantage from 0."""
WORSE_THAN_MEAN = -0.1
"""Explained fraction of the returns' variance below which the critic adds variance."""
VALUES_CLIPPED = 0.5
ONE_STEP = 0.8
"""Fraction of the KL that one of at least four denoising steps has."""
ALWAYS_CLIPPED = 0.95
"""Fraction of the steps whose gradient norm exceeds the limit."""
FAR_ABOVE = 20.0
"""Ratio of the median gradient norm to its limit above which the limit sets the size of every step. Healthy runs have 3
to 10: AdamW divides most of the scale out again."""
MAX_RETURNS = 3
"""Returns to the best weights after which a run makes no progress."""


def check_policy_loss(run: Record) -> Match | None:
    loss, mean, o = run["loss/policy"], run["advantage/mean"], run.config.objective
    first, last = loss.third(0), loss.third(2)
    scale = run["advantage/mean_abs"].last_mean if len(run["advantage/mean_abs"]) else 1.0
    positive = sum(value > 0 for value in loss.values[-last.count :])
    is_growing = last.mean > 2 * max(first.mean, 0.0) and loss.rises()
    if positive < POSITIVE * last.count or last.mean < SIGNIFICANT_LOSS * scale or not is_growing:
        return None
    if mean.last_mean < -SIGNIFICANT_LOSS * scale and not o.has_critic:
        why = "compares each reward with its own group, so that the mean is 0"
        changes = remedies.set_objective(run, why, baseline="mean")
        changes += [] if run.reward.rises() else [remedies.scale_lr(run, 0.5)]
        return Match(changes, "baseline", {"baseline": o.baseline})
    changes = [remedies.scale_lr(run, 0.5), *remedies.fewer_updates(run)]
    if o.surrogate == "clip":
        half = {"clip_low": o.clip_low / 2, "clip_high": o.clip_high / 2}
        changes += remedies.set_objective(run, "half the current range", **half)
    return Match(changes, "ratios")


def check_supervised_loss(run: Record) -> Match | None:
    loss = run["loss/sup"]
    is_learned = run["sup/loss_nats"].last_mean < LEARNED and not run.is_image_run
    if loss.last_mean <= NOT_FALLEN * loss.third(0).mean or is_learned:
        return None
    # Remedies change the stage that learned from demonstrations, which may be over.
    run = replace(run, stage_index=run.stage_at(loss.steps[-1]))
    stage, lr, sampled = run.stage, run["optim/lr"], set(run["loss/policy"].steps)
    lr_at = dict(zip(lr.steps, lr.values, strict=True))
    rates = [lr_at[step] for step in loss.steps if step in lr_at] or [0.0]
    mean_lr, peak = sum(rates) / len(rates), peak_lr(run.config, run.current_stage)
    values: dict[str, Any] = {"trend": "rises" if loss.rises() else "has not fallen", "lr": mean_lr, "peak": peak}
    changes: list[Change] = []
    if mean_lr < SLOW_LR * peak:
        option, warmup = run.option("warmup_steps"), stage.warmup_steps
        if not warmup:
            option, warmup = "--optim.warmup-steps", run.config.optim.warmup_steps
        if warmup > 1:
            changes.append(Change({option: str(max(warmup // 4, 1))}, f"a quarter of {warmup}"))
        return Match([*changes, remedies.scale_lr(run, 3.0)], "warmup", values)
    if sum(step in sampled for step in loss.steps) > len(loss) / 2:
        policy, sup, cosine = (run[f"grad_{name}"].span() for name in ("norm/policy", "norm/sup", "cosine/policy/sup"))
        values["evidence"] = " (--optim.terms-every 10 measures both)"
        if cosine.count and sup.mean:
            size = policy.mean / sup.mean
            values["evidence"] = f": it is {size:.2g} times as large, with a cosine of {cosine.mean:.2g}"
        for name, factor, why in (("sup_coef", 2.0, "twice"), ("rl_coef", 0.5, "half of")):
            value = getattr(stage, name)
            changes.append(Change({run.option(name): remedies.scaled(value, factor)}, f"{why} {value}"))
        return Match(changes, "outweighed", values)
    batch = {"--supervised.batch": str(max(run.config.supervised.batch // 2, 1))}
    few = Change(batch, "tests whether few demonstrations can be memorized")
    return Match([remedies.scale_lr(run, 3.0), few], "small", values)


def check_consistency_loss(run: Record) -> Match | None:
    loss, reward, held_out, kl = run["loss/cons"], run.reward, run["eval/reward_mean"], run["kl/ref_nats"]
    middle, last = loss.third(1).mean, loss.last_mean
    if last < LOSS_GROWTH * middle or not loss.rises(1, 2):
        return None
    improves = len(reward) >= TREND_STEPS and reward.rises(1, 2)
    improves &= len(held_out) < 2 or held_out.values[-1] > held_out.values[0]
    if improves and last < FAST_LOSS_GROWTH * middle:
        return None  # learning also moves away from the reference, but more slowly
    target = max(kl.third(0).mean, 0.01) if len(kl) else 0.02
    changes = [remedies.more_kl(run, target=target), remedies.scale_lr(run, 0.5), *remedies.return_to_best(run)]
    if run.config.reference.kind == "frozen" and len(kl):
        follow = {"--reference.kind": "mixed", "--reference.update-every": str(max(run.config.steps // 10, 1))}
        changes.append(Change(follow, "or: a reference that follows the policy, which only limits its speed"))
    values = {"without": "" if improves else " while the reward does not rise"}
    return Match(changes, values=values, evidence=[(loss, [loss.third(i) for i in range(3)])])


def check_advantages(run: Record) -> Match | None:
    low, high, mean, std = (run[f"advantage/{name}"] for name in ("min", "max", "mean", "std"))
    extremes = [max(abs(a), abs(b)) / s for a, b, s in zip(low.values, high.values, std.values, strict=False) if s > 0]
    extreme = statistics.median(extremes) if extremes else 0.0
    shift = mean.last_mean / std.last_mean if std.last_mean > 0 else 0.0
    o = run.config.objective
    if extreme > EXTREME:
        limit = float(remedies.number(3 * std.span().mean))
        changes = remedies.set_objective(run, "three standard deviations", adv_clip=limit)
        if o.scale == "none" and not o.has_critic:
            why = "divides by the standard deviation within groups"
            changes += remedies.set_objective(run, why, scale="running")
        return Match(changes, "extreme", {"extreme": extreme})
    if not abs(shift) > SHIFTED or o.has_critic:
        return None
    side, effect = ("below", "discouraged") if shift < 0 else ("above", "reinforced")
    values = {"shift": abs(shift), "side": side, "effect": effect, "baseline": o.baseline}
    return Match(remedies.set_objective(run, "compares each reward with its group", baseline="mean"), "shifted", values)


def check_critic(run: Record) -> Match | None:
    loss, clipped, config = run["loss/value"], run["value/clip_frac"], run.config
    is_worse = run["value/explained_variance_frac"].last_mean < WORSE_THAN_MEAN
    is_clipped = len(clipped) >= TREND_STEPS and clipped.last_mean > VALUES_CLIPPED
    if not is_worse and not is_clipped:
        return None
    changes: list[Change] = []
    if is_clipped:
        clip = config.objective.value_clip
        changes += remedies.set_objective(run, f"three times {clip:g}", value_clip=3 * clip)
    if is_worse:
        lr = config.optim.lr if config.critic.lr is None else config.critic.lr
        is_growing = len(loss) >= TREND_STEPS and loss.rises()
        factor, why = (0.3, "a third of") if is_growing else (3.0, "three times")
        changes.append(Change({"--critic.lr": remedies.number(lr * factor)}, f"{why} {lr:g}"))
        if not config.critic.warmup_steps:
            steps = str(max(config.steps // 20, 1))
            changes.append(Change({"--critic.warmup-steps": steps}, "trains the critic alone at first"))
    case = "both" if is_worse and is_clipped else "worse" if is_worse else "clipped"
    return Match(changes, case, {"clipped": clipped.last_mean})


def check_denoising_step(run: Record) -> Match | None:
    series = {int(step): run[name] for name, step in run.named(r"timestep/kl_ref_nats/(\d+)")}
    kl = {step: abs(s.last_mean) for step, s in series.items() if len(s)}
    worst, total = max(kl, key=kl.__getitem__), sum(kl.values())
    if len(kl) < 4 or total <= 0 or kl[worst] < ONE_STEP * total:
        return None
    is_last = worst == max(kl) and worst > 0
    changes = [Change({"--diffusion.train-to": str(worst)}, "trains only the steps before it")] if is_last else []
    evidence = [(series[worst], [series[worst].third(0), series[worst].third(2)])]
    return Match(changes, values={"worst": worst, "fraction": kl[worst] / total}, evidence=evidence)


def check_gradient_clipping(run: Record) -> Match | None:
    norm, limit = run["grad/norm"], run.config.optim.max_grad_norm
    median, above = statistics.median(norm.values), sum(value > limit for value in norm.values) / len(norm)
    if not limit or above < ALWAYS_CLIPPED or median < FAR_ABOVE * limit:
        return None
    why = "the median norm: half of the steps stay unchanged"
    changes = [Change({"--optim.max-grad-norm": remedies.number(median)}, why), remedies.scale_lr(run, 0.5)]
    return Match(changes, values={"above": above, "factor": median / limit})


def check_skipped_updates(run: Record) -> Match | None:
    skipped, total = run["update/skipped_count"], sum(run["update/skipped_count"].values)
    if not total:
        return None
    steps = [str(step) for step, value in zip(skipped.steps, skipped.values, strict=True) if value]
    where = ", ".join(steps[:5]) + (", ..." if len(steps) > 5 else "")
    values = {"skipped": total, "updates": total + sum(run["update/updates_count"].values), "steps": where}
    changes = [remedies.scale_lr(run, 0.5), *remedies.use_float32(run)]
    return Match(changes, values=values, evidence=[(skipped, [skipped.span()])])


def check_warmup_too_long(run: Record) -> Match | None:
    """A warm-up that lasts as long as its stage, or a learning rate of 0."""
    lr, config, numbers = run["optim/lr"], run.config, run["stage/number"]
    lr_at, stage_at = dict(zip(lr.steps, lr.values, strict=True)), dict(zip(numbers.steps, numbers.values, strict=True))
    for index, stage in enumerate(config.plan):
        steps = [s for s in lr.steps if s > 0 and (len(config.plan) == 1 or stage_at.get(s) == index + 1)]
        if not steps:
            continue
        is_over = index < run.stage_at(run.steps)
        length = len(steps) if is_over else stage.steps or config.steps - steps[0] + 1
        # The run's warm-up may reach into a stage without a learning rate of its own.
        run_warmup = 0 if stage.lr is not None else config.optim.warmup_steps - (steps[0] - 1)
        warmup, peak = max(stage.warmup_steps, run_warmup), peak_lr(config, index)
        if peak and (length < 2 or warmup < length):
            continue
        name = f"stage {stage.name or index}" if len(config.plan) > 1 else "the run"
        values = {"stage": name, "warmup": warmup, "length": length, "peak": peak}
        values["reached"] = max(lr_at[step] for step in steps)
        prefix = f"--{stage_path(config, index)}"
        if peak:
            option = f"{prefix}.warmup-steps" if stage.warmup_steps >= run_warmup else "--optim.warmup-steps"
            change = Change({option: str(max(length // 10, 1))}, f"a tenth of {length} steps")
        else:
            change = Change({f"{prefix}.lr" if stage.lr is not None else "--optim.lr": "1e-06"}, "currently 0")
        evidence = [(lr, [lr.at(lr.steps.index(steps[0])), lr.at(lr.steps.index(steps[-1]))])]
        return Match([change], "long" if peak else "zero", values, evidence)
    return None


def check_unchanged_weights(run: Record) -> Match | None:
    changed = run["update/changed_frac"]
    if changed.span().mean >= MIN_CHANGED:
        return None
    values, evidence = {"changed": changed.span().mean}, [(changed, [changed.span()])]
    return Match([remedies.scale_lr(run, 10.0)], values=values, evidence=evidence)


def check_out_of_memory(run: Record) -> Match | None:
    found = re.findall(r"step (\d+): [^\n]*?(\d+) tokens[^\n]*--optim\.token-budget (\d+)", run.log)
    if not found:
        return None
    first, last = found[0], found[-1]
    sizes = Series("tokens per micro-batch", (int(first[0]), int(last[0])), (float(first[1]), float(last[2])))
    change = Change({"--optim.token-budget": last[2]}, f"reached from {first[1]}")
    values = {"times": "once" if len(found) == 1 else f"{len(found)} times"}
    return Match([change], values=values, evidence=[(sizes, [sizes.at(0), sizes.at(1)])])


def check_repeated_back_off(run: Record) -> Match | None:
    count, back_off = run["back_off/returns_count"], run.config.back_off
    if not len(count) or count.values[-1] < MAX_RETURNS:
        return None
    changes, metric = [remedies.scale_lr(run, 0.5)], run[back_off.metric]
    if back_off.drop:
        changes.append(Change({"--back-off.drop": remedies.number(2 * back_off.drop)}, f"twice {back_off.drop:g}"))
    values = {"count": count.values[-1], "factor": back_off.lr_factor}
    evidence = [(count, [count.at(-1)]), (metric, [metric.third(0), metric.third(2)])]
    return Match(changes, values=values, evidence=evidence)
