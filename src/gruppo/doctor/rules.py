"""Known problems of runs: how a rule recognizes its problem, what it means and what to change."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations

from gruppo.core.loss import clip_range
from gruppo.doctor.record import NEAR_TOP, TREND_STEPS, Record
from gruppo.trainer.weight_change import IDLE, NORMS
from gruppo.types import GruppoError

Changes = dict[str, str]
"""Options with their new values as they are typed, each with the reason for the value."""
Found = tuple[str, Changes] | None
Check = Callable[[Record], Found]


@dataclass(frozen=True)
class Rule:
    """A known problem. ``check`` returns what it means in this run and what to change, or None."""

    name: str
    title: str
    check: Check
    metrics: tuple[str, ...]
    """Metrics of the report. Without the first one the rule is skipped; a final / is a prefix."""
    min_steps: int


RULES: list[Rule] = []
"""All rules, in the order of the report: first those that make other metrics unreliable."""


def rule(title: str, *metrics: str, min_steps: int = 3) -> Callable[[Check], Check]:
    """Add a check to ``RULES``, named by its function."""

    def add(check: Check) -> Check:
        RULES.append(Rule(check.__name__.replace("_", "-"), title, check, metrics, min_steps))
        return check

    return add


# --- changes that several rules propose -----------------------------------------------------------


def scaled(value: float | str, factor: float) -> str:
    """A value times a factor, to two digits; of a schedule its first value.

    >>> scaled("linear:1,0,50", 0.5)
    '0.5'
    """
    found = re.search(r"[-+.\d][-+.\de]*", str(value))
    number = float(found[0]) * factor if found else 0.0
    return f"{number:.2g}" if abs(number) < 100 else f"{number:.0f}"


def times(option: str, value: float | str, factor: float) -> Changes:
    text = value if isinstance(value, str) else f"{value:g}"
    return {f"{option} {scaled(value, factor)}": f"{factor:g} times {text}"}


def scale_lr(run: Record, factor: float, index: int | None = None) -> Changes:
    """Multiply the learning rate of a stage, by default the current one."""
    stage = run.stage if index is None else run.config.plan[index]
    if stage.lr is None:
        return times("--optim.lr", run.config.optim.lr, factor)
    return times(run.option("lr", index), stage.lr, factor)


def more_kl(run: Record) -> Changes:
    """Hold the policy closer to its reference."""
    value, option = run.stage.kl_coef, run.option("kl_coef")
    if value in (0, "0"):
        return {f"{option} 0.04": "currently 0"}  # DeepSeekMath, arXiv 2402.03300
    return times(option, value, 2.0)


def set_objective(run: Record, why: str, **fields: float | str) -> Changes:
    """Set fields of the objective; nothing if they have these values or contradict another one."""
    objective = run.config.objective
    try:  # the objective checks itself when it is made
        replace(objective, **fields)  # type: ignore[arg-type]
    except GruppoError:
        return {}
    words = []
    for name, value in fields.items():
        if value != getattr(objective, name):
            text = value if isinstance(value, str) else scaled(value, 1)
            words.append(f"--objective.{name.replace('_', '-')} {text}")
    return {" ".join(words): why} if words else {}


def weights_of(run: Record) -> Mapping[str, float]:
    """Weights of the reward functions by name."""
    found = [re.fullmatch("reward/(.+)/std_within_group", name) for name in run.metrics]
    names = [match[1] for match in found if match]
    return dict(zip(names, run.config.scoring.weights or (1.0,) * len(names), strict=False))


# --- rules ----------------------------------------------------------------------------------------


@rule("There is no gradient", "grad/norm", "advantage/mean_abs", "entropy/mean_nats")
def no_gradient(run: Record) -> Found:
    moving = [step for name in NORMS for step, value in run[name].points.items() if value]
    since = max(moving, default=0)
    idle = [step for step in run["grad/norm"].points if step > since]
    if len(idle) < IDLE[0]:
        return None
    text = f"The gradient has been exactly 0 since step {idle[0]}"
    sizes = [value for step, value in run["advantage/mean_abs"].points.items() if step in idle]
    slower = scale_lr(run, 0.01)
    if sizes and min(sizes) > 0:
        meaning = "although completions are rewarded differently: an update ruined the weights"
        return f"{text} {meaning}. The saved weights are not usable.", slower
    if run.config.objective.mask_truncated and run["finish/truncated_frac"].last == 1:
        meaning = "because all completions are truncated and objective.mask_truncated ignores those"
        return f"{text} {meaning}.", _longer(run)
    return None


@rule("Sampler and trainer disagree", "mismatch/mean_nats", "mismatch/max_nats")
def mismatch(run: Record) -> Found:
    mean = run["mismatch/mean_nats"]
    # Nats per action that rounding explains. Measured: 1e-7 in float32 and 0.06 in bfloat16 for
    # text; 0.008 for the joint density of 16,384 dimensions in float32.
    allowed = 0.1 if run.is_bfloat16 else 0.02 if run.is_image_run else 1e-3
    # A few bad tokens spoil a batch without changing its mean.
    if mean.last <= allowed and not run["mismatch/max_nats"].last > 50 * allowed:
        return None
    text = "They disagree from the first step on, with equal weights: they differ in temperature, "
    text += "top-k, top-p, tokenization or precision."
    if mean.values[0] <= allowed < mean.last:
        text = "They agreed at first: the sampler has older weights. The sync fails or lags."
    why = "limits the weight of an action to 2"
    return text, set_objective(run, why, correction="truncate", correction_high=2.0)


@rule("Rewards fail", "reward/unscored_count", min_steps=1)
def reward_failures(run: Record) -> Found:
    sampled = max(run["progress/rollouts"].values, default=math.nan)
    kinds = ("exception", "timeout", "not_finite")
    counts = {kind: sum(run[f"reward/{kind}_count"].values) for kind in kinds}
    failed = sum(counts.values()) / sampled
    unscored = sum(run["reward/unscored_count"].values) / sampled
    # A reward function may return None, but not for a fifth of the rows.
    if not (failed >= 0.01 or unscored >= 0.2):
        return None
    text = f"{max(failed, unscored):.1%} of the sampled rows have no reward and are not used"
    messages = Counter(
        f"{failure.get('reward')}: {failure.get('message')}"
        for row in run.samples
        for failure in row.get("failures") or ()
        if isinstance(failure, Mapping)
    )
    for message, _ in messages.most_common(1):
        text += f". Most frequent failure: {' '.join(message.split())[:160].rstrip('.')}"
    if not failed:
        text += ": the reward function returned None"
    timeout_s = run.config.scoring.timeout_s
    is_late = counts["timeout"] and timeout_s
    return f"{text}.", times("--scoring.timeout-s", timeout_s or 0, 2.0) if is_late else {}


@rule("Completions are truncated", "finish/truncated_frac", "len/mean_actions", "reward/mean")
def truncation(run: Record) -> Found:
    fraction = run["finish/truncated_frac"].last
    limit = run.config.rollout.max_new_tokens
    if not fraction >= 0.25:
        return None
    return (
        f"{fraction:.0%} of the completions are cut off at {limit} tokens, so that only the "
        "beginning of an answer is rewarded.",
        _longer(run),
    )


def _longer(run: Record) -> Changes:
    limit = run.config.rollout.max_new_tokens
    return {f"--rollout.max-new-tokens {2 * limit}": f"twice {limit}"}


@rule("Most groups have no spread in their rewards", "group/zero_spread_frac", "reward/mean")
def zero_spread(run: Record) -> Found:
    fraction, rollout = run["group/zero_spread_frac"], run.config.rollout
    can_improve = run.is_stuck or not run.reward.rises()
    # A run that has solved its prompts reaches 0.8 and more, so the reward must not be rising.
    if not fraction.last >= 0.6 or not can_improve:
        return None
    resample = {
        f"--rollout.refill-rounds {2 * rollout.refill_rounds or 3}": "replaces such groups (DAPO)"
    }
    if run.reward_level >= NEAR_TOP:
        return "The prompts are too easy: nearly all samples get the highest reward.", resample
    if not any(run["reward/std_within_group"].values):
        return (
            f"Every sample has the same reward ({run.reward.last:.3g}), so there is nothing "
            "to reinforce. Give partial credit, or start with demonstrations: --stages.",
            {},
        )
    size = rollout.group_size
    return (
        "In most groups all samples have the same reward, which has stopped improving below its "
        "maximum: the prompts are too hard or too easy for this number of samples.",
        {f"--rollout.group-size {2 * size}": f"twice {size}"} | resample,
    )


@rule("The warm-up is too long", "optim/lr", min_steps=1)
def warmup_too_long(run: Record) -> Found:
    config = run.config
    start = 0
    for index, stage in enumerate(config.plan[: run.stage_index + 1]):
        length = stage.steps or config.steps
        warmup, option = stage.warmup_steps, run.option("warmup_steps", index)
        # the run's warm-up may reach into a stage without a learning rate of its own
        left = config.optim.warmup_steps - start
        if stage.lr is None and left > warmup:
            warmup, option = left, "--optim.warmup-steps"
        start += length
        if warmup >= length >= 2:
            return (
                f"The warm-up takes {warmup} steps and its stage has {length}. Metrics that do "
                "not change have had no time to.",
                {f"{option} {max(length // 10, 1)}": f"a tenth of {length} steps"},
            )
    return None


@rule("The entropy has collapsed", "entropy/mean_nats", "reward/mean", min_steps=TREND_STEPS)
def entropy_collapse(run: Record) -> Found:
    entropy = run["entropy/mean_nats"]
    start = statistics.mean(entropy.values[:3])
    # Learning alone brings the entropy to a tenth, too, so it counts only if the reward is stuck.
    # The entropy of continuous actions may be negative, and has no natural zero to collapse to.
    if not (entropy.last <= 0.1 * start and min(entropy.values) >= 0 and run.is_stuck):
        return None
    bonus = f"{run.option('entropy_coef')} adaptive:0,target={scaled(start, 0.5)},delta=0.005"
    return (
        f"{1 - entropy.last / start:.0%} of the entropy is lost and the reward no longer rises: "
        "the policy repeats the same answers and has stopped exploring.",
        {bonus: "keeps half of the initial entropy"},
    )


@rule("The KL diverges", "kl/ref_nats", "reward/mean", min_steps=TREND_STEPS)
def kl_blow_up(run: Record) -> Found:
    kl = run["kl/ref_nats"]
    rises = run.reward.rises(1, 2)
    # Linear growth has a ratio of 1.7 between the thirds, quadratic growth of 2.7; below 0.1 nats
    # it does no harm yet. Beyond 5 nats a language model has lost its reference.
    is_diverging = kl.last > max(3 * kl.third(1).mean, 0.1) and not rises
    if not is_diverging and (run.is_image_run or kl.last <= 5):
        return None
    useless = "" if rises else " and the reward does not rise with it"
    text = f"The policy diverges from its reference{useless}."
    return text, more_kl(run) | scale_lr(run, 0.5)


@rule("Too many actions are clipped", "clip/high_frac", "clip/low_frac", "ratio/max")
def over_clipping(run: Record) -> Found:
    fraction = run["clip/high_frac"].last + run["clip/low_frac"].last
    if not fraction >= 0.3:
        return None
    epochs = run.config.optim.epochs
    fewer = {f"--optim.epochs {epochs // 2}": f"half of {epochs}"} if epochs > 1 else {}
    return (
        f"The clip removes the gradient of {fraction:.0%} of the actions: the updates of a batch "
        "are too large.",
        scale_lr(run, 0.5) | fewer,
    )


@rule("The clip has no effect", "ratio/max", "clip/high_frac", min_steps=TREND_STEPS)
def inert_clip(run: Record) -> Found:
    objective, updates = run.config.objective, run.config.updates_per_batch
    limit = clip_range(objective)[1]
    largest = max(run["ratio/max"].values) - 1
    clipped = run["clip/high_frac"].values + run["clip/low_frac"].values
    if updates < 2 or objective.surrogate != "clip" or any(clipped) or largest > 0.1 * limit:
        return None
    return (
        f"Each batch is used for {updates} updates, and no ratio differs from 1 by more than "
        f"{largest:.2g}, while the clip starts at {limit:.2g}. If it is exactly 1, the old "
        "log-probs come from the same forward pass as the new ones.",
        scale_lr(run, 3.0),
    )


@rule(
    "The reward rises, but held-out quality does not",
    "eval/reward_mean",
    "reward/mean",
    "kl/ref_nats",
    min_steps=2,
)
def reward_hacking(run: Record) -> Found:
    held_out = run["eval/reward_mean"]
    if len(run.reward) < TREND_STEPS or not run.reward.rises():
        return None
    size = run.high - run.low
    noise = size / math.sqrt(run.config.evaluation.prompts or 64)  # at most: half a 95% interval
    first, best, last = held_out.values[0], max(held_out.values), held_out.values[-1]
    has_room = first < run.low + NEAR_TOP * size
    gain = run.reward.last - run.reward.first
    # A reward of weight 0 is only monitored: it must not lose a tenth.
    unweighted = [run[f"eval/{name}"] for name, weight in weights_of(run).items() if not weight]
    fallen = [
        s.name for s in unweighted if s and s.values[-1] < s.values[0] - 0.1 * abs(s.values[0])
    ]
    if fallen:
        text = f"{fallen[0]}, which has weight 0 and is only monitored, falls while the reward "
        text += "rises: the policy exploits the reward."
    elif best - last > 2 * noise:
        text = "The held-out reward has dropped from its best value while the training reward "
        text += "rises: what is learned does not generalize, or exploits the reward."
    elif has_room and gain > 2 * noise and last - first <= noise / 2:
        text = "The training reward rises and the held-out reward, at temperature 0, does not: "
        text += "sampling has only become more deterministic, or the prompts are memorized."
    else:
        return None
    return text, more_kl(run)


@rule("Two rewards conflict", "reward_corr_within_group/")
def conflicting_rewards(run: Record) -> Found:
    weights = weights_of(run)
    means = {
        (a, b): run[f"reward_corr_within_group/{a}/{b}"].mean
        for a, b in permutations(weights, 2)
        if weights[a] and weights[b]
    }
    conflicts = {pair: mean for pair, mean in means.items() if mean <= -0.3}
    if not conflicts:
        return None
    one, other = min(conflicts, key=conflicts.__getitem__)
    if run[f"reward/{one}/mean"].rises() and run[f"reward/{other}/mean"].rises():
        return None  # the policy finds answers that satisfy both
    values = [scaled(w, 0.5 if n == other else 1) for n, w in weights.items()]
    return (
        f"Within groups, {one} is low where {other} is high: a step that improves one makes the "
        "other worse, and their sum hides it. Decide which matters more.",
        {f"--scoring.weights {' '.join(values)}": f"half the weight of {other}"},
    )


@rule("One reward dominates another", "reward_corr_within_group/", min_steps=1)
def dominated_reward(run: Record) -> Found:
    spreads = {
        name: abs(weight) * run[f"reward/{name}/std_within_group"].mean
        for name, weight in weights_of(run).items()
    }
    ranked = sorted((spread, name) for name, spread in spreads.items() if spread > 0)
    if len(ranked) < 2 or run.config.objective.combine != "sum_then_normalize":
        return None
    (least, smallest), *_, (most, largest) = ranked
    ratio = most / least
    if ratio < 20:
        return None
    why = "normalizes each reward by itself, so that only its weight counts"
    return (
        f"Within groups, {largest} varies {ratio:.0f} times as much as {smallest}, weights "
        f"included: {smallest} has practically no influence. Ignore this if that is intended.",
        set_objective(run, why, combine="normalize_then_sum"),
    )


@rule(
    "The policy loss is positive and grows",
    "loss/policy",
    "advantage/mean",
    "ratio/max",
    min_steps=TREND_STEPS,
)
def policy_loss(run: Record) -> Found:
    loss, objective = run["loss/policy"], run.config.objective
    size = run["advantage/mean_abs"].last
    least = 0.05 * (1.0 if math.isnan(size) else size)  # more than the residue of an average
    if not loss.rises() or loss.last < max(2 * loss.first, least):
        return None
    if run["advantage/mean"].last < -least and not objective.has_critic:
        why = "compares each reward with its own group, so that the mean is 0"
        return (
            "At ratio 1 this loss is the negative mean advantage and says nothing about the "
            f"gradient: rewards fall below the baseline ({objective.baseline}). Judge the run by "
            "its held-out reward, KL and ratio.",
            set_objective(run, why, baseline="mean"),
        )
    changes = scale_lr(run, 0.5)
    if objective.surrogate == "clip":
        low, high = objective.clip_low / 2, objective.clip_high / 2
        changes |= set_objective(run, "half the current range", clip_low=low, clip_high=high)
    return (
        "With centered advantages, a positive loss comes from the ratios: within a batch, good "
        "actions became less likely or bad ones more likely. Updates are too large.",
        changes,
    )


@rule(
    "The supervised loss does not fall",
    "loss/sup",
    "sup/loss_nats",
    "optim/lr",
    min_steps=TREND_STEPS,
)
def supervised_loss(run: Record) -> Found:
    loss = run["loss/sup"]
    # Demonstrations below 0.1 nats per token are learned, so that their loss need not fall.
    is_learned = run["sup/loss_nats"].last < 0.1 and not run.is_image_run
    if not loss.last > 0.95 * loss.first or is_learned:
        return None
    index = run.stage_at(max(loss.points))  # which may be over
    stage = run.config.plan[index]
    if len(loss.points.keys() & run["loss/policy"].points.keys()) > len(loss) / 2:
        text = "The policy is also trained on rewards, whose gradient outweighs or undoes it."
        return text, times(run.option("sup_coef", index), stage.sup_coef, 2.0) | times(
            run.option("rl_coef", index), stage.rl_coef, 0.5
        )
    text = "The steps are too small, or the wrong weights are trained. Ignore this if the model "
    return f"{text}knew its demonstrations from the first step on.", scale_lr(run, 3.0, index)


@rule(
    "The consistency loss keeps rising",
    "loss/cons",
    "kl/ref_nats",
    "reward/mean",
    min_steps=TREND_STEPS,
)
def consistency_loss(run: Record) -> Found:
    loss = run["loss/cons"]
    improves = run.reward.rises(1, 2)
    # Linear growth has a ratio of 1.7 between the thirds; learning also moves away, but no faster.
    least = 2.2 if improves else 1.3
    if loss.last < least * loss.third(1).mean or not loss.rises(1, 2):
        return None
    without = "" if improves else " while the reward does not rise"
    return (
        f"Outputs keep moving away from those of the reference{without}: the policy exploits "
        "the reward, amplifies noise, or lost weights in loading, which the first step shows.",
        more_kl(run) | scale_lr(run, 0.5),
    )


@rule("Every gradient is clipped", "grad/norm", "advantage/mean_abs", min_steps=TREND_STEPS)
def gradient_clipping(run: Record) -> Found:
    norms, limit = run["grad/norm"].values, run.config.optim.max_grad_norm
    median = statistics.median(norms)
    # Healthy runs have a median of 3 to 10 times the limit, which AdamW mostly divides out again.
    if not limit or median < 20 * limit:
        return None
    return (
        f"The gradient is scaled down by a median factor of {median / limit:.0f}: steps with "
        "much and with little to learn have the same size. Check advantages and ratios first.",
        {f"--optim.max-grad-norm {scaled(median, 1)}": "the median norm"},
    )
