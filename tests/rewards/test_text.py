"""The built-in rewards: values by hand, and completions that try to cheat them."""

from __future__ import annotations

import pytest
from tests.rewards.fakes import rollouts_of

from gruppo.rewards import RewardSet, text
from gruppo.types import GruppoError


def scores(reward, completions, **columns):
    """Called as TRL calls it; a single column value stands for every row."""
    ids = [[0] * len(text.split()) for text in completions]
    filled = {name: [value] * len(completions) for name, value in columns.items()}
    return reward(
        prompts=["?"] * len(completions), completions=completions, completion_ids=ids, **filled
    )


def test_exact_match_compares_stripped_texts():
    assert scores(text.exact_match, [" 7\n", "7.0", "07", "the 7"], answer=" 7 ") == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert scores(text.exact_match, ["7"], answer=7) == [1.0]


@pytest.mark.silent_bug(23)
@pytest.mark.parametrize("gold", [None, "", "  "])
def test_exact_match_does_not_score_against_an_empty_answer(gold):
    assert scores(text.exact_match, ["", "x"], answer=gold) == [None, None]


@pytest.mark.parametrize(
    ("completion", "gold", "score"),
    [
        ("The answer is 1,234.", "1234", 1.0),
        ("3.0", "3", 1.0),
        ("-3", "3", 0.0),
        ("It is -3", "-3", 1.0),
        ("1/2", "0.5", 1.0),
        ("0.333", "1/3", 0.0),
        ("12 + 5 = 17", 17, 1.0),
        ("17 = 12 + 5", 17, 0.0),
        (r"so \boxed{42}, as in step 7", "42", 1.0),
        (r"\boxed{x = 5} units", "5", 1.0),
        ("42", "First 40, then 2 more.\n#### 42", 1.0),
        ("0.1", 0.1, 1.0),
        ("no idea", "3", 0.0),
    ],
)
def test_numeric_match_compares_the_number_that_the_completion_commits_to(completion, gold, score):
    assert scores(text.numeric_match, [completion], answer=gold) == [score]


@pytest.mark.silent_bug(23)
@pytest.mark.parametrize("gold", [None, "", "twelve", "3 or 4", float("nan"), True, "1/0"])
def test_an_answer_that_cannot_be_parsed_is_not_scored_and_never_correct(gold):
    assert (
        scores(text.numeric_match, ["", "3", "nan", "twelve", "True", str(gold)], answer=gold)
        == [None] * 6
    )


def test_regex_format_needs_the_whole_text():
    assert scores(text.regex_format(r"\d+"), ["12\n", "a 12", "12 b"]) == [1.0, 0.0, 0.0]
    assert scores(text.regex_format("<a>.*</a>"), ["<a>1\n2</a>"]) == [1.0]
    with pytest.raises(GruppoError, match="not a regular expression"):
        text.regex_format("(")


def test_length_target_falls_linearly_on_both_sides():
    reward = text.length_target(4)
    assert scores(reward, ["a b c d", "a b c", "a b c d e f", "a " * 8, "a " * 9, ""]) == [
        1.0,
        0.75,
        0.5,
        0.0,
        0.0,
        0.0,
    ]
    assert scores(text.length_target(4, "characters"), ["我爱 你们", "我\u200b爱\u200b你们"]) == [
        1.0,
        1.0,
    ]
    actions = RewardSet(text.length_target(2, "actions"))
    assert actions.score(rollouts_of("abc")).rewards.tolist() == [
        0.5,
        1.0,
        0.5,
    ]  # 1, 2 and 3 actions
    with pytest.raises(GruppoError, match="target of at least 1"):
        text.length_target(0)


def test_keywords_count_once_each_and_as_whole_words():
    assert scores(text.keywords(), ["因为下雨,所以我没去。", "因为因为因为", "没有"]) == [
        0.4,
        0.2,
        0.0,
    ]
    reward = text.keywords(["so", "but", "SO"], each=0.6)
    assert scores(reward, ["also", "So what, but why", "so so", "so_so"]) == [0.0, 1.0, 0.6, 0.6]
    assert scores(text.keywords(["so"]), ["所以so好"]) == [0.2]
    with pytest.raises(GruppoError, match="list of words"):
        text.keywords("so")


def test_repetition_penalty_is_the_share_of_repeated_ngrams():
    reward = text.repetition_penalty(3)
    assert scores(reward, ["a b c d", "a b c a b c", "a b", ""]) == [
        0.0,
        -0.25,
        0.0,
        0.0,
    ]  # abc bca cab abc: 1 of 4
    assert scores(reward, ["你好你好你"]) == pytest.approx([-1 / 3])  # 你好你 好你好 你好你: 1 of 3
    assert scores(text.repetition_penalty(1, -2.0), ["a a a A"]) == [-1.5]
    with pytest.raises(GruppoError, match="at most 0"):
        text.repetition_penalty(3, 0.5)


# --- completions that cheat -----------------------------------------------------------------------

GOLD = "17"
NUMERIC_CHEATS = [
    "",
    " ",
    " ".join(map(str, range(100))),
    ", ".join(map(str, range(100))),
    "17 18 19 20",
    "17 or 18",
    "The answer is 17 or maybe 7.",
    "1 2 3 17 4",
    r"\boxed{16, 17, 18}",
    r"\boxed{17}\boxed{18}",
    r"\boxed{17 18}",
    r"\boxed{}17",
    r"\boxed{17",
    r"17 \boxed{?}",
    "17e1",
    "17/1.5",
    "17,000",
    "0.17",
    "-17",
    "1 7",
    "seventeen",
    "answer",
    "{answer}",
    "None",
    "nan",
    "inf",
    "x17",
    "17_000",
    "170",
    "717",
    "17.0000001",
    "1e999999999",
    "9" * 100_000,
    "1," * 50_000,
    "1/" * 50_000,
]


EXACT_CHEATS = [
    "",
    "17 18",
    "17,",
    "17\n17",
    "1 7",
    "\u200b17",
    "seventeen",
    "answer: 17",
    "*",
    ".*",
    "None",
    "'17'",
    "170",
    "17\x00",
]


FORMAT_CHEATS = [
    "",
    "<answer>",
    "</answer><answer>",
    "x <answer>7</answer>",
    "<answer>7</answer> x",
    "<ANSWER>7</ANSWER>",
    "<answer>7</answer>\n<answer>8</answer>",
    "<answer></answer>",
    "<answer>seven</answer>",
    r"<answer>\d+</answer>",
]


@pytest.mark.silent_bug(42)
def test_cheats_on_keywords_never_score_above_an_honest_text():
    honest = "因为下雨,所以路滑;然而他去了,但是迟到了。"
    cheats = [
        "因为" * 50,
        "因为所以",
        "因为所以然而但是",
        "因为所以然而但是" * 9,
        "因 为 所 以",
        "因\u200b为",
        "",
        "keywords",
        "因为,所以,然而",
    ]
    best, *rest = scores(text.keywords(), [honest, *cheats])
    assert (
        best == 0.8 and max(rest) <= best and scores(text.keywords(each=0.5), cheats[3:4]) == [1.0]
    )


@pytest.mark.silent_bug(42)
def test_cheats_on_length_never_score_above_an_honest_text():
    honest = "Rain made the road slick, so he came late."  # 9 words
    cheats = [
        "x " * 9,
        "x" * 9,
        "x\n" * 9,
        "x\u200b" * 9,
        "",
        " " * 9,
        "x-" * 9,
        "x " * 1000,
        "\u00a0".join("x" * 9),
    ]
    best, *rest = scores(text.length_target(9), [honest, *cheats])
    assert best == 1.0 and max(rest) <= best
    hidden = scores(
        text.length_target(9, "characters"),
        ["我" * 9, "我" + "\u200b" * 8, "我" + " " * 8, "我" + "\x00" * 8],
    )
    assert hidden[0] == 1.0 and hidden[1:] == pytest.approx([1 / 9] * 3)


REPEATS = [
    "spam " * 40,
    "spam" * 40,
    "Spam spam SPAM " * 9,
    "spam, spam. spam! spam? " * 9,
    "!" * 80,
    "?! " * 40,
    "a b c " * 20,
    "你好" * 40,
    "你 好 " * 40,
    "哈" * 60,
    "1 " * 60,
    "\n- a\n- b" * 20,
    "spam" * 40 + " one two three",
    "!" * 80 + " one two three",
    "😀" * 60,
]


@pytest.mark.silent_bug(42)
def test_repeating_texts_are_penalised_in_every_script_and_an_honest_one_is_not():
    reward = text.repetition_penalty(3)
    honest = [
        "Rain made the road slick, so he came late.",
        "因为下雨,所以路滑。",
        "x = (3 + 4) * 2 = 14",
    ]
    assert scores(reward, honest) == [0.0, 0.0, 0.0]
    assert {text: s for text in REPEATS if (s := scores(reward, [text])[0]) > -0.6} == {}


def test_the_built_ins_work_through_a_reward_set_on_strings_and_conversations():
    rewards = RewardSet(
        [text.numeric_match, text.repetition_penalty(), text.length_target(1)], weights=[1, 1, 0.5]
    )
    rewards.check(["answer", "target"])
    rows = ["7", [{"role": "assistant", "content": "7"}], "it is 8"]
    got = rewards.score(rollouts_of(rows, targets=["7"]))
    assert got.rewards.tolist() == [1.5, 1.5, 0.0] and rewards.names == (
        "numeric_match",
        "repetition_penalty",
        "length_target",
    )
