"""A stand-in for the Hugging Face hub on loopback: its API, files with digests and ranges, and storage at another
origin that it sends downloads on to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tokenmill.formats import hub_client


@dataclass
class FakeHub:
    """files: of every repository that is asked for. served: what comes instead of a file, with the digest of the file.
    cuts: for each download to come, after how many bytes its connection ends. refusal: (status, X-Error-Code) of all
    answers. found: what a search finds. calls: (path, headers) of each. stall: the next download stops there until
    go_on, having told by is_stalled. validators: headers by which a file is known. takes_conditions: If-Range is
    obeyed. shift: ranges begin so much later than asked, and say so."""

    files: dict[str, bytes] = field(default_factory=dict)
    served: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    takes_ranges: bool = True
    tells_size: bool = True
    validators: tuple[str, ...] = ("ETag",)
    takes_conditions: bool = True
    shift: int = 0
    commit: str = "c0ffee"
    found: list[dict[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""
    stall: int = 0
    is_stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def downloads(self) -> list[str]:
        """The ranges that were asked of the storage, "" for a whole file."""
        return [headers.get("Range", "") for path, headers in self.calls if path.startswith("/storage/")]


def _about(name: str, data: bytes) -> dict[str, Any]:
    about: dict[str, Any] = {"rfilename": name, "size": len(data)}
    about["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if name.endswith((".gguf", ".safetensors", ".bin")):
        about["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return about


@contextlib.contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Meanwhile it is the hub of this process and its children. No token is set, and retries do not wait."""
    hub = FakeHub()
    monkeypatch.setattr(hub_client, "_RETRY_S", 0.0)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", "/nonexistent")
    monkeypatch.setenv("NO_PROXY", "*")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urllib.parse.urlsplit(self.path)
            path = urllib.parse.unquote(parts.path)
            hub.calls.append((self.path, dict(self.headers)))
            if hub.refusal is not None:
                self.answer(hub.refusal[0], b"", {"X-Error-Code": hub.refusal[1]})
            elif path == "/api/models":
                self.answer(200, json.dumps(hub.found).encode())
            elif path.startswith("/api/models/"):
                siblings = [_about(name, data) for name, data in hub.files.items()]
                self.answer(200, json.dumps({"sha": hub.commit, "siblings": siblings}).encode())
            elif f"/resolve/{hub.commit}/" in path:
                name = path.partition(f"/resolve/{hub.commit}/")[2]
                there = hub.url.replace("127.0.0.1", "localhost")
                self.answer(302, b"", {"Location": f"{there}/storage/{urllib.parse.quote(name)}?signature=secret"})
            elif path.startswith("/storage/"):
                self.file(path.removeprefix("/storage/"))
            else:
                self.answer(404, b"")

        def file(self, name: str) -> None:
            if name not in hub.files:
                return self.answer(404, b"")
            data = hub.served.get(name, hub.files[name])
            digest, start = hashlib.md5(data).hexdigest(), 0
            known_by = {"ETag": f'"{digest}"', "Weak": f'W/"{len(data)}"', "Last-Modified": f"on {digest}"}
            headers = {name.replace("Weak", "ETag"): known_by[name] for name in hub.validators}
            condition = self.headers.get("If-Range") if hub.takes_conditions else None
            is_same = condition is None or condition in headers.values()
            if hub.takes_ranges and is_same and (asked := self.headers.get("Range")):
                start = int(asked.removeprefix("bytes=").removesuffix("-")) + hub.shift
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            end = start + hub.cuts.pop(0) if hub.cuts else None
            self.answer(206 if "Content-Range" in headers else 200, data[start:], headers, data[start:end])

        def answer(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, sent: bytes | None = None
        ) -> None:
            self.send_response(status)
            size = {"Content-Length": str(len(body))} if hub.tells_size else {}
            for name, value in {**(headers or {}), **size}.items():
                self.send_header(name, value)
            self.end_headers()
            sent = body if sent is None else sent
            if hub.stall and len(sent) > hub.stall:
                stall, hub.stall = hub.stall, 0
                self.wfile.write(sent[:stall])
                hub.is_stalled.set()
                hub.go_on.wait(60)
                sent = b""
            with contextlib.suppress(ConnectionError):
                self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
