"""About thirty more completions for each built-in reward that would rather be paid than be
right."""

from __future__ import annotations

from itertools import permutations

import pytest
from tests.rewards.test_text import EXACT_CHEATS, FORMAT_CHEATS, NUMERIC_CHEATS, REPEATS, scores

from gruppo.rewards import text
from gruppo.rewards.text import reasoning_gym_score

NUMERIC = [
    *("\\boxed{16, 17}", "\\boxed{7 17}", "\\boxed{18 or 17}", "\\boxed{not 16 but 17}"),
    *(
        "17 then 18",
        "17 - 1",
        "17 + 0.5",
        "17 = 18 - 2",
        "17?18",
        "\\boxed{17 }, \\boxed{18}",
        "\\boxed{17+0}",
    ),
    *(
        "\\boxed{\\text{17 or 18}}",
        "17\n\n18",
        "17%18",
        "XVII",
        "0x11",
        "17th of 18",
        "17.5",
        "one seven",
        "<17><18>",
    ),
]
EXACT = [
    *(
        "17.",
        "17!",
        "**17**",
        "\\boxed{17}",
        "$17$",
        "17 or 18",
        "17 17",
        "1\n7",
        "\uff11\uff17",
        "XVII",
        "0x11",
    ),
    *(
        "+17",
        "017",
        "17.0",
        "17%",
        "(17)",
        "[17]",
        "{answer}",
        "the answer is 17",
        "17 18 19",
        "!17",
        "==17",
        "True",
    ),
]
FORMAT = [
    *(
        "<answer>7</answer",
        "answer>7</answer>",
        "<answer >7</answer>",
        "<answer>7 </answer>",
        "<answer>7</answer>.",
    ),
    *(
        "<answer>-7</answer>",
        "<answer>7.0</answer>",
        "<answer>7,8</answer>",
        "<answer><answer>7</answer></answer>",
    ),
    *(
        "`<answer>7</answer>`",
        "&lt;answer&gt;7&lt;/answer&gt;",
        "<answer>7\n</answer>",
        "<answer>x7</answer>",
    ),
    *(
        "<answer>7</answer>7",
        "7",
        "<answer>" * 50,
        "<answer>7" * 10,
        "<answer>\\d</answer>",
        "<answer>7|8</answer>",
    ),
    *("\u200b<answer>7</answer>", "<answer/>7", "[answer]7[/answer]"),
]


def best_cheat(reward, cheats, **columns):
    """What the best of them earns, and which it is."""
    earned = scores(reward, cheats, **columns)
    return max(zip(earned, cheats, strict=True), key=lambda pair: pair[0])


@pytest.mark.silent_bug(42)
@pytest.mark.parametrize(
    ("reward", "cheats", "honest"),
    [
        (text.numeric_match, NUMERIC + NUMERIC_CHEATS, "5 + 12 = 17"),
        (text.exact_match, EXACT + EXACT_CHEATS, "17"),
        (text.regex_format(r"<answer>\d+</answer>"), FORMAT + FORMAT_CHEATS, "<answer>17</answer>"),
    ],
    ids=["numeric_match", "exact_match", "regex_format"],
)
def test_no_cheat_earns_anything_where_an_answer_is_right_or_wrong(reward, cheats, honest):
    assert len(set(cheats)) >= 30
    columns = {"answer": "17"}
    assert scores(reward, [honest], **columns) == [1.0]
    assert best_cheat(reward, cheats, **columns)[0] == 0.0, best_cheat(reward, cheats, **columns)


@pytest.mark.silent_bug(42)
def test_no_order_repetition_or_disguise_of_keywords_earns_more_than_a_text_with_all_of_them():
    words = text.COHERENCE_WORDS
    honest = "因为下雨,所以路滑;然而他去了,但是迟到了。"
    cheats = ["".join(order) * 9 for order in permutations(words)]
    cheats += [word * 99 for word in words] + [
        "因-为",
        "因\u200b为",
        "yinwei suoyi",
        "因 因 为 为",
        "|".join(words),
    ]
    assert len(set(cheats)) >= 30
    assert best_cheat(text.keywords(), cheats)[0] <= scores(text.keywords(), [honest])[0] == 0.8
    english = text.keywords(["because", "so", "but"], each=0.3)
    disguised = [
        "also",
        "becauses",
        "b e c a u s e",
        "sos",
        "butter",
        "BUT" * 9,
        "be-cause",
        "soso " * 9,
    ]
    assert best_cheat(english, disguised)[0] == 0.0
    assert scores(english, ["SO so So " * 9]) == [0.3]


@pytest.mark.silent_bug(42)
def test_no_filler_earns_more_length_than_a_text_of_that_length():
    fillers = [
        "x",
        ".",
        "\u200b",
        "\u00a0",
        "\ufeff",
        "\u2060",
        "\t",
        "\n",
        "-",
        "17",
        "\x00",
        "\u0301",
        "\u202e",
        "a,b",
    ]
    cheats = [filler * n for filler in fillers for n in (9, 100)] + [
        f"{filler} " * 9 for filler in fillers
    ]
    assert len(set(cheats)) >= 30
    for unit in ("words", "characters"):
        reward = text.length_target(9, unit)
        assert best_cheat(reward, cheats)[0] <= 1.0
    unseen = [text for text in cheats if not text.strip("\u200b\u00a0\ufeff\u2060\t\n\x00\u202e ")]
    assert len(unseen) >= 15 and best_cheat(text.length_target(9, "characters"), unseen)[0] == 0.0


MORE_REPEATS = [
    *(
        "да " * 40,
        "の" * 40,
        "안녕" * 30,
        "... " * 30,
        "- - - " * 20,
        "1, " * 60,
        "A a A a " * 20,
        "lol LOL Lol " * 20,
    ),
    *(
        "ha" * 60,
        "haha! " * 40,
        "\t\tx" * 40,
        "(a)(a)" * 30,
        "yes, yes. yes! " * 20,
        "0" * 90,
        "the the " * 30,
    ),
]


@pytest.mark.silent_bug(42)
def test_no_script_case_or_punctuation_hides_a_repetition():
    cheats = REPEATS + MORE_REPEATS
    assert len(set(cheats)) >= 30
    worst, cheat = best_cheat(text.repetition_penalty(3), cheats)
    assert worst < -0.6, cheat
    assert scores(text.repetition_penalty(3), ["Rain made the road slick, so he came late."]) == [
        0.0
    ]


CODE = [
    *(
        "__import__('os').system('true')",
        "(lambda: 17)()",
        "exec('17')",
        "open('/etc/passwd').read()",
        "17 if 1 else 0",
    ),
    *(
        "[17 for _ in [1]]",
        "globals()",
        "().__class__",
        "f'{17}'",
        "print(17)",
        "eval('17')",
        "str(17)",
        "9**9**9",
        "1<<9",
    ),
]


@pytest.mark.silent_bug(42)
def test_no_code_that_equals_the_answer_earns_what_the_answer_does():
    pytest.importorskip("reasoning_gym")
    import reasoning_gym

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=1)[0]
    right = entry["answer"]
    honest = reasoning_gym_score([right], [entry])[0]
    sums = [
        f"{right}+0",
        f"int('{right}')",
        f"({right},)",
        f"{right} or 1",
        f"{right};1",
        f"{right} {right}",
        "",
        "None",
    ]
    cheats = [
        *CODE,
        *sums,
        "answer",
        "<answer></answer>",
        f"<answer>{right}</answer><answer></answer>",
        "nan",
        "inf",
    ]
    earned = reasoning_gym_score(cheats, [entry] * len(cheats))
    assert honest == 1.0 and max(earned) < honest
