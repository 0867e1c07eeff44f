"""Environments of OpenEnv as conversations, with the package itself and a server of its own on
loopback."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.environments.adapted import said, trained

from gruppo.environments import EnvironmentClass
from gruppo.environments.openenv import openenv_factory
from gruppo.types import GruppoError

openenv = pytest.importorskip("openenv")
uvicorn = pytest.importorskip("uvicorn")

NAMES = {"__ENV_TITLE_NAME__": "Echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_NAME__": "openenv_echo"}


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """The environment that ``openenv init`` writes: it repeats what it is told, and rewards its
    length."""
    folder, template = (
        tmp_path_factory.mktemp("init"),
        Path(openenv.__file__).parent / "cli/templates/openenv_env",
    )
    for file in template.rglob("*.py"):
        place, text = str(file.relative_to(template)), file.read_text(encoding="utf-8")
        for name, own in NAMES.items():
            place, text = place.replace(name, own), text.replace(name, own)
        (folder / "openenv_echo" / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / "openenv_echo" / place).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield importlib.import_module("openenv_echo.server.openenv_echo_environment").EchoEnvironment
    sys.path.remove(str(folder))


@contextmanager
def serving(environment, sessions=64, models=None):
    """The address of a server of OpenEnv, and how many of its sessions are open."""
    from fastapi import FastAPI
    from openenv.core.env_server import HTTPEnvServer

    echo = importlib.import_module("openenv_echo.models")
    action, observation = models or (echo.EchoAction, echo.EchoObservation)
    app = FastAPI()
    sides = HTTPEnvServer(environment, action, observation, max_concurrent_envs=sessions)
    sides.register_routes(app)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", sides
    finally:
        server.should_exit = True
        thread.join(10)


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def opened(url):
    config = SimpleNamespace(environment=SimpleNamespace(timeout_s=30.0))
    return openenv_factory(url, config)


@pytest.fixture(scope="module")
def server(echo):
    with serving(echo) as (url, sides):
        yield url, sides


def test_an_answer_is_an_action_and_the_reward_that_of_the_server(server):
    with closing(opened(server[0])()) as episode:
        first = episode.reset(seed=0)
        assert first.startswith(
            '\n\n{"echoed_message": "Echo environment ready!", "message_length": 0}\n\nAnswer with'
        )
        assert (
            '"message": {"description": "Message to echo back"' in first and "metadata" not in first
        )
        assert episode.step(" hello\n") == '{"echoed_message": "hello", "message_length": 5}'
        assert episode.step('{"message": "ab"}') == '{"echoed_message": "ab", "message_length": 2}'
        assert (
            episode.step('So:\n```json\n{"message": "abc"}\n```')
            == '{"echoed_message": "abc", "message_length": 3}'
        )
        assert episode.step("12") == '{"echoed_message": "12", "message_length": 2}'
        assert episode.rewards == pytest.approx([0.5, 0.2, 0.3, 0.2])
        assert "no action" in episode.step('{"massage": "ab"}')
        assert episode.rewards[-1] == 0.0 and episode.step("a").startswith('{"echoed_message": "a"')


def test_a_session_is_open_from_reset_to_close(server):
    url, sides = server
    episodes = [opened(url)() for _ in range(3)]
    assert sides.active_sessions == 0
    for episode in episodes:
        episode.reset(seed=0)
    assert sides.active_sessions == 3
    for episode in episodes:
        episode.close()
    wait_for(lambda: sides.active_sessions == 0)
    assert not any(thread.name.startswith("openenv-sync") for thread in threading.enumerate())


def test_a_server_that_is_full_or_gone_or_started_again_is_an_error(echo):
    with serving(echo, sessions=1) as (url, _):
        make = opened(url)
        with closing(make()) as first, closing(make()) as second:
            first.reset(seed=0)
            with pytest.raises(RuntimeError, match="capacity"):
                second.reset(seed=0)
            # as by a proxy: the client connects again, to an episode that nobody reset
            first._client.disconnect()
            with pytest.raises(ConnectionError, match="with the episode"):
                first.step("a")
            assert first.rewards == []
    with closing(make()) as late, pytest.raises(ConnectionError, match="Failed to connect"):
        late.reset(seed=0)


def test_an_address_without_a_server_of_openenv_is_one_line(server):
    for url in ("http://127.0.0.1:9", "127.0.0.1:8000", f"{server[0]}/docs"):
        with pytest.raises(GruppoError, match="as in openenv:http") as error:
            opened(url)
        assert url in str(error.value) and "\n" not in str(error.value)


def test_tools_of_a_server_are_tools_of_the_conversation(echo):
    from fastmcp import FastMCP
    from openenv.core.env_server import (
        CallToolAction,
        CallToolObservation,
        MCPEnvironment,
        Observation,
        State,
    )

    class Calculator(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = property(lambda self: State())

        def __init__(self):
            server = FastMCP("calculator")

            @server.tool
            def divide(a: int, b: int) -> float:
                """Divide two numbers."""
                return a / b

            super().__init__(server)

        def reset(self, seed=None, episode_id=None):
            return Observation()

        def _step_impl(self, action, timeout_s=None):
            raise NotImplementedError

        async def step_async(self, action, timeout_s=None):
            result = await super().step_async(action, timeout_s)
            if not isinstance(action, CallToolAction):
                return result
            is_over = action.arguments.get("a") == 9
            return result.model_copy(update={"reward": float(is_over), "done": is_over})

    with serving(Calculator, models=(CallToolAction, CallToolObservation)) as (url, _):
        made = EnvironmentClass(opened(url))
        assert [tool["function"]["name"] for tool in made.tools] == ["divide"]
        assert made.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
        with closing(made.factory()) as episode:
            assert episode.reset(seed=0) == ""
            assert episode.call_tool("divide", {"a": 6, "b": 4}) == "1.5" and not episode.is_done
            with pytest.raises(RuntimeError, match="division by zero"):
                episode.call_tool("divide", {"a": 6, "b": 0})
            assert float(episode.call_tool("divide", {"a": 9, "b": 3})) == 3 and episode.is_done
            assert episode.get_reward() == 1.0
    with closing(made.factory()) as late, pytest.raises(ConnectionError):
        late.reset(seed=0)


def test_ten_steps_are_trained_and_the_rewards_are_those_of_the_server(server, tmp_path):
    url, sides = server
    changes = {"rollout__stop": ("s", "t"), "rollout__max_new_tokens": 12}
    metrics, rows = trained(tmp_path, environment=f"openenv:{url}", **changes)
    assert len(metrics) == 10 and len(rows) == 120
    for row in rows:
        # the environment rewards the length of what it is told, which has no spaces around it
        assert row["reward"] == pytest.approx(
            sum(min(len(text.strip()) / 10, 1.0) for text in said(row))
        )
    assert max(len(said(row)) for row in rows) == 3
    assert all(
        own["environment/failed_count"] == own["reward/unscored_count"] == 0 for own in metrics
    )
    wait_for(lambda: sides.active_sessions == 0)
