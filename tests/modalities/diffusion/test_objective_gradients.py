"""One update has one gradient, however it is computed: every preset over denoisers, by the
trainer's own code.

As in ``tests/modalities/test_objective_gradients.py``; here a batch is cut into columns too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.fakes_diffusion import FAKES, Fake, ancestral, cps, doubled, flow_sde, sampled
from tests.modalities import variants
from tests.modalities.updates import (
    Case,
    Variant,
    batch_of,
    changed,
    distance,
    disturb,
    farthest,
    learned,
    whole_update,
)
from torch import Tensor

from gruppo.config.schema import Stage
from gruppo.core.objective import GRPO, PRESETS
from gruppo.modalities.common.critic import SharedCritic
from gruppo.modalities.common.reference import ReferenceModel
from gruppo.types import GruppoError, TrainBatch

LIMIT = 1e-10
POLICY_ALONE = Stage(kl_coef=0.0, entropy_coef=0.0)


@cache
def case_of(make) -> Case:
    """Nine rows of three groups in float64; ratios off 1, some beyond every clip; one row
    unscored."""
    fake: Fake = doubled(make())
    rollouts = sampled(fake)
    reference, critic = ReferenceModel(fake.policy), SharedCritic(fake.policy)
    disturb(reference.module, 0.01)
    disturb(critic.module, 0.3)
    return Case(
        fake.policy, reference, critic, batch_of(fake.policy, reference, rollouts, torch.float64)
    )


# Presets differ in weights and surrogates, denoisers in steps, masks and guidance: each with one of
# the other kind.
PAIRS = [(PRESETS[name], FAKES[n % len(FAKES)]) for n, name in enumerate(PRESETS)]


@pytest.fixture(
    params=PAIRS,
    ids=[f"{name}-{make.__name__}" for name, (_, make) in zip(PRESETS, PAIRS, strict=True)],
)
def pair(request):
    return request.param


@pytest.fixture
def case(pair):
    return case_of(pair[1])


@pytest.fixture
def objective(pair):
    return pair[0]


def cuts(case: Case, budget: int) -> list[int]:
    return [
        len(micro_batch.rows)
        for micro_batch in case.policy.micro_batches(
            case.batch.rollouts, case.batch.loss_mask, budget
        )
    ]


def cost(case: Case) -> int:
    """Evaluations of the most expensive row."""
    guided = case.batch.rollouts.per_row["sampling"][0, -1] != 1
    return int(case.batch.rollouts.mask.sum(dim=1).max()) * (2 if guided else 1)


def micro_batches(case: Case, objective) -> Iterator[Variant]:
    """Rows and, where the objective does not need them whole, columns."""
    row = cost(case)
    budgets = (
        [row, 2 * row + 1, 4 * row] if objective.needs_whole_rows else [1, 3, row, 2 * row + 1]
    )
    stored, fresh = case.batch, replace(case.batch, ref=None)
    return (Variant(batch, case.policy, budget) for budget in budgets for batch in (stored, fresh))


def unchanged(case, objective, varied):
    assert farthest(case, objective, varied) <= LIMIT


@pytest.mark.silent_bug(3)
@pytest.mark.silent_bug(11)
@pytest.mark.silent_bug(36)
def test_neither_rows_nor_columns_of_a_micro_batch_change_the_gradient(case, objective):
    assert len(cuts(case, cost(case))) >= 4 and len(cuts(case, 10**9)) == 1
    unchanged(case, objective, micro_batches(case, objective))


def test_columns_are_really_cut():
    case = case_of(ancestral)
    assert len(cuts(case, 1)) == int(case.batch.loss_mask.sum()) == 32


def test_a_sequence_s_ratio_is_refused_where_columns_are_cut():
    case = case_of(ancestral)
    with pytest.raises(GruppoError, match=r"this policy cuts rows into columns.*needs? whole rows"):
        learned(case, PRESETS["gspo"], Variant(case.batch, case.policy, 3))


@pytest.mark.silent_bug(4)
def test_more_columns_change_no_gradient(case, objective):
    wide = widened(case.batch, 3)
    variants_ = (
        Variant(wide, case.policy, 2 * cost(case)),
        Variant(wide, variants.undivided(case.policy)),
    )
    unchanged(case, objective, variants_)


@pytest.mark.silent_bug(5)
def test_what_stands_in_masked_slots_changes_no_gradient(case, objective):
    """Numbers of actions that are not learned from are 1e6 and NaN; so are states that no kept step
    touches."""
    filled = variants.spoiled(case.batch)
    unchanged(
        case,
        objective,
        (Variant(filled, case.policy, 60), Variant(filled, variants.undivided(case.policy))),
    )
    rollouts = filled.rollouts
    mask = rollouts.mask
    touched = mask | torch.cat(
        [mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1
    )  # reached, or stepped from
    states = torch.where(touched[..., None, None, None], rollouts.actions, torch.nan)
    junk = replace(filled, rollouts=replace(rollouts, actions=states))
    unchanged(case, objective, [Variant(junk, case.policy, 60)])


@pytest.mark.silent_bug(11)
@pytest.mark.silent_bug(13)
def test_rows_that_are_not_learned_from_change_no_gradient(case, objective):
    both = case.batch.take(torch.cat([torch.arange(9), torch.arange(4)]))
    loss_mask = both.loss_mask.clone()
    loss_mask[9:] = False
    company = variants.spoiled(replace(both, loss_mask=loss_mask))
    unchanged(
        case,
        objective,
        (Variant(company, case.policy, 60), Variant(company, variants.undivided(case.policy))),
    )


@pytest.mark.silent_bug(2)
def test_on_the_policy_s_own_samples_every_surrogate_has_the_gradient_of_reinforce(case, objective):
    advantages = torch.linspace(-1, 1.1, 9, dtype=torch.float64)[:, None].expand_as(
        case.batch.advantages
    )
    batch = replace(case.batch, advantages=advantages, old_logprobs=None, returns=None)
    plainly = replace(objective, surrogate="reinforce", ratio="token", dual_clip=0.0)
    got, stats = learned(case, objective, Variant(batch, case.policy), POLICY_ALONE)
    assert stats["ratio"].min == stats["ratio"].max == 1
    by_hand = learned(case, plainly, Variant(batch, case.policy), POLICY_ALONE)[0]
    assert distance(got, by_hand) <= LIMIT


@pytest.mark.silent_bug(37)
def test_a_mean_over_dimensions_divides_the_log_ratio_by_them():
    case = case_of(flow_sde)
    dims = replace(GRPO, dims="mean", surrogate="cispo", clip_low=1.0, clip_high=1e9)
    _, stats = learned(case, dims, whole_update(case))
    log_ratio = (learned_logprobs(case) - case.batch.old_logprobs)[case.batch.loss_mask]
    assert stats["ratio"].max == pytest.approx(float((log_ratio / 32).exp().max()), rel=1e-9)
    unchanged(case, dims, micro_batches(case, dims))


@torch.no_grad()
def learned_logprobs(case: Case) -> Tensor:
    micro_batch = case.policy.micro_batches(case.batch.rollouts, case.batch.rollouts.mask, 10**9)[0]
    logprobs = case.policy.likelihood(case.batch.rollouts, micro_batch).logprobs
    missing = case.batch.loss_mask.shape[1] - logprobs.shape[1]
    return torch.nn.functional.pad(logprobs, (0, missing))


def test_the_batch_reaches_both_sides_of_the_clip():
    for make in (ancestral, cps):
        case = case_of(make)
        _, stats = learned(case, GRPO, whole_update(case))
        assert 0 < stats["clip/high_frac"].mean < 1 and 0 < stats["clip/low_frac"].mean < 1


# --- batches made of batches ----------------------------------------------------------------------


def widened(batch: TrainBatch, more: int) -> TrainBatch:
    """With so many columns more."""

    def wider(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(x.shape[0], more, *x.shape[2:])], dim=1)

    names = ("actions", "mask", "policy_version")
    rollouts = replace(
        batch.rollouts, **{name: wider(getattr(batch.rollouts, name)) for name in names}
    )
    return changed(batch, wider, rollouts=rollouts, loss_mask=wider(batch.loss_mask))
