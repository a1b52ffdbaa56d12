"""Who is connected: places shared out over addresses, and one pot of memory for the heads of requests.

A place is never refused to an address that has fewer than another while some connection of the other only waits for its
client: the one of them that has waited longest gives way. So half-sent requests and idle connections of one address
keep nobody else out, however many they are, and a pool of kept connections behind a proxy renews itself.
"""

from __future__ import annotations

import ipaddress
from typing import Protocol

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
