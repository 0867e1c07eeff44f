"""Symptoms of the policy: how far it has moved, how it samples, and whether two sides speak of the same one."""

from __future__ import annotations

from gruppo.core.loss import clip_range
from gruppo.core.schedules import Adaptive, parse
from gruppo.doctor import remedies
from gruppo.doctor.finding import LEAST, Change, Finding, Symptom, at, present, thirds, whole
from gruppo.doctor.record import Record

COLLAPSED = 0.1
"""Share of its first entropy that is left of a policy which no longer tries anything else. Learning alone takes it
there too (0.1 in the arithmetic recipe), so that it counts only where the reward has stopped short of the top."""
KL_GROWTH = 3.0
"""How many times the KL of the middle third that of the last one is when it has come loose: growth along a line gives
1.7, along a square 2.7."""
KL_FELT = 0.1
"""Nats an action, below which a KL that grows is not yet one that hurts."""
KL_FAR = 5.0
"""Nats a token at which a language model has left its reference altogether. Pictures have other scales."""
KL_OVER_TARGET = 5.0
"""How many times its target a controller's KL is when the controller has lost it."""
CLIPPED = 0.3
"""Share of actions whose gradient the clip stops, from which on a batch is mostly not learned from."""
INERT = 0.1
"""Share of the clip's range that no ratio has left in the whole run."""
ENDED = 0.5
"""Share of batches that stop_kl ends before they have been used as often as was asked for."""
LONGER = 1.5
"""How many times their first length answers have when they have grown."""
CUT = 0.25
"""Share of rows that end at the longest length instead of by themselves."""
RATIO_MEAN, RATIO_MAX = {False: 0.005, True: 0.02}, {False: 0.02, True: 1.0}
"""How far a ratio of equal weights may be from 1, without and with bfloat16: rounding, and other shapes of a batch."""
MISMATCH_OF_TEXT, MISMATCH_OF_PICTURES = {False: 1e-3, True: 0.1}, {False: 0.02, True: 0.1}
"""Nats an action between the sampler's log-probs and the trainer's that rounding explains, without and with bfloat16.
Measured: 1e-7 and 0.06 for text; 0.008 for the joint density of 16 384 dimensions in float32."""
TAIL = 50.0
"""How many times that the largest of a step may be: few tokens are enough to spoil a batch, and the mean hides them."""


def ratio_not_one(run: Record) -> Finding | None:
    """The ratio of the first update of a batch, for which nothing has moved yet."""
    optim = run.config.optim
    if optim.minibatches > 1:
        return None  # the first epoch's numbers hold later updates too
    area = "ratio/" if optim.epochs == 1 else "epoch/1/ratio_"
    mean, largest = run[f"{area}mean"], run[f"{area}max"]
    is_low = run.is_bfloat16
    off = [place for place, value in enumerate(mean.values) if abs(value - 1) > RATIO_MEAN[is_low]]
    off += [place for place, value in enumerate(largest.values) if abs(value - 1) > RATIO_MAX[is_low]]
    if not off or not len(largest):
        return None
    worst = max(range(len(largest)), key=lambda place: abs(largest.values[place] - 1))
    meaning = (
        f"before the first update of a batch old and new weights are the same, and the ratio was not 1 in "
        f"{len(set(off))} of {len(largest)} steps: log-probs hang on something else than the weights. Dropout or batch "
        "statistics that are on, a module with a state, or rounding; gruppo.testing.check_policy says which."
    )
    return Finding((thirds(mean), at(largest, worst)), meaning, tuple(remedies.in_float32(run)))


def mismatch(run: Record) -> Finding | None:
    """Sampler and trainer say different things of the same actions."""
    mean, largest = run["mismatch/mean_nats"], run["mismatch/max_nats"]
    allowed = (MISMATCH_OF_PICTURES if run.draws_pictures else MISMATCH_OF_TEXT)[run.is_bfloat16]
    now = mean.third(2)
    tail = largest.third(2).mean if len(largest) else 0.0
    if now.mean <= allowed and tail <= TAIL * allowed:
        return None
    if mean.values[0] <= allowed < now.mean:
        meaning = (
            "sampler and trainer agreed at first and do no longer: the sampler holds older weights than the trainer. "
            "Its sync does not arrive, or arrives late."
        )
    else:
        meaning = (
            "sampler and trainer disagree from the first step on, with the same weights: another temperature, top-k or "
            "top-p on one side, another tokenisation or precision. What is learned from was drawn by another policy."
        )
    why = "weights actions by how the trainer sees them, at most 2"
    changes = remedies.objective(run, why, correction="truncate", correction_high=2.0)
    return Finding((at(mean, 0), *present(mean, largest)), meaning, (*remedies.in_float32(run), *changes))


def entropy_collapse(run: Record) -> Finding | None:
    """A policy of tokens that has become sure of itself before it is right."""
    entropy = run["entropy/mean_nats"]
    first, last = entropy.between(0, 3), entropy.third(2)
    if min(entropy.values) < 0 or last.mean > COLLAPSED * first.mean or not run.is_stuck:
        return None
    meaning = (
        f"{1 - last.mean / first.mean:.0%} of the entropy is gone and the reward no longer rises: the policy gives the "
        "same answer again and again, and has stopped trying others."
    )
    target = remedies.number(first.mean / 2)
    o = run.config.objective
    own = run.option("entropy_coef")
    changes = [Change(own, f"adaptive:0,target={target},delta=0.005", "holds half of the first entropy")]
    changes += remedies.hotter(run)
    if o.surrogate == "clip" and run.config.updates_per_batch > 1 and o.clip_unit == "ratio" and o.clip_high < 0.28:
        changes += remedies.objective(run, "DAPO's: rare actions may grow", clip_high=0.28)
    measured = (at(entropy, 0), thirds(entropy), thirds(run.reward, 1, 2))
    return Finding((*measured, *present(run["group/zero_spread_frac"])), meaning, tuple(changes))


def kl_blow_up(run: Record) -> Finding | None:
    """The KL to the reference runs away and the reward does not rise with it; or is out of all measure."""
    kl = run["kl/ref_nats"]
    middle, last = kl.third(1), kl.third(2)
    meant = parse(run.stage.kl_coef, "kl_coef")
    target = dict(meant.settings).get("target", 0.0) if isinstance(meant, Adaptive) else 0.0
    rises = len(run.reward) >= LEAST and run.reward.rises(run.reward.third(1), run.reward.third(2))
    is_loose = last.mean > KL_GROWTH * middle.mean and last.mean > KL_FELT and not rises
    is_far = last.mean > KL_FAR and not run.draws_pictures
    if not is_loose and not is_far and not (target and last.mean > KL_OVER_TARGET * target):
        return None
    meanwhile = "" if rises else " and the reward does not rise with it: it follows noise, or the reward's mistakes"
    meaning = f"the policy is running away from its reference{meanwhile}."
    changes = [remedies.more_kl(run, target=target / 2 or middle.mean), remedies.slower(run)]
    changes += remedies.return_to_best(run)
    measured = (thirds(kl, 0, 1, 2), *present(run.reward, run["entropy/mean_nats"], run["stage/kl_coef"]))
    return Finding(measured, meaning, tuple(changes))


# --- the clip ---------------------------------------------------------------------------------------------------------


def clip_always(run: Record) -> Finding | None:
    """The clip stops much of every batch."""
    high, low = run["clip/high_frac"], run["clip/low_frac"]
    share = high.third(2).mean + (low.third(2).mean if len(low) else 0.0)
    if share < CLIPPED:
        return None
    o = run.config.objective
    meaning = f"the clip stops {share:.0%} of the actions: a batch moves the policy further than it may be used for."
    changes = [remedies.slower(run), *remedies.fewer_passes(run)]
    if run.draws_pictures:
        meaning = (
            f"{meaning} The ratio of a picture is that of all its dimensions together: a small range is soon left."
        )
        wide = {"clip_low": 1.0, "clip_high": 1.0}
        changes += remedies.objective(run, "a range in nats of the whole picture", clip_unit="nats", dims="sum", **wide)
    elif not run.config.optim.stop_kl and run.config.updates_per_batch > 1:
        far = run["kl/old_k3_nats"]
        half = remedies.number(far.third(2).mean / 2) if len(far) and far.third(2).mean > 0 else "0.02"
        changes.append(Change("--optim.stop-kl", half, "ends a batch at half of the KL that it comes to"))
    elif o.surrogate == "clip" and o.ratio == "sequence":
        changes += remedies.objective(run, "one ratio for each token", ratio="token", clip_low=0.2, clip_high=0.2)
    return Finding(present(high, low, run["ratio/max"], run["kl/old_k3_nats"]), meaning, tuple(changes))


def clip_inert(run: Record) -> Finding | None:
    """Several updates a batch, and no ratio that comes near the clip."""
    o, updates = run.config.objective, run.config.updates_per_batch
    ratio = run["ratio/max"]
    if updates < 2 or o.surrogate != "clip" or run.total("clip/high_frac") + run.total("clip/low_frac") > 0:
        return None
    room, widest = clip_range(o)[1], max(ratio.values) - 1
    if widest > INERT * room:
        return None
    place = ratio.values.index(max(ratio.values))
    if widest <= 0:
        meaning = (
            f"a batch is used for {updates} updates and the ratio stays 1 to the bit: either nothing moves, or old "
            "log-probs are taken from the same forward as the new ones, so that nothing can be clipped."
        )
    else:
        meaning = (
            f"a batch is used for {updates} updates and no ratio comes further than {widest:.2g} from 1, where the "
            f"clip begins at {room:.2g}: the clip does nothing, and the further updates little."
        )
    changes = [remedies.faster(run)]
    if o.dims == "mean":
        changes += remedies.objective(run, "the joint ratio of all dimensions, in nats", dims="sum", clip_unit="nats")
    measured = (at(ratio, place), whole(run["clip/high_frac"]), *present(run["kl/old_k3_nats"]))
    return Finding(measured, meaning, tuple(changes))


def ended_early(run: Record) -> Finding | None:
    """``stop_kl`` ends most batches."""
    ended, epochs = run["update/early_stop_frac"], run["update/epochs_count"]
    if ended.whole().mean < ENDED:
        return None
    limit = run.config.optim.stop_kl
    meaning = (
        f"the KL to the policy that drew the batch exceeds {limit:g} nats in {ended.whole().mean:.0%} of the steps, "
        "and the rest of the batch is not used: each update is too large for as many as were asked for."
    )
    changes = [remedies.slower(run), *remedies.fewer_passes(run)]
    return Finding((whole(ended), *present(epochs, run["kl/old_k3_nats"])), meaning, tuple(changes))


# --- lengths ----------------------------------------------------------------------------------------------------------


def longer(run: Record) -> Finding | None:
    """Answers grow and the reward does not."""
    length = run["len/mean_actions"]
    first, last = length.third(0), length.third(2)
    if last.mean < LONGER * first.mean or run.reward.rises(run.reward.third(1), run.reward.third(2)):
        return None
    meaning = (
        f"answers have become {last.mean / first.mean:.1f} times as long, and the reward does not rise with them: "
        "length pays for itself. A mean over each row's own tokens makes a long wrong answer cheap."
    )
    changes = _against_length(run)
    if run.config.objective.average == "sequence":
        changes = remedies.objective(run, "one denominator for short and long", average="constant") + changes
    return Finding(present(length, run.reward, run["finish/truncated_frac"]), meaning, tuple(changes))


def truncated(run: Record) -> Finding | None:
    """Answers that end at the longest length instead of by themselves, still at the end of the run."""
    cut, longest = run["finish/truncated_frac"], run.config.rollout.max_new_tokens
    if cut.third(2).mean < CUT:
        return None
    meaning = (
        f"{cut.third(2).mean:.0%} of the rows are cut off at {longest} tokens: what is rewarded is the beginning of an "
        "answer. A form with no end, or too little room."
    )
    room = Change("--rollout.max-new-tokens", str(2 * longest), f"twice {longest}")
    return Finding(present(cut, run["len/mean_actions"], run.reward), meaning, (room, *_against_length(run)))


def _against_length(run: Record) -> list[Change]:
    o, longest = run.config.objective, run.config.rollout.max_new_tokens
    if o.overlong or longest < 5:
        return remedies.objective(run, "cut rows are not learned from", mask_truncated=True)
    return remedies.objective(run, "penalises the last fifth of the length (DAPO)", overlong=longest // 5)


SYMPTOMS = (
    Symptom("ratio-not-1", "The ratio is not 1 at the first update", ratio_not_one, ("ratio/max", "ratio/mean")),
    Symptom("mismatch", "Sampler and trainer disagree", mismatch, ("mismatch/mean_nats",), 3),
    Symptom("entropy-collapse", "The entropy has collapsed", entropy_collapse, ("entropy/mean_nats",), LEAST),
    Symptom("kl-blow-up", "The KL runs away", kl_blow_up, ("kl/ref_nats",), LEAST),
    Symptom("clip-always", "The clip stops too much", clip_always, ("clip/high_frac", "ratio/max"), 3),
    Symptom("clip-inert", "The clip does nothing", clip_inert, ("ratio/max", "clip/high_frac"), LEAST),
    Symptom("ended-early", "Most batches are ended early", ended_early, ("update/early_stop_frac",), 3),
    Symptom("longer", "Answers grow, the reward does not", longer, ("len/mean_actions", "reward/mean"), LEAST),
    Symptom("truncated", "Answers are cut off", truncated, ("finish/truncated_frac",), 3),
)
