"""Front ends with tenants, and calls of them with keys: for tests."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripted import Served
from tokenmill.control.tenants.access import Access


def ask(served: Served, method: str, path: str, body: Any = None, key: str = "", **more: str) -> tuple[int, Any, Any]:
    """(status, body, headers). more: headers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **more} | ({"authorization": f"Bearer {key}"} if key else {})
    call = urllib.request.Request(served.url + path, data, headers, method=method)
    try:
        answer = urllib.request.urlopen(call, timeout=20)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read().decode()
        return answer.status, json.loads(text) if text[:1] in "{[" and text else text, answer.headers


def models(served: Served, key: str = "") -> int:
    return ask(served, "GET", "/v1/models", key=key)[0]


@contextmanager
def serving(path: str | Path, *given: Any, **settings: Any) -> Iterator[Served]:
    """A front end with the store at `path`."""
    access = Access(settings.get("api_keys", ()), str(path))
    access.open()
    try:
        with Served(*given, access=access, **settings) as served:
            yield served
    finally:
        access.close()


def until(served: Served, key: str, status: int, longest_s: float) -> None:
    """A key gets this answer within the time."""
    end_s = time.monotonic() + longest_s
    while models(served, key) != status:
        assert time.monotonic() < end_s
        time.sleep(0.02)
