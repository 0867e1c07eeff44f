"""ASGI middleware of ``gruppo serve``: every route needs the key, those that load weights too,
which vLLM's own key leaves open. It runs in vLLM's Python, where gruppo need not be installed."""

import hmac
import os


class Guard:
    """Answers 401 to requests without the key of the environment variable GRUPPO_ENGINE_KEY."""

    def __init__(self, app):
        self.app, self.key = app, os.environ["GRUPPO_ENGINE_KEY"].encode()
        if not self.key:
            raise ValueError("GRUPPO_ENGINE_KEY is empty; it needs the server's key.")

    async def __call__(self, scope, receive, send):
        header = dict(scope.get("headers") or ()).get(b"authorization", b"")
        is_open = scope["type"] == "lifespan" or scope.get("path") == "/health"
        if is_open or hmac.compare_digest(header, b"Bearer " + self.key):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
