"""Checks of the policy: importance ratios, sampler mismatch, entropy, KL, clipping and lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gruppo.core.loss import clip_range
from gruppo.core.schedules import AdaptiveSpec, parse_schedule
from gruppo.doctor import remedies
from gruppo.doctor.record import TREND_STEPS, Record
from gruppo.doctor.remedies import Change, Match


def check_log_probs(run: Record) -> Iterator[Match]:
    """Likelihoods of equal weights: new and old ones, and those of trainer and sampler."""
    optim = run.config.optim
    prefix = "ratio/" if optim.epochs == 1 else "epoch/1/ratio_"
    mean, largest = run[f"{prefix}mean"], run[f"{prefix}max"]
    mean_error, max_error = (
        (0.02, 1.0) if run.is_bfloat16 else (0.005, 0.02)
    )  # of rounding and other batch shapes
    off = {i for i, value in enumerate(mean.values) if abs(value - 1) > mean_error}
    off |= {i for i, value in enumerate(largest.values) if abs(value - 1) > max_error}
    if (
        off and len(largest) and optim.minibatches == 1
    ):  # with more, the first epoch includes later updates
        worst = max(range(len(largest)), key=lambda i: abs(largest.values[i] - 1))
        evidence = [(mean, [mean.third(0), mean.third(2)]), (largest, [largest.at(worst)])]
        yield Match(
            "ratio-not-1",
            remedies.use_float32(run),
            "",
            {"off": len(off), "steps": len(largest)},
            evidence,
        )

    # Nats per action that rounding explains. Measured: 1e-7 in float32 and 0.06 in bfloat16 for text; 0.008 for the
    # joint density of 16,384 dimensions in float32. A few bad tokens spoil a batch without moving the mean.
    mean, largest = run["mismatch/mean_nats"], run["mismatch/max_nats"]
    allowed = 0.1 if run.is_bfloat16 else 0.02 if run.is_image_run else 1e-3
    if mean.last_mean > allowed or largest.last_mean > 50 * allowed:
        case = "stale" if mean.at(0).mean <= allowed < mean.last_mean else "different"
        why = "weights actions by their probability under the trainer, at most 2"
        changes = remedies.use_float32(run)
        changes += remedies.set_objective(run, why, correction="truncate", correction_high=2.0)
        yield Match("mismatch", changes, case, evidence=[(mean, [mean.at(0)])])


def check_entropy_and_kl(run: Record) -> Iterator[Match]:
    entropy, kl, reward, o = (
        run["entropy/mean_nats"],
        run["kl/ref_nats"],
        run.reward,
        run.config.objective,
    )
    start, last = entropy.span(0, 3).mean, entropy.last_mean
    # Learning alone brings the entropy to a tenth, too (arithmetic recipe), so it counts only where the reward is
    # stuck. The entropy of continuous actions may be negative, and has no natural zero to collapse to.
    if last <= 0.1 * start and min(entropy.values) >= 0 and run.is_stuck:
        bonus = {
            run.option(
                "entropy_coef"
            ): f"adaptive:0,target={remedies.number(start / 2)},delta=0.005"
        }
        changes = [
            Change(bonus, "keeps half of the initial entropy"),
            *remedies.higher_temperature(run),
        ]
        if (
            o.surrogate == "clip"
            and run.config.updates_per_batch > 1
            and o.clip_unit == "ratio"
            and o.clip_high < 0.28
        ):
            changes += remedies.set_objective(run, "DAPO's: lets rare actions grow", clip_high=0.28)
        thirds = [entropy.third(0), entropy.third(2)]
        evidence = [
            (entropy, [entropy.at(0)]),
            (entropy, thirds),
            (reward, [reward.third(1), reward.third(2)]),
        ]
        yield Match("entropy-collapse", changes, "", {"lost": 1 - last / start}, evidence)

    middle, last = kl.third(1).mean, kl.last_mean
    coefficient = parse_schedule(run.stage.kl_coef, "kl_coef")
    target = (
        dict(coefficient.settings).get("target", 0.0)
        if isinstance(coefficient, AdaptiveSpec)
        else 0.0
    )
    rises = len(reward) >= TREND_STEPS and reward.rises(1, 2)
    # Linear growth has a ratio of 1.7 between the thirds, quadratic growth of 2.7; below 0.1 nats it does no harm yet.
    is_diverging = last > 3 * middle and last > 0.1 and not rises
    is_far = (
        last > 5 and not run.is_image_run
    )  # a language model has lost its reference; images have other scales
    if is_diverging or is_far or (target and last > 5 * target):
        more = remedies.more_kl(run, target=target / 2 or middle)
        changes = [more, remedies.scale_lr(run, 0.5), *remedies.return_to_best(run)]
        evidence = [(kl, [kl.third(i) for i in range(3)])]
        yield Match("kl-blow-up", changes, "useful" if rises else "useless", evidence=evidence)

    series = {int(step): run[name] for name, step in run.named(r"timestep/kl_ref_nats/(\d+)")}
    sizes = {step: abs(s.last_mean) for step, s in series.items() if len(s)}
    worst, total = max(sizes, key=sizes.__getitem__, default=0), sum(sizes.values())
    if len(sizes) >= 4 and total > 0 and sizes[worst] >= 0.8 * total:
        is_last = worst == max(sizes) and worst > 0  # any other one cannot be left out by itself
        changes = (
            [Change({"--diffusion.train-to": str(worst)}, "trains only the steps before it")]
            if is_last
            else []
        )
        evidence = [(series[worst], [series[worst].third(0), series[worst].third(2)])]
        yield Match(
            "denoising-step",
            changes,
            "",
            {"worst": worst, "fraction": sizes[worst] / total},
            evidence,
        )


def check_clip(run: Record) -> Iterator[Match]:
    """Too many actions clipped, none at all, or updates that end early instead."""
    high, low, ratio, old_kl = (
        run[n] for n in ("clip/high_frac", "clip/low_frac", "ratio/max", "kl/old_k3_nats")
    )
    o, updates, changes = run.config.objective, run.config.updates_per_batch, list[Change]()
    fewer = [remedies.scale_lr(run, 0.5), *remedies.fewer_updates(run)]
    if (
        fraction := high.last_mean + (low.last_mean if len(low) else 0.0)
    ) >= 0.3:  # most of a batch is wasted
        if run.is_image_run:
            wide = {"clip_unit": "nats", "dims": "sum", "clip_low": 1.0, "clip_high": 1.0}
            changes = remedies.set_objective(run, "a range in nats for the whole image", **wide)
        elif not run.config.optim.stop_kl and updates > 1:
            half = remedies.number(old_kl.last_mean / 2) if old_kl.last_mean > 0 else "0.02"
            changes = [
                Change({"--optim.stop-kl": half}, "ends a batch at half the KL that it reaches now")
            ]
        elif o.surrogate == "clip" and o.ratio == "sequence":
            changes = remedies.set_objective(
                run, "one ratio per token", ratio="token", clip_low=0.2, clip_high=0.2
            )
        case = "images" if run.is_image_run else "actions"
        yield Match("over-clipping", [*fewer, *changes], case, {"fraction": fraction})

    # The clip is inert where no ratio of the whole run has come farther than a tenth of the way to it.
    limit, largest = clip_range(o)[1], max(ratio.values, default=math.nan) - 1
    if (
        updates > 1
        and o.surrogate == "clip"
        and not any(high.values + low.values)
        and largest <= 0.1 * limit
    ):
        changes = [remedies.scale_lr(run, 3.0)]
        if (
            o.dims == "mean"
        ):  # an average over thousands of dimensions stays near 1 however far the policy moves
            why = "joint ratio of all dimensions, in nats"
            changes += remedies.set_objective(run, why, dims="sum", clip_unit="nats")
        values = {"updates": updates, "largest": largest, "limit": limit}
        evidence = [
            (ratio, [ratio.at(ratio.values.index(max(ratio.values)))]),
            (high, [high.span()]),
        ]
        yield Match("inert-clip", changes, "exact" if largest <= 0 else "small", values, evidence)

    stops = run["update/early_stop_frac"]
    if (stopped := stops.span()).mean >= 0.5:
        yield Match("early-stop", fewer, "", {"stopped": stopped.mean}, [(stops, [stopped])])


def check_lengths(run: Record) -> Iterator[Match]:
    length, truncated, limit = (
        run["len/mean_actions"],
        run["finish/truncated_frac"],
        run.config.rollout.max_new_tokens,
    )
    first, last = length.third(0).mean, length.last_mean
    if 0 < 1.5 * first <= last and not run.reward.rises(1, 2):
        changes = remedies.shorter(run)
        if run.config.objective.average == "sequence":
            changes = (
                remedies.set_objective(
                    run, "same denominator for short and long", average="constant"
                )
                + changes
            )
        yield Match("length-growth", changes, "", {"growth": last / first})
    if truncated.last_mean >= 0.25:
        longer = Change({"--rollout.max-new-tokens": str(2 * limit)}, f"twice {limit}")
        is_cause = truncated.last_mean >= 0.9 and not any(run["reward/std_within_group"].values)
        yield Match(
            "truncation", [longer, *remedies.shorter(run)], blocks=is_cause and len(run.reward) > 0
        )
