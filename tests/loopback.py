"""HTTP servers on the loopback interface, in a thread of the test's process."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LoopbackHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms for each answer otherwise

    def send(self, code: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        """Answer with a text as it is, or with a value as JSON."""
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class LoopbackServer(ThreadingHTTPServer):
    """Serves from its construction to ``close``."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, handler: type[LoopbackHandler], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        super().__init__((host, port), handler)
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        pass  # a client that left

    def close(self) -> None:
        self.shutdown()
        self.server_close()
