"""Heads of the audit log as datagrams to syslog (RFC 5424): what another machine keeps, nobody rewrites here."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from ...core.errors import ConfigError

_PRIORITY = 10 * 8 + 5  # authpriv, notice
_log = logging.getLogger(__name__)


class Syslog:
    """Sends to a Unix socket, where `address` is a path, or by UDP to HOST:PORT. What cannot be sent is counted."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._host = socket.gethostname()
        self._num_sent = self._num_lost = 0
        if address.startswith("/"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._target: Any = address
        else:
            self._socket, self._target = _udp(address)
        self._socket.setblocking(False)

    def send(self, head: dict[str, Any]) -> None:
        text = "head={seq}:{hash} key={key} signature={signature}".format(**head)
        line = f"<{_PRIORITY}>1 {head['time']} {self._host} tokenmill {os.getpid()} audit-head - {text}"
        try:
            self._socket.sendto(line.encode(), self._target)
            self._num_sent += 1
        except OSError as error:
            if not self._num_lost:
                _log.warning("The audit log's head cannot be sent to syslog at %s: %s.", self._address, error.strerror)
            self._num_lost += 1

    def status(self) -> dict[str, Any]:
        return {"address": self._address, "sent": self._num_sent, "lost": self._num_lost}

    def close(self) -> None:
        self._socket.close()


def _udp(address: str) -> tuple[socket.socket, Any]:
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--audit-syslog must be a path, HOST:PORT or off, got {address!r}.", param="audit_syslog"
        ) from error
    return socket.socket(family, kind), target
