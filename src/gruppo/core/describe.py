"""An objective in words and formulas."""

from __future__ import annotations

from gruppo.core.loss import clip_range
from gruppo.core.objective import Objective


def describe(objective: Objective, *, kl_coef: float, group_size: int, max_length: int, of: str = "token") -> list[str]:
    """The effective objective, line by line. ``of``: what an action is called, token, step or action."""
    return [line.replace("token", of) for line in _described(objective, kl_coef, group_size, max_length)]


def _described(o: Objective, kl_coef: float, group_size: int, max_length: int) -> list[str]:
    lines = [
        f"advantage   {_advantage(o)}",
        f"            {_credit(o)}; {group_size} rows a group",
        f"maximise    {_surrogate(o)}",
        f"averaged    {_average(o, max_length)}",
        _kl(o, kl_coef),
    ]
    if o.correction != "none":
        bounds = f"[{o.correction_low:g}, {o.correction_high:g}]"
        how = f"kept in {bounds}" if o.correction == "truncate" else f"0 outside {bounds}"
        lines.append(f"corrected   by exp(old_logprob - sampler_logprob) of each {o.correction_level}, {how}")
    if o.kl_mask:
        lines.append(f"left out    where the KL to the old policy exceeds {o.kl_mask:g} nats and would grow")
    if o.has_critic:
        clip = f", V moving at most {o.value_clip:g} a batch" if o.value_clip else ""
        lines.append(f"critic      0.5 (V - return)^2{clip}")
    if o.overlong:
        lines.append(f"penalised   the last {o.overlong} actions before {max_length}, up to -1")
    if o.mask_truncated:
        lines.append("not learned rows cut at the longest length")
    return lines


def _advantage(o: Objective) -> str:
    if o.has_critic:
        text = f"A = GAE(rewards, critic), gamma {o.gamma:g}, lambda {o.lam:g}"
    else:
        scale = {
            "none": "",
            "group": "std of the group",
            "batch": "std of the batch",
            "running": f"running std within groups, decay {o.running_decay:g}",
            "prompt": "std of the prompt's last rewards",
        }[o.scale]
        mean = _BASELINES[o.baseline] + (f", decay {o.running_decay:g}" if o.baseline == "running" else "")
        text = f"A = (reward - {mean})" + (f" / ({scale} + {o.scale_eps:g})" if scale else "")
    if o.combine == "normalize_then_sum":
        text += ", of each reward; their weighted sum normalised over the batch"
    if o.whiten:
        text += ", whitened over all tokens"
    return text + (f", kept in [-{o.adv_clip:g}, {o.adv_clip:g}]" if o.adv_clip else "")


_BASELINES = {
    "none": "0",
    "mean": "mean of the group",
    "leave_one_out": "mean of the group's other rows",
    "batch_mean": "mean of the batch",
    "running": "running mean of all rewards",
    "prompt": "mean of the prompt's last rewards",
}


def _credit(o: Objective) -> str:
    if o.has_critic:
        return "each token its own; a row's reward is on its last token, a step's on the step's"
    if o.credit == "return_to_go":
        return f"each token for what came after it, gamma {o.gamma:g}"
    return "each action its own" if o.credit == "position" else "one for all tokens of a row"


def _surrogate(o: Objective) -> str:
    level = "" if o.ratio == "token" else ", the geometric mean over the row"
    level += ", and over the dimensions of an action" if o.dims == "mean" else ""
    ratio = f",  r = exp(logprob - old_logprob){level}"
    low, high = clip_range(o)
    if o.surrogate == "clip":
        dual = f", at least {o.dual_clip:g} A" if o.dual_clip else ""
        return f"min(r A, clip(r, {1 - low:.6g}, {1 + high:.6g}) A){dual}{ratio}"
    return {
        "cispo": f"stopgrad(clip(r, {1 - low:.6g}, {1 + high:.6g})) A logprob{ratio}",
        "sapo": f"sigmoid(tau (r - 1)) 4/tau A,  tau {o.tau_pos:g} for A > 0, else {o.tau_neg:g}{ratio}",
        "vespo": "stopgrad(phi(w)) A logprob,  w = exp(sum over the row of logprob - old_logprob)",
        "reinforce": "A logprob",
    }[o.surrogate]


def _average(o: Objective, max_length: int) -> str:
    return {
        "sequence": "mean over the tokens of a row, then over the rows",
        "token": "mean over all kept tokens of the update",
        "constant": f"sum over tokens / (rows x {max_length})",
        "sequence_sum": "sum over the tokens of a row, then mean over the rows",
        "sum": "sum over all tokens",
    }[o.average]


def _kl(o: Objective, kl_coef: float) -> str:
    if kl_coef <= 0:
        return "KL          none: kl_coef is 0, no reference is loaded"
    if o.kl_in == "reward":
        return f"minus       {kl_coef:g} x (logprob - ref_logprob) in the reward of each token"
    how = "correct in expectation" if o.kl_gradient == "unbiased" else "the estimator's own gradient"
    if o.kl == "exact":
        how = "in closed form"
    return f"minus       {kl_coef:g} x KL(policy || reference) by {o.kl}, {how}, in nats a token"


def cautions(objective: Objective, *, kl_coef: float, updates_per_batch: int, truncates: bool = False) -> list[str]:
    """What works and may not be meant. ``truncates``: whether sampling leaves out actions, by top-k or top-p."""
    o, said = objective, []
    said += [f"{name} is set, and nothing here reads it" for name in unread(o)]
    if o.baseline == "running":
        said.append("a running mean of all prompts turns the advantage into how hard a prompt is; the group's does not")
    if updates_per_batch == 1 and o.surrogate == "clip":
        said.append("one update a batch: the ratio is 1, so the clip rests and changes nothing")
    if o.whiten and o.needs_groups:
        said.append("whitening shifts all advantages by their mean: groups without spread no longer get exactly 0")
    if kl_coef > 0 and o.kl_in == "loss" and o.kl_gradient == "naive":
        said.append(f"kl_gradient='naive' with {o.kl} has the wrong gradient in expectation, off-policy at the least")
    if kl_coef > 0 and truncates:
        said.append("the KL is between distributions cut to top-k and top-p, each to its own: an estimate, not exact")
    return said


def unread(o: Objective) -> list[str]:
    """Fields with another value than the default that this objective's other choices leave without effect."""
    clips, plain = o.surrogate in ("clip", "cispo"), Objective()
    is_read = {
        "clip_low": clips,
        "clip_high": clips,
        "clip_unit": clips,
        "tau_pos": o.surrogate == "sapo",
        "tau_neg": o.surrogate == "sapo",
        "lam": o.has_critic,
        "value_clip": o.has_critic,
        "running_decay": "running" in (o.baseline, o.scale),
        "correction_level": o.correction != "none",
        "correction_low": o.correction != "none",
        "correction_high": o.correction != "none",
    }
    return [name for name, reads in is_read.items() if not reads and getattr(o, name) != getattr(plain, name)]
