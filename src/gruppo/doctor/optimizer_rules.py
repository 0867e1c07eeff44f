"""Rules about losses, advantages, the critic, and optimizer steps that are skipped, too small or too expensive."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace

from gruppo.config.stages import peak_lr, where_of
from gruppo.doctor import remedies
from gruppo.doctor.findings import TREND_STEPS, Change, Finding, Rule, measured
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


def check_policy_loss(run: Record) -> Finding | None:
    loss, mean, o = run["loss/policy"], run["advantage/mean"], run.config.objective
    first, last = loss.third(0), loss.third(2)
    scale = run["advantage/mean_abs"].last_mean if len(run["advantage/mean_abs"]) else 1.0
    positive = sum(value > 0 for value in loss.values[-last.count :])
    is_growing = last.mean > 2 * max(first.mean, 0.0) and loss.rises()
    if positive < POSITIVE * last.count or last.mean < SIGNIFICANT_LOSS * scale or not is_growing:
        return None
    if mean.last_mean < -SIGNIFICANT_LOSS * scale and not o.has_critic:
        meaning = (
            "at ratio 1 this loss is the negative mean advantage and says nothing about the gradient: rewards are "
            f"increasingly below the baseline ({o.baseline}). With a group baseline it would be 0. Judge the run by "
            "its held-out reward, KL and ratio."
        )
        changes = remedies.set_objective(
            run, "compares each reward with its own group, so that the mean is 0", baseline="mean"
        )
        changes += [] if run.reward.rises() else [remedies.scale_lr(run, 0.5)]
    else:
        meaning = (
            "with centered advantages, a positive loss comes from the ratios: within a batch, good actions became less "
            "likely or bad ones more likely. The policy moves too far for this number of updates."
        )
        changes = [remedies.scale_lr(run, 0.5), *remedies.fewer_updates(run)]
        if o.surrogate == "clip":
            half = {"clip_low": o.clip_low / 2, "clip_high": o.clip_high / 2}
            changes += remedies.set_objective(run, "half the current range", **half)
    evidence = measured(loss, mean, run.reward, run["ratio/max"], run["kl/ref_nats"], run["eval/reward_mean"])
    return Finding(evidence, meaning, changes)


def check_supervised_loss(run: Record) -> Finding | None:
    loss, nats = run["loss/sup"], run["sup/loss_nats"]
    is_learned = nats.last_mean < LEARNED and not run.is_image_run
    if loss.last_mean <= NOT_FALLEN * loss.third(0).mean or is_learned:
        return None
    # Remedies change the stage that learned from demonstrations, which may be over.
    run = replace(run, stage_index=run.stage_at(loss.steps[-1]))
    stage, lr = run.stage, run["optim/lr"]
    lr_at = dict(zip(lr.steps, lr.values, strict=True))
    rates = [lr_at[step] for step in loss.steps if step in lr_at] or [0.0]
    mean_lr, peak = sum(rates) / len(rates), peak_lr(run.config, run.current_stage)
    sampled = set(run["loss/policy"].steps)
    note = " (Ignore this if the model knew its demonstrations from the first step on.)"
    changes: list[Change] = []
    if mean_lr < SLOW_LR * peak:
        cause = (
            f": the learning rate was {mean_lr:.2g} on average, with a peak of {peak:.2g}, so most steps were small."
        )
        option, warmup = run.option("warmup_steps"), stage.warmup_steps
        if not warmup:
            option, warmup = "--optim.warmup-steps", run.config.optim.warmup_steps
        if warmup > 1:
            changes.append(Change({option: str(max(warmup // 4, 1))}, f"a quarter of {warmup}"))
        changes.append(remedies.scale_lr(run, 3.0))
    elif sum(step in sampled for step in loss.steps) > len(loss) / 2:
        policy, sup, cosine = (run[f"grad_{name}"] for name in ("norm/policy", "norm/sup", "cosine/policy/sup"))
        if len(cosine) and sup.span().mean:
            size = policy.span().mean / sup.span().mean
            evidence = f": it is {size:.2g} times as large, with a cosine of {cosine.span().mean:.2g}"
        else:
            evidence = " (--optim.terms-every 10 measures both)"
        cause = f" while the policy is also trained on rewards: that gradient outweighs or undoes it{evidence}.{note}"
        changes.append(
            Change({run.option("sup_coef"): remedies.scaled(stage.sup_coef, 2.0)}, f"twice {stage.sup_coef}")
        )
        changes.append(Change({run.option("rl_coef"): remedies.scaled(stage.rl_coef, 0.5)}, f"half of {stage.rl_coef}"))
    else:
        cause = f": the steps are too small, or the wrong weights are trained.{note}"
        batch = {"--supervised.batch": str(max(run.config.supervised.batch // 2, 1))}
        changes = [remedies.scale_lr(run, 3.0), Change(batch, "tests whether few demonstrations can be memorized")]
    meaning = f"the supervised loss {'rises' if loss.rises() else 'has not fallen'}{cause}"
    names = ("optim/lr", "update/changed_frac", "grad/norm", "grad_cosine/policy/sup", "stage/sup_coef")
    return Finding(measured(loss, nats, *(run[name] for name in names)), meaning, changes)


def check_consistency_loss(run: Record) -> Finding | None:
    loss, reward, held_out, kl = run["loss/cons"], run.reward, run["eval/reward_mean"], run["kl/ref_nats"]
    middle, last = loss.third(1).mean, loss.last_mean
    if last < LOSS_GROWTH * middle or not loss.rises(1, 2):
        return None
    improves = len(reward) >= TREND_STEPS and reward.rises(1, 2)
    improves &= len(held_out) < 2 or held_out.values[-1] > held_out.values[0]
    if improves and last < FAST_LOSS_GROWTH * middle:
        return None  # learning also moves away from the reference, but more slowly
    meaning = (
        f"outputs keep moving away from those of the reference{'' if improves else ' while the reward does not rise'}: "
        "the policy exploits the reward, amplifies noise, or lost weights in loading, which the first step shows."
    )
    target = max(kl.third(0).mean, 0.01) if len(kl) else 0.02
    changes = [remedies.more_kl(run, target=target), remedies.scale_lr(run, 0.5), *remedies.return_to_best(run)]
    if run.config.reference.kind == "frozen" and len(kl):
        follow = {"--reference.kind": "mixed", "--reference.update-every": str(max(run.config.steps // 10, 1))}
        changes.append(Change(follow, "or: a reference that follows the policy, which only limits its speed"))
    thirds = (loss, *(loss.third(i) for i in range(3)))
    return Finding(measured(thirds, kl, reward, held_out, run["entropy/mean_nats"]), meaning, changes)


def check_advantages(run: Record) -> Finding | None:
    low, high, mean, std = (run[f"advantage/{name}"] for name in ("min", "max", "mean", "std"))
    extremes = [max(abs(a), abs(b)) / s for a, b, s in zip(low.values, high.values, std.values, strict=False) if s > 0]
    extreme = statistics.median(extremes) if extremes else 0.0
    shift = mean.last_mean / std.last_mean if std.last_mean > 0 else 0.0
    o = run.config.objective
    if extreme > EXTREME:
        meaning = (
            f"in half of the steps one advantage is more than {extreme:.0f} standard deviations from 0: a few rows "
            "decide the update."
        )
        limit = float(remedies.number(3 * std.span().mean))
        changes = remedies.set_objective(run, "three standard deviations", adv_clip=limit)
        if o.scale == "none" and not o.has_critic:
            changes += remedies.set_objective(run, "divides by the standard deviation within groups", scale="running")
    elif abs(shift) > SHIFTED and not o.has_critic:
        side, effect = ("below", "discouraged") if shift < 0 else ("above", "reinforced")
        meaning = (
            f"rewards are {abs(shift):.1f} standard deviations {side} the baseline ({o.baseline}) on average: samples "
            f"are {effect} regardless of how they compare with their group."
        )
        changes = remedies.set_objective(run, "compares each reward with its own group", baseline="mean")
    else:
        return None
    return Finding(measured(mean, std, low, high), meaning, changes)


def check_critic(run: Record) -> Finding | None:
    explained, loss, clipped = run["value/explained_variance_frac"], run["loss/value"], run["value/clip_frac"]
    is_worse = explained.last_mean < WORSE_THAN_MEAN
    is_clipped = len(clipped) >= TREND_STEPS and clipped.last_mean > VALUES_CLIPPED
    if not is_worse and not is_clipped:
        return None
    config, meaning, changes = run.config, [], list[Change]()
    if is_clipped:
        meaning.append(f"{clipped.last_mean:.0%} of the critic's values are clipped.")
        clip = config.objective.value_clip
        changes += remedies.set_objective(run, f"three times {clip:g}", value_clip=3 * clip)
    if is_worse:
        meaning.append("the critic predicts returns worse than their mean would, and its errors enter the advantages.")
        lr = config.optim.lr if config.critic.lr is None else config.critic.lr
        is_growing = len(loss) >= TREND_STEPS and loss.rises()
        factor, why = (0.3, "a third of") if is_growing else (3.0, "three times")
        changes.append(Change({"--critic.lr": remedies.number(lr * factor)}, f"{why} {lr:g}"))
        if not config.critic.warmup_steps:
            steps = str(max(config.steps // 20, 1))
            changes.append(Change({"--critic.warmup-steps": steps}, "trains the critic alone at first"))
    evidence = measured(explained, loss, clipped, run["return/std"], run["grad/critic_norm"])
    return Finding(evidence, " ".join(meaning), changes)


def check_denoising_steps(run: Record) -> Finding | None:
    series = {int(step): run[name] for name, step in run.named(r"timestep/kl_ref_nats/(\d+)")}
    kl = {step: abs(s.last_mean) for step, s in series.items() if len(s)}
    worst, total = max(kl, key=kl.__getitem__), sum(kl.values())
    if len(kl) < 4 or total <= 0 or kl[worst] < ONE_STEP * total:
        return None
    meaning = (
        f"denoising step {worst} has {kl[worst] / total:.0%} of the KL: where the noise is smallest, the same change "
        "of the image counts most, so the KL coefficient acts on this step alone."
    )
    is_last = worst == max(kl) and worst > 0
    changes = [Change({"--diffusion.train-to": str(worst)}, "trains only the steps before it")] if is_last else []
    return Finding(measured(series[worst], run["kl/ref_nats"]), meaning, changes)


def check_gradient_norm(run: Record) -> Finding | None:
    norm, limit = run["grad/norm"], run.config.optim.max_grad_norm
    median, above = statistics.median(norm.values), sum(value > limit for value in norm.values) / len(norm)
    if not limit or above < ALWAYS_CLIPPED or median < FAR_ABOVE * limit:
        return None
    meaning = (
        f"the gradient is scaled down in {above:.0%} of the steps, by a median factor of {median / limit:.0f}: steps "
        "with much and with little to learn have the same size. Check advantages and ratios first."
    )
    higher = Change(
        {"--optim.max-grad-norm": remedies.number(median)}, "the median norm: half of the steps stay unchanged"
    )
    evidence = measured(norm, run["advantage/mean_abs"], run["ratio/max"], run["loss/policy"])
    return Finding(evidence, meaning, [higher, remedies.scale_lr(run, 0.5)])


def check_skipped(run: Record) -> Finding | None:
    skipped, total = run["update/skipped_count"], sum(run["update/skipped_count"].values)
    if not total:
        return None
    updates = total + sum(run["update/updates_count"].values)
    steps = [str(step) for step, value in zip(skipped.steps, skipped.values, strict=True) if value]
    where = ", ".join(steps[:5]) + (", ..." if len(steps) > 5 else "")
    meaning = (
        f"{total:.0f} of {updates:.0f} updates had a non-finite gradient and were skipped (steps {where}): log-ratios "
        "or values overflow. Three in a row stop the run."
    )
    evidence = measured((skipped, skipped.span()), run["grad/norm"], run["ratio/max"])
    return Finding(evidence, meaning, [remedies.scale_lr(run, 0.5), *remedies.use_float32(run)])


def check_warmup(run: Record) -> Finding | None:
    """A warm-up that lasts as long as its stage, or a learning rate of 0."""
    lr, config, numbers = run["optim/lr"], run.config, run["stage/number"]
    lr_at, stage_at = dict(zip(lr.steps, lr.values, strict=True)), dict(zip(numbers.steps, numbers.values, strict=True))
    for index, stage in enumerate(config.plan):
        steps = [s for s in lr.steps if s > 0 and (len(config.plan) == 1 or stage_at.get(s) == index + 1)]
        if not steps:
            continue
        reached, peak = max(lr_at[step] for step in steps), peak_lr(config, index)
        is_over = index < run.stage_at(run.steps)
        length = len(steps) if is_over else stage.steps or config.steps - steps[0] + 1
        # The run's warm-up may reach into a stage without a learning rate of its own.
        run_warmup = 0 if stage.lr is not None else config.optim.warmup_steps - (steps[0] - 1)
        warmup = max(stage.warmup_steps, run_warmup)
        if peak and (length < 2 or warmup < length):
            continue
        name = f"stage {stage.name or index}" if len(config.plan) > 1 else "the run"
        prefix = f"--{where_of(config, index)}"
        if not peak:
            meaning = f"the learning rate of {name} is 0, so nothing is learned."
            change = Change({f"{prefix}.lr" if stage.lr is not None else "--optim.lr": "1e-06"}, "currently 0")
        else:
            meaning = (
                f"the warm-up takes {warmup} steps and {name} has {length}: the learning rate reached {reached:.3g} of "
                f"{peak:.3g}. Metrics that do not change here have had no time to."
            )
            option = f"{prefix}.warmup-steps" if stage.warmup_steps >= run_warmup else "--optim.warmup-steps"
            change = Change({option: str(max(length // 10, 1))}, f"a tenth of {length} steps")
        ends = (lr.at(lr.steps.index(steps[0])), lr.at(lr.steps.index(steps[-1])))
        return Finding(measured((lr, *ends)), meaning, [change])
    return None


def check_unchanged_weights(run: Record) -> Finding | None:
    changed = run["update/changed_frac"]
    if changed.span().mean >= MIN_CHANGED:
        return None
    meaning = (
        f"an update changes only {changed.span().mean:.1%} of the trained weights; the rest is lost in rounding: the "
        "steps are smaller than the precision of the weights."
    )
    return Finding(measured((changed, changed.span()), run["optim/lr"]), meaning, [remedies.scale_lr(run, 10.0)])


def check_memory(run: Record) -> Finding | None:
    found = re.findall(r"step (\d+): [^\n]*?(\d+) tokens[^\n]*--optim\.token-budget (\d+)", run.log)
    if not found:
        return None
    first, last = found[0], found[-1]
    times = "once" if len(found) == 1 else f"{len(found)} times"
    meaning = (
        f"memory ran out {times}, and the update was repeated with smaller micro-batches. This costs time and does not "
        "change the result. Start with the size that fitted in the end."
    )
    sizes = Series("tokens per micro-batch", (int(first[0]), int(last[0])), (float(first[1]), float(last[2])))
    change = Change({"--optim.token-budget": last[2]}, f"reached from {first[1]}")
    return Finding(measured((sizes, sizes.at(0), sizes.at(1)), run["mem/peak_gib"]), meaning, [change])


def check_returns(run: Record) -> Finding | None:
    count, back_off = run["back_off/returns_count"], run.config.back_off
    if not len(count) or count.values[-1] < MAX_RETURNS:
        return None
    meaning = (
        f"the run has returned to its best weights {count.values[-1]:.0f} times, each time with {back_off.lr_factor:g} "
        "of the learning rate. Either learning makes the metric worse, or its noise exceeds the allowed drop."
    )
    changes = [remedies.scale_lr(run, 0.5)]
    if back_off.drop:
        changes.append(Change({"--back-off.drop": remedies.number(2 * back_off.drop)}, f"twice {back_off.drop:g}"))
    return Finding(measured((count, count.at(-1)), run[back_off.metric]), meaning, changes)


RULES = (
    Rule("skipped-updates", "Updates were skipped", check_skipped, ("update/skipped_count",), is_first=True),
    Rule("warmup-too-long", "The warm-up is too long", check_warmup, ("optim/lr",), is_first=True),
    Rule(
        "unchanged-weights",
        "The weights do not change",
        check_unchanged_weights,
        ("update/changed_frac",),
        is_first=True,
    ),
    Rule("policy-loss", "The policy loss is positive and grows", check_policy_loss, ("loss/policy",), TREND_STEPS),
    Rule("supervised-loss", "The supervised loss does not fall", check_supervised_loss, ("loss/sup",), TREND_STEPS),
    Rule("consistency-loss", "The consistency loss keeps rising", check_consistency_loss, ("loss/cons",), TREND_STEPS),
    Rule(
        "advantages", "The advantages are extreme or shifted", check_advantages, ("advantage/std", "advantage/max"), 3
    ),
    Rule("critic", "The critic does not help", check_critic, ("value/explained_variance_frac",), TREND_STEPS),
    Rule("denoising-step", "One denoising step has the KL", check_denoising_steps, ("timestep/kl_ref_nats/",), 3),
    Rule("gradient-clipping", "Every gradient is clipped", check_gradient_norm, ("grad/norm",), TREND_STEPS),
    Rule("out-of-memory", "Memory ran out", check_memory),
    Rule("repeated-back-off", "The run keeps returning to its best weights", check_returns),
)
