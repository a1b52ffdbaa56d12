"""Who calls: by API key where keys are given out, else by address. What clients share is shared out by this name.

An address is the peer's, or, where the peer is a trusted proxy, the last one of X-Forwarded-For that is not one too:
what stands before it in that header is the caller's own claim. All of an IPv6 network of 64 bits is one client, since
whoever has one address there has them all. Peers of a Unix socket have no address, and are one client.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from ..core.errors import ConfigError
from .peers import address_group

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
