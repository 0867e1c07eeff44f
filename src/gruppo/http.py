"""JSON over HTTP: every request of the package, with one set of limits and one retry rule.

    async with open_client("http://127.0.0.1:8000", key=key) as client:
        answer = await request_json(client, "POST", "/v1/score", {"ids": [1]}, timeout_s=60.0)

    answer = fetch_json("http://127.0.0.1:8000/health", timeout_s=10.0)   # without an event loop

A request has a deadline for its whole answer, however slowly that arrives, and a limit of its size.
Redirects are not followed. Compressed answers are refused: a small one can expand to any size.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any
from urllib.parse import urlsplit

from gruppo.errors import GruppoError

MAX_BODY_BYTES = 1 << 26
BACKOFF_S, MAX_WAIT_S = 1.0, 60.0
"""Wait before the first retry, doubled each time; longest wait, also if the server asks for
more."""
_REPEATED = (0, 408, 409, 429)
"""Statuses after which a request is sent again, besides 5xx; 0: no answer."""


@dataclass(eq=False, repr=False)
class ServerError(Exception):
    """A request failed. It can be repeated, on the same or another server."""

    reason: str
    # first and positional, so that str() shows it: BaseException keeps it before __init__ runs
    _: KW_ONLY
    status: int = 0
    """HTTP status; 0 without an answer."""
    is_lasting: bool = False
    """Whether nothing but new weights can make the server usable again."""
    is_timeout: bool = False
    retry_after_s: float | None = None
    """Seconds to wait, if the server says so."""


def read_key(variable: str) -> str:
    """The key in an environment variable; "" if it is not set."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch("[!-~]*", key):  # errors of the HTTP library quote such a header
        raise GruppoError(f"""the environment variable {variable} holds a line break, a space or a
            character outside ASCII, which no key has. Set it to the key alone.""")
    return key


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_client(
    base_url: str, *, key: str = "", uses_proxy: bool | None = None, idle_s: float = 5.0
) -> Any:
    """Open an ``httpx2.AsyncClient`` without timeouts: each request has its own deadline.

    ``uses_proxy``: whether the proxy of the environment is used; by default, not for this machine.
    """
    import httpx2 as httpx

    is_local = is_loopback(urlsplit(base_url).hostname or "")
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=None,
        limits=httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=idle_s
        ),
        trust_env=not is_local if uses_proxy is None else uses_proxy,
        verify=base_url.startswith("https:"),  # loading certificates takes 50 ms
    )


async def request_json(
    client: Any,
    method: str,
    path: str,
    body: Any = None,
    *,
    timeout_s: float | None,
    is_text: bool = False,
    max_bytes: int = MAX_BODY_BYTES,
) -> Any:
    """Return the JSON of an answer, {} for an empty one, or with ``is_text`` other text; else
    ServerError."""
    import httpx2 as httpx

    route = path.partition("?")[0] or str(client.base_url)
    try:
        async with asyncio.timeout(timeout_s):
            headers = {"Accept-Encoding": "identity"}
            async with client.stream(method, path, json=body, headers=headers) as answer:
                text = await _read_text(answer, route, max_bytes)
    except TimeoutError:
        raise ServerError(
            f"{route} had no answer within {timeout_s:g} s", is_timeout=True
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:  # refused, reset, truncated
        raise ServerError(f"{route}: {str(error) or type(error).__name__}") from None
    if answer.status_code >= 300:
        what = f"{route} answered {answer.status_code}: {_error_message(text)}"
        wait_s = _retry_after(answer.headers.get("retry-after", ""))
        raise ServerError(what, status=answer.status_code, retry_after_s=wait_s)
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):  # RecursionError: nested too deep
        if is_text:
            return text
        what = f"{route} answered with something that is not JSON: {text[:80]!r}"
        raise ServerError(what) from None


async def _read_text(answer: Any, route: str, max_bytes: int) -> str:
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServerError(f"{route} answered with a compressed body, which was not asked for")
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > max_bytes:
            raise ServerError(f"{route} answered with more than {max_bytes >> 20} MiB")
    return body.decode("utf-8", "replace")


def _error_message(text: str) -> str:
    """The message of an error in JSON, else its text, in one line."""
    with suppress(ValueError, RecursionError, StopIteration):
        found = json.loads(text)
        while isinstance(found, dict):
            found = next(found[key] for key in ("message", "error", "detail") if key in found)
        text = str(found)
    return " ".join(text.split())[:300]


def _retry_after(value: str) -> float | None:
    """Seconds, as servers of models send them; a date is not read."""
    return float(value) if re.fullmatch(r"\s*[0-9]{1,9}(\.[0-9]*)?\s*", value) else None


def retry_wait_s(error: ServerError, attempt: int, jitter: float = 1.0) -> float | None:
    """Seconds to wait before a request is sent again after its ``attempt``-th failure, from 0 on.

    What the server asks for, else BACKOFF_S 2^attempt ``jitter``. None: repeating cannot help, or
    only after too long a wait.
    """
    if error.status not in _REPEATED and error.status < 500:
        return None
    if error.retry_after_s is None:
        return min(BACKOFF_S * 2**attempt * jitter, MAX_WAIT_S)
    return error.retry_after_s if error.retry_after_s <= MAX_WAIT_S else None


def fetch_json(url: str, *, timeout_s: float) -> Any:
    """The JSON at a URL. Raises ServerError. Not in an event loop."""

    async def fetch() -> Any:
        async with open_client(url) as client:
            return await request_json(client, "GET", url, timeout_s=timeout_s)

    return asyncio.run(fetch())
