"""Checks of losses, advantages, the critic, and optimizer steps that are skipped, too small or too expensive."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gruppo.config.stages import peak_lr, stage_path
from gruppo.doctor import remedies
from gruppo.doctor.record import TREND_STEPS, Record, Series
from gruppo.doctor.remedies import Change, Match
from gruppo.trainer.weight_change import IDENTICAL, IDLE, NORMS
from gruppo.trainer.weight_change import LEAST as MIN_CHANGED


def check_updates(run: Record) -> Iterator[Match]:
    """Updates that are skipped, lost in rounding, clipped, too large for the memory, or undone."""
    skipped, changed = run["update/skipped_count"], run["update/changed_frac"]
    if total := sum(skipped.values):
        steps = [str(step) for step, value in skipped.items() if value]
        where = ", ".join(steps[:5]) + (", ..." if len(steps) > 5 else "")
        values = {
            "skipped": total,
            "updates": total + sum(run["update/updates_count"].values),
            "steps": where,
        }
        changes = [remedies.scale_lr(run, 0.5), *remedies.use_float32(run)]
        yield Match("skipped-updates", changes, "", values, [(skipped, [skipped.span()])])

    if (mean := changed.span().mean) < MIN_CHANGED:
        evidence = [(changed, [changed.span()])]
        yield Match(
            "unchanged-weights",
            [remedies.scale_lr(run, 10.0)],
            "",
            {"changed": mean},
            evidence,
            blocks=True,
        )

    norm, limit = run["grad/norm"].values, run.config.optim.max_grad_norm
    if limit and norm:
        median, above = statistics.median(norm), sum(value > limit for value in norm) / len(norm)
        # Healthy runs have a median of 3 to 10 times the limit, which AdamW mostly divides out again.
        if above >= 0.95 and median >= 20 * limit:
            why = "the median norm: half of the steps stay unchanged"
            changes = [
                Change({"--optim.max-grad-norm": remedies.number(median)}, why),
                remedies.scale_lr(run, 0.5),
            ]
            yield Match(
                "gradient-clipping", changes, "", {"above": above, "factor": median / limit}
            )

    if found := re.findall(
        r"step (\d+): [^\n]*?(\d+) tokens[^\n]*--optim\.token-budget (\d+)", run.log
    ):
        first, last = found[0], found[-1]
        sizes = Series(
            "tokens per micro-batch",
            (int(first[0]), int(last[0])),
            (float(first[1]), float(last[2])),
        )
        change = Change({"--optim.token-budget": last[2]}, f"reached from {first[1]}")
        values = {"times": "once" if len(found) == 1 else f"{len(found)} times"}
        yield Match("out-of-memory", [change], "", values, [(sizes, [sizes.at(0), sizes.at(1)])])

    count, drop, metric = (
        run["back_off/returns_count"],
        run.config.back_off.drop,
        run[run.config.back_off.metric],
    )
    if count.at(-1).mean >= 3:
        changes = [remedies.scale_lr(run, 0.5)]
        if drop:
            changes.append(
                Change({"--back-off.drop": remedies.number(2 * drop)}, f"twice {drop:g}")
            )
        evidence = [(count, [count.at(-1)]), (metric, [metric.third(0), metric.third(2)])]
        yield Match("repeated-back-off", changes, "", {"count": count.values[-1]}, evidence)


def check_gradient(run: Record) -> Iterator[Match]:
    """Steps up to the last one in which no network had a gradient. Equal rewards have rules of their own."""
    moving = {step for name in NORMS for step, value in run[name].items() if value}
    if (
        len(idle := [step for step in run["grad/norm"].steps if step > max(moving, default=-1)])
        < IDLE[0]
    ):
        return
    size, truncated, lr = (
        run["advantage/mean_abs"],
        run["finish/truncated_frac"],
        peak_lr(run.config, run.stage_index),
    )
    differs = [value > 0 for step, value in size.items() if step in idle]
    is_ruined = bool(differs) and all(differs)
    # A policy that has lost its entropy samples identical completions: the same words as in the trainer's own log.
    is_repeating = (
        bool(moving)
        and run.is_stuck
        and re.search(rf"nothing was learned[^\n]*{IDENTICAL}", run.log)
    )
    if is_ruined or is_repeating:
        option = "--optim.lr" if run.stage.lr is None else run.option("lr")
        # AdamW moves each weight by about the learning rate; weights are about 0.02
        change = Change(
            {option: remedies.number(min(lr / 100, 1e-3))}, f"at most a hundredth of {lr:g}"
        )
        yield Match(
            "no-gradient",
            [change],
            "weights" if is_ruined else "identical",
            {"since": idle[0]},
            blocks=True,
        )
    elif run.config.objective.mask_truncated and truncated.last_mean == 1:
        limit = run.config.rollout.max_new_tokens
        changes = [Change({"--rollout.max-new-tokens": str(2 * limit)}, f"twice {limit}")]
        changes += remedies.set_objective(
            run, "learns from truncated completions too", mask_truncated=False
        )
        yield Match("no-gradient", changes, "masked", {"since": idle[0]}, blocks=True)


def check_warmup(run: Record) -> Iterator[Match]:
    """A warm-up that lasts as long as its stage, or a learning rate of 0."""
    lr, config = run["optim/lr"], run.config
    lr_at, stage_at = dict(lr.items()), dict(run["stage/number"].items())
    for index, stage in enumerate(config.plan):
        if not (
            steps := [
                s
                for s in lr.steps
                if s > 0 and (len(config.plan) == 1 or stage_at.get(s) == index + 1)
            ]
        ):
            continue
        # Of a stage that is over the steps that it had, else those that it will have.
        length = (
            len(steps)
            if index < run.stage_at(run.steps)
            else stage.steps or config.steps - steps[0] + 1
        )
        # The run's warm-up may reach into a stage without a learning rate of its own.
        run_warmup = 0 if stage.lr is not None else config.optim.warmup_steps - (steps[0] - 1)
        warmup, peak = max(stage.warmup_steps, run_warmup), peak_lr(config, index)
        if peak and (length < 2 or warmup < length):
            continue
        name, prefix = (
            f"stage {stage.name or index}" if len(config.plan) > 1 else "the run",
            stage_path(config, index),
        )
        reached = max(lr_at[step] for step in steps)
        values = {
            "stage": name,
            "warmup": warmup,
            "length": length,
            "peak": peak,
            "reached": reached,
        }
        change = Change(
            {"--optim.lr" if stage.lr is None else f"--{prefix}.lr": "1e-06"}, "currently 0"
        )
        if peak:
            option = (
                f"--{prefix}.warmup-steps"
                if stage.warmup_steps >= run_warmup
                else "--optim.warmup-steps"
            )
            change = Change({option: str(max(length // 10, 1))}, f"a tenth of {length} steps")
        evidence = [(lr, [lr.at(lr.steps.index(steps[0])), lr.at(lr.steps.index(steps[-1]))])]
        yield Match(
            "warmup-too-long",
            [change],
            "long" if peak else "zero",
            values,
            evidence,
            blocks=not peak,
        )
        return


def check_advantages(run: Record) -> Iterator[Match]:
    """A policy loss that grows, and advantages that are extreme or not centered."""
    low, high, mean, std, size = (
        run[f"advantage/{name}"] for name in ("min", "max", "mean", "std", "mean_abs")
    )
    loss, o = run["loss/policy"], run.config.objective
    first, last = loss.third(0), loss.third(2)
    # More than the residue of an average: a twentieth of the mean size of an advantage.
    least = 0.05 * (size.last_mean if len(size) else 1.0)
    positive = sum(value > 0 for value in loss.values[-last.count :])
    if (
        loss.rises()
        and last.mean > 2 * max(first.mean, 0.0)
        and last.mean >= least
        and positive >= 0.8 * last.count
    ):
        if mean.last_mean < -least and not o.has_critic:
            why = "compares each reward with its own group, so that the mean is 0"
            slower = [] if run.reward.rises() else [remedies.scale_lr(run, 0.5)]
            yield Match(
                "policy-loss",
                remedies.set_objective(run, why, baseline="mean") + slower,
                "baseline",
            )
        else:
            changes = [remedies.scale_lr(run, 0.5), *remedies.fewer_updates(run)]
            if o.surrogate == "clip":
                half = {"clip_low": o.clip_low / 2, "clip_high": o.clip_high / 2}
                changes += remedies.set_objective(run, "half the current range", **half)
            yield Match("policy-loss", changes, "ratios")

    extremes = [
        max(abs(a), abs(b)) / s
        for a, b, s in zip(low.values, high.values, std.values, strict=False)
        if s > 0
    ]
    extreme = statistics.median(extremes) if extremes else 0.0
    shift = mean.last_mean / std.last_mean if std.last_mean > 0 else 0.0
    if extreme > 10:  # a single outlier in a group of 64 is at 7.9
        limit = float(remedies.number(3 * std.span().mean))
        changes = remedies.set_objective(run, "three standard deviations", adv_clip=limit)
        if o.scale == "none" and not o.has_critic:
            why = "divides by the standard deviation within groups"
            changes += remedies.set_objective(run, why, scale="running")
        yield Match("advantages", changes, "extreme", {"extreme": extreme})
    elif abs(shift) > 0.5 and not o.has_critic:
        side, effect = ("below", "discouraged") if shift < 0 else ("above", "reinforced")
        changes = remedies.set_objective(
            run, "compares each reward with its group", baseline="mean"
        )
        yield Match(
            "advantages", changes, "shifted", {"shift": abs(shift), "side": side, "effect": effect}
        )


def check_critic(run: Record) -> Iterator[Match]:
    loss, clipped, config = run["loss/value"], run["value/clip_frac"], run.config
    is_worse = (
        run["value/explained_variance_frac"].last_mean < -0.1
    )  # than the mean return: it adds variance
    is_clipped = len(clipped) >= TREND_STEPS and clipped.last_mean > 0.5
    clip, changes = config.objective.value_clip, list[Change]()
    if is_clipped:
        changes += remedies.set_objective(run, f"three times {clip:g}", value_clip=3 * clip)
    if is_worse:
        lr = config.optim.lr if config.critic.lr is None else config.critic.lr
        # A growing loss means that the rate is too high; else the critic has not learned enough.
        factor, why = (
            (0.3, "a third of")
            if len(loss) >= TREND_STEPS and loss.rises()
            else (3.0, "three times")
        )
        changes.append(Change({"--critic.lr": remedies.number(lr * factor)}, f"{why} {lr:g}"))
        if not config.critic.warmup_steps:
            steps = str(max(config.steps // 20, 1))
            changes.append(
                Change({"--critic.warmup-steps": steps}, "trains the critic alone at first")
            )
    if is_worse or is_clipped:
        yield Match(
            "critic",
            changes,
            "both" if is_worse and is_clipped else "worse" if is_worse else "clipped",
        )


def check_supervised_loss(run: Record) -> Iterator[Match]:
    loss = run["loss/sup"]
    # Demonstrations below 0.1 nats per token are learned, so that their loss need not fall.
    is_learned = run["sup/loss_nats"].last_mean < 0.1 and not run.is_image_run
    if not loss.last_mean > 0.95 * loss.third(0).mean or is_learned:
        return
    # Remedies change the stage that learned from demonstrations, which may be over.
    run = replace(run, stage_index=run.stage_at(loss.steps[-1]))
    stage, sampled, learned, changes = (
        run.stage,
        set(run["loss/policy"].steps),
        set(loss.steps),
        list[Change](),
    )
    rates = [rate for step, rate in run["optim/lr"].items() if step in learned] or [0.0]
    mean_lr, peak = sum(rates) / len(rates), peak_lr(run.config, run.stage_index)
    values: dict[str, Any] = {
        "trend": "rises" if loss.rises() else "has not fallen",
        "lr": mean_lr,
        "peak": peak,
    }
    if mean_lr < 0.4 * peak:  # a linear warm-up over the whole stage has 0.5
        option, warmup = run.option("warmup_steps"), stage.warmup_steps
        if not warmup:
            option, warmup = "--optim.warmup-steps", run.config.optim.warmup_steps
        if warmup > 1:
            changes.append(Change({option: str(max(warmup // 4, 1))}, f"a quarter of {warmup}"))
        yield Match("supervised-loss", [*changes, remedies.scale_lr(run, 3.0)], "warmup", values)
    elif sum(step in sampled for step in loss.steps) > len(loss) / 2:
        policy, sup, cosine = (
            run[f"grad_{name}"].span() for name in ("norm/policy", "norm/sup", "cosine/policy/sup")
        )
        values["evidence"] = " (--optim.terms-every 10 measures both)"
        if cosine.count and sup.mean:
            size = policy.mean / sup.mean
            values["evidence"] = (
                f": it is {size:.2g} times as large, with a cosine of {cosine.mean:.2g}"
            )
        for name, factor, why in (("sup_coef", 2.0, "twice"), ("rl_coef", 0.5, "half of")):
            value = getattr(stage, name)
            changes.append(
                Change({run.option(name): remedies.scaled(value, factor)}, f"{why} {value}")
            )
        yield Match("supervised-loss", changes, "outweighed", values)
    else:
        batch = {"--supervised.batch": str(max(run.config.supervised.batch // 2, 1))}
        few = Change(batch, "tests whether few demonstrations can be memorized")
        yield Match("supervised-loss", [remedies.scale_lr(run, 3.0), few], "small", values)


def check_consistency_loss(run: Record) -> Iterator[Match]:
    loss, reward, held_out, kl = (
        run["loss/cons"],
        run.reward,
        run["eval/reward_mean"],
        run["kl/ref_nats"],
    )
    improves = len(reward) >= TREND_STEPS and reward.rises(1, 2)
    improves &= len(held_out) < 2 or held_out.values[-1] > held_out.values[0]
    # Linear growth has a ratio of 1.7 between the thirds. Learning also moves away from the reference, but not faster.
    if not loss.last_mean >= (2.2 if improves else 1.3) * loss.third(1).mean or not loss.rises(
        1, 2
    ):
        return
    target = max(kl.third(0).mean, 0.01) if len(kl) else 0.02
    changes = [
        remedies.more_kl(run, target=target),
        remedies.scale_lr(run, 0.5),
        *remedies.return_to_best(run),
    ]
    if run.config.reference.kind == "frozen" and len(kl):
        follow = {
            "--reference.kind": "mixed",
            "--reference.update-every": str(max(run.config.steps // 10, 1)),
        }
        changes.append(
            Change(follow, "or: a reference that follows the policy, which only limits its speed")
        )
    values = {"without": "" if improves else " while the reward does not rise"}
    yield Match(
        "consistency-loss", changes, "", values, [(loss, [loss.third(i) for i in range(3)])]
    )
