"""Conversations with environments of verifiers 0.1, which have a rubric, and whose client is the policy."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage

from gruppo.environments.verifiers import ConversationOver
from gruppo.types import GruppoError

_failures: ContextVar[list[Exception]] = ContextVar("failures")


class RubricClient(Client):
    """Asks the policy; nothing is sent."""

    setup_client = to_native_tool = to_native_prompt = None
    get_native_response = raise_from_native_response = from_native_response = None

    def __init__(self, ask: Callable[..., Awaitable[str]]) -> None:
        super().__init__(None)
        self.ask = ask

    async def get_response(self, prompt: Any, model: str, *args: Any, **kwargs: Any) -> Response:
        try:
            text = await self.ask([message.model_dump() for message in prompt])
        except ConversationOver as error:  # ends the rollout, which is then scored
            raise vf.OverlongPromptError(str(error)) from error
        message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        return Response(id="policy", created=0, model=model, message=message)

    async def close(self) -> None:
        pass


def open_environment(env: Any, name: str) -> Any:
    """The environment with rewards whose exceptions are seen: a rubric logs them, and scores 0."""
    if not isinstance(env, vf.MultiTurnEnv) or env.tool_defs or env.rubric.has_group_rewards:
        need = "a MultiTurnEnv or SingleTurnEnv without tools, whose rubric scores each rollout by itself"
        raise GruppoError(f"{name} is a {type(env).__name__}; gruppo needs {need}.")
    for rubric in getattr(env.rubric, "rubrics", [env.rubric]):
        # functions of weight 0 are metrics
        rubric.funcs = [
            recorded(fn) if weight else fn
            for fn, weight in zip(rubric.funcs, rubric.weights, strict=True)
        ]
    return env


@asynccontextmanager
async def serving(env: Any) -> AsyncIterator[None]:
    yield
    await env._teardown()


def recorded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function, with its exceptions in ``_failures``."""

    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            score = fn(*args, **kwargs)
            return float(await score if inspect.isawaitable(score) else score)
        except Exception as error:
            _failures.get().append(error)
            raise

    return call


async def play(
    env: Any, index: int, ask: Callable[..., Awaitable[str]]
) -> tuple[float, dict[str, float]]:
    """One rollout: its reward, and the scores that it is made of. Raises what went wrong."""
    failures: list[Exception] = []
    _failures.set(failures)
    state = await env.rollout(env.get_dataset()[index], RubricClient(ask), "policy", {})
    if state["error"] is None:
        await env.rubric.score_rollout(state)
    for error in filter(None, [state["error"], *failures]):
        raise error
    return float(state["reward"]), dict(state["metrics"])
