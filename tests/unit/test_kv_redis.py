"""Redis servers that others write to, or that are none of ours: each call ends in time, takes no more than it asked
for, and tells no secrets."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from remote_stores import RedisServer
from tokenmill.core.errors import ConfigError
from tokenmill.kv.transfer.remote.redis import RedisBackend, _client
from tokenmill.kv.transfer.remote.tier import open_backend

MOST = 1000


def backend_at(url: str) -> RedisBackend:
    pytest.importorskip("redis", reason="redis is not installed (pip install 'tokenmill[kv-redis]')")
    backend, _ = open_backend(url)
    assert isinstance(backend, RedisBackend)
    return backend


def values_of(backend: RedisBackend, names: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    backend.get(names, MOST, lambda nth, value: found.update({names[nth]: bytes(value)}), 5.0)
    return found


@contextmanager
def a_server(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Takes connections, reads what comes first, and answers so; the event is set when the test is over."""
    is_over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(4096)
            answer(connection, is_over)
            is_over.wait(60)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.settimeout(60)
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield f"redis://me:hush-hush@127.0.0.1:{listener.getsockname()[1]}"
    finally:
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in [accepting, *threads]:
            thread.join(60)


def test_what_others_put_under_our_names_is_cut_or_empty(tmp_path: Path) -> None:
    """Values that are too long come as so many bytes that they cannot be right, an empty one and a list as nothing;
    what lies beside them comes, and what is not there does not. All can be deleted, and written anew."""
    with RedisServer(tmp_path) as server:
        import redis

        others = redis.Redis(unix_socket_path=str(server.path))
        others.set("long", b"x" * 5_000_000)
        others.set("fits", b"y" * MOST)
        others.set("empty", b"")
        others.rpush("list", b"1", b"2")
        backend, names = backend_at(server.url), ["long", "gone", "empty", "list", "fits"]
        expected = {"long": b"x" * (MOST + 1), "empty": b"", "list": b"", "fits": b"y" * MOST}
        assert values_of(backend, names) == expected
        assert backend.has(names, 5.0) == [True, False, True, True, True]
        backend.delete(names, 5.0)
        assert backend.has(names, 5.0) == [False] * 5
        for value in (b"z", bytearray(b"z"), memoryview(b"z")):
            assert backend.put([("list", value)], 5.0) == [True] and values_of(backend, ["list"]) == {"list": b"z"}
            backend.delete(["list"], 5.0)
        others.close()
        backend.close()


def test_a_server_that_sends_ever_more_is_not_listened_to() -> None:
    """However long a value it announces: it is not kept in memory until it is whole."""
    num_sent = 0

    def answer(connection: socket.socket, is_over: threading.Event) -> None:
        nonlocal num_sent
        connection.sendall(b"+OK\r\n")
        connection.recv(4096)
        connection.sendall(b"$500000000\r\n")
        while not is_over.is_set():
            num_sent += connection.send(bytes(65536))

    with a_server(answer) as url:
        backend = backend_at(url)
        with pytest.raises(ConnectionError, match="more than was asked for"):
            backend.get(["x"], MOST, lambda nth, value: None, 60.0)
        backend.close()
    assert num_sent < 100_000_000


@pytest.mark.parametrize("begins", [b"+OK\r\n$900\r\n", b"+", b"-"])
def test_a_server_that_says_a_little_now_and_then_holds_nobody_up(begins: bytes) -> None:
    """While a connection begins, and later: the limit is that of the whole call."""

    def answer(connection: socket.socket, is_over: threading.Event) -> None:
        connection.sendall(begins)
        while not is_over.wait(0.02):
            connection.sendall(b"x")

    with a_server(answer) as url:
        backend = backend_at(url)
        with pytest.raises(TimeoutError):
            backend.get(["x"], MOST, lambda nth, value: None, 0.3)
        backend.close()


@pytest.mark.parametrize(
    "said",
    [
        b"-ERR unknown command 'AUTH', with args beginning with: 'me' 'hush-hush' \r\n",
        b"-ERR something 'hush-hush'\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
    ],
)
def test_errors_do_not_repeat_the_password(said: bytes) -> None:
    """Whatever the server says of the login."""

    def answer(connection: socket.socket, is_over: threading.Event) -> None:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)

    with a_server(answer) as url:
        backend = backend_at(url)
        with pytest.raises(OSError) as caught:
            backend.check(5.0)
        assert "hush" not in str(caught.value) and "hush" not in repr(backend.name)
        backend.close()


def test_who_has_not_the_package_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the server starts, by the name of the extra."""
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "tokenmill.kv.transfer.remote.redis_connection", raising=False)
    monkeypatch.delattr("tokenmill.kv.transfer.remote.redis_connection", raising=False)
    with pytest.raises(ConfigError, match=r"tokenmill\[kv-redis\]"):
        _client()
