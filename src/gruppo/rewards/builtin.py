"""Built-in reward functions, in TRL's calling convention: each can be passed to TRL's trainer as it is.

What a policy can gain by cheating is stated with each. None of them pays a cheat more than an honest answer; where a
cheat can earn as much (length, keywords, format), combine the reward with one that reads the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from gruppo.rewards.text import boxed, number_of, numbers_in, text_of, units_of
from gruppo.types import GruppoError

RewardFunction = Callable[..., list[float | None]]
COHERENCE_WORDS = ("因为", "所以", "然而", "但是")


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion, stripped, is the answer, stripped; else 0. An empty answer is not scored.

    Nothing but the answer passes, so listing candidates scores 0.
    """
    return [
        None if gold is None or not str(gold).strip() else float(text_of(completion).strip() == str(gold).strip())
        for completion, gold in zip(completions, answer, strict=True)
    ]


def numeric_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion's number equals the answer's, exactly (3.0 is 3, 1/2 is 0.5, 0.33 is not 1/3); else 0.

    The completion's number is that of its last \\boxed{}, which has to hold one number alone, else its last number. So
    a list of candidates commits to its last entry, and a list inside the box to nothing. The answer has to be a
    number as a whole ("1,234", "$5", or what follows "####" as in GSM8K); one that is not is not scored.
    """
    scores: list[float | None] = []
    for completion, gold in zip(completions, answer, strict=True):
        wanted = None if gold is None or isinstance(gold, bool) else number_of(_final_part(str(gold)))
        scores.append(None if wanted is None else float(_committed(text_of(completion)) == wanted))
    return scores


def _final_part(gold: str) -> str:
    inside = boxed(gold)
    return gold.rpartition("####")[2] if inside is None else inside


def _committed(text: str) -> Any:
    """The one number that a completion stands by; None without one."""
    inside = boxed(text)
    numbers = numbers_in(text)[-1:] if inside is None else numbers_in(inside)
    return numbers[0] if len(numbers) == 1 else None


def regex_format(pattern: str) -> RewardFunction:
    """1 where the whole completion, stripped, matches the pattern (``.`` matches line ends too); else 0.

    The whole text has to match, so a right part inside anything else scores 0. ``.*`` lets anything through, and nested
    repeats such as ``(a+)+`` can take exponential time, which no timeout can stop: matching does not yield to threads.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise GruppoError(f"regex_format got {pattern!r}, which is no regular expression: {error}.") from None

    def regex_format(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [float(compiled.fullmatch(text_of(completion).strip()) is not None) for completion in completions]

    return regex_format


def length_target(target: int, unit: Literal["words", "characters", "actions"] = "words") -> RewardFunction:
    """max(0, 1 - |n - target| / target), n in words (split at spaces), visible characters or actions (tokens).

    Chinese has no spaces: use characters. Filler of the right length earns as much as sense does.
    """
    if target < 1 or unit not in ("words", "characters", "actions"):
        raise GruppoError(
            f"length_target({target}, {unit!r}) needs a target of at least 1 and words, characters or actions."
        )

    def length_target(completions: Sequence[Any], completion_ids: Sequence[Any], **_: Any) -> list[float | None]:
        lengths = [
            len(ids) if unit == "actions" else _length(text_of(completion), unit)
            for completion, ids in zip(completions, completion_ids, strict=True)
        ]
        return [max(0.0, 1.0 - abs(n - target) / target) for n in lengths]

    return length_target


def _length(text: str, unit: str) -> int:
    words = text.split()
    return len(words) if unit == "words" else sum(character.isprintable() for word in words for character in word)


def keywords(words: Sequence[str] = COHERENCE_WORDS, each: float = 0.2, cap: float = 1.0) -> RewardFunction:
    """``each`` for every different word that occurs, up to ``cap``.

    A word counts once, however often it is repeated, and words of letters only as whole words ("so" not in "also").
    A bare list of all the words earns as much as an honest text with all of them, never more.
    """
    if isinstance(words, str) or not [word for word in words if word.strip()]:
        raise GruppoError(f"keywords got {words!r}; it needs a list of words such as ['because', 'so'].")
    patterns = [_word_pattern(word) for word in dict.fromkeys(word.strip().lower() for word in words if word.strip())]

    def keywords(completions: Sequence[Any], **_: Any) -> list[float | None]:
        texts = [text_of(completion).lower() for completion in completions]
        return [min(cap, each * sum(pattern.search(text) is not None for pattern in patterns)) for text in texts]

    return keywords


def _word_pattern(word: str) -> re.Pattern[str]:
    left = r"(?<![^\W_])" if word[0].isascii() and word[0].isalnum() else ""
    right = r"(?![^\W_])" if word[-1].isascii() and word[-1].isalnum() else ""
    return re.compile(left + re.escape(word) + right, re.ASCII)


def repetition_penalty(n: int = 3, max_penalty: float = -1.0) -> RewardFunction:
    """max_penalty times the share of n-grams that repeat an earlier one: 1 - different / all; 0 below n units.

    Units are words in any case, and characters for Chinese, Japanese and Korean, for runs of more than 24 letters
    and for texts that are mostly punctuation, so that neither "spamspam..." nor "!!!!" escapes.
    """
    if n < 1 or max_penalty > 0:
        raise GruppoError(
            f"repetition_penalty({n}, {max_penalty}) needs n of at least 1 and a max_penalty of at most 0."
        )

    def repetition_penalty(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [max_penalty * _repeated_share(units_of(text_of(completion)), n) for completion in completions]

    return repetition_penalty


def _repeated_share(units: Sequence[str], n: int) -> float:
    grams = [tuple(units[k : k + n]) for k in range(len(units) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
