"""The engine of vLLM servers, against a small server that speaks their routes and samples from a model of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import tiny
from tests.engines.fake_vllm import FakeServer

from gruppo.engines.vllm import VllmEngine
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.testing import check_engine
from gruppo.types import Prompt, Request, Sampling

SAMPLING = Sampling(max_actions=8)
INPUTS = ["1 + 1 =", "a longer prompt"]


def requests(*sizes: int, first: int = 0) -> list[Request]:
    return [Request(Prompt(f"p{n}", f"{n} + {n} =", draw=n), size, first) for n, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def policy() -> TextPolicy:
    return from_pretrained(tiny.model(seed=1), compute="float32")


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    started = [FakeServer(tiny.model()) for _ in range(2)]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def engine(servers, policy, tmp_path) -> Iterator[VllmEngine]:
    engine = VllmEngine(policy, [server.url for server in servers], tmp_path / "published", timeout_s=5)
    engine.sync(policy, 1)
    yield engine
    engine.close()


def test_it_keeps_the_contract_of_engines(engine, policy):
    check_engine(engine, policy, INPUTS, tolerance=1e-4)
