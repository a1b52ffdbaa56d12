"""How the two ends of a network link authenticate each other before either acts on a message.

    worker                                            front end
    HELLO, version, a nonce                     ->
                                                <-    HELLO, version, a nonce
    HMAC(secret, "worker" + both hellos)        ->
                                                <-    HMAC(secret, "front end" + both hellos)
    who it is and what it computes              ->
                                                <-    nothing, or the reason for a refusal

The secret is never sent. Each proof covers both nonces, so it cannot be used twice, and the name of the end that made
it, so it cannot be sent back to its maker. The worker, which connects, proves itself first: an unknown peer that
connects gets no proof with which it could test guesses of the secret. Instead of its next message the front end may
send a refusal. (Challenge and response as in ISO/IEC 9798-4; HMAC-SHA-256 as in RFC 2104.)

This authenticates the peer, and what follows: all after the two proofs is tagged (`core.mac`), with a key for each
direction that is derived from the secret and both hellos. It does not encrypt; between machines TLS does, where both
ends show a certificate signed by one authority (`mutual_tls`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..core.errors import ConfigError, LinkRefused
from ..core.events import Ready
from ..core.mac import connection_macs
from .framing import Pipe

PROTOCOL = 3
"""Version of this handshake and of all messages after it. Ends of different versions refuse each other."""

GREETING_BYTES = 4096
"""Longest message of the handshake."""

MIN_SECRET_BYTES = 16
WORKER, FRONT_END = b"worker", b"front end"
_MAGIC = b"tokenmill"
_NONCE_BYTES = 32
_REFUSAL = b"!"
_MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself; by this the front end decides whether it may join.

    weights        digest of the checkpoint's weights
    ready          the facts of its engine, and which worker it is: a second link from the same life replaces the first,
                   one from a later life ends the earlier life's
    """

    weights: str
    ready: Ready


_IDENTITY = msgspec.msgpack.Decoder(Identity)


async def greet_worker(pipe: Pipe, secret: bytes, judge: Callable[[Identity], str], max_bytes: int) -> Identity:
    """The front end's half. `judge` gives "", or why this worker is not wanted. Raises LinkRefused, with the reason,
    after the peer was told what it may know; EOFError when the peer leaves. `max_bytes`: of a message from then on."""
    theirs = await pipe.receive()
    try:
        _check_hello(theirs, WORKER)
    except LinkRefused as error:
        await _refuse(pipe, error.message)
        raise
    ours = _hello(FRONT_END)
    await pipe.send(ours)
    if not hmac.compare_digest(await pipe.receive(), _proof(secret, WORKER, theirs + ours)):
        reason = "It does not have this front end's secret."
        await _refuse(pipe, "The secret is not this front end's.")
        raise LinkRefused(reason)
    pipe.max_bytes = max_bytes
    await pipe.send(_proof(secret, FRONT_END, theirs + ours))
    # The loop has read nothing since the proof's last byte was written: what comes after it has tags.
    pipe.protect(*connection_macs(secret, theirs + ours, FRONT_END, WORKER))
    try:
        identity = _IDENTITY.decode(await pipe.receive())
    except msgspec.MsgspecError as error:
        raise LinkRefused(f"It does not say who it is: {error}.") from error
    if reason := judge(identity):
        await _refuse(pipe, reason)
        raise LinkRefused(reason)
    await pipe.send(b"=")
    return identity


async def greet_front_end(pipe: Pipe, secret: bytes, identity: Identity, max_bytes: int) -> None:
    """The worker's half. Raises LinkRefused, with the reason, and EOFError when the front end leaves."""
    ours = _hello(WORKER)
    await pipe.send(ours)
    theirs = _unless_refused(await pipe.receive())
    _check_hello(theirs, FRONT_END)
    await pipe.send(_proof(secret, WORKER, ours + theirs))
    if not hmac.compare_digest(_unless_refused(await pipe.receive()), _proof(secret, FRONT_END, ours + theirs)):
        raise LinkRefused("The front end does not have this worker's secret.")
    pipe.protect(*connection_macs(secret, ours + theirs, WORKER, FRONT_END))
    pipe.max_bytes = max_bytes
    await pipe.send(msgspec.msgpack.encode(identity))
    _unless_refused(await pipe.receive())


def _hello(role: bytes) -> bytes:
    return _head(role) + secrets.token_bytes(_NONCE_BYTES)


def _head(role: bytes) -> bytes:
    return _MAGIC + PROTOCOL.to_bytes(2, "little") + role


def _check_hello(data: bytes, role: bytes) -> None:
    head = _head(role)
    if data[: len(_MAGIC)] != _MAGIC:
        raise LinkRefused("It does not speak tokenmill's protocol.")
    version = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 2], "little")
    if version != PROTOCOL:
        raise LinkRefused(f"The other end speaks version {version} of the protocol, this one {PROTOCOL}.")
    if data[: len(head)] != head or len(data) != len(head) + _NONCE_BYTES:
        raise LinkRefused(f"It is no {role.decode()}.")


def _proof(secret: bytes, role: bytes, hellos: bytes) -> bytes:
    return hmac.new(secret, role + b"\0" + hellos, hashlib.sha256).digest()


async def _refuse(pipe: Pipe, reason: str) -> None:
    await pipe.send(_REFUSAL + reason.encode()[:_MAX_REASON])


def _unless_refused(data: bytes) -> bytes:
    """Proofs are 32 bytes, refusals longer or shorter in any case: a proof may begin with any byte."""
    if data[:1] == _REFUSAL and len(data) != hashlib.sha256().digest_size:
        reason = "".join(char for char in data[1:_MAX_REASON].decode(errors="replace") if char.isprintable())
        raise LinkRefused(f"The front end refuses this worker: {reason}")
    return data


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
