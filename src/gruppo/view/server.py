"""``gruppo view``: the page over HTTP, on this machine and with a token only."""

from __future__ import annotations

import errno
import hmac
import json
import os
import re
import secrets
import socketserver
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

from gruppo.loading import describe_error
from gruppo.types import GruppoError
from gruppo.view.report import PAGE, content_security_policy
from gruppo.view.run import RunView, open_runs

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names by which a browser on this machine, or a tunnel to it, calls the server. A page of another
site whose name resolves to 127.0.0.1 (DNS rebinding) sends its own name."""


class ViewServer(socketserver.ThreadingTCPServer):
    """Serves runs at ``address``, whose fragment is the token: browsers send a fragment to
    nobody."""

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # on Windows it would share a port that is in use

    def __init__(self, runs: Sequence[RunView], port: int) -> None:
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            problem = "is in use" if is_taken else f"cannot be listened on ({error})"
            raise GruppoError(
                f"port {port} {problem}. Choose another --port, or --port 0 for any free one."
            ) from None
        self.address = f"http://{HOST}:{self.server_address[1]}/#{self.token}"

    # --- what is served: each returns a content and headers ---

    def state(self, known: str = "") -> tuple[bytes, dict[str, str]]:
        states = [run.state() for run in self.runs]
        version = ".".join(str(state["version"]) for state in states)
        found = {"version": version, "runs": states} if version != known else {}
        return json.dumps(found).encode(), {}

    def metrics(
        self, run: str, version: str = "", start: str = "0"
    ) -> tuple[bytes, dict[str, str]]:
        content, now = self.runs[int(run)].metrics(version, int(start))
        return content, {"X-Version": now}

    def rows(self, run: str, source: str, before: str) -> tuple[bytes, dict[str, str]]:
        content, first = self.runs[int(run)].rows(source, int(before))
        return content, {"X-First": "" if first is None else str(first)}

    def image(self, run: str, name: str) -> tuple[bytes, dict[str, str]]:
        return self.runs[int(run)].image(name), {"Content-Type": "image/png"}


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gruppo", ""
    timeout = 60  # of a connection that stays open

    def do_GET(self) -> None:
        try:
            content, headers = self._answer()
            status = 200
        except _Refused as refusal:
            status, content, headers = refusal.status, str(refusal).encode(), {}
        except Exception as error:  # the page shows it, and goes on
            is_request = isinstance(error, TypeError | ValueError | IndexError | GruppoError)
            status, headers = 400 if is_request else 500, {}
            content = describe_error(error)[0].encode()
        rule = content_security_policy(connect="'self'", images="blob:")
        # no-store: completions must not stay in a browser's cache
        headers = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": f"{rule}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            **headers,
        }
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except (ConnectionError, TimeoutError):  # the page was closed
            self.close_connection = True

    def _answer(self) -> tuple[bytes, dict[str, str]]:
        """The content and headers for the path; only the page itself needs no token."""
        path, _, query = self.path.partition("?")
        if re.sub(r":\d*$", "", self.headers.get("Host", "")).lower() not in NAMES:
            raise _Refused(403, "This server answers to 127.0.0.1 and localhost only.")
        if path == "/":
            return PAGE.encode(), {"Content-Type": "text/html; charset=utf-8"}
        token = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        # in the same time for every wrong token
        if not hmac.compare_digest(token, self.server.token.encode()):
            raise _Refused(401, "The token is missing or wrong.")
        if path not in ("/state", "/metrics", "/rows", "/image"):
            raise _Refused(404, "There is no such page.")
        values = {name: several[-1] for name, several in parse_qs(query).items()}
        return getattr(self.server, path[1:])(**values)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def serve(folders: Sequence[str], port: int) -> None:
    """Serve the page of runs until Ctrl-C."""
    with ViewServer(open_runs(folders), port) as server:
        for run in server.runs:
            run.state()  # described before it is asked for
        port = server.server_address[1]
        hint = f"Ctrl-C ends it. From another machine: ssh -L {port}:127.0.0.1:{port} HOST"
        print(server.address, hint, sep="\n", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
