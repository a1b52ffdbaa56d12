"""What the connections of one server share: bounds, places, the pot of memory for heads, the time, and who is behind
each.

All bounds hold before anybody has asked who is there. Places are shared out over addresses. A place is never refused to
an address that has fewer than another while some connection of the other only waits for its client: the one of them
that has waited longest gives way. So half-sent requests and idle connections of one address keep nobody else out,
however many they are, and a pool of kept connections behind a proxy renews itself.

Clients are told apart by API key where keys are given out, else by address; what clients share is shared out by this
name. An address is the peer's, or, where the peer is a trusted proxy, the last one of X-Forwarded-For that is not one
too: what stands before it in that header is the caller's own claim. All of an IPv6 network of 64 bits is one client,
since whoever has one address there has them all. Peers of a Unix socket have no address, and are one client.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..core.errors import ConfigError
from ..core.masking import Mask
from ..core.units import KiB, MiB

if TYPE_CHECKING:
    import asyncio

CONNECTION_BYTES = 32 * KiB
"""What one open connection takes at most besides the shared part of its heads, measured: 6 KiB for itself, its own
share of heads, one part that is being read, and the request that runs."""

TLS_BYTES = 384 * KiB
"""What TLS adds where a body has come through it, measured: the event loop's read buffer, and OpenSSL's."""


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """Bounds of the HTTP layer; all hold before the key is looked at.

    max_connections    open at once; at the bound the address with the most gives up one that waits for its client
    max_head_bytes     request line and header lines of one request; more is 431
    max_head_lines     header lines of one request; more is 431
    max_target_bytes   path and query; more is 414
    max_heads_bytes    heads of all connections together beyond `own_head_bytes` each; more is 503
    own_head_bytes     what every connection may hold of heads, whatever the others hold
    max_pipelined      requests sent ahead on one connection; it is closed after the answer to the last of them
    head_s             from the first byte of a head, or from the connection's start, to its end; then 408
    idle_s             a connection without a request is closed after this; longer than the 60 s that load balancers
                       keep theirs, so that it is they who close
    body_s             a body may rest this long, and must come at `min_body_rate` bytes a second after it; else 408
    write_s            a client that takes nothing of its answer for this long is let go
    linger_s           what still arrives after the last answer is read and dropped this long, so that the answer
                       is not lost to a reset
    """

    max_connections: int = 2048
    max_head_bytes: int = 64 * KiB
    max_head_lines: int = 100
    max_target_bytes: int = 16 * KiB
    max_heads_bytes: int = 16 * MiB
    own_head_bytes: int = 8 * KiB
    max_pipelined: int = 8
    head_s: float = 20.0
    idle_s: float = 75.0
    body_s: float = 30.0
    min_body_rate: float = 4 * KiB
    write_s: float = 120.0
    linger_s: float = 2.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}.", param=name)

    def max_bytes(self, *, tls: bool = False) -> int:
        """Memory that connections can take before a key is checked; bodies are counted where they are read."""
        each = CONNECTION_BYTES + TLS_BYTES if tls else CONNECTION_BYTES
        return self.max_connections * each + self.max_heads_bytes


_IPV6_PREFIX = 64


class Waiting(Protocol):
    """A connection that can be told to go."""

    def give_way(self) -> None: ...


class Peers:
    """Counts places by address. Bytes of heads are taken and given back by the connections themselves."""

    def __init__(self, max_connections: int, max_heads_bytes: int) -> None:
        self.max_connections = max_connections
        self._free_bytes = max_heads_bytes
        self._counts: dict[str, int] = {}
        self._waiting: dict[str, dict[Waiting, None]] = {}
        self.num_open = 0

    def enter(self, address: str) -> bool:
        """Take a place, making room if that is fair. False: there is none."""
        if self.num_open >= self.max_connections and not self._make_room(self._counts.get(address, 0)):
            return False
        self.num_open += 1
        self._counts[address] = self._counts.get(address, 0) + 1
        return True

    def leave(self, address: str, connection: Waiting) -> None:
        self.busy(address, connection)
        self.num_open -= 1
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def waits(self, address: str, connection: Waiting) -> None:
        """The connection waits for its client from now on."""
        self._waiting.setdefault(address, {})[connection] = None

    def busy(self, address: str, connection: Waiting) -> None:
        """It no longer waits: a request is complete."""
        waiting = self._waiting.get(address)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[address]

    def take(self, num_bytes: int) -> bool:
        """Take from the pot of heads. False: it does not have as much."""
        if num_bytes > self._free_bytes:
            return False
        self._free_bytes -= num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        self._free_bytes += num_bytes

    def _make_room(self, num_own: int) -> bool:
        """Let one go of the address with the most among those with any that wait, if it has at least `num_own`."""
        most = max(self._waiting, key=lambda address: self._counts[address], default=None)
        if most is None or self._counts[most] < num_own:
            return False
        oldest = next(iter(self._waiting[most]))
        self.busy(most, oldest)
        oldest.give_way()
        return self.num_open < self.max_connections


def address_group(host: str) -> str:
    """The address that counts as one client: an IPv6 network, as one machine has all of its addresses."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


_MAX_HOPS = 32

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Clients:
    """Tells clients without a key apart. `trusted`: addresses and networks of proxies; "*": every peer is one."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self._trusts_all = "*" in trusted
        self._trusted = [parse_network(text) for text in trusted if text != "*"]

    def name(self, peer: str, forwarded_for: str) -> str:
        """The client behind a connection from `peer` ("": a Unix socket) whose X-Forwarded-For says `forwarded_for`."""
        address = _address(peer)
        if forwarded_for and self._is_trusted(address):
            for hop in reversed(forwarded_for.split(",")[-_MAX_HOPS:]):
                given = _address(hop.strip())
                if given is None:
                    break
                address = given
                if self._trusts_all or not self._is_trusted(given):
                    break
        return "" if address is None else address_group(str(address))

    def _is_trusted(self, address: Address | None) -> bool:
        if self._trusts_all:
            return True
        return address is not None and any(address in network for network in self._trusted)


def parse_network(text: str) -> Network:
    """'10.0.0.0/8' or a single address. Raises ConfigError."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ConfigError(
            f"trusted-proxies takes addresses and networks such as 10.0.0.0/8, or *; got {text!r}.",
            param="trusted_proxies",
        ) from None


def _address(text: str) -> Address | None:
    """An address, with a port or without, as proxies write it; None for anything else."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


_MANY = 64
_MAX_TICK_S = 1.0
_TICKS = 8  # of the shortest bound


class Checked(Protocol):
    """A connection, as all of them together know it."""

    def give_way(self) -> None: ...

    def check(self, now: float) -> None: ...


class Connections:
    """Make it inside a running loop; `open` starts the clock that `close` stops. mask: of what the access log shows.

    note_refused  called with the status of a request that was refused before the application saw it
    on_shrunk     called when far fewer connections are left than there were: memory may be given back
    """

    def __init__(
        self,
        bounds: HttpBounds,
        mask: Mask,
        *,
        root_path: str = "",
        tls: ssl.SSLContext | None = None,
        note_refused: Callable[[int], None] = lambda status: None,
        on_shrunk: Callable[[], None] = lambda: None,
    ) -> None:
        self.bounds = bounds
        self.mask = mask
        self.root_path = root_path
        self.tls = tls
        self.peers = Peers(bounds.max_connections, bounds.max_heads_bytes)
        self.note_refused = note_refused
        self._on_shrunk = on_shrunk
        self._num_peak = 0
        self._connections: dict[Checked, None] = {}
        times = (bounds.head_s, bounds.idle_s, bounds.body_s, bounds.write_s, bounds.linger_s)
        self._tick_s = min(_MAX_TICK_S, min(times) / _TICKS)
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._tick()

    def close(self) -> None:
        """Stop the clock, and end what is open."""
        for connection in list(self._connections):
            connection.give_way()
        if self._timer is not None:
            self._timer.cancel()

    def enter(self, connection: Checked, address: str) -> bool:
        """A new connection. False: there is no place for it."""
        if not self.peers.enter(address):
            return False
        self.peers.waits(address, connection)
        self._connections[connection] = None
        self._num_peak = max(self._num_peak, len(self._connections))
        return True

    def leave(self, connection: Checked, address: str) -> None:
        self.peers.leave(address, connection)
        del self._connections[connection]

    def _tick(self) -> None:
        from asyncio import get_running_loop  # not where only the bounds are read, as by --help

        loop = get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            connection.check(now)
        if self._num_peak >= _MANY and len(self._connections) <= self._num_peak // 2:
            self._num_peak = len(self._connections)
            self._on_shrunk()
        self._timer = loop.call_later(self._tick_s, self._tick)
