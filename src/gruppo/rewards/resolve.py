"""From what a user writes to a reward: a callable, a built-in's name, or a function in a file or module."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

from gruppo.loading import is_file_name, load_object
from gruppo.rewards import builtin, verifiers
from gruppo.types import DataError, GruppoError

EXAMPLES = {
    "exact_match": "exact_match",
    "numeric_match": "numeric_match",
    "regex_format": "regex_format:PATTERN",
    "length_target": "length_target:50 or length_target:50,characters",
    "keywords": "keywords:because,so or keywords for 因为, 所以, 然而, 但是",
    "repetition_penalty": "repetition_penalty or repetition_penalty:3,-1.0",
    "reasoning_gym_score": "reasoning_gym_score",
}
"""The built-in rewards, and how each is written."""


def resolve_reward(spec: Any) -> Callable[..., Any]:
    """The reward that ``spec`` means: a callable as it is, ``length_target:50``, ``file.py:name``, ``module:name``."""
    if callable(spec):
        return spec
    if not isinstance(spec, str):
        raise DataError(
            f"the reward is {spec!r:.80} ({type(spec).__name__}), which is not callable; pass a function, or a name"
            " such as exact_match or my_rewards.py:length."
        )
    name, colon, arguments = spec.strip().partition(":")
    if name in EXAMPLES:
        return _built_in(name, arguments if colon else None)
    if not colon or not (is_file_name(spec.rpartition(":")[0]) or _is_module(name)):
        raise GruppoError(_unknown(spec, name))
    reward = load_object(spec.strip())
    if not callable(reward):
        raise DataError(f"{spec} is {reward!r:.80} ({type(reward).__name__}), which is not callable; name a function.")
    return reward


def _built_in(name: str, arguments: str | None) -> Callable[..., Any]:
    try:
        return _BUILDERS[name](arguments)
    except (TypeError, ValueError) as error:
        raise GruppoError(
            f"reward {name}:{arguments or ''} is not understood ({error}); write {EXAMPLES[name]}."
        ) from None


def _plain(reward: Callable[..., Any]) -> Callable[[str | None], Callable[..., Any]]:
    def build(arguments: str | None) -> Callable[..., Any]:
        if arguments is not None:
            raise ValueError("it takes no arguments")
        return reward

    return build


def _regex_format(pattern: str | None) -> Callable[..., Any]:
    if not pattern:
        raise ValueError("it needs a pattern")
    return builtin.regex_format(pattern)


def _length_target(arguments: str | None) -> Callable[..., Any]:
    target, *unit = _split(arguments)
    return builtin.length_target(int(target), *unit)


def _keywords(arguments: str | None) -> Callable[..., Any]:
    return builtin.keywords() if arguments is None else builtin.keywords(_split(arguments))


def _repetition_penalty(arguments: str | None) -> Callable[..., Any]:
    if arguments is None:
        return builtin.repetition_penalty()
    n, *penalty = _split(arguments)
    return builtin.repetition_penalty(int(n), *map(float, penalty))


def _reasoning_gym_score(arguments: str | None) -> Callable[..., Any]:
    verifiers.require_reasoning_gym()
    return _plain(verifiers.reasoning_gym_score)(arguments)


def _split(arguments: str | None) -> list[Any]:
    parts = [part.strip() for part in re.split(r"[,\uff0c\u3001]", arguments or "")]
    if not all(parts):
        raise ValueError("an argument is missing")
    return parts


_BUILDERS: dict[str, Callable[[str | None], Callable[..., Any]]] = {
    "exact_match": _plain(builtin.exact_match),
    "numeric_match": _plain(builtin.numeric_match),
    "regex_format": _regex_format,
    "length_target": _length_target,
    "keywords": _keywords,
    "repetition_penalty": _repetition_penalty,
    "reasoning_gym_score": _reasoning_gym_score,
}


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _unknown(spec: str, name: str) -> str:
    nearest = difflib.get_close_matches(name, EXAMPLES, n=1)
    guess = f" Did you mean {nearest[0]}?" if nearest else ""
    return (
        f"there is no reward {spec!r}; the built-in ones are {', '.join(EXAMPLES)}.{guess} For your own function write"
        " path/to/file.py:name or package.module:name."
    )
