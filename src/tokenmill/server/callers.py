"""Which web pages may call, and what a caller may do beside generating.

A browser sends requests for any page that is open in it, and says for which. A page of another origin may not call what
changes or costs something, unless its origin is allowed; without an Origin header it is no page. And a page whose own
name was made to lead to this machine (DNS rebinding) shows by that name in the Host header: where only this machine can
connect, Host must be a name that is known to mean it.

The gate has put the scopes of a caller's key in `scope["state"]["scopes"]`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from ..core.errors import Forbidden
from ..core.tenant import ADAPTERS, ADMIN, OPERATOR
from .listen import is_loopback


def require_admin(request: HttpRequest) -> None:
    """For what changes tenants, keys or the server. Raises Forbidden."""
    if ADMIN not in request.state.scopes:
        if OPERATOR in request.state.scopes:  # no keys are asked for
            raise Forbidden(
                "Where no API keys are asked for, the command line alone manages tenants and keys: "
                "tokenmill keys create NAME --admin"
            )
        raise Forbidden("This needs an API key of scope admin. Make one with: tokenmill keys create NAME --admin")


def require_local_admin(request: HttpRequest) -> None:
    """For what changes the server's work for all. Where no keys are asked for, callers of this machine may. Raises
    Forbidden."""
    scopes, peer = request.state.scopes, request.client
    if ADMIN in scopes:
        return
    if OPERATOR not in scopes:
        raise Forbidden("This needs an API key of scope admin.")
    if peer is not None and (not is_loopback(peer.host) or "x-forwarded-for" in request.headers):
        raise Forbidden("Where no API keys are asked for, only this machine's own callers may do this.")


def require_operator(request: HttpRequest) -> None:
    """For what shows the server's work and changes nothing. Raises Forbidden."""
    if OPERATOR not in request.state.scopes:
        raise Forbidden("This needs an API key of scope admin.")


def require_adapters(request: HttpRequest) -> None:
    """For what loads or unloads what all tenants share. Raises Forbidden."""
    if ADAPTERS not in request.state.scopes:
        raise Forbidden("This changes what all tenants share: it needs an API key of scope admin.")


_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOCAL_ENDS = (".localhost", ".local", ".internal")
_PORTS = {"http": 80, "https": 443}


class Visitors:
    """Decides by headers alone. `hosts`: names that Host may be besides those that always mean this machine ("*": any;
    None: Host is not looked at). `origins`: pages that may call ("*": all)."""

    def __init__(self, hosts: Iterable[str] | None, origins: Iterable[str]) -> None:
        self._hosts = None if hosts is None or "*" in hosts else _known_hosts(hosts)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def check(self, method: str, headers: Headers) -> None:
        """Raises Forbidden."""
        host = headers.get("host", "")
        if self._hosts is not None and host and not self._is_known(_host_name(host)):
            raise Forbidden(
                f"This server is not known as {host[:200]!r}. If it should be, start it with --allowed-hosts NAME."
            )
        if method in _SAFE_METHODS or "*" in self._origins:
            return
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site", "").lower() == "cross-site":
                raise Forbidden("A page of another site may not call this server.")
        elif origin.lower() not in self._origins and not _is_own(origin, host):
            raise Forbidden(
                f"Pages of {origin[:200]!r} may not call this server. If they should, start it with "
                "--cors-origins ORIGIN."
            )

    def _is_known(self, name: str) -> bool:
        assert self._hosts is not None
        if name in self._hosts or name.endswith(_LOCAL_ENDS):
            return True
        if any(each.startswith("*.") and name.endswith(each[1:]) for each in self._hosts):
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return True


def _known_hosts(allowed: Iterable[str]) -> frozenset[str]:
    own = socket.gethostname().lower()
    return frozenset({"localhost", own, own.partition(".")[0], *(_host_name(name) for name in allowed)})


def _host_name(host: str) -> str:
    """Of "name", "name:port" or "[address]:port", in lower case and without a dot at the end."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() and ":" not in name else host).lower().rstrip(".")


def _is_own(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from what it calls `host`; a proxy may have taken TLS off on the way."""
    scheme, _, _ = origin.partition("://")
    page = _authority(origin)
    return page is not None and page == _authority(f"{scheme}://{host}")


def _authority(origin: str) -> tuple[str, int | None] | None:
    """Host and port; None for what is no web origin, such as "null"."""
    try:
        parts = urlsplit(origin)
        port = _PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:
        return None
    return (parts.hostname.rstrip("."), port) if parts.hostname else None
