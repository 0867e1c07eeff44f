"""A judge's endpoint on loopback."""

from __future__ import annotations

import pytest
from tests.rewards.judge_server import JudgeServer

from gruppo.rewards import judge_client


@pytest.fixture
def server():
    server = JudgeServer()
    yield server
    server.close()


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(judge_client, "BACKOFF_S", 0.01)
