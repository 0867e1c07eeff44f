"""Requests: their limits, and when they are sent again. The judge's tests use a server with more
faults."""

from __future__ import annotations

import asyncio
import gzip
import time

import pytest
from tests.loopback import LoopbackHandler, LoopbackServer

from gruppo import http
from gruppo.http import ServerError, fetch_json, open_client, request_json, retry_wait_s


@pytest.fixture
def serve():
    """Start a server that writes these bytes after the status line; return its address."""
    servers = []

    def start(*parts: bytes, delay_s: float = 0.0, requests=None):
        class Handler(LoopbackHandler):
            def do_GET(self):
                if requests is not None:
                    requests.append(dict(self.headers))
                self.wfile.write(b"HTTP/1.1 ")
                for part in parts:
                    self.wfile.write(part)
                    self.wfile.flush()
                    time.sleep(delay_s)
                self.close_connection = True

        servers.append(LoopbackServer(Handler))
        return servers[-1].url

    yield start
    for server in servers:
        server.close()


def with_length(body: bytes, headers: bytes = b"") -> bytes:
    return b"200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (headers, len(body), body)


def test_an_answer_beyond_the_limit_is_one_line(serve):
    async def ask():
        async with open_client(serve(with_length(b"1" * 3_000_000))) as client:
            await request_json(client, "GET", "/a", timeout_s=20, max_bytes=1 << 20)

    with pytest.raises(ServerError, match=r"^/a answered with more than 1 MiB$"):
        asyncio.run(ask())


def test_a_compressed_answer_is_neither_asked_for_nor_read(serve):
    requests: list[dict[str, str]] = []
    body = with_length(gzip.compress(b"1" * 10_000_000), b"Content-Encoding: gzip\r\n")
    with pytest.raises(ServerError, match="compressed"):
        fetch_json(serve(body, requests=requests), timeout_s=20)
    assert requests[0]["Accept-Encoding"] == "identity"


def test_the_deadline_covers_an_answer_that_drips(serve):
    url = serve(b"200 OK\r\nContent-Length: 100\r\n\r\n", *[b"1"] * 50, delay_s=0.1)
    began = time.monotonic()
    with pytest.raises(ServerError, match="had no answer within") as problem:
        fetch_json(url, timeout_s=0.5)
    assert problem.value.is_timeout and time.monotonic() - began < 4


def test_a_redirect_is_not_followed(serve):
    requests: list[dict[str, str]] = []
    target = serve(with_length(b"{}"), requests=requests)
    url = serve(b"302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % target.encode())
    with pytest.raises(ServerError, match="answered 302"):
        fetch_json(url, timeout_s=20)
    assert not requests


@pytest.mark.parametrize(
    ("error", "attempt", "wait_s"),
    [
        (ServerError("down"), 0, 1.0),
        (ServerError("down"), 2, 4.0),
        (ServerError("down"), 10, http.MAX_WAIT_S),
        (ServerError("limit", status=429, retry_after_s=7.0), 0, 7.0),
        (ServerError("limit", status=429, retry_after_s=3600.0), 0, None),
        (ServerError("busy", status=503), 1, 2.0),
        (ServerError("not found", status=404), 0, None),
    ],
)
def test_a_request_is_repeated_only_where_that_may_help(error, attempt, wait_s):
    assert retry_wait_s(error, attempt) == wait_s


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("", None),
        ("nan", None),
        ("-1", None),
        ("1e400", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_nothing(value, seconds):
    assert http._retry_after(value) == seconds
