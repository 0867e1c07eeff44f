"""Plain-text description of an objective: its formulas, and choices that are likely mistakes."""

from __future__ import annotations

from gruppo.core.loss import clip_range
from gruppo.core.objective import Objective

BASELINES = {
    "none": "0",
    "mean": "mean of the group",
    "leave_one_out": "mean of the group's other rows",
    "batch_mean": "mean of the batch",
    "running": "running mean of all rewards",
    "prompt": "mean of the prompt's last rewards",
}
SCALES = {
    "group": "std of the group",
    "batch": "std of the batch",
    "running": "running std within groups",
    "prompt": "std of the prompt's last rewards",
}
SURROGATES = {
    "clip": "min(r A, clip(r, {low:.6g}, {high:.6g}) A)",
    "cispo": "stopgrad(clip(r, {low:.6g}, {high:.6g})) A logprob",
    "sapo": "sigmoid(tau (r - 1)) 4/tau A,  tau 1 for A > 0, else 1.05",
    "vespo": "stopgrad(phi(w)) A logprob,  w = exp(sum over the row of logprob - old_logprob)",
    "reinforce": "A logprob",
}
AVERAGES = {
    "sequence": "mean over the tokens of a row, then over the rows",
    "token": "mean over all kept tokens of the update",
    "prompt": "mean over the tokens of a prompt's rows, then over the prompts",
    "constant": "sum over tokens / (rows x {max_length})",
    "sequence_sum": "sum over the tokens of a row, then mean over the rows",
    "sum": "sum over all tokens",
}
IN_FORMULAS = {"baseline", "scale", "scale_eps", "surrogate", "average", "kl", "kl_in"}
IN_FORMULAS |= {"clip_low", "clip_high", "lam"}
"""Choices that the lines with formulas show; the others are listed as they are set."""


def describe_objective(
    objective: Objective, *, kl_coef: float, group_size: int, max_length: int, action: str = "token"
) -> list[str]:
    """The effective objective, line by line. ``action``: what an action is called (token, step,
    action)."""
    o = objective
    if o.has_critic:
        advantage = f"GAE(rewards, critic), lambda {o.lam:g}"
    else:
        advantage = f"(reward - {BASELINES[o.baseline]})"
        if o.scale != "none":
            advantage += f" / ({SCALES[o.scale]} + {o.scale_eps:g})"
    low, high = clip_range(o)
    own = f"minus {o.surrogate}(log r, A, logprob, mask)"
    surrogate = SURROGATES.get(o.surrogate, own).format(low=1 - low, high=1 + high)
    if kl_coef <= 0:
        kl = "KL          none: kl_coef is 0, no reference is loaded"
    elif o.kl_in == "reward":
        kl = f"minus       {kl_coef:g} x (logprob - ref_logprob) in the reward of each token"
    else:
        kl = f"minus       {kl_coef:g} x KL(policy || reference) by {o.kl}, in nats per token"
    lines = [
        f"advantage   A = {advantage}; {group_size} rows per group",
        f"maximize    {surrogate},  r = exp(logprob - old_logprob)",
        f"averaged    {AVERAGES[o.average].format(max_length=max_length)}",
        kl,
    ]
    defaults = vars(Objective())
    for name, value in vars(o).items():
        if name not in IN_FORMULAS and value != defaults[name]:
            lines.append(f"{name.replace('_', ' '):11} {value}")
    # Everything above speaks of tokens: an image model's actions are steps or patches.
    return [line.replace("token", action) for line in lines]


def objective_warnings(
    objective: Objective, *, kl_coef: float, updates_per_batch: int, truncates: bool = False
) -> list[str]:
    """Choices that are valid and likely mistakes. ``truncates``: whether sampling uses top-k or
    top-p."""
    o = objective
    warnings = {
        """a running mean over prompts makes advantages measure prompt difficulty; a group mean does
            not""": o.baseline == "running",
        "one update per batch: the ratio is 1, so the clip has no effect": (
            updates_per_batch == 1 and o.surrogate == "clip"
        ),
        """whitening shifts all advantages by their mean: groups without spread no longer get
            exactly 0""": o.whiten and o.needs_groups,
        f"""kl_gradient='naive' with {o.kl} has the wrong gradient in expectation, at least
            off-policy""": kl_coef > 0 and o.kl_in == "loss" and o.kl_gradient == "naive",
        "the KL is between two distributions, each cut to its own top-k and top-p: an estimate": (
            kl_coef > 0 and truncates
        ),
    }
    return [" ".join(text.split()) for text, is_due in warnings.items() if is_due]
