"""Plain functions in TRL's calling convention."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from tests.rewards.fakes import rollouts_of

from gruppo.rewards import FunctionReward, RewardSet, columns_of
from gruppo.rewards.answers import TrainerState
from gruppo.types import DataError, GruppoError, Prompt


def test_a_function_gets_every_keyword_of_its_signature_row_by_row():
    seen = {}

    def reward(
        prompts,
        completions,
        completion_ids,
        answer,
        target,
        level,
        trainer_state,
        log_metric,
        log_extra,
    ):
        seen.update(locals())
        return [1, 2, 3]

    rollouts = rollouts_of(
        ["a", "b", "c"],
        group_ids=[1, 0, 1],
        targets=["T0", "T1"],
        metas=[{"level": 5}, {"level": 7}],
    )
    rewards = RewardSet(reward).score(rollouts, TrainerState(4, 9, 0.5)).rewards
    assert rewards.tolist() == [1, 2, 3]
    assert seen["prompts"] == ["ask 1", "ask 0", "ask 1"] and seen["completions"] == ["a", "b", "c"]
    assert seen["completion_ids"] == [[0], [10, 11], [20, 21, 22]]
    assert seen["answer"] == seen["target"] == ["T1", "T0", "T1"] and seen["level"] == [7, 5, 7]
    assert seen["trainer_state"] == TrainerState(global_step=4, max_steps=9, epoch=0.5)


def test_a_function_with_var_keywords_gets_everything_and_one_without_gets_only_what_it_names():
    seen = []

    def greedy(**kwargs):
        seen.append(set(kwargs))
        return [0.0]

    RewardSet(greedy).score(rollouts_of(["a"], metas=[{"level": 5}]))
    provided = {
        "prompts",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_metric",
        "log_extra",
    }
    assert seen == [provided | {"answer", "target", "level"}]
    assert RewardSet(lambda completions: [len(completions[0])]).score(
        rollouts_of(["abc"])
    ).rewards.tolist() == [3]


def test_a_function_that_edits_its_messages_does_not_edit_the_rollouts():
    def vandal(completions):
        for completion in completions:
            completion[0]["content"] = ""
            completion.clear()
        completions.reverse()
        return [1.0, 2.0]

    rows = [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]]
    rollouts = rollouts_of(rows)
    RewardSet(vandal).score(rollouts)
    assert [output[0]["content"] for output in rollouts.completions] == ["a", "b"]


@pytest.mark.parametrize(
    "give", [list, tuple, np.array, torch.tensor, lambda x: [np.float32(v) for v in x]]
)
def test_numbers_come_as_list_tuple_array_or_tensor(give):
    assert RewardSet(lambda completions: give([0.5, 2.0])).score(
        rollouts_of("ab")
    ).rewards.tolist() == [0.5, 2.0]


def test_an_async_function_is_awaited_and_keeps_its_event_loop_between_steps():
    import asyncio

    loops = []

    async def reward(completions):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [len(text) for text in completions]

    wrapped = RewardSet(reward)
    assert [wrapped.score(rollouts_of(["a", "bb"])).rewards.tolist() for _ in range(2)] == [
        [1, 2],
        [1, 2],
    ]
    assert loops[0] is loops[1]


@pytest.mark.silent_bug(22)
def test_none_is_unscored_and_nan_and_inf_are_unscored_and_counted_apart():
    outcome = RewardSet(lambda completions: [None, math.nan, math.inf, -math.inf, 1e39, 2.0]).score(
        rollouts_of("abcdef")
    )
    assert outcome.rewards.isnan().tolist() == [True] * 5 + [False]
    assert [(f.row, f.kind) for f in outcome.failures] == [
        (row, "not_finite") for row in (1, 2, 3, 4)
    ]


def test_an_entry_that_is_no_number_fails_alone_with_its_value_and_type():
    outcome = RewardSet(lambda completions: ["0.5", 1.0, {"score": 1}]).score(rollouts_of("abc"))
    assert outcome.rewards.isnan().tolist() == [True, False, True]
    assert [(f.row, f.kind) for f in outcome.failures] == [(0, "exception"), (2, "exception")]
    assert outcome.failures[0].message == "returned '0.5' (str); each entry is a number or None"


def test_a_missing_column_is_refused_before_sampling_with_the_columns_and_the_nearest_name():
    def reward(completions, anwser):
        return [0.0] * len(completions)

    with pytest.raises(
        DataError, match=r"asks for 'anwser'.*they have: answer, level .*Did you mean answer\?"
    ):
        RewardSet(reward).check(["level", "answer"])
    with pytest.raises(DataError, match="asks for 'anwser'"):
        RewardSet(reward).score(rollouts_of(["a"]))


def test_a_column_that_some_prompts_lack_is_none_there_and_one_that_all_lack_is_the_default():
    def reward(completions, level, colour="blue"):
        return [0.0 if x is None else x for x in level] if colour == "blue" else None

    rollouts = rollouts_of("ab", group_ids=[0, 1], targets=[None, None], metas=[{"level": 3}, {}])
    wrapped = RewardSet(reward)
    wrapped.check(["level"])
    assert wrapped.score(rollouts).rewards.tolist() == [3.0, 0.0]
    assert wrapped.score(rollouts.take([1])).rewards.tolist() == [
        0.0
    ]  # this batch has no such column, the data have


def test_positional_only_arguments_are_refused():
    def reward(completions, /):
        return [0.0]

    with pytest.raises(DataError, match="takes 'completions' by position only"):
        RewardSet(reward)


def test_columns_are_every_meta_key_and_the_target_only_where_there_is_one():
    prompts = [Prompt("a", "?", None, {"level": 1}), Prompt("b", "?", None, {"kind": 2})]
    assert columns_of(prompts) == ("kind", "level")
    assert columns_of([*prompts, Prompt("c", "?", 5)]) == ("answer", "kind", "level", "target")


def test_a_column_named_answer_wins_over_the_target():
    seen = RewardSet(lambda completions, answer, target: [float(answer[0] + target[0])])
    assert seen.score(rollouts_of(["a"], targets=[1], metas=[{"answer": 10}])).rewards.tolist() == [
        11.0
    ]


def test_names_come_from_the_function_through_partial_or_the_type():
    def length(completions, unit):
        return []

    class Judge:
        def __call__(self, completions):
            return []

    names = [
        FunctionReward(fn).name
        for fn in (length, functools.partial(length, unit=1), Judge(), lambda completions: [])
    ]
    assert names == ["length", "length", "Judge", "lambda"]


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan])
def test_a_timeout_that_leaves_no_time_is_refused(timeout_s):
    with pytest.raises(GruppoError, match=r"leaves reward .* no time"):
        RewardSet(lambda completions: [], timeout_s=timeout_s)


def test_rewards_are_computed_without_gradients():
    assert RewardSet(lambda completions: [float(torch.is_grad_enabled())]).score(
        rollouts_of("a")
    ).rewards.tolist() == [0]


def test_metrics_and_extras_of_a_failed_batch_call_are_not_counted_twice():
    def reward(completions, log_metric, log_extra):
        log_metric("length", len(completions[0]))
        log_extra("seen", [text.upper() for text in completions])
        if len(completions) > 1 or completions == ["bad"]:
            raise ValueError("bad row")
        return [1.0]

    outcome = RewardSet(reward).score(rollouts_of(["ab", "bad", "abcd"]))
    assert outcome.metrics == {"reward_metric/length": 3.0}
    assert outcome.extras == {"seen": ("AB", None, "ABCD")}


def test_extras_of_the_wrong_length_are_an_error_of_the_function():
    def reward(completions, log_extra):
        log_extra("seen", ["one"])
        return [1.0] * len(completions)

    failures = (
        RewardSet(lambda completions, log_extra: log_extra("seen", []))
        .score(rollouts_of(["a"]))
        .failures
    )
    assert "log_extra('seen') got 0 values for 1 completions" in failures[0].message
    assert RewardSet(reward).score(rollouts_of(["a", "b"])).rewards.tolist() == [
        1.0,
        1.0,
    ]  # right, one row at a time


def test_a_trl_function_over_conversations_runs_unchanged():
    def format_reward(completions, **kwargs):
        return [
            1.0 if completion[0]["content"].startswith("<think>") else 0.0
            for completion in completions
        ]

    rows = [[{"role": "assistant", "content": text}] for text in ("<think>x", "x")]
    reward = RewardSet(format_reward)
    assert reward.score(rollouts_of(rows)).rewards.tolist() == [1.0, 0.0] and reward.names == (
        "format_reward",
    )
