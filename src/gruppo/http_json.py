"""JSON over HTTP: one request with a deadline, whose failure is one line."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from gruppo.errors import GruppoError


@dataclass(eq=False, repr=False)
class ServerError(Exception):
    """A server did not do what was asked of it. The request can be repeated, there or on another server."""

    reason: str
    # first and by position, so that it is what str() shows: BaseException keeps such arguments before __init__ runs
    _: KW_ONLY
    status: int = 0
    """HTTP status; 0 without an answer."""
    is_lasting: bool = False
    """Whether nothing but new weights can make the server usable again."""
    is_timeout: bool = False
    retry_after_s: float | None = None
    """Seconds to wait, where the server says so."""


def read_key(variable: str) -> str:
    """The key in an environment variable; "" if it is not set."""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch("[!-~]*", key):  # errors of the HTTP library quote such a header
        raise GruppoError(f"""the environment variable {variable} holds a line break, a space or a character outside
            ASCII, which no key has. Set it to the key alone.""")
    return key


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def request_json(
    client: Any,
    method: str,
    path: str,
    body: Any = None,
    *,
    timeout_s: float | None,
    is_text: bool = False,
) -> Any:
    """Return the JSON of an answer, {} for an empty one, or with ``is_text`` other text; else ServerError.

    ``client``: an ``httpx2.AsyncClient``. The deadline covers the whole answer, however slowly it arrives.
    """
    import httpx2 as httpx

    route = path.partition("?")[0]
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.request(method, path, json=body)
    except TimeoutError:
        raise ServerError(
            f"{route} had no answer within {timeout_s:g} s", is_timeout=True
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:  # refused, reset, truncated
        raise ServerError(f"{route}: {str(error) or type(error).__name__}") from None
    if answer.status_code >= 300:  # redirects are not followed
        status, what = answer.status_code, answer.text
        with suppress(
            ValueError, RecursionError, StopIteration
        ):  # the message of an error in JSON, else its text
            found = json.loads(what)
            while isinstance(found, dict):
                found = next(found[key] for key in ("message", "error", "detail") if key in found)
            what = str(found)
        # seconds or a date (RFC 9110, section 10.2.3)
        after, wait_s = answer.headers.get("retry-after", ""), None
        with suppress(ValueError, OverflowError):
            wait_s = max(parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
        with suppress(ValueError):  # float reads "nan" too
            wait_s = max(float(after), 0.0) if "nan" not in after.lower() else None
        what = " ".join(what.split())[:300]
        raise ServerError(f"{route} answered {status}: {what}", status=status, retry_after_s=wait_s)
    try:
        return json.loads(answer.text) if answer.text else {}
    except (ValueError, RecursionError):  # RecursionError: nested too deep
        if is_text:
            return answer.text
        raise ServerError(
            f"{route} answered with something that is not JSON: {answer.text[:80]!r}"
        ) from None
