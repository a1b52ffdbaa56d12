"""Where the server is, and a guard: what a client's package sends anywhere else fails the run.

Read by the pytest of the clients' environment, in a process of its own that `test_clients.py` starts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

HERE = ("127.0.0.1", "::1", "localhost", None)
_outside: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook, so that it sees background threads and every library; it refuses what it notes."""
    if event == "socket.connect":
        host = args[1][0] if isinstance(args[1], tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in HERE:
        _outside.append(f"{event} {host}")
        raise OSError(f"a connection to {host}: only this machine may be called")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_watch)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _outside:
        print("\nconnections that left this machine:", *sorted(set(_outside)), sep="\n")
        session.exitstatus = 1


@pytest.fixture(scope="session")
def root() -> str:
    """http://127.0.0.1:PORT"""
    return os.environ["SERVER_URL"]


@pytest.fixture(scope="session")
def url(root: str) -> str:
    """What a client of OpenAI's API is told."""
    return root + "/v1"


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ["SERVER_MODEL"]
