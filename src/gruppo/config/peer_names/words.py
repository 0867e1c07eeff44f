"""What other systems write for choices of ours."""

from __future__ import annotations

import math

from gruppo.config.schema import Config
from gruppo.config.stages import highest


def trl_loss_type(config: Config) -> str:
    """TRL's word for surrogate and average; bnpo divides by the tokens of a micro-batch, which nothing here does."""
    o = config.objective
    by_average = {"sequence": "grpo", "token": "dapo", "constant": "dr_grpo"}
    by_surrogate = {"cispo": ("cispo", "token"), "sapo": ("sapo", "sequence"), "vespo": ("vespo", "token")}
    if o.surrogate in by_surrogate:
        name, average = by_surrogate[o.surrogate]
        return name if o.average == average else "no such"
    if o.surrogate == "clip" and o.average == "sequence_sum" and o.ratio == "sequence":
        return "luspo"
    return by_average.get(o.average, "no such") if o.surrogate == "clip" else "no such"


def trl_clip_high(config: Config) -> float | None:
    """CISPO's is the cap itself; a bound in nats is one of the ratio."""
    o = config.objective
    bound = clip_high_of_ratio(config)
    return 1 + (o.clip_high if bound is None else bound) if o.surrogate == "cispo" else bound


def clip_high_of_ratio(config: Config) -> float | None:
    o = config.objective
    return math.expm1(o.clip_high) if o.clip_unit == "nats" else None


def clip_low_of_ratio(config: Config) -> float | None:
    o = config.objective
    return -math.expm1(-o.clip_low) if o.clip_unit == "nats" else None


def trl_delta(config: Config) -> str | None:
    return None if config.objective.dual_clip else "None"


def trl_scale(config: Config) -> str | None:
    known = {"group": "group", "batch": "batch", "none": "none"}
    return None if config.objective.scale in known else "no such"


def trl_correction(config: Config) -> bool:
    return config.objective.correction != "none"


def trl_correction_mode(config: Config) -> str | None:
    o = config.objective
    return None if o.correction == "none" else f"{o.correction_level}_{o.correction}"


def rows(config: Config) -> int:
    return config.rollout.prompts * config.rollout.group_size


def updates(config: Config) -> int:
    return config.steps * config.updates_per_batch


def is_mixed(config: Config) -> bool:
    return config.reference.kind == "mixed"


def is_unbiased(config: Config) -> bool:
    return config.objective.kl_gradient == "unbiased"


def has_kl(config: Config) -> bool:
    return highest(config, "kl_coef") > 0


def kl_in_reward(config: Config) -> bool:
    return has_kl(config) and config.objective.kl_in == "reward"


def kl_in_loss(config: Config) -> bool:
    return has_kl(config) and config.objective.kl_in == "loss"


def verl_loss_agg_mode(config: Config) -> str:
    return {
        "token": "token-mean",
        "sequence": "seq-mean-token-mean",
        "sequence_sum": "seq-mean-token-sum",
        "constant": "seq-mean-token-sum-norm",
        "sum": "token-sum",
    }[config.objective.average]


def verl_loss_mode(config: Config) -> str:
    o = config.objective
    if o.surrogate == "clip":
        return "gspo" if o.ratio == "sequence" else "vanilla"
    return {"sapo": "sapo", "cispo": "cispo", "reinforce": "gpg"}.get(o.surrogate, "no such")


def verl_adv_estimator(config: Config) -> str:
    """By the choices that each of verl's estimators is; the scale of ``grpo`` is a setting of its own there."""
    o = config.objective
    if o.has_critic:
        return "gae"
    known = {
        ("outcome", "mean", False): "grpo",
        ("outcome", "leave_one_out", False): "rloo",
        ("return_to_go", "batch_mean", True): "reinforce_plus_plus",
        ("outcome", "mean", True): "reinforce_plus_plus_baseline",
    }
    if o.combine == "normalize_then_sum":
        return "gdpo"
    return known.get((o.credit, o.baseline, o.whiten), "no such")


def verl_kl_type(config: Config) -> str:
    return {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(config.objective.kl, "no such")


def is_divided(config: Config) -> bool:
    return config.objective.scale != "none"


def refills(config: Config) -> bool:
    return config.rollout.refill_rounds > 0


def minibatch_prompts(config: Config) -> int:
    return config.rollout.prompts // config.optim.minibatches


def whole_value_coef(config: Config) -> float | None:
    """Errors are squared whole there, and halved here."""
    value = config.stage.value_coef
    return value / 2 if isinstance(value, int | float) and not config.stages else None
