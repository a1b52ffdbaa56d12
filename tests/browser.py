"""A headless Chromium, driven over its debugging pipe: NUL-separated JSON on two file descriptors, no port, no package.

`Browser` is one process with a profile folder of its own; `page()` opens a tab that shares nothing with other tabs.
What a page logs, what its content policy refuses and what it raises are kept in `Page.complaints`; what it asks for
over the network in `Page.requests`. Waiting polls in the page, since what is waited for is drawn there.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--mute-audio",
    "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip
_TIMEOUT_S = 90.0
_AS_3_AND_4 = """import os, sys
for number, end in ((3, sys.argv[1]), (4, sys.argv[2])):
    os.dup2(int(end), number)
    os.close(int(end))
os.execv(sys.argv[3], sys.argv[3:])"""
"""Chromium reads from descriptor 3 and writes to 4. Those given are above 9."""


def chromium() -> str | None:
    """Its program, or None where there is none. CHROMIUM names another."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A context manager that leaves no process and no folder."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._number = 0
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="tokenmill-chromium-", ignore_cleanup_errors=True)
        take, self._write = os.pipe()
        self._read, give = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (take, give)]
        os.close(take)
        os.close(give)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AS_3_AND_4, *map(str, ends), self._program, *FLAGS,
             f"--user-data-dir={self._folder.name}"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": self._folder.name},
        )  # fmt: skip
        for end in ends:
            os.close(end)
        self._reader = threading.Thread(target=self._hear, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, TimeoutError, AssertionError):
            self.tell("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        self._reader.join(10)
        os.close(self._read)
        self._folder.cleanup()

    def tell(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command and give its result."""
        answer: Queue[dict[str, Any]] = Queue()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answer
            message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
            os.write(self._write, json.dumps(message).encode() + b"\0")
        try:
            said = answer.get(timeout=_TIMEOUT_S)
        except Empty:
            raise TimeoutError(f"no answer to {method}") from None
        assert "error" not in said, f"{method}: {said['error']}"
        result: dict[str, Any] = said["result"]
        return result

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1280, height: int = 800, **media: str) -> Iterator[Page]:
        """A tab in a context of its own, at `url`. media: features such as prefers-color-scheme, with _ for -."""
        context = self.tell("Target.createBrowserContext")["browserContextId"]
        target = self.tell("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
                page.tell(f"{domain}.enable")
            page.resize(width, height)
            features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
            page.tell("Emulation.setEmulatedMedia", features=features)
            page.tell("Page.navigate", url=url)
            page.loaded()
            yield page
        finally:
            del self._pages[session]
            self.tell("Target.disposeBrowserContext", browserContextId=context)

    def _hear(self) -> None:
        rest = b""
        while data := os.read(self._read, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    page.note(message["method"], message["params"])


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self._loads: Queue[None] = Queue()

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.tell(method, self._session, **params)

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif method == "Page.loadEventFired":
            self._loads.put(None)
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Audits.issueAdded" and params["issue"]["code"] == "ContentSecurityPolicyIssue":
            self.complaints.append(json.dumps(params["issue"]["details"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["source"] in ("security", "javascript"):
            self.complaints.append(params["entry"]["text"])

    def loaded(self) -> None:
        """Wait for the end of a load that has been asked for."""
        self._loads.get(timeout=_TIMEOUT_S)

    def reload(self) -> None:
        self.tell("Page.reload")
        self.loaded()

    def run(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        said = self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait(self, script: str, timeout_s: float = _TIMEOUT_S) -> Any:
        """The value of an expression as soon as it is true; an element counts as true."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(f"(value => value instanceof Node || value)({script})")):
            assert time.monotonic() < deadline, (
                f"waited {timeout_s:.0f} s for {script}; the page says: {self.text()[-2000:]}"
            )
            time.sleep(0.02)
        return value

    def text(self) -> str:
        said: str = self.run("document.body.innerText")
        return said

    def wait_text(self, text: str) -> None:
        self.wait(f"document.body.innerText.includes({json.dumps(text)})")

    def click(self, name: str, place: str = "button, a, summary") -> None:
        """The last visible element of this text or label."""
        self.wait(f"({_FIND})({json.dumps(place)}, {json.dumps(name)})?.click() === undefined")

    def fill(self, label: str, text: str) -> None:
        """The visible field of this label, as soon as it is there, as typing over what it has would."""
        self.wait(f"({_FIELD})({json.dumps(label)}, {json.dumps(text)})")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.tell("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        how = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.tell("Input.dispatchKeyEvent", type="keyDown", **how, **({"text": text} if text else {}))
        self.tell("Input.dispatchKeyEvent", type="keyUp", **how)

    def focused(self) -> str:
        """What has the focus: its label or text."""
        said: str = self.run(_FOCUSED)
        return said

    def resize(self, width: int, height: int) -> None:
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.tell("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


_FIND = """(place, name) => {
  const found = [...document.querySelectorAll(place)].filter((each) => each.checkVisibility() && !each.disabled
    && [each.getAttribute("aria-label"), each.innerText?.trim()].includes(name));
  if (!found.length) return { click: () => null };
  return found.at(-1);
}"""
_FIELD = """(label, text) => {
  const control = [...document.querySelectorAll("label")].find((each) => each.innerText.trim() === label)?.control
    ?? document.querySelector(`[aria-label="${label}"]`);
  if (!control) return false;
  control.focus();
  if (control.type === "checkbox") { if (control.checked !== Boolean(text)) control.click(); return true; }
  control.value = text;
  control.dispatchEvent(new Event("input", { bubbles: true }));
  control.dispatchEvent(new Event("change", { bubbles: true }));
  return true;
}"""
_FOCUSED = """(() => {
  const one = document.activeElement;
  return one.getAttribute("aria-label") || one.labels?.[0]?.innerText?.trim() || one.innerText?.trim() || one.tagName;
})()"""
