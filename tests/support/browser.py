"""A page in headless Chromium, through its debugging protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--window-size=900,700",
    "--remote-debugging-pipe",
)
SECONDS = 120.0  # programs may be compiled meanwhile


def program() -> str | None:
    """The path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """A page that is open."""

    def __init__(self, commands, events, url: str):
        self._commands, self._events = commands, events
        self._numbers, self._session = itertools.count(1), None
        target = self.call("Target.createTarget", url=url)["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.wait("location.protocol === 'http:' && document.readyState === 'complete'")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> bytes:
        parts = []
        while (byte := self._events.read(1)) != b"\0":
            assert byte, "the browser has ended"
            parts.append(byte)
        return b"".join(parts)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> Any:
        """Waits until an expression is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def screenshot(self, path: pathlib.Path) -> None:
        """Writes what the page shows."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def opened(url: str, profile: pathlib.Path) -> Iterator[Page]:
    """A page for a `with` block."""
    read_commands, write_commands = os.pipe()
    read_events, write_events = os.pipe()
    # Chromium reads commands from descriptor 3, and writes to 4.
    shell = f'exec "$@" 3<&{read_commands} 4>&{write_events}'
    command = ["bash", "-c", shell, "bash", program(), *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command, pass_fds=(read_commands, write_events), stderr=subprocess.DEVNULL
    )
    os.close(read_commands)
    os.close(write_events)
    try:
        with os.fdopen(write_commands, "wb") as commands, os.fdopen(read_events, "rb") as events:
            yield Page(commands, events, url)
    finally:
        process.terminate()
        process.wait(SECONDS)
