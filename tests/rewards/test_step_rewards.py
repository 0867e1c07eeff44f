"""Rewards of steps: where a text is cut, which of the policy's own tokens ends each step, and what
a row gets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.fakes import bpe_tokenizer
from tests.rewards.fakes import rollouts_of

from gruppo.rewards import RewardSet, Scores, step_reward
from gruppo.rewards.functions import split_steps, step_ends
from gruppo.types import DataError, GruppoError, Prompt, Rollouts

NAN = math.nan


def same(got, expected):
    expected = torch.tensor(expected)
    return torch.equal(got.isnan(), expected.isnan()) and torch.allclose(
        got.nan_to_num(), expected.nan_to_num()
    )


def written(*texts, end=0):
    """One group; a token is the code of a character, and 0 ends each row."""
    lengths = torch.tensor([len(text) + 1 for text in texts])
    columns = int(lengths.max())
    return Rollouts(
        prompts=(Prompt("p", "ask", "x"),),
        group_ids=torch.zeros(len(texts), dtype=torch.long),
        actions=torch.tensor([[*map(ord, text), *[end] * (columns - len(text))] for text in texts]),
        mask=torch.arange(columns) < lengths[:, None],
        lengths=lengths,
        completions=texts,
        sampler_logprobs=torch.zeros(len(texts), columns),
        policy_version=torch.zeros(len(texts), columns, dtype=torch.long),
        temperature=torch.ones(len(texts)),
        finish=("stop",) * len(texts),
    )


def read(ids):
    return "".join(chr(i) for i in ids if i)


def scores_of(reward, *texts, **changes):
    rewards = RewardSet(reward, **changes)
    rewards.set_decoder(read)
    return rewards.score(written(*texts))


# --- cutting --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("one\ntwo", [("one", 4), ("two", 7)]),
        ("one\n\n two\n", [("one", 4), (" two", 10)]),
        ("\n\none", [("one", 5)]),
        ("", [("", 0)]),
        (" \n ", [(" \n ", 3)]),
    ],
)
def test_blank_parts_are_no_steps_and_a_text_without_any_other_is_one(text, steps):
    assert split_steps(text, "\n") == steps


def test_a_separator_of_several_characters_belongs_to_the_step_that_it_ends():
    assert split_steps("a; b;; c", ";; ") == [("a; b", 7), ("c", 8)]


@pytest.mark.parametrize("separator", ["", None, 3])
def test_a_separator_that_cuts_nothing_is_refused(separator):
    with pytest.raises(GruppoError, match="splits nothing"):
        step_reward(separator)


# --- placing --------------------------------------------------------------------------------------


@pytest.mark.silent_bug(10)
def test_steps_end_at_the_policys_own_tokens_where_tokenising_the_text_again_gives_others():
    """The policy wrote "ab", "abc" and "12" letter by letter, which its tokenizer would write with
    merges."""
    tokenizer = bpe_tokenizer()
    text = "ab\nabc 12\n12"
    ids = [
        tokenizer.convert_tokens_to_ids(c)
        for c in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        for c in c[0]
    ]
    ids.append(tokenizer.eos_token_id)
    again = tokenizer(text)["input_ids"]
    assert (
        tokenizer.decode(ids, skip_special_tokens=True) == text
        and again != ids
        and len(again) < len(ids) - 4
    )

    def chat_text(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    assert step_ends(split_steps(text, "\n"), text, ids, chat_text) == [
        2,
        9,
        12,
    ]  # both line ends, and the end token
    assert step_ends(split_steps(text, "\n"), text, again, chat_text) == [1, 5, 7 - 1]


def test_a_character_of_several_tokens_is_written_by_its_last():
    text = "\u4f60\n\u597d"
    ids = [*text.encode(), 256]

    def utf8(ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    assert step_ends(split_steps(text, "\u4f60"), text, ids, utf8) == [len(ids) - 1]
    assert step_ends([("\u4f60", 1), ("\u597d", 3)], text, ids, utf8) == [2, 7]


# --- scores ---------------------------------------------------------------------------------------


@step_reward()
def lengths(steps, **_):
    return [[float(len(step)) for step in row] for row in steps]


def test_each_step_has_its_score_at_its_last_token_and_a_rows_part_is_their_sum():
    scores = scores_of([lengths], "ab\nc", "abc", weights=[2.0])
    steps = scores.steps["lengths"]
    assert same(steps, [[NAN, NAN, 2.0, NAN, 1.0], [NAN, NAN, NAN, 3.0, NAN]])
    assert scores.parts["lengths"].tolist() == [3.0, 3.0] and scores.rewards.tolist() == [6.0, 6.0]


def test_a_step_or_a_row_may_stay_unscored():
    @step_reward()
    def some(completions):
        return {2: [[None, 1.0], None], 1: [[None]]}[len(completions)]

    scores = scores_of([some], "a\nb", "c")
    assert same(scores.steps["some"], [[NAN, NAN, NAN, 1.0], [NAN] * 4]) and same(
        scores.rewards, [1.0, NAN]
    )
    assert scores.failures == () and scores_of([some], "c").rewards.isnan().all()


@pytest.mark.silent_bug(22)
@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ([1.0], "exception", "returned 1 numbers for a completion of 2 steps"),
        (1.0, "exception", "returned 1.0 .float. for a completion"),
        ([1.0, math.inf], "not_finite", "returned inf"),
        ([1.0, "x"], "exception", "returned 'x'"),
        ([3e38, 3e38], "not_finite", "finite float32"),
    ],
)
def test_a_row_whose_scores_do_not_fit_its_steps_is_unscored_and_the_others_are_not(
    bad, kind, message
):
    @step_reward()
    def odd(completions):
        return [bad if text == "a\nb" else [1.0] for text in completions]

    scores = scores_of([odd], "a\nb", "c")
    assert same(scores.rewards, [NAN, 1.0]) and scores.steps["odd"][0].isnan().all()
    (failure,) = scores.failures
    assert (failure.row, failure.kind) == (0, kind) and message.replace(
        ".float.", "(float)"
    ) in failure.message


def test_a_function_may_ask_for_steps_only_if_it_is_marked():
    def lengths(steps):
        return []

    with pytest.raises(DataError, match="asks for 'steps'"):
        RewardSet([lengths]).check(["answer"])
    RewardSet([step_reward("; ")(lengths)]).check(["answer"])


def test_a_list_for_a_completion_of_an_unmarked_function_names_the_mark():
    (failure,) = scores_of([lambda completions: [[1.0, 2.0]]], "a\nb").failures
    assert (
        "mark a function that scores each step with gruppo.rewards.step_reward" in failure.message
    )


def test_without_knowing_how_ids_are_read_steps_are_refused():
    with pytest.raises(GruppoError, match=r"RewardSet.set_decoder\(policy.chat.text\)"):
        RewardSet([lengths]).score(written("a"))


def test_two_steps_that_end_in_one_token_are_added():
    rollouts = written("ab")
    rewards = RewardSet([lengths])
    rewards.set_decoder(
        lambda ids: {0: "", 1: "a\nbb\n", 2: "a\nbb\nccc", 3: "a\nbb\nccc"}[len(ids)]
    )
    rollouts = replace(rollouts, completions=("a\nbb\nccc",))
    scores = rewards.score(rollouts)
    assert same(scores.steps["lengths"], [[3.0, NAN, 3.0]]) and scores.rewards.tolist() == [6.0]


# --- objects --------------------------------------------------------------------------------------


class Each:
    name = "each"
    scores_steps = True

    def __init__(self, score):
        self.score = score

    def __call__(self, rollouts):
        return self.score(rollouts)


def test_an_object_scores_actions_and_what_is_not_the_policys_own_is_nan_or_0():
    """Row i of the fake has i % 3 + 1 actions."""
    score = torch.tensor([[0.5, 0.0, NAN], [NAN, 2.0, NAN], [1.0, NAN, 0.0]])
    scores = RewardSet([Each(lambda rollouts: score[: len(rollouts)])]).score(rollouts_of("abc"))
    assert same(scores.steps["each"], [[0.5, NAN, NAN], [NAN, 2.0, NAN], [1.0, NAN, 0.0]])
    assert scores.rewards.tolist() == [0.5, 2.0, 1.0]
    score[0, 1] = 4.0
    scores = RewardSet([Each(lambda rollouts: score[: len(rollouts)])]).score(rollouts_of("abc"))
    assert same(scores.rewards, [NAN, 2.0, 1.0]) and "did not choose" in scores.failures[0].message


def test_a_row_without_a_step_is_unscored_and_a_wrong_shape_fails_all():
    scores = RewardSet([Each(lambda rollouts: torch.full((2, 3), NAN))]).score(rollouts_of("ab"))
    assert scores.rewards.isnan().all() and scores.failures == ()
    scores = RewardSet([Each(lambda rollouts: torch.zeros(2))]).score(rollouts_of("ab"))
    assert {failure.kind for failure in scores.failures} == {"count"} and len(scores.failures) == 2


@pytest.mark.silent_bug(24)
def test_steps_stay_with_their_rows_in_every_order_and_wider_batches_are_padded():
    rewards = RewardSet([lengths])
    rewards.set_decoder(read)
    wide, narrow = rewards.score(written("ab\nc", "abc")), rewards.score(written("d"))
    both = Scores.cat([narrow, wide])
    assert same(both.steps["lengths"], [[NAN, 1.0, NAN, NAN, NAN], *wide.steps["lengths"].tolist()])
    turned = both.take([2, 0])
    assert same(turned.steps["lengths"], [[NAN, NAN, NAN, 3.0, NAN], [NAN, 1.0, NAN, NAN, NAN]])
    assert turned.rewards.tolist() == [3.0, 1.0]
