"""A judge's endpoint on loopback."""

from __future__ import annotations

import pytest
from tests.rewards.judge_server import JudgeServer

from gruppo import http


@pytest.fixture
def server():
    server = JudgeServer()
    yield server
    server.close()


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)
