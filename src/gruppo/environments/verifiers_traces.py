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
        messages = [vf.SystemMessage(content=system)] if system else []
        if isinstance(prompt, str):
            messages.append(vf.UserMessage(content=prompt))
        else:
            messages += prompt or ()
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
        raise GruppoError(f"{name} has {len(agents)} agents; gruppo trains environments of one.")
    kind = taskset.task_type()
    toolsets = (*kind.toolsets(taskset.config.task), *taskset.toolsets(taskset.config))
    if kind.NEEDS_CONTAINER or toolsets:
        raise GruppoError(f"""the tasks of {name} need a container or tool servers, which gruppo
            does not start.""")
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


async def play(env: Any, index: int, ask: Callable[..., Awaitable[str]]) -> float:
    """One episode: its reward. Raises what went wrong."""
    model = uuid4().hex
    _asks[model] = ask
    try:
        context = vf.ModelContext(model=model, client=ENDPOINT)
        episode = await env.run_episode(env.tasks[index], context)
    finally:
        del _asks[model]
    if not episode.ok:
        errors = [error for part in (*episode.traces, episode) for error in part.errors]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    (trace,) = episode.traces
    if not trace.rewards or None in trace.rewards.values():
        raise RuntimeError(f"no score, but {trace.rewards}")
    return trace.reward
