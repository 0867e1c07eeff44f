"""TRL 1.16's own ``_compute_loss`` and gruppo's policy loss: one number, and one gradient of all
weights.

Both start from the same weights and token ids. Float32 is what TRL runs; in float64 nothing is left
but the formula.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fakes import doubled, of
from tests.parity.batch import (
    ADVANTAGES,
    ENDED,
    LOG_RATIOS,
    MASK,
    PIECE,
    ROW_LOG_RATIOS,
    WEIGHTS,
    Case,
    Result,
    gruppo_loss,
    rollouts,
)
from tests.parity.trl_side import rloo_loss, trl_loss

from gruppo.core.objective import CISPO, DAPO, DR_GRPO, GRPO, GSPO, RLOO, SAPO, Objective

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WITHIN = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Of the loss, absolute; of the gradient, relative norm."""
DTYPES = pytest.mark.parametrize("dtype", WITHIN, ids=["float32", "float64"])
EXACT = torch.float64
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
BNPO = replace(GRPO, average="token")
LUSPO = replace(GSPO, average="sequence_sum")
VESPO = replace(GRPO, surrogate="vespo", average="token")

LOSSES: list[tuple[str, dict[str, Any], Objective]] = [
    ("grpo", {}, GRPO),
    ("bnpo", {}, BNPO),
    ("dr_grpo", {}, DR_GRPO),
    ("dapo", {"epsilon_high": 0.28}, DAPO),
    ("cispo", {"epsilon_high": 5.0}, CISPO),
    ("sapo", {}, SAPO),
    ("luspo", SEQUENCE, LUSPO),
    ("vespo", {}, VESPO),
]
OPTIONS: dict[str, tuple[str, dict[str, Any], Objective]] = {
    "gspo": ("grpo", SEQUENCE, GSPO),
    "epsilons": (
        "grpo",
        {"epsilon": 0.1, "epsilon_high": 0.4},
        replace(GRPO, clip_low=0.1, clip_high=0.4),
    ),
    "delta": ("grpo", {"delta": 1.3}, replace(GRPO, dual_clip=1.3)),
    "delta_dapo": ("dapo", {"delta": 1.5, "epsilon_high": 0.28}, replace(DAPO, dual_clip=1.5)),
    "cispo_cap": ("cispo", {"epsilon_high": 1.1}, replace(CISPO, clip_high=0.1)),
    "sapo_of_sequences": (
        "sapo",
        {"importance_sampling_level": "sequence"},
        replace(SAPO, ratio="sequence"),
    ),
}


def assert_equal(ours: Result, theirs: Result, dtype: torch.dtype) -> None:
    loss, gradient = ours.distance(theirs)
    assert loss <= WITHIN[dtype]
    assert gradient <= WITHIN[dtype]


def test_the_batch_has_ratios_inside_and_outside_the_clip_range_under_both_signs():
    of_rows = (ROW_LOG_RATIOS, ADVANTAGES)
    of_tokens = (LOG_RATIOS[MASK], ADVANTAGES[:, None].expand_as(MASK)[MASK])
    for log_ratios, advantages in (of_rows, of_tokens):
        ratio = log_ratios.exp()
        for side in (ratio > 1.3, ratio < 0.7, (ratio > 0.9) & (ratio < 1.1)):
            for sign in (advantages > 0, advantages < 0):
                assert (side & sign).any()


@DTYPES
@pytest.mark.parametrize(
    ("name", "config", "objective"), LOSSES, ids=[name for name, _, _ in LOSSES]
)
def test_each_loss_type_of_trl_has_our_loss_and_gradient(
    name: str, config: dict[str, Any], objective: Objective, dtype: torch.dtype
):
    theirs = trl_loss(Case(), dtype=dtype, loss_type=name, **config)
    assert_equal(gruppo_loss(objective, Case(), dtype=dtype), theirs, dtype)


@DTYPES
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_of_the_surrogate_has_our_loss_and_gradient(option: str, dtype: torch.dtype):
    name, config, objective = OPTIONS[option]
    theirs = trl_loss(Case(), dtype=dtype, loss_type=name, **config)
    assert_equal(gruppo_loss(objective, Case(), dtype=dtype), theirs, dtype)


@pytest.mark.parametrize(
    "case",
    [Case(between_turns=True), Case(temperature=0.5)],
    ids=["tokens_of_a_tool", "temperature"],
)
@pytest.mark.parametrize(
    ("name", "config", "objective"),
    [("grpo", {}, GRPO), ("dapo", {"epsilon_high": 0.28}, DAPO), ("grpo", SEQUENCE, GSPO)],
    ids=["grpo", "dapo", "gspo"],
)
def test_tokens_of_a_tool_and_the_temperature_count_as_in_trl(
    name: str, config: dict[str, Any], objective: Objective, case: Case
):
    theirs = trl_loss(case, dtype=EXACT, loss_type=name, temperature=case.temperature, **config)
    assert_equal(gruppo_loss(objective, case, dtype=EXACT), theirs, EXACT)


# --- KL and entropy -------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(("is_corrected", "kl_gradient"), [(True, "unbiased"), (False, "naive")])
@pytest.mark.parametrize(
    ("name", "config", "objective"),
    [
        ("grpo", {}, GRPO),
        ("dapo", {"epsilon_high": 0.28}, DAPO),
        ("cispo", {"epsilon_high": 5.0}, CISPO),
    ],
    ids=["grpo", "dapo", "cispo"],
)
def test_beta_is_kl_coef_and_use_bias_correction_kl_the_unbiased_gradient(
    name: str,
    config: dict[str, Any],
    objective: Objective,
    is_corrected: bool,
    kl_gradient: Any,
    dtype: torch.dtype,
):
    config = config | {"beta": 0.1, "use_bias_correction_kl": is_corrected}
    theirs = trl_loss(Case(), dtype=dtype, loss_type=name, **config)
    ours = gruppo_loss(
        replace(objective, kl_gradient=kl_gradient), Case(), dtype=dtype, kl_coef=0.1
    )
    assert_equal(ours, theirs, dtype)


def test_under_sequence_ratios_trl_weighs_the_kl_by_the_row_and_we_by_the_token():
    config = SEQUENCE | {"beta": 0.1, "loss_type": "grpo"}
    naive = gruppo_loss(replace(GSPO, kl_gradient="naive"), Case(), dtype=EXACT, kl_coef=0.1)
    assert_equal(
        naive, trl_loss(Case(), dtype=EXACT, use_bias_correction_kl=False, **config), EXACT
    )
    corrected = gruppo_loss(GSPO, Case(), dtype=EXACT, kl_coef=0.1)
    assert corrected.distance(trl_loss(Case(), dtype=EXACT, **config))[1] > 1e-3


@DTYPES
def test_the_entropy_bonus_is_trls_under_the_token_average(dtype: torch.dtype):
    theirs = trl_loss(Case(), dtype=dtype, loss_type="dapo", epsilon_high=0.28, entropy_coef=0.05)
    assert_equal(gruppo_loss(DAPO, Case(), dtype=dtype, entropy_coef=0.05), theirs, dtype)


def test_under_other_averages_trl_takes_the_entropy_over_tokens_and_we_the_objectives_average():
    theirs = trl_loss(Case(), dtype=EXACT, loss_type="grpo", entropy_coef=0.05)
    assert gruppo_loss(GRPO, Case(), dtype=EXACT, entropy_coef=0.05).distance(theirs)[1] > 1e-4


# --- rows left out, and rows of an engine ---------------------------------------------------------


def test_mask_truncated_is_trls_under_the_token_average():
    theirs = trl_loss(
        Case(), dtype=EXACT, loss_type="dapo", epsilon_high=0.28, mask_truncated_completions=True
    )
    assert_equal(
        gruppo_loss(replace(DAPO, mask_truncated=True), Case(), dtype=EXACT), theirs, EXACT
    )


@pytest.mark.parametrize(("name", "objective"), [("grpo", GRPO), ("dr_grpo", DR_GRPO)])
def test_under_row_averages_trl_counts_masked_rows_in_the_denominator_and_we_do_not(
    name: str, objective: Objective
):
    theirs = trl_loss(Case(), dtype=EXACT, loss_type=name, mask_truncated_completions=True)
    ours = gruppo_loss(replace(objective, mask_truncated=True), Case(), dtype=EXACT)
    kept = float(ENDED.double().mean())
    scaled = Result(
        kept * ours.loss, {name: kept * gradient for name, gradient in ours.gradient.items()}
    )
    assert kept < 1
    assert_equal(scaled, theirs, EXACT)


@DTYPES
@pytest.mark.parametrize("low", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction_of_an_engines_log_probs_is_trls(
    level: Any, mode: Any, low: float, dtype: torch.dtype
):
    config = {
        "vllm_importance_sampling_mode": f"{level}_{mode}",
        "vllm_importance_sampling_clip_min": low or None,
        "vllm_importance_sampling_clip_max": 1.5,
    }
    corrected = replace(
        GRPO, correction=mode, correction_level=level, correction_low=low, correction_high=1.5
    )
    theirs = trl_loss(Case(), dtype=dtype, engine=True, loss_type="grpo", **config)
    assert_equal(gruppo_loss(corrected, Case(), dtype=dtype), theirs, dtype)


def test_vespo_takes_the_correction_into_its_weight_in_trl_and_beside_it_here():
    config = {"vllm_importance_sampling_mode": "token_truncate", "loss_type": "vespo"}
    corrected = gruppo_loss(replace(VESPO, correction="truncate"), Case(), dtype=EXACT)
    assert corrected.distance(trl_loss(Case(), dtype=EXACT, engine=True, **config))[1] > 1e-3


# --- micro-batches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "objective"), LOSSES, ids=[name for name, _, _ in LOSSES]
)
def test_over_two_micro_batches_every_loss_type_but_bnpo_stays_what_it_was(
    name: str, config: dict[str, Any], objective: Objective
):
    theirs = trl_loss(Case(), dtype=EXACT, loss_type=name, micro_batches=2, **config)
    ours = gruppo_loss(objective, Case(), dtype=EXACT)
    if name == "bnpo":
        assert ours.distance(theirs)[1] > 0.05
    else:
        assert_equal(ours, theirs, EXACT)


def test_the_entropy_bonus_of_trl_is_a_mean_of_micro_batch_means():
    """Of two micro-batches with unequal token counts; here all tokens of the update count alike."""
    without, bonus = (
        trl_loss(Case(), dtype=EXACT, loss_type="dapo", micro_batches=2, entropy_coef=coef).loss
        for coef in (0.0, 0.5)
    )
    policy, mask = doubled(of("Llama", **WEIGHTS)), Case().mask
    entropy = policy.likelihood(rollouts(1.0, mask), PIECE, outputs=("entropy",)).entropy.detach()
    halves = [entropy[rows][mask[rows]].mean() for rows in torch.arange(len(mask)).chunk(2)]
    assert without - bonus == pytest.approx(0.5 * float(sum(halves)) / 2, abs=1e-10)
    assert abs(float(sum(halves)) / 2 - float(entropy[mask].mean())) > 1e-4


# --- known differences ----------------------------------------------------------------------------


def test_trls_cispo_left_at_its_default_caps_the_ratio_at_a_fifth():
    """``epsilon_high`` bounds the ratio itself there: 0.2, so that a ratio of 1 learns with a fifth
    of its gradient."""
    on_policy = Case(log_ratios=torch.zeros_like(LOG_RATIOS))
    theirs = trl_loss(on_policy, dtype=EXACT, loss_type="cispo")
    ours = gruppo_loss(CISPO, on_policy, dtype=EXACT)
    fifth = Result(
        0.2 * ours.loss, {name: 0.2 * gradient for name, gradient in ours.gradient.items()}
    )
    loss, gradient = fifth.distance(theirs)
    assert loss <= WITHIN[EXACT]
    assert gradient <= 1e-10  # measured: 1.3e-11 on Zen 4, below 1e-12 on Zen 5


@DTYPES
def test_rloo_has_trls_gradient_on_policy_where_trl_clips_a_ratio_of_one(dtype: torch.dtype):
    theirs = rloo_loss(Case(), dtype)
    assert gruppo_loss(RLOO, Case(), dtype=dtype).distance(theirs)[1] <= WITHIN[dtype]
    assert theirs.loss == pytest.approx(
        -float(ADVANTAGES.mean()), abs=1e-6
    )  # -ratio A, not -A logprob
