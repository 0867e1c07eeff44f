"""Conversations with environments of verifiers 0.4, whose agents are the policy through a harness
of ours."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from gruppo.types import GruppoError

__all__ = ["PolicyHarness"]

ENDPOINT = vf.EvalClientConfig(base_url="http://policy.invalid")
"""Names the policy in verifiers' own settings; nothing is sent there."""
sys.modules["verifiers.v1.harnesses.gruppo"] = sys.modules[
    __name__
]  # where verifiers looks for the harness "gruppo"
_asks: dict[str, Callable[..., Awaitable[str]]] = {}
"""How to ask the policy, by the name of the model, which is another one in each conversation."""


class PolicyHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for one message, in this process; the call goes through verifiers' own server, which
    enforces its rules."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = (
            [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
        )
        messages = [vf.SystemMessage(content=system), *messages] if system else messages
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in messages]}
        # loopback, without certificates: their loading takes 0.1 s
        async with httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client:
            # the trace has the answer; a refused call has stopped it, or is on it as an error
            await client.post(
                f"{endpoint}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class PolicyClient(vf.Client):
    """What verifiers' server calls in place of a provider."""

    async def get_response(
        self, dialect: Any, body: dict, *args: Any, **kwargs: Any
    ) -> vf.Response:
        message = {"role": "assistant", "content": await _asks[body["model"]](body["messages"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        raw = {
            "id": uuid4().hex,
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def open_environment(taskset: Any, name: str) -> Any:
    """The environment of a taskset, with the policy as its agent."""
    config = vf.env_config_type(taskset.config.id)
    agents = [field for field, value in config() if isinstance(value, vf.AgentConfig)]
    if len(agents) != 1:
        raise GruppoError(
            f"{name} has the agents {', '.join(agents)}; gruppo trains environments of one agent."
        )
    kind = taskset.task_type()
    if (
        kind.NEEDS_CONTAINER
        or kind.toolsets(taskset.config.task)
        or taskset.toolsets(taskset.config)
    ):
        need = "a container" if kind.NEEDS_CONTAINER else "tool servers"
        raise GruppoError(f"the tasks of {name} need {need}, which gruppo does not start.")
    seat = {"harness": {"id": "gruppo"}, "runtime": {"type": "subprocess"}}
    settings = {
        "taskset": taskset.config.model_dump(),
        "interception": {"type": "server"},
        agents[0]: seat,
    }
    env = vf.load_environment(config.model_validate(settings))
    env.tasks = taskset.tasks
    return env


@asynccontextmanager
async def serving(env: Any) -> AsyncIterator[None]:
    """The environment with its server, whose model is the policy."""
    async with env.serving():
        env._interception.clients[ENDPOINT.model_dump_json()] = PolicyClient()
        yield


async def play(
    env: Any, index: int, ask: Callable[..., Awaitable[str]]
) -> tuple[float, dict[str, float]]:
    """One episode: its reward, and the numbers that it is made of. Raises what went wrong."""
    model = uuid4().hex
    _asks[model] = ask
    try:
        episode = await env.run_episode(
            env.tasks[index], vf.ModelContext(model=model, client=ENDPOINT)
        )
    finally:
        del _asks[model]
    if not episode.ok:
        errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
        raise RuntimeError(
            "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed"
        )
    (trace,) = episode.traces
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        raise RuntimeError(f"no score: {', '.join(unscored) or 'the task has no reward'}")
    return trace.reward, {
        **trace.metrics,
        **{name: reward.score for name, reward in trace.rewards.items()},
    }
