"""Weights by vLLM's NCCL transfer, against a server that receives as vLLM's workers do; gloo stands in for NCCL."""

from __future__ import annotations

import base64
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests import tiny
from tests.engines.fake_vllm import FakeServer, Fault, copied
from tests.engines.test_prove import few_probes, update  # noqa: F401
from tests.engines.test_vllm import SAMPLING, requests, require_logprobs
from torch import distributed as torch_dist

from gruppo import api
from gruppo.engines.vllm import NcclTransfer, Proof, VllmEngine, nccl
from gruppo.engines.vllm.check import check_server
from gruppo.engines.vllm.client import ServerError
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.types import EngineLost, GruppoError, Prompt

PROMPTS = [Prompt(str(n), f"{n} + {n * n % 17} = ?") for n in range(40)]
HANGING_S, GLOO_S = 4.0, 30.0
"""The first is waited for, and longer than what a loaded machine takes for a message of kilobytes."""
GROUPS: list[Any] = []
"""Kept: to destroy one that hangs waits for its timeout."""


STORES: dict[bytes, Any] = {}
"""Of each communicator, by its unique id: both ends are threads of this process."""


def new_id() -> bytes:
    unique_id = os.urandom(128)
    STORES[unique_id] = torch_dist.HashStore()
    return unique_id


def group(unique_id: bytes, rank: int, size: int) -> Any:
    joined = torch_dist.ProcessGroupGloo(STORES[unique_id], rank, size, timedelta(seconds=GLOO_S))
    GROUPS.append(joined)
    joined.allreduce([torch.zeros(1)]).wait()  # as vLLM's workers begin
    return joined


class GlooLink:
    """``nccl.Link`` over gloo."""

    def __init__(self, unique_id: bytes, size: int, device: torch.device) -> None:
        self.is_aborted, self._work = False, None
        try:
            self._group = group(unique_id, 0, size)
        except RuntimeError as error:
            raise ServerError(str(error)) from None

    def broadcast(self, chunk: torch.Tensor) -> None:
        self._work = self._group.broadcast([chunk])

    def wait(self, give_up_at: float) -> None:
        while not (self._work.is_completed() or self.is_aborted):
            if time.monotonic() > give_up_at:
                self.abort()
            time.sleep(1e-3)

    def abort(self) -> None:
        self.is_aborted = True


class Receiver(FakeServer):
    """A server whose workers, here one, receive weights as vLLM 0.32's NCCLWeightTransferEngine does."""

    group: Any = None
    received: dict[str, torch.Tensor] | None = None

    def get_get_world_size(self, body: Any, query: Any) -> Any:
        return {"world_size": 1}

    def post_shutdown_weight_transfer_engine(self, body: Any, query: Any) -> Any:
        self.group = None
        return {"message": "Weight transfer shut down"}

    def post_init_weight_transfer_engine(self, body: Any, query: Any) -> Any:
        self.info = body["init_info"]
        unique_id = base64.b64decode(self.info["nccl_unique_id_b64"], validate=True)
        assert len(unique_id) == 128 and self.info["packed"]
        self.group = group(unique_id, self.info["rank_offset"], self.info["world_size"])
        return {"message": "Weight transfer initialized"}

    def post_start_weight_update(self, body: Any, query: Any) -> Any:
        if self.received is not None:
            return 500, {
                "error": {
                    "message": "start_weight_update called while a weight update is already active."
                }
            }
        self.received = {}
        return {"message": "Weight update started"}

    def post_update_weights(self, body: Any, query: Any) -> Any:
        info, chunk = body["update_info"], []

        def receive() -> None:
            buffer = torch.empty(sum(size for *_, size in chunk), dtype=torch.uint8)
            self.group.broadcast([buffer]).wait()
            parts = buffer.split([size for *_, size in chunk])
            for (name, shape, dtype, _), part in zip(chunk, parts, strict=True):
                self.received[name] = part.clone().view(dtype).view(shape)
            chunk.clear()

        try:
            for name, dtype_name, shape in zip(
                info["names"], info["dtype_names"], info["shapes"], strict=True
            ):
                dtype = getattr(torch, dtype_name)
                chunk.append((name, shape, dtype, math.prod(shape) * dtype.itemsize))
                if sum(size for *_, size in chunk) > self.info["packed_buffer_size_bytes"]:
                    receive()
            if chunk:
                receive()
        except RuntimeError as error:
            self.received = None
            return 500, {"error": {"message": str(error)}}
        return {"message": "Weights updated"}

    def post_finish_weight_update(self, body: Any, query: Any) -> Any:
        assert self.is_paused
        policy = copied(self.policy)
        self.load(policy, self.received)
        self.policy, self.received = policy, None
        return {"message": "Weight update finished"}


@pytest.fixture
def policy() -> TextPolicy:
    return from_pretrained(tiny.model(seed=1), compute="float32")


@pytest.fixture
def servers() -> Iterator[list[Receiver]]:
    started = [Receiver(tiny.model(seed=1)) for _ in range(2)]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def engine(servers, policy, tmp_path, monkeypatch) -> Iterator[VllmEngine]:
    monkeypatch.setattr(nccl, "new_id", new_id)
    monkeypatch.setattr(nccl, "Link", GlooLink)
    monkeypatch.setattr(nccl, "CHUNK_BYTES", 4000)
    transfer = NcclTransfer(torch.device("cpu"), timeout_s=HANGING_S)
    proof = Proof(policy, PROMPTS, SAMPLING, max_mismatch=0.2)
    proof.limit(tiny.CONTEXT)
    urls = [server.url for server in servers]
    engine = VllmEngine(
        policy, urls, tmp_path / "published", proof=proof, nccl=transfer, timeout_s=20
    )
    yield engine
    engine.close()


def test_servers_receive_the_weights_in_chunks_and_prove_them_without_a_folder(
    engine, servers, policy, tmp_path
):
    for version in range(3):
        engine.sync(policy, version)
        assert all(replica.label == replica.label_of(engine.label) for replica in engine.replicas)
        require_logprobs(policy, engine.generate(requests(2, 2), SAMPLING, seed=0))
        update(policy, 1e-3, version)
    for server in servers:
        paths = [
            path
            for path, _ in server.log
            if path not in ("/health", "/inference/v1/generate", "/metrics")
        ]
        joined, update_paths = paths[:4], paths[4:10]
        assert joined == [
            *(
                "/pause",
                "/shutdown_weight_transfer_engine",
                "/get_world_size",
                "/init_weight_transfer_engine",
            ),
        ]
        assert update_paths == [
            *(
                "/start_weight_update",
                "/update_weights",
                "/finish_weight_update",
                "/reset_prefix_cache",
            ),
            *("/update_weight_version", "/resume"),
        ]
        assert (
            paths.count("/init_weight_transfer_engine") == 1 and paths.count("/update_weights") == 4
        )  # a canary
        assert server.info["world_size"] == 2 and server.info["rank_offset"] == 1
    assert not (tmp_path / "published").exists()


def test_a_server_that_hangs_as_it_receives_holds_up_no_other_for_longer_than_the_timeout(
    engine, servers, policy
):
    engine.sync(policy, 0)
    update(policy, 1e-3, 0)

    def hang(path: str, body: Any) -> None:
        if path == "/update_weights":
            while not servers[1].is_closed:
                time.sleep(0.02)

    servers[1].before = hang
    engine.sync(policy, 1)
    assert [replica.label is None for replica in engine.replicas] == [False, True]
    assert list(engine.nccl.links) == [0]
    require_logprobs(policy, engine.generate(requests(2, 2), SAMPLING, seed=0))


@pytest.mark.parametrize(
    "path", ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights"]
)
def test_a_server_that_fails_to_receive_is_left_out_and_comes_back_on_a_new_connection(
    engine, servers, policy, path
):
    engine.sync(policy, 0)

    def fail(asked: str, body: Any) -> None:
        if asked == path:
            raise Fault(500)

    servers[1].before = fail
    if path.startswith("/init"):  # as after a restart
        engine.nccl.links.pop(1)
    update(policy, 1e-3, 1)
    engine.sync(policy, 1)
    assert [replica.label is None for replica in engine.replicas] == [False, True]
    assert f"{path} answered 500" in engine.replicas[1].why
    require_logprobs(policy, engine.generate(requests(2, 2), SAMPLING, seed=0))
    servers[1].before = lambda path, body: None
    servers[1].received = None  # a server that was started again
    engine.sync(policy, 2)
    assert all(replica.label for replica in engine.replicas)


def test_with_no_server_left_within_a_step_the_run_ends_at_once(engine, servers, policy):
    engine.sync(policy, 0)
    for replica in engine.replicas:
        engine._run(engine._eject(replica, "it hung"))
    with pytest.raises(EngineLost, match=r"no vLLM server is left .*it hung"):
        engine.generate(requests(2), SAMPLING, seed=0)


def test_a_sender_that_fails_gathers_the_other_weights_for_the_other_ranks(monkeypatch):
    monkeypatch.setattr(nccl, "CHUNK_BYTES", 4)

    class Failing:
        is_aborted = False

        def broadcast(self, chunk: torch.Tensor) -> None:
            raise MemoryError

    transfer, gathered = NcclTransfer(torch.device("cpu"), timeout_s=1), []
    transfer._is_complete.set()
    transfer._ready = {0: Failing()}

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            gathered.append(number)
            yield str(number), torch.zeros(2)

    with pytest.raises(MemoryError):
        transfer.send(weights())
    assert gathered == [0, 1, 2]


def test_a_communicator_is_freed_once_and_not_under_a_call_that_uses_it(monkeypatch):
    calls, is_inside, may_end = [], threading.Event(), threading.Event()

    def call(function: str, *_: Any) -> None:
        calls.append(function)
        if function == "ncclBroadcast":
            is_inside.set()
            may_end.wait(10)
            calls.append("end")

    monkeypatch.setattr(nccl, "_call", call)
    monkeypatch.setattr(nccl, "ENQUEUE_S", 10.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=0)
    link = nccl.Link.__new__(nccl.Link)
    link.device, link.is_aborted, link._communicator, link._stream = (
        torch.device("cpu"),
        False,
        None,
        stream,
    )
    link._aborting, link._enqueuing = threading.Lock(), threading.Lock()
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(link.broadcast, torch.zeros(1))
        is_inside.wait(10)
        aborted = pool.submit(link.abort)
        time.sleep(0.1)
        may_end.set()
        sent.result(), aborted.result()
    link.abort()
    link.broadcast(torch.zeros(1))
    assert calls == ["ncclBroadcast", "end", "ncclCommAbort"]


def test_what_nccl_cannot_send_is_refused_in_one_line(servers, tmp_path):
    options = {"engine__kind": "vllm", "engine__urls": [servers[0].url], "engine__transfer": "nccl"}
    with pytest.raises(
        GruppoError, match=r"needs weights on a GPU, and the policy is on cpu\. Leave it out"
    ):
        api.start(tiny.config(tmp_path, **options))
    with pytest.raises(GruppoError, match=r"does not connect two processes on one GPU"):
        api.start(tiny.config(tmp_path, **options, engine__colocated=True))
    assert not servers[0].log
    policy = from_pretrained(tiny.model(seed=1), compute="float32")
    engine = VllmEngine(policy, [servers[0].url], tmp_path / "published")
    with pytest.raises(
        GruppoError, match=r"no weight transfer by NCCL\. Start the server with gruppo serve"
    ):
        engine._run(check_server(engine.replicas[0], policy, tokens=8, is_nccl=True))
    engine.close()
    with pytest.raises(GruppoError, match="an adapter is published as a folder"):
        NcclTransfer(torch.device("cuda"), timeout_s=1).check(is_adapter=True)
