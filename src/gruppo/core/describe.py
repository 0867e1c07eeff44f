"""Plain-text description of an objective: its formulas, and choices that are likely mistakes."""

from __future__ import annotations

from gruppo.core.loss import clip_range
from gruppo.core.objective import Objective


def describe_objective(
    objective: Objective, *, kl_coef: float, group_size: int, max_length: int, action: str = "token"
) -> list[str]:
    """The effective objective, line by line. ``action``: what an action is called (token, step,
    action)."""
    o = objective
    if o.has_critic:
        advantage = f"A = GAE(rewards, critic), gamma {o.gamma:g}, lambda {o.lam:g}"
        credit = "each token its own; a row's reward is on its last token, a step's on the step's"
    else:
        baseline = {
            "none": "0",
            "mean": "mean of the group",
            "leave_one_out": "mean of the group's other rows",
            "batch_mean": "mean of the batch",
            "running": "running mean of all rewards",
            "prompt": "mean of the prompt's last rewards",
        }[o.baseline]
        scale = {
            "none": "",
            "group": "std of the group",
            "batch": "std of the batch",
            "running": "running std within groups",
            "prompt": "std of the prompt's last rewards",
        }[o.scale]
        advantage = f"A = (reward - {baseline})" + (
            f" / ({scale} + {o.scale_eps:g})" if scale else ""
        )
        credit = {
            "outcome": "one for all tokens of a row",
            "return_to_go": f"each token for what came after it, gamma {o.gamma:g}",
            "position": "each action its own",
        }[o.credit]
    if o.combine == "normalize_then_sum":
        advantage += ", of each reward; their weighted sum normalized over the batch"
    advantage += ", whitened over all tokens" if o.whiten else ""
    advantage += f", clipped to [-{o.adv_clip:g}, {o.adv_clip:g}]" if o.adv_clip else ""

    low, high = clip_range(o)
    ratio = ",  r = exp(logprob - old_logprob)"
    ratio += ", the geometric mean over the row" if o.ratio == "sequence" else ""
    ratio += ", and over the dimensions of an action" if o.dims == "mean" else ""
    dual = f", at least {o.dual_clip:g} A" if o.dual_clip else ""
    surrogate = {
        "clip": f"min(r A, clip(r, {1 - low:.6g}, {1 + high:.6g}) A){dual}{ratio}",
        "cispo": f"stopgrad(clip(r, {1 - low:.6g}, {1 + high:.6g})) A logprob{ratio}",
        "sapo": f"sigmoid(tau (r - 1)) 4/tau A,  tau 1 for A > 0, else 1.05{ratio}",
        "vespo": "stopgrad(phi(w)) A logprob,  w = exp(sum over the row of logprob - old_logprob)",
        "reinforce": "A logprob",
    }.get(o.surrogate, f"minus {o.surrogate}(log r, A, logprob, mask){ratio}")
    average = {
        "sequence": "mean over the tokens of a row, then over the rows",
        "token": "mean over all kept tokens of the update",
        "prompt": "mean over the tokens of a prompt's rows, then over the prompts",
        "constant": f"sum over tokens / (rows x {max_length})",
        "sequence_sum": "sum over the tokens of a row, then mean over the rows",
        "sum": "sum over all tokens",
    }[o.average]
    if kl_coef <= 0:
        kl = "KL          none: kl_coef is 0, no reference is loaded"
    elif o.kl_in == "reward":
        kl = f"minus       {kl_coef:g} x (logprob - ref_logprob) in the reward of each token"
    else:
        how = (
            "correct in expectation"
            if o.kl_gradient == "unbiased"
            else "the estimator's own gradient"
        )
        how = "in closed form" if o.kl == "exact" else how
        kl = (
            f"minus       {kl_coef:g} x KL(policy || reference) by {o.kl}, {how}, in nats per token"
        )

    lines = [f"advantage   {advantage}", f"            {credit}; {group_size} rows per group"]
    lines += [f"maximize    {surrogate}", f"averaged    {average}", kl]
    if o.correction != "none":
        how = "clamped to" if o.correction == "truncate" else "0 outside"
        how += f" [{o.correction_low:g}, {o.correction_high:g}]"
        lines.append(
            f"corrected   by exp(old_logprob - sampler_logprob) of each {o.correction_level}, {how}"
        )
    if o.kl_mask:
        lines.append(
            f"masked      where the KL to the old policy exceeds {o.kl_mask:g} nats and would grow"
        )
    if o.has_critic:
        clip = f", V changing by at most {o.value_clip:g} per batch" if o.value_clip else ""
        lines.append(f"critic      0.5 (V - return)^2{clip}")
    if o.overlong:
        lines.append(f"penalized   the last {o.overlong} actions before {max_length}, up to -1")
    if o.mask_truncated:
        lines.append("masked      rows truncated at the longest length")
    # Everything above speaks of tokens: an image model's actions are steps or patches.
    return [line.replace("token", action) for line in lines]


def objective_warnings(
    objective: Objective, *, kl_coef: float, updates_per_batch: int, truncates: bool = False
) -> list[str]:
    """Choices that are valid and likely mistakes. ``truncates``: whether sampling uses top-k or
    top-p."""
    o, defaults = objective, Objective()
    is_used = {
        "clip_low clip_high clip_unit": o.surrogate in ("clip", "cispo"),
        "lam value_clip": o.has_critic,
        "dual_clip": o.surrogate == "clip",
        "gamma": o.credit == "return_to_go",
        "ratio": o.surrogate not in ("reinforce", "vespo"),
        "correction_level correction_low correction_high": o.correction != "none",
    }
    unused = [name for names, used in is_used.items() if not used for name in names.split()]
    changed = [name for name in unused if getattr(o, name) != getattr(defaults, name)]
    warnings = [f"{name} is set but has no effect here" for name in changed]
    if o.baseline == "running":
        warnings.append(
            "a running mean over prompts makes advantages measure prompt difficulty; a group mean "
            "does not"
        )
    if updates_per_batch == 1 and o.surrogate == "clip":
        warnings.append("one update per batch: the ratio is 1, so the clip has no effect")
    if o.whiten and o.needs_groups:
        warnings.append(
            "whitening shifts all advantages by their mean: groups without spread no longer get "
            "exactly 0"
        )
    if kl_coef > 0 and o.kl_in == "loss" and o.kl_gradient == "naive":
        warnings.append(
            f"kl_gradient='naive' with {o.kl} has the wrong gradient in expectation, at least "
            f"off-policy"
        )
    if kl_coef > 0 and truncates:
        warnings.append(
            "the KL is between two distributions, each cut to its own top-k and top-p: an estimate"
        )
    return warnings
