"""Checks of the policy: importance ratios, sampler mismatch, entropy, KL, clipping and lengths."""

from __future__ import annotations

from gruppo.core.loss import clip_range
from gruppo.core.schedules import AdaptiveSpec, parse_schedule
from gruppo.doctor import remedies
from gruppo.doctor.findings import TREND_STEPS, Change, Match
from gruppo.doctor.record import Record

COLLAPSED = 0.1
"""Fraction of the first entropy that is left after a collapse. Learning alone gets there too (0.1 in the arithmetic
recipe), so it counts only where the reward has stopped improving below its maximum."""
KL_GROWTH = 3.0
"""Ratio of the KL of the last third to that of the middle one: linear growth gives 1.7, quadratic growth 2.7."""
KL_MIN = 0.1
"""Nats per action below which a growing KL does no harm yet."""
KL_MAX = 5.0
"""Nats per token at which a language model has lost its reference. Images have other scales."""
KL_OVER_TARGET = 5.0
"""Ratio of the KL to a controller's target beyond which the controller has lost it."""
CLIPPED = 0.3
"""Fraction of actions without a gradient because of the clip, above which most of a batch is wasted."""
INERT = 0.1
"""Fraction of the clip range that no ratio has exceeded in the whole run."""
STOPPED = 0.5
"""Fraction of batches that stop_kl ends before all updates were made."""
LENGTH_GROWTH = 1.5
TRUNCATED = 0.25
"""Fraction of completions that end at the length limit."""
RATIO_MEAN, RATIO_MAX = {False: 0.005, True: 0.02}, {False: 0.02, True: 1.0}
"""Distance from 1 of the ratio of equal weights, without and with bfloat16: rounding, and other batch shapes."""
MISMATCH_TEXT, MISMATCH_IMAGES = {False: 1e-3, True: 0.1}, {False: 0.02, True: 0.1}
"""Nats per action between the log-probs of sampler and trainer that rounding explains, without and with bfloat16.
Measured: 1e-7 and 0.06 for text; 0.008 for the joint density of 16 384 dimensions in float32."""
MISMATCH_TAIL = 50.0
"""Ratio of the largest mismatch of a step to the allowed mean: a few bad tokens spoil a batch unseen by the mean."""


def check_ratio_not_1(run: Record) -> Match | None:
    optim = run.config.optim
    if optim.minibatches > 1:
        return None  # the first epoch then includes later updates
    prefix = "ratio/" if optim.epochs == 1 else "epoch/1/ratio_"
    mean, largest = run[f"{prefix}mean"], run[f"{prefix}max"]
    off = {i for i, value in enumerate(mean.values) if abs(value - 1) > RATIO_MEAN[run.is_bfloat16]}
    off |= {i for i, value in enumerate(largest.values) if abs(value - 1) > RATIO_MAX[run.is_bfloat16]}
    if not off or not len(largest):
        return None
    worst = max(range(len(largest)), key=lambda i: abs(largest.values[i] - 1))
    evidence = [(mean, [mean.third(0), mean.third(2)]), (largest, [largest.at(worst)])]
    return Match(remedies.use_float32(run), values={"off": len(off), "steps": len(largest)}, evidence=evidence)


def check_mismatch(run: Record) -> Match | None:
    mean, largest = run["mismatch/mean_nats"], run["mismatch/max_nats"]
    allowed = (MISMATCH_IMAGES if run.is_image_run else MISMATCH_TEXT)[run.is_bfloat16]
    if mean.last_mean <= allowed and not largest.last_mean > MISMATCH_TAIL * allowed:
        return None
    case = "stale" if mean.values[0] <= allowed < mean.last_mean else "different"
    why = "weights actions by their probability under the trainer, at most 2"
    changes = remedies.use_float32(run)
    changes += remedies.set_objective(run, why, correction="truncate", correction_high=2.0)
    return Match(changes, case, evidence=[(mean, [mean.at(0)])])


def check_entropy_collapse(run: Record) -> Match | None:
    entropy, reward, o = run["entropy/mean_nats"], run.reward, run.config.objective
    start, last = entropy.span(0, 3).mean, entropy.last_mean
    # The entropy of continuous actions may be negative, and has no natural zero to collapse to.
    if min(entropy.values) < 0 or last > COLLAPSED * start or not run.is_stuck:
        return None
    bonus = {run.option("entropy_coef"): f"adaptive:0,target={remedies.number(start / 2)},delta=0.005"}
    changes = [Change(bonus, "keeps half of the initial entropy"), *remedies.higher_temperature(run)]
    if o.surrogate == "clip" and run.config.updates_per_batch > 1 and o.clip_unit == "ratio" and o.clip_high < 0.28:
        changes += remedies.set_objective(run, "DAPO's: lets rare actions grow", clip_high=0.28)
    thirds = [entropy.third(0), entropy.third(2)]
    evidence = [(entropy, [entropy.at(0)]), (entropy, thirds), (reward, [reward.third(1), reward.third(2)])]
    return Match(changes, values={"lost": 1 - last / start}, evidence=evidence)


def check_kl_blow_up(run: Record) -> Match | None:
    kl, reward = run["kl/ref_nats"], run.reward
    middle, last = kl.third(1).mean, kl.last_mean
    coefficient = parse_schedule(run.stage.kl_coef, "kl_coef")
    target = dict(coefficient.settings).get("target", 0.0) if isinstance(coefficient, AdaptiveSpec) else 0.0
    rises = len(reward) >= TREND_STEPS and reward.rises(1, 2)
    is_diverging = last > KL_GROWTH * middle and last > KL_MIN and not rises
    is_far = last > KL_MAX and not run.is_image_run
    if not is_diverging and not is_far and not (target and last > KL_OVER_TARGET * target):
        return None
    changes = [remedies.more_kl(run, target=target / 2 or middle), remedies.scale_lr(run, 0.5)]
    changes += remedies.return_to_best(run)
    return Match(changes, "useful" if rises else "useless", evidence=[(kl, [kl.third(i) for i in range(3)])])


def check_over_clipping(run: Record) -> Match | None:
    low, old_kl, o = run["clip/low_frac"], run["kl/old_k3_nats"], run.config.objective
    fraction = run["clip/high_frac"].last_mean + (low.last_mean if len(low) else 0.0)
    if fraction < CLIPPED:
        return None
    changes = [remedies.scale_lr(run, 0.5), *remedies.fewer_updates(run)]
    if run.is_image_run:
        wide = {"clip_unit": "nats", "dims": "sum", "clip_low": 1.0, "clip_high": 1.0}
        changes += remedies.set_objective(run, "a range in nats for the whole image", **wide)
    elif not run.config.optim.stop_kl and run.config.updates_per_batch > 1:
        half = remedies.number(old_kl.last_mean / 2) if old_kl.last_mean > 0 else "0.02"
        changes.append(Change({"--optim.stop-kl": half}, "ends a batch at half the KL that it reaches now"))
    elif o.surrogate == "clip" and o.ratio == "sequence":
        changes += remedies.set_objective(run, "one ratio per token", ratio="token", clip_low=0.2, clip_high=0.2)
    return Match(changes, "images" if run.is_image_run else "actions", {"fraction": fraction})


def check_inert_clip(run: Record) -> Match | None:
    o, updates, ratio = run.config.objective, run.config.updates_per_batch, run["ratio/max"]
    high = run["clip/high_frac"]
    clipped = sum(high.values) + sum(run["clip/low_frac"].values)
    limit, largest = clip_range(o)[1], max(ratio.values) - 1
    if updates < 2 or o.surrogate != "clip" or clipped > 0 or largest > INERT * limit:
        return None
    changes = [remedies.scale_lr(run, 3.0)]
    if o.dims == "mean":
        changes += remedies.set_objective(run, "joint ratio of all dimensions, in nats", dims="sum", clip_unit="nats")
    values = {"updates": updates, "largest": largest, "limit": limit}
    evidence = [(ratio, [ratio.at(ratio.values.index(max(ratio.values)))]), (high, [high.span()])]
    return Match(changes, "exact" if largest <= 0 else "small", values, evidence)


def check_early_stop(run: Record) -> Match | None:
    stopped = run["update/early_stop_frac"]
    if stopped.span().mean < STOPPED:
        return None
    values = {"stopped": stopped.span().mean, "limit": run.config.optim.stop_kl}
    changes = [remedies.scale_lr(run, 0.5), *remedies.fewer_updates(run)]
    return Match(changes, values=values, evidence=[(stopped, [stopped.span()])])


def check_length_growth(run: Record) -> Match | None:
    length = run["len/mean_actions"]
    first, last = length.third(0).mean, length.last_mean
    if last < LENGTH_GROWTH * first or run.reward.rises(1, 2):
        return None
    changes = remedies.shorter(run)
    if run.config.objective.average == "sequence":
        changes = remedies.set_objective(run, "same denominator for short and long", average="constant") + changes
    return Match(changes, values={"growth": last / first})


def check_truncation(run: Record) -> Match | None:
    truncated, limit = run["finish/truncated_frac"].last_mean, run.config.rollout.max_new_tokens
    if truncated < TRUNCATED:
        return None
    changes = [Change({"--rollout.max-new-tokens": str(2 * limit)}, f"twice {limit}"), *remedies.shorter(run)]
    return Match(changes, values={"truncated": truncated, "limit": limit})
