"""Reading texts, units and numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gruppo.rewards.text import boxed, numbers_in, numeric_match, text_of, units_of


def test_the_text_of_a_conversation_is_what_the_assistant_wrote():
    messages = [
        {"role": "assistant", "content": "I add."},
        {"role": "tool", "content": "42"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "7."}],
        },
        {"role": "assistant", "content": None},
    ]
    assert text_of(messages) == "I add.\nIt is 7.\n"
    assert text_of("as it is ") == "as it is "
    with pytest.raises(TypeError, match="reads text, and the completion is a int"):
        text_of(3)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,234", [1234]),
        ("1,234,567.5", [1234567.5]),
        ("1,2,3,4", [1, 2, 3, 4]),
        ("12,34", [12, 34]),
        ("-3", [-3]),
        ("5-3 = 2", [5, 3, 2]),
        (r"(8)-17, \boxed{8}-17, x-$17", [8, 17, 8, 17, 17]),
        ("x=-3", [-3]),
        ("-$1,000.50", [-1000.5]),
        ("3.0.", [3]),
        (".5 and -.5", [0.5, -0.5]),
        ("1/2.", [0.5]),
        ("-1/4", [-0.25]),
        ("1/0 then 7", [7]),
        (r"\frac{3}{4}", [0.75]),
        (r"-\dfrac{3}{4}", [-0.75]),
        (r"2\frac{1}{2}", [2, 0.5]),
        ("1e3 2.5e-1", [1000, 0.25]),
        ("H2O at v1.2", []),
        ("so...7", [7]),
        ("**50%** _8_ 17_000", [50, 8]),
        ("12cm", [12]),
        ("\uff11\uff12 \u22123", [12, -3]),
        (r"1{,}234 \$5", [1234, 5]),
        ("1e999999999", [1]),  # never built: it would have a billion digits
        ("", []),
    ],
)
def test_numbers_are_read_exactly(text, numbers):
    assert numbers_in(text) == [Fraction(number) for number in numbers]


@pytest.mark.parametrize(
    "text", ["", "twelve", "3 or 4", "12 apples", "3,4", "1/0", "nan", "inf", "x5", "9" * 500]
)
def test_a_text_that_is_not_one_number_is_none(text):
    assert numeric_match(["7"], [text]) == [None]


def test_the_last_box_counts_and_its_braces_are_matched():
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert boxed("none") is None and boxed(r"\boxed{never closed") == ""


def test_units_are_words_and_single_chinese_characters_and_micro_batches_of_what_is_no_word():
    assert units_of("The cat, the CAT") == ["the", "cat", "the", "cat"]
    assert units_of("我爱GPT吗") == ["我", "爱", "gpt", "吗"]
    assert units_of("ab" * 13) == ["a", "b"] * 13
    assert units_of("!!! a") == ["!", "!", "!", "a"]
