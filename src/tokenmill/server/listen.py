"""Where a server listens: a TCP port or a Unix socket, with TLS or without; and how many files it may have open."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Iterator

from ..core.errors import ConfigError
from .systemd import inherited_socket

_SPARE_FILES = 128  # for everything that is no connection
_PROBE_S = 1.0
BACKLOG = 2048
"""Connections that the system holds until they are accepted."""


@contextlib.contextmanager
def listening(host: str, port: int, uds: str = "") -> Iterator[socket.socket]:
    """A socket that listens: the one that systemd handed over if it did, a Unix socket at `uds` if that is given, which
    only this user may use and which is removed at the end. Raises ConfigError when the address cannot be had."""
    if (inherited := inherited_socket()) is not None:
        yield inherited
        return
    if not uds:
        with _bound(host, port) as listener:
            yield listener
        return
    with _bound_unix(uds) as listener:
        own = os.stat(uds).st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(uds).st_ino == own:
                    os.unlink(uds)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, address = _resolve(host, port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)  # two servers can be bound to one port, until the first listens
        except OSError:
            listener.close()
            raise
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        hint = "; `tokenmill ps` lists your servers, --port takes another port" if is_taken else ""
        raise ConfigError(f"Cannot listen on {host} port {port}: {error}{hint}.", param="port") from error
    listener.setblocking(False)
    return listener


def _resolve(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, address


def _bound_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on the Unix socket {path}: {error}.", param="uds") from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    """A socket file whose server has gone, and nothing else. Raises OSError for what is in use or no socket."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    try:
        _, address = _resolve(host, 0)
        return ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    except (OSError, ValueError):
        return False


def make_tls(certfile: str, keyfile: str = "", ca_certs: str = "", cert_reqs: int = 0) -> ssl.SSLContext:
    """TLS 1.2 or later by a certificate and its key (in one file or two). `cert_reqs` as in `ssl`: 1 takes clients'
    certificates, 2 demands them, signed by one of `ca_certs`. Raises ConfigError for files that do not serve."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile or None, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-certfile and --ssl-keyfile do not serve: {error}.", param="ssl_certfile") from error
    try:
        if ca_certs:
            context.load_verify_locations(ca_certs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--ssl-ca-certs {ca_certs} does not serve: {error}.", param="ssl_ca_certs") from error
    context.verify_mode = ssl.VerifyMode(cert_reqs)
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")


def raise_file_limit(max_connections: int) -> int:
    """Let this process have a file open for each of so many connections. Returns for how many it may."""
    try:
        import resource
    except ImportError:  # not a Unix: there is no such limit
        return max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(1, min(max_connections, soft - _SPARE_FILES))
