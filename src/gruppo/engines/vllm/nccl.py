"""Weights from the trainer's GPU to those of vLLM servers by NCCL, without files.

The format is that of vLLM's weight transfer "nccl", packed: tensors as bytes, in the order that was announced, in
chunks that end with the first tensor beyond ``CHUNK_BYTES``. The trainer is rank 0. Each server has a communicator of
its own, so that one that dies holds up no other, and can be aborted. Without a GPU only the protocol was tested, by a
fake server over gloo; ``Link`` itself has not been run yet.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gruppo import distributed as dist
from gruppo.engines.vllm.client import LOADED_PER_S, Replica, ServerError
from gruppo.types import GruppoError

CHUNK_BYTES = 1 << 28
UINT8, FLOAT32, SUM = 1, 7, 0
"""Values of NCCL's ncclDataType_t and ncclRedOp_t."""
ENQUEUE_S = 1.0
"""Limit of the wait for a call that enqueues; one that takes longer is blocked by its peer, which an abort ends."""


class NcclTransfer:
    """Sends weights to servers that are ready for them: ``receive`` runs in the thread of the requests, ``send`` in the
    trainer's."""

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        self.device, self.timeout_s = device, timeout_s
        self.links: dict[int, Link] = {}
        """Connections by the number of the server."""
        self.announced: dict[str, list[Any]] = {}
        """Names, dtypes and shapes, as vLLM's /update_weights takes them."""
        self.bytes = 0
        self._expected: Collection[int] = ()
        self._missing: set[int] = set()
        self._ready: dict[int, Link] = {}
        self._is_complete = threading.Event()

    def check(self, *, is_adapter: bool) -> None:
        """Refuse what NCCL cannot send, or vLLM not receive."""
        if self.device.type != "cuda":
            raise GruppoError(
                f"engine.transfer nccl needs weights on a GPU, and the policy is on {self.device.type}",
                advice="Leave it out: weights are then published as a folder",
            )
        if is_adapter:
            raise GruppoError(
                "engine.transfer nccl sends whole models, and an adapter is published as a folder",
                advice="Leave it out",
            )

    def begin(self, policy: Any, numbers: Collection[int]) -> None:
        """Expect these servers to be ready, or to have failed, before ``send``. A collective at its first call."""
        if not self.announced:
            entries = [
                (name, str(x.dtype)[6:], list(x.shape), x.nbytes)
                for name, x in policy.served_weights()
            ]
            names, dtypes, shapes, sizes = map(list, zip(*entries, strict=True))
            self.announced, self.bytes = (
                {"names": names, "dtype_names": dtypes, "shapes": shapes},
                sum(sizes),
            )
        self._expected, self._missing, self._ready = numbers, set(numbers), {}
        self._is_complete.clear()
        if not numbers:
            self._is_complete.set()

    def arrive(self, replica: Replica) -> None:
        """Wait for this server no longer: it is ready, or it will not be."""
        self._missing.discard(replica.number)
        if not self._missing:
            self._is_complete.set()

    async def receive(self, replica: Replica) -> None:
        """Have a server take the weights that ``send`` sends."""
        try:
            if replica.number not in self.links:
                self.links[replica.number] = await self._connect(replica)
            # each server that hangs holds up a chunk of the others until its connection is given up
            limit_s = (len(self._expected) + 1) * self.timeout_s + self.bytes / LOADED_PER_S
            await replica.request("POST", "/start_weight_update", timeout_s=self.timeout_s)
            body = {"update_info": self.announced}
            update = asyncio.ensure_future(
                replica.request("POST", "/update_weights", body, timeout_s=limit_s)
            )
            self._ready[replica.number] = self.links[replica.number]
            self.arrive(replica)
            await update
            await replica.request("POST", "/finish_weight_update", timeout_s=limit_s)
        except BaseException:  # its communicator may be in the middle of a broadcast
            if replica.number in self.links:
                self.links.pop(replica.number).abort()
            raise

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send weights to the servers that are ready. A collective where they are sharded; the first rank sends."""
        weights = iter(weights)
        try:
            if dist.is_main():
                self._is_complete.wait()
                for chunk in _chunks(weights):
                    links = [link for link in self._ready.values() if not link.is_aborted]
                    for link in links:
                        link.broadcast(chunk)
                    give_up_at = time.monotonic() + self.timeout_s + chunk.nbytes / LOADED_PER_S
                    for link in links:
                        link.wait(give_up_at)
        finally:
            for _ in weights:  # each is gathered by all ranks, also where the first one fails
                pass

    async def _connect(self, replica: Replica) -> Link:
        with suppress(ServerError):  # the connection of an earlier trainer, if there is one
            await replica.request(
                "POST", "/shutdown_weight_transfer_engine", timeout_s=self.timeout_s
            )
        workers = (await replica.request("GET", "/get_world_size", timeout_s=self.timeout_s)).get(
            "world_size", 1
        )
        unique_id, loop = new_id(), asyncio.get_running_loop()
        joined: asyncio.Future[Link] = loop.create_future()

        def join() -> (
            None
        ):  # blocks until the workers have joined, for ever where they do not: hence no pool's thread
            link: Link | ServerError
            try:
                link = Link(unique_id, workers + 1, self.device)
            except ServerError as error:
                link = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_resolve, joined, link)

        threading.Thread(target=join, name="gruppo-nccl", daemon=True).start()
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": workers + 1,
        }
        info |= {"packed": True, "packed_buffer_size_bytes": CHUNK_BYTES, "packed_num_buffers": 1}
        try:
            await replica.request(
                "POST",
                "/init_weight_transfer_engine",
                {"init_info": info},
                timeout_s=self.timeout_s,
            )
            return await asyncio.wait_for(joined, self.timeout_s)
        except TimeoutError:
            raise ServerError(
                f"no NCCL connection within {self.timeout_s:g} s; NCCL_DEBUG=INFO says why"
            ) from None

    def close(self) -> None:
        for link in self.links.values():
            link.abort()


class Link:
    """A communicator of the trainer and the workers of one server, by NCCL's C interface.

    torch.cuda.nccl can neither abort one nor query it, without which a server that dies would hang the trainer's GPU.
    """

    def __init__(self, unique_id: bytes, size: int, device: torch.device) -> None:
        self.device, self.is_aborted, self._communicator = device, False, ctypes.c_void_p()
        self._aborting, self._enqueuing = threading.Lock(), threading.Lock()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            identity = _UniqueId.from_buffer_copy(unique_id)
            _call(
                "ncclCommInitRank",
                ctypes.byref(self._communicator),
                ctypes.c_int(size),
                identity,
                ctypes.c_int(0),
            )
            one = torch.zeros(1, device=device)  # vLLM's workers begin with this all-reduce
            self._enqueue("ncclAllReduce", one, FLOAT32, SUM)
            self._stream.synchronize()

    def broadcast(self, chunk: Tensor) -> None:
        """Begin to send bytes, which must stay as they are until ``wait`` returns."""
        try:
            self._enqueue("ncclBroadcast", chunk, UINT8, 0)
        except ServerError:
            self.abort()

    def wait(self, give_up_at: float) -> None:
        """Wait until they are sent, or the link is aborted; abort it at ``give_up_at``."""
        event = self._stream.record_event()
        while not (event.query() or self.is_aborted):
            if time.monotonic() > give_up_at:
                self.abort()
            time.sleep(1e-3)

    def abort(self) -> None:
        """Free the communicator, once, and not under a call of the other thread that enqueues."""
        with self._aborting:
            if self.is_aborted:
                return
            self.is_aborted = True
        is_free = self._enqueuing.acquire(timeout=ENQUEUE_S)
        try:
            with suppress(ServerError):
                _call("ncclCommAbort", self._communicator)
        finally:
            if is_free:
                self._enqueuing.release()

    def _enqueue(self, function: str, tensor: Tensor, dtype: int, root_or_operation: int) -> None:
        with self._enqueuing:
            if self.is_aborted:
                raise ServerError("its NCCL connection was given up")
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            pointer, stream = (
                ctypes.c_void_p(tensor.data_ptr()),
                ctypes.c_void_p(self._stream.cuda_stream),
            )
            kind = ctypes.c_int(dtype), ctypes.c_int(root_or_operation)
            _call(
                function,
                pointer,
                pointer,
                ctypes.c_size_t(tensor.numel()),
                *kind,
                self._communicator,
                stream,
            )


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def new_id() -> bytes:
    """A name for a new communicator, which its ranks share."""
    identity = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(identity))
    return bytes(identity)


def _call(function: str, *args: Any) -> None:
    if code := getattr(ctypes.CDLL("libnccl.so.2"), function)(
        *args
    ):  # the one that torch has loaded
        raise ServerError(f"{function} failed with code {code}; NCCL_DEBUG=INFO says why")


def _chunks(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Tensor]:
    """Tensors as bytes, joined: each chunk ends with the first tensor beyond ``CHUNK_BYTES``, as vLLM cuts them."""
    parts: list[Tensor] = []
    for _, tensor in weights:
        parts.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
        if sum(part.numel() for part in parts) > CHUNK_BYTES:
            yield torch.cat(parts)
            parts.clear()
    if parts:
        yield torch.cat(parts)


def _resolve(future: asyncio.Future[Link], link: Link | ServerError) -> None:
    if isinstance(link, ServerError):
        if not future.done():
            future.set_exception(link)
    elif future.done():  # given up
        link.abort()
    else:
        future.set_result(link)
