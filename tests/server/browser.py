"""A headless Chromium, driven by the DevTools protocol over a pair of pipes: no driver, no websocket, no package."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str:
    """The path of a Chromium, or of the one that $CHROMIUM names. Without one the test is skipped, but fails in CI."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        reason = f"no Chromium here: install one of {', '.join(NAMES)}, or say where it is in $CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class Browser:
    def __init__(self, profile: Path):
        chromium = find_chromium()
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The protocol's ends are the descriptors 3 and 4 of the child. Copies above keep the two from overwriting each
        # other on their way there.
        copies = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]
        arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        command = f'exec "$@" 3<&{copies[0]} 4>&{copies[1]} {copies[0]}<&- {copies[1]}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", chromium, *arguments, "about:blank"],
            pass_fds=copies,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_read, to_write, *copies):
            os.close(end)
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        answers = self._answers[message["id"]] = queue.SimpleQueue()
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = answers.get(timeout=30)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, url: str, **view: Any) -> Page:
        """A page in a session of its own, with nothing stored."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.look(**view)
        page.go(url)
        return page

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        os.close(self._write)
        self._reader.join(timeout=10)
        os.close(self._read)

    def _listen(self) -> None:
        rest = b""
        while data := os.read(self._read, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page.heard(message["method"], message["params"])


class Page:
    """`problems`: what its console complains of, but for answers of the server that are errors."""

    def __init__(self, browser: Browser, session: str, target: str):
        self._browser, self._session, self._target = browser, session, target
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.problems.append(params["entry"]["text"])

    def look(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> Any:
        """Until an expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}\n{self.text()[:2000]}\n{self.problems}"
            time.sleep(0.02)
        return value

    def text(self, selector: str = "body") -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def wait_for_text(self, text: str, selector: str = "body") -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})")

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def point_at(self, selector: str) -> None:
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2] }})()")
        self.point(x, y)

    def write(self, selector: str, text: str) -> None:
        """Types a text into a field, in the place of what is there."""
        self.evaluate(
            f"(() => {{ const f = document.querySelector({json.dumps(selector)}); f.focus(); f.select() }})()"
        )
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def shoot(self, path: Path, full: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(picture))

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
