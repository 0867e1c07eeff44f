"""Several rewards: the weighted sum, what a missing part does to it, and the statistics, all by
hand."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from tests.rewards.fakes import rollouts_of

from gruppo.rewards import FunctionReward, RewardSet, Scores, reward_stats
from gruppo.types import DataError, GruppoError

NAN = math.nan


def fixed(values, name):
    """A reward that gives each completion the value under its text."""
    return FunctionReward(lambda completions: [values[text] for text in completions], name=name)


def same(got, expected):
    return torch.equal(
        got.isnan(), torch.tensor(expected).isnan()
    ) and got.nan_to_num().tolist() == pytest.approx(
        torch.tensor(expected).nan_to_num().tolist(), rel=1e-6
    )


class Model:
    """A reward model: an object with the protocol."""

    name = "model"

    def __init__(self, score):
        self.score_of = score

    def __call__(self, rollouts):
        return self.score_of(rollouts)


def test_the_sum_is_weighted():
    rewards = [fixed({"a": 1.0, "b": 2.0}, "f"), fixed({"a": 10.0, "b": -4.0}, "g")]
    scores = RewardSet(rewards, weights=[2.0, 0.5]).score(rollouts_of("ab"))
    assert scores.rewards.tolist() == [7.0, 2.0] and scores.rewards.dtype == torch.float32
    assert scores.parts["f"].tolist() == [1.0, 2.0] and scores.parts["g"].tolist() == [10.0, -4.0]


def test_plain_functions_and_reward_objects_mix_and_one_function_needs_no_list():
    model = Model(lambda rollouts: torch.tensor([0.5, NAN]))
    scores = RewardSet([lambda completions: [1, 1], model]).score(rollouts_of("ab"))
    assert same(scores.rewards, [1.5, NAN]) and scores.failures == ()
    assert RewardSet(lambda completions: [1, 3]).score(rollouts_of("ab")).rewards.tolist() == [1, 3]


@pytest.mark.silent_bug(22)
def test_a_part_that_only_some_rows_of_a_group_lack_makes_those_rows_unscored_and_not_zero():
    rewards = [
        fixed({"a": 1.0, "b": 2.0, "c": 3.0}, "f"),
        fixed({"a": 5.0, "b": None, "c": 5.0}, "g"),
    ]
    assert same(RewardSet(rewards).score(rollouts_of("abc")).rewards, [6.0, NAN, 8.0])


@pytest.mark.silent_bug(22)
def test_a_reward_that_returns_none_for_a_whole_group_does_not_apply_to_it():
    rollouts = rollouts_of("abcd", group_ids=[0, 1, 0, 1], targets=["x", "y"])
    maths = fixed({"a": 1.0, "b": None, "c": 2.0, "d": None}, "maths")
    code = fixed({"a": None, "b": 3.0, "c": None, "d": 4.0}, "code")
    assert RewardSet([maths, code], weights=[1.0, 10.0]).score(rollouts).rewards.tolist() == [
        1.0,
        30.0,
        2.0,
        40.0,
    ]


@pytest.mark.silent_bug(22)
def test_in_an_evaluation_a_row_that_lacks_a_part_is_unscored_although_its_group_is_one_row():
    rewards = RewardSet(
        [fixed({"a": 1.0, "b": 2.0, "c": None}, "f"), fixed({"a": 5.0, "b": None, "c": None}, "g")]
    )
    rollouts = rollouts_of("abc", group_ids=[0, 1, 2], targets=["x", "y", "z"])
    assert same(rewards.score(rollouts).rewards, [6.0, 2.0, NAN])
    assert same(rewards.score(rollouts, is_evaluation=True).rewards, [6.0, NAN, NAN])


@pytest.mark.silent_bug(22)
def test_in_an_evaluation_rewards_that_never_score_the_same_row_are_for_different_prompts():
    """b lacks only code, which never goes with maths; d lacks maths and code, which both go with
    form."""
    maths = fixed({"a": 1.0, "b": 2.0, "c": None, "d": None}, "maths")
    code = fixed({"a": None, "b": None, "c": 3.0, "d": None}, "code")
    form = fixed({"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5}, "form")
    rollouts = rollouts_of("abcd", group_ids=[0, 1, 2, 3], targets="wxyz")
    assert same(
        RewardSet([maths, code]).score(rollouts, is_evaluation=True).rewards, [1.0, 2.0, 3.0, NAN]
    )
    assert same(
        RewardSet([maths, code, form]).score(rollouts, is_evaluation=True).rewards,
        [1.5, 2.5, 3.5, NAN],
    )


@pytest.mark.silent_bug(22)
def test_a_part_that_failed_makes_the_row_unscored_even_if_no_row_of_the_group_has_it():
    def raises_on_a(completions):
        if "a" in completions:
            raise ValueError("a")
        return [None] * len(completions)

    scores = RewardSet([fixed({"a": 1.0, "b": 2.0}, "f"), raises_on_a]).score(rollouts_of("ab"))
    assert same(scores.rewards, [NAN, 2.0])
    for bad in (NAN, math.inf):
        scores = RewardSet([fixed({"a": 1.0}, "f"), fixed({"a": bad}, "g")]).score(rollouts_of("a"))
        assert same(scores.rewards, [NAN])


@pytest.mark.silent_bug(22)
def test_rows_that_no_reward_scores_are_unscored():
    scores = RewardSet(
        [fixed({"a": None, "b": None}, "f"), fixed({"a": None, "b": None}, "g")]
    ).score(rollouts_of("ab"))
    assert same(scores.rewards, [NAN, NAN]) and scores.failures == ()


def test_a_part_of_weight_zero_is_recorded_and_cannot_unscore_a_row():
    scores = RewardSet(
        [fixed({"a": 1.0}, "f"), fixed({"a": math.inf}, "watch")], weights=[1, 0]
    ).score(rollouts_of("a"))
    assert scores.rewards.tolist() == [1.0] and [f.reward for f in scores.failures] == ["watch"]


def test_rows_that_ended_in_an_error_are_not_shown_to_rewards():
    seen = []

    def reward(completions):
        seen.append(completions)
        return [1.0] * len(completions)

    model = Model(
        lambda rollouts: torch.tensor([float(len(text)) for text in rollouts.completions])
    )
    rollouts = rollouts_of(["aa", None, "b"], finish=["stop", "error", "length"])
    scores = RewardSet([reward, model]).score(rollouts)
    assert seen == [["aa", "b"]] and same(scores.rewards, [3.0, NAN, 2.0]) and scores.failures == ()
    assert RewardSet(reward).score(rollouts.take([1])).rewards.isnan().all() and len(seen) == 1


@pytest.mark.silent_bug(24)
def test_permuting_the_rows_permutes_rewards_parts_failures_and_extras():
    def length(completions, answer, log_extra):
        log_extra("text", completions)
        return [
            math.inf if text == "inf" else len(text) * answer[n]
            for n, text in enumerate(completions)
        ]

    def shaky(completions):
        return [None if text == "none" else 1.0 / (len(text) - 2) for text in completions]

    outputs = ["a", "bb", "cccc", "inf", "none", "ffffff"]
    rollouts = rollouts_of(outputs, group_ids=[0, 0, 1, 1, 2, 2], targets=[1.0, 10.0, 100.0])
    scores = RewardSet([length, shaky]).score(rollouts)
    order = [4, 2, 5, 0, 3, 1]
    moved = RewardSet([length, shaky]).score(rollouts.take(order))
    assert same(scores.rewards, [0.0, NAN, 40.5, NAN, NAN, 600.25])
    assert same(moved.rewards, scores.rewards[order].tolist())
    assert all(same(moved.parts[name], scores.parts[name][order].tolist()) for name in scores.parts)
    assert {(order[f.row], f.reward, f.kind) for f in moved.failures} == {
        (f.row, f.reward, f.kind) for f in scores.failures
    }
    assert {(f.row, f.reward, f.kind) for f in scores.failures} == {
        (1, "shaky", "exception"),
        (3, "length", "not_finite"),
    }
    assert moved.extras["text"] == tuple(scores.extras["text"][row] for row in order)


@pytest.mark.silent_bug(24)
def test_splitting_the_batch_changes_no_reward():
    rollouts = rollouts_of(["a", "bb", "ccc"], group_ids=[0, 1, 0], targets=[2.0, 5.0])
    rewards = RewardSet(
        lambda completions, answer: [len(c) * a for c, a in zip(completions, answer, strict=True)]
    )
    whole = rewards.score(rollouts).rewards
    assert whole.tolist() == [2.0, 10.0, 6.0]
    assert [
        rewards.score(rollouts.take([row])).rewards.item() for row in range(3)
    ] == whole.tolist()


def test_statistics_by_hand():
    def f(completions):
        if "x" in completions:
            raise ValueError("x")
        return [{"a": 1.0, "b": 3.0, "c": math.inf, "d": 5.0}[text] for text in completions]

    scores = RewardSet([f, fixed({"a": 1, "b": 1, "c": 1, "d": None, "x": 1}, "g")]).score(
        rollouts_of("abcdx")
    )
    assert reward_stats(scores) == {
        "reward/unscored_count": 3.0,  # c is inf in f, d has no g, x raises in f
        "reward/exception_count": 1.0,
        "reward/timeout_count": 0.0,
        "reward/not_finite_count": 1.0,
    }


def test_logged_metrics_are_prefixed_and_extras_keep_their_columns_apart():
    def f(completions, log_metric, log_extra):
        log_metric("accuracy", 0.5)
        log_extra("parsed", ["1", "2"])
        return [1.0, 1.0]

    def g(completions, log_metric, log_extra):
        log_metric("accuracy", 1.0)
        log_metric("other", 3)
        log_extra("parsed", ["x", "y"])
        return [1.0, 1.0]

    scores = RewardSet([f, g]).score(rollouts_of("ab"))
    assert scores.metrics == {"reward_metric/accuracy": 0.75, "reward_metric/other": 3.0}
    assert scores.extras == {"parsed": ("1", "2"), "g/parsed": ("x", "y")}


def test_equal_names_get_a_suffix():
    rewards = RewardSet(
        [
            fixed({"a": 1.0}, "f"),
            fixed({"a": 2.0}, "f"),
            fixed({"a": 3.0}, "f_2"),
            fixed({"a": NAN}, "f"),
        ]
    )
    assert rewards.names == ("f", "f_2", "f_2_2", "f_3")
    scores = rewards.score(rollouts_of("a"))
    assert [part.item() for part in scores.parts.values()][:3] == [
        1.0,
        2.0,
        3.0,
    ] and scores.failures[0].reward == "f_3"


def test_async_rewards_run_at_the_same_time():
    arrived = []

    async def meets(completions):
        arrived.append(1)
        while len(arrived) < 2:
            await asyncio.sleep(0.01)
        return [1.0]

    async def meets_too(completions):
        return await meets(completions)

    scores = RewardSet([meets, meets_too], timeout_s=5.0).score(rollouts_of("a"))
    assert scores.rewards.tolist() == [2.0]


def test_a_reward_object_that_fails_on_a_row_costs_that_row():
    model = Model(lambda rollouts: torch.tensor([1.0 / len(text) for text in rollouts.completions]))
    scores = RewardSet([model]).score(rollouts_of(["aa", "", "b"]))
    assert same(scores.rewards, [0.5, NAN, 1.0]) and scores.failures[0].kind == "exception"


def test_an_object_that_scores_each_action_and_does_not_say_so_is_refused_with_the_way_out():
    with pytest.raises(
        DataError, match=r"returned \(2, 3\): a score for each action. Set scores_steps = True"
    ):
        RewardSet([Model(lambda rollouts: torch.zeros(2, 3))]).score(rollouts_of("ab"))


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [1.0, math.inf]])
def test_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(GruppoError, match="weights"):
        RewardSet([lambda completions: [], lambda completions: []], weights=weights)


def test_no_reward_is_refused_and_so_is_one_that_is_not_callable():
    with pytest.raises(GruppoError, match="at least one"):
        RewardSet([])
    with pytest.raises(DataError, match="not callable"):
        RewardSet(["exact_match"])


# --- rows of scores -------------------------------------------------------------------------------


def as_plain(scores):
    """Everything that belongs to a row."""
    failed = [
        sorted((f.reward, f.kind) for f in scores.failures if f.row == n)
        for n in range(len(scores.rewards))
    ]
    columns = [*scores.parts.values(), scores.rewards]
    extras = zip(*scores.extras.values(), strict=True) if scores.extras else [()] * len(failed)
    numbers = zip(*(column.nan_to_num(nan=-99).tolist() for column in columns), strict=True)
    return list(zip(numbers, failed, extras, strict=True))


@pytest.mark.silent_bug(24)
def test_scores_are_taken_and_joined_row_by_row_with_their_failures_and_columns():
    def length(completions, log_extra, log_metric):
        log_extra("text", completions)
        log_metric("rows", len(completions))
        return [math.inf if text == "inf" else len(text) for text in completions]

    first = RewardSet([length]).score(rollouts_of(["a", "inf", "ccc", "inf"]))
    second = RewardSet([length]).score(rollouts_of(["dddd", "inf"]))
    rows = as_plain(first)
    assert as_plain(first.take([3, 0])) == [rows[3], rows[0]]
    assert [f.row for f in first.take([3, 0]).failures] == [0]
    assert as_plain(Scores.cat([first, second])) == rows + as_plain(second)
    assert Scores.cat([first, second]).metrics == {"reward_metric/rows": 3}
    assert as_plain(Scores.cat([first, second]).take(range(4))) == rows
    assert first.take([]).rewards.shape == (0,) and not first.take([]).failures
