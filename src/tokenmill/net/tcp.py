"""The link between machines: workers connect to a TCP port of the front end and join it.

Unknown peers can connect here. Until the handshake has authenticated it, a peer can send only small messages, for a
short time, and as one of few: if more connect, the oldest unauthenticated connection is closed. A peer that is silent
for too long counts as gone, whatever TCP reports; both ends send keepalives when they have nothing to say. A fault of
a peer costs one log line and its own connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.errors import LinkRefused
from ..core.ports import Clock
from .framing import Pipe
from .handshake import GREETING_BYTES, Identity, greet_front_end, greet_worker, secure
from .link import EngineLink, FrontLink

_BACKLOG = 64
_RETRY_ACCEPT_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What an end proves itself with. `tls`: of net.tls; None: in clear."""

    secret: bytes = field(repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class LinkBounds:
    """max_message_bytes  of a message of a peer that has proved itself
    greeting_s         time for connecting, TLS and the handshake
    max_greeting       peers that may be at it at once
    beat_s             time between signs of life
    silence_s          a peer that was silent for so long has gone
    """

    max_message_bytes: int = 1 << 30
    greeting_s: float = 10.0
    max_greeting: int = 16
    beat_s: float = 5.0
    silence_s: float = 30.0


class WorkerListener:
    """Takes workers in at `listener`, a bound socket, which stays its maker's to close. `judge` gives "" or why a
    worker may not join; `on_joined` gets each that did, with its link, and the address that it came from."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        clock: Clock,
        judge: Callable[[Identity], str],
        on_joined: Callable[[Identity, FrontLink, str], None],
        bounds: LinkBounds | None = None,
    ) -> None:
        self._listener = listener
        self._credentials = credentials
        self._clock = clock
        self._judge = judge
        self._on_joined = on_joined
        self._bounds = bounds or LinkBounds()
        self._greeting: dict[asyncio.Task[None], str] = {}  # whence, in the order of their coming

    def open(self) -> None:
        """Needs a running loop."""
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Those that are still in the handshake are turned away; links that were made live on."""
        asyncio.get_running_loop().remove_reader(self._listener)
        for task in self._greeting:
            task.cancel()

    def _resume(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            end, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors are left, most likely: to try at once again would be all we do
            _log.warning("No worker can connect now: %s.", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_RETRY_ACCEPT_S, self._resume)
            return
        if len(self._greeting) >= self._bounds.max_greeting:
            oldest = next(iter(self._greeting))
            _log.warning("%s was turned away during the handshake: too many are at it.", self._greeting.pop(oldest))
            oldest.cancel()
        whence = f"{address[0]}:{address[1]}"
        task = asyncio.create_task(self._greet(end, whence), name="greet-worker")
        self._greeting[task] = whence
        task.add_done_callback(lambda task: self._greeting.pop(task, None))

    async def _greet(self, end: socket.socket, address: str) -> None:
        pipe, identity = Pipe(GREETING_BYTES), None
        try:
            async with asyncio.timeout(self._bounds.greeting_s):
                end = await _prepare(end, self._credentials.tls)
                pipe.connect(end)
                identity = await greet_worker(
                    pipe, self._credentials.secret, self._judge, self._bounds.max_message_bytes
                )
        except LinkRefused as error:
            _log.warning("The worker at %s is refused: %s", address, error.message)
        except TimeoutError:
            _log.warning("%s connected and did not finish the handshake.", address)
        except (EOFError, OSError) as error:
            _log.warning("%s left during the handshake: %s", address, pipe.why_ended or error)
        finally:
            if identity is None:
                pipe.end()
                end.close()
        if identity is not None:
            self._on_joined(identity, FrontLink(pipe, self._clock, _keeper(pipe, self._bounds)), address)


async def join(
    host: str, port: int, credentials: Credentials, identity: Identity, clock: Clock, bounds: LinkBounds | None = None
) -> EngineLink:
    """The worker's end of a link to the front end at `host`. Raises LinkRefused when one of the two does not want the
    other, and OSError or EOFError where another attempt may succeed."""
    bounds = bounds or LinkBounds()
    pipe = Pipe(GREETING_BYTES)
    try:
        async with asyncio.timeout(bounds.greeting_s):
            end = await _connect(host, port)
            try:
                end = await _prepare(end, credentials.tls, host)
            except BaseException:
                end.close()
                raise
            pipe.connect(end)
            await greet_front_end(pipe, credentials.secret, identity, bounds.max_message_bytes)
    except ssl.SSLCertVerificationError as error:
        raise LinkRefused(f"The front end's certificate does not serve: {error.verify_message}.") from error
    except BaseException:
        pipe.end()
        raise
    return EngineLink(pipe, clock, _keeper(pipe, bounds))


async def _connect(host: str, port: int) -> socket.socket:
    """To the first of the host's addresses that answers: localhost, for one, has two. Raises OSError, and LinkRefused
    for what cannot be a name."""
    loop = asyncio.get_running_loop()
    refused: OSError = socket.gaierror("it has no address")
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise LinkRefused(f"{host!r} cannot be the name of a host.") from None
    for family, _, _, _, address in found:
        end = socket.socket(family, socket.SOCK_STREAM)
        try:
            end.setblocking(False)
            await loop.sock_connect(end, address)
            return end
        except OSError as error:
            end.close()
            refused = error
        except BaseException:
            end.close()
            raise
    raise refused


def _keeper(pipe: Pipe, bounds: LinkBounds) -> asyncio.Task[None]:
    return asyncio.create_task(keep_alive(pipe, bounds), name="link-keeper")


async def keep_alive(pipe: Pipe, bounds: LinkBounds) -> None:
    """Sends signs of life, and ends the pipe when none come. Silence is counted in looks and not by the clock: where
    this process was stopped, the other end is given time to be heard again."""
    num_silent = 0
    beat: asyncio.Future[None] | None = None
    while not pipe.is_gone:
        if not pipe.is_sending and (beat is None or beat.done()):
            beat = asyncio.ensure_future(_send_beat(pipe))
        await asyncio.sleep(bounds.beat_s)
        num_silent = 0 if pipe.take_heard() else num_silent + 1
        if num_silent * bounds.beat_s >= bounds.silence_s:
            pipe.end(f"The other end of the link has been silent for {bounds.silence_s:g} s.")
    if beat is not None:
        beat.cancel()


async def _send_beat(pipe: Pipe) -> None:
    with contextlib.suppress(EOFError):
        await pipe.send(b"")


async def _prepare(end: socket.socket, tls: ssl.SSLContext | None, server_name: str | None = None) -> socket.socket:
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end if tls is None else await secure(end, tls, server_name)
