"""What systemd hands to a service and hears of it: the socket of socket activation (sd_listen_fds(3)), and its state
(sd_notify(3))."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket

from ..core.errors import ConfigError

_FIRST_FD = 3
_log = logging.getLogger(__name__)


@functools.cache
def inherited_socket() -> socket.socket | None:
    """The stream socket, bound already, that systemd opened for this process. None: it opened none. Raises ConfigError
    for several, and for one of another kind."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):  # meant for another process, from which this one descends
        return None
    num = os.environ.get("LISTEN_FDS", "0")
    if num != "1":
        raise ConfigError(f"systemd handed over {num} sockets; serve takes one: ListenStream= once in the socket unit.")
    os.set_inheritable(_FIRST_FD, False)
    try:
        listener = socket.socket(fileno=_FIRST_FD)
    except OSError as error:
        raise ConfigError(f"What systemd handed over is no socket: {error}.") from None
    if listener.type != socket.SOCK_STREAM:
        raise ConfigError("systemd handed over a socket that is no stream; serve takes one of ListenStream=.")
    with contextlib.suppress(OSError):
        listener.getpeername()
        raise ConfigError("systemd handed over one connection; the socket unit must have Accept=no.")
    listener.setblocking(False)
    return listener


def notify(state: str) -> None:
    """Tell systemd, where it asks for that (Type=notify): "READY=1", "STOPPING=1"."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.connect(name)
            to.send(state.encode())
    except OSError as error:
        _log.warning("systemd was not told %s: %s.", state, error)
