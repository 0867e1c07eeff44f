"""Symptoms of the losses and of what they are made of: surrogate, demonstrations, consistency, advantages, critic."""

from __future__ import annotations

import statistics

from gruppo.config.stages import peak_lr
from gruppo.doctor import remedies
from gruppo.doctor.finding import LEAST, Change, Finding, Symptom, present, thirds
from gruppo.doctor.record import Record, Series

POSITIVE = 0.8
"""Share of the last steps in which a loss is above 0 when that is no accident."""
FELT = 0.05
"""Of the mean size of an advantage, from which on a policy loss is more than a residue."""
FALLEN = 0.95
"""Share of a loss that is left of it when it has not fallen."""
LEARNED_NATS = 0.1
"""Nats a token below which demonstrations are learned, and their loss need not fall."""
SLOW = 0.4
"""Of the learning rate that was set, what its mean is below when it has not arrived. A rise along a line over the whole
stage has a mean of 0.5."""
SLOPE = 1.3
"""How many times the middle third's mean the last third's is when a loss rises; along a line from 0 it is 1.7."""
STEEP = 2.2
"""As before, where it rises faster than along a line."""
EXTREME = 10.0
"""Standard deviations. One row of a group of 64 that differs from the others is at 7.9."""
SHIFTED = 0.5
"""Standard deviations by which the mean of the advantages is away from 0."""
WORSE_THAN_A_CONSTANT = -0.1
"""Of the returns' variance: the critic adds to it."""
VALUES_HELD = 0.5
"""Share of a critic's values that their clip holds back."""


def policy_loss(run: Record) -> Finding | None:
    """A policy loss that is positive and grows."""
    loss, size = run["loss/policy"], run["advantage/mean_abs"]
    first, last = loss.third(0), loss.third(2)
    values = loss.values[-last.count :]
    scale = size.third(2).mean if len(size) else 1.0
    is_growing = last.mean > 2 * max(first.mean, 0.0) and loss.rises(first, last)
    if sum(v > 0 for v in values) < POSITIVE * len(values) or last.mean < FELT * scale or not is_growing:
        return None
    shift = run["advantage/mean"]
    o = run.config.objective
    if len(shift) and shift.third(2).mean < -FELT * scale and not o.has_critic:
        meaning = (
            "at ratio 1 this loss is minus the mean advantage and says nothing of the gradient: rewards are below the "
            f"baseline ({o.baseline}), and more so with time. With a baseline of the group it would be 0. Judge by the "
            "held-out reward, the KL and the ratio."
        )
        why = "each reward against its own group's, so that the mean is 0"
        changes = remedies.objective(run, why, baseline="mean")
        changes += [remedies.slower(run)] if not run.reward.rises(run.reward.third(0), run.reward.third(2)) else []
    else:
        meaning = (
            "with advantages that are centred, a loss above 0 comes from ratios: what is good has become rarer within "
            "a batch, or what is bad more frequent. The policy moves too far for as many updates."
        )
        changes = [remedies.slower(run), *remedies.fewer_passes(run)]
        if o.surrogate == "clip":
            half = {"clip_low": o.clip_low / 2, "clip_high": o.clip_high / 2}
            changes += remedies.objective(run, "half of what it is", **half)
    measured = present(loss, shift, run.reward, run["ratio/max"], run["kl/ref_nats"], run["eval/reward_mean"])
    return Finding(measured, meaning, tuple(changes))


def supervised_loss(run: Record) -> Finding | None:
    """A supervised loss that does not fall."""
    loss, nats = run["loss/sup"], run["sup/loss_nats"]
    first, last = loss.third(0), loss.third(2)
    is_learned = nats.third(2).mean < LEARNED_NATS and not run.draws_pictures
    if last.mean <= FALLEN * first.mean or is_learned:
        return None
    why, changes = _why_not_learned(run.during(loss.steps[-1]), loss)
    meaning = f"the supervised loss {'rises' if loss.rises(first, last) else 'has not fallen'}{why}"
    others = (run[name] for name in ("optim/lr", "update/changed_frac", "grad/norm", "grad_cosine/policy/sup"))
    measured = present(loss, nats, *others, run["stage/sup_coef"])
    return Finding(measured, meaning, tuple(changes))


def _why_not_learned(run: Record, loss: Series) -> tuple[str, list[Change]]:
    """The likeliest cause, of the three that metrics tell apart."""
    stage, lr = run.stage, run["optim/lr"]
    of_step = dict(zip(lr.steps, lr.values, strict=True))
    rates = [of_step[step] for step in loss.steps if step in of_step] or [0.0]
    mean, peak = sum(rates) / len(rates), peak_lr(run.config, run.place)
    if mean < SLOW * peak:
        warmup = stage.warmup_steps
        option = run.option("warmup_steps") if warmup else "--optim.warmup-steps"
        warmup = warmup or run.config.optim.warmup_steps
        sooner = [Change(option, str(max(warmup // 4, 1)), f"a quarter of {warmup}")] if warmup > 1 else []
        return (
            f": the learning rate was {mean:.2g} on average, of {peak:.2g} that was set, so that most steps were too "
            "small to teach anything.",
            [*sooner, remedies.faster(run)],
        )
    sampled = set(run["loss/policy"].steps)
    if sum(step in sampled for step in loss.steps) > len(loss) / 2:
        twice = Change(run.option("sup_coef"), remedies.scaled(stage.sup_coef, 2.0), f"twice {stage.sup_coef}")
        half = Change(run.option("rl_coef"), remedies.scaled(stage.rl_coef, 0.5), f"half of {stage.rl_coef}")
        return (
            f" while rewards are learned beside it: the policy's gradient outweighs it, or undoes it{_pull(run)}. (A "
            "network that knew its demonstrations from the first step on has nothing to fall.)",
            [twice, half],
        )
    few = Change("--supervised.batch", str(max(run.config.supervised.batch // 2, 1)), "try to learn few by heart")
    return (
        ": the steps are too small, or the wrong weights are trained. (A network that knew its demonstrations from the "
        "first step on has nothing to fall.)",
        [remedies.faster(run), few],
    )


def _pull(run: Record) -> str:
    """What the gradients of both terms say, where they were measured (optim.terms_every)."""
    policy, sup, cosine = (run[f"grad_{what}"] for what in ("norm/policy", "norm/sup", "cosine/policy/sup"))
    if not len(cosine) or not sup.whole().mean:
        return " (--optim.terms-every 10 would tell)"
    times = policy.whole().mean / sup.whole().mean
    return f": it is {times:.2g} times as large, at a cosine of {cosine.whole().mean:.2g}"


def consistency_loss(run: Record) -> Finding | None:
    """A consistency loss that goes on rising."""
    loss, reward, held_out = run["loss/cons"], run.reward, run["eval/reward_mean"]
    middle, last = loss.third(1), loss.third(2)
    if last.mean < SLOPE * middle.mean or not loss.rises(middle, last):
        return None
    improves = len(reward) >= LEAST and reward.rises(reward.third(1), reward.third(2))
    improves &= len(held_out) < 2 or held_out.values[-1] > held_out.values[0]
    if improves and last.mean < STEEP * middle.mean:
        return None  # learning leaves the reference too, and slower than this
    meanwhile = "" if improves else " while the reward does not rise"
    meaning = (
        f"outputs leave those of the reference and go on doing so{meanwhile}: a way around the reward, noise that "
        "grows, or weights that were lost in loading, which the first step shows."
    )
    kl = run["kl/ref_nats"]
    target = max(kl.third(0).mean, 0.01) if len(kl) else 0.02
    changes = [remedies.more_kl(run, target=target), remedies.slower(run)]
    changes += remedies.return_to_best(run)
    if run.config.reference.kind == "frozen" and len(kl):
        every = (("--reference.update-every", str(max(run.config.steps // 10, 1))),)
        why = "or: a reference that follows, and limits the speed alone"
        changes.append(Change("--reference.kind", "mixed", why, every))
    measured = (thirds(loss, 0, 1, 2), *present(kl, reward, held_out, run["entropy/mean_nats"]))
    return Finding(measured, meaning, tuple(changes))


def advantages(run: Record) -> Finding | None:
    """Advantages with single ones far out, or with a mean that is not 0."""
    low, high, mean, std = (run[f"advantage/{name}"] for name in ("min", "max", "mean", "std"))
    ends = [max(abs(a), abs(b)) / s for a, b, s in zip(low.values, high.values, std.values, strict=False) if s > 0]
    shift = mean.third(2).mean / std.third(2).mean if len(std) and std.third(2).mean > 0 else 0.0
    o = run.config.objective
    if ends and statistics.median(ends) > EXTREME:
        meaning = (
            f"in half of the steps one advantage is more than {statistics.median(ends):.0f} standard deviations from "
            "0: a few rows decide the step."
        )
        limit = 3 * std.whole().mean
        changes = remedies.objective(run, "three standard deviations", adv_clip=float(remedies.number(limit)))
        if o.scale == "none" and not o.has_critic:
            changes += remedies.objective(run, "divides by the spread within groups", scale="running")
    elif abs(shift) > SHIFTED and not o.has_critic:
        sign = "below" if shift < 0 else "above"
        meaning = (
            f"rewards are {sign} the baseline ({o.baseline}) on average, by {abs(shift):.1f} standard deviations: "
            f"samples are {'discouraged' if shift < 0 else 'encouraged'}, whatever they are worth beside group-mates."
        )
        changes = remedies.objective(run, "each reward against its own group's", baseline="mean")
    else:
        return None
    return Finding(present(mean, std, low, high), meaning, tuple(changes))


def critic(run: Record) -> Finding | None:
    """A critic that adds to the variance of the returns, or whose values are held back."""
    explained, loss, held = run["value/explained_variance_frac"], run["loss/value"], run["value/clip_frac"]
    is_worse = explained.third(2).mean < WORSE_THAN_A_CONSTANT
    is_held = len(held) >= LEAST and held.third(2).mean > VALUES_HELD
    if not is_worse and not is_held:
        return None
    changes, meaning = [], []
    config = run.config
    if is_held:
        meaning.append(f"{held.third(2).mean:.0%} of the critic's values are held back by their clip.")
        clip = config.objective.value_clip
        changes += remedies.objective(run, f"three times {clip:g}", value_clip=3 * clip)
    if is_worse:
        meaning.append("the critic predicts the returns worse than their mean would, and advantages have its errors.")
        own = config.critic.lr if config.critic.lr is not None else config.optim.lr
        grows = len(loss) >= LEAST and loss.rises(loss.third(0), loss.third(2))
        factor, why = (0.3, "a third of") if grows else (3.0, "three times")
        changes.append(Change("--critic.lr", remedies.number(own * factor), f"{why} {own:g}"))
        if not config.critic.warmup_steps:
            steps = max(config.steps // 20, 1)
            changes.append(Change("--critic.warmup-steps", str(steps), "steps in which it learns alone"))
    measured = present(explained, loss, held, run["return/std"], run["grad/critic_norm"])
    return Finding(measured, " ".join(meaning), tuple(changes))


def one_denoising_step(run: Record) -> Finding | None:
    """One step of many carries nearly all of the KL."""
    area = r"timestep/kl_ref_nats/(\d+)"
    of_step = {int(number): abs(run[name].third(2).mean) for name, number in run.named(area) if len(run[name])}
    total = sum(of_step.values())
    if len(of_step) < 4 or total <= 0 or max(of_step.values()) < POSITIVE * total:
        return None
    worst = max(of_step, key=lambda number: of_step[number])
    meaning = (
        f"denoising step {worst} carries {of_step[worst] / total:.0%} of the KL: where the noise is smallest, the same "
        "change of the picture counts the most, and the coefficient holds that step alone."
    )
    is_last = worst == max(of_step)
    changes = [Change("--diffusion.train-to", str(worst), "learning ends before it")] if is_last and worst else []
    return Finding(
        (thirds(run[f"timestep/kl_ref_nats/{worst}"]), *present(run["kl/ref_nats"])), meaning, tuple(changes)
    )


SYMPTOMS = (
    Symptom("policy-loss", "The policy loss is positive and grows", policy_loss, ("loss/policy",), LEAST),
    Symptom("supervised-loss", "The supervised loss does not fall", supervised_loss, ("loss/sup",), LEAST),
    Symptom("consistency-loss", "The consistency loss goes on rising", consistency_loss, ("loss/cons",), LEAST),
    Symptom("advantages", "The advantages are extreme or shifted", advantages, ("advantage/std", "advantage/max"), 3),
    Symptom("critic", "The critic does not help", critic, ("value/explained_variance_frac",), LEAST),
    Symptom(
        "one-denoising-step", "One denoising step carries the KL", one_denoising_step, ("timestep/kl_ref_nats/",), 3
    ),
)
