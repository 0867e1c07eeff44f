"""Conversations with environments of verifiers 0.4, whose agents are the policy through a harness
of ours."""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from uuid import uuid4

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from gruppo.environments.verifiers import Ask
from gruppo.types import GruppoError

__all__ = ["PolicyHarness"]

ENDPOINT = vf.EvalClientConfig(base_url="http://policy.invalid")
"""Names the policy in verifiers' own settings; nothing is sent there."""
# where verifiers looks for the harness "gruppo"
sys.modules["verifiers.v1.harnesses.gruppo"] = sys.modules[__name__]
_asks: dict[str, Ask] = {}
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
        messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or ()
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in messages]}
        # loopback, without certificates: their loading takes 0.1 s
        async with httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client:
            # the trace has the answer; a refused call has stopped it, or is on it as an error
            headers = {"Authorization": f"Bearer {secret}"}
            await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class PolicyClient(vf.Client):
    """What verifiers' server calls in place of a provider."""

    async def get_response(
        self, dialect: Any, body: dict, *args: Any, **kwargs: Any
    ) -> vf.Response:
        message = {"role": "assistant", "content": await _asks[body["model"]](body["messages"])}
        raw = {
            "id": uuid4().hex,
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class Player:
    """Plays episodes of a taskset's environment, with the policy as its agent."""

    def __init__(self, taskset: Any, name: str) -> None:
        self._taskset = taskset
        self._config = vf.env_config_type(taskset.config.id)
        self._agents = [n for n, value in self._config() if isinstance(value, vf.AgentConfig)]
        if len(self._agents) != 1:
            raise GruppoError(f"""verifiers:{name} has {len(self._agents)} agents; gruppo trains
                environments of one.""")
        kind, config = taskset.task_type(), taskset.config
        if kind.NEEDS_CONTAINER or kind.toolsets(config.task) or taskset.toolsets(config):
            raise GruppoError(f"""the tasks of verifiers:{name} need a container or tool servers,
                which gruppo does not start.""")
        self._open: dict[asyncio.AbstractEventLoop, asyncio.Future[Any]] = {}
        """The environment of each event loop: another one follows after a call that blocks."""

    async def __call__(self, index: int, ask: Ask) -> float:
        """One episode: its reward. Raises what went wrong."""
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            self._open[loop] = asyncio.ensure_future(self._serve())
        env, _ = await asyncio.shield(self._open[loop])
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

    async def _serve(self) -> tuple[Any, Any]:
        """Open the environment and its server, whose model is the policy, until the process
        ends."""
        settings = {
            "taskset": self._taskset.config.model_dump(),
            "interception": {"type": "server"},
            self._agents[0]: {"harness": {"id": "gruppo"}, "runtime": {"type": "subprocess"}},
        }
        env = vf.load_environment(self._config.model_validate(settings))
        env.tasks = self._taskset.tasks
        serving = env.serving()
        await serving.__aenter__()
        env._interception.clients[ENDPOINT.model_dump_json()] = PolicyClient()
        return env, serving
