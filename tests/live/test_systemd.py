"""`serve` as systemd starts it: with a socket that is bound already, and told when it is ready and when it stops."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = 'export LISTEN_PID=$$ LISTEN_FDS=%d; exec "$@" 3<&0'
"""What systemd does between fork and exec; the socket comes as standard input."""


def start(listener: socket.socket, notified: Path, state: Path, *args: str, num: int = 1) -> subprocess.Popen[str]:
    serve = [sys.executable, "-m", "tokenmill.cli.main", "serve", "smollm2", *args]
    return subprocess.Popen(
        ["/bin/sh", "-c", BEGIN % num, "sh", *serve],
        stdin=listener,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NOTIFY_SOCKET": str(notified), "TOKENMILL_STATE": str(state)},
    )


def test_it_serves_on_the_socket_that_was_handed_over_and_tells_its_state(tmp_path: Path) -> None:
    notified = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as states, socket.create_server(("127.0.0.1", 0)) as listener:
        states.bind(str(notified))
        states.settimeout(120)
        port = listener.getsockname()[1]
        with start(listener, notified, tmp_path, "--port", "1") as process:
            try:
                # A call that comes before the model is there waits in the socket, and is answered.
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
                connection.request("GET", "/v1/models")
                assert connection.getresponse().status == 200
                connection.close()
                assert states.recv(100) == b"READY=1"
                process.terminate()
                assert states.recv(100) == b"STOPPING=1"
            finally:
                process.terminate()
            output = process.communicate()[0]
        assert f"ready at http://127.0.0.1:{port} " in output


@pytest.mark.parametrize(
    "kind, num, says",
    [
        (socket.SOCK_STREAM, 2, "2 sockets"),
        (socket.SOCK_DGRAM, 1, "no stream"),
    ],
)
def test_other_sockets_are_refused(kind: int, num: int, says: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, kind) as listener:
        listener.bind(("127.0.0.1", 0))
        with start(listener, tmp_path / "nobody", tmp_path, num=num) as process:
            assert says in process.communicate()[0] and process.returncode == 2


def test_one_connection_is_refused(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with near, far, start(near, tmp_path / "nobody", tmp_path) as process:
        output = process.communicate()[0]
        assert "must have Accept=no" in output and output.count("\n") == 1 and process.returncode == 2


def test_a_file_is_no_socket(tmp_path: Path) -> None:
    with open(os.devnull) as file, start(file, tmp_path / "nobody", tmp_path) as process:  # type: ignore[arg-type]
        output = process.communicate()[0]
        assert "is no socket" in output and output.count("\n") == 1 and process.returncode == 2


def test_an_address_that_others_reach_still_needs_keys(tmp_path: Path) -> None:
    """The address is the socket's, whatever --host says."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))  # and nobody listens
        with start(listener, tmp_path / "nobody", tmp_path, "--host", "127.0.0.1") as process:
            output = process.communicate()[0]
        assert "can be reached from other machines" in output and process.returncode == 2
