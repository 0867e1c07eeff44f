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

    # --- what is served: each returns a content type, a content and headers ---

    def state(self, known: str = "") -> tuple[str, bytes, dict[str, str]]:
        states = [run.state() for run in self.runs]
        version = ".".join(str(state["version"]) for state in states)
        found = {"version": version, "runs": states} if version != known else {}
        return "application/json", json.dumps(found).encode(), {}

    def metrics(
        self, run: str = "", version: str = "", start: str = "0"
    ) -> tuple[str, bytes, dict[str, str]]:
        content, now = self.runs[int(run)].metrics(version, int(start))
        return "text/plain", content, {"X-Version": now}

    def rows(
        self, run: str = "", source: str = "", before: str = ""
    ) -> tuple[str, bytes, dict[str, str]]:
        content, first = self.runs[int(run)].rows(source, int(before))
        return "text/plain", content, {"X-First": "" if first is None else str(first)}

    def image(self, run: str = "", name: str = "") -> tuple[str, bytes, dict[str, str]]:
        return "image/png", self.runs[int(run)].image(name), {}


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gruppo", ""
    timeout = 60  # of a connection that stays open

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        answers = {
            name: getattr(self.server, name) for name in ("state", "metrics", "rows", "image")
        }
        status, kind, content, headers = 200, "text/plain", b"", dict[str, str]()
        if re.sub(r":\d*$", "", self.headers.get("Host", "")).lower() not in NAMES:
            status, content = 403, b"This server answers to 127.0.0.1 and localhost only."
        elif path == "/":
            kind, content = "text/html", PAGE.encode()
        elif not hmac.compare_digest(
            token, self.server.token.encode()
        ):  # in the same time for every wrong token
            status, content = 401, b"The token is missing or wrong."
        elif path[1:] not in answers:
            status, content = 404, b"There is no such page."
        else:
            try:
                values = {name: values[-1] for name, values in parse_qs(query).items()}
                kind, content, headers = answers[path[1:]](**values)
            except Exception as error:  # the page shows it, and goes on
                is_request = isinstance(error, TypeError | ValueError | IndexError | GruppoError)
                status, content = 400 if is_request else 500, describe_error(error)[0].encode()
        # In memory only: completions must not stay in a browser's cache, nor be read by another
        # site.
        rule = content_security_policy(connect="'self'", images="blob:")
        headers |= {
            "Content-Type": f"{kind}; charset=utf-8" if kind != "image/png" else kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": f"{rule}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except (ConnectionError, TimeoutError):  # the page was closed
            self.close_connection = True

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
