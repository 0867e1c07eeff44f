"""What the built-in rewards read of a completion: its text, its units, its numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_UNIT = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_LONGEST_WORD = 24

_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?<![A-Za-z0-9]_)(?<![0-9][.,])"  # not inside a word or another number: H2O, 1.2.3
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
    """The text that the policy wrote: a string as it is, of a message list the assistant's messages, line by line."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, (list, tuple)) and all(isinstance(message, dict) for message in completion):
        own = [message for message in completion if message.get("role", "assistant") == "assistant"]
        return "\n".join(_content(message.get("content")) for message in own)
    raise TypeError(f"this reward reads text, and the completion is a {type(completion).__name__}")


def _content(content: Any) -> str:
    if isinstance(content, (list, tuple)):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""


def units_of(text: str) -> list[str]:
    """Words in lower case; Chinese, Japanese and Korean characters one by one.

    A run of more than 24 letters is no word and is cut into characters, and so is a text that is mostly punctuation.
    """
    visible = "".join(text.split()).lower()
    runs = _UNIT.findall(text.lower())
    if 2 * sum(map(len, runs)) < len(visible):
        return list(visible)
    return [unit for run in runs for unit in ([run] if len(run) <= _LONGEST_WORD else run)]


def numbers_in(text: str) -> list[Fraction]:
    """Every number of a text, exactly.

    Reads 1,234 and -3 and 3.0 and .5 and 1e3 and 1/2 and \\frac{1}{2}, and full-width digits. A minus right after a
    digit, a letter or a closing bracket subtracts: 5-3 is 5 and 3. Units and % are ignored; a mixed number (1 1/2)
    is two.
    """
    return [number for match in _NUMBER.finditer(_plain(text)) if (number := _fraction(match)) is not None]


def number_of(text: str) -> Fraction | None:
    """The number that a text is, as a whole; None when it is anything else. A currency sign and a % may stand by it."""
    match = _NUMBER.fullmatch(_plain(text).strip().rstrip("% ."))
    return None if match is None else _fraction(match)


def _plain(text: str) -> str:
    text = text.translate(_PLAIN).replace("{,}", ",").replace("\\,", "").replace("\\$", "$").replace("\\%", "%")
    text = _FRACTION.sub(r"\1/\2", re.sub(r"(?<=[A-Za-z0-9])(?=\\[dt]?frac)", " ", text))
    text = re.sub(r"(?<=[0-9A-Za-z)\]}])(?<![0-9][eE])-(?=[$.0-9])", " - ", text)
    return re.sub(r",(?![0-9]{3}(?![0-9]))", ", ", text)


def _fraction(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _LONGEST_NUMBER:
        return None
    whole = (match["whole"] or "0").replace(",", "")
    number = Fraction(f"{match['sign']}{whole}{match['part'] or ''}{match['power'] or ''}")
    below = int(match["below"] or 1)
    return number / below if below else None


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, braces matched; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for n, character in enumerate(text[begin:], begin):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[begin + 1 : n]
    return ""
