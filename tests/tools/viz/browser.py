"""A real browser, driven over a pipe (the Chrome DevTools protocol): sizes, themes, fingers, what is on the screen."""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE = 60.0  # seconds for one answer
# The browser reads commands from its file descriptor 3 and writes answers to 4.
LAUNCH = """
import os, sys
ours = [os.dup(int(each)) for each in sys.argv[1:3]]
while min(ours) < 5:
    ours = [os.dup(each) for each in ours]
os.dup2(ours[0], 3)
os.dup2(ours[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str:
    """The browser of this machine. Without one the test is skipped, and fails where CI is set."""
    path = next((path for name in NAMES if (path := shutil.which(name))), None)
    if path is None:
        message = f"no browser: install one of {', '.join(NAMES)}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


class Browser:
    """One browser with one tab."""

    def __init__(self, profile: Path) -> None:
        path = executable()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), path, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        try:
            self.ask("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(
        self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False
    ) -> None:
        """Load a page in a window of this size, and wait until its charts are drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height, touch)
        self.ask("Page.navigate", url=page.resolve().as_uri())
        drawn = "(!document.querySelector('.view') || 'ready' in document.documentElement.dataset)"
        self.wait(f"document.readyState === 'complete' && {drawn}")

    def resize(self, width: int, height: int, touch: bool = False) -> None:
        """Change the size of the window."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if touch else 1,
            mobile=touch,
        )
        self.ask("Emulation.setTouchEmulationEnabled", enabled=touch)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Return when a JavaScript condition holds."""
        until = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < until, f"never true: {condition}"
            time.sleep(0.02)

    def frame(self) -> None:
        """Wait until what was asked for is on the screen."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def tap(self, x: float, y: float) -> None:
        """One finger, down and up."""
        self.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.frame()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One event of the mouse: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def key(self, key: str) -> None:
        """Press and release one key."""
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def shot(self) -> np.ndarray:
        """The window's pixels: rows, columns, (red, green, blue)."""
        data = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
