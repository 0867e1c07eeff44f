"""TRL 1.16's own scoring of rows: the same reward functions through both, to advantages and
correction weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parity.batch import GROUPS, MASK, MAX_LENGTH, Case, rollouts
from tests.parity.trl_side import Rewards, scored, scored_by_engine, throughout, trainer_of
from torch import Tensor

from gruppo.core.advantages import group_advantages, normalized_sum
from gruppo.core.objective import RLOO
from gruppo.core.returns import whiten
from gruppo.core.weights import correction_weights
from gruppo.rewards.scoring import RewardSet, Scores
from gruppo.trainer.advantages import Scored, credit
from gruppo.types import Before, Likelihood

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ANSWER = [1.0, 0.0, 0.5, 2.0, 2.5, -1.0]
STYLE = [0.25, 0.5, 0.875, 0.125, 0.0, 0.75]
ONE_MISSING = [1.0, None, 0.5, 2.0, 2.5, -1.0]
ONE_SCORED = [1.0, 0.0, 0.5, None, 2.5, None]
GROUP_IDS = torch.tensor(GROUPS)


def trl_advantages(rewards: Rewards, kind: str = "GRPO", **config: Any) -> Tensor:
    return scored(trainer_of(kind, rewards, **config))["advantages"].double()


def summed(rewards: Rewards, weights: list[float] | None = None) -> Tensor:
    """Through gruppo's own reward set."""
    functions = [lambda completions, values=values, **_: list(values) for values in rewards]
    return RewardSet(functions, weights).score(rollouts()).rewards


def advantages(rewards: Tensor, **choices: Any) -> Tensor:
    of_tokens, _ = group_advantages(
        rewards, GROUP_IDS, MASK, **({"baseline": "mean", "scale": "group"} | choices)
    )
    return of_tokens[:, 0].double()


def combined(rewards: Rewards, weights: list[float]) -> Tensor:
    """Each reward by itself, then their sum, over the rows that any of them scores."""
    parts = [torch.tensor([torch.nan if x is None else x for x in values]) for values in rewards]
    scored_rows = torch.stack(parts).isfinite().any(0)
    return normalized_sum([advantages(part) for part in parts], weights, scored_rows).double()


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards", [[ANSWER], [ONE_MISSING], [ONE_SCORED]], ids=["all", "one_missing", "one_scored"]
)
def test_scale_rewards_is_our_scale_and_rows_without_a_reward_count_nowhere(
    rewards: Rewards, scale: Any
):
    theirs = trl_advantages(rewards, scale_rewards=scale)
    assert close(advantages(summed(rewards), scale=scale), theirs)
    assert theirs.abs().max() > 0.4


def test_reward_weights_are_ours_and_the_sum_is_normalised():
    theirs = trl_advantages([ANSWER, STYLE], reward_weights=[0.5, 2.0])
    assert close(advantages(summed([ANSWER, STYLE], [0.5, 2.0])), theirs)


def test_normalize_then_sum_is_ours_with_parts_missing_and_a_row_without_any():
    rewards = [[1.0, None, None, 2.0, 2.5, -1.0], [0.25, 0.5, None, 0.125, 0.0, None]]
    theirs = trl_advantages(
        rewards, multi_objective_aggregation="normalize_then_sum", reward_weights=[0.5, 2.0]
    )
    assert close(combined(rewards, [0.5, 2.0]), theirs)
    assert theirs[2] == 0


def test_normalize_then_sum_ignores_scale_rewards_in_trl():
    config = {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}
    assert close(combined([ANSWER, STYLE], [1.0, 1.0]), trl_advantages([ANSWER, STYLE], **config))


@pytest.mark.parametrize("rewards", [[ANSWER], [ONE_MISSING]], ids=["all", "one_missing"])
def test_rloos_baseline_is_the_mean_of_the_scored_others(rewards: Rewards):
    ours = advantages(summed(rewards), baseline=RLOO.baseline, scale=RLOO.scale)
    assert close(ours, trl_advantages(rewards, "RLOO", beta=0.0))


def test_rloos_beta_is_a_kl_in_the_reward_of_the_row():
    """TRL subtracts beta times the row's sum of k1 before the baseline: credit="outcome" with
    kl_in="reward"."""
    trainer, case = trainer_of("RLOO", [ANSWER], beta=0.5), Case()
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        (case.ref if model is trainer.ref_model else case.old).float(),
        None,
        None,
    )
    config = SimpleNamespace(
        objective=replace(RLOO, kl="k1", kl_in="reward"),
        rollout=SimpleNamespace(max_new_tokens=MAX_LENGTH),
    )
    run: Any = SimpleNamespace(config=config, state=SimpleNamespace(running={}), critic=None)
    score = torch.tensor(ANSWER)
    before = Before(case.old, ref=Likelihood(case.ref))
    own = Scored(run, rollouts(), Scores(score, {"answer": score}))
    step_params: Any = SimpleNamespace(kl_coef=0.5)
    ours = credit(step_params, own, before)[0][:, 0].double()
    assert close(ours, scored(trainer)["advantages"].double())
    assert not close(ours, advantages(score, baseline=RLOO.baseline, scale=RLOO.scale))


# --- the correction's weights ---------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0.0, 3.0), (0.5, 1.5)])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_weights_are_the_importance_sampling_ratios_of_vllm(
    level: Any, mode: Any, low: float, high: float
):
    config = {
        "vllm_importance_sampling_clip_min": low or None,
        "vllm_importance_sampling_clip_max": high,
    }
    trainer, case = (
        trainer_of("GRPO", vllm_importance_sampling_mode=f"{level}_{mode}", **config),
        Case(),
    )
    with throughout(torch.float64):
        theirs = scored_by_engine(trainer, case, torch.float64)[
            "importance_sampling_ratio"
        ].expand_as(MASK)
    ours = correction_weights(
        case.old, case.compute_module, MASK, mode=mode, level=level, low=low, high=high
    )
    assert torch.allclose(ours[MASK], theirs[MASK], rtol=1e-12, atol=0)
    raw = correction_weights(case.old, case.compute_module, MASK, mode="none", level=level)[MASK]
    assert (raw > 1.5).any() and (raw < 0.5).any() and (ours[MASK] == raw).any()


def test_a_log_prob_that_the_engine_could_not_report_counts_as_agreement_in_trl():
    trainer, case = trainer_of("GRPO", vllm_importance_sampling_mode="token_truncate"), Case()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Case,
            "compute_module",
            torch.where(torch.arange(7) == 1, torch.nan, case.compute_module),
        )
        theirs = scored_by_engine(trainer, case, torch.float32)["importance_sampling_ratio"]
        ours = correction_weights(case.old, case.compute_module, MASK, mode="truncate")
    assert theirs[0, 1] == 1
    assert ours[0, 1].isnan()


# --- known differences ----------------------------------------------------------------------------


def test_a_part_missing_in_one_row_counts_as_0_in_trls_sum_and_leaves_the_row_unscored_here():
    rewards = [ONE_MISSING, STYLE]
    with_zero = [[0.0 if x is None else x for x in ONE_MISSING], STYLE]
    theirs = trl_advantages(rewards)
    assert close(theirs, advantages(summed(with_zero)))
    ours = summed(rewards)
    assert ours.isnan().tolist() == [False, True, False, False, False, False]
    assert advantages(ours)[1] == 0 and theirs[1].abs() > 0.4


def test_a_row_without_any_reward_stays_in_trls_denominators():
    batch = scored(trainer_of("GRPO", [ONE_MISSING]))
    assert batch["advantages"][1] == 0
    assert batch["completion_mask"][1].sum() == MASK[1].sum()
    assert batch["num_items_in_batch"] == MASK.sum()


def test_a_group_of_equal_rewards_gets_rounding_residue_in_trl_and_0_here():
    equal = [[0.9] * 3 + [2.0, 2.5, -1.0]]
    theirs = trl_advantages(equal)
    assert theirs[:3].abs().max() > 0
    assert (advantages(summed(equal))[:3] == 0).all()


def test_normalize_advantages_of_rloo_is_over_rows_and_whiten_over_tokens():
    theirs = trl_advantages([ANSWER], "RLOO", beta=0.0, normalize_advantages=True)
    of_rows = advantages(torch.tensor(ANSWER), baseline="leave_one_out", scale="none")
    by_row = whiten(of_rows[:, None], torch.ones(6, 1, dtype=torch.bool))[:, 0]
    by_token = whiten(torch.where(MASK, of_rows[:, None], 0), MASK)[:, 0]
    assert torch.allclose(
        by_row, theirs, rtol=2e-4
    )  # eps 1e-8 on the variance; TRL's 1e-4 on the deviation
    assert (by_token - theirs).abs().max() > 0.05
