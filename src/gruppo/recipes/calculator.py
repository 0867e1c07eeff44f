"""A tool: the model learns to call a calculator on products that it cannot do in its head."""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from typing import Any

from gruppo.config.schema import (
    Config,
    EnvironmentConfig,
    EvaluationConfig,
    OptimConfig,
    PromptsConfig,
    RolloutConfig,
    SavingConfig,
    Stage,
    SupervisedConfig,
)
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
    """SmolLM2-135M-Instruct learns to call a calculator on products such as 473 * 86, which it
    cannot do itself.

    Its own chat template ignores tools, and it never calls one: three steps of 8 demonstrations
    show calls, GRPO does the rest, with reward 1 if the last message is the product and nothing
    else. One of 2 CPU cores, beside other jobs: 5 minutes of processor time. Sampled reward 0.22 at
    step 4, 0.47 at step 5, 0.88 at step 10; held out, played greedily, from 0 to 48 of 48 (three
    seeds). After six steps of demonstrations 32 of 32 samples are right at once. Without the tool
    (--environment.tools --supervised.column answer) none of 384 samples is, in 12 steps of GRPO.
    """
    return Config(
        model="smollm2-135m",
        data=f"{__file__}:products",
        reward=("gruppo.recipes.calculator:right",),
        steps=10,
        rollout=RolloutConfig(prompts=4, group_size=8, max_new_tokens=64),
        optim=OptimConfig(lr=1.2e-5),
        # With six steps, demonstrations alone are enough and GRPO has nothing left to learn
        # (docs/dev/lab.md).
        stages=(
            Stage(name="supervised", steps=3, rl_coef=0.0, sup_coef=1.0, lr=1e-4, warmup_steps=3),
            Stage(name="full", warmup_steps=3),
        ),
        supervised=SupervisedConfig(column="demonstration", batch=8),
        environment=EnvironmentConfig(tools=("gruppo.recipes.calculator:calculator",)),
        # The model's own template drops tools, and with them every call that a demonstration shows.
        prompts=PromptsConfig(chat_template="chatml-tools", held_out_fraction=0.2),
        evaluation=EvaluationConfig(prompts=48, every=10),
        saving=SavingConfig(every=10, keep=1),
    )


def calculator(expression: str) -> str:
    """Calculates exactly.

    Args:
        expression: Integers, + - * and brackets.
    """
    try:  # never eval: the expression is written by the policy
        tree = ast.parse(expression[:100].strip(), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, ValueError):
        raise ValueError(
            f"{expression[:100]!r} is not an expression of integers, + - * and brackets."
        ) from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


def products() -> list[dict[str, Any]]:
    """Questions for the product of a number below 1000 and one below 100, each with a demonstration
    of the tool."""
    rows = []
    for n in range(COUNT):
        # Hashes of the number, not a generator: the same on every machine and version of Python.
        a, b = 101 + int(899 * hash_unit(f"{n} a")), 12 + int(88 * hash_unit(f"{n} b"))
        question, product = QUESTIONS[n % len(QUESTIONS)].format(a=a, b=b), str(a * b)
        rows.append(
            with_one_call(question, "calculator", {"expression": f"{a} * {b}"}, product, product)
        )
    return rows


def with_one_call(
    question: str, tool: str, arguments: dict[str, str], result: str, answer: str
) -> dict[str, Any]:
    """A row with a question, its answer, and a demonstration that calls a tool once."""
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    demonstration = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool, "content": result},
        {"role": "assistant", "content": answer},
    ]
    return {
        "prompt": [{"role": "user", "content": question}],
        "answer": answer,
        "demonstration": demonstration,
    }


def right(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last message is the answer and nothing else, else 0. A call is no answer."""
    last = [messages[-1] for messages in completions]
    # A row that ran out of tokens ends with a call, whose text may be the answer.
    return [
        float("tool_calls" not in message and message["content"].strip() == gold)
        for message, gold in zip(last, answer, strict=True)
    ]
