"""Objectives: an algorithm is a bundle of choices, and a preset is an instance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from gruppo.core.advantages import Baseline, Scale
from gruppo.core.kl import Estimator, KlGradient
from gruppo.core.surrogates import MAX_LOG_RATIO, SURROGATES
from gruppo.core.weights import Average, Correction, CorrectionLevel
from gruppo.types import GruppoError

GROUP_BASELINES = ("mean", "leave_one_out")
RANGES: Mapping[str, tuple[float, float]] = {
    "gamma": (0, 1),
    "lam": (0, 1),
}
"""Smallest and largest value of a number; of those not listed, 0 and any finite one."""


@dataclass(frozen=True)
class Objective:
    """What is maximized. Presets are instances; change any field with ``dataclasses.replace``."""

    credit: Literal["outcome", "return_to_go", "position"] = "outcome"
    """Rewards that an action is credited with: all, later ones, or its own.

    outcome: the score of the row. return_to_go: what follows the action. position: the reward of
    the action itself (of its step, its patch).
    """
    baseline: Baseline = "mean"
    """Baseline subtracted from the reward."""
    scale: Scale = "group"
    """Standard deviation that advantages are divided by."""
    scale_eps: float = 1e-4
    """Added to the scale; TRL uses 1e-4, verl 1e-6.

    Groups with equal rewards are found by comparison, not by this value.
    """
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several rewards: normalize their weighted sum, or each one first (GDPO)."""
    whiten: bool = False
    """Normalize advantages to mean 0 and variance 1 over all actions."""
    adv_clip: float = 0.0
    """Clip advantages to [-adv_clip, adv_clip]; 0 disables."""
    gamma: float = 1.0
    """Discount factor per action."""
    lam: float = 0.95
    """Lambda of GAE: 1 relies on rewards, 0 on the critic."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio: per action, or the geometric mean of the row (GSPO)."""
    surrogate: str = "clip"
    """Surrogate objective: clip, cispo, sapo, vespo, reinforce, or FILE.py:NAME.

    A function of your own, called as f(log_ratio, advantages, logprobs, mask), returns the loss of
    each action.
    """
    clip_low: float = 0.2
    """Lower clip range: the ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip range: the ratio is clipped above 1 + clip_high."""
    clip_unit: Literal["ratio", "nats"] = "ratio"
    """Unit of the clip range; nats: the log-ratio is kept in [-clip_low, clip_high]."""
    dual_clip: float = 0.0
    """Maximum ratio where the advantage is negative; 0 disables (verl: 3)."""
    dims: Literal["sum", "mean"] = "sum"
    """Log-ratio of a continuous action: summed or averaged over its dimensions."""
    average: Average = "sequence"
    """Aggregation of the loss over actions."""
    kl: Estimator = "k3"
    """Estimator of the KL to the reference; exact is for Gaussian policies."""
    kl_mask: float = 0.0
    """KL to the old policy, in nats, above which actions are masked; 0 disables.

    Only actions that the update would move further away are masked.
    """
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract it from the rewards."""
    kl_gradient: KlGradient = "unbiased"
    """Gradient of the KL loss: unbiased, or of the estimator (naive)."""
    correction: Correction = "none"
    """Importance weights for the mismatch between sampler and trainer."""
    correction_level: CorrectionLevel = "token"
    """Level of these weights."""
    correction_low: float = 0.0
    """Lower bound of these weights."""
    correction_high: float = 3.0
    """Upper bound of these weights."""
    value_clip: float = 0.2
    """Clip range of the critic's estimates within a batch; 0 disables."""
    mask_truncated: bool = False
    """Exclude truncated completions from the loss."""
    overlong: int = 0
    """Length of the soft overlong penalty, in tokens before the limit (DAPO).

    The penalty grows to a reward of -1 at the limit; 0 disables.
    """

    def __post_init__(self) -> None:
        """Refuse values that no field takes, and choices that rule each other out."""
        hints = get_type_hints(type(self))
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            option = f"objective.{name}"
            choices = get_args(hints[name])
            if choices and value not in choices:
                problem = f"{option}={value!r} is not one of {', '.join(map(repr, choices))}"
                raise GruppoError(problem, option=option, advice=str(field.default))
            low, high = RANGES.get(name, (0, math.inf))
            if hints[name] in (int, float) and (not low <= value <= high or math.isinf(value)):
                most = f"at most {high:g}" if high < math.inf else "finite"
                problem = (
                    f"{option}={value} is out of range; it needs to be at least {low:g} and {most}"
                )
                raise GruppoError(problem, option=option, advice=f"{field.default:g}")
        in_nats = self.clip_unit == "nats"
        highest = math.exp(self.clip_high) if in_nats else 1 + self.clip_high
        low, high = self.correction_low, self.correction_high
        normalizes_each = self.combine == "normalize_then_sum"
        _refuse(
            self.surrogate not in SURROGATES and not self.has_own_surrogate,
            f"""objective.surrogate={self.surrogate!r} is not one of
                {", ".join(map(repr, SURROGATES))}, and no FILE.py:NAME""",
            "surrogate",
            "clip",
        )
        # In nats any clip_low is valid: exp(-clip_low) stays above 0.
        _refuse(
            not in_nats and self.clip_low > 1,
            f"objective.clip_low={self.clip_low}: clipping below 1 - clip_low needs clip_low <= 1",
            "clip_low",
            "0.2",
        )
        _refuse(
            in_nats and self.clip_high > MAX_LOG_RATIO,
            f"objective.clip_high={self.clip_high:g}: ratios end at e^{MAX_LOG_RATIO:g}",
            "clip_high",
            "1",
        )
        _refuse(
            0 < self.dual_clip <= highest,
            f"dual_clip={self.dual_clip:g} crosses the clip range, which ends at {highest:g}",
            "dual_clip",
            "3",
        )
        _refuse(
            self.correction != "none" and not (low <= 1 <= high and low < high),
            f"""correction_low={low:g}, correction_high={high:g}: 1, the weight if sampler and
                trainer agree, needs to lie between them""",
            "correction_low",
            "0 $objective.correction_high 3",
        )
        _refuse(
            self.has_critic and self.credit != "return_to_go",
            f"baseline='critic' gives each action its own advantage, not credit={self.credit!r}",
            "credit",
            "return_to_go",
        )
        _refuse(
            self.has_critic and self.scale != "none",
            f"""baseline='critic' compares returns with values, which scale={self.scale!r} does not
                fit""",
            "scale",
            "none $objective.whiten True",
        )
        _refuse(
            self.has_critic and normalizes_each,
            "combine='normalize_then_sum' normalizes rewards before a critic can learn them",
            "combine",
            "sum_then_normalize",
        )
        has_history = "prompt" in (self.baseline, self.scale)
        _refuse(
            self.credit == "position" and (has_history or normalizes_each),
            "credit='position' has no combine='normalize_then_sum' and no scale='prompt'",
            "credit",
            "outcome",
        )
        _refuse(
            self.kl_in == "reward" and normalizes_each and self.credit == "outcome",
            """kl_in='reward' with combine='normalize_then_sum' would normalize away the KL and
                kl_coef""",
            "credit",
            "return_to_go or $objective.kl_in loss",
        )
        _refuse(
            self.kl_in == "reward" and self.kl != "k1",
            f"""kl_in='reward' needs kl='k1': the gradient of kl={self.kl!r} in the reward is 37 to
                125% off""",
            "kl",
            "k1",
        )

    def check(
        self,
        *,
        group_size: int,
        updates_per_row: int = 1,
        kl_coef: float = 0.0,
        max_length: int | None = None,
        has_positions: bool = False,
        is_gaussian: bool | None = False,
    ) -> None:
        """Refuse what cannot learn in this run, with the reason and the nearest valid choice.

        ``updates_per_row``: optimizer steps of a batch, all but the first on data of older weights.
        ``has_positions``: rewards come per action. ``is_gaussian``: the policy's actions are
        continuous.
        """
        if group_size < 2 and self.needs_groups:
            why = "baseline" if self.baseline in GROUP_BASELINES else "spread to scale by"
            raise GruppoError(
                f"""group_size={group_size} gives no {why} for baseline={self.baseline!r},
                    scale={self.scale!r}; it needs at least 2""",
                option="rollout.group_size",
                advice="2 or $objective reinforce",
            )
        if self.surrogate == "reinforce" and updates_per_row > 1:
            raise GruppoError(
                f"""surrogate='reinforce' has no correction for data of older weights, but a batch
                    is used for {updates_per_row} updates""",
                option="optim.epochs",
                advice="1 $optim.minibatches 1 or $objective.surrogate clip",
            )
        is_in_loss = kl_coef > 0 and self.kl_in == "loss"
        _refuse(
            is_in_loss and self.kl == "k1" and self.kl_gradient == "naive",
            f"""kl='k1' with kl_gradient='naive' has a gradient of zero in expectation, so
                kl_coef={kl_coef:g} has no effect""",
            "kl_gradient",
            "unbiased, or $objective.kl k2 or k3",
        )
        _refuse(
            kl_coef > 0 and self.kl == "exact" and is_gaussian is False,
            """kl='exact' is the closed form of Gaussian policies; this policy's actions are
                discrete, and no logits are kept""",
            "kl",
            "k3",
        )
        _refuse(
            kl_coef > 0 and self.kl == "k3" and bool(is_gaussian),
            """kl='k3' of a Gaussian policy takes the exponential of a log-ratio summed over the
                dimensions of an action, which overflows. Its KL has a closed form""",
            "kl",
            "exact",
        )
        self.check_rewards(of_steps=has_positions, of_rows=not has_positions)
        longest = math.inf if max_length is None else max_length
        _refuse(
            self.overlong >= longest,
            f"""overlong={self.overlong} penalizes every length up to the longest, {max_length}; it
                needs to be smaller""",
            "overlong",
            f"{longest // 5}",
        )

    def check_rewards(self, *, of_steps: bool, of_rows: bool) -> None:
        """Refuse a credit that the rewards cannot give. Rewards score single steps, whole rows, or
        both."""
        _refuse(
            self.credit == "position" and not of_steps,
            "credit='position' needs a reward for each action; these rewards score whole rows",
            "credit",
            "outcome, or $reward process_reward:PATH",
        )
        if not of_steps or self.credit == "outcome" or self.has_critic:
            return
        _refuse(
            "prompt" in (self.baseline, self.scale),
            """baseline='prompt' and scale='prompt' keep the scores of rows, but steps are compared
                with steps""",
            "baseline",
            "mean $objective.scale group, or $objective.credit outcome",
        )
        sums = self.credit == "return_to_go"
        _refuse(
            of_rows and self.scale != "none" and self.combine == "sum_then_normalize",
            f"""rewards of rows and steps are normalized separately, and their weights in the sum
                divided out by scale={self.scale!r}""",
            "combine" if sums else "scale",
            f"{'normalize_then_sum' if sums else 'none'}, or $objective.credit outcome",
        )

    @property
    def needs_groups(self) -> bool:
        return self.baseline in GROUP_BASELINES or self.scale in ("group", "running")

    @property
    def has_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def has_own_surrogate(self) -> bool:
        """Whether the surrogate is a function of the user's, by its name."""
        return ":" in self.surrogate

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a row's loss cannot be computed from some of its columns."""
        corrects_sequences = self.correction != "none" and self.correction_level == "sequence"
        return self.ratio == "sequence" or self.surrogate == "vespo" or corrects_sequences


def _refuse(is_wrong: bool, problem: str, field: str, advice: str) -> None:
    if is_wrong:
        raise GruppoError(problem, option=f"objective.{field}", advice=advice)


# --- presets --------------------------------------------------------------------------------------

GRPO = Objective()
"""DeepSeekMath, arXiv 2402.03300: (r - mean) / std of the group, clip, mean over tokens and then
over sequences."""
DR_GRPO = Objective(scale="none", average="constant")
"""arXiv 2503.20783: no division by the standard deviation or the length; one constant
denominator."""
DAPO = Objective(clip_high=0.28, average="token")
"""arXiv 2503.14476: clip-higher and the token average. Its other two parts are
rollout.refill_rounds and overlong."""
GSPO = Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
"""arXiv 2507.18071: one ratio per sequence, the geometric mean over its tokens, with a clip to
match."""
CISPO = Objective(surrogate="cispo", clip_low=1.0, clip_high=4.0, average="token")
"""MiniMax-M1, arXiv 2506.13585: REINFORCE weighted by a detached ratio, clipped at 5."""
SAPO = Objective(surrogate="sapo")
"""arXiv 2511.20347: a soft gate on the ratio instead of the clip."""
RLOO = Objective(
    baseline="leave_one_out", scale="none", surrogate="reinforce", average="sequence_sum"
)
"""arXiv 2402.14740: each rollout against the mean of the others in its group, the whole sequence as
one action.

With a kl_coef, the paper puts the KL in the reward: replace(RLOO, kl="k1", kl_in="reward")."""
REINFORCE = Objective(
    baseline="batch_mean", scale="none", surrogate="reinforce", average="sequence_sum"
)
"""Williams 1992, with the mean reward of the batch as the baseline; works with groups of one."""
REINFORCE_PP = Objective(
    credit="return_to_go",
    baseline="batch_mean",
    scale="none",
    whiten=True,
    average="token",
    kl="k1",
    kl_in="reward",
)
"""REINFORCE++, arXiv 2501.03262: PPO without a critic; KL in the reward, advantages whitened over
all tokens."""
PPO = Objective(
    credit="return_to_go",
    baseline="critic",
    scale="none",
    whiten=True,
    average="token",
    kl="k1",
    kl_in="reward",
)
"""arXiv 1707.06347, as used for text (arXiv 2203.02155): a critic, GAE, and the KL in the reward of
each token."""
NANOCHAT = Objective(scale="none", surrogate="reinforce", average="prompt")
"""nanochat's simplified GRPO: reward minus the group mean, on-policy, no clip, no KL, the average
of each prompt."""

# Those above in their order, by the lower-case name of the constant: dr_grpo, reinforce_pp.
PRESETS: Mapping[str, Objective] = {
    name.lower(): preset
    for name, preset in list(globals().items())
    if isinstance(preset, Objective)
}
