"""One update has one gradient, however it is computed: every preset, over every policy, by the
trainer's own code.

Every preset meets the policy in ``FULLY``. A preset sees nothing of a policy but log-probs, entropy
and values: a packing policy meets three (per token, per sequence, with a critic), the others the
one that reads all of them. A new preset joins by itself, a new policy by its name in
``tests.fakes.POLICIES``. Distances are ||dg|| / ||g|| over all parameters; the batch is made in
``updates.py``, and ``python -m tests.modalities.measure_gradients`` prints the largest distances
over everything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from tests.fakes import HUGGING_FACE, POLICIES, llama, plain
from tests.modalities import updates, variants
from tests.modalities.updates import Variant, case_of, distance, farthest, learned, whole_update

from gruppo.config.schema import Stage
from gruppo.core.objective import GRPO, PRESETS, Objective
from gruppo.core.surrogates import SURROGATES
from gruppo.modalities.text.critic import SeparateCritic

LIMITS = {torch.float64: 1e-10, torch.float32: 5e-6}
FULLY = [(plain, torch.float64)]
PACKED = [(llama, torch.float64)]
OTHERS = [(plain, torch.float32), (llama, torch.float32)]
OTHERS += [(make, torch.float64) for make in POLICIES if make not in (plain, llama)]
SETUPS = FULLY + PACKED + OTHERS
ON_POLICY = {**PRESETS, "vespo": replace(GRPO, surrogate="vespo")}
FEW, ONE = ("grpo", "gspo", "ppo"), ("ppo",)
POLICY_ALONE = Stage(kl_coef=0.0, entropy_coef=0.0)


def name_of(setup):
    return f"{setup[0].__name__}-{str(setup[1])[-7:]}"


def each_with(setups, presets=PRESETS):
    """All presets for the setups of FULLY, a few for those of PACKED, one for the others."""
    names = {
        setup: presets if setup in FULLY else FEW if setup in PACKED else ONE for setup in setups
    }
    pairs = [(setup, name) for setup in setups for name in names[setup]]
    params = [
        pytest.param(setup, presets[name], id=f"{name_of(setup)}-{name}") for setup, name in pairs
    ]
    return pytest.mark.parametrize(("case", "objective"), params, indirect=["case"])


every = each_with(SETUPS)


@pytest.fixture
def case(request):
    return case_of(*request.param)


def unchanged(case, objective, varied):
    limit = LIMITS[case.batch.advantages.dtype]
    assert farthest(case, objective, varied(case)) <= limit


# --- every preset, every policy -------------------------------------------------------------------


@pytest.mark.silent_bug(3)
@pytest.mark.silent_bug(4)
@pytest.mark.silent_bug(11)
@each_with([*PACKED, (llama, torch.float32), (plain, torch.float32)])
def test_no_way_of_cutting_the_batch_into_micro_batches_changes_the_gradient(case, objective):
    cuts = [
        len(case.policy.micro_batches(case.batch.rollouts, case.batch.loss_mask, n))
        for n in variants.budgets(case)
    ]
    assert (cuts[0], cuts[-1]) == (8, 1) and len(cuts) >= 9
    unchanged(case, objective, variants.micro_batches)


@pytest.mark.silent_bug(24)
@every
def test_the_order_of_rows_changes_no_gradient(case, objective):
    unchanged(case, objective, variants.row_order)


@pytest.mark.silent_bug(4)
@each_with([s for s in SETUPS if s[0] in HUGGING_FACE])
def test_left_padding_and_unpacking_change_no_gradient(case, objective):
    unchanged(case, objective, variants.layout)


@pytest.mark.silent_bug(5)
@every
def test_what_stands_in_masked_slots_changes_no_gradient(case, objective):
    unchanged(case, objective, variants.masked_slots)


@pytest.mark.silent_bug(11)
@pytest.mark.silent_bug(13)
@every
def test_rows_that_are_not_learned_from_change_no_gradient(case, objective):
    unchanged(case, objective, variants.masked_rows)


@pytest.mark.silent_bug(3)
@every
def test_the_chunk_of_the_head_changes_no_gradient(case, objective):
    unchanged(case, objective, variants.head_chunks)


@pytest.mark.silent_bug(13)
@every
def test_a_minibatch_of_one_row_equals_the_batch_of_which_one_row_is_kept(case, objective):
    for row in (0, 3, 8):
        loss_mask = case.batch.loss_mask & (torch.arange(9) == row)[:, None]
        one = learned(case, objective, Variant(case.batch.take(torch.tensor([row])), case.policy))[
            0
        ]
        among = learned(
            case, objective, Variant(replace(case.batch, loss_mask=loss_mask), case.policy)
        )[0]
        assert distance(one, among) <= LIMITS[case.batch.advantages.dtype]


# --- what the numbers must be ---------------------------------------------------------------------


@pytest.mark.silent_bug(2)
@each_with(SETUPS, ON_POLICY)
def test_on_the_policy_s_own_samples_every_surrogate_has_the_gradient_of_reinforce(case, objective):
    """One advantage a row; the ratios are 1 within the piece, so nothing is clipped or weighed."""
    advantages = case.batch.advantages[:, :1].expand_as(case.batch.advantages)
    batch = replace(case.batch, advantages=advantages, old_logprobs=None, returns=None)
    plainly = replace(objective, surrogate="reinforce", ratio="token", dual_clip=0.0)
    got, stats = learned(case, objective, Variant(batch, case.policy), POLICY_ALONE)
    assert stats["ratio"].min == stats["ratio"].max == 1
    assert stats["clip/high_frac"].sum == stats["clip/low_frac"].sum == 0
    by_hand = learned(case, plainly, Variant(batch, case.policy), POLICY_ALONE)[0]
    assert distance(got, by_hand) <= LIMITS[case.batch.advantages.dtype]


@pytest.mark.silent_bug(27)
@pytest.mark.parametrize("objective", [PRESETS[name] for name in FEW], ids=FEW)
def test_dropout_left_on_by_the_user_changes_no_gradient(objective):
    case = case_of(with_dropout)
    case.policy.module.eval()
    quiet = learned(case, objective, whole_update(case))[0]
    case.policy.module.train()
    assert torch.equal(learned(case, objective, whole_update(case))[0], quiet)


def with_dropout():
    return plain(dropout=0.5)


# --- every choice, beside the presets -------------------------------------------------------------

CHANGES = [
    {"dual_clip": 1.5},
    {"clip_unit": "nats", "clip_low": 1.5, "clip_high": 0.1},
    {"ratio": "sequence", "credit": "return_to_go"},
    {"ratio": "sequence", "surrogate": "cispo"},
    {"ratio": "sequence", "average": "sequence_sum"},
    {"correction": "truncate", "correction_low": 0.5, "correction_high": 1.2},
    {"correction": "truncate", "correction_level": "sequence"},
    {"correction": "mask", "correction_low": 0.5, "correction_high": 1.5},
    {"correction": "mask", "correction_level": "sequence", "correction_high": 1.0},
    {
        "kl": "k1",
        "kl_in": "reward",
        "baseline": "critic",
        "credit": "return_to_go",
        "scale": "none",
        "value_clip": 0.0,
    },
]
LOSS_FIELDS = ("surrogate", "average", "kl", "kl_gradient", "clip_unit", "dims", "correction")


def choices():
    """GRPO with each other choice of the fields that a loss reads, and the changes above."""
    hints = get_type_hints(Objective)
    single = [
        {field: choice}
        for field in LOSS_FIELDS
        for choice in get_args(hints[field]) or SURROGATES
        if choice != "exact"
    ]
    return {str(change): replace(GRPO, **change) for change in [*single, *CHANGES]}


def advantages():
    """Every preset, and GRPO with each other baseline and scale."""
    hints = get_type_hints(Objective)
    single = [
        {field: choice} for field in ("baseline", "scale") for choice in get_args(hints[field])
    ]
    return PRESETS | {
        str(change): replace(GRPO, **change) for change in single if "critic" not in change.values()
    }


@pytest.mark.silent_bug(11)
@pytest.mark.silent_bug(13)
@pytest.mark.parametrize("objective", choices().values(), ids=list(choices()))
@pytest.mark.parametrize("case", [(plain, torch.float64)], ids=name_of, indirect=True)
def test_no_other_choice_changes_a_gradient_either(case, objective):
    for varied in (variants.a_few_micro_batches, variants.masked_slots, variants.masked_rows):
        unchanged(case, objective, varied)


def test_the_batch_reaches_both_sides_of_every_bound():
    """Some ratios, weights and values are beyond each bound and some within: else these tests would
    prove little."""
    case = case_of(plain)
    _, stats = learned(case, GRPO, whole_update(case))
    assert 0 < stats["clip/high_frac"].mean < 1 and 0 < stats["clip/low_frac"].mean < 1
    capped = replace(PRESETS["ppo"], correction="truncate", correction_low=0.5, correction_high=1.2)
    _, stats = learned(case, capped, whole_update(case))
    assert (stats["correction/weight"].min, stats["correction/weight"].max) == (0.5, 1.2)
    assert 0 < stats["value/clip_frac"].mean < 1


@pytest.mark.silent_bug(11)
@pytest.mark.silent_bug(24)
@each_with([(plain, torch.float64), (llama, torch.float64)], advantages())
def test_from_rewards_to_gradient_nothing_hangs_on_order_columns_or_company(case, objective):
    """As above, with advantages made of the rewards anew for each variant; of a cut, they know
    nothing."""
    expected = learned(case, objective, updates.rewarded(case, objective, whole_update(case)))[0]
    for varied in (variants.row_order, variants.columns, variants.masked_rows):
        for variant in varied(case):
            got = learned(case, objective, updates.rewarded(case, objective, variant))[0]
            assert distance(got, expected) <= 1e-10


@pytest.mark.silent_bug(13)
def test_a_row_that_a_correction_drops_stays_in_the_denominator():
    """Two roads: the sampler disagrees beyond the bound about row 4; or row 4 has advantages of 0,
    uncorrected."""
    case = case_of(plain)
    row = (torch.arange(9) == 4)[:, None]
    old = case.batch.old_logprobs
    disagreeing = replace(case.batch.rollouts, sampler_logprobs=torch.where(row, old - 2, old))
    masked = replace(GRPO, correction="mask", correction_high=3.0)
    dropped = Variant(replace(case.batch, rollouts=disagreeing), case.policy)
    idle = Variant(
        replace(case.batch, advantages=torch.where(row, 0, case.batch.advantages)), case.policy
    )
    got, expected = (
        learned(case, o, v, POLICY_ALONE)[0] for o, v in ((masked, dropped), (GRPO, idle))
    )
    assert distance(got, expected) <= 1e-10


@pytest.mark.parametrize(
    "case", [(plain, torch.float64), (llama, torch.float64)], ids=name_of, indirect=True
)
def test_a_critic_with_a_network_of_its_own_has_one_gradient_too(case):
    critic = SeparateCritic(case.policy)
    updates.disturb(critic.module, 0.03)
    case = replace(case, critic=critic)
    for varied in (
        variants.a_few_micro_batches,
        variants.row_order,
        variants.columns,
        variants.masked_slots,
        variants.masked_rows,
    ):
        unchanged(case, PRESETS["ppo"], varied)


@pytest.mark.silent_bug(5)
def test_statistics_depend_neither_on_the_cut_nor_on_masked_slots():
    case = case_of(plain)
    objective = replace(PRESETS["ppo"], correction="truncate")
    _, whole = learned(case, objective, whole_update(case))
    for variant in (*variants.micro_batches(case), *variants.masked_slots(case)):
        _, stats = learned(case, objective, variant)
        assert stats.keys() == whole.keys()
        for name in whole.keys() - {"update/micro_batches_count"}:
            assert stats[name].sum == pytest.approx(whole[name].sum, rel=1e-9, abs=1e-12)
