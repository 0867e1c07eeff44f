"""Built-in rewards of texts, in TRL's calling convention: each can be passed to TRL's trainer as it
is.

Each docstring states what a policy can gain by cheating. None pays a cheat more than an honest
answer; where a cheat can earn as much (length, keywords, format), combine the reward with one that
reads the answer.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any, Literal

from gruppo.errors import GruppoError
from gruppo.loading import import_extra

RewardFunction = Callable[..., list[float | None]]
LogMetric = Callable[[str, float], None] | None  # as TRL passes it; None in a call of your own
COHERENCE_WORDS = ("因为", "所以", "然而", "但是")


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the completion, stripped, is the answer, stripped; else 0. An empty answer is not
    scored.

    Nothing but the answer passes, so listing candidates scores 0.
    """
    return [
        None
        if gold is None or not str(gold).strip()
        else float(text_of(completion).strip() == str(gold).strip())
        for completion, gold in zip(completions, answer, strict=True)
    ]


def numeric_match(
    completions: Sequence[Any], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1 where the completion's number equals the answer's, exactly (3.0 is 3, 1/2 is 0.5, 0.33 is
    not 1/3); else 0.

    The completion's number is that of its last \\boxed{}, which has to hold one number alone, else
    its last number. So a list of candidates commits to its last entry, and a list inside the box to
    nothing. The answer has to be a number as a whole ("1,234", "$5", or what follows "####" as in
    GSM8K); any other is not scored.
    """
    scores: list[float | None] = [None] * len(completions)
    for n, (completion, gold) in enumerate(zip(completions, answer, strict=True)):
        inside = boxed(str(gold))
        whole = _plain(str(gold).rpartition("####")[2] if inside is None else inside)
        match = _NUMBER.fullmatch(whole.strip().rstrip("% ."))  # a currency sign is in the pattern
        expected = match and _fraction(match)
        if expected is not None:  # None and True, as texts, are no numbers either
            text = text_of(completion)
            inside = boxed(text)
            numbers = numbers_in(text)[-1:] if inside is None else numbers_in(inside)
            scores[n] = float(len(numbers) == 1 and numbers[0] == expected)
    return scores


_TAG = re.compile(r"</?[A-Za-z][\w-]*>")


def math_verify(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where math-verify finds the completion's answer equal to the row's, as formulas or sets;
    else 0.

    The completion's answer is its last \\boxed{}, else a formula in LaTeX, else a number. The row's
    answer is LaTeX, with or without $, a number, or what follows "####"; one that cannot be read as
    either is not scored. A list in the box is a set, and equals no number.
    """
    library = import_extra("math_verify", "math", "math_verify")
    for name in ("parser", "grader"):  # they warn of the missing timeouts
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    # Its own timeouts set signals and count as wrong answers. Here a call without an answer in time
    # is not scored.
    parse = partial(library.parse, parsing_timeout=None, fallback_mode="no_fallback")
    targets = [
        library.LatexExtractionConfig(boxed_match_priority=0),
        library.ExprExtractionConfig(),
    ]
    scores: list[float | None] = [None] * len(completions)
    for n, (completion, gold) in enumerate(zip(completions, answer, strict=True)):
        text = "" if gold is None else str(gold).rpartition("####")[2].strip()
        expected = (
            parse(text if "$" in text or "\\boxed" in text else f"${text}$", targets)
            if text
            else []
        )
        if expected:
            # a number that touches a tag is none to the library
            found = parse(_TAG.sub(r" \g<0> ", text_of(completion)), targets)
            scores[n] = float(library.verify(expected, found, timeout_seconds=None))
    return scores


def regex_format(pattern: str) -> RewardFunction:
    """1 where the whole completion, stripped, matches the pattern (``.`` matches line ends too);
    else 0.

    The whole text has to match, so a right part inside anything else scores 0. ``.*`` lets anything
    through, and nested repeats such as ``(a+)+`` can take exponential time, which only
    --scoring.isolate stops: matching does not yield to threads.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise GruppoError(
            f"regex_format got {pattern!r}, which is not a regular expression: {error}."
        ) from None

    return _per_text(
        "regex_format", lambda text: float(compiled.fullmatch(text.strip()) is not None)
    )


def length_target(
    target: int, unit: Literal["words", "characters", "actions"] = "words"
) -> RewardFunction:
    """max(0, 1 - |n - target| / target), n in words (split at spaces), visible characters or
    actions (tokens).

    Chinese has no spaces: use characters. Filler of the right length earns as much as a meaningful
    text.
    """
    if target < 1 or unit not in ("words", "characters", "actions"):
        raise GruppoError(f"""length_target({target}, {unit!r}) needs a target of at least 1 words,
            characters or actions.""")

    def length_target(
        completions: Sequence[Any], completion_ids: Sequence[Any], **_: Any
    ) -> list[float | None]:
        texts = (
            [text_of(completion).split() for completion in completions] if unit != "actions" else []
        )
        counts: Iterable[int] = map(len, completion_ids if unit == "actions" else texts)
        if unit == "characters":  # zero-width characters are not printable and do not count
            counts = (sum(c.isprintable() for word in words for c in word) for words in texts)
        return [max(0.0, 1.0 - abs(n - target) / target) for n in counts]

    return length_target


def keywords(
    words: Sequence[str] = COHERENCE_WORDS, each: float = 0.2, cap: float = 1.0
) -> RewardFunction:
    """``each`` for every different word that occurs, up to ``cap``.

    A word counts once, however often it is repeated, and words of letters only as whole words ("so"
    not in "also"). A bare list of all the words earns as much as an honest text with all of them,
    never more.
    """
    if isinstance(words, str) or not [word for word in words if word.strip()]:
        raise GruppoError(
            f"keywords got {words!r}; it needs a list of words such as ['because', 'so']."
        )
    patterns = []
    for word in dict.fromkeys(word.strip().lower() for word in words if word.strip()):
        left = r"(?<![^\W_])" if word[0].isascii() and word[0].isalnum() else ""
        right = r"(?![^\W_])" if word[-1].isascii() and word[-1].isalnum() else ""
        patterns.append(re.compile(left + re.escape(word) + right, re.ASCII))

    count = lambda text: sum(pattern.search(text.lower()) is not None for pattern in patterns)  # noqa: E731
    return _per_text("keywords", lambda text: min(cap, each * count(text)))


def repetition_penalty(n: int = 3, max_penalty: float = -1.0) -> RewardFunction:
    """max_penalty times the share of n-grams that repeat an earlier one: 1 - different / all; 0
    below n units.

    Units are words in any case, and characters for Chinese, Japanese and Korean, for runs of more
    than 24 letters and for texts that are mostly punctuation, so that neither "spamspam..." nor
    "!!!!" escapes.
    """
    if n < 1 or max_penalty > 0:
        raise GruppoError(
            f"repetition_penalty({n}, {max_penalty}) needs n from 1 on and a max_penalty of at "
            f"most 0."
        )

    def score(text: str) -> float:
        units = units_of(text)
        grams = [tuple(units[k : k + n]) for k in range(len(units) - n + 1)]
        return max_penalty * (1.0 - len(set(grams)) / len(grams) if grams else 0.0)

    return _per_text("repetition_penalty", score)


def _per_text(name: str, score: Callable[[str], float | None]) -> RewardFunction:
    """Reward function of this name that scores the text of each completion."""

    def reward(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [score(text_of(completion)) for completion in completions]

    reward.__name__ = name
    return reward


# --- parsing --------------------------------------------------------------------------------------

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_UNIT = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_LONGEST_WORD = 24

_NUMBER = re.compile(
    # not inside a word or another number: H2O, 1.2.3
    r"(?<![A-Za-z0-9])(?<![A-Za-z0-9]_)(?<![0-9][.,])"
    r"(?P<sign>[-+]?)[$€£¥]?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++(?!_[0-9])|(?<!\.)(?=\.[0-9]))"
    r"(?P<part>\.[0-9]+)?(?P<power>[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"(?:/(?P<below>[0-9]+)(?![./]?[0-9]))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_FULL_WIDTH = "".join(map(chr, range(0xFF10, 0xFF1A))) + "\uff0d\u2212\uff0e\uff0f"
_PLAIN = str.maketrans(_FULL_WIDTH, "0123456789--./", "\u2009\u202f")
_LONGEST_NUMBER = 100


def text_of(completion: Any) -> str:
    """Return the text that the policy wrote: a string, or the assistant's messages joined by line
    ends."""
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, (list, tuple)) or not all(
        isinstance(message, dict) for message in completion
    ):
        raise TypeError(
            f"this reward reads text, and the completion is a {type(completion).__name__}"
        )
    texts = []
    for message in completion:
        if message.get("role", "assistant") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, (list, tuple)):
                content = "".join(
                    part.get("text") or "" for part in content if isinstance(part, dict)
                )
            texts.append(content)
    return "\n".join(texts)


def units_of(text: str) -> list[str]:
    """Split into lower-case words; Chinese, Japanese and Korean into characters.

    A run of more than 24 letters is not a word and is split into characters, as is a text that is
    mostly punctuation.
    """
    visible = "".join(text.split()).lower()
    runs = _UNIT.findall(text.lower())
    if 2 * sum(map(len, runs)) < len(visible):
        return list(visible)
    return [unit for run in runs for unit in ([run] if len(run) <= _LONGEST_WORD else run)]


def numbers_in(text: str) -> list[Fraction]:
    """Extract every number of a text, exactly.

    Reads 1,234 and -3 and 3.0 and .5 and 1e3 and 1/2 and \\frac{1}{2}, and full-width digits. A
    minus right after a digit, a letter or a closing bracket subtracts: 5-3 is 5 and 3. Units and %
    are ignored; a mixed number (1 1/2) is two.
    """
    fractions = map(_fraction, _NUMBER.finditer(_plain(text)))
    return [number for number in fractions if number is not None]


def _plain(text: str) -> str:
    """Normalize numbers: ASCII digits, no LaTeX, spaces around a minus that subtracts."""
    text = text.translate(_PLAIN)
    for old, new in (("{,}", ","), ("\\,", ""), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(old, new)
    text = _FRACTION.sub(r"\1/\2", re.sub(r"(?<=[A-Za-z0-9])(?=\\[dt]?frac)", " ", text))
    text = re.sub(r"(?<=[0-9A-Za-z)\]}])(?<![0-9][eE])-(?=[$.0-9])", " - ", text)
    return re.sub(r",(?![0-9]{3}(?![0-9]))", ", ", text)


def _fraction(match: re.Match[str]) -> Fraction | None:
    if (
        len(match[0]) > _LONGEST_NUMBER
    ):  # exact arithmetic on long numbers is slow, and a policy can write long ones
        return None
    whole = (match["whole"] or "0").replace(",", "")
    number = Fraction(f"{match['sign']}{whole}{match['part'] or ''}{match['power'] or ''}")
    below = int(match["below"] or 1)
    return number / below if below else None


def boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, braces matched; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for n, character in enumerate(text[begin:], begin):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[begin + 1 : n]
    return ""


# --- verifiers of other libraries -----------------------------------------------------------------

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EVALUATES = re.compile(r"\b(eval|parse_expr|sympify)\(")
_LEAF = (ast.Expression, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.unaryop)
_LITERAL = (*_LEAF, ast.List, ast.Tuple)
_FORMULA = (*_LEAF, ast.BinOp, ast.Call, ast.operator)
_FUNCTIONS = set(
    "sin cos tan exp log ln sqrt asin acos atan sinh cosh tanh Abs".split()  # noqa: SIM905
)
_LONGEST_FORMULA = 500


def reasoning_gym_score(
    completions: Sequence[Any], entry: Sequence[Any], **_: Any
) -> list[float | None]:
    """Score by reasoning-gym's own verifier, usually 0 to 1; ``entry`` is an item of its data set,
    with metadata.

    The answer is the last <answer>...</answer> of the completion, else the whole text, stripped.
    Some of its verifiers pass the answer to ``eval``: there, an answer that is more than a list or
    a small formula counts as no answer, since no verifier may run what a model wrote. A row without
    an entry is not scored.
    """
    scores: list[float | None] = [None] * len(entry)
    for n, (completion, item) in enumerate(zip(completions, entry, strict=True)):
        if item is not None:
            text = text_of(completion)
            answer = (_ANSWER.findall(text) or [text])[-1].strip()
            verify, evaluator = _verifier(item["metadata"]["source_dataset"])
            is_safe = evaluator is None or is_harmless(answer, evaluator)
            scores[n] = float(verify(answer if is_safe else None, item))
    return scores


@cache
def _verifier(dataset: str) -> tuple[Callable[[str | None, Any], float], str | None]:
    """Return the verifier of a data set and the evaluator, found in its source, that it passes
    answers to."""
    library = import_extra("reasoning_gym", "tasks", "reasoning_gym_score")
    verify = library.get_score_answer_fn(dataset)
    evaluator = _EVALUATES.search(inspect.getsource(verify))
    return verify, evaluator and evaluator[1]


def is_harmless(answer: str, evaluator: str) -> bool:
    """Whether evaluating the answer can neither call anything but a mathematical function nor take
    long.

    ``evaluator``: "eval" for literals, or one of sympy's parsers for formulas.
    """
    try:
        nodes = list(ast.walk(ast.parse(answer, mode="eval")))
    except SyntaxError:
        # eval refuses it as well; sympy's parser knows more than Python's
        return evaluator == "eval"
    except (ValueError, RecursionError, MemoryError):
        return False
    if evaluator == "eval":
        return all(isinstance(node, _LITERAL) for node in nodes)
    return len(answer) <= _LONGEST_FORMULA and all(map(_is_formula, nodes))


def _is_formula(node: ast.AST) -> bool:
    """Whether a node is allowed in a formula; its parts are checked by themselves."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, (int, float)) and abs(value) < 1e12
        case ast.Name(id=name):
            return "_" not in name
        case ast.Call(func=func, keywords=keywords):
            return isinstance(func, ast.Name) and func.id in _FUNCTIONS and not keywords
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            # An exponent holds numbers up to 64 or names (e**x), and no power or product; the base
            # holds no power.
            parts = list(ast.walk(exponent))
            numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
            is_small = all(isinstance(x, (int, float)) and abs(x) <= 64 for x in numbers)
            deep = [part for part in parts if isinstance(part, (ast.Pow, ast.Mult, ast.Call))]
            towers = [part for part in ast.walk(base) if isinstance(part, ast.Pow)]
            return is_small and not deep and not towers
    return isinstance(node, _FORMULA) and not isinstance(node, (ast.LShift, ast.RShift))
