"""A judge's endpoint on loopback."""

from __future__ import annotations

import pytest
from tests.rewards.judge_server import JudgeServer

from gruppo import http


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Its judge keeps verdicts in a folder of the test's own."""
    monkeypatch.setenv("GRUPPO_STATE", str(tmp_path / "state"))
    server = JudgeServer()
    yield server
    server.close()


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(http, "BACKOFF_S", 0.01)
