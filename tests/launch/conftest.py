"""Servers of these tests are small ones of ours, in place of vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.launch.launches import fake_server

from gruppo.launch import commands


@pytest.fixture(scope="module", autouse=True)
def fake_servers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands.Launch, "server_command", fake_server)
        patch.setattr(commands, "find_vllm", lambda python: None)
        yield
