"""A headless Chromium that is driven over a pipe (the DevTools protocol), without a package for
it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE_S = 60.0
"""A loaded machine is slow; nothing is timed."""


class Browser:
    """One tab. ``errors`` holds exceptions of scripts and what the content security policy
    refused."""

    def __init__(self, folder: Path, *, width: int = 1440, height: int = 1000) -> None:
        assert CHROMIUM is not None
        (read_commands, self._commands), (self._answers, write_answers) = os.pipe(), os.pipe()

        def place() -> None:  # Chromium reads file 3 and writes file 4
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        options += [
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
            f"--window-size={width},{height}",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        tab = self.call(
            "Target.createTarget", url="about:blank", newWindow=True, width=width, height=height
        )["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                part = os.read(self._answers, 1 << 20)
                assert part, "Chromium ended"
                self._buffer += part
            text, _, self._buffer = self._buffer.partition(b"\0")
            event = json.loads(text)
            if event.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:600])
            if (
                event.get("method") == "Log.entryAdded"
                and event["params"]["entry"]["level"] == "error"
            ):
                self.errors.append(event["params"]["entry"]["text"])
            if event.get("id") == self._number:
                assert "error" not in event, event["error"]
                return event["result"]

    def evaluate(self, script: str) -> Any:
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + PATIENCE_S
        while not self.evaluate(f"!!({script})"):
            assert time.monotonic() < until, f"never true: {script}\n{self.text()}\n{self.errors}"
            time.sleep(0.02)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait(
            "document.readyState == 'complete' && !!(document.body.dataset.ready || "
            "document.querySelector('.notice'))"
        )

    def tab(self, name: str) -> None:
        self.evaluate(f"go({name!r})")

    def text(self) -> str:
        return self.evaluate("document.body.innerText")

    def click(self, text: str) -> None:
        """Click the first button with this text."""
        find = (
            f"[...document.querySelectorAll('button')].find(b => b.textContent.trim() == "
            f"{json.dumps(text)})"
        )
        self.evaluate(f"{find}.click()")

    def dark(self, is_dark: bool) -> None:
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}],
        )

    def picture(self, path: Path, *, full: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
