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
    try:
        fetch = partial(fetch_json, f"{url.rstrip('/')}/schema", timeout_s=CONNECT_TIMEOUT_S)
        schema = call_with_timeout(fetch, 2 * CONNECT_TIMEOUT_S)["action"]
        if schema.get("title") not in TOOL_ACTIONS:
            return partial(OpenEnv, make, schema)
        with closing(OpenEnvTools(make, schema)) as session:
            session.reset(seed=0)
            listed = session._act({"type": "list_tools"}).observation["tools"]
        functions = [
            {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
            for t in listed
        ]
    except Exception as problem:
        raise GruppoError(f"""{name} does not answer as a server of OpenEnv ({problem!s:.200}).
            Start its server, or correct the address, as in
            openenv:http://127.0.0.1:8000.""") from problem
    tools = [{"type": "function", "function": function} for function in functions]
    return partial(type("OpenEnvTools", (OpenEnvTools,), {"tools": tools}), make, schema)


class OpenEnvSession:
    """A session with a server. Steps without a reward are unscored."""

    def __init__(self, make: Callable[[], Any], schema: Mapping[str, Any]) -> None:
        self.rewards: list[float | None] = []
        self._schema = schema
        self._client = make().sync()

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

    def _act(self, action: Mapping[str, Any]) -> Any:
        """The result of an action, whose reward is kept."""
        result = self._client.step(action)
        # the client reconnects by itself, to an episode of its own
        if self._client.async_client._ws is not self._socket:
            raise ConnectionError("the connection to the server was lost, and the episode with it")
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
        fenced = FENCED.search(text)
        action: Any = (fenced[1] if fenced else text).strip()
        required = self._schema.get("required", ())
        is_text = False
        if len(required) == 1:
            is_text = self._schema["properties"][required[0]].get("type") == "string"
        value = action
        with suppress(json.JSONDecodeError, RecursionError):
            value = json.loads(action)
        if not isinstance(value, dict) and len(required) == 1:
            value = {required[0]: action if is_text else value}
        try:
            if not isinstance(value, dict):
                raise RuntimeError("VALIDATION_ERROR: it needs a JSON object")
            result = self._act(value)
        except RuntimeError as problem:
            if not _is_policys(problem):
                raise
            self.rewards.append(0.0)
            return "That is no action: it needs a JSON object with the fields of the schema."
        return None if result.done else _text(result.observation)

    def get_turn_rewards(self) -> list[float | None]:
        return self.rewards


class OpenEnvTools(OpenEnvSession):
    """A session whose actions are calls of the server's tools (MCP), rewarded by their sum: they
    are not answers, of which there may be fewer."""

    tools: list[dict[str, Any]]
    is_done = False
    """Whether the server has ended the episode."""
    _failure: Exception | None = None

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The texts of the result. Raises the tool's error, which the policy reads."""
        try:
            result = self._act({"type": "call_tool", "tool_name": name, "arguments": arguments})
        except Exception as problem:
            if not _is_policys(problem):
                self._failure = problem  # of the server, not of the tool
            raise
        self.is_done = result.done
        if error := result.observation.get("error"):
            raise RuntimeError(error["message"])
        content = (result.observation["result"] or {}).get("content", ())
        return "\n".join(part["text"] for part in content if part["type"] == "text")

    def get_reward(self) -> float | None:
        """The sum; raises the failure of the server, so that the episode has no score."""
        if self._failure is not None:
            raise self._failure
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) if scored else None


def _is_policys(problem: Exception) -> bool:
    """Whether the server refused an action; any other error is the environment's."""
    return "VALIDATION_ERROR" in str(problem)


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
