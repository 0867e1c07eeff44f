"""Rules about the policy: importance ratios, sampler mismatch, entropy, KL, clipping and lengths."""

from __future__ import annotations

from gruppo.core.loss import clip_range
from gruppo.core.schedules import AdaptiveSpec, parse_schedule
from gruppo.doctor import remedies
from gruppo.doctor.findings import TREND_STEPS, Change, Finding, Rule, measured
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


def check_ratio(run: Record) -> Finding | None:
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
    meaning = (
        "before the first update of a batch the old and new weights are equal, yet the ratio was not 1 in "
        f"{len(off)} of {len(largest)} steps: log-probs depend on more than the weights. Look for dropout, batch "
        "statistics, a module with state, or rounding; gruppo.testing.check_policy names the cause."
    )
    return Finding(measured(mean, (largest, largest.at(worst))), meaning, remedies.use_float32(run))


def check_mismatch(run: Record) -> Finding | None:
    mean, largest = run["mismatch/mean_nats"], run["mismatch/max_nats"]
    allowed = (MISMATCH_IMAGES if run.is_image_run else MISMATCH_TEXT)[run.is_bfloat16]
    if mean.last_mean <= allowed and not largest.last_mean > MISMATCH_TAIL * allowed:
        return None
    if mean.values[0] <= allowed < mean.last_mean:
        meaning = (
            "sampler and trainer agreed at first and no longer do: the sampler has older weights. Its weight sync "
            "fails, or comes late."
        )
    else:
        meaning = (
            "sampler and trainer disagree from the first step on, with equal weights: they differ in temperature, "
            "top-k, top-p, tokenization or precision. The samples come from another policy than the one that learns."
        )
    why = "weights actions by their probability under the trainer, at most 2"
    changes = remedies.use_float32(run) + remedies.set_objective(run, why, correction="truncate", correction_high=2.0)
    return Finding(measured((mean, mean.at(0)), mean, largest), meaning, changes)


def check_entropy(run: Record) -> Finding | None:
    entropy, o = run["entropy/mean_nats"], run.config.objective
    start, last = entropy.span(0, 3).mean, entropy.last_mean
    # The entropy of continuous actions may be negative, and has no natural zero to collapse to.
    if min(entropy.values) < 0 or last > COLLAPSED * start or not run.is_stuck:
        return None
    meaning = (
        f"{1 - last / start:.0%} of the entropy is lost and the reward no longer rises: the policy repeats the same "
        "answers and has stopped exploring."
    )
    bonus = {run.option("entropy_coef"): f"adaptive:0,target={remedies.number(start / 2)},delta=0.005"}
    changes = [Change(bonus, "keeps half of the initial entropy"), *remedies.higher_temperature(run)]
    if o.surrogate == "clip" and run.config.updates_per_batch > 1 and o.clip_unit == "ratio" and o.clip_high < 0.28:
        changes += remedies.set_objective(run, "DAPO's: lets rare actions grow", clip_high=0.28)
    thirds = (run.reward, run.reward.third(1), run.reward.third(2))
    return Finding(measured((entropy, entropy.at(0)), entropy, thirds, run["group/zero_spread_frac"]), meaning, changes)


def check_kl(run: Record) -> Finding | None:
    kl, reward = run["kl/ref_nats"], run.reward
    middle, last = kl.third(1).mean, kl.last_mean
    coefficient = parse_schedule(run.stage.kl_coef, "kl_coef")
    target = dict(coefficient.settings).get("target", 0.0) if isinstance(coefficient, AdaptiveSpec) else 0.0
    rises = len(reward) >= TREND_STEPS and reward.rises(1, 2)
    is_diverging = last > KL_GROWTH * middle and last > KL_MIN and not rises
    is_far = last > KL_MAX and not run.is_image_run
    if not is_diverging and not is_far and not (target and last > KL_OVER_TARGET * target):
        return None
    cause = "" if rises else " and the reward does not rise with it: it follows noise or flaws of the reward"
    meaning = f"the policy diverges from its reference{cause}."
    changes = [
        remedies.more_kl(run, target=target / 2 or middle),
        remedies.scale_lr(run, 0.5),
        *remedies.return_to_best(run),
    ]
    thirds = (kl, *(kl.third(number) for number in range(3)))
    return Finding(measured(thirds, reward, run["entropy/mean_nats"], run["stage/kl_coef"]), meaning, changes)


def check_over_clipping(run: Record) -> Finding | None:
    high, low, old_kl = run["clip/high_frac"], run["clip/low_frac"], run["kl/old_k3_nats"]
    fraction = high.last_mean + (low.last_mean if len(low) else 0.0)
    if fraction < CLIPPED:
        return None
    o, optim = run.config.objective, run.config.optim
    meaning = f"the clip removes the gradient of {fraction:.0%} of the actions: the updates of a batch are too large."
    changes = [remedies.scale_lr(run, 0.5), *remedies.fewer_updates(run)]
    if run.is_image_run:
        meaning += " The ratio of an image is the product over all its dimensions and soon leaves a small range."
        range_ = {"clip_unit": "nats", "dims": "sum", "clip_low": 1.0, "clip_high": 1.0}
        changes += remedies.set_objective(run, "a range in nats for the whole image", **range_)
    elif not optim.stop_kl and run.config.updates_per_batch > 1:
        half = remedies.number(old_kl.last_mean / 2) if old_kl.last_mean > 0 else "0.02"
        changes.append(Change({"--optim.stop-kl": half}, "ends a batch at half the KL that it reaches now"))
    elif o.surrogate == "clip" and o.ratio == "sequence":
        changes += remedies.set_objective(run, "one ratio per token", ratio="token", clip_low=0.2, clip_high=0.2)
    return Finding(measured(high, low, run["ratio/max"], old_kl), meaning, changes)


def check_inert_clip(run: Record) -> Finding | None:
    o, updates, ratio = run.config.objective, run.config.updates_per_batch, run["ratio/max"]
    clipped = sum(run["clip/high_frac"].values) + sum(run["clip/low_frac"].values)
    limit, largest = clip_range(o)[1], max(ratio.values) - 1
    if updates < 2 or o.surrogate != "clip" or clipped > 0 or largest > INERT * limit:
        return None
    if largest <= 0:
        meaning = (
            f"each batch is used for {updates} updates and the ratio is exactly 1: either nothing changes, or the old "
            "log-probs come from the same forward pass as the new ones, so that nothing can be clipped."
        )
    else:
        meaning = (
            f"each batch is used for {updates} updates and no ratio differs from 1 by more than {largest:.2g}, while "
            f"the clip starts at {limit:.2g}: the clip does nothing, and the additional updates little."
        )
    changes = [remedies.scale_lr(run, 3.0)]
    if o.dims == "mean":
        changes += remedies.set_objective(run, "joint ratio of all dimensions, in nats", dims="sum", clip_unit="nats")
    evidence = (ratio, ratio.at(ratio.values.index(max(ratio.values))))
    high = (run["clip/high_frac"], run["clip/high_frac"].span())
    return Finding(measured(evidence, high, run["kl/old_k3_nats"]), meaning, changes)


def check_early_stop(run: Record) -> Finding | None:
    stopped = run["update/early_stop_frac"]
    if stopped.span().mean < STOPPED:
        return None
    meaning = (
        f"in {stopped.span().mean:.0%} of the steps the KL to the sampling policy exceeds {run.config.optim.stop_kl:g} "
        "nats, and the remaining updates of the batch are skipped: each update is too large."
    )
    evidence = measured((stopped, stopped.span()), run["update/epochs_count"], run["kl/old_k3_nats"])
    return Finding(evidence, meaning, [remedies.scale_lr(run, 0.5), *remedies.fewer_updates(run)])


def length_penalty(run: Record) -> list[Change]:
    limit = run.config.rollout.max_new_tokens
    if run.config.objective.overlong or limit < 5:
        return remedies.set_objective(run, "ignores truncated completions", mask_truncated=True)
    return remedies.set_objective(run, "penalizes the last fifth before the limit (DAPO)", overlong=limit // 5)


def check_length(run: Record) -> Finding | None:
    length, reward = run["len/mean_actions"], run.reward
    first, last = length.third(0).mean, length.last_mean
    if last < LENGTH_GROWTH * first or reward.rises(1, 2):
        return None
    meaning = (
        f"completions are {last / first:.1f} times as long as at the start and the reward does not rise with them: "
        "length pays off by itself. A mean over each completion's own tokens makes long wrong answers cheap."
    )
    changes = length_penalty(run)
    if run.config.objective.average == "sequence":
        changes = remedies.set_objective(run, "same denominator for short and long", average="constant") + changes
    return Finding(measured(length, reward, run["finish/truncated_frac"]), meaning, changes)


def check_truncation(run: Record) -> Finding | None:
    truncated, limit = run["finish/truncated_frac"], run.config.rollout.max_new_tokens
    if truncated.last_mean < TRUNCATED:
        return None
    meaning = (
        f"{truncated.last_mean:.0%} of the completions are cut off at {limit} tokens, so only the beginning of an "
        "answer is rewarded. Either the format has no end, or the limit is too low."
    )
    changes = [Change({"--rollout.max-new-tokens": str(2 * limit)}, f"twice {limit}"), *length_penalty(run)]
    return Finding(measured(truncated, run["len/mean_actions"], run.reward), meaning, changes)


RULES = (
    Rule(
        "ratio-not-1", "The ratio is not 1 at the first update", check_ratio, ("ratio/max", "ratio/mean"), is_first=True
    ),
    Rule("mismatch", "Sampler and trainer disagree", check_mismatch, ("mismatch/mean_nats",), 3, is_first=True),
    Rule("entropy-collapse", "The entropy has collapsed", check_entropy, ("entropy/mean_nats",), TREND_STEPS),
    Rule("kl-blow-up", "The KL diverges", check_kl, ("kl/ref_nats",), TREND_STEPS),
    Rule("over-clipping", "Too many actions are clipped", check_over_clipping, ("clip/high_frac", "ratio/max"), 3),
    Rule("inert-clip", "The clip has no effect", check_inert_clip, ("ratio/max", "clip/high_frac"), TREND_STEPS),
    Rule("early-stop", "Most batches are stopped early", check_early_stop, ("update/early_stop_frac",), 3),
    Rule(
        "length-growth",
        "Completions grow, the reward does not",
        check_length,
        ("len/mean_actions", "reward/mean"),
        TREND_STEPS,
    ),
    Rule("truncation", "Completions are truncated", check_truncation, ("finish/truncated_frac",), 3),
)
