"""Environments of OpenEnv, behind a server: ``openenv:http://HOST:PORT``. A conversation is a
session of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from gruppo.http import is_loopback
from gruppo.loading import check_listed, import_extra
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
    if urlsplit(url).scheme not in ("http", "https"):
        raise GruppoError(
            f"{name} names no server; it needs an address, as in openenv:http://127.0.0.1:8000."
        )
    client = import_extra("openenv.core.generic_client", "openenv", name).GenericEnvClient
    import httpx  # a requirement of openenv

    try:
        has_proxy = not is_loopback(urlsplit(url).hostname or "")
        answer = httpx.get(
            f"{url.rstrip('/')}/schema", timeout=CONNECT_TIMEOUT_S, trust_env=has_proxy
        )
        schema = answer.raise_for_status().json()["action"]
    except httpx.TransportError as problem:
        raise GruppoError(
            f"{name}: no answer ({problem}). Start its server, or correct the address."
        ) from problem
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
        raise GruppoError(
            f"{name} answers, but not as a server of OpenEnv ({problem!r:.200})."
        ) from problem
    make = partial(client, base_url=url, message_timeout_s=config.environment.timeout_s or 1e9)
    if schema.get("title") not in TOOL_ACTIONS:
        return partial(scored_by(OpenEnv, config), make, schema)
    try:
        with closing(OpenEnvTools(make, schema)) as session:
            session.reset(seed=0)
            listed = session._take({"type": "list_tools"}).observation["tools"]
    except Exception as problem:
        raise GruppoError(
            f"{name} lists no tools: {type(problem).__name__}: {problem}"
        ) from problem
    made = scored_by(OpenEnvTools, config)
    functions = [
        {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
        for t in listed
    ]
    made.tools = [{"type": "function", "function": function} for function in functions]
    return partial(made, make, schema)


def scored_by(kind: type[OpenEnvSession], config: Any) -> Any:
    """The class with its rewards as rewards of turns if ``objective.credit`` tells turns apart.

    Calls of tools are not answers, of which there may be fewer: they are rewarded by their sum.
    """
    has_turns = config.objective.credit != "outcome" and hasattr(kind, "step")
    method = kind._turn_rewards if has_turns else kind._total_reward
    name = "get_turn_rewards" if has_turns else "get_reward"
    return type(kind.__name__, (kind,), {"__doc__": kind.__doc__, name: method})


class OpenEnvSession:
    """A session with a server.

    Steps without a reward are unscored, and so is an episode of such steps only. The failure of an
    environment is raised again, so that its episode has no score.
    """

    def __init__(self, make: Callable[[], Any], schema: Mapping[str, Any]) -> None:
        self.rewards: list[float | None] = []
        self._failure: Exception | None = None
        self._schema = schema
        self._client = make().sync()

    def _turn_rewards(self) -> list[float | None]:
        if self._failure is not None:
            raise self._failure
        return self.rewards

    def _total_reward(self) -> float | None:
        scored = [reward for reward in self._turn_rewards() if reward is not None]
        return sum(scored) if scored else None

    def reset(self, seed: int, reset: Mapping[str, Any] | None = None) -> str:
        """Open the session. A column ``reset`` of the data has further arguments of the
        environment's own reset."""
        self._client.connect()
        observation = self._client.reset(**{"seed": seed % SEEDS, **(reset or {})}).observation
        self._socket = self._client.async_client._ws
        text = self._text(observation)
        return f"\n\n{text}" if text else ""  # appended to the prompt's last message

    def close(self) -> None:
        self._client.close()

    def _take(self, action: Mapping[str, Any]) -> Any:
        """The result of an action, whose reward is kept."""
        result = self._client.step(action)
        if (
            self._client.async_client._ws is not self._socket
        ):  # it reconnects by itself, to an episode of its own
            raise ConnectionError("the connection to the server was lost, and the episode with it")
        self.rewards.append(None if result.reward is None else float(result.reward))
        return result

    def _text(self, observation: Mapping[str, Any]) -> str:
        """The fields of an observation that have a value; a single text as it is."""
        fields = {
            name: value
            for name, value in observation.items()
            if name != "metadata" and value is not None
        }
        only = next(iter(fields.values()), "") if len(fields) < 2 else None
        return only if isinstance(only, str) else as_json(fields)


class OpenEnv(OpenEnvSession):
    """A session whose actions are answers: an action as JSON, or the value of the only field that
    it needs."""

    def reset(self, seed: int, reset: Mapping[str, Any] | None = None) -> str:
        fields = {
            name: value for name, value in self._schema["properties"].items() if name != "metadata"
        }
        return (
            f"{super().reset(seed, reset)}\n\nAnswer with an action, as JSON with the fields "
            f"{as_json(fields)}."
        )

    def step(self, text: str) -> str | None:
        fenced, required = FENCED.search(text), self._schema.get("required", ())
        action = text = (fenced[1] if fenced else text).strip()
        try:
            with suppress(json.JSONDecodeError, RecursionError):
                action = json.loads(text)
            if not isinstance(
                action, dict
            ):  # as in verifiers, a text stands for the only field that is required
                if len(required) != 1:
                    raise ValueError("it needs a JSON object")
                is_text = self._schema["properties"][required[0]].get("type") == "string"
                action = {required[0]: text if is_text else action}
            result = self._take(action)
        except ValueError as problem:
            self.rewards.append(0.0)
            return f"That is no action: {problem}."
        except RuntimeError as problem:
            if "VALIDATION_ERROR" not in str(
                problem
            ):  # the policy's fault; anything else is the environment's
                raise
            self.rewards.append(0.0)
            return "That is no action: its fields are not those of the schema."
        return None if result.done else self._text(result.observation)


class OpenEnvTools(OpenEnvSession):
    """A session whose actions are calls of the server's tools (MCP)."""

    tools: list[dict[str, Any]]
    is_done = False
    """Whether the server has ended the episode."""

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The texts of the result. Raises the tool's error, which the policy reads."""
        try:
            result = self._take({"type": "call_tool", "tool_name": name, "arguments": arguments})
        except Exception as problem:
            if "VALIDATION_ERROR" not in str(
                problem
            ):  # of the server, not of the tool: the score raises it
                self._failure = problem
            raise
        self.is_done = result.done
        if error := result.observation.get("error"):
            raise RuntimeError(error["message"])
        content = (result.observation["result"] or {}).get("content", ())
        return "\n".join(part["text"] for part in content if part["type"] == "text")


def as_json(observation: Any) -> str:
    """An observation as JSON; arrays and numbers of NumPy as lists and numbers."""
    return json.dumps(observation, ensure_ascii=False, default=lambda value: value.tolist())
