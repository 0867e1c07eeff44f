"""Rules about rewards and groups: whether there is something to learn, and whether it is what was meant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from gruppo.doctor import remedies
from gruppo.doctor.findings import TREND_STEPS, Change, Finding, Rule, measured
from gruppo.doctor.record import NEAR_TOP, Record

FAILED = 0.01
"""Fraction of rows whose reward raised, timed out or was not finite. Each one is missing from its group's baseline."""
UNSCORED = 0.2
"""Fraction of rows without a score for any reason. A reward may return None, but not for a fifth of the batch."""
ZERO_SPREAD = 0.6
"""Fraction of groups without spread above which most sampling is wasted. A run that has solved its prompts reaches 0.8
and more, so it counts only while the reward has room to improve."""
OPPOSED = -0.3
"""Correlation within groups below which two rewards work against each other."""
DOMINATED = 20.0
"""Ratio of weighted spreads above which the smaller of two rewards has no influence."""
FLAT_STEPS = 18
"""Steps needed to call a reward flat: six in each third."""
DRIFT = 0.1
"""Nats per action from the reference; a policy that learns nothing has no reason to be this far away."""
MAX_GROUP = 64


def check_failures(run: Record) -> Finding | None:
    unscored = run["reward/unscored_count"]
    # Rows per step from the sizes of the groups: they vary where groups grow.
    sizes = run.named(r"group/size_(\d+)_count")
    rows = sum(int(size) * sum(run[name].values) for name, size in sizes)
    rows = rows or run.config.rollout.prompts * run.config.rollout.group_size * len(unscored)
    counts = {kind: run[f"reward/{kind}_count"] for kind in ("exception", "timeout", "not_finite")}
    totals = {kind: sum(series.values) for kind, series in counts.items()}
    failed, total = sum(totals.values()) / rows, sum(unscored.values) / rows
    if failed < FAILED and total < UNSCORED:
        return None
    messages = Counter(
        f"{failure.get('reward')}: {failure.get('message')}"
        for row in run.samples
        for failure in row.get("failures") or ()
        if isinstance(failure, Mapping)
    )
    meaning = f"{failed if failed >= FAILED else total:.1%} of the sampled rows have no reward and are not learned from"
    if messages:
        meaning += f". Most frequent failure: {' '.join(messages.most_common(1)[0][0].split())[:160].rstrip('.')}"
    elif failed < FAILED:
        meaning += ": the reward function returned None"
    is_timeout = totals["timeout"] > 0 and totals["timeout"] == max(totals.values())
    if failed >= FAILED and not is_timeout:
        meaning += ". Fix the reward function; samples.jsonl has the rows"
    changes, timeout_s = [], run.config.scoring.timeout_s
    if is_timeout and timeout_s is not None:
        changes.append(Change({"--scoring.timeout-s": remedies.number(2 * timeout_s)}, f"twice {timeout_s:g} seconds"))
    evidence = [(series, series.span()) for kind, series in counts.items() if totals[kind]]
    return Finding(measured((unscored, unscored.span()), *evidence), f"{meaning}.", changes)


def check_zero_spread(run: Record) -> Finding | None:
    fraction, spread, rollout = run["group/zero_spread_frac"], run["reward/std_within_group"], run.config.rollout
    has_risen = run.reward.rises()
    if fraction.last_mean < ZERO_SPREAD or run.changes_difficulty or (has_risen and not run.is_stuck):
        return None
    is_constant = not any(spread.values)
    if len(fraction) < TREND_STEPS and not is_constant:
        return None
    rounds = {"--rollout.refill-rounds": str(2 * rollout.refill_rounds or 3)}
    resample = Change(rounds, "replaces groups without spread by new prompts")
    changes: list[Change] = []
    if run.reward_level >= NEAR_TOP:
        meaning = "the prompts are too easy: nearly all samples get the highest reward, so none is better than another."
        changes = [resample]
    elif is_constant:
        meaning = (
            f"every sample has the same reward ({run.reward.span().mean:.3g}), so there is nothing to reinforce. The "
            "task or its format is out of reach, or the reward is too coarse. Start with demonstrations, or give "
            "partial credit."
        )
        if len(run.config.plan) == 1 and run.config.steps >= 2:
            stages = f"supervised:{max(run.config.steps // 10, 1)},full"
            changes = [Change({"--stages": stages}, "demonstrations for a tenth of the steps")]
    else:
        meaning = (
            "in most groups all samples have the same reward, and the reward has stopped improving below its maximum: "
            "the prompts are too hard or too easy for this number of samples."
        )
        sizes, rare = run["group/size_max"], min(run.reward_level, 1 - run.reward_level)
        size = int(sizes.values[-1]) if len(sizes) else rollout.group_size
        # So large that half of the groups contain the rarer answer: 1 - (1 - p)^n >= 1/2; at least twice the size.
        larger = math.ceil(math.log(0.5) / math.log1p(-rare)) if 0 < rare < 1 else 0
        larger = min(max(larger, 2 * size), MAX_GROUP)
        if larger > size and not rollout.first_samples:
            option = "--rollout.group-size" if run.stage.group_size is None else run.option("group_size")
            changes.append(Change({option: str(larger)}, f"rare answers are sampled more often than with {size}"))
        changes += [resample, *remedies.higher_temperature(run)]
    return Finding(measured(fraction, run.reward, spread), meaning, changes)


def check_flat_reward(run: Record) -> Finding | None:
    reward, zero_spread, kl = run.reward, run["group/zero_spread_frac"], run["kl/ref_nats"]
    has_own_rule = zero_spread.last_mean >= ZERO_SPREAD  # then zero-spread explains it
    if has_own_rule or run.changes_difficulty or run.reward_level >= NEAR_TOP or reward.rises():
        return None
    prompts = run.config.rollout.prompts
    more = Change({"--rollout.prompts": str(2 * prompts)}, f"twice {prompts}: less noise in each step")
    if reward.rises(2, 0):
        meaning = "the reward falls: the steps are too large, or they follow noise."
        changes = [remedies.scale_lr(run, 0.5), more]
    elif kl.last_mean > DRIFT and kl.rises():
        meaning = (
            "the reward has not risen by more than its noise while the policy moves away from its reference: the "
            "gradient is mostly noise. Use more samples, not larger steps."
        )
        changes = [more, remedies.scale_lr(run, 0.5)]
    else:
        meaning = (
            "the reward has not risen by more than its noise: the steps are too small, or the gradient is mostly noise."
        )
        changes = [remedies.scale_lr(run, 3.0), more]
    evidence = measured(reward, run["reward/std_within_group"], kl, run["grad/norm"], run["optim/lr"])
    return Finding(evidence, meaning, changes)


def weights_of(run: Record) -> dict[str, float]:
    """Weights of the reward functions by name, without those of weight 0."""
    names = [name for _, name in run.named(r"reward/(.+)/std_within_group")]
    weights = run.config.scoring.weights or (1.0,) * len(names)
    return {name: weight for name, weight in zip(names, weights, strict=False) if weight}


def check_conflict(run: Record) -> Finding | None:
    weights = weights_of(run)
    pairs = {(a, b): run[f"reward_corr_within_group/{a}/{b}"] for a in weights for b in weights if a != b}
    worst = min((pair for pair in pairs if len(pairs[pair])), key=lambda pair: pairs[pair].span().mean, default=None)
    if worst is None or pairs[worst].span().mean > OPPOSED:
        return None
    means = [run[f"reward/{name}/mean"] for name in worst]
    if all(mean.rises() for mean in means):
        return None  # the policy finds answers that satisfy both
    one, other = worst
    meaning = (
        f"among the samples of one prompt, {one} is low where {other} is high: a step that improves one makes the "
        "other worse, and their sum hides it. Decide which matters more, or reward one only where the other is met."
    )
    factors = {name: 0.5 if name == other else 1.0 for name in weights}
    correlation = (pairs[worst], pairs[worst].span())
    changes = remedies.scale_weights(run, factors, f"half the weight of {other}")
    return Finding(measured(correlation, *means), meaning, changes)


def check_dominated(run: Record) -> Finding | None:
    if run.config.objective.combine != "sum_then_normalize":
        return None
    weights = weights_of(run)
    spreads = {name: run[f"reward/{name}/std_within_group"] for name in weights}
    weighted = {name: abs(weights[name]) * s.span().mean for name, s in spreads.items() if any(s.values)}
    if len(weighted) < 2:
        return None
    largest, smallest = max(weighted, key=weighted.__getitem__), min(weighted, key=weighted.__getitem__)
    ratio = weighted[largest] / weighted[smallest]
    if ratio < DOMINATED:
        return None
    meaning = (
        f"within groups, {largest} varies {ratio:.0f} times as much as {smallest}, weights included: {smallest} has "
        "practically no influence. Ignore this if that is intended."
    )
    why = "normalizes each reward by itself, so that only its weight counts"
    factors = {name: weighted[largest] / weighted[name] if name in weighted else 1.0 for name in weights}
    changes = remedies.set_objective(run, why, combine="normalize_then_sum")
    changes += remedies.scale_weights(run, factors, "or: weights that make the spreads equal")
    return Finding(measured(*((spreads[name], spreads[name].span()) for name in (largest, smallest))), meaning, changes)


def check_hacking(run: Record) -> Finding | None:
    reward, held_out, kl = run.reward, run["eval/reward_mean"], run["kl/ref_nats"]
    if len(reward) < TREND_STEPS or not reward.rises():
        return None
    noise, gain = run.evaluation_noise, reward.last_mean - reward.third(0).mean
    best = max(range(len(held_out)), key=lambda i: held_out.values[i])
    change = held_out.values[-1] - held_out.values[0]
    low, high = min(run["reward/min"].values, default=0.0), max(run["reward/max"].values, default=math.inf)
    has_room = held_out.values[0] < low + NEAR_TOP * (high - low)
    # A reward of weight 0 is only monitored: it must not lose a tenth, nor more than its own noise.
    monitored = [run[f"eval/{name}"] for _, name in run.named(r"reward/(.+)/mean") if name not in weights_of(run)]
    fallen = None
    for series in monitored:
        limit = max(0.1 * abs(series.values[0]), 2 * series.noise if len(series) > 2 else 0.0) if len(series) else 0.0
        if len(series) > 1 and series.values[0] - series.values[-1] > limit:
            fallen = series
            break
    if fallen is not None:
        meaning = (
            f"{fallen.name.removeprefix('eval/')}, which has weight 0 and is only monitored, falls while the reward "
            "rises: the policy exploits the reward."
        )
    elif held_out.values[best] - held_out.values[-1] > 2 * noise:
        meaning = (
            "the training reward rises while the held-out reward has dropped from its best value: what is learned does "
            "not generalize, or exploits the reward."
        )
    elif has_room and gain > 2 * noise and change <= noise / 2:
        meaning = (
            "the training reward rises and the held-out reward, measured at temperature 0, does not: sampling has only "
            "become more deterministic, or the training prompts are memorized."
        )
    else:
        return None
    step, config = held_out.steps[best], run.config
    # Aim at the KL where the held-out reward was best; a hundredth of a nat where there was practically none.
    before = [value for at, value in zip(kl.steps, kl.values, strict=True) if at <= step]
    target = max(before[-1] if before else 0.0, 0.01) if len(kl) else 0.02
    changes = [*remedies.return_to_best(run), remedies.more_kl(run, target=target)]
    if len(config.plan) == 1 and 0 < step < config.steps and not config.stage.steps:
        changes.append(Change({"--steps": str(step)}, "where the held-out reward was best"))
    ends = (held_out, held_out.at(0), held_out.at(best), held_out.at(-1))
    watched = [(fallen, fallen.at(0), fallen.at(-1))] if fallen is not None else []
    return Finding(measured(reward, ends, *watched, kl, run["len/mean_actions"]), meaning, changes)


RULES = (
    Rule("reward-failures", "Rewards fail", check_failures, ("reward/unscored_count",), is_first=True),
    Rule(
        "zero-spread",
        "Most groups have no spread in their rewards",
        check_zero_spread,
        ("group/zero_spread_frac", "reward/mean"),
        3,
    ),
    Rule("flat-reward", "The reward does not rise", check_flat_reward, ("reward/mean",), FLAT_STEPS),
    Rule(
        "reward-hacking",
        "The reward rises, but held-out quality does not",
        check_hacking,
        ("eval/reward_mean", "reward/mean"),
        2,
    ),
    Rule("conflicting-rewards", "Two rewards conflict", check_conflict, ("reward_corr_within_group/",), 3),
    Rule("dominated-reward", "One reward dominates another", check_dominated, ("reward_corr_within_group/",)),
)
