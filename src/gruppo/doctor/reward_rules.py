"""Checks of rewards and groups: whether there is something to learn, and whether it is what was meant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from gruppo.doctor import remedies
from gruppo.doctor.record import NEAR_TOP, TREND_STEPS, Record
from gruppo.doctor.remedies import Change, Match
from gruppo.rewards import resolve_reward

ZERO_SPREAD = 0.6
"""Fraction of groups without spread above which most sampling is wasted. A run that has solved its prompts reaches 0.8
and more, so it counts only while the reward has room to improve."""
MAX_GROUP = 64
TEXT_REWARDS = ("exact_match", "numeric_match", "length_target", "keywords", "repetition_penalty")
"""Built-in rewards that read the completion and the answer alone."""


def check_reward_failures(run: Record) -> Iterator[Match]:
    unscored, rollout, timeout_s = (
        run["reward/unscored_count"],
        run.config.rollout,
        run.config.scoring.timeout_s,
    )
    # Rows per step from the sizes of the groups: they vary where groups grow.
    rows = sum(
        int(size) * sum(run[name].values) for name, size in run.named(r"group/size_(\d+)_count")
    )
    rows = rows or rollout.prompts * rollout.group_size * len(unscored) or math.nan
    counts = {kind: run[f"reward/{kind}_count"] for kind in ("exception", "timeout", "not_finite")}
    totals = {kind: sum(series.values) for kind, series in counts.items()}
    failed, total = sum(totals.values()) / rows, sum(unscored.values) / rows
    # Each failed row is missing from its group's baseline. A reward may return None, but not for a fifth of the batch.
    fails = failed >= 0.01
    if not fails and not total >= 0.2:
        return
    failures = [
        failure
        for row in run.samples
        for failure in row.get("failures") or ()
        if isinstance(failure, Mapping)
    ]
    messages = Counter(f"{failure.get('reward')}: {failure.get('message')}" for failure in failures)
    is_timeout = totals["timeout"] > 0 and totals["timeout"] == max(totals.values())
    detail, changes = "" if fails else ": the reward function returned None", list[Change]()
    if messages:
        detail = f". Most frequent failure: {' '.join(messages.most_common(1)[0][0].split())[:160].rstrip('.')}"
    if fails and not is_timeout:
        detail += ". Fix the reward function; samples.jsonl has the rows"
    if is_timeout and timeout_s is not None:
        changes.append(
            Change(
                {"--scoring.timeout-s": remedies.number(2 * timeout_s)},
                f"twice {timeout_s:g} seconds",
            )
        )
    values = {"fraction": failed if fails else total, "detail": detail}
    evidence = [unscored, *(series for kind, series in counts.items() if totals[kind])]
    shown = [(series, [series.span()]) for series in evidence]
    is_constant = not any(
        run["reward/std_within_group"].values
    )  # what was scored cannot be compared either
    yield Match(
        "reward-failures",
        changes,
        "",
        values,
        shown,
        blocks=is_constant or max(failed, total) >= 0.9,
    )


def check_zero_spread(run: Record) -> Iterator[Match]:
    fraction, rollout = run["group/zero_spread_frac"], run.config.rollout
    can_improve = run.is_stuck or not (run.changes_difficulty or run.reward.rises())
    is_constant = not any(run["reward/std_within_group"].values)
    if (
        not fraction.last_mean >= ZERO_SPREAD
        or not can_improve
        or (len(fraction) < TREND_STEPS and not is_constant)
    ):
        return
    rounds = {"--rollout.refill-rounds": str(2 * rollout.refill_rounds or 3)}
    resample = Change(
        rounds, "replaces groups without spread by new prompts"
    )  # dynamic sampling of DAPO
    if run.reward_level >= NEAR_TOP:
        yield Match("zero-spread", [resample], "easy")
    elif is_constant:
        changes: list[Change] = []
        reward, of_targets, specs = run.reward.span().mean, math.nan, run.config.reward
        targets = [
            str(row["target"])
            for row in run.samples
            if isinstance(row.get("target"), str | int | float)
        ]
        # The mean reward of the data's own targets, where no code of the user's has to run for it.
        if targets and all(spec.partition(":")[0] in TEXT_REWARDS for spec in specs):
            inputs = {
                "completions": targets,
                "answer": targets,
                "completion_ids": [list(target) for target in targets],
            }
            scores = [resolve_reward(spec)(**inputs) for spec in specs]
            means = [sum(filter(None, score)) / len(score) for score in scores]
            weights = run.config.scoring.weights or (1.0,) * len(specs)
            of_targets = sum(weight * mean for weight, mean in zip(weights, means, strict=True))
        advice = "Give partial credit, or start with demonstrations that this reward scores higher."
        if of_targets > reward and len(run.config.plan) == 1 and run.config.steps >= 2:
            advice = f"The reward of the data's own targets is {of_targets:.3g}: start with them as demonstrations."
            stages = f"supervised:{max(run.config.steps // 10, 1)},full"
            changes = [Change({"--stages": stages}, "demonstrations for a tenth of the steps")]
        yield Match(
            "zero-spread", changes, "constant", {"reward": reward, "advice": advice}, blocks=True
        )
    else:
        sizes, rare = run["group/size_max"], min(run.reward_level, 1 - run.reward_level)
        size = int(sizes.values[-1]) if len(sizes) else rollout.group_size
        # So large that half of the groups contain the rarer answer: 1 - (1 - p)^n >= 1/2; at least twice the size.
        larger = math.ceil(math.log(0.5) / math.log1p(-rare)) if 0 < rare < 1 else 0
        larger, changes = min(max(larger, 2 * size), MAX_GROUP), []
        if larger > size and not rollout.first_samples:
            option = (
                "--rollout.group-size" if run.stage.group_size is None else run.option("group_size")
            )
            changes = [
                Change(
                    {option: str(larger)}, f"rare answers are sampled more often than with {size}"
                )
            ]
        yield Match("zero-spread", [*changes, resample, *remedies.higher_temperature(run)], "stuck")


def check_flat_reward(run: Record) -> Iterator[Match]:
    kl, prompts = run["kl/ref_nats"], run.config.rollout.prompts
    is_zero_spread = (
        run["group/zero_spread_frac"].last_mean >= ZERO_SPREAD
    )  # which has a rule of its own
    if (
        is_zero_spread
        or run.changes_difficulty
        or run.reward_level >= NEAR_TOP
        or run.reward.rises()
    ):
        return
    more = Change(
        {"--rollout.prompts": str(2 * prompts)}, f"twice {prompts}: less noise in each step"
    )
    if run.reward.rises(2, 0):
        yield Match("flat-reward", [remedies.scale_lr(run, 0.5), more], "falls")
    elif (
        kl.last_mean > 0.1 and kl.rises()
    ):  # nats; a policy that learns nothing has no reason to be this far away
        yield Match("flat-reward", [more, remedies.scale_lr(run, 0.5)], "drifts")
    else:
        yield Match("flat-reward", [remedies.scale_lr(run, 3.0), more], "flat")


def check_reward_pairs(run: Record) -> Iterator[Match]:
    """Two rewards that work against each other, or one of them without influence."""
    weights = run.reward_weights
    pairs = {
        (a, b): run[f"reward_corr_within_group/{a}/{b}"] for a in weights for b in weights if a != b
    }
    worst = min(
        (pair for pair in pairs if len(pairs[pair])),
        key=lambda pair: pairs[pair].span().mean,
        default=None,
    )
    if worst is not None and pairs[worst].span().mean <= -0.3:
        means = [run[f"reward/{name}/mean"] for name in worst]
        factors = {name: 0.5 if name == worst[1] else 1.0 for name in weights}
        changes = remedies.scale_weights(run, factors, f"half the weight of {worst[1]}")
        evidence = [
            (pairs[worst], [pairs[worst].span()]),
            *((mean, [mean.third(0), mean.third(2)]) for mean in means),
        ]
        if not all(
            mean.rises() for mean in means
        ):  # else the policy finds answers that satisfy both
            yield Match(
                "conflicting-rewards", changes, "", {"one": worst[0], "other": worst[1]}, evidence
            )

    spreads = {name: run[f"reward/{name}/std_within_group"] for name in weights}
    weighted = {
        name: abs(weights[name]) * s.span().mean for name, s in spreads.items() if any(s.values)
    }
    if len(weighted) < 2 or run.config.objective.combine != "sum_then_normalize":
        return
    largest, smallest = (
        max(weighted, key=weighted.__getitem__),
        min(weighted, key=weighted.__getitem__),
    )
    if (ratio := weighted[largest] / weighted[smallest]) >= 20:
        why = "normalizes each reward by itself, so that only its weight counts"
        factors = {
            name: weighted[largest] / weighted[name] if name in weighted else 1.0
            for name in weights
        }
        changes = remedies.set_objective(run, why, combine="normalize_then_sum")
        changes += remedies.scale_weights(run, factors, "or: weights that make the spreads equal")
        values = {"largest": largest, "smallest": smallest, "ratio": ratio}
        evidence = [(spreads[name], [spreads[name].span()]) for name in (largest, smallest)]
        yield Match("dominated-reward", changes, "", values, evidence)


def check_reward_hacking(run: Record) -> Iterator[Match]:
    reward, held_out, kl, config = (
        run.reward,
        run["eval/reward_mean"],
        run["kl/ref_nats"],
        run.config,
    )
    if len(reward) < TREND_STEPS or len(held_out) < 2 or not reward.rises():
        return
    noise, gain = run.evaluation_noise, reward.last_mean - reward.third(0).mean
    best = max(range(len(held_out)), key=lambda i: held_out.values[i])
    low, high = (
        min(run["reward/min"].values, default=0.0),
        max(run["reward/max"].values, default=math.inf),
    )
    has_room = held_out.values[0] < low + NEAR_TOP * (high - low)
    evidence, name, case = (
        [(held_out, [held_out.at(0), held_out.at(best), held_out.at(-1)])],
        "",
        "",
    )
    # A reward of weight 0 is only monitored: it must not lose a tenth, nor more than its own noise.
    for name in (
        name for _, name in run.named(r"reward/(.+)/mean") if name not in run.reward_weights
    ):
        series = run[f"eval/{name}"]
        limit = max(0.1 * abs(series.at(0).mean), 2 * series.noise if len(series) > 2 else 0.0)
        if len(series) > 1 and series.values[0] - series.values[-1] > limit:
            evidence.append((series, [series.at(0), series.at(-1)]))
            case = "monitored"
            break
    if not case and held_out.values[best] - held_out.values[-1] > 2 * noise:
        case = "drops"
    elif (
        not case
        and has_room
        and gain > 2 * noise
        and held_out.values[-1] - held_out.values[0] <= noise / 2
    ):
        case = "stays"
    if not case:
        return
    # Aim at the KL where the held-out reward was best; a hundredth of a nat where there was practically none.
    step = held_out.steps[best]
    before = [value for at, value in kl.items() if at <= step]
    target = max(before[-1] if before else 0.0, 0.01) if len(kl) else 0.02
    changes = [*remedies.return_to_best(run), remedies.more_kl(run, target=target)]
    if len(config.plan) == 1 and 0 < step < config.steps and not config.stage.steps:
        changes.append(Change({"--steps": str(step)}, "where the held-out reward was best"))
    yield Match("reward-hacking", changes, case, {"name": name}, evidence)
