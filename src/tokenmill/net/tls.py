"""TLS on a link between machines: both ends show a certificate signed by one authority."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from ..core.errors import ConfigError


def mutual_tls(certificate: str, key: str, authority: str, *, is_front_end: bool) -> ssl.SSLContext:
    """TLS 1.3 with the certificate and key in these files; the peer's must be signed by `authority`, and where the peer
    is the front end it must be for the name that was connected to. Raises ConfigError for files that do not serve."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_front_end else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--worker-tls-cert {certificate} and --worker-tls-key {key} do not serve: {error}.",
            param="worker_tls_cert",
        ) from error
    try:
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--worker-tls-ca {authority} does not serve: {error}.", param="worker_tls_ca") from error
    return context


async def secure(end: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> ssl.SSLSocket:
    """The connected, non-blocking `end` after the TLS handshake. `server_name`: whom the certificate of the front end
    must name; None: this is the front end. Raises OSError (ssl.SSLError is one)."""
    secured = context.wrap_socket(
        end, server_side=server_name is None, server_hostname=server_name, do_handshake_on_connect=False
    )
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                secured.do_handshake()
                return secured
            except ssl.SSLWantReadError:
                await _until(loop.add_reader, loop.remove_reader, secured)
            except ssl.SSLWantWriteError:
                await _until(loop.add_writer, loop.remove_writer, secured)
    except BaseException:
        secured.close()
        raise


async def _until(
    add: Callable[[socket.socket, Callable[[], None]], object],
    remove: Callable[[socket.socket], object],
    end: socket.socket,
) -> None:
    """Waits until the loop says that `end` is ready."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(end, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(end)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one that is not")
