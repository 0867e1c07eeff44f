"""Environments of OpenEnv, behind a server: ``openenv:http://HOST:PORT``. A conversation is a
session of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any

from gruppo.http import fetch_json
from gruppo.loading import check_listed, import_extra
from gruppo.timeouts import call_with_timeout
from gruppo.types import GruppoError

FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL)
CONNECT_TIMEOUT_S = 10.0
SEEDS = 2**31
"""Seeds that NumPy's generators take, those of before 1.17 included."""
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the actions of an environment whose actions are calls of tools."""


def openenv_factory(url: str, config: Any) -> Callable[[], Any]:
    """Factory of sessions with the server at ``url``, which has to answer now."""
    name = f"openenv:{url}"
    check_listed(name)
    client = import_extra("openenv.core.generic_client", "openenv", name).GenericEnvClient
    make = partial(client, base_url=url, message_timeout_s=config.environment.timeout_s or 1e9)
    fetch = partial(fetch_json, f"{url.rstrip('/')}/schema", timeout_s=CONNECT_TIMEOUT_S)
    try:
        schema = call_with_timeout(fetch, 2 * CONNECT_TIMEOUT_S)["action"]
        if schema.get("title") not in TOOL_ACTIONS:
            return partial(OpenEnv, make, schema)
        with closing(OpenEnvTools(make, schema)) as session:
            session.reset(seed=0)
            listed = session._act({"type": "list_tools"}).observation["tools"]
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["input_schema"],
                },
            }
            for tool in listed
        ]
    except Exception as problem:
        raise GruppoError(f"""{name} does not answer as a server of OpenEnv ({problem!s:.200}).
            Start its server, or correct the address, as in
            openenv:http://127.0.0.1:8000.""") from problem
    return partial(type("OpenEnvTools", (OpenEnvTools,), {"tools": tools}), make, schema)


class OpenEnvSession:
    """A session with a server, rewarded by the sum over its steps."""

    _failure: Exception | None = None

    def __init__(self, make: Callable[[], Any], schema: Mapping[str, Any]) -> None:
        self.rewards: list[float | None] = []
        """The reward of each step; None if it has none."""
        self._schema, self._client = schema, make().sync()

    def reset(self, seed: int, reset: Mapping[str, Any] | None = None) -> str:
        """Open the session. A column ``reset`` of the data has further arguments of the
        environment's own reset."""
        self._client.connect()
        observation = self._client.reset(**{"seed": seed % SEEDS, **(reset or {})}).observation
        self._socket = self._client.async_client._ws
        text = _text(observation)
        return f"\n\n{text}" if text else ""  # appended to the prompt's last message

    def close(self) -> None:
        self._client.close()

    def get_reward(self) -> float | None:
        """The sum; raises the failure of the server, so that the episode has no score."""
        if self._failure is not None:
            raise self._failure
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) if scored else None

    def _act(self, action: Mapping[str, Any]) -> Any:
        """The result of an action, whose reward is kept."""
        try:
            result = self._client.step(action)
            # the client reconnects by itself, to an episode of its own
            if self._client.async_client._ws is not self._socket:
                raise ConnectionError("the connection to the server was lost, with the episode")
        except Exception as problem:
            if "VALIDATION_ERROR" in str(problem):  # the policy's mistake, not the server's
                raise ValueError(problem) from problem
            self._failure = problem
            raise
        self.rewards.append(None if result.reward is None else float(result.reward))
        return result


class OpenEnv(OpenEnvSession):
    """A session whose actions are answers: an action as JSON, or the value of the only field that
    it needs."""

    def reset(self, seed: int, reset: Mapping[str, Any] | None = None) -> str:
        fields = {n: value for n, value in self._schema["properties"].items() if n != "metadata"}
        how = f"Answer with an action, as JSON with the fields {as_json(fields)}."
        return f"{super().reset(seed, reset)}\n\n{how}"

    def step(self, text: str) -> str | None:
        try:
            result = self._act(self._action(text))
        except ValueError:
            self.rewards.append(0.0)
            return "That is no action: it needs a JSON object with the fields of the schema."
        return None if result.done else _text(result.observation)

    def _action(self, text: str) -> Mapping[str, Any]:
        fenced = FENCED.search(text)
        value: Any = (fenced[1] if fenced else text).strip()
        required = self._schema.get("required", ())
        field = self._schema["properties"][required[0]] if len(required) == 1 else {}
        parsed = value
        with suppress(json.JSONDecodeError, RecursionError):
            parsed = json.loads(value)
        if isinstance(parsed, dict):
            return parsed
        if len(required) != 1:
            raise ValueError
        return {required[0]: value if field.get("type") == "string" else parsed}


class OpenEnvTools(OpenEnvSession):
    """A session whose actions are calls of the server's tools (MCP)."""

    tools: list[dict[str, Any]]
    is_done = False
    """Whether the server has ended the episode."""

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The texts of the result. Raises the tool's error, which the policy reads."""
        result = self._act({"type": "call_tool", "tool_name": name, "arguments": arguments})
        self.is_done = result.done
        if error := result.observation.get("error"):
            raise RuntimeError(error["message"])
        content = (result.observation["result"] or {}).get("content", ())
        return "\n".join(part["text"] for part in content if part["type"] == "text")


def _text(observation: Mapping[str, Any]) -> str:
    """The fields of an observation that have a value; a single text as it is."""
    fields = {n: v for n, v in observation.items() if n != "metadata" and v is not None}
    if not fields:
        return ""
    first = next(iter(fields.values()))
    return first if len(fields) == 1 and isinstance(first, str) else as_json(fields)


def as_json(observation: Any) -> str:
    """An observation as JSON; arrays and numbers of NumPy as lists and numbers."""
    return json.dumps(observation, ensure_ascii=False, default=lambda value: value.tolist())
