"""Advantages whose statistics outlive a batch, or belong to one action, by hand."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from tests.core.ranks import on_ranks
from tests.core.test_advantages import KINDS, assert_close
from torch import Tensor

from gruppo.core.advantages import PROMPT_HISTORY, Ema, group_advantages, step_advantages
from gruppo.core.returns import whiten

NAN = float("nan")


def advantages_of(rewards, groups, **choices) -> tuple[Tensor, dict[str, Any]]:
    """One a row, without eps; the state passes through JSON."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    choices = {"baseline": "mean", "scale": "running", "eps": 0.0, "decay": 0.5} | choices
    advantages, state = group_advantages(rewards, torch.tensor(groups), mask, **choices)
    return advantages[:, 0].double(), json.loads(json.dumps(state))


# --- the moving average ---------------------------------------------------------------------------


def test_a_moving_average_is_corrected_for_its_start_at_zero():
    """Decay 0.9 over 5 and 2: first 5 itself; then (0.9 * 0.1 * 5 + 0.1 * 2) / (1 - 0.81) = 0.65 /
    0.19."""
    one = Ema().update(5.0, 0.9)
    assert one.value == pytest.approx(5, rel=1e-12)
    assert one.update(2.0, 0.9).value == pytest.approx(0.65 / 0.19, rel=1e-12)
    assert Ema().value == 0 and Ema(*list(one)) == one


@pytest.mark.silent_bug(21)
def test_the_running_scale_of_the_first_batch_is_its_pooled_spread_within_groups():
    """1, 3 and 10, 30: (1 + 1 + 100 + 100) / (1 + 1) = 101, however far apart the groups are."""
    for decay in (0.0, 0.5, 0.99):
        advantages, _ = advantages_of([1, 3, 10, 30], [0, 0, 1, 1], decay=decay)
        assert_close(advantages, [x / 101**0.5 for x in (-1, 1, -10, 10)])


@pytest.mark.silent_bug(21)
def test_the_running_scale_of_the_second_batch_by_hand():
    """Variances 101 and then 2 at decay 0.5: (0.25 * 101 + 0.5 * 2) / 0.75 = 35."""
    _, state = advantages_of([1, 3, 10, 30], [0, 0, 1, 1])
    advantages, after = advantages_of([5, 7], [0, 0], state=state)
    assert_close(advantages, [-1 / 35**0.5, 1 / 35**0.5])
    assert after["within_var"] == pytest.approx([26.25, 0.75], rel=1e-12)


@pytest.mark.silent_bug(21)
def test_groups_of_three_and_of_one_are_pooled_by_their_degrees_of_freedom():
    """0, 3, 6 gives 18 with 2 degrees; 1, 3 gives 2 with 1; the lone 50 and the unscored give none:
    20 / 3."""
    advantages, _ = advantages_of([0, 3, 6, 1, 3, 50, NAN], [0, 0, 0, 1, 1, 2, 2])
    assert_close(advantages, [x / (20 / 3) ** 0.5 for x in (-3, 0, 3, -1, 1, 0, 0)])


@pytest.mark.silent_bug(20)
def test_a_group_without_spread_stays_silent_beside_a_running_scale_and_pulls_it_down():
    _, state = advantages_of([1, 3], [0, 0])  # variance 2
    advantages, after = advantages_of([0.35] * 4, [0] * 4, state=state)
    assert advantages.tolist() == [0] * 4
    assert Ema(*after["within_var"]).value == pytest.approx(0.25 * 2 / 0.75, rel=1e-12)


def test_the_running_baseline_by_hand():
    """Means 2 and then 7 at decay 0.5: (0.25 * 2 + 0.5 * 7) / 0.75 = 16 / 3; a row without a score
    counts nowhere."""
    choices = {"baseline": "running", "scale": "none"}
    advantages, state = advantages_of([1, 3], [0, 0], **choices)
    assert_close(advantages, [-1, 1])
    advantages, after = advantages_of([6, NAN, 8], [0, 0, 1], state=state, **choices)
    assert_close(advantages, [6 - 16 / 3, 0, 8 - 16 / 3])
    _, still = advantages_of([NAN, NAN], [0, 0], state=after, **choices)
    assert still == after


# --- the spread of one prompt over its draws ------------------------------------------------------


def test_the_prompt_scale_by_hand_over_three_calls():
    """Prompt p: 1, 3 (variance 2), then 5, 7 too: 1, 3, 5, 7 has variance 20 / 3. q has its own,
    from the second on."""
    choices = {"scale": "prompt"}
    first, state = advantages_of([1, 3], [0, 0], prompt_ids=["p"], **choices)
    assert_close(first, [-(0.5**0.5), 0.5**0.5])
    second, state = advantages_of(
        [0, 8, 5, 7], [0, 0, 1, 1], prompt_ids=["q", "p"], state=state, **choices
    )
    assert_close(second, [-4 / 32**0.5, 4 / 32**0.5, -1 / (20 / 3) ** 0.5, 1 / (20 / 3) ** 0.5])
    assert state == {"prompts": {"p": [1, 3, 5, 7], "q": [0, 8]}}
    third, state = advantages_of(
        [4, NAN], [0, 0], prompt_ids=["q"], baseline="none", state=state, **choices
    )
    assert_close(third, [4 / 16**0.5, 0])  # 0, 8, 4 has variance 16
    assert state["prompts"] == {"p": [1, 3, 5, 7], "q": [0, 8, 4]}


def test_the_prompt_baseline_by_hand_is_the_mean_of_its_last_rewards_and_with_the_scale_ddpos():
    first, state = advantages_of([1, 3], [0, 0], prompt_ids=["p"], baseline="prompt", scale="none")
    assert_close(first, [-1, 1])
    second, state = advantages_of(
        [5, 7, 4], [0, 0, 1], prompt_ids=["p", "q"], baseline="prompt", scale="none", state=state
    )
    assert_close(second, [1, 3, 0])  # 1, 3, 5, 7 have the mean 4; q has its own reward alone
    assert state == {"prompts": {"p": [1, 3, 5, 7], "q": [4]}}
    both, _ = advantages_of(
        [5, NAN], [0, 0], prompt_ids=["p"], baseline="prompt", scale="prompt", state=state
    )
    assert_close(both, [(5 - 4.2) / 5.2**0.5, 0])  # 1, 3, 5, 7, 5: mean 4.2, variance 5.2


def test_a_prompt_is_remembered_by_its_last_rewards_alone():
    many = torch.arange(PROMPT_HISTORY + 6.0)
    _, state = advantages_of(many.tolist(), [0] * len(many), prompt_ids=["p"], scale="prompt")
    assert state["prompts"]["p"] == many[6:].tolist()


@pytest.mark.silent_bug(20)
def test_a_prompt_with_one_reward_so_far_has_no_spread_and_is_silent():
    advantages, _ = advantages_of(
        [5, 1, 2], [0, 1, 1], prompt_ids=["p", "q"], scale="prompt", baseline="none"
    )
    assert advantages[0] == 0 and advantages[1:].all()


def test_the_prompt_scale_without_prompt_ids_is_refused():
    with pytest.raises(ValueError, match="need prompt_ids"):
        advantages_of([1, 2], [0, 0], scale="prompt")


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.silent_bug(33)
@pytest.mark.parametrize(("baseline", "scale"), KINDS)
def test_a_state_that_went_through_json_goes_on_to_the_bit(baseline, scale):
    rewards = torch.randn(3, 6, generator=torch.manual_seed(0)).double()
    groups, mask = torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6, 1, dtype=torch.bool)
    kept: dict[str, Any] = {}
    stored = "{}"
    for batch in rewards:
        choices = {"baseline": baseline, "scale": scale, "prompt_ids": ["p", "q", "r"]}
        direct, kept = group_advantages(batch, groups, mask, state=kept, **choices)
        loaded, state = group_advantages(batch, groups, mask, state=json.loads(stored), **choices)
        stored = json.dumps(state)
        assert torch.equal(direct, loaded) and state == kept


@pytest.mark.silent_bug(12)
@pytest.mark.parametrize(("baseline", "scale"), KINDS)
def test_two_ranks_of_unequal_size_have_the_advantages_and_the_state_of_one(baseline, scale):
    """Whole groups lie on one rank; two calls, so that what moved on is used."""
    rewards = torch.tensor(
        [[1.0, 0.5, 3.0, NAN, 7.0, 2.5], [0.0, 4.0, 3.5, 2.0, 1.0, 9.0]], dtype=torch.float64
    )
    groups, mask, names = (
        torch.tensor([0, 0, 1, 1, 1, 1]),
        torch.ones(6, 1, dtype=torch.bool),
        ["p", "q"],
    )
    choices: dict[str, Any] = {"baseline": baseline, "scale": scale, "decay": 0.5}

    def whole() -> tuple[Tensor, dict[str, Any]]:
        _, state = group_advantages(rewards[0], groups, mask, prompt_ids=names, **choices)
        return group_advantages(rewards[1], groups, mask, prompt_ids=names, state=state, **choices)

    def part(rows: slice, ids: list[str], all_sum, all_gather):
        mine = {"prompt_ids": ids, "all_sum": all_sum, "all_gather": all_gather, **choices}
        of_part = groups[rows] - groups[rows].min(), mask[rows]
        _, state = group_advantages(rewards[0, rows], *of_part, **mine)
        return group_advantages(rewards[1, rows], *of_part, state=state, **mine)

    together = on_ranks(
        lambda all_sum, all_gather: part(slice(0, 2), ["p"], all_sum, all_gather),
        lambda all_sum, all_gather: part(slice(2, 6), ["q"], all_sum, all_gather),
    )
    advantages, state = whole()
    torch.testing.assert_close(
        torch.cat([of_rank for of_rank, _ in together]), advantages, rtol=1e-6, atol=1e-7
    )
    assert together[0][1] == together[1][1]
    for name, value in state.items():
        assert together[0][1][name] == (
            value if name == "prompts" else pytest.approx(value, rel=1e-12)
        )


# --- a reward for each action ---------------------------------------------------------------------


def test_step_advantages_by_hand_compare_one_column_of_one_group():
    """Column 0: 1, 3, 8 with mean 4; column 1: 10 and 20, the third row having no such action."""
    rewards = torch.tensor([[1, 10], [3, 20], [8, NAN], [5, 0], [5, 4]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, True], [True, False], [True, True], [True, True]])
    groups = torch.tensor([0, 0, 0, 2, 2])[:, None] + torch.arange(2)
    rewards = rewards.where(mask, NAN)
    got, _ = step_advantages(rewards, groups, baseline="mean", scale="none")
    assert got.tolist() == [[-3, -5], [-1, 5], [4, 0], [0, -2], [0, 2]]
    scaled, _ = step_advantages(rewards, groups, baseline="mean", scale="group", eps=0.0)
    root = 0.5**0.5
    by_hand = [[-3 / 13**0.5, -root], [-1 / 13**0.5, root], [4 / 13**0.5, 0], [0, -root], [0, root]]
    torch.testing.assert_close(
        scaled.double(), torch.tensor(by_hand, dtype=torch.float64), rtol=1e-6, atol=0
    )


# --- not the same ---------------------------------------------------------------------------------


@pytest.mark.silent_bug(21)
@pytest.mark.silent_bug(31)
def test_the_batch_scale_is_not_whitening():
    """0, 0, 0, 1 and 1, 1, 1, 1. The batch scale divides 0.25 by the std of the raw rewards,
    sqrt(15 / 56); whitening by that of what is left after the groups' means, sqrt(0.75 / 7): -0.48
    against -0.76."""
    rewards, groups = [0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]
    by_scale, _ = advantages_of(rewards, groups, scale="batch")
    centred, _ = advantages_of(rewards, groups, scale="none")
    whitened = whiten(centred[:, None], torch.ones(8, 1, dtype=torch.bool), eps=0.0)[:, 0]
    assert_close(by_scale, [x / (15 / 56) ** 0.5 for x in (-0.25, -0.25, -0.25, 0.75, 0, 0, 0, 0)])
    assert_close(whitened, [x / (0.75 / 7) ** 0.5 for x in (-0.25, -0.25, -0.25, 0.75, 0, 0, 0, 0)])
    assert (round(by_scale[0].item(), 2), round(whitened[0].item(), 2)) == (-0.48, -0.76)


@pytest.mark.parametrize(
    ("scale", "stretch"), list(product(["running", "prompt", "batch", "group"], [0.25, 8.0]))
)
def test_rewards_in_another_unit_have_the_same_advantages_under_every_scale(scale, stretch):
    """Over two calls, so that what was remembered is in the unit too."""
    batches, groups = ([1.0, 4.0, 2.0, 2.5], [0.0, 3.0, 7.0, 1.0]), [0, 0, 1, 1]

    def second(unit: float) -> Tensor:
        state: dict[str, Any] = {}
        for batch in batches:
            rewards = [unit * r for r in batch]
            advantages, state = advantages_of(
                rewards, groups, scale=scale, prompt_ids=["p", "q"], state=state
            )
        return advantages

    torch.testing.assert_close(second(stretch), second(1.0), rtol=1e-6, atol=1e-9)
