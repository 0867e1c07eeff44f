"""A tool: the model learns to call a calculator on products that it cannot do in its head."""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from typing import Any

from gruppo.config import schema
from gruppo.config.schema import Config
from gruppo.data.source import hash_unit

QUESTIONS = (
    "What is {a} * {b}?",
    "Calculate {a} times {b}.",
    "Multiply {a} by {b}.",
    "A box holds {a} pens. How many pens are in {b} boxes?",
    "A ticket costs {a} euros. What do {b} tickets cost?",
    "A hall has {b} rows of {a} seats. How many seats does it have?",
)
COUNT = 1500
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def tool_calculator() -> Config:
    """SmolLM2-135M-Instruct learns to call a calculator on products such as 473 * 86, which it cannot do itself.

    Its own chat template ignores tools, and it never calls one: three steps of 8 demonstrations show calls, GRPO does
    the rest, with reward 1 if the last message is the product and nothing else. One of 2 CPU cores, beside other jobs:
    5 minutes of processor time. Sampled reward 0.22 at step 4, 0.47 at step 5, 0.88 at step 10; held out, played
    greedily, from 0 to 48 of 48 (three seeds). After six steps of demonstrations 32 of 32 samples are right at once.
    Without the tool (--environment.tools --supervised.column answer) none of 384 samples is, in 12 steps of GRPO.
    """
    return Config(
        model="smollm2-135m",
        data=f"{__file__}:products",
        reward=("gruppo.recipes.calculator:right",),
        steps=10,
        rollout=schema.RolloutConfig(prompts=4, group_size=8, max_new_tokens=64),
        optim=schema.OptimConfig(lr=1.2e-5),
        stages=(
            schema.Stage(name="supervised", steps=3, rl_coef=0.0, sup_coef=1.0, lr=1e-4, warmup_steps=3),
            schema.Stage(name="full", warmup_steps=3),
        ),
        supervised=schema.SupervisedConfig(column="demonstration", batch=8),
        environment=schema.EnvironmentConfig(tools=("gruppo.recipes.calculator:calculator",)),
        prompts=schema.PromptsConfig(chat_template="chatml-tools", held_out_fraction=0.2),
        evaluation=schema.EvaluationConfig(prompts=48, every=10),
        saving=schema.SavingConfig(every=10, keep=1),
    )


def calculator(expression: str) -> str:
    """Calculates exactly.

    Args:
        expression: Integers, + - * and brackets.
    """
    try:
        tree = ast.parse(expression[:100].strip(), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, ValueError):
        raise ValueError(f"{expression[:100]!r} is not an expression of integers, + - * and brackets.") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


def products() -> list[dict[str, Any]]:
    """Questions for the product of a number below 1000 and one below 100, each with a demonstration of the tool."""
    rows = []
    for n in range(COUNT):
        a, b = 101 + int(899 * hash_unit(f"{n} a")), 12 + int(88 * hash_unit(f"{n} b"))
        question = QUESTIONS[n % len(QUESTIONS)].format(a=a, b=b)
        call = {"name": "calculator", "arguments": {"expression": f"{a} * {b}"}}
        shown = [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "calculator", "content": str(a * b)},
            {"role": "assistant", "content": str(a * b)},
        ]
        prompt = [{"role": "user", "content": question}]
        rows.append({"prompt": prompt, "answer": str(a * b), "demonstration": shown})
    return rows


def right(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last message is the answer and nothing else, else 0. A call is no answer."""
    last = [messages[-1] for messages in completions]
    return [
        float("tool_calls" not in message and message["content"].strip() == gold)
        for message, gold in zip(last, answer, strict=True)
    ]
