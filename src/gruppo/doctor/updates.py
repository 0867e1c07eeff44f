"""Symptoms of the optimiser and the machine: steps that are not taken, not felt, or not affordable."""

from __future__ import annotations

import re
import statistics

from gruppo.config.stages import peak_lr, where_of
from gruppo.doctor import remedies
from gruppo.doctor.finding import LEAST, Change, Finding, Measured, Symptom, at, present, whole
from gruppo.doctor.record import Record, Span
from gruppo.trainer.weight_change import LEAST as LEAST_MOVED

ALWAYS = 0.95
"""Share of the steps whose gradient was above the limit."""
FAR_ABOVE = 20.0
"""How many times the limit the middle gradient norm is when the limit decides the size of every step. Healthy runs
come to 3 to 10 times: AdamW divides most of it out again."""
RETURNS = 3
"""Returns to the best weights after which the run is no longer going anywhere."""


def gradient_clipped(run: Record) -> Finding | None:
    """Every gradient is scaled down by a large factor, so that all steps have one size."""
    norm, limit = run["grad/norm"], run.config.optim.max_grad_norm
    middle = statistics.median(norm.values)
    above = sum(value > limit for value in norm.values) / len(norm)
    if not limit or above < ALWAYS or middle < FAR_ABOVE * limit:
        return None
    meaning = (
        f"the gradient is scaled down in {above:.0%} of the steps, {middle / limit:.0f} times in the middle: a step "
        "with much to say and one with little are equally large. Look first at advantages and ratios, whose size it is."
    )
    wider = Change(
        "--optim.max-grad-norm", remedies.number(middle), "the middle norm: half of the steps stay as they are"
    )
    measured = present(norm, run["advantage/mean_abs"], run["ratio/max"], run["loss/policy"])
    return Finding(measured, meaning, (wider, remedies.slower(run)))


def skipped(run: Record) -> Finding | None:
    """Updates that were left out because their gradient was not finite."""
    count, taken = run["update/skipped_count"], run.total("update/updates_count")
    total = sum(count.values)
    if not total:
        return None
    steps = [step for step, value in zip(count.steps, count.values, strict=True) if value]
    where = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    meaning = (
        f"{total:.0f} of {total + taken:.0f} updates had a gradient that is not finite and were left out (steps "
        f"{where}): log-ratios or values overflow. Three in a row end the run."
    )
    changes = [remedies.slower(run), *remedies.in_float32(run)]
    return Finding((whole(count), *present(run["grad/norm"], run["ratio/max"])), meaning, tuple(changes))


def lr_never_arrives(run: Record) -> Finding | None:
    """A warm-up that lasts as long as the stage that it begins."""
    lr = run["optim/lr"]
    of_step = dict(zip(lr.steps, lr.values, strict=True))
    for place, stage in enumerate(run.config.plan):
        own = [step for step in run.steps_of(place) if step in of_step]
        if not own:
            continue
        reached, peak = max(of_step[step] for step in own), peak_lr(run.config, place)
        is_over = place < run.stage_at(run.steps)
        length = len(own) if is_over else stage.steps or run.config.steps - own[0] + 1
        of_run = 0 if stage.lr is not None else run.config.optim.warmup_steps - (own[0] - 1)
        warmup = max(stage.warmup_steps, of_run)
        if peak and (length < 2 or warmup < length):
            continue
        where = where_of(run.config, place)
        name = f"stage {stage.name or place}" if len(run.config.plan) > 1 else "the run"
        if not peak:
            meaning = f"the learning rate of {name} is 0: nothing is learned."
            changes = [Change(f"--{where}.lr" if stage.lr is not None else "--optim.lr", "1e-06", "it is 0")]
        else:
            meaning = (
                f"the learning rate of {name} rises over {warmup} steps, and it lasts {length}: it came to "
                f"{reached:.3g} of {peak:.3g}. What does not fall or rise here has had no time to."
            )
            is_own = stage.warmup_steps >= of_run
            option = f"--{where}.warmup-steps" if is_own else "--optim.warmup-steps"
            changes = [Change(option, str(max(length // 10, 1)), f"a tenth of {length} steps")]
        start, stop = lr.steps.index(own[0]), lr.steps.index(own[-1])
        return Finding((at(lr, start, stop),), meaning, tuple(changes))
    return None


def still(run: Record) -> Finding | None:
    """Updates that leave nearly all weights what they were, to the bit."""
    changed = run["update/changed_frac"]
    if changed.whole().mean >= LEAST_MOVED:
        return None
    meaning = (
        f"an update changes {changed.whole().mean:.1%} of the weights that have a gradient; the rest is lost in "
        "rounding. The step is smaller than the gap between two numbers of the weights' precision."
    )
    return Finding((whole(changed), *present(run["optim/lr"])), meaning, (remedies.lr(run, 10.0, "ten times"),))


def memory(run: Record) -> Finding | None:
    """Updates that were begun again in smaller pieces because memory had run out."""
    told = re.findall(r"step (\d+): memory ran out in pieces of (\d+) tokens; going on with (\d+)", run.log)
    if not told:
        return None
    first, last = told[0], told[-1]
    times = "once" if len(told) == 1 else f"{len(told)} times"
    meaning = (
        f"memory ran out {times}, and each time an update was done again in smaller pieces, which changes its time and "
        "not the result. Begin with the size that fitted in the end."
    )
    sizes = [(int(first[0]), float(first[1])), (int(last[0]), float(last[2]))]
    budget = Measured("tokens of a piece", tuple(Span(size, step, step, 1) for step, size in sizes))
    change = Change("--optim.token-budget", last[2], f"the run came to it from {first[1]}")
    return Finding((budget, *present(run["mem/peak_gib"])), meaning, (change,))


def returns(run: Record) -> Finding | None:
    """The run returns to its best weights again and again."""
    count, back_off = run["back_off/returns_count"], run.config.back_off
    if not len(count) or count.values[-1] < RETURNS:
        return None
    meaning = (
        f"the run has returned to its best weights {count.values[-1]:.0f} times, each time with {back_off.lr_factor:g} "
        "of the learning rate. Either what it learns spoils the metric, or the metric's noise is above the drop."
    )
    wider = Change("--back-off.drop", remedies.number(2 * back_off.drop), f"twice {back_off.drop:g}")
    changes = (remedies.slower(run), *([wider] if back_off.drop else []))
    return Finding((at(count, -1), *present(run[back_off.metric])), meaning, changes)


SYMPTOMS = (
    Symptom("skipped-updates", "Updates were skipped", skipped, ("update/skipped_count",)),
    Symptom("lr-never-arrives", "The learning rate never arrives", lr_never_arrives, ("optim/lr",)),
    Symptom("still-weights", "The weights do not move", still, ("update/changed_frac",)),
    Symptom("gradient-clipped", "Every gradient is clipped", gradient_clipped, ("grad/norm",), LEAST),
    Symptom("memory", "Memory ran out", memory),
    Symptom("returns", "The run keeps returning to its best weights", returns),
)
