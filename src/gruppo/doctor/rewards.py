"""Symptoms of rewards and groups: what there is to learn from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from gruppo.doctor import remedies
from gruppo.doctor.finding import LEAST, Change, Finding, Symptom, at, present, whole
from gruppo.doctor.record import AT_THE_TOP, Record, Series

FAILED = 0.01
"""Share of rows whose reward raised, timed out or was not finite. Each lacks what its group-mates are compared by."""
UNSCORED = 0.2
"""Share of rows without a score for whatever reason; None is a reward's right, and a fifth of a batch is none."""
ALIKE = 0.6
"""Share of groups that teach nothing, from which on most sampling is for nothing. A run that has solved its prompts
comes to 0.8 and more, so that it counts only where the reward has stopped short of the top."""
AGAINST = -0.3
"""Correlation within groups from which on two rewards pull against each other."""
DROWNED = 20.0
"""How many times the spread of another, each times its weight, a reward has when the other is no longer heard."""
LEAST_FLAT = 18
"""Steps that it takes to say that a reward does not rise, six in each third."""
DRIFTED = 0.1
"""Nats an action from the reference, which a policy that learns nothing has no reason for."""
LARGEST_GROUP = 64


def failures(run: Record) -> Finding | None:
    """Rewards that raise, time out or are not finite; or that score too little."""
    kinds = {kind: run.total(f"reward/{kind}_count") for kind in ("exception", "timeout", "not_finite")}
    unscored = run["reward/unscored_count"]
    rows = run.rows_a_step * len(unscored)
    failed, left = sum(kinds.values()) / rows, sum(unscored.values) / rows
    if failed < FAILED and left < UNSCORED:
        return None
    kind = max(kinds, key=lambda name: kinds[name])
    changes, timeout_s = [], run.config.scoring.timeout_s
    if kinds["timeout"] and kind == "timeout" and timeout_s is not None:
        changes = [Change("--scoring.timeout-s", remedies.number(2 * timeout_s), f"twice {timeout_s:g} seconds")]
    said = _commonest_failure(run)
    share = failed if failed >= FAILED else left
    meaning = f"{share:.1%} of the sampled rows have no reward, and nothing is learned from them" + (
        f"; most often {said}." if said else "; the function returned None." if failed < FAILED else "."
    )
    counts = [whole(run[f"reward/{name}_count"]) for name, count in kinds.items() if count]
    todo = " Mend the function: samples.jsonl holds the rows." if kind != "timeout" and failed >= FAILED else ""
    return Finding((whole(unscored), *counts), f"{meaning}{todo}", tuple(changes))


def _commonest_failure(run: Record) -> str:
    said = Counter(
        f"{failure.get('reward')}: {failure.get('message')}"
        for row in run.samples
        for failure in row.get("failures") or ()
        if isinstance(failure, Mapping)
    )
    return " ".join(said.most_common(1)[0][0].split())[:160].rstrip(".") if said else ""


def zero_spread(run: Record) -> Finding | None:
    """Groups whose rewards are all alike, while the reward stands still."""
    alike = run["group/zero_spread_frac"]
    has_risen = run.reward.rises(run.reward.third(0), run.reward.third(2))
    if alike.third(2).mean < ALIKE or run.changes_difficulty or (has_risen and not run.is_stuck):
        return None
    is_constant = not any(run["reward/std_within_group"].values)
    if len(alike) < LEAST and not is_constant:
        return None
    if run.way_up >= AT_THE_TOP:
        meaning = "the prompts are too easy: nearly every sample has the highest reward, so nothing tells them apart."
        changes = [_refilled(run)]
    elif is_constant:
        meaning = (
            f"every sample of every group had the same reward ({run.reward.whole().mean:.3g}): there is nothing to "
            "raise. The form or the task is out of reach, or the reward cannot tell. Demonstrations first, or a reward "
            "with steps in between."
        )
        changes = _demonstrations(run)
    else:
        meaning = (
            "most groups teach nothing, all their samples having one reward, and the reward has stopped short of the "
            "top: prompts are too hard or too easy for the samples that each gets."
        )
        changes = [*_larger_groups(run), _refilled(run), *remedies.hotter(run)]
    return Finding(present(alike, run.reward, run["reward/std_within_group"]), meaning, tuple(changes))


def _refilled(run: Record) -> Change:
    rounds = run.config.rollout.refill_rounds
    return Change("--rollout.refill-rounds", str(2 * rounds or 3), "rounds that may replace such groups by new prompts")


def _demonstrations(run: Record) -> list[Change]:
    if len(run.config.plan) > 1:
        return []
    steps = max(run.config.steps // 10, 1)
    return [] if run.config.steps < 2 else [Change("--stages", f"supervised:{steps},full", "a tenth of the steps")]


def _larger_groups(run: Record) -> list[Change]:
    """At least twice the samples, or so many that half of the groups hold the rarer answer: log 1/2 / log(1 - p)."""
    sizes = run["group/size_max"]
    size = int(sizes.values[-1]) if len(sizes) else run.config.rollout.group_size
    rare = min(run.way_up, 1 - run.way_up)
    wanted = math.ceil(math.log(0.5) / math.log1p(-rare)) if 0 < rare < 1 else 0
    wanted = min(max(wanted, 2 * size), LARGEST_GROUP)
    if wanted <= size or run.config.rollout.first_samples:
        return []
    return [remedies.group_size(run, wanted, f"a rare answer is seen more often; it is {size}")]


def flat_reward(run: Record) -> Finding | None:
    """A reward that does not rise, though groups have spread."""
    reward, first, last = run.reward, run.reward.third(0), run.reward.third(2)
    alike = run["group/zero_spread_frac"]
    is_explained = len(alike) and alike.third(2).mean >= ALIKE  # there is a symptom of its own
    if is_explained or run.changes_difficulty or run.way_up >= AT_THE_TOP or reward.rises(first, last):
        return None
    measured = present(reward, run["reward/std_within_group"], run["kl/ref_nats"], run["grad/norm"], run["optim/lr"])
    if reward.rises(last, first):
        meaning = "the reward falls: the steps are too large, or they follow noise."
        return Finding(measured, meaning, (remedies.slower(run), *_more_rows(run)))
    kl = run["kl/ref_nats"]
    if kl.third(2).mean > DRIFTED and kl.rises(kl.third(0), kl.third(2)):
        meaning = (
            "the reward has not risen by more than its noise from step to step, and the policy leaves its reference "
            "all the same: a batch's gradient is mostly noise. More samples, not larger steps."
        )
        return Finding(measured, meaning, (*_more_rows(run), remedies.slower(run)))
    meaning = (
        "the reward has not risen by more than its noise from step to step: the steps are too small, or a batch's "
        "gradient is mostly noise."
    )
    return Finding(measured, meaning, (remedies.faster(run), *_more_rows(run)))


def _more_rows(run: Record) -> list[Change]:
    prompts = run.config.rollout.prompts
    return [Change("--rollout.prompts", str(2 * prompts), f"twice {prompts}: less noise in each step")]


# --- several rewards --------------------------------------------------------------------------------------------------


def heard(run: Record) -> dict[str, float]:
    """The weight of each reward function that counts, by name."""
    names = [name for _, name in run.named(r"reward/(.+)/std_within_group")]
    given = run.config.scoring.weights or (1.0,) * len(names)
    return {name: weight for name, weight in zip(names, given, strict=False) if weight}


def disagreement(run: Record) -> Finding | None:
    """Two rewards that fall where the other rises, among the answers to one prompt."""
    area, weight_of = "reward_corr_within_group/", heard(run)
    pairs = {(a, b): run[f"{area}{a}/{b}"] for a in weight_of for b in weight_of if a != b}
    worst = min((p for p in pairs if len(pairs[p])), key=lambda p: pairs[p].whole().mean, default=None)
    if worst is None or pairs[worst].whole().mean > AGAINST:
        return None
    one, other = worst
    parts = [run[f"reward/{name}/mean"] for name in worst]
    if all(part.rises(part.third(0), part.third(2)) for part in parts):
        return None  # the policy finds what both pay for
    meaning = (
        f"among the answers to one prompt {one} is low where {other} is high, so that a step for one is a step against "
        "the other, and the sum hides it. Decide which counts more, or reward the one only where the other is met."
    )
    factors = [0.5 if name == other else 1.0 for name in weight_of]
    changes = remedies.weights(run, list(weight_of), factors, f"half of the weight of {other}")
    return Finding((whole(pairs[worst]), *present(*parts)), meaning, tuple(changes))


def drowned(run: Record) -> Finding | None:
    """A reward whose spread is so small beside another's that the sum does not hear it."""
    if run.config.objective.combine != "sum_then_normalize":
        return None
    weight_of = heard(run)
    spread = {name: run[f"reward/{name}/std_within_group"] for name in weight_of}
    pulls = {name: abs(weight_of[name]) * s.whole().mean for name, s in spread.items() if len(s) and any(s.values)}
    if len(pulls) < 2:
        return None
    loud, quiet = max(pulls, key=lambda name: pulls[name]), min(pulls, key=lambda name: pulls[name])
    if pulls[loud] < DROWNED * pulls[quiet]:
        return None
    meaning = (
        f"{loud} varies {pulls[loud] / pulls[quiet]:.0f} times as much within a group as {quiet}, weights included: "
        f"the sum is {loud} alone. If that is meant, leave it."
    )
    why = "each reward normalised by itself, so that its weight alone decides"
    factors = [pulls[loud] / pulls[name] if name in pulls else 1.0 for name in weight_of]
    changes = remedies.objective(run, why, combine="normalize_then_sum")
    changes += remedies.weights(run, list(weight_of), factors, "or: weights that make their spreads equal")
    return Finding((whole(spread[loud]), whole(spread[quiet])), meaning, tuple(changes))


# --- training against held-out ----------------------------------------------------------------------------------------


def hacking(run: Record) -> Finding | None:
    """The training reward rises; the held-out one, or a reward that is only watched, does not follow or falls."""
    reward, held_out = run.reward, run["eval/reward_mean"]
    if len(reward) < LEAST or not reward.rises(reward.third(0), reward.third(2)):
        return None
    best = max(range(len(held_out)), key=lambda place: held_out.values[place])
    half = run.noise_of_evaluations
    if (fallen := _fallen_watch(run)) is not None:
        meaning = (
            f"{fallen.name.removeprefix('eval/')}, which has no weight and is only watched, falls while the reward "
            "rises: the policy has found what the reward pays for and nobody wants."
        )
    elif held_out.values[best] - held_out.values[-1] > 2 * half:
        meaning = (
            "the reward of the training prompts rises while that of held-out prompts has fallen from its best: what is "
            "learned no longer holds elsewhere, or is a way around the reward."
        )
    elif _stays(run, held_out, half):
        meaning = (
            "the reward of the training prompts rises and that of held-out prompts, answered at temperature 0, does "
            "not: sampling has become narrower, or the prompts are learned by heart."
        )
    else:
        return None
    evidence = [at(fallen, 0, -1)] if fallen is not None else []
    measured = present(reward, at(held_out, 0, best, -1), *evidence, run["kl/ref_nats"], run["len/mean_actions"])
    step = held_out.steps[best]
    stop = [Change("--steps", str(step), "the best held-out reward was there")] if _can_end_at(run, step) else []
    kl = run["kl/ref_nats"]
    target = _before(kl, step) if len(kl) else 0.02
    changes = [*remedies.return_to_best(run), remedies.more_kl(run, target=target), *stop]
    return Finding(measured, meaning, tuple(changes))


def _can_end_at(run: Record, step: int) -> bool:
    return len(run.config.plan) == 1 and 0 < step < run.config.steps and not run.config.stage.steps


def _before(kl: Series, step: int) -> float:
    """The KL where the held-out reward was best, and no less than a hundredth of a nat."""
    values = [value for at_step, value in zip(kl.steps, kl.values, strict=True) if at_step <= step]
    return max(values[-1] if values else 0.0, 0.01)


def _stays(run: Record, held_out: Series, half: float) -> bool:
    """Whether the last evaluation is no better than the first, where what training gained would have been seen."""
    gained = run.reward.third(2).mean - run.reward.third(0).mean
    low, high = min(run["reward/min"].values, default=0.0), max(run["reward/max"].values, default=math.inf)
    has_room = held_out.values[0] < low + AT_THE_TOP * (high - low)
    return has_room and gained > 2 * half and held_out.values[-1] - held_out.values[0] <= half / 2


def _fallen_watch(run: Record) -> Series | None:
    """A reward of weight 0 whose held-out mean ends a tenth below its first, and below its own noise."""
    names = [name for _, name in run.named(r"reward/(.+)/mean") if name not in heard(run)]
    for series in (run[f"eval/{name}"] for name in names):
        if len(series) > 1 and series.values[0] - series.values[-1] > max(
            0.1 * abs(series.values[0]), 2 * series.noise if len(series) > 2 else 0.0
        ):
            return series
    return None


SYMPTOMS = (
    Symptom("reward-failures", "Rewards fail", failures, ("reward/unscored_count",)),
    Symptom("zero-spread", "Most groups teach nothing", zero_spread, ("group/zero_spread_frac", "reward/mean"), 3),
    Symptom("flat-reward", "The reward does not rise", flat_reward, ("reward/mean",), LEAST_FLAT),
    Symptom(
        "hacking", "The reward rises, what it stands for does not", hacking, ("eval/reward_mean", "reward/mean"), 2
    ),
    Symptom("disagreement", "Two rewards pull against each other", disagreement, ("reward_corr_within_group/",), 3),
    Symptom("drowned-reward", "A reward drowns another", drowned, ("reward_corr_within_group/",)),
)
