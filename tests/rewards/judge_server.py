"""A small OpenAI-compatible server: it grades by a function, and its faults are attributes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.loopback import LoopbackHandler, LoopbackServer


class JudgeServer:
    """``url`` answers until ``close``. It checks what a server with structured output checks."""

    def __init__(self, *, key: str = "", port: int = 0) -> None:
        self.key = key
        self.bodies: list[Any] = []
        self.inflight = self.most_inflight = 0
        self.grade: Callable[[dict[str, Any]], Any] = lambda question: longest(question)
        """The points, from the texts that the judge sees."""
        self.content: Callable[[str], str] = lambda text: text
        """Changes what the judge writes."""
        self.faults: list[tuple[int, dict[str, str]]] = []
        """Statuses and headers of the next answers, before any is good."""
        self.delay_s = 0.0
        self.finish = "stop"
        self.usage: Any = {"prompt_tokens": 100, "completion_tokens": 10}
        self.lock = threading.Lock()
        server = self

        class Handler(LoopbackHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.bodies.append(body)
                    server.inflight += 1
                    server.most_inflight = max(server.most_inflight, server.inflight)
                    fault = server.faults.pop(0) if server.faults else None
                try:
                    time.sleep(server.delay_s)
                    if fault is not None:
                        self.send(
                            fault[0], {"error": {"message": f"fault of key {server.key}"}}, fault[1]
                        )
                    elif self.path != "/v1/chat/completions":
                        self.send(404, {"detail": "Not Found"})
                    elif server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                        self.send(401, {"error": {"message": f"wrong key {server.key}"}})
                    else:
                        self.send(200, server.answer(body))
                finally:
                    with server.lock:
                        server.inflight -= 1

        self.http = LoopbackServer(Handler, port=port)
        self.url = f"{self.http.url}/v1"
        self.close = self.http.close

    def answer(self, body: Any) -> Any:
        wanted = body["response_format"]
        assert wanted["type"] == "json_schema" and wanted["json_schema"]["strict"]
        rules = wanted["json_schema"]["schema"]["properties"]
        question = json.loads(body["messages"][-1]["content"])
        verdict: dict[str, Any] = {"reason": "as it is long"} if "reason" in rules else {}
        for name in [name for name in rules if name not in verdict]:
            grade = self.grade(question)
            verdict[name] = grade.get(name) if isinstance(grade, dict) else grade
        message = {"role": "assistant", "content": self.content(json.dumps(verdict))}
        usage = {"usage": self.usage} if self.usage else {}
        return {"choices": [{"message": message, "finish_reason": self.finish}], **usage}


def longest(question: dict[str, Any]) -> int:
    """Points for length, up to 5."""
    return min(len(question["answer"]), 5)


RUBRIC = '[[rubric]]\nname = "length"\ntext = "It is long."\n'


def write_judge(
    path: Path, server: JudgeServer | str, extra: str = "", rubric: str = RUBRIC
) -> str:
    """A judge's file."""
    url = server if isinstance(server, str) else server.url
    path.write_text(f'endpoint = "{url}"\nmodel = "m"\n{extra}\n{rubric}', encoding="utf-8")
    return str(path)
