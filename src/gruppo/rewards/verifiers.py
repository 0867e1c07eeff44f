"""Verifiers of other libraries as reward functions."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from gruppo.loading import import_extra
from gruppo.rewards.text import text_of

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EVALUATES = re.compile(r"\b(eval|parse_expr|sympify)\(")
_LITERAL = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.Load)
_FORMULA = (
    ast.Expression,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.BinOp,
    ast.UnaryOp,
    ast.Call,
    ast.operator,
    ast.unaryop,
)
_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs"}
_LONGEST_FORMULA = 500


def reasoning_gym_score(completions: Sequence[Any], entry: Sequence[Any], **_: Any) -> list[float | None]:
    """reasoning-gym's own verifier, usually 0 to 1; ``entry`` is what its data set yields (question, answer, metadata).

    The answer is the last <answer>...</answer> of the completion, else the whole text, stripped. Some of its verifiers
    hand the answer to ``eval``: there, an answer that is more than a list or a small formula counts as no answer, since
    no verifier may run what a model wrote. A row without an entry is not scored.
    """
    return [
        None if item is None else _score(answer_of(text_of(completion)), item)
        for completion, item in zip(completions, entry, strict=True)
    ]


def answer_of(text: str) -> str:
    """What stands in the last <answer>...</answer>, else all of it; stripped."""
    found = _ANSWER.findall(text)
    return (found[-1] if found else text).strip()


def require_reasoning_gym() -> Any:
    """The package, or the line that installs it."""
    return import_extra("reasoning_gym", "tasks", "reasoning_gym_score")


def _score(answer: str, entry: Mapping[str, Any]) -> float:
    score, evaluator = _verifier(entry["metadata"]["source_dataset"])
    return float(score(answer if _is_harmless(answer, evaluator) else None, entry))


@cache
def _verifier(dataset: str) -> tuple[Callable[[str | None, Any], float], str | None]:
    """The verifier of a data set, and the evaluator that it hands answers to, read from its source."""
    score = require_reasoning_gym().get_score_answer_fn(dataset)
    found = _EVALUATES.search(inspect.getsource(score))
    return score, found[1] if found else None


def _is_harmless(answer: str, evaluator: str | None) -> bool:
    """Whether evaluating the answer can neither call anything but a mathematical function nor take long."""
    if evaluator is None:
        return True
    try:
        tree = ast.parse(answer, mode="eval")
    except SyntaxError:
        return evaluator == "eval"  # eval refuses it as well; sympy's parser knows more than Python's
    except (ValueError, RecursionError, MemoryError):
        return False
    nodes = list(ast.walk(tree))
    if evaluator == "eval":
        return all(isinstance(node, (*_LITERAL, ast.UnaryOp, ast.unaryop)) for node in nodes)
    return len(answer) <= _LONGEST_FORMULA and all(_is_formula(node) for node in nodes)


def _is_formula(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and abs(node.value) < 1e12
    if isinstance(node, ast.Name):
        return "_" not in node.id
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_small(node.right) and not any(isinstance(part, ast.Pow) for part in ast.walk(node.left))
    return isinstance(node, _FORMULA) and not isinstance(node, (ast.LShift, ast.RShift))


def _is_small(exponent: ast.AST) -> bool:
    """An exponent of numbers alone, none above 64, or with names (e**x); no power or product inside it."""
    parts = list(ast.walk(exponent))
    numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
    small = all(isinstance(number, (int, float)) and abs(number) <= 64 for number in numbers)
    return small and not any(isinstance(part, (ast.Pow, ast.Mult, ast.Call)) for part in parts)
